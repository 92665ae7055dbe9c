"""Gaussian noise on gradients, drawn from a seed and a count that live in the state.

The generator is Philox4x32-10, whose numbers are a function of a key and a counter. It
needs no state of its own and no operation that `torch.vmap` or `torch.compile` treat as
random, so each member can have a seed, and a checkpoint goes on with the same noise.

This noise helps training. It gives no privacy: that takes `vgrad.dp`.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.optim.arguments import Number, check_real, plain
from vgrad.optim.arithmetic import counter, scalar
from vgrad.optim.base import GradientTransformation, Grads, Updates
from vgrad.torch_private import shards
from vgrad.tree import widened
from vgrad.typing import Params

_WORD = 2**32 - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, ...]
"""Numbers of 32 bits without sign, in tensors of int64."""


class NoiseState(NamedTuple):
    """State of `add_noise`: the number of steps taken and the seed."""

    count: Tensor
    seed: Tensor


def add_noise(
    eta: Number, gamma: Number, *, seed: int | Tensor
) -> GradientTransformation:
    """Add Gaussian noise of the variance `eta / t^gamma` at step `t = 1, 2, ...`.

    The draws of a step are a function of the seed, of `t` and of the sizes of the
    gradients. The state holds seed and count, so that training goes on with the same
    noise after a checkpoint; the `seed` of the transformation is for `init` alone. To
    give members their own noise, put `init` under `torch.vmap` with seeds of shape [E].

    Draws have 32 random bits and never exceed 6.8 standard deviations. Drawing takes
    about four times the memory of the parameters in float32, where they are cut among
    ranks too: each rank draws all of it, and any number of ranks adds the same bits.

    Raises:
        ValueError: `eta` or `gamma` is negative or infinite, or the seed is not a whole
            number from zero to below 2^63.

    Reference: Neelakantan et al., arXiv 1511.06807; for the generator, Salmon et al.,
    Parallel random numbers: as easy as 1, 2, 3, SC 2011.

    Example:
        >>> noise = add_noise(1.0, 0.55, seed=1)
        >>> grads = {"w": torch.zeros(2)}
        >>> once, state = noise.update(grads, noise.init(grads))
        >>> again, _ = noise.update(grads, noise.init(grads))
        >>> torch.equal(once["w"], again["w"])
        True
    """
    checks.finite("add_noise", **plain(eta=eta, gamma=gamma))
    checks.non_negative("add_noise", **plain(eta=eta, gamma=gamma))
    checks.whole("add_noise", least=0, **plain(seed=seed))
    checks.between("add_noise", -1, 2**63, **plain(seed=seed))

    def init(params: Params) -> NoiseState:
        check_real("add_noise", params)
        count = counter(params)
        return NoiseState(count, count + scalar(seed, count))

    def update(
        grads: Grads, state: NoiseState, params: Params | None = None
    ) -> tuple[Updates, NoiseState]:
        count = state.count + 1
        steps = count.double()
        variance = scalar(eta, steps) / steps ** scalar(gamma, steps)
        # The slope of a root is infinite at zero, where there is no noise.
        some = variance > 0
        deviation = torch.where(some, variance, 1.0).sqrt() * some

        given = {name: widened(g) for name, g in grads.items() if g is not None}
        noise = _normal(given, state.seed, state.count)
        updates: Updates = dict(grads)
        for name, grad in given.items():
            updates[name] = grad + scalar(deviation, grad) * noise[name]
        return updates, NoiseState(count, state.seed)

    return GradientTransformation(init, update)


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
    parts = flat[: sum(sizes)].split(sizes)

    def placed(part: Tensor, value: Tensor) -> Tensor:
        part = part.reshape(value.shape).to(value.device, value.dtype)
        return shards.cut(part, value) if shards.is_distributed(value) else part

    pairs = zip(like.items(), parts, strict=True)
    return {name: placed(part, value) for (name, value), part in pairs}


def philox(counter: Words, key: Words) -> Words:
    """Compute Philox4x32-10: four random words for each counter of four words.

    Example:
        >>> zero = torch.tensor(0)
        >>> [hex(int(word)) for word in philox((zero,) * 4, (zero,) * 2)]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps at 64 bits; a shift extends the sign, which is cut off.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3
