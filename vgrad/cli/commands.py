"""The commands of `vgrad_command`, run: each imports its own module and packages."""

from argparse import Namespace
from pathlib import Path

import torch

from vgrad.persample.engine.guard import UnsupportedOp
from vgrad_command import fail

_DEMO = {"rich", "matplotlib", "sklearn"}
"""Packages of the extra `demo`."""


def run(name: str, given: Namespace) -> int:
    """Run a command and return the exit status: 2 with one line for bad input."""
    try:
        _run(name, given)
    except ModuleNotFoundError as error:
        advice = 'Run pip install "vgrad[demo]".' if error.name in _DEMO else ""
        return fail(f"{error}. {advice}" if advice else str(error))
    except (OSError, ValueError, TypeError, ImportError, UnsupportedOp) as error:
        return fail(str(error))
    except torch.OutOfMemoryError as error:
        return fail(str(error).splitlines()[0])
    return 0


def _run(name: str, given: Namespace) -> None:
    if name == "train":
        from vgrad.cli.run import train

        train(given)
    elif name == "evaluate":
        from vgrad.cli.evaluate import evaluate

        evaluate(given)
    elif name == "bench":
        from vgrad.cli.evaluate import bench

        bench(given.out and Path(given.out), given.suites)
    elif name == "experiment":
        from vgrad.cli.evaluate import experiment

        experiment(given)
    else:
        raise ValueError(f"{name}: expected a command, got none of that name.")
