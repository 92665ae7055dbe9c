"""Print the table of rules, and what a private step does with a model."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import CodeType, FunctionType

from torch.nn import functional as F

from vgrad.cli import data, models
from vgrad.cli.arguments import Settings
from vgrad.cli.setup import STRATEGY
from vgrad.functional.losses import sample_loss
from vgrad.functional.model import make_functional_with_buffers
from vgrad.persample.clipped import clipped_grad
from vgrad.persample.explain import Explanation, aligned, explain
from vgrad.persample.rules import RULES, Factor, Lowering, Rule
from vgrad.precision.alignment import AlignmentReport, alignment_report
from vgrad.torch_private.modes import op_name

_ROWS = 64
"""Samples that a model is explained with."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `rules`."""
    texts = {each.name: each.metadata["help"] for each in fields(Settings)}
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help=f"explain a private step of this model as well: {texts['model']}; a "
        f"module may register rules of its own",
    )
    parser.add_argument(
        "--data",
        default="digits",
        metavar="DATA",
        help=f"what the model is for: {texts['data']} (default: digits)",
    )
    parser.add_argument(
        "--alignment",
        action="store_true",
        help="with --model, also list its matrix products and what to pad so that "
        "tensor cores take them",
    )


def run(given: Namespace) -> None:
    """Print the rules and, with a model, what becomes of each of its parameters.

    Raises:
        FileNotFoundError, ValueError: as `data.load` and `models.build`, or the model
            takes no such images; `--alignment` comes without a model.
    """
    reports: list[Explanation | AlignmentReport] = []
    # Before the table, since a factory's module may register rules.
    if given.model is not None:
        reports.append(explanation(given.model, given.data))
        if given.alignment:
            reports.append(alignment(given.model, given.data))
    elif given.alignment:
        raise ValueError("--alignment: expected a model, got none. Add --model MODEL.")
    print(table())
    for report in reports:
        print(f"\n{report}")


def table() -> str:
    """Return a line for each op: its weights, their kinds of factor, what it does.

    Ops of this package are steps of other rules, and left out.
    """
    lines = [
        (
            op_name(op, full=True),
            ", ".join(entry.weights) if isinstance(entry, Rule) else "",
            ", ".join(sorted(set(_kinds(_body(entry), set())))),
            (_body(entry).__doc__ or "").partition("\n")[0],
        )
        for op, entry in RULES.items()
        if not str(getattr(op, "__module__", "")).startswith("vgrad.")
    ]
    return aligned([("op", "weights", "factors", "what"), *sorted(lines)])


def explanation(model: str, source: str) -> Explanation:
    """Explain a private step of a model on the first samples of a data set."""
    found = data.load(source, seed=0)
    shape = found.shape
    module = models.build(model, shape, seed=0).train()
    try:
        function, params, buffers = make_functional_with_buffers(module)
        compute = clipped_grad(
            sample_loss(function, F.cross_entropy),
            max_norm=1.0,
            strategy=STRATEGY,
            randomness="different",
        )
        return explain(compute)(
            params, buffers, found.x_train[:_ROWS], found.y_train[:_ROWS]
        )
    except Exception as error:
        # Code of the user's own may raise anything; the cause is kept.
        raise ValueError(
            f"--model {model}: expected a model that scores {shape.classes} classes "
            f"for images {list(shape[:3])} and has per-sample gradients, got "
            f"{type(error).__name__}: {error}"
        ) from error


def alignment(model: str, source: str) -> AlignmentReport:
    """Report on a model's matrix products for the samples of its explanation."""
    found = data.load(source, seed=0)
    module = models.build(model, found.shape, seed=0)
    function, params, buffers = make_functional_with_buffers(module)
    return alignment_report(function, params, buffers, found.x_train[:_ROWS])


def _body(entry: Rule | Lowering) -> Callable:
    """Return the function that was registered."""
    return entry.factors if isinstance(entry, Rule) else entry.run


def _kinds(function: Callable, seen: set[Callable]) -> Iterator[str]:
    """Yield the kinds of factor that the code of a rule, or what it calls, names."""
    seen.add(function)
    if not isinstance(function, FunctionType):
        return
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType) and value not in seen:
            yield from _kinds(value, seen)
        elif isinstance(value, type) and issubclass(value, Factor):
            if value is not Factor:
                yield value.__name__


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a function's code and in that of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
