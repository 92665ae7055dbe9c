"""What a run leaves in its folder: the state it can go on from, and the model.

`state.safetensors` is the truth: every tensor of the training, the secret key included,
and a description of the run. The key tells the noise, so it is for the owner alone.
`state.json` repeats the description for people. `model.safetensors` holds parameters
and buffers and is the only file meant for release; `ensemble.safetensors`, with what
`ensemble.json` says about it, takes its place in the run of an ensemble. Nothing is
pickled.
"""

import json
from pathlib import Path

from torch import Tensor, nn

from vgrad import tree
from vgrad.ensemble.store import load_ensemble, save_ensemble
from vgrad.functional import FunctionalModel, make_functional_with_buffers
from vgrad.job import files, models
from vgrad.job.files import Description
from vgrad.job.models import Shape
from vgrad.typing import Buffers, Params, Tree

STATE = "state.safetensors"
STATE_TEXT = "state.json"
MODEL = "model.safetensors"

ENSEMBLE = "ensemble.safetensors"
ENSEMBLE_TEXT = "ensemble.json"

FILES = (STATE, STATE_TEXT, MODEL, ENSEMBLE, ENSEMBLE_TEXT)

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


def read_model(folder: Path) -> tuple[nn.Module, Description]:
    """Rebuild the model, in evaluation mode and on the CPU, with its description."""
    tensors, description = files.read_tensors(folder / MODEL, MODEL_KIND)
    model = models.build(description["model"], Shape(**description["shape"]), seed=0)
    fmodel, params, buffers = make_functional_with_buffers(model)
    tree.check_fit(MODEL, {**params, **buffers}, tensors)
    values = fmodel.to_module(
        {name: tensors[name] for name in params},
        {name: tensors[name] for name in buffers},
    )
    return values.eval(), description


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


def read_members(folder: Path) -> tuple[FunctionalModel, Params, Buffers, Description]:
    """Rebuild an ensemble, in evaluation mode and on the CPU, with its description.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or does not fit the model.
    """
    path = folder / ENSEMBLE_TEXT
    try:
        description = json.loads(path.read_text())
        spec, shape = description["model"], Shape(**description["shape"])
        count = description["members"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected the description of an ensemble, got a damaged file "
            f"({type(error).__name__}: {error})."
        ) from error
    fmodel, params, buffers = make_functional_with_buffers(
        models.build(spec, shape, seed=0), disable_autograd_tracking=True
    )
    templates = [
        {name: value.expand(count, *value.shape) for name, value in values.items()}
        for values in (params, buffers)
    ]
    return fmodel.eval(), *load_ensemble(folder / ENSEMBLE, *templates), description


def load(folder: str | Path) -> nn.Module:
    """Rebuild the model that `python -m vgrad train` left in a folder.

    It is in evaluation mode and on the CPU. A model that came from `module:factory` is
    made by that factory, which is imported, so open files of that kind only from people
    you trust; the file itself holds tensors and text and runs nothing.

    Raises:
        FileNotFoundError: the folder holds no model.
        ValueError: the file is damaged, or not one of vgrad's, or the model cannot be
            built as it was.

    Example:
        >>> import tempfile
        >>> shape = Shape(channels=1, height=1, width=4, classes=3)
        >>> params = models.build("mlp", shape, seed=0).state_dict()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     description = {"model": "mlp", "shape": shape._asdict()}
        ...     save_model(Path(folder), params, {}, description)
        ...     model = load(folder)
        >>> model(torch.zeros(5, 1, 1, 4)).shape
        torch.Size([5, 3])
    """
    return read_model(Path(folder))[0]
