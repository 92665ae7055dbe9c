"""Gradients kept in bounds: clipping, centring, NaN replaced by zero; and noise.

All of it acts on gradients that were already summed or averaged over a batch. It does
not bound the influence of single samples, as `vgrad.clipped_grad` does, and the noise
gives no privacy, as `vgrad.dp` does.
"""

import math
from functools import reduce

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.base import (
    GradientTransformation,
    Grads,
    Number,
    State,
    check_real,
    counter,
    length,
    map_grads,
    of_gradient,
    of_gradient_and_parameter,
    per_parameter,
    plain,
    root,
    scalar,
    stateless,
)
from vgrad.torch_private import shards
from vgrad.tree import widened
from vgrad.typing import Params


def clip_by_value(clip_value: Number) -> GradientTransformation:
    """Clip every entry to `[-clip_value, clip_value]`; an entry that is NaN stays NaN.

    Example:
        >>> clip_by_value(1.0).update({"w": torch.tensor([0.5, -3.0])}, ())
        ({'w': tensor([ 0.5000, -1.0000])}, ())
    """
    checks.positive("clip_by_value", **plain(clip_value=clip_value))

    def clip(grad):
        bound = scalar(clip_value, grad)
        return grad.clamp(-bound, bound)

    return of_gradient(clip)


def clip_by_global_norm(max_norm: Number) -> GradientTransformation:
    """Shrink all gradients by one factor where their common norm exceeds `max_norm`.

    The factor is `min(max_norm / (norm + 1e-6), 1)` with the norm of `global_norm`, as
    in `torch.nn.utils.clip_grad_norm_`. If the norm is infinite, entries that are not
    finite become NaN, and all others zero. Reference: Pascanu et al., arXiv 1211.5063.

    Example:
        >>> clip = clip_by_global_norm(1.0)
        >>> clip.update({"w": torch.tensor([3.0]), "b": torch.tensor([-4.0])}, ())[0]
        {'w': tensor([0.6000]), 'b': tensor([-0.8000])}
    """
    checks.positive("clip_by_global_norm", **plain(max_norm=max_norm))

    def update(grads, params):
        norm = global_norm(grads)
        factor = (scalar(max_norm, norm) / (norm + 1e-6)).clamp(max=1.0)

        def shrink(grad):
            grad = widened(grad)
            return grad * factor.to(grad.device, grad.dtype)

        return map_grads(shrink, grads)

    return stateless(update)


def global_norm(grads: Grads) -> Tensor:
    """Compute the norm of all entries of all tensors together: `{name: shape} -> []`.

    The squares are summed in `promote_types(dtype, float32)`. Its gradient is zero if
    all entries are. None counts as zero.

    Example:
        >>> global_norm({"w": torch.tensor([3.0]), "b": torch.tensor([-4.0])})
        tensor(5.)
    """
    total = torch.zeros(())
    for grad in grads.values():
        if grad is not None:
            square = widened(grad).abs().square().sum()
            # Without dimensions on either side, the wider dtype of the two.
            total = total.to(square.device) + square
    return length(total)


def clip_by_block_rms(threshold: Number) -> GradientTransformation:
    """Divide each tensor by `max(rms / threshold, 1)`, with its root mean square.

    Reference: Shazeer and Stern, arXiv 1804.04235, section 6.

    Example:
        >>> clip_by_block_rms(1.0).update({"w": torch.tensor([2.0, -2.0])}, ())
        ({'w': tensor([ 1., -1.])}, ())
    """
    checks.positive("clip_by_block_rms", **plain(threshold=threshold))

    def clip(grad):
        rms = root(grad.abs().square().sum() / max(grad.numel(), 1))
        return grad / (rms / scalar(threshold, rms)).clamp(min=1.0)

    return of_gradient(clip)


def adaptive_grad_clip(
    clipping: Number, *, eps: Number = 1e-3
) -> GradientTransformation:
    """Clip the gradient of each unit relative to the norm of the unit's parameters.

    A gradient `g` of parameters `p` whose norm exceeds
    `bound = clipping * max(norm(p), eps)` becomes `g * bound / max(norm(g), 1e-6)`. A
    unit is one entry of the first dimension, or a tensor with at most one dimension
    longer than one. Reference: Brock et al., arXiv 2102.06171.

    Example:
        >>> params = {"w": torch.tensor([3.0, 4.0])}
        >>> adaptive_grad_clip(0.5).update({"w": torch.tensor([6.0, 8.0])}, (), params)
        ({'w': tensor([1.5000, 2.0000])}, ())
    """
    checks.positive("adaptive_grad_clip", **plain(clipping=clipping, eps=eps))

    def unit_norm(value):
        """Return the norm of each unit, in a shape that broadcasts."""
        square = value.abs().square()
        if sum(size > 1 for size in value.shape) <= 1:
            return root(square.sum())
        return root(square.sum(dim=tuple(range(1, value.ndim)), keepdim=True))

    def clip(grad, param):
        norm = unit_norm(grad)
        size = unit_norm(param).to(norm.dtype).clamp(min=scalar(eps, norm))
        bound = scalar(clipping, norm) * size
        clipped = grad * (bound / norm.clamp(min=1e-6))
        return torch.where(norm < bound, grad, clipped)

    return of_gradient_and_parameter("adaptive_grad_clip", clip)


def centralize() -> GradientTransformation:
    """Subtract the mean of each unit from its gradient: `g - mean(g)`.

    A unit is one entry of the first dimension. Tensors of fewer than two stay as they
    are. Reference: Yong et al., arXiv 2004.01461.

    Example:
        >>> centralize().update({"w": torch.tensor([[1.0, 3.0]])}, ())
        ({'w': tensor([[-1.,  1.]])}, ())
    """

    def centre(grad):
        if grad.ndim < 2:
            return grad
        return grad - grad.mean(dim=tuple(range(1, grad.ndim)), keepdim=True)

    return of_gradient(centre)


def zero_nans() -> GradientTransformation:
    """Replace every entry that is NaN by zero, and note where there was one.

    Infinite entries stay. To leave out the whole step instead, see `apply_if_finite`.

    Example:
        >>> grads = {"w": torch.tensor([1.0, float("nan")])}
        >>> updates, state = zero_nans().update(grads, zero_nans().init(grads))
        >>> updates, state.slots["found"]
        ({'w': tensor([1., 0.])}, {'w': tensor(True)})
    """

    def none(param):
        return torch.zeros((), dtype=torch.bool, device=param.device)

    def rule(g, found):
        wide = widened(g)
        # Of a DTensor, a count is compared once its parts are added up; `any` is not.
        return torch.where(wide.isnan(), 0.0, wide), g.isnan().sum() > 0

    return per_parameter("zero_nans", {"found": none}, lambda count: rule, real=False)


def add_noise(
    eta: Number, gamma: Number, *, seed: int | Tensor
) -> GradientTransformation:
    """Add Gaussian noise of the variance `eta / t^gamma` at step `t = 1, 2, ...`.

    The draws of a step are a function of the seed and the count in the state, and of
    the sizes of the gradients: training goes on with the same noise after a checkpoint.
    To give members their own noise, put `init` under `torch.vmap` with seeds `[E]`.
    Drawing takes about four times the memory of the parameters in float32, on every
    rank. Reference: Neelakantan et al., arXiv 1511.06807; Salmon et al., SC 2011.

    Example:
        >>> noise, grads = add_noise(1.0, 0.55, seed=1), {"w": torch.zeros(2)}
        >>> once, again = (noise.update(grads, noise.init(grads))[0] for _ in range(2))
        >>> torch.equal(once["w"], again["w"])
        True
    """
    checks.finite("add_noise", **plain(eta=eta, gamma=gamma))
    checks.non_negative("add_noise", **plain(eta=eta, gamma=gamma))
    checks.whole("add_noise", least=0, **plain(seed=seed))
    checks.between("add_noise", -1, 2**63, **plain(seed=seed))

    def init(params):
        check_real("add_noise", params)
        count = counter(params)
        return State(count, {"seed": count + scalar(seed, count)})

    def update(grads, state, params=None):
        count = state.count + 1
        steps = count.double()
        variance = scalar(eta, steps) / steps ** scalar(gamma, steps)
        # The slope of a root is infinite at zero, where there is no noise.
        some = variance > 0
        deviation = torch.where(some, variance, 1.0).sqrt() * some
        present = {name: widened(g) for name, g in grads.items() if g is not None}
        noise = _normal(present, state.slots["seed"], state.count)
        updates = dict(grads)
        for name, grad in present.items():
            updates[name] = grad + scalar(deviation, grad) * noise[name]
        return updates, State(count, state.slots)

    return GradientTransformation(init, update)


_WORD = 2**32 - 1


def _normal(like: Params, seed: Tensor, count: Tensor) -> Params:
    """Draw normal numbers of the shapes, dtypes and devices of tensors."""
    # All at once: the rounds are about a hundred small operations for each call.
    sizes = [value.numel() for value in like.values()]
    dtypes = (value.dtype for value in like.values())
    dtype = reduce(torch.promote_types, dtypes, torch.float32)
    blocks = torch.arange(math.ceil(sum(sizes) / 4), device=seed.device)
    place = (blocks & _WORD, blocks >> 32, count & _WORD, count >> 32)
    words = philox(place, (seed & _WORD, (seed >> 32) & _WORD))
    # By Box and Muller, from uniform numbers that are never zero.
    first, second, third, fourth = ((w.to(dtype) + 0.5) / 2**32 for w in words)
    radius = (-2 * torch.stack((first, second)).log()).sqrt()
    angle = 2 * math.pi * torch.stack((third, fourth))
    flat = torch.cat((radius * angle.cos(), radius * angle.sin())).flatten()
    noise = {}
    parts = flat[: sum(sizes)].split(sizes)
    for (name, value), part in zip(like.items(), parts, strict=True):
        part = part.reshape(value.shape).to(value.device, value.dtype)
        distributed = shards.is_distributed(value)
        noise[name] = shards.cut(part, value) if distributed else part
    return noise


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute Philox4x32-10: four random words for each counter of four words.

    To `torch.vmap` no operation is random, so that each member can have a seed.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product wraps at 64 bits; a shift extends the sign, which is cut off.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3
