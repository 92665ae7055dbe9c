"""Checks for authors of rules.

The reference is a loop over samples of plain autograd in float64, B samples. It
shares nothing with factors, so that a mistake in a rule shows.
"""

import math
from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch import Tensor

from vgrad import batches
from vgrad.persample.clipped import clipped_grad
from vgrad.persample.engine import constants
from vgrad.persample.explain import EXPANDED, explain
from vgrad.persample.grad import per_sample_grad, per_sample_norm, weighted_grad
from vgrad.tree import map_tensors
from vgrad.typing import Buffers, Clipping, LossFn, Params, Tree

__all__ = ["check_rule"]


def __dir__() -> list[str]:
    return __all__


_GAMMA = 0.01
"""The constant that automatic clipping adds to a norm."""


@constants
def check_rule(
    loss: LossFn,
    params: Params,
    buffers: Buffers,
    /,
    *batch: Tree,
    tolerance: float = 1e-10,
    expanded: bool = False,
) -> None:
    """Compare all quantities of a recorded loss with plain autograd.

    Tensors are cast to float64. Losses, gradients, norms, a weighted sum and clipped
    sums of every kind are computed with `strategy="recorded"`, and again from the
    gradients that a loop over samples stores. The error is relative to the largest
    number that a parameter has in a quantity.

    Let the loss use the op as models do, with a layer in front of it, so that the
    gradient at its input counts too, and on a sample of several positions.

    Args:
        tolerance: the largest relative error.
        expanded: whether parameters may be expanded over the samples where no rule
            fits.

    Raises:
        AssertionError: a quantity differs, or no rule fits a use of a parameter.
        ValueError: the batch has fewer than two samples, or plain autograd finds
            gradients that are not finite, or only zeros.

    Example:
        >>> loss = lambda params, buffers, x: (x @ params["w"]).square().sum()
        >>> check_rule(loss, {"w": torch.randn(3, 2)}, {}, torch.randn(4, 5, 3))
    """
    size = batches.read("check_rule", batch).size
    if size < 2:
        raise ValueError(
            f"check_rule(loss)(params, buffers, *batch): expected at least two "
            f"samples, which a rule could mix up, got {size}."
        )
    params, buffers, samples = _in_double((params, buffers, batch))
    arguments = (params, buffers, *samples)
    recorded: dict[str, Any] = {"strategy": "recorded", "verify": False}
    plan = explain(per_sample_norm(loss, **recorded))
    for row in () if expanded else plan(*arguments).rows:
        if row.why.startswith(EXPANDED):
            names = ", ".join(map(repr, row.names))
            raise AssertionError(
                f"check_rule(loss): expected a rule for each op that takes a "
                f"parameter, but none fits the use of {names} by {row.op}. Register "
                f"one, or pass expanded=True if another op is meant."
            )
    losses, grads = _reference(loss, params, buffers, samples, size)
    norms = {name: grad.flatten(1).norm(dim=1) for name, grad in grads.items()}

    def check(quantity: str, actual: Params, expected: Params) -> None:
        for name, value in expected.items():
            _check_equal(f"{quantity} of {name!r}", actual[name], value, tolerance)

    check("gradients", per_sample_grad(loss, **recorded)(*arguments), grads)
    computed = per_sample_norm(loss, groups="parameter", **recorded)(*arguments)
    check("norms", computed, norms)
    weights = torch.linspace(-1, 2, size, dtype=torch.float64, device=losses.device)
    sums = weighted_grad(loss, **recorded)(weights, *arguments)
    check("weighted sum", sums, _weighted(grads, dict.fromkeys(grads, weights)))
    bound = 0.9 * float(_joint(norms, norms).mean())  # clips some samples
    for kind in get_args(Clipping):
        compute = clipped_grad(loss, max_norm=bound, clipping=kind, **recorded)
        result = compute(*arguments)
        expected = _weighted(grads, _factors(kind, norms, bound))
        check(f"sum with clipping={kind!r}", result.grads, expected)
        _check_equal("losses", result.losses, losses, tolerance)


def _check_equal(
    quantity: str, actual: Tensor, expected: Tensor, tolerance: float
) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(
            f"check_rule(loss): expected the {quantity} in the shape "
            f"{tuple(expected.shape)}, got {tuple(actual.shape)}."
        )
    if not expected.numel():
        return
    scale, gap = expected.abs().amax(), (actual - expected).abs().amax()
    error = float(gap / scale) if scale > 0 else float(gap)
    if not error <= tolerance:  # NaN is no less
        raise AssertionError(
            f"check_rule(loss): expected the {quantity} as plain autograd has them, "
            f"got a relative error of {error:.1e}, more than {tolerance:.0e}."
        )


def _in_double(tree: Tree) -> Any:
    def widen(leaf: Tensor) -> Tensor:
        dtype = torch.float64 if leaf.is_floating_point() else leaf.dtype
        return leaf.detach().to(dtype, copy=True)

    return map_tensors(widen, tree)


def _reference(
    loss: LossFn, params: Params, buffers: Buffers, batch: Tree, size: int
) -> tuple[Tensor, Params]:
    values, rows = [], []  # losses [B], gradients [B, *shape]
    for row in range(size):
        leaves = {n: value.clone().requires_grad_() for n, value in params.items()}
        sample = map_tensors(lambda leaf, i=row: leaf[i], batch)
        with torch.enable_grad():
            value = loss(leaves, _in_double(buffers), *_in_double(sample))
            grads = torch.autograd.grad(
                value, [*leaves.values()], materialize_grads=True
            )
        values.append(value.detach())
        rows.append(dict(zip(leaves, grads, strict=True)))
    stacked = {name: torch.stack([row[name] for row in rows]) for name in params}
    finite = all(bool(grad.isfinite().all()) for grad in stacked.values())
    if not finite or not any(bool(grad.any()) for grad in stacked.values()):
        raise ValueError(
            f"check_rule(loss): expected gradients that say something, got "
            f"{'only zeros' if finite else 'infinity or NaN'} from plain autograd."
        )
    return torch.stack(values), stacked


def _weighted(grads: Params, weights: Params) -> Params:
    return {
        name: torch.einsum("b,b...->...", weights[name], grad)
        for name, grad in grads.items()
    }


def _joint(norms: Params, names: Iterable[str]) -> Tensor:
    return torch.stack([norms[name] for name in names]).norm(dim=0)


def _factors(kind: Clipping, norms: Params, bound: float) -> Params:
    """Factors [B] of each parameter, by the definitions of `clipped_grad`."""
    if kind == "automatic":
        return dict.fromkeys(norms, bound / (_joint(norms, norms) + _GAMMA))
    flat = kind == "flat"
    layers = {name: "" if flat else name.rpartition(".")[0] for name in norms}
    share = bound / math.sqrt(len(set(layers.values())))
    factors = {}
    for name, layer in layers.items():
        together = [other for other in norms if layers[other] == layer]
        factors[name] = (share / _joint(norms, together)).clamp(max=1)
    return factors
