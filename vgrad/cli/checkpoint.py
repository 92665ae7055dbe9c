"""The files of a run: the state it can go on from, the model, and the figures.

The folder `state` has all tensors, the secret key included, which reveals the noise.
`model.safetensors` is for release, `ensemble.safetensors` has no privacy;
figures are computed without noise, and are not. Nothing is pickled.
"""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

from torch import nn

from vgrad import checks, files, tree
from vgrad.cli import models
from vgrad.cli.models import Shape
from vgrad.cli.settings import Settings, folder_of
from vgrad.files import Description
from vgrad.functional.model import FunctionalModel, make_functional_with_buffers
from vgrad.training import saved
from vgrad.typing import Buffers, Params

STATE = "state"
MODEL = "model.safetensors"
ENSEMBLE = "ensemble.safetensors"

FIGURES = {"private": "metrics.jsonl", "plain": "plain.jsonl"}
"""A line of JSON for each epoch of the two runs, private and plain SGD."""

FILES = (f"{STATE}/{saved.META}", MODEL, ENSEMBLE, *FIGURES.values())


class States(NamedTuple):
    """The states of a run, as the file names them; () where there is none."""

    private: Any = ()
    plain: Any = ()


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

    def line(self) -> str:
        """Return the figures as JSON, without optional ones that are absent."""
        entries = self._asdict().items()
        defaults = self._field_defaults
        present = {n: x for n, x in entries if x is not None or n not in defaults}
        return json.dumps(present, allow_nan=False)


Figures = Mapping[str, Sequence[Record]]
"""The records of the private and of the plain run, if each is trained."""


def save(
    folder: Path, states: States, figures: Figures, description: Description
) -> None:
    """Make this the state that a run goes on from, and write its figures as lines."""
    named = {run: [x._asdict() for x in records] for run, records in figures.items()}
    settings = {**description, "figures": named}
    saved.save(folder / STATE, states, settings=settings)
    for run, records in figures.items():
        text = "".join(f"{record.line()}\n" for record in records)
        files.replace(folder / FIGURES[run], text.encode(), private=True)


def load_states(
    folder: Path, like: States, description: Description
) -> tuple[States, dict[str, list[Record]]]:
    """Read states and figures; a ValueError if an entry of the description changed."""
    states = saved.load(folder / STATE, like, settings=description)
    figures = saved.read_meta(folder / STATE).settings["figures"]
    return states, {run: [Record(**x) for x in lines] for run, lines in figures.items()}


def described(command: str, arguments: Namespace) -> tuple[Path, Settings, Description]:
    """Return folder, settings and description of the run that a command is for."""
    folder = folder_of(command, arguments.folder)
    before = saved.read_meta(folder / STATE).settings
    model = arguments.model
    named = Namespace() if model is None else Namespace(model=model)
    settings = Settings.recorded(before["arguments"], named, command=command)
    return folder, settings, before


# Models.


def save_model(
    folder: Path, params: Params, buffers: Buffers, description: Description
) -> None:
    """Write a model, or an ensemble `[E, ...]`, by the `members` of its description."""
    name = ENSEMBLE if description["members"] > 1 else MODEL
    metadata = {"kind": "model", **description}
    files.write_tensors(folder / name, {**params, **buffers}, metadata)


def read_model(
    folder: Path, *, named: str | None = None, member: int | None = None
) -> tuple[FunctionalModel, Params, Buffers, Description]:
    """Rebuild a model, or an ensemble `[E, ...]`, in evaluation mode and on the CPU.

    `named` is the model as the caller names it, which a factory of the user's needs.
    """
    present = [name for name in (MODEL, ENSEMBLE) if (folder / name).exists()]
    if len(present) > 1:
        raise ValueError(
            f"{folder}: expected the folder of one run, got {' and '.join(present)}."
        )
    path = folder / (*present, MODEL)[0]
    tensors, description = files.read_tensors(path, "model")
    count = description["members"]
    if member is not None and (count == 1 or member >= count):
        advice = " Leave member out." if count == 1 else ""
        raise ValueError(
            f"load(member={member}): expected an ensemble with this member, got "
            f"{path}, which holds {count}.{advice}"
        )
    spec, shape = description["model"], Shape(**description["shape"])
    models.check_named(str(path), spec, named)
    model = models.build(spec, shape, seed=0)
    fmodel, params, buffers = make_functional_with_buffers(model)
    one = tensors
    if count > 1:
        one = {name: tensor[0] for name, tensor in tensors.items()}
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
        >>> description = {"model": "mlp", "shape": shape._asdict(), "members": 1}
        >>> with tempfile.TemporaryDirectory() as folder:
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
    if member is not None or description["members"] == 1:
        return fmodel.to_module(params, buffers).eval()
    return fmodel, params, buffers
