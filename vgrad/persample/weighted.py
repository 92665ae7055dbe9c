"""The weighted sum of the samples' gradients."""

from collections.abc import Iterator
from typing import Any, Literal, Unpack, overload

from torch import Tensor

from vgrad.persample.engine import (
    Call,
    Options,
    Problem,
    Quantity,
    Transform,
    Weighted,
)
from vgrad.persample.factors import Sums
from vgrad.precision.loss_scale import LossScale
from vgrad.typing import (
    Buffers,
    ChunkSize,
    LossFn,
    Params,
    Randomness,
    Result,
    Strategy,
    Tree,
)


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
    strategy: Strategy = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    has_aux: bool = False,
    loss_scale: LossScale | None = None,
) -> WeightedGradFn[Any]:
    """Weighted sum: `(weights [B], params, buffers, *batch) -> {name: shape}`.

    The sum of gradients, `sum_b weights_b dL_b/dp`, in float32 or wider, as plain
    arithmetic has it: a sample whose gradient is not finite spoils the sum even with
    weight zero.

    Args:
        strategy: how gradients come about: `"recorded"` in one backward pass, `"vmap"`,
            `"loop"` sample by sample; `"auto"` takes the first of these that can.
        chunk_size: samples at a time; None for all, `"auto"` for what fits into memory.
        randomness: of random ops: `"error"`, `"different"` for each sample, `"same"`.
        has_aux: the loss returns `(scalar, aux)`, and the result is a pair with aux.
        loss_scale: multiplies losses before the backward pass; results are without it.

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

    options = Problem(
        "weighted_grad", loss, strategy, chunk_size, randomness, has_aux, loss_scale
    )
    return WeightedGradFn(options, Quantity(_collect, _measure, _joined))


def _collect(part: Problem) -> Weighted:
    """Sum with the weights of a chunk."""
    check_weights(part.weights, part.batch.size)
    assert part.weights is not None
    return Weighted(part.weights, part.mask, summed=part.summed)


def _measure(found: Weighted, part: Problem) -> Params:
    """Take the sums of a chunk."""
    return found.sums


def _joined(parts: Iterator[Params], call: Call) -> Params:
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
