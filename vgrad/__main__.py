"""The command line: `python -m vgrad` and a command."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch

from vgrad.cli import options
from vgrad.cli.descriptions import printable
from vgrad.persample.engine.guard import UnsupportedOp


class Command(NamedTuple):
    """A subcommand."""

    summary: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], None]


# Each imports its command when it runs, so that others do not need its packages.
def _train(given: Namespace) -> None:
    from vgrad.cli.run import train

    train(given)


def _evaluate(given: Namespace) -> None:
    from vgrad.cli.evaluate import evaluate

    evaluate(given)


def _bench(given: Namespace) -> None:
    from vgrad.cli.bench import run

    run(given.out, given.suites)


def _experiment(given: Namespace) -> None:
    from vgrad.cli.bench import experiment

    experiment(given)


def _rules(given: Namespace) -> None:
    from vgrad.cli.rules import run

    run(given)


COMMANDS = {
    "train": Command(
        "Train a classifier with differential privacy, and one without beside it. The "
        "folder gets model.safetensors (for an ensemble ensemble.* instead), the only "
        "file meant for release; state.*, from which the run can go on and which would "
        "reveal its noise; and metrics.jsonl, plain.jsonl, pictures and report.html, "
        "a page with all of it, whose figures come from the private data without "
        "noise.",
        options.add_train,
        _train,
    ),
    "evaluate": Command(
        "Print the accuracy of the model in a folder on held-out data.",
        options.add_evaluate,
        _evaluate,
    ),
    "bench": Command(
        "Run the benchmarks of a checkout and print them as tables: loop, vmap, vgrad "
        "and the peers that are installed.",
        options.add_bench,
        _bench,
    ),
    "experiment": Command(
        "Repeat experiments of articles: functorch, jmp, mixed precision, tensor cores "
        "with cross-validation, and the price of privacy. Each ends with a check, a "
        "table and a figure.",
        options.add_experiment,
        _experiment,
    ),
    "rules": Command(
        "Print the ops that have a rule for per-sample gradients. With --model also "
        "what a private step does with each parameter of that model.",
        options.add_rules,
        _rules,
    ),
}

_DEMO = {"rich", "matplotlib", "sklearn"}
"""Packages of the extra `demo`."""

_LONGEST = 2000
"""Characters of a message."""


class _Parser(ArgumentParser):
    """A parser that reports an error in one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with status 2."""
        sys.exit(_fail(f"{message}. See {self.prog} --help."))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status: 2 with one line for bad input."""
    parser = _Parser(prog="vgrad", description="Private training with PyTorch.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        summary = command.summary
        added = commands.add_parser(
            name, help=summary.split(". ")[0], description=summary, allow_abbrev=False
        )
        command.add_arguments(added)
        added.set_defaults(run=command.run)
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    given = parser.parse_args(argv)
    try:
        given.run(given)
    except ModuleNotFoundError as error:
        advice = 'Run pip install "vgrad[demo]".' if error.name in _DEMO else ""
        return _fail(f"{error}. {advice}" if advice else str(error))
    except (OSError, ValueError, TypeError, ImportError, UnsupportedOp) as error:
        return _fail(str(error))
    except torch.OutOfMemoryError as error:
        return _fail(str(error).splitlines()[0])
    except KeyboardInterrupt:
        _fail("interrupted; what was saved is good, and --resume DIR goes on from it")
        return 130
    return 0


def _fail(message: str) -> int:
    """Print a message as one line of printable text, whatever a file put into it."""
    line = " ".join(message.split())
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."
    print(f"vgrad: {printable(line)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
