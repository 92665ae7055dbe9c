"""The arguments of all commands, each declared once, with its help."""

import os
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from vgrad.cli.settings import Settings


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
            if each.default is not None:
                text += f" (default: {each.default})"
        parser.add_argument(
            "--" + each.name.replace("_", "-"),
            default=default or each.default,
            help=text,
            **more,
        )
