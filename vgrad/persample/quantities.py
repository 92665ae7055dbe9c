"""The per-sample transforms: what can be had from the gradient of every sample.

Each takes a loss of one sample, `loss(params, buffers, *sample) -> scalar`, and returns
a function of `(params, buffers, *batch)`. B samples; every tensor of the batch is
`[B, ...]`. They share these options:

* `strategy`: `"auto"`, `"vmap"` (all samples at once) or `"loop"` (one after another,
  runs whatever plain autograd runs). The numbers are the same.
* `chunk_size`: how many samples at a time; `None` for all, `"auto"` for what fits into
  half of the free memory (found by running the loss on one sample).
* `randomness`: what a random op in the loss does: `"error"`, `"different"` (each
  sample draws its own) or `"same"` (all samples draw the same).
* `has_aux`: the loss returns `(scalar, aux)` and the function `(result, aux)`, with
  `aux` stacked over samples (`None` for an empty batch).

The loss runs under the autocast of the caller; everything else is float32 or wider.
Where an argument requires grad (and grad mode is on), results can be differentiated;
under `torch.no_grad()` they keep no graph. What a loss closes over is a constant for
`"loop"`: hand it over in `params` or `buffers` to differentiate the result by it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks, tree
from vgrad.persample import batches, reductions
from vgrad.persample.batches import ChunkSize
from vgrad.persample.options import Options, joined, outside_inference_mode
from vgrad.persample.sensitivity import Sensitivity
from vgrad.persample.strategies import Randomness
from vgrad.typing import Buffers, LossFn, Params, Tree


class ClippedGrad(NamedTuple):
    """What `clipped_grad` computes. Only `grads`, with noise, is private.

    Attributes:
        grads: sum over samples of the clipped gradients, divided by `normalize_by`;
            `{name: shape}` in float32 or wider.
        norms: L2 norm of each sample's gradient before clipping, `[B]`.
        losses: loss of each sample, `[B]`.
        clipped: how many finite samples had a norm above `max_norm`.
        nonfinite: how many samples had an infinite or NaN gradient; they add zero.
    """

    grads: Params
    norms: Tensor
    losses: Tensor
    clipped: Tensor
    nonfinite: Tensor


def per_sample_grad(
    loss: LossFn,
    *,
    strategy: str = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Gradient of every sample: `(params, buffers, *batch) -> {name: [B, *shape]}`.

    The dtype is that of the parameters. It stores B gradients, so where a norm or a sum
    is wanted, use the transform that computes it.

    Raises:
        ValueError: an option or the batch is not what the module's text says.
        UnsupportedOp: the strategy cannot run an op of the loss.

    Example:
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum() ** 2
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> per_sample_grad(loss)({"w": torch.ones(2)}, {}, x)
        {'w': tensor([[ 2.,  0.],
                [ 6., 12.]])}
    """
    options = Options(
        "per_sample_grad", loss, strategy, chunk_size, randomness, has_aux
    )

    @outside_inference_mode
    def gradients(params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        parts = list(options.chunks(params, buffers, batch))
        grads = {
            name: joined(
                value.new_zeros((0, *value.shape)), [each.grads[name] for each in parts]
            )
            for name, value in params.items()
        }
        return options.result(tree.map_values(_own_memory, grads), parts)

    return gradients


def per_sample_norm(
    loss: LossFn,
    *,
    strategy: str = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    has_aux: bool = False,
) -> Callable[..., Any]:
    """L2 norm of every sample's gradient: `(params, buffers, *batch) -> [B]`.

    The norm is over all parameters, `sqrt(sum_p |dL_b/dp|^2)`, in float32 or wider. It
    neither overflows nor underflows on the way; infinite is only what the dtype of the
    result cannot hold.

    Raises:
        ValueError, UnsupportedOp: as `per_sample_grad`.

    Example:
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> per_sample_norm(loss)({"w": torch.ones(2)}, {}, x)
        tensor([5., 0.])
    """
    options = Options(
        "per_sample_norm", loss, strategy, chunk_size, randomness, has_aux
    )

    @outside_inference_mode
    def norms(params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        dtype = reductions.norm_dtype(params)
        found, parts = [], []
        for chunk in options.chunks(params, buffers, batch):
            found.append(reductions.sample_norms(chunk.grads).to(dtype))
            chunk = chunk.without_grads()  # frees them before the next ones come
            parts.append(chunk)
        return options.result(joined(reductions.no_norms(params, dtype), found), parts)

    return norms


def weighted_grad(
    loss: LossFn,
    *,
    strategy: str = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Weighted sum: `(weights [B], params, buffers, *batch) -> {name: shape}`.

    The sum of gradients, `sum_b weights_b dL_b/dp`, in float32 or wider, as plain
    arithmetic has it: a sample whose gradient is not finite spoils the sum even with
    weight zero.

    Raises:
        ValueError: `weights` is not `[B]`; else as `per_sample_grad`.

    Example:
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> weights = torch.tensor([1.0, 0.5])
        >>> weighted_grad(loss)(weights, {"w": torch.ones(2)}, {}, x)
        {'w': tensor([1.5000, 1.0000])}
    """
    options = Options("weighted_grad", loss, strategy, chunk_size, randomness, has_aux)

    @outside_inference_mode
    def weighted(
        weights: Tensor, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> Any:
        size = batches.read("weighted_grad", batch).size
        real = isinstance(weights, Tensor) and not weights.is_complex()
        if not real or weights.shape != (size,):
            got = tuple(weights.shape) if real else type(weights).__name__
            raise ValueError(
                f"weighted_grad(loss)(weights, ...): expected one real weight a "
                f"sample, a tensor of shape ({size},), got {got}."
            )
        total, parts, start = reductions.zero_sums(params), [], 0
        for chunk in options.chunks(params, buffers, batch):
            stop = start + len(chunk.losses)
            part = reductions.weighted_sum(chunk.grads, weights[start:stop])
            total = tree.map_values(torch.add, total, part)
            chunk = chunk.without_grads()  # frees them before the next ones come
            parts.append(chunk)
            start = stop
        return options.result(reductions.rounded(total, params), parts)

    return weighted


def clipped_grad(
    loss: LossFn,
    *,
    max_norm: float,
    normalize_by: float = 1.0,
    strategy: str = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    has_aux: bool = False,
) -> "ClippedGradFn":
    """Sum of clipped gradients: `(params, buffers, *batch) -> ClippedGrad`.

    Each sample's gradient g is scaled by `min(1, max_norm / |g|)`, and the sum is
    divided by `normalize_by`, for which private training takes the expected batch size,
    a public constant. The function's `.sensitivity` says what noise has to hide.

    Guarantee: no sample adds more than `max_norm (1 + 1e-6) / normalize_by` in L2 norm,
    in the arithmetic that ran, with parameters of any dtype and under autocast. A
    sample whose gradient is not finite adds exactly zero. An empty batch gives zeros
    without running the loss. The sum is kept in float64 and rounded once at the end.

    Reference: Abadi et al., Deep Learning with Differential Privacy, arXiv 1607.00133.

    Raises:
        ValueError: `max_norm` or `normalize_by` is not positive; else as
            `per_sample_grad`.

    Example:
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> clipped = clipped_grad(loss, max_norm=1.0)
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.5], [torch.inf, 0.0]])
        >>> result = clipped({"w": torch.ones(2)}, {}, x)
        >>> result.grads
        {'w': tensor([0.6000, 1.3000])}
        >>> result.clipped, result.nonfinite, clipped.sensitivity.value
        (tensor(1), tensor(1), 1.0)
    """
    checks.positive("clipped_grad", max_norm=max_norm, normalize_by=normalize_by)
    options = Options("clipped_grad", loss, strategy, chunk_size, randomness, has_aux)
    return ClippedGradFn(options, float(max_norm), float(normalize_by))


class ClippedGradFn:
    """What `clipped_grad` returns: a function that knows its sensitivity.

    Attributes:
        sensitivity: how far adding or removing one sample can move the sum.
    """

    def __init__(self, options: Options, max_norm: float, normalize_by: float) -> None:
        """Keep what `clipped_grad` was given."""
        self._options = options
        self._max_norm = max_norm
        self._normalize_by = normalize_by
        self.sensitivity = Sensitivity(max_norm / normalize_by)

    @outside_inference_mode
    def __call__(self, params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        """Return a `ClippedGrad`, or with `has_aux` a pair of it and aux."""
        dtype = reductions.norm_dtype(params)
        total = reductions.zero_sums(params)
        found, parts = [], []
        for chunk in self._options.chunks(params, buffers, batch):
            norms = reductions.sample_norms(chunk.grads)
            keep = norms.isfinite()
            factors = _factors(self._max_norm, torch.where(keep, norms, 1), dtype)
            part = reductions.weighted_sum(chunk.grads, factors, keep)
            total = tree.map_values(torch.add, total, part)
            found.append(norms)
            chunk = chunk.without_grads()  # frees them before the next ones come
            parts.append(chunk)
        norms = joined(reductions.no_norms(params, torch.float64), found)
        losses = [each.losses for each in parts]
        finite = norms.isfinite()
        means = tree.map_values(lambda each: each / self._normalize_by, total)
        result = ClippedGrad(
            grads=reductions.rounded(means, params),
            norms=norms.to(dtype),
            losses=joined(reductions.no_norms(params, dtype), losses),
            clipped=(finite & (norms > self._max_norm)).sum(),
            nonfinite=(~finite).sum(),
        )
        return self._options.result(result, parts)


def _factors(max_norm: float, norms: Tensor, dtype: torch.dtype) -> Tensor:
    """Clip factors [B], rounded down so that no product is above the bound."""
    exact = (max_norm / norms).clamp(max=1)
    factors = exact.to(dtype)
    below = torch.nextafter(factors, torch.zeros_like(factors))
    return torch.where(factors > exact, below, factors)


def _own_memory(grad: Tensor) -> Tensor:
    """Give every entry memory of its own where vmap lets several share it."""
    sizes = zip(grad.stride(), grad.shape, strict=True)
    shared = any(step == 0 and size > 1 for step, size in sizes)
    return grad.clone(memory_format=torch.contiguous_format) if shared else grad
