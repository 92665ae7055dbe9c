"""The files of a run: the state it can go on from, the model, and the figures.

`state.safetensors` has all tensors, the secret key included, which reveals the noise.
`model.safetensors` is for release, `ensemble.safetensors` has no privacy;
figures are computed without noise, and are not. Nothing is pickled.
"""

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple, overload

from torch import Tensor, nn

from vgrad import checks, files, tree
from vgrad.cli import models
from vgrad.cli.models import Shape
from vgrad.cli.settings import Settings, folder_of
from vgrad.files import Description
from vgrad.functional.model import FunctionalModel, make_functional_with_buffers
from vgrad.training.state import with_history
from vgrad.typing import Buffers, Params, Tree

STATE = "state.safetensors"
STATE_TEXT = "state.json"
STATES = (STATE, STATE_TEXT)
MODEL = "model.safetensors"
ENSEMBLE = "ensemble.safetensors"
ENSEMBLE_TEXT = "ensemble.json"
FILES = (*STATES, MODEL, ENSEMBLE, ENSEMBLE_TEXT)

FIGURES = {"private": "metrics.jsonl", "plain": "plain.jsonl"}
"""A line of JSON for each epoch of the two runs, private and plain SGD."""

_STATE_KIND = "training state"

# States.


class States(NamedTuple):
    """The states of a run, as the file names them; () where there is none."""

    private: Any = ()
    plain: Any = ()


def save_state(folder: Path, state: Tree, description: Description) -> None:
    """Make this the state that a run goes on from; a text repeats its description."""
    description = {"kind": _STATE_KIND, **description}
    tensors = tree.state_dict(state)
    files.write_tensors(folder / STATE, tensors, description, private=True)
    files.replace(folder / STATE_TEXT, _text(description), private=True)


def read_state(folder: Path) -> tuple[dict[str, Tensor], Description]:
    """Read the tensors by name and the description. Raises as `files.read_tensors`."""
    return files.read_tensors(folder / STATE, _STATE_KIND)


def described(command: str, arguments: Namespace) -> tuple[Path, Settings, Description]:
    """Return folder, settings and description of the run that a command is for."""
    folder = folder_of(command, arguments.folder)
    _, before = read_state(folder)
    model = arguments.model
    named = Namespace() if model is None else Namespace(model=model)
    settings = Settings.recorded(before["arguments"], named, command=command)
    return folder, settings, before


def restored(template: Tree, tensors: dict[str, Tensor]) -> Tree:
    """Return a template with the tensors read; a ValueError if they do not fit."""
    template = with_history(template, tensors)
    tree.check_fit(STATE, tree.state_dict(template), tensors)
    return tree.load_state_dict(template, tensors)


def check_same(before: Description, now: Description) -> None:
    """Raise a ValueError if an entry is not as it was when the run started."""
    for section, entries in now.items():
        for name, value in entries.items():
            recorded = before[section].get(name)
            if recorded != value:
                raise ValueError(
                    f"--resume: expected {name} in {section} to be {recorded!r}, as "
                    f"when the run was started, got {value!r}. The numbers would "
                    f"differ; start another run with --out."
                )


# Figures.


class Record(NamedTuple):
    """The figures after one epoch; None stands for NaN, infinity and no figure."""

    step: int  # how many have been taken
    loss: float | None  # mean over the samples of the epoch, and over the members
    test_accuracy: float
    epsilon: float | None  # spent so far
    samples_per_second: float  # of training alone, all members together
    loss_scale: float | None = None  # of the next step, the smallest of the members
    skipped: int | None = None  # steps without a finite gradient; not of private ones
    member_accuracies: list[float] | None = None


def append(path: Path, record: Record) -> int:
    """Add a line, wait until it is on the disk, and return the length of the file."""
    entries = {
        name: value
        for name, value in record._asdict().items()
        if value is not None or name not in Record._field_defaults
    }

    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with open(descriptor, "a", encoding="ascii") as file:
        file.write(json.dumps(entries, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def cut(path: Path, length: int) -> None:
    """Cut off the lines of steps after the saved state."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(length)
            os.fsync(file.fileno())


def read(path: Path, length: int) -> list[Record]:
    """Read the first `length` bytes, which are the lines of the saved state."""
    content = path.read_bytes()[:length] if path.exists() else b""
    if len(content) < length:
        raise ValueError(
            f"{path}: expected the {length} bytes of the saved state, got "
            f"{len(content)}. The file was changed after it was written."
        )
    try:
        return [Record(**files.from_json(line)) for line in content.splitlines()]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected figures of a run, got {error}.") from error


# Models.


def save_model(
    folder: Path, params: Params, buffers: Buffers, description: Description
) -> None:
    """Write a model, or an ensemble `[E, ...]`, whose description has `members`."""
    name, metadata = MODEL, {"kind": "model", **description}
    if "members" in description:
        # First: it never claims less privacy spent than the members have.
        files.replace(folder / ENSEMBLE_TEXT, _text(description))
        name = ENSEMBLE
        metadata = {"kind": "ensemble", "members": description["members"]}
    files.write_tensors(folder / name, {**params, **buffers}, metadata)


def read_model(
    folder: Path, *, named: str | None = None, member: int | None = None
) -> tuple[FunctionalModel, Params, Buffers, Description]:
    """Rebuild a model, or an ensemble `[E, ...]`, in evaluation mode and on the CPU.

    `named` is the model as the caller names it, which a factory of the user's needs.
    """
    path, text = folder / MODEL, folder / MODEL
    if names := [n for n in (ENSEMBLE, ENSEMBLE_TEXT) if (folder / n).exists()]:
        if path.exists():
            raise ValueError(
                f"{folder}: expected the folder of one run, got {MODEL} and {names[0]}."
            )
        path, text = folder / ENSEMBLE, folder / ENSEMBLE_TEXT
        if not text.is_file():
            raise FileNotFoundError(
                f"{text}: expected the description of an ensemble, got no file."
            )
        try:
            description = files.from_json(text.read_bytes())
        except ValueError as error:
            raise ValueError(
                f"{text}: expected the description of an ensemble, got {error}."
            ) from error
        tensors, about = files.read_tensors(path, "ensemble")
        count = about["members"]
        if member is not None and member >= count:
            raise ValueError(
                f"{path}: expected a file with member {member}, got {count} members."
            )
        one = {name: tensor[0] for name, tensor in tensors.items()}
    else:
        tensors, description = files.read_tensors(path, "model")
        if member is not None:
            raise ValueError(
                f"load(member={member}): expected the folder of an ensemble, got "
                f"{folder}, which holds one model. Leave member out."
            )
        one = tensors
    spec, shape = description["model"], Shape(**description["shape"])
    models.check_named(str(text), spec, named)
    model = models.build(spec, shape, seed=0)
    fmodel, params, buffers = make_functional_with_buffers(model)
    tree.check_fit(str(path), {**params, **buffers}, one)
    rows = ... if member is None else member
    params, buffers = (
        {
            name: tensors[name][rows].clone().requires_grad_(like.requires_grad)
            for name, like in entries.items()
        }
        for entries in (params, buffers)
    )
    return fmodel.eval(), params, buffers, description


def _text(description: Description) -> bytes:
    return (json.dumps(description, indent=2) + "\n").encode()


@overload
def load(folder: str | Path, *, member: int, model: str | None = ...) -> nn.Module: ...


@overload
def load(
    folder: str | Path, *, member: None = ..., model: str | None = ...
) -> nn.Module | tuple[FunctionalModel, Params, Buffers]: ...


def load(
    folder: str | Path, *, member: int | None = None, model: str | None = None
) -> nn.Module | tuple[FunctionalModel, Params, Buffers]:
    """Rebuild the model or the ensemble that `python -m vgrad train` left in a folder.

    A model is a module. An ensemble (`train --members E`) is `(fmodel, params,
    buffers)` with entries `[E, *shape]`, as `vgrad.stack` makes them. `member=i` reads
    one member of it alone, as a module. All are in evaluation mode and on the CPU, and
    their parameters require grad.

    The files hold tensors and text, and choose no code. To load a model that came from
    `module:factory`, pass that as `model`, if you trust the module: it is imported.

    Raises:
        FileNotFoundError: the folder holds no model.
        ValueError: a file is damaged, or does not fit the model or the arguments.

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
    if member is not None:
        [member] = checks.integers("load", minimum=0, member=member)
    fmodel, params, buffers, description = read_model(
        Path(folder), named=model, member=member
    )
    if member is not None or "members" not in description:
        return fmodel.to_module(params, buffers).eval()
    return fmodel, params, buffers
