"""What a run leaves in its folder: the state it can go on from, and the model.

`state.safetensors` is the truth: every tensor of the training, the secret key included,
and a description of the run. The key reveals the noise, so only its owner may read the
file. `state.json` repeats the description for people. `model.safetensors` holds
parameters and buffers and is the only file meant for release. In the run of an ensemble
`ensemble.safetensors` and its description `ensemble.json` take its place. Nothing is
pickled.

Anybody can write a state and seal it. It may neither name a file that is not one of the
run's, nor claim a progress that its tensors and figures do not have: a run goes on only
after all of that has been checked here.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import overload

import torch
from torch import Tensor, nn

from vgrad import checks, files, tree
from vgrad.cli import metrics, models
from vgrad.cli.settings import TABLE, check, optional, several, shape_of
from vgrad.files import Description
from vgrad.functional.model import FunctionalModel, make_functional_with_buffers
from vgrad.typing import Buffers, Params, Tree
from vgrad_command import MOST_EPOCHS, TEXT, whole

STATE = "state.safetensors"
STATE_TEXT = "state.json"
STATES = (STATE, STATE_TEXT)
MODEL = "model.safetensors"

ENSEMBLE = "ensemble.safetensors"
ENSEMBLE_TEXT = "ensemble.json"

FILES = (*STATES, MODEL, ENSEMBLE, ENSEMBLE_TEXT)

_LONGEST_TEXT = 2**20
"""Bytes of a description, which has a few hundred."""

_MOST_IN_A_FILE = 2**20
"""Members, beyond which the size of an entry may not fit into 64 bits."""

STATE_KIND = "training state"
MODEL_KIND = "model"
ENSEMBLE_KIND = "ensemble"

_SECTIONS = ("arguments", "lengths", "data", "plan", "model", "machine", "forms")
"""Dictionaries in the description of every state."""


def save_state(folder: Path, state: Tree, description: Description) -> None:
    """Make this the state that a run goes on from, however it ends."""
    description = {"kind": STATE_KIND, **description}
    tensors = tree.state_dict(state)
    files.write_tensors(folder / STATE, tensors, description, private=True)
    files.replace(folder / STATE_TEXT, _text(description), private=True)


def read_state(folder: Path) -> tuple[dict[str, Tensor], Description]:
    """Read the tensors by name and the description. Raises as `files.read_tensors`."""
    return files.read_tensors(folder / STATE, STATE_KIND)


def check_said(before: Description) -> None:
    """Raise a ValueError if a state lacks what every state says."""
    kinds = {"step": whole(0), **dict.fromkeys(_SECTIONS, TABLE)}
    kinds["extended"] = optional(several(whole(1, MOST_EPOCHS)))
    check(STATE, before, kinds)


def check_members(tensors: Mapping[str, Tensor], members: int) -> None:
    """Raise a ValueError if an ensemble's state has more or fewer members.

    To make a template of as many as its description claims may take all memory.
    """
    plain = [t for name, t in tensors.items() if name.startswith(".plain.params")]
    if members > 1 and any(not t.numel() or t.shape[:1] != (members,) for t in plain):
        raise ValueError(f"{STATE}: expected {members} members, got another number.")


def restored(template: Tree, tensors: dict[str, Tensor]) -> Tree:
    """Put tensors that were read in the place of those of a template.

    Raises:
        ValueError: names, shapes or dtypes differ.
    """
    expected = tree.state_dict(template)
    tree.check_fit(STATE, expected, tensors)
    return tree.load_state_dict(template, tensors)


def refuse_differences(before: Description, now: Description) -> None:
    """Raise a ValueError if something is not as it was when the run started."""
    for section, entries in now.items():
        for name, value in entries.items():
            recorded = before[section].get(name)
            if recorded != value:
                raise ValueError(
                    f"--resume: expected {name} in {section} to be {recorded!r}, as "
                    f"when the run was started, got {value!r}. The numbers would "
                    f"differ; start another run with --out."
                )


def refuse_progress(
    folder: Path,
    before: Description,
    *,
    taken: set[int],
    ends: Sequence[int],
    names: Collection[str],
) -> None:
    """Raise if the states, or the figures in the folder, are not those of the step.

    `taken` are the steps that the states have taken, `ends` those at which an epoch
    ends, `names` the files that have figures.
    """
    path, step, lengths = folder / STATE, before["step"], before["lengths"]
    if taken != {step} or step not in (0, *ends):
        raise ValueError(
            f"{path}: expected states at the end of an epoch, after the {step} steps "
            f"that it claims, got some after {sorted(taken)}."
        )
    check(f"{path}, lengths", lengths, dict.fromkeys(names, whole(0)))
    if unknown := lengths.keys() - set(names):
        raise ValueError(
            f"{path}, lengths: expected {', '.join(names)}, got "
            f"{checks.listed(unknown)}, which no run writes to."
        )
    past = [end for end in ends if end <= step]
    for name in names:
        if [line.step for line in metrics.read(folder / name, lengths[name])] != past:
            raise ValueError(
                f"{folder / name}: expected one line for each of {len(past)} epochs, "
                f"got others. The file was changed after it was written."
            )


def save_model(
    folder: Path, params: Params, buffers: Buffers, description: Description
) -> None:
    """Write the model; the description needs `model`, a spec, and `shape`."""
    description = {"kind": MODEL_KIND, **description}
    files.write_tensors(folder / MODEL, {**params, **buffers}, description)


def save_members(
    folder: Path, params: Params, buffers: Buffers, description: Description
) -> None:
    """Write an ensemble `[E, ...]`; the description needs `members` too.

    The text comes first: the privacy that it says was spent is then never less than
    what the members in the other file have spent.
    """
    files.replace(folder / ENSEMBLE_TEXT, _text(description))
    said = {"kind": ENSEMBLE_KIND, "members": description["members"]}
    files.write_tensors(folder / ENSEMBLE, {**params, **buffers}, said)


def read_model(
    folder: Path, *, named: str | None = None, member: int | None = None
) -> tuple[FunctionalModel, Params, Buffers, Description]:
    """Rebuild a model, or an ensemble `[E, ...]`, in evaluation mode and on the CPU.

    `named` is the model as the caller names it, which only code from outside of this
    package needs, and `member` the one member of an ensemble to read. Nothing larger
    than the file is made from what the file says.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or does not fit the model.
    """
    if holds_ensemble(folder):
        path = folder / ENSEMBLE_TEXT
        description = _read_text(path)
        check(str(path), description, {"members": whole(1, _MOST_IN_A_FILE)})
        fmodel, *entries = _template(path, description, named)
        path, count = folder / ENSEMBLE, description["members"]
        tensors, said = files.read_tensors(path, ENSEMBLE_KIND)
        if said.get("members") != count:
            raise ValueError(
                f"{path}: expected {count} members, got {said.get('members')!r}."
            )
        if member is not None and member >= count:
            raise ValueError(
                f"{path}: expected a file with member {member}, got {count} members."
            )
        entries = [_blank(values, count) for values in entries]
    else:
        path = folder / MODEL
        tensors, description = files.read_tensors(path, MODEL_KIND)
        fmodel, *entries = _template(path, description, named)
    tree.check_fit(str(path), {**entries[0], **entries[1]}, tensors)
    rows = ... if member is None else member
    params, buffers = (
        {
            name: tensors[name][rows].clone().requires_grad_(like.requires_grad)
            for name, like in each.items()
        }
        for each in entries
    )
    return fmodel, params, buffers, description


def _read_text(path: Path) -> Description:
    """Read what the description of an ensemble says."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: expected the description of an ensemble, got no file."
        )
    try:
        with path.open("rb") as file:
            return files.from_json(file.read(_LONGEST_TEXT))
    except ValueError as error:
        raise ValueError(
            f"{path}: expected the description of an ensemble, got a damaged file "
            f"({error})."
        ) from error


def _template(
    path: Path, description: Description, named: str | None
) -> tuple[FunctionalModel, Params, Buffers]:
    """Make a model as a file describes it, with values of its own."""
    check(str(path), description, {"model": TEXT, "shape": TABLE})
    spec, shape = description["model"], shape_of(str(path), description["shape"])
    models.named_again(str(path), spec, named)
    own = spec in models.MODELS
    model = models.outline(spec, shape) if own else models.build(spec, shape, seed=0)
    fmodel, params, buffers = make_functional_with_buffers(model)
    return fmodel.eval(), params, buffers


def _blank(values: Mapping[str, Tensor], *axes: int) -> dict[str, Tensor]:
    """Make entries `[*axes, *shape]` on the CPU, without memory of their own."""
    return {
        name: torch.zeros((), dtype=t.dtype, requires_grad=t.requires_grad).expand(
            *axes, *t.shape
        )
        for name, t in values.items()
    }


def _text(description: Description) -> bytes:
    """Write a description for people to read."""
    return (json.dumps(description, indent=2) + "\n").encode()


def holds_ensemble(folder: Path) -> bool:
    """Tell whether a folder holds an ensemble; a ValueError if it holds a model too."""
    found = [name for name in (ENSEMBLE, ENSEMBLE_TEXT) if (folder / name).exists()]
    if found and (folder / MODEL).exists():
        raise ValueError(
            f"{folder}: expected the folder of one run, got {MODEL} and {found[0]}."
        )
    return bool(found)


@overload
def load(folder: str | Path, *, member: int, model: str | None = ...) -> nn.Module: ...


@overload
def load(
    folder: str | Path, *, member: None = ..., model: str | None = ...
) -> nn.Module | tuple[FunctionalModel, Params, Buffers]: ...


def load(
    folder: str | Path, *, member: int | None = None, model: str | None = None
) -> nn.Module | tuple[FunctionalModel, Params, Buffers]:
    """Rebuild what `python -m vgrad train` left in a folder, a model or an ensemble.

    A model is a module. An ensemble (`train --members E`) is `(fmodel, params,
    buffers)` with entries `[E, *shape]`, as `vgrad.stack` makes them. `member=i` reads
    one member of it alone, as a module. All are in evaluation mode and on the CPU, and
    their parameters require grad.

    The files hold tensors and text, and choose no code. To load a model that came from
    `module:factory`, pass that as `model`, if you trust the module: it is imported.

    Raises:
        FileNotFoundError: the folder holds no model.
        ValueError: a file is damaged, or not one of vgrad's, or the model cannot be
            built as it was, or is not the one that `model` names; or there is no such
            member.

    Example:
        >>> import tempfile
        >>> shape = models.Shape(channels=1, height=1, width=4, classes=3)
        >>> params = models.build("mlp", shape, seed=0).state_dict()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     description = {"model": "mlp", "shape": shape._asdict()}
        ...     save_model(Path(folder), params, {}, description)
        ...     model = load(folder)
        >>> model(torch.zeros(5, 1, 1, 4)).shape
        torch.Size([5, 3])
    """
    where = Path(folder)
    alone = not holds_ensemble(where)
    if member is not None:
        [member] = checks.whole("load", least=0, member=member)
        if alone and (where / MODEL).exists():
            raise ValueError(
                f"load(member={member}): expected the folder of an ensemble, got "
                f"{where}, which holds one model. Leave member out."
            )
    fmodel, params, buffers, _ = read_model(where, named=model, member=member)
    if alone or member is not None:
        return fmodel.to_module(params, buffers).eval()
    return fmodel, params, buffers
