"""Gradients in other units while they are clipped and get noise."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad.optim.base import (
    SHARE,
    GradientTransformation,
    Grads,
    Number,
    State,
    check_range,
    check_transformation,
    per_parameter,
    scalar,
    step,
)
from vgrad.optim.methods import FACTORED, mean_squares
from vgrad.optim.transforms import states_of
from vgrad.tree import tree_map
from vgrad.typing import Params, Scales, Tree

__all__ = ["scale_then_privatize"]


class ScalingState(NamedTuple):
    """State of `scale_then_privatize`: mean squares, the next scales, inner state."""

    moments: State
    scales: dict[str, Params]
    inner: Tree


def scale_then_privatize(
    inner: GradientTransformation, *, decay: Number = 0.999, eps: Number = 0.1
) -> GradientTransformation:
    """Make the steps of `inner`, with gradients privatized in units of their size.

    A `private_step`, and nothing else, multiplies the gradient of each sample by `s`
    before it is clipped, and divides the noisy sum by `s`: entries that are small get
    less of the noise. `s = sqrt(k / v)` with the moving average `v` of squares of the
    gradients released so far, and the mean `k` of `v` over all parameters, so that
    `max_norm` keeps its unit; at first `s = 1`. No entry is multiplied by more than
    `1 / eps`. For a matrix `v` is factored as in `adafactor`, so that the two sides of
    a sample's gradient can be scaled: linear layers and embeddings, tied ones too, need
    no gradients of samples for the norms. Gradients of other parameters are formed.

    The scales follow from released numbers, so privacy costs the same. Correlated noise
    is refused, as scales that change would undo the correlation. State: 2 (n + m)
    numbers for a matrix of n by m, two tensors for a vector, and the state of `inner`.
    Reference: Ganesh et al., arXiv 2507.01129, algorithm 8 with the clip norm
    `max_norm / sqrt(k)`.

    Example:
        >>> from vgrad.optim import sgd
        >>> tx, params = scale_then_privatize(sgd(1.0)), {"b": torch.ones(2)}
        >>> _, state = tx.update({"b": torch.tensor([1.0, 7.0])}, tx.init(params))
        >>> state.scales
        {'row_var': {}, 'col_var': {}, 'variance': {'b': tensor([5.0000, 0.7143])}}
    """
    function, small = "scale_then_privatize", ("0 < {} <= 1", lambda e: 0 < e <= 1)
    check_transformation(function, inner)
    check_range(function, *SHARE, decay=decay)
    check_range(function, *small, eps=eps)

    def rule(g, row, column, variance):
        return g, *mean_squares(g, row, column, variance, 1 - decay)

    moments = per_parameter(function, FACTORED, lambda count: rule)

    def init(params):
        state, inner_state = moments.init(params), inner.init(params)
        if states_of(inner_state, has_deviation):
            raise ValueError(
                "scale_then_privatize(adam_bc(...)): expected an optimizer without a "
                "deviation, got one with the same for all entries, whose noise differs "
                "by their scales. Take adam, or adam_bc alone."
            )
        return ScalingState(state, _scales(state, params, eps), inner_state)

    def update(grads, state, params=None):
        updates, new = inner.update(grads, state.inner, params)
        _, squares = moments.update(grads, state.moments)
        changed, scales = _scales(squares, grads, eps), state.scales
        scales = {slot: {**scales[slot], **values} for slot, values in changed.items()}
        return updates, ScalingState(squares, scales, new)

    return GradientTransformation(init, update, counted=inner.counted)


def _scales(moments: State, grads: Grads, eps: Number) -> dict[str, Params]:
    """Return scales of present gradients, all of them one before the first step."""
    rows, columns, variances = moments.slots.values()
    sizes = {name: g.numel() for name, g in grads.items() if g is not None}
    total = torch.zeros((), dtype=torch.float64)
    for name, size in sizes.items():
        square = (rows if name in rows else variances)[name].double()
        # The rows of a matrix hold means of as many squares as there are columns.
        total = total.to(square.device) + square.sum() * (size / max(square.numel(), 1))
    mean = total / max(sum(sizes.values()), 1)

    def scale(square: Tensor, mean: Tensor, floor: Number) -> Tensor:
        mean, zero = mean.to(square.device, square.dtype), mean == 0
        ratio = (square / mean.masked_fill(zero, 1)).masked_fill(zero, 1)
        return ratio.clamp(min=scalar(floor, square)).rsqrt()

    scales: dict[str, Params] = {slot: {} for slot in moments.slots}
    for name in sizes:
        if name in rows:
            row, column = rows[name], columns[name]
            scales["row_var"][name] = scale(row, mean, eps)
            scales["col_var"][name] = scale(column, row.mean(-2, keepdim=True), eps)
        else:
            scales["variance"][name] = scale(variances[name], mean, eps**2)
    return scales


def scales_of(state: Tree) -> Scales:
    """Return the scales of the next gradients, of all wrappers in a state."""
    scales: dict[str, tuple[Tensor, ...]] = {}
    for node in states_of(state, lambda node: isinstance(node, ScalingState)):
        for slot in node.scales.values():
            for name, value in slot.items():
                scales[name] = *scales.get(name, ()), value
    return scales


def unscaled(grads: Params, scales: Scales) -> Params:
    """Divide gradients by scales."""
    return {
        name: functools.reduce(torch.div, scales.get(name, ()), grad)
        for name, grad in grads.items()
    }


def has_deviation(node: Any) -> bool:
    """Return whether a node of a state is of `adam_bc`."""
    return isinstance(node, State) and "deviation" in node.slots


def with_deviation(state: Tree, deviation: Number) -> Tree:
    """Return a state with the deviation of the noise in the next gradients."""

    def with_value(node: Any) -> Any:
        if not has_deviation(node):
            return node
        value = torch.zeros_like(node.slots["deviation"]) + deviation
        return node._replace(slots={**node.slots, "deviation": value})

    return tree_map(with_value, state, is_leaf=has_deviation)


def uses_of_noise(state: Tree) -> list[Any]:
    """List the nodes of a state whose rules hold for independent noise alone."""

    def is_one(node: Any) -> bool:
        return isinstance(node, ScalingState) or has_deviation(node)

    return states_of(state, is_one)


def stepped(
    execute: Callable,
    tx: GradientTransformation,
    grads: Params,
    state: Tree,
    params: Params,
    *,
    donate: bool,
) -> tuple[Params, Tree, dict[str, Tree]]:
    """Take a step by `execute`, or into donated memory; no other field changes."""
    if donate:
        return *step(tx, grads, state, params, donate=True), {}
    return *execute(step, tx, grads, state, params), {}
