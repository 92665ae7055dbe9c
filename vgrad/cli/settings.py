"""The arguments of a training run."""

import math
import os
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import vgrad_command
from vgrad import checks
from vgrad.cli import models
from vgrad.cli.models import Shape
from vgrad_command import NAMES, spelled

BATCH = 720
"""Samples in a batch, where the data have twice as many."""

_OF_PRIVACY = "epsilon delta max_norm noise max_batch_size reproducible_noise".split()


@dataclass(frozen=True)
class Settings(vgrad_command.Options):
    """The arguments of a training run, without the folder, each of its kind already.

    `batch_size` and `lr` are None, if not given, until `fitted` has seen the data.
    """

    def __post_init__(self) -> None:
        if self.without_privacy != (self.members > 1):
            raise ValueError(
                f"{'--without-privacy ' * self.without_privacy}--members "
                f"{self.members}: expected --without-privacy for an ensemble, and only "
                f"there. One model is trained with privacy, and without beside it; see "
                f"plain.jsonl."
            )
        device(self.device)

    @classmethod
    def started(cls, arguments: Namespace) -> "Settings":
        """Return the settings of a run that starts."""
        typed = _typed(arguments)
        for name in _OF_PRIVACY:
            if "without_privacy" in typed and name in typed:
                raise ValueError(
                    f"--without-privacy: expected none of the arguments of private "
                    f"training, got {spelled(name)}. Leave one of the two out."
                )
        return cls(**typed)

    @classmethod
    def recorded(
        cls, arguments: dict[str, Any], named: Namespace, *, command: str = "--resume"
    ) -> "Settings":
        """Return the settings in the file of a run; those given again are the same."""
        if arguments.keys() != {*NAMES}:
            raise ValueError(
                f"{command}: expected a run with the arguments {', '.join(NAMES)}, got "
                f"one with {checks.listed(arguments)}. It belongs to another version "
                f"of vgrad."
            )
        typed = _typed(named)
        for name, value in typed.items():
            if value != arguments[name]:
                raise ValueError(
                    f"{command}: expected {spelled(name)} {arguments[name]}, which "
                    f"the run was started with, got {value}. Leave it out, or start "
                    f"another run with --out."
                )
        models.check_named(command, arguments["model"], typed.get("model"))
        return cls(**arguments)

    def fitted(self, samples: int, shape: Shape) -> "Settings":
        """Choose the batch size and the rate, if not given, to fit the data."""
        # About half of them; tensor cores like multiples of eight.
        fitting = min(BATCH, 8 * math.ceil(samples / 16), samples)
        batch = fitting if self.batch_size is None else self.batch_size
        if batch > samples:
            raise ValueError(
                f"--batch-size {batch}: expected at most the {samples} training "
                f"samples that there are. Leave it out for batches of {fitting}."
            )
        # So the noise of a step, rate * multiplier * max_norm / batch, stays the same.
        rate = models.rate(self.model, shape) * min(1, batch / BATCH)
        lr = float(f"{rate:.2g}") if self.lr is None else self.lr
        return replace(self, batch_size=batch, lr=lr)

    def of_plan(self) -> str:
        """Return the options on which the plan of a private run depends, as typed."""
        names = (*_OF_PRIVACY[:-1], "epochs", "batch_size")
        return " ".join(f"{spelled(name)} {getattr(self, name)}" for name in names)


def _typed(arguments: Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(arguments).items() if key in NAMES}


def device(name: str) -> torch.device:
    """Return the device of this name; a ValueError if it is not here or fails."""
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"a device of type {device.type}")
        torch.zeros((), device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--device {name}: expected cpu, or a CUDA device that is here, such as "
            f"cuda:0, got: {reason}"
        ) from error
    return device


def folder_of(option: str, name: str) -> Path:
    """Return the path of a folder that is there or can be made."""
    if not name:
        raise ValueError(f"{option} '': expected the name of a folder, got none.")
    path = Path(name)
    above = (path, *path.absolute().parents)
    nearest = next(folder for folder in above if os.path.lexists(folder))
    if not nearest.is_dir():
        raise NotADirectoryError(
            f"{option} {name}: expected a folder, got {nearest}, which is none."
        )
    return path
