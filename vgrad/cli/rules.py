"""Print the table of rules, and what a private step does with a model."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType

from torch.nn import functional as F

from vgrad.cli import data, models
from vgrad.cli.data import Dataset
from vgrad.cli.setup import STRATEGY
from vgrad.functional.losses import sample_loss
from vgrad.functional.model import make_functional_with_buffers
from vgrad.persample.clipped import clipped_grad
from vgrad.persample.explain import Explanation, aligned, explain
from vgrad.persample.rules import RULES, Factor, Rule
from vgrad.precision.alignment import AlignmentReport, alignment_report
from vgrad.torch_private.modes import op_name

_ROWS = 64
"""Samples that a model is explained with."""


def run(given: Namespace) -> None:
    """Print the rules and, with a model, what becomes of each of its parameters."""
    if given.alignment and given.model is None:
        raise ValueError("--alignment: expected a model, got none. Add --model MODEL.")
    reports: list[Explanation | AlignmentReport] = []
    # Before the table, since a factory's module may register rules.
    if given.model is not None:
        found = data.load(given.data, seed=0)
        reports.append(_explanation(given.model, found))
        if given.alignment:
            reports.append(_alignment(given.model, found))
    print(table())
    for report in reports:
        print(f"\n{report}")


def table() -> str:
    """Return a line for each op: its weights, their kinds of factor, what it does.

    Ops of this package are steps of other rules, and left out.
    """
    lines = []
    for op, entry in RULES.items():
        if str(getattr(op, "__module__", "")).startswith("vgrad."):
            continue
        is_rule = isinstance(entry, Rule)
        weights = ", ".join(entry.weights) if is_rule else ""
        registered = entry.factors if is_rule else entry.run
        factors = ", ".join(sorted(set(_kinds(registered, set()))))
        what = (registered.__doc__ or "").partition("\n")[0]
        lines.append((op_name(op, full=True), weights, factors, what))
    return aligned([("op", "weights", "factors", "what"), *sorted(lines)])


def _explanation(model: str, found: Dataset) -> Explanation:
    """Explain a private step of a model on the first samples of a data set."""
    module = models.build(model, found.shape, seed=0).train()
    with models.tried(model, found.shape, private=True):
        function, *values = make_functional_with_buffers(module)
        compute = clipped_grad(
            sample_loss(function, F.cross_entropy),
            max_norm=1.0,
            strategy=STRATEGY,
            randomness="different",
        )
        return explain(compute)(*values, found.x_train[:_ROWS], found.y_train[:_ROWS])


def _alignment(model: str, found: Dataset) -> AlignmentReport:
    """Report on a model's matrix products for the samples of its explanation."""
    module = models.build(model, found.shape, seed=0)
    function, params, buffers = make_functional_with_buffers(module)
    return alignment_report(function, params, buffers, found.x_train[:_ROWS])


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
        elif isinstance(value, type) and value.__module__ == function.__module__:
            for method in vars(value).values():
                yield from _kinds(method, seen)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a function's code and in that of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
