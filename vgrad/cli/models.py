"""The models of the main job: three small nets by name, or a factory of yours.

None has BatchNorm, whose statistics mix samples. Tanh and average pooling keep the
gradients of single samples small, so that clipping takes less away. Images are
`[B, C, H, W]`.

Reference: Papernot et al., Tempered Sigmoid Activations for Deep Learning with
Differential Privacy, arXiv 2007.14191.
"""

import contextlib
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vgrad.process import ALONE

MOST_CLASSES = 2**16
_MOST_PARAMETERS = 2**29
"""Of a net of this package: 2 GiB in float32."""


class Shape(NamedTuple):
    """What a model is made for: the size of its images and the number of classes."""

    channels: int
    height: int
    width: int
    classes: int


def cnn(*, channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Two convolutions with tanh, average pooling between them, one linear layer."""
    _check_size("cnn", height, width, least=2)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * (height // 2) * (width // 2), classes),
    )


def mlp(*, channels: int, height: int, width: int, classes: int) -> nn.Module:
    """One hidden layer of 64 with tanh."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * width, 64),
        nn.Tanh(),
        nn.Linear(64, classes),
    )


class Residual(nn.Module):
    """`x + f(x)`, where f is two convolutions, each after a GroupNorm and a tanh."""

    def __init__(self, channels: int) -> None:
        """Make the layers."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(8, channels),
            nn.Tanh(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
            nn.Tanh(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum. [B, C, H, W] -> [B, C, H, W]."""
        return x + self.layers(x)


def resnet(*, channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Two residual blocks with GroupNorm at 16 and 32 channels, nine layers deep."""
    _check_size("resnet", height, width, least=4)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        Residual(16),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        Residual(32),
        nn.AvgPool2d(2),
        nn.GroupNorm(8, 32),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), classes),
    )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn": cnn,
    "mlp": mlp,
    "resnet": resnet,
}


def build(spec: str, shape: Shape, *, seed: int) -> nn.Module:
    """Make the model that `spec` names, initialised from `seed`, on the CPU.

    `spec` is a key of `MODELS` or `module:factory`. A factory is imported, with the
    current directory on the path, and called with the keyword arguments `channels`,
    `height`, `width` and `classes`. Torch's own generator is left as it was.

    Raises:
        ValueError: no model has this name, or the factory fails, or a net of this
            package would be too large.
        TypeError: the factory returns something else than a module.

    Example:
        >>> model = build("mlp", Shape(1, 8, 8, classes=10), seed=0)
        >>> model(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """
    with ALONE, torch.random.fork_rng(devices=[]):
        if spec in MODELS:
            outline(spec, shape)
        torch.manual_seed(seed)
        return MODELS[spec](**shape._asdict()) if spec in MODELS else _made(spec, shape)


def outline(spec: str, shape: Shape) -> nn.Module:
    """Make a net of this package without its values, on the device `meta`.

    Raises:
        ValueError: the images are too small for it, or it has too many parameters.

    Example:
        >>> sum(p.numel() for p in outline("mlp", Shape(1, 8, 8, 10)).parameters())
        4810
    """
    with torch.device("meta"):
        model = MODELS[spec](**shape._asdict())
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(
            f"--model {spec}: expected images and classes for which it has at most "
            f"{_MOST_PARAMETERS} parameters, got {count} for {tuple(shape)}. Use "
            f"smaller images, or a factory of your own."
        )
    return model


def named_again(where: str, spec: str, again: str | None) -> None:
    """Refuse a model that a file names, unless its code may run.

    Code of this package may. Any other is code that whoever wrote the file has chosen,
    so that the caller has to name it too.

    Raises:
        ValueError: the caller has not, or names another model.
    """
    if again is None and spec not in MODELS:
        raise ValueError(
            f"{where}: expected one of {', '.join(MODELS)}, got the model {spec!r}, "
            f"and a file may not choose the code that runs. If it is a factory that "
            f"you trust, name it: with --model, or vgrad.load(folder, model=...)."
        )
    if again not in (None, spec):
        raise ValueError(
            f"{where}: expected the model {again!r}, got {spec!r}. Name the one that "
            f"the file does, if you trust it."
        )


def source_digest(spec: str) -> str | None:
    """Hash the file that a factory is in; a net of this package has None.

    The factory has been imported by `build`.
    """
    if spec in MODELS:
        return None
    file = getattr(sys.modules[spec.partition(":")[0]], "__file__", None)
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _made(spec: str, shape: Shape) -> nn.Module:
    """Import a factory and call it."""
    try:
        with _current_directory_on_path():
            model = _factory(spec)(**shape._asdict())
    except Exception as error:
        # Code of the user's own may raise anything; the cause is kept.
        raise ValueError(
            f"--model {spec}: expected one of {', '.join(MODELS)} or a factory "
            f"module:name that takes channels, height, width and classes, got "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"--model {spec}: expected a factory that returns a torch.nn.Module, got a "
            f"{type(model).__name__}."
        )
    return model


def _factory(spec: str) -> Callable[..., nn.Module]:
    """Import what `module:name` names."""
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise ValueError("no such name.")
    return getattr(importlib.import_module(module), name)


@contextlib.contextmanager
def _current_directory_on_path() -> Iterator[None]:
    """Let imports find modules where the user is, and leave the path as it was."""
    before = list(sys.path)
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path[:] = before


def _check_size(model: str, height: int, width: int, *, least: int) -> None:
    """Refuse images that the poolings would shrink to nothing."""
    if min(height, width) < least:
        raise ValueError(
            f"--model {model}: expected at least {least} x {least} pixels, got "
            f"{height} x {width}. Use --model mlp."
        )
