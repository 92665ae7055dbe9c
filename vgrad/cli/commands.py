"""The commands of `vgrad_command`, run: each imports its own module and packages."""

from argparse import Namespace

import torch

from vgrad.persample.engine.guard import UnsupportedOp
from vgrad_command import fail


def run(name: str, arguments: Namespace) -> int:
    """Run a command and return the exit status: 2 with one line for bad input."""
    try:
        if name == "train":
            from vgrad.cli.run import train as command
        elif name == "evaluate":
            from vgrad.cli.evaluate import evaluate as command
        elif name == "bench":
            from vgrad.cli.evaluate import bench as command
        elif name == "experiment":
            from vgrad.cli.evaluate import experiment as command
        else:
            raise ValueError(f"{name}: expected a command, got none of that name.")
        command(arguments)
    except ModuleNotFoundError as error:
        of_demo = error.name in ("rich", "matplotlib", "sklearn")
        advice = ' Run pip install "vgrad[demo]".' if of_demo else ""
        return fail(f"{error}.{advice}" if advice else str(error))
    except (OSError, ValueError, TypeError, ImportError, UnsupportedOp) as error:
        return fail(str(error))
    except torch.OutOfMemoryError as error:
        return fail(str(error).splitlines()[0])
    return 0
