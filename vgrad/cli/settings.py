"""The arguments of a training run: defaults, ranges, and how a file records them."""

import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from vgrad import checks
from vgrad.cli import models
from vgrad.cli.descriptions import FLAG, TEXT, Kind, check, number, whole

COMPILING = ("eager", "replay", "inductor")
"""What may run the steps."""

_OF_PRIVACY = ("epsilon", "delta", "max_norm", "reproducible_noise")
"""Arguments that have no meaning for a run without privacy."""

_BATCH = 720
"""Samples in a batch, where the data have twice as many."""

_MOST = {
    "epochs": (10**6, "as the run is saved after each"),
    "members": (10**4, "as all of them are in memory"),
}
"""How large an argument may be, and why."""

_KINDS: Mapping[Any, Kind] = {str: TEXT, bool: FLAG, int: whole(), float: number()}
"""What an argument of a type is in a file."""


def _option(default: Any, text: str) -> Any:
    """Declare an argument with its help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """The arguments of a training run, without the folder.

    `batch_size` and `lr` are None, if not given, until `fitted` has seen the data.

    Raises:
        ValueError: an argument is outside its range, or no such device is here.
    """

    data: str = _option(
        "digits",
        "digits (with scikit-learn), mnist, cifar10 (through torchvision) or an .npz "
        "file with x_train, y_train, x_test, y_test and, optionally, classes",
    )
    model: str = _option(
        "cnn",
        "cnn, mlp, resnet, or module:factory, called with channels, height, width and "
        "classes",
    )
    members: int = _option(
        1,
        "how many models to train; more than one make a deep ensemble, whose members "
        "differ in initialisation and batches",
    )
    without_privacy: bool = _option(
        False, "train the ensemble without privacy alone, not one with it beside it"
    )
    epsilon: float = _option(3.0, "what the whole run may spend, all members together")
    delta: float = _option(
        1e-5,
        "probability that goes with epsilon; keep it far below one over the number of "
        "training samples",
    )
    max_norm: float = _option(2.0, "L2 norm to which each sample's gradient is clipped")
    epochs: int = _option(50, "passes over the data; one is 1 / q steps")
    batch_size: int = _option(
        None,
        "expected size of the Poisson batches; q is this over the number of training "
        f"samples (default: {_BATCH}, or about half of the samples if that is less)",
    )
    lr: float = _option(
        None,
        "learning rate of SGD (default: "
        + ", ".join(f"{rate:g} for {name}" for name, rate in models.RATES.items())
        + f"; less, in proportion, for batches below {_BATCH}, and with cnn and resnet "
        "for images larger than 8 x 8)",
    )
    precision: str = _option(
        "float32",
        "float32, bfloat16 or float16: what forward and backward pass compute in; "
        "parameters, clipping, noise and optimizer stay in float32",
    )
    compile: str = _option(
        "eager",
        "replay, which runs captured steps with the very numbers of eager mode on "
        "batches filled up to a few sizes, inductor, which compiles them for minutes, "
        "or eager",
    )
    device: str = _option("cpu", "cpu, cuda, cuda:1, ...")
    seed: int = _option(
        0,
        "fixes the split of digits, the initialisation and the run without privacy; "
        "never the noise",
    )
    reproducible_noise: bool = _option(
        False, "let the seed fix batches and noise too; epsilon may then not be claimed"
    )

    @property
    def private(self) -> bool:
        """Whether anything is trained with privacy."""
        return not self.without_privacy

    def __post_init__(self) -> None:
        """Check the ranges."""
        sizes = {"epsilon": self.epsilon, "max_norm": self.max_norm}
        counts = {"epochs": self.epochs, "members": self.members}
        if self.lr is not None:
            sizes["lr"] = self.lr
        if self.batch_size is not None:
            counts["batch_size"] = self.batch_size
        checks.positive("train", **sizes)
        checks.finite("train", **sizes)
        checks.between("train", 0, 1, delta=self.delta)
        checks.whole("train", least=1, **counts)
        for name, (most, reason) in _MOST.items():
            if getattr(self, name) > most:
                raise ValueError(
                    f"--{name} {getattr(self, name)}: expected at most {most}, "
                    f"{reason}."
                )
        if self.without_privacy and self.members == 1:
            raise ValueError(
                "--without-privacy: expected --members 2 or more with it, got one "
                "model. A run of one model trains it with privacy, and without beside "
                "it; see plain.jsonl."
            )
        checks.one_of("train", models.POLICIES, precision=self.precision)
        checks.one_of("train", COMPILING, compile=self.compile)
        # Torch's generators on the CPU use 32 bits of a seed.
        checks.between("train", -1, 2**32, seed=self.seed)
        device(self.device)

    @classmethod
    def started(cls, arguments: Namespace) -> "Settings":
        """Return the settings of a run that starts.

        Raises:
            ValueError: as `Settings`, or arguments contradict one another.
        """
        found = _given(arguments)
        idle = [name for name in _OF_PRIVACY if name in found]
        if "without_privacy" in found and idle:
            raise ValueError(
                f"--without-privacy: expected none of the arguments of private "
                f"training, got --{idle[0].replace('_', '-')}. Leave one of the two "
                f"out."
            )
        return cls(**found)

    @classmethod
    def recorded(cls, arguments: Any, again: Namespace) -> "Settings":
        """Return the settings of a run that goes on, as its file has them.

        Raises:
            ValueError: they are missing, or of another version; an argument given again
                differs; or they name code that has not been named again.
        """
        kinds = {each.name: _KINDS[each.type] for each in fields(cls)}
        if not isinstance(arguments, dict) or arguments.keys() != kinds.keys():
            got = checks.listed(arguments) if isinstance(arguments, dict) else "none"
            raise ValueError(
                f"--resume: expected a run with the arguments {', '.join(kinds)}, got "
                f"one with {got}. It belongs to another version of vgrad."
            )
        check("--resume: arguments of the run", arguments, kinds)
        given = _given(again)
        for name, value in given.items():
            if value != arguments[name]:
                raise ValueError(
                    f"--resume: expected --{name.replace('_', '-')} {arguments[name]}, "
                    f"which the run was started with, got {value}. Leave it out, or "
                    f"start another run with --out."
                )
        models.named_again("--resume", arguments["model"], given.get("model"))
        return cls(**arguments)

    def fitted(self, samples: int, shape: models.Shape) -> "Settings":
        """Choose the size of batches and the rate, if not given, to fit the data.

        With batches below the usual size the rate shrinks as they do, so that the noise
        of a step, rate * multiplier * max_norm / batch, stays about the same.

        Raises:
            ValueError: a batch has more samples than there are.
        """
        # About half of them; tensor cores like multiples of eight.
        fitting = min(_BATCH, 8 * math.ceil(samples / 16), samples)
        batch = fitting if self.batch_size is None else self.batch_size
        if batch > samples:
            raise ValueError(
                f"--batch-size {batch}: expected at most the {samples} training "
                f"samples that there are. Leave it out for batches of {fitting}."
            )
        rate = models.rate(self.model, shape) * min(1, batch / _BATCH)
        lr = float(f"{rate:.2g}") if self.lr is None else self.lr
        return replace(self, batch_size=batch, lr=lr)


def device(name: str) -> torch.device:
    """Return the device of this name; a ValueError if it is not here or fails."""
    try:
        found = torch.device(name)
        if found.type not in ("cpu", "cuda"):
            raise RuntimeError(f"a device of type {found.type}")
        torch.zeros((), device=found).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--device {name}: expected cpu, or a CUDA device that is here, such as "
            f"cuda:0, got: {reason}"
        ) from error
    return found


def _given(arguments: Namespace) -> dict[str, Any]:
    """Return the settings that the user gave."""
    names = {each.name for each in fields(Settings)}
    return {key: value for key, value in vars(arguments).items() if key in names}
