"""The models of the main job, and the precision that they run in.

Tanh and average pooling keep gradients small, so that clipping removes less.

Reference: Papernot et al., Tempered Sigmoid Activations for Deep Learning with
Differential Privacy, arXiv 2007.14191.
"""

import hashlib
import importlib
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vgrad.functional.model import FunctionalModel
from vgrad.generators import kept_random_state
from vgrad.precision import policy_for
from vgrad.torch_private import kernels

POLICIES: dict[str, str | None] = {
    "float32": None,
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}
"""By the name of a precision; parameters and optimizer are float32 in each."""


class Shape(NamedTuple):
    """The size of the images that a model is made for, and the number of classes."""

    channels: int
    height: int
    width: int
    classes: int


def cnn(*, channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Two convolutions with tanh, average pooling between them, one linear layer."""
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


MODELS = {"cnn": cnn, "mlp": mlp, "resnet": resnet}

_LEAST = {"cnn": 2, "mlp": 1, "resnet": 4}
"""Pixels on each side, which the pooling of a net needs."""

_RATES = {"cnn": 1.0, "resnet": 0.1, "mlp": 0.25}

_PIXELS = 64
"""In the images for which the learning rates of `cnn` and `resnet` are meant."""


def rate(spec: str, shape: Shape) -> float:
    """Return a learning rate at which neither of the two runs diverges."""
    rate = _RATES[spec] if spec in MODELS else 0.1
    # They flatten the features of all pixels, with whose number the curvature grows.
    if spec in ("cnn", "resnet"):
        rate *= min(1, _PIXELS / (shape.height * shape.width))
    return rate


def build(spec: str, shape: Shape, *, seed: int) -> nn.Module:
    """Make the model that `spec` names, initialised from `seed`, on the CPU.

    `spec` is a key of `MODELS`, or `module:factory` on the path or in this directory.
    """
    smallest, path = _LEAST.get(spec, 0), list(sys.path)
    if min(shape.height, shape.width) < smallest:
        raise ValueError(
            f"--model {spec}: expected at least {smallest} x {smallest} pixels, got "
            f"{shape.height} x {shape.width}. Use --model mlp."
        )
    with kept_random_state(()):
        torch.manual_seed(seed)
        try:
            make = MODELS.get(spec)
            if make is None:
                sys.path.insert(0, "")
                module, _, name = spec.partition(":")
                if not (module and name):
                    raise ValueError("no such name.")
                make = getattr(importlib.import_module(module), name)
            model = make(**shape._asdict())
        except Exception as error:
            # A file may have any sizes, and code of the user's own raises anything.
            raise ValueError(
                f"--model {spec}: expected one of {', '.join(MODELS)} or a factory "
                f"module:name that takes channels, height, width and classes, got "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            sys.path[:] = path
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"--model {spec}: expected a factory that returns a torch.nn.Module, got a "
            f"{type(model).__name__}."
        )
    return model


def check_named(where: str, spec: str, named: str | None) -> None:
    """Refuse the model in a file, unless it is of this package or named by the user."""
    if named is None and spec not in MODELS:
        raise ValueError(
            f"{where}: expected one of {', '.join(MODELS)}, got the model {spec!r}, "
            f"and a file may not choose the code that runs. If it is a factory that "
            f"you trust, name it: with --model, or vgrad.cli.load(folder, model=...)."
        )
    if named not in (None, spec):
        raise ValueError(
            f"{where}: expected the model {named!r}, got {spec!r}. Name the one that "
            f"the file does, if you trust it."
        )


def source_digest(spec: str) -> str | None:
    """Hash the file of a factory that `build` imported; None for a net of vgrad."""
    if spec in MODELS:
        return None
    file = getattr(sys.modules[spec.partition(":")[0]], "__file__", None)
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def under(precision: str, fmodel: FunctionalModel) -> FunctionalModel:
    """Run a functional model in a precision."""
    policy = POLICIES[precision]
    return fmodel if policy is None else policy_for(fmodel, policy)


def warn_if_slow(precision: str, device: str) -> None:
    """Warn if a run in float16 or bfloat16 goes to a CPU that is slow in it."""
    fast = kernels.cpu_multiplies
    if torch.device(device).type == "cpu" and not fast(getattr(torch, precision)):
        advice = "bfloat16" if fast(torch.bfloat16) else "float32"
        warnings.warn(
            f"--precision {precision}: this CPU lacks the instructions for "
            f"{precision}. Convolutions and products of large matrices can take 50 "
            f"times as long as in float32, or longer. Use --precision {advice}, or a "
            f"GPU.",
            stacklevel=2,
        )


def instructions() -> list[str]:
    """List the CPU's instructions for float16 and bfloat16, which decide rounding."""
    # Older torch has no such function.
    present = getattr(torch.cpu, "get_capabilities", dict)()
    low = {name for name in present if "f16" in name or "fp16" in name}
    return sorted(name for name in low if present[name])
