"""What a run leaves in its folder: the state it can go on from, and the model.

`state.safetensors` is the truth: every tensor of the training, the secret key included,
and a description of the run. The key tells the noise, so it is for the owner alone.
`state.json` repeats the description for people. `model.safetensors` holds parameters
and buffers and is the only file meant for release; `ensemble.safetensors`, with what
`ensemble.json` says about it, takes its place in the run of an ensemble. Nothing is
pickled.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from vgrad import tree
from vgrad.cli import files, models
from vgrad.cli.descriptions import TABLE, TEXT, check, shape_of, whole
from vgrad.cli.files import Description
from vgrad.ensemble.store import load_ensemble, save_ensemble
from vgrad.functional.model import FunctionalModel, make_functional_with_buffers
from vgrad.typing import Buffers, Params, Tree

STATE = "state.safetensors"
STATE_TEXT = "state.json"
MODEL = "model.safetensors"

ENSEMBLE = "ensemble.safetensors"
ENSEMBLE_TEXT = "ensemble.json"

FILES = (STATE, STATE_TEXT, MODEL, ENSEMBLE, ENSEMBLE_TEXT)

_LONGEST_TEXT = 2**20
"""Bytes of a description, which has some hundreds."""

_MOST_IN_A_FILE = 2**20
"""Members, beyond which the size of an entry may not fit into 64 bits."""

STATE_KIND = "training state"
MODEL_KIND = "model"


def save_state(folder: Path, state: Tree, description: Description) -> None:
    """Make this the state that a run goes on from, however it ends."""
    description = {"kind": STATE_KIND, **description}
    tensors = tree.state_dict(state)
    files.write_tensors(folder / STATE, tensors, description, private=True)
    text = json.dumps(description, indent=2) + "\n"
    files.replace(folder / STATE_TEXT, text.encode(), private=True)


def read_state(folder: Path) -> tuple[dict[str, Tensor], Description]:
    """Read the tensors by name and the description.

    Raises:
        FileNotFoundError, ValueError: as `files.read_tensors`.
    """
    return files.read_tensors(folder / STATE, STATE_KIND)


def check_members(tensors: Mapping[str, Tensor], members: int) -> None:
    """Refuse tensors of an ensemble's state that are not those of so many members.

    Raises:
        ValueError: they are of fewer or more; to make these may take all memory.
    """
    plain = [t for name, t in tensors.items() if name.startswith(".plain.params")]
    if members > 1 and any(not t.numel() or t.shape[:1] != (members,) for t in plain):
        raise ValueError(f"{STATE}: expected {members} members, got another number.")


def restored(template: Tree, tensors: dict[str, Tensor]) -> Tree:
    """Put tensors that were read in the place of those of a template.

    Raises:
        ValueError: names, shapes or dtypes are others.
    """
    tree.check_fit(STATE, tree.state_dict(template), tensors)
    return tree.load_state_dict(template, tensors)


def save_model(
    folder: Path, params: Params, buffers: Buffers, description: Description
) -> None:
    """Write the model; the description needs `model`, a spec, and `shape`."""
    description = {"kind": MODEL_KIND, **description}
    files.write_tensors(folder / MODEL, {**params, **buffers}, description)


def read_model(
    folder: Path, *, named: str | None = None
) -> tuple[nn.Module, Description]:
    """Rebuild the model, in evaluation mode and on the CPU, with its description.

    `named` is the model as the caller names it, which code that is not of this package
    needs. Nothing larger than the file is made of what the file says.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: it is damaged, or does not fit the model.
    """
    tensors, description = files.read_tensors(folder / MODEL, MODEL_KIND)
    fmodel, params, buffers = _template(folder / MODEL, description, named)
    tree.check_fit(MODEL, {**params, **buffers}, tensors)
    values = fmodel.to_module(
        {name: tensors[name] for name in params},
        {name: tensors[name] for name in buffers},
    )
    return values.eval(), description


def _template(
    path: Path, description: Description, named: str | None
) -> tuple[FunctionalModel, Params, Buffers]:
    """Make a model as a file describes it, whose values are not those of the file."""
    check(str(path), description, {"model": TEXT, "shape": TABLE})
    spec, shape = description["model"], shape_of(str(path), description["shape"])
    models.named_again(str(path), spec, named)
    own = spec in models.MODELS
    model = models.outline(spec, shape) if own else models.build(spec, shape, seed=0)
    return make_functional_with_buffers(model)


def save_members(
    folder: Path, params: Params, buffers: Buffers, description: Description
) -> None:
    """Write an ensemble `[E, ...]`; the description needs `members` too.

    The text comes first: what it says was spent is then never less than what the
    members in the other file have spent.
    """
    text = json.dumps(description, indent=2) + "\n"
    files.replace(folder / ENSEMBLE_TEXT, text.encode())
    save_ensemble(folder / ENSEMBLE, params, buffers)


def read_members(
    folder: Path, *, named: str | None = None
) -> tuple[FunctionalModel, Params, Buffers, Description]:
    """Rebuild an ensemble, in evaluation mode and on the CPU, with its description.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or does not fit the model.
    """
    path = folder / ENSEMBLE_TEXT
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: expected the description of an ensemble, got no file."
        )
    try:
        with path.open("rb") as file:
            description = files.from_json(file.read(_LONGEST_TEXT))
    except ValueError as error:
        raise ValueError(
            f"{path}: expected the description of an ensemble, got a damaged file "
            f"({error})."
        ) from error
    check(str(path), description, {"members": whole(1, _MOST_IN_A_FILE)})
    fmodel, *entries = _template(path, description, named)
    templates = [_stacked(values, description["members"]) for values in entries]
    return fmodel.eval(), *load_ensemble(folder / ENSEMBLE, *templates), description


def _stacked(values: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Give entries a member axis and no memory of their own, `[count, *shape]`."""
    return {
        name: torch.zeros(
            (), dtype=value.dtype, requires_grad=value.requires_grad
        ).expand(count, *value.shape)
        for name, value in values.items()
    }


def holds_ensemble(folder: Path) -> bool:
    """Whether a folder is that of an ensemble's run.

    Raises:
        ValueError: it holds a model, too.
    """
    found = [name for name in (ENSEMBLE, ENSEMBLE_TEXT) if (folder / name).exists()]
    if found and (folder / MODEL).exists():
        raise ValueError(
            f"{folder}: expected the folder of one run, got {MODEL} and {found[0]}."
        )
    return bool(found)


def load(
    folder: str | Path, *, model: str | None = None
) -> nn.Module | tuple[FunctionalModel, Params, Buffers]:
    """Rebuild what `python -m vgrad train` left in a folder, a model or an ensemble.

    A model is a module. An ensemble is `(fmodel, params, buffers)` with entries
    `[E, *shape]`, as `vgrad.stack` makes them. Both are in evaluation mode and on the
    CPU, and their parameters require grad.

    The files hold tensors and text, and choose no code: a model that came from
    `module:factory` is loaded if that is passed as `model`, which imports the module.
    Pass it if you trust that module.

    Raises:
        FileNotFoundError: the folder holds no model.
        ValueError: a file is damaged, or not one of vgrad's, or the model cannot be
            built as it was, or is not the one that `model` names.

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
    if holds_ensemble(where):
        return read_members(where, named=model)[:3]
    return read_model(where, named=model)[0]
