"""The per-sample transforms: what can be had from the gradient of every sample.

Each takes a loss of one sample, `loss(params, buffers, *sample) -> scalar`, and returns
a function of `(params, buffers, *batch)`. B samples; every tensor of the batch is
`[B, ...]`. They share these options:

* `strategy`: how the gradients come about; the numbers are the same.
  `"recorded"` runs one backward pass for all samples and keeps a compact form of each
  gradient; `"vmap"` differentiates all samples at once and stores every gradient;
  `"loop"` runs one sample after another, and whatever plain autograd runs. `"auto"`
  records, and takes `"vmap"` inside transforms of `torch.func` and for losses that
  cannot be recorded.
* `chunk_size`: how many samples at a time; `None` for all, `"auto"` for what fits into
  half of the free memory (found by running the loss on one sample).
* `randomness`: what a random op in the loss does: `"error"`, `"different"` (each
  sample draws its own) or `"same"` (all samples draw the same). From one state of the
  generator a loop draws what the model would, called with one sample after another; the
  others draw for all samples at once, and agree with it under `"same"` alone.
* `loss_scale`: a loss scale of `vgrad.precision`. Losses are multiplied by it before
  the backward pass, so that gradients in float16 do not become zero on the way, and
  each sample's gradient is divided by it before anything else: results do not depend on
  the scale as long as nothing overflows. Gradients are float32 or wider then.
* `has_aux`: the loss returns `(scalar, aux)` and the function `(result, aux)`, with
  `aux` stacked over samples (`None` for an empty batch).

What a transform is given does not change: samples are copies, and an op of the loss
that would write into parameters or buffers, `.data` or not, is refused before it runs.
Only what torch does not see could, as `.detach().numpy()[0] = 0` or compiled code.

The loss runs under the autocast of the caller; everything else is float32 or wider.
Recorded results are constants: where an argument requires grad (and grad mode is on),
differentiating one raises. Those of `"vmap"` and `"loop"` can be differentiated; what
the loss closes over is a constant for `"loop"` then, so hand it over in `params` or
`buffers`.

Where one tensor stands for all samples, code of the loss that asks it something (does
it require grad, which version is it, what is at this address) gets the answer of
`"loop"` or an `UnsupportedOp`; so it does where one stands for all members of an
ensemble. Three things are other than in a loop without an error. Functions that ask for
the transforms of `torch.func` themselves find some. Strides and contiguity of what an
op returns may differ: a copy made only where they do has the same numbers, and writes
in place that come to something else are refused. And `Tensor.set_`, which no function
mode sees, changes nothing. If no gradient of a parameter arrives, one sample runs by
plain autograd, once for a transform and such parameters: zero is what it finds zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vgrad import batches, tree
from vgrad.batches import ChunkSize
from vgrad.dtypes import wide
from vgrad.persample.engine.collectors import Gradients, Norms, Weighted
from vgrad.persample.engine.options import Options, Transform, joined
from vgrad.persample.engine.problem import Randomness
from vgrad.persample.factors import reductions
from vgrad.persample.factors.reductions import Norm
from vgrad.persample.factors.sums import Sums
from vgrad.persample.grouping import Grouping
from vgrad.precision.loss_scale import LossScale
from vgrad.typing import Buffers, LossFn, Params, Tree


def per_sample_grad(
    loss: LossFn,
    *,
    strategy: str = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    has_aux: bool = False,
    loss_scale: LossScale | None = None,
) -> Transform:
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
        "per_sample_grad",
        loss,
        strategy,
        chunk_size,
        randomness,
        has_aux,
        loss_scale=loss_scale,
    )

    def gradients(params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        parts = list(options.chunks(params, buffers, batch, Gradients))
        grads = {
            name: joined(
                value.new_zeros((0, *value.shape)),
                [each.collected.grads[name] for each in parts],
            ).to(_grad_dtype(value.dtype, loss_scale))
            for name, value in params.items()
        }
        return options.result(tree.map_values(_own_memory, grads), parts)

    return Transform(options, gradients)


def per_sample_norm(
    loss: LossFn,
    *,
    groups: str | Mapping[str, str | Sequence[str]] | None = None,
    strategy: str = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    has_aux: bool = False,
    loss_scale: LossScale | None = None,
) -> Transform:
    """L2 norm of every sample's gradient: `(params, buffers, *batch) -> [B]`.

    The norm is over all parameters, `sqrt(sum_p |dL_b/dp|^2)`, in float32 or wider. It
    neither overflows nor underflows on the way; infinite is only what the dtype of the
    result cannot hold. With `groups` the result is `{group: [B]}`: `"parameter"` for
    the norm of each, `"layer"` for those of one module together, or a dictionary from a
    group's name to shell-style patterns of its parameters' names.

    Raises:
        ValueError: a pattern of `groups` matches nothing, or two match one parameter;
            else as `per_sample_grad`.
        UnsupportedOp: as `per_sample_grad`.

    Example:
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> per_sample_norm(loss)({"w": torch.ones(2)}, {}, x)
        tensor([5., 0.])
    """
    options = Options(
        "per_sample_norm",
        loss,
        strategy,
        chunk_size,
        randomness,
        has_aux,
        loss_scale=loss_scale,
    )
    grouping = Grouping("per_sample_norm", {"": "*"} if groups is None else groups)

    def norms(params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        dtype = reductions.norm_dtype(params)
        members = grouping.members(params)
        found: dict[str, list[Tensor]] = {group: [] for group in members}
        parts = []
        for chunk in options.chunks(params, buffers, batch, Norms):
            for group, names in members.items():
                each = [chunk.collected.norms[name] for name in names]
                found[group].append(Norm.joint(each).value.to(dtype))
            parts.append(chunk)
        empty = reductions.no_norms(params, dtype)
        result = {group: joined(empty, each) for group, each in found.items()}
        return options.result(result[""] if groups is None else result, parts)

    return Transform(options, norms)


def weighted_grad(
    loss: LossFn,
    *,
    strategy: str = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    has_aux: bool = False,
    loss_scale: LossScale | None = None,
) -> Transform:
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
    options = Options(
        "weighted_grad",
        loss,
        strategy,
        chunk_size,
        randomness,
        has_aux,
        loss_scale=loss_scale,
    )

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
        sums, parts = Sums(), []

        def collect() -> Weighted:
            start = sum(len(each.losses) for each in parts)
            return Weighted(weights[start:])

        for chunk in options.chunks(params, buffers, batch, collect, (weights,)):
            sums.add(chunk.collected.sums)
            parts.append(chunk._replace(collected=None))
        return options.result(sums.rounded(params), parts)

    return Transform(options, weighted)


def _grad_dtype(dtype: torch.dtype, loss_scale: LossScale | None) -> torch.dtype:
    """Return the parameter's dtype, in which an unscaled gradient might be zero."""
    return dtype if loss_scale is None else wide(dtype)


def _own_memory(grad: Tensor) -> Tensor:
    """Give every entry memory of its own where vmap lets several share it."""
    sizes = zip(grad.stride(), grad.shape, strict=True)
    shared = any(step == 0 and size > 1 for step, size in sizes)
    return grad.clone(memory_format=torch.contiguous_format) if shared else grad
