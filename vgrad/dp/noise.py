"""Gaussian noise on sums, sized by the sensitivity that comes with the sum.

The guarantee of the accountant is about real numbers and a perfect source of
randomness. This file comes close to them:

* Noise is drawn and added in float64. The sum is then rounded to a grid of 2^-17 to
  2^-16 deviations, and to its dtype last of all. Two uniform numbers u and v of 53 bits
  give two normal ones (Box and Muller, 1958),
  `sqrt(-2 log u) cos(2 pi v)` and `sqrt(-2 log u) sin(2 pi v)`, and u has 43
  significant bits or more, however small it is. Every square of the grid then holds at
  least 2^59 pairs: every value that one data set can release is also reachable from
  each neighbouring one, jointly for both numbers of a pair. The probability is right to
  about one part in 2^32, in the mean over releases, as long as the sum is within
  sixteen deviations of zero (in general to 2^-36 of the sum in deviations). Over 10^9
  numbers that adds about 1e-5 to epsilon if the errors are independent, and 0.2 if all
  have one direction; a discrete Gaussian would replace the estimate by a proof, at a
  multiple of the cost. In float32 some values are impossible without a given sample,
  and with 10^9 numbers one of them shows with a probability of about 2e-4.
* The sum adds float32 gradients that are computed for the batch as a whole. An added
  sample changes how the others are rounded, which the sensitivity does not count: by up
  to 4 B 2^-24 of the clip norm in batches of B samples (B 2^-24 in chunks of 64), and
  by twice the sensitivity where a gradient is nothing but rounding errors. With
  `chunk_size=1` or `strategy="loop"` no sample's gradient depends on another sample.
* Keys of streams have 128 bits and come from a keyed hash (BLAKE2b) of a secret key of
  256 bits. From there on numpy's Philox4x64-10 draws, which passes all statistical
  tests but was not made to resist cryptanalysis. On a CUDA device torch's Philox4x32-10
  draws, whose seed has 64 bits: a hash of the same key for each step.
* Losses, gradient norms, the fraction of clipped samples and the time of a step are not
  private, however much noise the sum gets. Nor is the memory of the machine.

One draw, one release. The noise of a step is a function of the key, the step, the
member, the parameter's name and shape, and of the plan's numbers, in blocks of one
stream for each tensor in row-major order; sharding and the number of threads do not
change it. A step that is repeated from a checkpoint on the same batch is therefore the
same release, as long as processor, device, torch and numpy are the same: else release
the results of only one of the two attempts. Two runs that continue from copies of one
state with other data, another loss or another optimizer would add the same noise to
different sums, whose difference then reveals everything: `state.fork()` gives one of
them a new key.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from vgrad import checks, generators
from vgrad.batches import Sensitivity
from vgrad.torch_private import modes, shards
from vgrad.tree import map_values
from vgrad.typing import Params

_GRID = 2.0**-16
"""Distance of the values that can be released, in deviations of the noise."""

_LEAST = 1e-280
"""Smallest deviation whose grid float64 can hold."""

_CUDA_BLOCK = 2**20
"""Numbers that are drawn at once on a CUDA device."""

_SMALL = 2.0**-10
"""A uniform number below this one is drawn again, and multiplied by it."""

_Index = TypeVar("_Index", int, np.ndarray)


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
    entry and both numbers. Never use a key and a step for two different sums.

    Noise is drawn and added in float64 and rounded to `promote_types(dtype, float32)`,
    at 10 to 15 ns per number and thread on a CPU. Non-finite entries stay as they are.
    A noise multiplier of zero adds nothing; epsilon is then infinite.

    A sum may be a DTensor with placements `Shard` and `Replicate`. Each rank adds to
    its part the noise that the whole tensor would get there, bit for bit: all ranks
    need the same key, and one type of machine. A rank draws every block of 2^16 numbers
    (2^20 on CUDA devices) that overlaps its part.

    Raises:
        TypeError: `sensitivity` is a number, or a sum is a DTensor with another
            placement, such as `Partial`.
        ValueError: the sensitivity is infinite, or its product with the noise
            multiplier too small for float64.

    Reference: Abadi et al., arXiv 1607.00133; Salmon et al., SC 2011.

    Example:
        >>> from vgrad.dp import secret_key
        >>> sums = {"weight": torch.zeros(2, dtype=torch.bfloat16)}
        >>> noisy = add_gaussian_noise(
        ...     sums, Sensitivity(0.5), noise_multiplier=2.0, key=secret_key(), step=0
        ... )
        >>> noisy["weight"].dtype
        torch.float32
    """
    function = "add_gaussian_noise"
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
    checks.dictionaries(function, sums=sums)
    step, member = checks.whole(function, least=0, step=step, member=member)
    generators.check_key(function, key)
    for name, total in sums.items():
        if not total.is_floating_point():
            raise TypeError(
                f"{function}(sums[{name!r}]): expected a tensor of real floating-point "
                f"numbers, got {total.dtype}. Noise is for sums of gradients."
            )
        sharded = shards.is_distributed(total)
        if sharded and (got := shards.unsupported_placements(total)):
            raise TypeError(
                f"{function}(sums[{name!r}]): expected a DTensor of Shard and "
                f"Replicate alone, got {got}. Noise comes after the reduction: "
                f"redistribute the sum first."
            )
    if noise_multiplier == 0:
        return map_values(_released, sums, sums)
    step_key = generators.fold_in(
        key, "noise", step, float(noise_multiplier), deviation
    )
    normals = _Normals(step_key, sums, member, deviation)
    # Adding and subtracting this number rounds a float64 to the grid.
    rounding = 1.5 * 2.0 ** (52 + math.floor(math.log2(deviation * _GRID)))

    released, tasks, count = {}, [], 0
    for name, total in sums.items():
        local, part = _local_part(total)
        count += local.numel()
        if _is_plain(local):
            dtype = torch.promote_types(total.dtype, torch.float32)
            noisy = torch.empty(local.shape, dtype=dtype, device="cpu")
            plain = local.detach().to(dtype).reshape(-1).numpy()
            use = partial(_add_block, plain, noisy.view(-1).numpy(), rounding)
            tasks += normals.tasks(name, part, use)
        else:
            noise = normals.of(name, local, part)
            noise.add_(local.to(noise.device)).add_(rounding).sub_(rounding)
            noisy = _released(noise, local)
        if shards.is_distributed(total):
            noisy = shards.like(total, noisy)
        released[name] = noisy
    generators.on_threads(tasks, count)
    return released


class Part(NamedTuple):
    """A hyperrectangle of a tensor of some shape, its entries in row-major order."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class BlockPart(NamedTuple):
    """The overlap of a part and a block of a size: `part[entries] = block[places]`."""

    number: int
    count: int
    places: slice | np.ndarray
    entries: slice


def block_parts(part: Part, size: int) -> Iterator[BlockPart]:
    """Yield the overlaps of a part with the blocks of `size` numbers of its tensor."""
    total, count, low = math.prod(part.shape), math.prod(part.sizes), 0
    if count == total:
        for start in range(0, total, size):
            count = min(size, total - start)
            entries = slice(start, start + count)
            yield BlockPart(start // size, count, slice(0, count), entries)
        return
    if count == 0:
        return
    first, last = (_places(part, entry) // size for entry in (0, count - 1))
    for number in range(first, last + 1):
        start, stop = number * size, min((number + 1) * size, total)
        # Places grow with entries.
        high = bisect_left(range(count), stop, low, key=partial(_places, part))
        if low < high:
            begin, end = _places(part, low), _places(part, high - 1) + 1
            places: slice | np.ndarray = slice(begin - start, end - start)
            if end - begin > high - low:
                places = _places(part, np.arange(low, high)) - start
            yield BlockPart(number, stop - start, places, slice(low, high))
        low = high


def _places(part: Part, entries: _Index) -> _Index:
    places, stride = 0 * entries, 1
    for length, offset, size in reversed(list(zip(*part, strict=True))):
        places = places + (entries % size + offset) * stride
        entries = entries // size
        stride *= length
    return places


def _local_part(total: Tensor) -> tuple[Tensor, Part]:
    shape = tuple(total.shape)
    if not shards.is_distributed(total):
        return total, Part(shape, (0,) * len(shape), shape)
    local = shards.local(total)
    return local, Part(shape, shards.offsets(total), tuple(local.shape))


@dataclass
class _Normals:
    """Normal numbers, float64, from a key of one step."""

    key: Tensor
    sums: Params
    member: int
    deviation: float

    def of(self, name: str, like: Tensor, part: Part) -> Tensor:
        """Draw the numbers of a part, in its shape, on its CUDA device or the CPU."""
        if like.is_cuda:
            return self._on_cuda(self.starts[name], like, part)
        noise = np.empty(like.numel())

        def keep(block: BlockPart, normals: np.ndarray) -> None:
            noise[block.entries] = normals[block.places]

        generators.on_threads(self.tasks(name, part, keep), noise.size)
        return torch.from_numpy(noise).view(like.shape)

    def tasks(self, name: str, part: Part, use: Callable) -> Iterator[Callable]:
        """Yield tasks, each of which draws a block on the CPU and uses it."""
        stream = generators.stream(self.key, self.member, name, *part.shape)

        def run(block: BlockPart) -> None:
            with np.errstate(all="ignore"):  # overflow is infinite, as in torch
                use(block, draw(stream, block.number, block.count, self.deviation))

        for block in block_parts(part, generators.BLOCK):
            yield partial(run, block)

    @cached_property
    def _seed(self) -> int:
        layout = [f"{name} {tuple(total.shape)}" for name, total in self.sums.items()]
        return generators.torch_seed(self.key, *layout)

    @cached_property
    def starts(self) -> dict[str, int]:
        """The first block of each sum, on a CUDA device."""
        sizes = [math.ceil(x.numel() / _CUDA_BLOCK) for x in self.sums.values()]
        starts = np.cumsum([self.member * sum(sizes), *sizes]).tolist()
        return dict(zip(self.sums, starts, strict=False))

    def _on_cuda(self, start: int, like: Tensor, part: Part) -> Tensor:
        # Blocks at offsets of one stream that are farther apart than they reach:
        # 64-bit seeds for every block of every step would collide.
        source = torch.Generator(like.device).manual_seed(self._seed)
        noise = torch.empty(like.numel(), dtype=torch.float64, device=like.device)
        for block in block_parts(part, _CUDA_BLOCK):
            # A thread takes at most four words for each number that it draws.
            source.set_offset(4 * _CUDA_BLOCK * (start + block.number))
            normals = noise.new_empty(block.count).normal_(generator=source)
            places = block.places
            if not isinstance(places, slice):
                places = torch.from_numpy(places).to(like.device)
            noise[block.entries] = normals[places]
        return noise.mul_(self.deviation).view(like.shape)


def draw(stream: int, number: int, count: int, deviation: float) -> np.ndarray:
    """Draw a block of a stream, `[count]`: first the cosines, then the sines."""
    source = generators.block(stream, number)
    radius, normals = np.empty((count + 1) // 2), np.empty((2, (count + 1) // 2))
    cosine, sine = normals
    source.random(out=radius)
    source.random(out=sine)
    below = _SMALL
    small = (radius < below).nonzero()[0]
    while len(small):
        radius[small] = below * source.random(len(small))
        below *= _SMALL
        small = small[radius[small] < below]
    # Cosine and sine of 2 pi v from t = tan(pi v), 2 / (1 + t^2) - 1 and
    # 2 t / (1 + t^2), are faster. torch's functions are faster still, but MKL's start
    # threads in every thread that calls them. All in place: a block stays in a cache.
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    radius *= deviation
    sine *= math.pi
    tangent = np.tan(sine, out=sine)
    np.multiply(tangent, tangent, out=cosine)
    cosine += 1
    np.divide(radius, cosine, out=cosine)
    cosine *= 2
    sine *= cosine
    cosine -= radius
    return normals.reshape(-1)[:count]


def _add_block(plain, noisy, rounding: float, block: BlockPart, normals) -> None:
    noise = normals[block.places]
    noise += plain[block.entries]
    noise += rounding
    noise -= rounding
    noisy[block.entries] = noise


def _is_plain(total: Tensor) -> bool:
    follows = total.requires_grad and torch.is_grad_enabled()
    return total.is_cpu and not follows and not modes.inside_transform()


def _released(value: Tensor, total: Tensor) -> Tensor:
    dtype = torch.promote_types(total.dtype, torch.float32)
    return value.to(total.device, dtype, copy=True)


def check_sensitivity(function: str, sensitivity: Any) -> None:
    """Refuse numbers, and an infinite sensitivity."""
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
