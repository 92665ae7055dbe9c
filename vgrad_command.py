"""The command `vgrad`: its options, their ranges and its help, without torch.

`import vgrad` takes the second and a half that torch takes. So this module lies outside
of the package, needs the standard library alone, and imports the package to run.
"""

import math
import re
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from importlib import metadata
from typing import Any, NoReturn

PRECISIONS = ("float32", "bfloat16", "float16")
COMPILING = ("eager", "replay", "inductor")
COMMANDS = {
    "train": "Train a classifier with differential privacy, and one without beside it. "
    "model.safetensors is the only file meant for release; figures and the picture "
    "come from the private data without noise.",
    "evaluate": "Print the accuracy of the model in a folder on held-out data.",
    "audit": "Bound from below how much the private step of a run spends. The exit "
    "status is 1 if it spends more than it claims.",
}


def reader(convert: Callable, holds: Callable, words: str) -> Any:
    """Return a function that reads values of an option, and refuses others."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if holds(value := convert(text)):
                return value
        raise ArgumentTypeError(f"expected {words}, got {text!r}")

    return read


def whole(least: int, most: int) -> Any:
    """Read a whole number within bounds, which are included."""
    words = f"a whole number from {least} to {most}"
    return reader(int, lambda value: least <= value <= most, words)


def one_of(*names: str) -> Any:
    """Read one of these names."""
    return reader(str, lambda value: value in names, f"one of {', '.join(names)}")


POSITIVE = reader(float, lambda x: 0 < x < math.inf, "a finite number above 0")
SHARE = reader(float, lambda x: 0 < x < 1, "a number above 0 and below 1")
_SCHEME = re.compile("independent|(bisr|band-inv-mf|band-mf|blt):[1-9][0-9]{0,2}")
SCHEME = reader(str, _SCHEME.fullmatch, "independent, band-mf:4, bisr:4 or the like")
_LARGEST = re.compile("none|auto|[1-9][0-9]{0,9}")
LARGEST = reader(str, _LARGEST.fullmatch, "a whole number above zero, auto or none")


def _option(default: Any, read: Any, text: str) -> Any:
    return field(default=default, metadata={"read": read, "help": text})


@dataclass(frozen=True)
class Options:
    """The options of a training run, without the folder."""

    data: str = _option("digits", str, "digits, mnist, cifar10 or an .npz file")
    model: str = _option("cnn", str, "cnn, mlp, resnet or module:factory")
    members: int = _option(1, whole(1, 10**4), "models; several are a deep ensemble")
    without_privacy: bool = _option(False, None, "for ensembles, which have none")
    epsilon: float = _option(3.0, POSITIVE, "the budget of the whole run")
    delta: float = _option(1e-5, SHARE, "the probability that goes with epsilon")
    max_norm: float = _option(2.0, POSITIVE, "norm to which gradients are clipped")
    noise: str = _option("independent", SCHEME, "or band-mf:4, bisr:4, blt:2, ...")
    max_batch_size: str = _option("none", LARGEST, "largest batch, a number or auto")
    epochs: int = _option(50, whole(1, 10**6), "passes over the data")
    batch_size: int = _option(None, whole(1, 2**31 - 1), "its mean (default: fits)")
    lr: float = _option(None, POSITIVE, "learning rate (default: fits the model)")
    precision: str = _option(
        "float32", one_of(*PRECISIONS), "float32, bfloat16 or float16"
    )
    compile: str = _option("eager", one_of(*COMPILING), "eager, replay or inductor")
    device: str = _option("cpu", str, "cpu, cuda, cuda:1, ...")
    seed: int = _option(0, whole(0, 2**32 - 1), "fixes the start, and never the noise")
    reproducible_noise: bool = _option(False, None, "by the seed; epsilon is no claim")


NAMES = [each.name for each in fields(Options)]


def spelled(name: str) -> str:
    """Return the option of a name as it is typed."""
    return f"--{name.replace('_', '-')}"


def _add(parser: ArgumentParser, names: Collection[str], **more: Any) -> None:
    for each in (one for one in fields(Options) if one.name in names):
        given: dict[str, Any] = {"default": each.default, "help": each.metadata["help"]}
        if read := each.metadata["read"]:
            given |= {"type": read, "metavar": each.name.rpartition("_")[2].upper()}
            given["help"] += f" (default: {each.default})" * (each.default is not None)
        else:
            given["action"] = "store_true"
        parser.add_argument(spelled(each.name), **given | more)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        sys.exit(fail(f"{text}. See {self.prog} --help."))


def _parser() -> ArgumentParser:
    parser = _Parser(prog="vgrad", description="Private training with PyTorch.")
    parser.add_argument("--version", action="store_true", help="print the versions")
    added = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)

    def command(name: str) -> ArgumentParser:
        text = COMMANDS[name]
        short = text.partition(". ")[0]
        return added.add_parser(name, help=short, description=text, allow_abbrev=False)

    train, evaluate, audit = map(command, COMMANDS)
    folder = train.add_mutually_exclusive_group(required=True)
    folder.add_argument("--out", metavar="DIR", help="a folder without a run, for it")
    folder.add_argument("--resume", metavar="DIR", help="go on with the run in DIR")
    # An absent option leaves no entry, so that --resume finds the user's alone.
    _add(train, NAMES, default=SUPPRESS)
    for each in (evaluate, audit):
        each.add_argument("folder", metavar="DIR", help="the folder of a run")
        each.add_argument("--model", help="its module:factory, which is imported")
    _add(evaluate, ["data", "device"])
    audit.add_argument("--canaries", type=whole(120, 10**6), default=2000)
    audit.add_argument("--significance", type=SHARE, default=0.01)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 2 with one line for bad input."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    try:
        if argv[:1] == ["--version"]:
            found = (f"{name} {metadata.version(name)}" for name in ("vgrad", "torch"))
            print(*found, f"Python {sys.version.split()[0]}", sep=", ")
            return 0
        given = _parser().parse_args(argv)
        from vgrad.cli.commands import run

        return run(given.command, given)
    except ImportError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; the saved state is good, and --resume DIR goes on from it")
        return 130


def fail(message: str) -> int:
    """Print a message as one line of standard error; the exit status is 2."""
    print(one_line(f"vgrad: {message}"), file=sys.stderr)
    return 2


def one_line(message: str) -> str:
    """Return a short line of printable text, whatever a file put into a message."""
    line = " ".join(message.split())
    return printable(line if len(line) <= 2000 else f"{line[:2000]} ...")


def printable(text: str) -> str:
    """Return text with escapes in the place of control characters."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
