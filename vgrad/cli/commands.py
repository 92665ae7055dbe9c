"""The commands of `vgrad_command`, run: each imports its own module and packages."""

import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch

from vgrad.persample.engine.guard import UnsupportedOp
from vgrad_command import fail, one_line


def run(name: str, arguments: Namespace) -> int:
    """Run a command and return the exit status: 2 with one line for bad input."""
    try:
        module = {"train": "run"}.get(name, name)
        with _warnings_in_one_line():
            getattr(import_module(f"vgrad.cli.{module}"), name)(arguments)
    except ModuleNotFoundError as error:
        of_demo = error.name in ("matplotlib", "sklearn")
        advice = ' Run pip install "vgrad[demo]".' if of_demo else ""
        return fail(f"{error}.{advice}" if advice else str(error))
    except (OSError, ValueError, TypeError, ImportError, UnsupportedOp) as error:
        return fail(str(error))
    except torch.OutOfMemoryError as error:
        return fail(str(error).splitlines()[0])
    return 0


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print each warning once and as one line, without the source it comes from."""
    before, seen = warnings.formatwarning, set()

    def line(message: Warning | str, *place: object) -> str:
        text = one_line(f"vgrad: warning: {message}")
        shown = "" if text in seen else f"{text}\n"
        seen.add(text)
        return shown

    warnings.formatwarning = line
    try:
        yield
    finally:
        warnings.formatwarning = before
