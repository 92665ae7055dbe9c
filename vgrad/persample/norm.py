"""The norm of every sample's gradient."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, Unpack, overload

from torch import Tensor

from vgrad.persample.engine import (
    Call,
    Norms,
    Options,
    Problem,
    Quantity,
    Transform,
    joined,
)
from vgrad.persample.engine.grouping import Grouping, Groups, check_groups, members
from vgrad.persample.factors import Norm, reductions
from vgrad.precision.loss_scale import LossScale
from vgrad.typing import ChunkSize, LossFn, Randomness, Strategy, Tree


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
    strategy: Strategy = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    has_aux: bool = False,
    loss_scale: LossScale | None = None,
) -> Transform[Any]:
    """L2 norm of every sample's gradient: `(params, buffers, *batch) -> [B]`.

    The norm is over all parameters, `sqrt(sum_p |dL_b/dp|^2)`, in float32 or wider. It
    neither overflows nor underflows on the way; only what the dtype of the result
    cannot hold is infinite. With `groups` the result is `{group: [B]}`: `"parameter"`
    for the norm of each, `"layer"` for those of one module together, or a dictionary
    from a group's name to a list of patterns of its parameters' names (`vgrad.checks`).

    Args:
        strategy: how gradients come about: `"recorded"` in one backward pass, `"vmap"`,
            `"loop"` sample by sample; `"auto"` takes the first of these that can.
        chunk_size: samples at a time; None for all, `"auto"` for what fits into memory.
        randomness: of random ops: `"error"`, `"different"` for each sample, `"same"`.
        has_aux: the loss returns `(scalar, aux)`, and the result is a pair with aux.
        loss_scale: multiplies losses before the backward pass; results are without it.

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
    function = "per_sample_norm"
    check_groups(function, groups)

    options = Problem(
        function, loss, strategy, chunk_size, randomness, has_aux, loss_scale
    )
    quantity = Quantity(_collect, partial(_measure, groups), partial(_joined, groups))
    return Transform(options, quantity)


def _collect(part: Problem) -> Norms:
    return Norms()


def _measure(groups: Groups, found: Norms, part: Problem) -> dict[str, Tensor]:
    """Join the norms of the parameters in each group."""
    dtype = reductions.norm_dtype(part.params)
    return {
        group: Norm.joint([found.norms[name] for name in names]).value.to(dtype)
        for group, names in members(part.function, groups, part.params).items()
    }


def _joined(groups: Groups, parts: Iterator[dict[str, Tensor]], call: Call) -> Any:
    """Join the norms of all chunks."""
    norms, empty = list(parts), reductions.no_norms(call.params, call.dtype)
    result = {
        group: joined(empty, [each[group] for each in norms])
        for group in members(call.problem.function, groups, call.params)
    }
    return result[""] if groups is None else result
