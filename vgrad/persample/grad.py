"""The gradient of every sample, its norm, and weighted sums of gradients."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from vgrad.persample.engine import (
    Call,
    Gradients,
    Norms,
    Options,
    Problem,
    Quantity,
    Transform,
    Weighted,
    joined,
)
from vgrad.persample.engine.grouping import Grouping, Groups, check_groups, members
from vgrad.persample.factors import Norm, Sums, reductions
from vgrad.precision.loss_scale import LossScale
from vgrad.tree import wide
from vgrad.typing import Buffers, LossFn, Params, Result, Tree


@overload
def per_sample_grad(
    loss: LossFn, *, has_aux: Literal[False] = False, **options: Unpack[Options]
) -> Transform[Params]: ...
@overload
def per_sample_grad(
    loss: LossFn, *, has_aux: Literal[True], **options: Unpack[Options]
) -> Transform[tuple[Params, Tree]]: ...
def per_sample_grad(
    loss: LossFn,
    *,
    has_aux: bool = False,
    **options: Unpack[Options],
) -> Transform[Any]:
    """Gradient of every sample: `(params, buffers, *batch) -> {name: [B, *shape]}`.

    The dtype is that of the parameters. It stores B gradients, so where a norm or a sum
    is wanted, use the transform that computes it.

    The options are in `vgrad.persample.Options`.

    Raises:
        TypeError: the loss is no function, a model, or one of a whole batch.
        ValueError: an option or the batch is not as `vgrad.persample` says.
        UnsupportedOp: the strategy cannot run an op of the loss.

    Example:
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum() ** 2
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> per_sample_grad(loss)({"w": torch.ones(2)}, {}, x)
        {'w': tensor([[ 2.,  0.],
                [ 6., 12.]])}
    """

    problem = Problem.of(per_sample_grad, loss, options, has_aux)
    return Transform(problem, Quantity(_collect_grads, _measure_grads, _joined_grads))


def _collect_grads(part: Problem) -> Gradients:
    return Gradients()


def _measure_grads(found: Gradients, part: Problem) -> Params:
    return found.grads


def _joined_grads(parts: Iterator[Params], call: Call) -> Params:
    """Join the gradients of all chunks."""
    found = list(parts)
    scale = call.problem.loss_scale
    return {
        name: _own_memory(
            joined(
                value.new_zeros((0, *value.shape)), [each[name] for each in found]
            ).to(_grad_dtype(value.dtype, scale))
        )
        for name, value in call.params.items()
    }


def _grad_dtype(dtype: torch.dtype, loss_scale: LossScale | None) -> torch.dtype:
    """Return the parameter's dtype, in which an unscaled gradient might be zero."""
    return dtype if loss_scale is None else wide(dtype)


def _own_memory(grad: Tensor) -> Tensor:
    """Give every entry memory of its own where vmap lets several share it."""
    sizes = zip(grad.stride(), grad.shape, strict=True)
    shared = any(step == 0 and size > 1 for step, size in sizes)
    return grad.clone(memory_format=torch.contiguous_format) if shared else grad


@overload
def per_sample_norm(
    loss: LossFn,
    *,
    groups: None = None,
    has_aux: Literal[False] = False,
    **options: Unpack[Options],
) -> Transform[Tensor]: ...
@overload
def per_sample_norm(
    loss: LossFn,
    *,
    groups: None = None,
    has_aux: Literal[True],
    **options: Unpack[Options],
) -> Transform[tuple[Tensor, Tree]]: ...
@overload
def per_sample_norm(
    loss: LossFn,
    *,
    groups: Grouping,
    has_aux: Literal[False] = False,
    **options: Unpack[Options],
) -> Transform[dict[str, Tensor]]: ...
@overload
def per_sample_norm(
    loss: LossFn,
    *,
    groups: Grouping,
    has_aux: Literal[True],
    **options: Unpack[Options],
) -> Transform[tuple[dict[str, Tensor], Tree]]: ...
def per_sample_norm(
    loss: LossFn,
    *,
    groups: Groups = None,
    has_aux: bool = False,
    **options: Unpack[Options],
) -> Transform[Any]:
    """L2 norm of every sample's gradient: `(params, buffers, *batch) -> [B]`.

    The norm is over all parameters, `sqrt(sum_p |dL_b/dp|^2)`, in float32 or wider. It
    neither overflows nor underflows on the way; only what the dtype of the result
    cannot hold is infinite. With `groups` the result is `{group: [B]}`: `"parameter"`
    for the norm of each, `"layer"` for those of one module together, or a dictionary
    from a group's name to a list of patterns of its parameters' names (`vgrad.checks`).

    The options are in `vgrad.persample.Options`.

    Raises:
        TypeError: the patterns of a group are no list or tuple.
        ValueError: a pattern of `groups` matches nothing, or two match one parameter;
            else as `per_sample_grad`.
        UnsupportedOp: as `per_sample_grad`.

    Example:
        >>> import torch
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> per_sample_norm(loss)({"w": torch.ones(2)}, {}, x)
        tensor([5., 0.])
    """
    check_groups("per_sample_norm", groups)
    problem = Problem.of(per_sample_norm, loss, options, has_aux)
    quantity = Quantity(
        _collect_norms, partial(_measure_norms, groups), partial(_joined_norms, groups)
    )
    return Transform(problem, quantity)


def _collect_norms(part: Problem) -> Norms:
    return Norms()


def _measure_norms(groups: Groups, found: Norms, part: Problem) -> dict[str, Tensor]:
    """Join the norms of the parameters in each group."""
    dtype = reductions.norm_dtype(part.params)
    return {
        group: Norm.joint([found.norms[name] for name in names]).value.to(dtype)
        for group, names in members(part.function, groups, part.params).items()
    }


def _joined_norms(
    groups: Groups, parts: Iterator[dict[str, Tensor]], call: Call
) -> Any:
    """Join the norms of all chunks."""
    norms, empty = list(parts), reductions.no_norms(call.params, call.dtype)
    result = {
        group: joined(empty, [each[group] for each in norms])
        for group in members(call.problem.function, groups, call.params)
    }
    return result[""] if groups is None else result


class WeightedGradFn(Transform[Result]):
    """What `weighted_grad` returns: `(weights, params, buffers, *batch)`."""

    def __call__(
        self,
        weights: Tensor,
        params: Params,
        buffers: Buffers,
        /,
        *batch: Tree,
        mask: Tensor | None = None,
    ) -> Result:
        """Sum the gradients of this batch with weights `[B]`.

        Args:
            mask: which samples count, bool `[B]`; the others add nothing.
        """
        found = self.on_all(params, buffers, batch, mask, weights)
        return found if mask is None else self.selected(found, mask)

    def of_samples(self, function: Any, value: Params) -> Params:
        """Return the sums, which have no entry for a sample."""
        return value


@overload
def weighted_grad(
    loss: LossFn, *, has_aux: Literal[False] = False, **options: Unpack[Options]
) -> WeightedGradFn[Params]: ...
@overload
def weighted_grad(
    loss: LossFn, *, has_aux: Literal[True], **options: Unpack[Options]
) -> WeightedGradFn[tuple[Params, Tree]]: ...
def weighted_grad(
    loss: LossFn,
    *,
    has_aux: bool = False,
    **options: Unpack[Options],
) -> WeightedGradFn[Any]:
    """Weighted sum: `(weights [B], params, buffers, *batch) -> {name: shape}`.

    The sum of gradients, `sum_b weights_b dL_b/dp`, in float32 or wider, as plain
    arithmetic has it: a sample whose gradient is not finite spoils the sum even with
    weight zero.

    The options are in `vgrad.persample.Options`.

    Raises:
        ValueError: `weights` is not `[B]`; else as `per_sample_grad`.

    Example:
        >>> import torch
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> weights = torch.tensor([1.0, 0.5])
        >>> weighted_grad(loss)(weights, {"w": torch.ones(2)}, {}, x)
        {'w': tensor([1.5000, 1.0000])}
    """

    problem = Problem.of(weighted_grad, loss, options, has_aux)
    return WeightedGradFn(problem, Quantity(_collect_sums, _measure_sums, _joined_sums))


def _collect_sums(part: Problem) -> Weighted:
    """Sum with the weights of a chunk."""
    check_weights(part.weights, part.batch.size)
    assert part.weights is not None
    return Weighted(part.weights, part.mask, summed=part.summed)


def _measure_sums(found: Weighted, part: Problem) -> Params:
    """Take the sums of a chunk."""
    return found.sums


def _joined_sums(parts: Iterator[Params], call: Call) -> Params:
    """Add up the sums of all chunks."""
    check_weights(call.problem.weights, call.problem.batch.size)
    sums = Sums()
    for part in parts:
        sums.add(part)
    call.summed(sums)
    return sums.rounded(call.params)


def check_weights(weights: Any, size: int) -> None:
    """Refuse what is not one real number for each sample."""
    real = isinstance(weights, Tensor) and not weights.is_complex()
    if not real or weights.shape != (size,):
        got = tuple(weights.shape) if real else type(weights).__name__
        raise ValueError(
            f"weighted_grad(loss)(weights, ...): expected one real weight a sample, a "
            f"tensor of shape ({size},), got {got}."
        )
