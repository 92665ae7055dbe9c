"""What a run leaves in its folder: the state it can go on from, and the model.

`state.safetensors` is the truth: every tensor of the training, generators included, and
a description of the run. Generator states tell the noise, so it is for the owner alone.
`state.json` repeats the description for people. `model.safetensors` holds parameters
and buffers and is the only file meant for release. Nothing is pickled.
"""

import json
from pathlib import Path

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from vgrad import checks
from vgrad.functional import make_functional_with_buffers
from vgrad.job import files, models
from vgrad.job.files import Description
from vgrad.job.models import Shape
from vgrad.typing import Buffers, Params, Tree

STATE = "state.safetensors"
STATE_TEXT = "state.json"
MODEL = "model.safetensors"

FILES = (STATE, STATE_TEXT, MODEL)

STATE_KIND = "training state"
MODEL_KIND = "model"


def save_state(folder: Path, state: Tree, description: Description) -> None:
    """Make this the state that a run goes on from, however it ends."""
    description = {"kind": STATE_KIND, **description}
    files.write_tensors(folder / STATE, _named(state), description, private=True)
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
    names = _named(template)
    _check_fit(STATE, names, tensors)
    spec = pytree.tree_structure(template)
    leaves = [tensors[name].to(tensor.device) for name, tensor in names.items()]
    return pytree.tree_unflatten(leaves, spec)


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
    _check_fit(MODEL, {**params, **buffers}, tensors)
    values = fmodel.to_module(
        {name: tensors[name] for name in params},
        {name: tensors[name] for name in buffers},
    )
    return values.eval(), description


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


def _check_fit(
    file: str, expected: dict[str, Tensor], given: dict[str, Tensor]
) -> None:
    """Refuse tensors that would not fit the model: its code is another by now."""
    checks.same_names(file, expected, given)
    shapes = {name: tensor.shape for name, tensor in expected.items()}
    checks.same_shapes(file, shapes, given)
    for name, tensor in expected.items():
        if given[name].dtype != tensor.dtype:
            raise ValueError(
                f"{file}: expected {tensor.dtype} in {name!r}, got "
                f"{given[name].dtype}. Was the model's code changed?"
            )


def _named(state: Tree) -> dict[str, Tensor]:
    """Name every tensor of a tree by its place."""
    leaves, _ = pytree.tree_flatten_with_path(state)
    return {pytree.keystr(path): leaf for path, leaf in leaves}
