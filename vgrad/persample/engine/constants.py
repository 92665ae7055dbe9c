"""Results without a graph, as constants for the caller's autograd."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from vgrad.persample.engine.call import usable
from vgrad.tree import map_tensors, map_values, tree_leaves, tree_map
from vgrad.typing import Arguments, Result


def constant(function: str, value: Any, inputs: Iterable[Tensor]) -> Any:
    """Mark a result as a constant for all inputs that are differentiated by."""
    wanted = {
        id(x): x
        for x in inputs
        if x.requires_grad or unpack_dual(x).tangent is not None
    }.values()
    leaves: list[Tensor] = []

    def each(change: Callable[[Tensor], Any], leaf: Any) -> Any:
        if is_dataclass(type(leaf)):  # a matrix of curvature
            changed = partial(mapped, partial(each, change))
            return replace(leaf, **map_values(changed, vars(leaf)))
        tensor = isinstance(leaf, Tensor)
        real = tensor and (leaf.is_floating_point() or leaf.is_complex())
        return change(leaf) if real else leaf

    def noted(leaf: Tensor) -> Tensor:
        leaves.append(leaf)
        return leaf

    mapped = partial(tree_map, is_leaf=lambda x: isinstance(x, torch.Size))
    if wanted:
        mapped(partial(each, noted), value)
    if not leaves:
        return value
    # One node for all: with one for each, they would take longer than a small model.
    made = iter(_Constant.apply(function, len(leaves), *leaves, *wanted))
    return mapped(partial(each, lambda _: next(made)), value)


class _Constant(torch.autograd.Function):
    """Results without a graph: their derivatives are errors, not zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([value.view_as(value) for value in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.function = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{ctx.function}: expected a result that is not differentiated again, "
            f"since it was computed without a graph. If a derivative is wanted, use "
            f'strategy="vmap" of a per-sample transform; if not, .detach() the result, '
            f"or let no parameter require grad: make_functional_with_buffers(model, "
            f"disable_autograd_tracking=True)."
        )

    jvp = backward


def constants(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function run without a graph, in inference mode as outside of it.

    Where its arguments require grad, its results are constants, which say so.
    """
    name = function.__qualname__.partition(".<")[0].replace("._", ".")

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        inputs = [*_within((args, kwargs))]
        with torch.inference_mode(False), torch.no_grad():
            if any(map(Tensor.is_inference, inputs)):
                args, kwargs = map_tensors(usable, (args, kwargs))
            result = function(*args, **kwargs)
        inputs = inputs if torch.is_grad_enabled() else ()
        return constant(name, result, inputs)

    return run


def _within(value: Any) -> Iterator[Tensor]:
    """Yield tensors, those in matrices of curvature and products with them, too."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from _within(vars(leaf))
        elif isinstance(leaf, partial):
            yield from _within((leaf.args, leaf.keywords))
