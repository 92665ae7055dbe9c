"""The command `vgrad`: its options, their ranges, and its help.

This module lies outside of the package and needs the standard library alone: `import
vgrad` takes the second and a half that torch takes, and help, the version and mistakes
are answered without it. The package is imported to run a command; `vgrad.cli` takes the
options from here, so that each is declared once.
"""

import difflib
import math
import re
import sys
import warnings
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, NoReturn

PRECISIONS = ("float32", "bfloat16", "float16")
COMPILING = ("eager", "replay", "inductor")
DISCRETE = ("no", "sum")
METHODS = ("ekfac", "kfac", "trak", "grad-dot")
EXPERIMENTS = (
    *("per-sample", "ensembles", "jmp", "mobilenet", "tensor-cores", "private"),
    "attribution",
    "all",
)

RATES = {"cnn": 1.0, "resnet": 0.1, "mlp": 0.25, "a factory": 0.1}
"""Learning rates by the name of a model, where none is given."""

BATCH = 720
"""Samples in a batch, where the data have twice as many."""

_LONGEST = 2000
"""Characters of a message."""


# Values.


class Kind(NamedTuple):
    """The values that an option may have, and words for them."""

    words: str
    holds: Callable[[Any], bool]


ANY = Kind("any", lambda value: True)


def whole(least: int, most: int) -> Kind:
    """A whole number within bounds, which are included."""
    words = f"a whole number from {least} to {most}"
    return Kind(words, lambda value: least <= value <= most)


def above(low: float, high: float = math.inf) -> Kind:
    """A finite number within bounds, which are excluded."""
    words = f"a finite number above {low}" + f" and below {high}" * (high < math.inf)
    return Kind(words, lambda value: low < value < high)


def one_of(names: Collection[str]) -> Kind:
    """One of these names."""
    return Kind(f"one of {', '.join(names)}", lambda value: value in names)


def matching(pattern: str, words: str) -> Kind:
    """Text that a regular expression matches."""
    return Kind(words, lambda value: bool(re.fullmatch(pattern, value)))


SCHEME = matching(
    "independent|(bisr|band-inv-mf|band-mf|blt):[1-9][0-9]{0,2}",
    "independent, or a scheme and its size, such as band-mf:4, bisr:4, band-inv-mf:4 "
    "or blt:2",
)
QUANTILE = matching(
    r"none|1|0(\.[0-9]{1,9})?", "a number between 0 and 1, such as 0.5, or none"
)
_BOUND = r"(?=[0.]*[1-9])(?![0-9.]{10})[0-9]*\.?[0-9]*"
"""A number above zero, of at most nine characters."""
GROUPS = matching(
    rf"none|([^\s:,]+:{_BOUND}(,(?!$)|$))+",
    "none, or patterns of names of parameters with a norm each, such as "
    "'*weight:1,*bias:0.1'",
)
_PLACES = "[0-9]{1,9}(:[0-9]{1,9})?"
"""An index, or a start and the end after it."""
QUERIES = matching(
    rf"misclassified|{_PLACES}(,{_PLACES})*",
    "misclassified, or indices of held-out samples, such as 0:10 or 3,17,20",
)
LARGEST = matching(
    "none|auto|[1-9][0-9]{0,9}", "a whole number above zero, auto or none"
)


# Options.


def _option(kind: Kind, default: Any, text: str) -> Any:
    """Declare an option with its values and its help."""
    return field(default=default, metadata={"kind": kind, "help": text})


@dataclass(frozen=True)
class Options:
    """The options of a training run, without the folder."""

    data: str = _option(
        ANY,
        "digits",
        "digits (with scikit-learn), mnist, cifar10 (through torchvision) or an .npz "
        "file with x_train, y_train, x_test, y_test and, optionally, classes",
    )
    model: str = _option(
        ANY,
        "cnn",
        "cnn, mlp, resnet, or module:factory, called with channels, height, width and "
        "classes",
    )
    members: int = _option(
        whole(1, 10**4),  # all of them are in memory
        1,
        "how many models to train; more than one make a deep ensemble, whose members "
        "differ in initialisation and batches, with --without-privacy",
    )
    without_privacy: bool = _option(
        ANY, False, "train without privacy, as ensembles are"
    )
    epsilon: float = _option(above(0), 3.0, "the budget of the whole run")
    delta: float = _option(
        above(0, 1),
        1e-5,
        "probability that goes with epsilon; keep it far below one over the number of "
        "training samples",
    )
    max_norm: float = _option(
        above(1e-30, 1e30), 2.0, "L2 norm to which each sample's gradient is clipped"
    )
    group_norms: str = _option(
        GROUPS,
        "none",
        "norms to which the gradients of groups of parameters are clipped, in the "
        "place of --max-norm; noise has deviations in the same ratio",
    )
    clip_quantile: str = _option(
        QUANTILE,
        "none",
        "quantile of the norms, such as 0.5, that the bound follows from --max-norm "
        "on, by a noisy count of each step that is in the account",
    )
    noise: str = _option(
        SCHEME,
        "independent",
        "independent, or correlated over steps: band-mf:4, which samples from 4 groups "
        "in turn, or bisr:4, band-inv-mf:4 and blt:2, on batches in a fixed order",
    )
    max_batch_size: str = _option(
        LARGEST,
        "none",
        "size that larger Poisson batches are cut to, or auto: the least one that "
        "costs at most 1 %% of epsilon; all steps then have one shape",
    )
    discrete: str = _option(
        one_of(DISCRETE),
        "no",
        "sum, for discrete noise on a sum that is rounded to its grid",
    )
    augmentations: int = _option(
        whole(1, 64),
        1,
        "copies of each image in a private step, shifted by a pixel at most, whose "
        "mean gradient is clipped; epsilon stays",
    )
    epochs: int = _option(
        whole(1, 10**6), 50, "passes over the data; one is 1 / q steps"
    )
    batch_size: int = _option(
        whole(1, 2**31 - 1),
        None,
        "expected size of the Poisson batches; q is this over the number of training "
        f"samples (default: {BATCH}, or about half of the samples if that is less)",
    )
    lr: float = _option(
        above(0),
        None,
        "learning rate of SGD, constant (default: "
        + ", ".join(f"{rate:g} for {name}" for name, rate in RATES.items())
        + f"; less, in proportion, for batches below {BATCH}, and with cnn and resnet "
        "for images larger than 8 x 8)",
    )
    precision: str = _option(
        one_of(PRECISIONS),
        "float32",
        "float32, bfloat16 or float16: the dtype of forward and backward pass; "
        "parameters, clipping, noise and optimizer stay in float32",
    )
    compile: str = _option(
        one_of(COMPILING),
        "eager",
        "replay, which runs captured steps with the very numbers of eager mode on "
        "batches filled up to a few sizes, inductor, which compiles them for minutes, "
        "or eager",
    )
    device: str = _option(ANY, "cpu", "cpu, cuda, cuda:1, ...")
    seed: int = _option(
        whole(0, 2**32 - 1),  # torch's generators on the CPU use 32 bits
        0,
        "fixes the split of digits, the initialisation and the run without privacy; "
        "never the noise",
    )
    reproducible_noise: bool = _option(
        ANY,
        False,
        "let the seed fix batches and noise too; epsilon may then not be claimed",
    )


KINDS: Mapping[str, Kind] = {
    each.name: each.metadata["kind"] for each in fields(Options)
}
"""The values of the options of a training run, by name."""


def spelled(name: str) -> str:
    """Return the option of a name as it is typed."""
    return f"--{name.replace('_', '-')}"


def _typed(convert: Callable[[str], Any], kind: Kind) -> Callable[[str], Any]:
    """Return a function that reads a value from the text that was typed."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if kind.holds(value := convert(text)):
                return value
        raise ArgumentTypeError(f"expected {kind.words}, got {text!r}")

    return read


def _add(
    parser: ArgumentParser, names: Collection[str], *, default: str | None = None
) -> None:
    """Add options of a run, with their own defaults or another one for all."""
    for each in fields(Options):
        if each.name not in names:
            continue
        more: dict[str, Any] = {"action": "store_true"}
        text = each.metadata["help"]
        if each.type is not bool:
            convert: Any = each.type
            more = {"type": _typed(convert, each.metadata["kind"])}
            more["metavar"] = each.name.rpartition("_")[2].upper()
            if each.default is not None:
                text += f" (default: {each.default})"
        name, chosen = spelled(each.name), default or each.default
        parser.add_argument(name, default=chosen, help=text, **more)


def _add_train(parser: ArgumentParser) -> None:
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
    parser.add_argument(
        "--extend",
        action="store_true",
        help="with --resume DIR and --epochs N: make the run one of N epochs in all, "
        "with the noise that it has; epsilon rises, and is printed before the first "
        "step",
    )
    # An absent option leaves no entry, so that --resume finds the user's alone.
    _add(parser, KINDS, default=SUPPRESS)


_FACTORY = (
    "the module:factory that the model was trained with, if it was: a file may not "
    "choose the code that runs"
)


def _add_evaluate(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder of a run")
    parser.add_argument("--model", metavar="MODEL", help=_FACTORY)
    _add(parser, ["data", "device"])


def _add_audit(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder of a private run")
    parser.add_argument("--model", metavar="MODEL", help=_FACTORY)
    parser.add_argument(
        "--canaries",
        metavar="COUNT",
        type=_typed(int, whole(120, 10**6)),
        default=2000,
        help="how many; more of them show more (default: 2000)",
    )
    parser.add_argument(
        "--significance",
        metavar="SIGNIFICANCE",
        type=_typed(float, above(0, 0.5)),
        default=0.01,
        help="the probability that a step which is right exceeds its claim "
        "(default: 0.01)",
    )


def _add_attribute(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder of a run")
    parser.add_argument(
        "--queries",
        metavar="QUERIES",
        type=_typed(str, QUERIES),
        default="misclassified",
        help="held-out samples whose predictions are to be explained: misclassified, "
        "or their indices, such as 0:10 for the first ten or 3,17,20 (default: "
        "misclassified)",
    )
    parser.add_argument(
        "--method",
        metavar="METHOD",
        type=_typed(str, one_of(METHODS)),
        default=METHODS[0],
        help="ekfac or kfac, influence by Kronecker factors of the curvature, trak, or "
        f"grad-dot, inner products of gradients (default: {METHODS[0]})",
    )
    parser.add_argument(
        "--damping",
        metavar="DAMPING",
        type=_typed(float, above(0)),
        default=1e-3,
        help="added to the curvature, which is a mean over samples; grad-dot has none "
        "(default: 0.001)",
    )
    parser.add_argument(
        "--not-private",
        action="store_true",
        help="score the training samples of a private run, too; the scores have no "
        "privacy",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where to write (default: the folder of the run)"
    )
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="the data of the run, if the file has moved since",
    )
    parser.add_argument("--model", metavar="MODEL", help=_FACTORY)


def _add_bench(parser: ArgumentParser) -> None:
    parser.add_argument(
        "suites",
        metavar="SUITE",
        nargs="*",
        help="run only bench/test_SUITE.py, for instance: clipped optim",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="also write the figures to this JSON file, and the tables to a Markdown "
        "file of the same name",
    )


def _add_experiment(parser: ArgumentParser) -> None:
    *names, last = EXPERIMENTS
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="+",
        type=_typed(str, one_of(EXPERIMENTS)),
        help=f"{', '.join(names)}, or {last}",
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
        help="where to write results, tables and figures; an interrupted run "
        "there is gone on with (default: runs/experiments)",
    )
    _add(parser, ["device"])


def _add_help(parser: ArgumentParser) -> None:
    parser.add_argument("topic", metavar="COMMAND", nargs="?", help="a command")


# Commands.


class Command(NamedTuple):
    """A subcommand."""

    summary: str
    add_arguments: Callable[[ArgumentParser], None]


COMMANDS = {
    "train": Command(
        "Train a classifier with differential privacy, and one without beside it. The "
        "folder gets model.safetensors, the only file meant for release (ensemble.* "
        "instead, of an ensemble, which has no privacy); state.*, from which the run "
        "can go on and which would reveal its noise; and metrics.jsonl, plain.jsonl, "
        "pictures and report.html, a page with all of it, whose figures come from the "
        "private data without noise.",
        _add_train,
    ),
    "evaluate": Command(
        "Print the accuracy of the model in a folder on held-out data.", _add_evaluate
    ),
    "audit": Command(
        "Audit the private step of the run in a folder: bound how much it spends from "
        "below, by canaries, without the data. The folder gets audit.png. The exit "
        "status is 1 if the step spends more than it claims.",
        _add_audit,
    ),
    "attribute": Command(
        "Show which training samples made the predictions of the run in a folder: the "
        "most helpful and the most harmful ones of each query, and those that are most "
        "likely mislabelled. The folder gets attribution.safetensors and "
        "attribution.html, neither of which is for release.",
        _add_attribute,
    ),
    "bench": Command(
        "Run the benchmarks of a checkout and print them as tables: loop, vmap, vgrad "
        "and the peers that are installed.",
        _add_bench,
    ),
    "experiment": Command(
        "Repeat experiments of articles: functorch, jmp, mixed precision, tensor cores "
        "with cross-validation; the price of privacy, and attribution judged by "
        "retraining. Each ends with a check, a table and a figure.",
        _add_experiment,
    ),
    "help": Command("Print this help, or the help of a command.", _add_help),
}


class _Parser(ArgumentParser):
    """A parser that reports an error in one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with status 2."""
        sys.exit(fail(f"{message.removeprefix('argument ')}. See {self.prog} --help."))


class _Version(Action):
    """Print the versions of vgrad, torch and Python, and exit."""

    def __call__(self, parser: ArgumentParser, *given: Any) -> None:
        # Not at the top: it takes longer than all of this module.
        from importlib.metadata import PackageNotFoundError, version

        found = []
        for name in ("vgrad", "torch"):
            try:
                found.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                found.append(f"{name}, not installed")
        print(*found, f"Python {sys.version.split()[0]}", sep=", ")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status: 2 with one line for bad input."""
    argv = sys.argv[1:] if argv is None else argv
    parser, commands = _parsers()
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    name, *rest = argv
    if name.startswith("-"):
        _refuse_unknown_options(parser, [name])
        parser.parse_args([name])
    _refuse_unknown_command(parser, name)
    _refuse_unknown_options(commands[name], rest)
    given = commands[name].parse_args(rest)
    if name == "help":
        if given.topic is None:
            parser.print_help()
            return 0
        _refuse_unknown_command(parser, given.topic)
        commands[given.topic].print_help()
        return 0
    with _warnings_in_one_line():
        try:
            from vgrad.cli.commands import run

            return run(name, given)
        except ImportError as error:
            return fail(str(error))
        except KeyboardInterrupt:
            fail(
                "interrupted; the saved state is good, and --resume DIR goes on from it"
            )
            return 130


def _parsers() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """Make the parser of the program and, by name, the parsers of its commands."""
    description = "Private training with PyTorch."
    parser = _Parser(prog="vgrad", description=description, allow_abbrev=False)
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the versions and exit"
    )
    added = parser.add_subparsers(metavar="COMMAND")
    commands: dict[str, ArgumentParser] = {}
    for name, command in COMMANDS.items():
        summary = command.summary
        commands[name] = added.add_parser(
            name, help=summary.split(". ")[0], description=summary, allow_abbrev=False
        )
        command.add_arguments(commands[name])
    return parser, commands


def _refuse_unknown_command(parser: ArgumentParser, name: str) -> None:
    """Refuse an unknown command, and name a close one."""
    if name not in COMMANDS:
        parser.error(f"there is no command {name}{_close(name, COMMANDS)}")


def _refuse_unknown_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Refuse an unknown option, and name a close one, before missing ones are."""
    known = ["--help", *re.findall(r"--[a-z-]+", parser.format_usage())]
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known:
            parser.error(f"there is no option {name}{_close(name, known)}")


def _close(name: str, known: Collection[str]) -> str:
    """Return words that name the entry closest to a misspelt one, if any is close."""
    longer = [each for each in known if each.startswith(name)]
    close = longer or difflib.get_close_matches(name, known)
    return f", but there is {close[0]}" if close else ""


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print each warning once and as one line, without the source it comes from."""
    before, seen = warnings.formatwarning, set()

    def line(message: Warning | str, *place: Any) -> str:
        text = one_line(f"vgrad: warning: {message}")
        shown = "" if text in seen else f"{text}\n"
        seen.add(text)
        return shown

    warnings.formatwarning = line
    try:
        yield
    finally:
        warnings.formatwarning = before


def fail(message: str) -> int:
    """Print a message as one line of standard error; the exit status is 2."""
    print(one_line(f"vgrad: {message}"), file=sys.stderr)
    return 2


def one_line(message: str) -> str:
    """Return a short line of printable text, whatever a file put into a message."""
    line = " ".join(message.split())
    return printable(line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ...")


def printable(text: str) -> str:
    """Return text with escapes in the place of control characters."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
