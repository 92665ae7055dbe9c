"""Gaussian noise on sums, sized by the sensitivity that comes with the sum.

What the noise protects against, and what it does not. The accountant's guarantee is
about real numbers and a perfect source of randomness. This file comes close to them:

* Noise is drawn and added in float64. The sum is then rounded to a grid of 2^-17 to
  2^-16 of the noise's standard deviation, and to its dtype last of all. Normal numbers
  come in pairs, from two uniform ones of 53 bits (Box and Muller): 2^53 on every circle
  of radius r around zero, 2^-50.3 r apart. The number under the logarithm is drawn with
  43 significant bits or more, however small it is, so circles are at most 2^-43 / r
  apart. (With steps of 2^-53 alone they would be farther apart than the grid beyond
  seven deviations, which one pair in 10^11 reaches.) Every square of the grid then
  holds at least 2^59 pairs: what some data set can release, every neighbouring one can,
  both numbers of a pair together. The edges of a square cut circles and steps on them,
  and the last bits of logarithm, root and tangent move a number by about 2^-51
  deviations. The probability is right to about one part in 2^32, in the mean over
  releases, as long as the sum is within sixteen deviations of zero (in general to
  2^-36 of the sum in deviations). No number is too large to be drawn. In float32 some
  values are impossible without a given sample: with a million parameters and a thousand
  steps one of them shows with a probability of about 2e-4, twenty times a delta of
  1e-5.
* The 2^-32 remain. Over the 10^9 numbers of the example they add about 1e-5 to epsilon
  if they err independently, and 0.2 if all err in one direction. A discrete Gaussian on
  the same grid, sampled with integers alone, would replace this estimate by a proof, at
  a multiple of the cost. Nor does anything here hide how long a step takes.
* The sum adds float32 gradients that are computed for the batch as a whole. An added
  sample changes how the others are rounded, which the sensitivity does not count. In
  batches of B samples whose gradients all point one way this moved the sum by up to
  4 B 2^-24 of the clip norm (1e-2 for 60,000 samples, B 2^-24 in chunks of 64). A
  gradient that is nothing but rounding errors, of terms that cancel, may change
  completely if the number of samples decides which kernel runs: one such sample beside
  the new one moved the sum by twice the sensitivity. With `chunk_size=1` or
  `strategy="loop"` no sample's gradient depends on another sample.
* Keys of streams have 128 bits and come from a keyed hash (BLAKE2b) of a secret key of
  256 bits. From there on numpy's Philox4x64-10 draws, which passes all statistical
  tests but was not made to resist cryptanalysis. On a CUDA device torch's Philox4x32-10
  draws, whose seed has 64 bits: a hash of the same key for each step.
* Losses, gradient norms and the fraction of clipped samples are not private, however
  much noise the sum gets. Do not publish them.

One draw, one release. The noise of a step is a function of the key, the step, the
member, the parameter's name and shape, and of what the plan says; its shards and
the number of threads that draw it change none of it. A step that is repeated from a
checkpoint on the same batch is therefore the same release, not a second one. That holds
as long as threads, processor, device, torch and numpy are the same: if
they are not, only what follows from one of the two attempts may be released. Two runs
that go on from copies of one state with other data, another loss or another optimizer
would add the same noise to different sums, whose difference then shows everything:
`state.fork()` gives one of them a key of its own.

The released parameters are meant for people who do not control the machine that trains
and do not look into its memory.
"""

import math
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vgrad import checks, generators
from vgrad.batches import Sensitivity
from vgrad.dp.normals import draw
from vgrad.dp.parts import Part, Share, shares
from vgrad.torch_private import modes, shards
from vgrad.tree import map_values
from vgrad.typing import Params

_GRID = 2.0**-16
"""Distance of the values that can be released, in deviations of the noise."""

_LEAST = 1e-280
"""Smallest deviation whose grid float64 can hold."""

_CUDA_BLOCK = 2**20
"""Numbers that are drawn at once on a CUDA device."""


def add_gaussian_noise(
    sums: Params,
    sensitivity: Sensitivity,
    *,
    noise_multiplier: float,
    key: Tensor,
    step: int,
    member: int = 0,
) -> Params:
    """Add independent noise to every entry. {name: shape} -> {name: shape}.

    The noise is N(0, (noise_multiplier * sensitivity.value)^2), drawn once per call:
    call this once per step, on the sum over the whole batch, even if that batch is
    empty. It is a function of the key, the step, the member, the name and shape of each
    entry and both numbers: the same call draws the same noise, any other call
    independent noise. Never use a key and a step for two different sums.

    Noise is drawn and added in float64 and rounded to `promote_types(dtype, float32)`:
    sums of half precision come back as float32. On CPU tensors it costs 10 to 15 ns
    a number and thread. No argument is changed, and entries that are not finite stay as
    they are. A noise multiplier of zero adds nothing, and the accountant then answers
    with an infinite epsilon.

    A sum may be a DTensor with placements `Shard` and `Replicate`. Each rank adds to
    its part the noise that the whole tensor would get there, bit for bit, without any
    communication: all ranks need the same key, and one type of machine. A rank draws
    every block of 2^16 numbers (2^20 on CUDA devices) of which it holds any.

    Raises:
        TypeError: `sensitivity` is a number, `key` no key, a sum not of real floats, or
            a DTensor with another placement, such as `Partial`.
        ValueError: the sensitivity is infinite, the noise multiplier negative or not
            finite, their product too small for float64, or `step` or `member` is not a
            whole number of zero or more.

    Reference:
        Abadi et al., arXiv 1607.00133; Salmon et al., Parallel random numbers, SC 2011.

    Example:
        >>> from vgrad.dp import secret_key
        >>> sums = {"weight": torch.zeros(2, dtype=torch.bfloat16)}
        >>> noisy = add_gaussian_noise(
        ...     sums, Sensitivity(0.5), noise_multiplier=2.0, key=secret_key(), step=0
        ... )
        >>> noisy["weight"].dtype
        torch.float32
    """
    deviation = _deviation("add_gaussian_noise", noise_multiplier, sensitivity)
    checks.dictionaries("add_gaussian_noise", sums=sums)
    step, member = checks.whole("add_gaussian_noise", least=0, step=step, member=member)
    generators.check_key("add_gaussian_noise", key)
    for name, total in sums.items():
        _check_sum("add_gaussian_noise", name, total)
    if noise_multiplier == 0:
        return map_values(_released, sums, sums)
    own = generators.fold_in(key, "noise", step, float(noise_multiplier), deviation)
    normals = _Normals(own, sums, member, deviation)
    # Adding and subtracting this number rounds a float64 to the grid.
    rounding = 1.5 * 2.0 ** (52 + math.floor(math.log2(deviation * _GRID)))

    found, works, count = {}, [], 0
    for name, total in sums.items():
        local, part = _held(total)
        count += local.numel()
        if _is_plain(local):
            dtype = torch.promote_types(total.dtype, torch.float32)
            noisy = torch.empty(local.shape, dtype=dtype, device="cpu")
            plain = local.detach().to(dtype).reshape(-1)
            use = _Sum(plain.numpy(), noisy.view(-1).numpy(), rounding).add
            works += normals.works(name, part, use)
        else:
            noise = normals.of(name, local, part)
            noise.add_(local.to(noise.device)).add_(rounding).sub_(rounding)
            noisy = _released(noise, local)
        if shards.is_distributed(total):
            noisy = shards.like(total, noisy)
        found[name] = noisy
    generators.on_threads(works, count)
    return found


class _Normals:
    """Normal numbers, float64, of a step's own key."""

    def __init__(
        self, key: Tensor, sums: Params, member: int, deviation: float
    ) -> None:
        self._key = key
        self._member = member
        self._deviation = deviation
        self._sums = sums

    @cached_property
    def _seed(self) -> int:
        layout = [f"{name} {tuple(total.shape)}" for name, total in self._sums.items()]
        return generators.torch_seed(self._key, *layout)

    @cached_property
    def _starts(self) -> dict[str, int]:
        """Say at which of its blocks each sum starts on a CUDA device."""
        sizes = [math.ceil(x.numel() / _CUDA_BLOCK) for x in self._sums.values()]
        starts = np.cumsum([self._member * sum(sizes), *sizes]).tolist()
        return dict(zip(self._sums, starts, strict=False))

    def of(self, name: str, like: Tensor, part: Part) -> Tensor:
        """Draw those of a part, in its shape, on its CUDA device or the CPU."""
        if like.device.type == "cuda":
            return self._on_cuda(self._starts[name], like, part)
        found = np.empty(like.numel())

        def keep(share: Share, normals: np.ndarray) -> None:
            found[share.own] = normals[share.places]

        generators.on_threads(self.works(name, part, keep), found.size)
        return torch.from_numpy(found).view(like.shape)

    def works(
        self, name: str, part: Part, use: Callable[[Share, np.ndarray], None]
    ) -> Iterator[Callable[[], None]]:
        """Yield the pieces of work that use what a part has that is not on CUDA."""
        stream = generators.stream(self._key, self._member, name, *part.shape)
        for share in shares(part, generators.BLOCK):
            yield partial(self._work, stream, share, use)

    def _work(
        self, stream: int, share: Share, use: Callable[[Share, np.ndarray], None]
    ) -> None:
        with np.errstate(all="ignore"):  # as torch does: what overflows is infinite
            use(share, draw(stream, share.number, share.count, self._deviation))

    def _on_cuda(self, start: int, like: Tensor, part: Part) -> Tensor:
        """Draw blocks at places of one stream that are farther apart than they reach.

        A generator has one seed for a step: seeds of 64 bits for every block of every
        step would collide.
        """
        source = torch.Generator(like.device).manual_seed(self._seed)
        found = torch.empty(like.numel(), dtype=torch.float64, device=like.device)
        for share in shares(part, _CUDA_BLOCK):
            # A thread takes at most four words for each number that it draws.
            source.set_offset(4 * _CUDA_BLOCK * (start + share.number))
            normals = found.new_empty(share.count).normal_(generator=source)
            places = share.places
            if not isinstance(places, slice):
                places = torch.from_numpy(places).to(like.device)
            found[share.own] = normals[places]
        return found.mul_(self._deviation).view(like.shape)


class _Sum(NamedTuple):
    """A tensor on the CPU, and what it is released as, as rows of numbers."""

    plain: np.ndarray
    noisy: np.ndarray
    rounding: float

    def add(self, share: Share, normals: np.ndarray) -> None:
        """Release a share of the sum with its noise."""
        noise = normals[share.places]
        noise += self.plain[share.own]
        noise += self.rounding
        noise -= self.rounding
        self.noisy[share.own] = noise


def _held(total: Tensor) -> tuple[Tensor, Part]:
    """Return what this process holds of a sum, and which part of it that is."""
    shape = tuple(total.shape)
    if not shards.is_distributed(total):
        return total, Part(shape, (0,) * len(shape), shape)
    local = shards.local(total)
    return local, Part(shape, shards.offsets(total), tuple(local.shape))


def _is_plain(total: Tensor) -> bool:
    """Tell whether a tensor is numbers on the CPU, and no graph leads through it."""
    follows = total.requires_grad and torch.is_grad_enabled()
    return total.is_cpu and not follows and not modes.inside_transform()


def _released(value: Tensor, total: Tensor) -> Tensor:
    """Round a value to the dtype in which a sum is released; a copy."""
    dtype = torch.promote_types(total.dtype, torch.float32)
    return value.to(total.device, dtype, copy=True)


def check_sensitivity(function: str, sensitivity: Any) -> None:
    """Refuse what is no `Sensitivity`, and an infinite one."""
    if not isinstance(sensitivity, Sensitivity):
        kind = type(sensitivity).__name__
        raise TypeError(
            f"{function}(sensitivity={checks.shown(sensitivity)}): expected the "
            f"Sensitivity of the sum, got a {kind}. Take the one that comes with the "
            f"sum, clipped_grad(...).sensitivity."
        )
    if not math.isfinite(sensitivity.value):
        raise ValueError(
            f"{function}(sensitivity={sensitivity!r}): expected a finite sensitivity, "
            f"got {sensitivity.value}. Clip the gradients with a finite max_norm."
        )


def _deviation(
    function: str, noise_multiplier: float, sensitivity: Sensitivity
) -> float:
    """Return the standard deviation of the noise, which has a grid or is zero."""
    check_sensitivity(function, sensitivity)
    checks.non_negative(function, noise_multiplier=noise_multiplier)
    checks.finite(function, noise_multiplier=noise_multiplier)
    deviation = noise_multiplier * sensitivity.value
    if noise_multiplier != 0 and not _LEAST < deviation < 1 / _LEAST:
        raise ValueError(
            f"{function}(noise_multiplier={noise_multiplier!r}, {sensitivity}): "
            f"expected a standard deviation between {_LEAST} and {1 / _LEAST}, got "
            f"{deviation!r}. Clip to another norm."
        )
    return deviation


def _check_sum(function: str, name: str, total: Tensor) -> None:
    if not total.is_floating_point():
        raise TypeError(
            f"{function}(sums[{name!r}]): expected a tensor of real floating-point "
            f"numbers, got {total.dtype}. Noise is for sums of gradients."
        )
    if shards.is_distributed(total) and shards.unsupported_placements(total):
        raise TypeError(
            f"{function}(sums[{name!r}]): expected a DTensor of Shard and Replicate "
            f"alone, got {shards.unsupported_placements(total)}. Noise comes after the "
            f"reduction: redistribute the sum first."
        )
