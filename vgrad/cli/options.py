"""The arguments of all commands, each declared once: defaults, help and checks."""

import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from vgrad import checks
from vgrad.cli import models
from vgrad.cli.descriptions import FLAG, TEXT, Kind, check, number, whole

COMPILING = ("eager", "replay", "inductor")
"""What may run the steps."""

_OF_PRIVACY = ("epsilon", "delta", "max_norm", "reproducible_noise")
"""Arguments that have no meaning for a run without privacy."""

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
        720,
        "expected size of the Poisson batches; q is this over the number of "
        "training samples",
    )
    lr: float = _option(1.0, "learning rate of SGD")
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
        sizes = {"epsilon": self.epsilon, "max_norm": self.max_norm, "lr": self.lr}
        checks.positive("train", **sizes)
        checks.finite("train", **sizes)
        checks.between("train", 0, 1, delta=self.delta)
        counts = {"epochs": self.epochs, "batch_size": self.batch_size}
        checks.whole("train", least=1, **counts, members=self.members)
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


def folder(option: str, name: str) -> Path:
    """Return the path of a folder that is there or can be made.

    Raises:
        ValueError: there is no name.
        NotADirectoryError: something else has this name, or that of a folder above it.
    """
    if not name:
        raise ValueError(f"{option} '': expected the name of a folder, got none.")
    path = Path(name)
    above = (path, *path.absolute().parents)
    nearest = next(each for each in above if os.path.lexists(each))
    if not nearest.is_dir():
        raise NotADirectoryError(
            f"{option} {name}: expected a folder, got {nearest}, which is none."
        )
    return path


def add_train(parser: ArgumentParser) -> None:
    """Declare the arguments of `train`."""
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument(
        "--out", metavar="DIR", help="where to write the run; must not hold one yet"
    )
    folder.add_argument(
        "--resume",
        metavar="DIR",
        help="go on with the run in DIR, with its own arguments and the very same "
        "numbers; arguments given again must be equal, and --model module:factory must "
        "be given again: a file may not choose the code that runs",
    )
    # An absent argument leaves no entry, so that --resume can tell what was given.
    _declare(parser, [each.name for each in fields(Settings)], default=SUPPRESS)


def add_evaluate(parser: ArgumentParser) -> None:
    """Declare the arguments of `evaluate`."""
    parser.add_argument("folder", metavar="DIR", help="the folder of a run")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="the module:factory that the model was trained with, if it was: a file "
        "may not choose the code that runs",
    )
    _declare(parser, ["data", "device"])


def add_bench(parser: ArgumentParser) -> None:
    """Declare the arguments of `bench`."""
    parser.add_argument(
        "suites",
        metavar="SUITE",
        nargs="*",
        help="run only bench/test_SUITE.py, for instance: clipped optim",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="also write the figures to this JSON file, and the tables to a Markdown "
        "file of the same name",
    )


def add_experiment(parser: ArgumentParser) -> None:
    """Declare the arguments of `experiment`."""
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="+",
        help="per-sample, ensembles, jmp, mobilenet, tensor-cores, private, or all",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="the size of the articles, for a large GPU; otherwise one for minutes on "
        "a CPU",
    )
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="images in the place of the experiment's own: a source or file as `train` "
        "takes it, or a folder that has one of pictures for each class",
    )
    parser.add_argument(
        "--out",
        default="runs/experiments",
        metavar="DIR",
        help="where to write results, tables and figures; what an interrupted run has "
        "left there is gone on with (default: runs/experiments)",
    )
    _declare(parser, ["device"])


def add_rules(parser: ArgumentParser) -> None:
    """Declare the arguments of `rules`."""
    texts = {each.name: each.metadata["help"] for each in fields(Settings)}
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help=f"explain a private step of this model as well: {texts['model']}; a "
        f"module may register rules of its own",
    )
    parser.add_argument(
        "--alignment",
        action="store_true",
        help="with --model, also list its matrix products and what to pad so that "
        "tensor cores take them",
    )
    _declare(parser, ["data"])


def _declare(
    parser: ArgumentParser, names: Collection[str], *, default: str | None = None
) -> None:
    """Declare some of the settings, with their own defaults or another one for all."""
    for each in fields(Settings):
        if each.name not in names:
            continue
        more: dict[str, Any] = {"action": "store_true"}
        text = each.metadata["help"]
        if each.type is not bool:
            metavar = each.name.rpartition("_")[2].upper()
            more = {"type": each.type, "metavar": metavar}
            text += f" (default: {each.default})"
        parser.add_argument(
            "--" + each.name.replace("_", "-"),
            default=default or each.default,
            help=text,
            **more,
        )


def started(arguments: Namespace) -> Settings:
    """Return the settings of a run that starts.

    Raises:
        ValueError: as `Settings`, or arguments contradict one another.
    """
    found = given(arguments)
    idle = [name for name in _OF_PRIVACY if name in found]
    if "without_privacy" in found and idle:
        raise ValueError(
            f"--without-privacy: expected none of the arguments of private training, "
            f"got --{idle[0].replace('_', '-')}. Leave one of the two out."
        )
    return Settings(**found)


def given(arguments: Namespace) -> dict[str, Any]:
    """Return the settings that the user gave."""
    names = {each.name for each in fields(Settings)}
    return {key: value for key, value in vars(arguments).items() if key in names}


def recorded(arguments: Any, again: Mapping[str, Any]) -> Settings:
    """Return the settings of a run that goes on, as its file has them.

    Raises:
        ValueError: they are missing, or of another version; an argument given again
            differs; or they name code that has not been named again.
    """
    kinds = {each.name: _KINDS[each.type] for each in fields(Settings)}
    if not isinstance(arguments, dict) or arguments.keys() != kinds.keys():
        got = checks.listed(arguments) if isinstance(arguments, dict) else "none"
        raise ValueError(
            f"--resume: expected a run with the arguments {', '.join(kinds)}, got one "
            f"with {got}. It belongs to another version of vgrad."
        )
    check("--resume: arguments of the run", arguments, kinds)
    for name, value in again.items():
        if value != arguments[name]:
            raise ValueError(
                f"--resume: expected --{name.replace('_', '-')} {arguments[name]}, "
                f"which the run was started with, got {value}. Leave it out, or start "
                f"another run with --out."
            )
    models.named_again("--resume", arguments["model"], again.get("model"))
    return Settings(**arguments)
