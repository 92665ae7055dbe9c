"""The commands of `vgrad_command`, run: each imports its own module and packages."""

from argparse import Namespace
from importlib import import_module

import torch

from vgrad.persample.engine.guard import UnsupportedOp
from vgrad_command import fail


def run(name: str, arguments: Namespace) -> int:
    """Run a command and return the exit status: 2 with one line for bad input."""
    try:
        own = {"train": "run", "audit": "audit", "attribute": "attribute"}
        module = own.get(name, "evaluate")
        getattr(import_module(f"vgrad.cli.{module}"), name)(arguments)
    except ModuleNotFoundError as error:
        of_demo = error.name in ("rich", "matplotlib", "sklearn")
        advice = ' Run pip install "vgrad[demo]".' if of_demo else ""
        return fail(f"{error}.{advice}" if advice else str(error))
    except (OSError, ValueError, TypeError, ImportError, UnsupportedOp) as error:
        return fail(str(error))
    except torch.OutOfMemoryError as error:
        return fail(str(error).splitlines()[0])
    return 0
