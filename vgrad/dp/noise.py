"""Gaussian noise on sums, sized by the sensitivity that comes with the sum.

The guarantee of the accountant is about real numbers and a perfect source of
randomness. This file comes close to them:

* Noise is drawn and added in float64. The sum is then rounded to a grid of 2^-17 to
  2^-16 deviations, and to its dtype last of all. Two uniform numbers, u of 74 bits and
  v of 53, give two normal ones (Box and Muller, 1958), `sqrt(-2 log u) cos(2 pi v)` and
  `sqrt(-2 log u) sin(2 pi v)`. Of the 2^127 pairs every square of the grid holds at
  least 2^59 up to 6.5 deviations from zero, and 2^30 up to 9.1: every value that one
  data set can release there is also reachable from each neighbouring one, jointly for
  both numbers of a pair. Beyond, up to the largest radius of 10.1 deviations, there are
  circles without a value between them. Of 10^9 numbers one lies there with a
  probability of 4e-10.
* The probability of a value is right to about one part in 2^32, in the mean over
  releases, as long as the sum is within sixteen deviations of zero (in general to 2^-36
  of the sum in deviations). Over 10^9 numbers that adds about 1e-5 to epsilon if the
  errors are independent, and 0.2 if all have one direction; the noise of `discrete.py`
  has exact probabilities, at a multiple of the cost. In float32 some values are
  impossible without a given sample, and with 10^9 numbers one of them shows with a
  probability of about 2e-4.
* The sum adds float32 gradients that are computed for the batch as a whole. An added
  sample changes how the others are rounded, which the sensitivity does not count: by up
  to 4 B 2^-24 of the clip norm in batches of B samples (B 2^-24 in chunks of 64; for
  half precision on matrix units B 2^-16), and by twice the sensitivity where a gradient
  is nothing but rounding errors. With `chunk_size=1` or `strategy="loop"` no sample's
  gradient depends on another sample.
* Words come from ChaCha20 (RFC 8439), whose output nobody is known to tell from uniform
  bits. Each stream has a key of 256 bits: a keyed hash (BLAKE2b) of a secret key of 256
  bits, the member, name and shape of the sum, multiplier and deviation. The nonce is
  the step, and the counter the block of 64 bytes. No key and nonce serve two sums,
  counters never wrap (a sum of more than 2^35 numbers has several keys), and no graph
  or file of code holds a key. The batches, which are not released, are drawn by numpy's
  Philox4x64-10, which was not made to resist cryptanalysis.
* Losses, gradient norms, the fraction of clipped samples and the time of a step are not
  private, however much noise the sum gets. Nor is the memory of the machine.

One draw, one release. The noise of a step is a function of the key, the step, the
member, the parameter's name and shape, and of the plan's numbers; sharding, threads,
compilation and the device do not change its words. A step that is repeated from a
checkpoint on the same batch is therefore the same release, as far as the sums are the
same numbers. Random numbers of the loss, such as dropout, follow from the key, the step
and each sample's place in the logical batch, however that is split, computed or cut
among ranks. Where they cannot (a generator of the loss's own, Python's or numpy's,
dropout of cuDNN, draws of a backward pass), the noise also depends on a hash of the
sums, so that two different sums never share it; noise that is correlated over steps
and several ranks refuse such a loss. Processor, device and torch decide on the rounding
of sums, and libraries on the
last bit of a logarithm or a tangent, by which about one number in 10^10 is rounded to
the next value of the grid. Where these differ, release the results of only one of the
two attempts. Other sums (of other data, loss or optimizer) need another key,
`state.fork()`: their difference would have no noise.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from vgrad import checks, generators
from vgrad.batches import Sensitivity
from vgrad.devices import HOST, is_host
from vgrad.dp import chacha
from vgrad.dp.noising import Filter
from vgrad.optim.base import GradientTransformation
from vgrad.optim.private import unscaled
from vgrad.torch_private import kernels, shards
from vgrad.tree import map_values, wide
from vgrad.typing import Params, Scales, Tree

TILE = 8 * chacha.BLOCKS
"""Numbers that are drawn together: half their words make radii, half make angles."""

_GRID = 2.0**-16
"""Distance of the values that can be released, in deviations of the noise."""

_LEAST = 1e-280
"""Smallest deviation whose grid float64 can hold."""

_LEAST_ON_HOST, _MOST_ON_HOST = 2**16, 2**18
"""Numbers that a thread of a host draws at once: fewer wait for the interpreter."""

ON_DEVICE, _MOST_ON_DEVICE = 2**22, 2**24
"""Numbers of a device's draw: for several steps up to the first, for one to the other.

A number takes some 47 bytes while it is drawn.
"""

_Index = TypeVar("_Index", int, np.ndarray, Tensor)


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
    at some 5 ns a number on two threads of a CPU (`bench/noise.py`). On a device it is
    drawn there, from the same words, or on the host if the device has no float64.
    Non-finite entries stay as they are. A noise multiplier of zero adds nothing;
    epsilon is then infinite.

    A sum may be a DTensor with placements `Shard` and `Replicate`. Each rank adds to
    its part the noise that the whole tensor would get there: all ranks need the same
    key. A rank draws every block of up to 2^18 numbers (2^22 on a device) that overlaps
    its part.

    Raises:
        TypeError: `sensitivity` is a number, or a sum is a DTensor with another
            placement, such as `Partial`.
        ValueError: the sensitivity is infinite, or its product with the noise
            multiplier too small for float64.

    Reference: Abadi et al., arXiv 1607.00133; Nir and Langley, RFC 8439.

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
    checks.dictionaries(function, sums=sums)
    numbers = checked(function, sensitivity, noise_multiplier, key=key, step=step)
    return gaussian_noise(function, sensitivity, **numbers).added(sums, member)


INDEPENDENT = Filter((1.0,))
"""The filter of noise that is independent at each step."""


def gaussian_noise(
    function: str,
    sensitivity: Sensitivity,
    *,
    noise_multiplier: float,
    key: Tensor,
    step: int,
    streams: "Streams | None" = None,
    filter: Filter = INDEPENDENT,
    first: int = 0,
    history: Tree | None = None,
) -> "Noise":
    """Return the noise of a step, from streams that its run may hold.

    Noise of a filter starts at the step `first`, and takes the history that the step
    before has returned; None where nobody keeps one.
    """
    deviation: Any = noise_multiplier * sensitivity.value
    fixed = not isinstance(deviation, Tensor) and noise_multiplier != 0
    if fixed and not _LEAST < deviation < 1 / _LEAST:
        raise ValueError(
            f"{function}(noise_multiplier={noise_multiplier!r}, {sensitivity}): "
            f"expected a standard deviation between {_LEAST} and {1 / _LEAST}, got "
            f"{deviation!r}. Clip to another norm."
        )
    filter = filter if noise_multiplier else INDEPENDENT
    fields = streams or Streams(), filter, first, ()
    noise = Noise(key, step, float(noise_multiplier), deviation, *fields)
    if not filter.correlated:
        return noise
    if history is None:
        noise = replace(noise, filter=filter._replace(cached=False))
    return replace(noise, history=noise.checked_history(function, history))


class NoiseHistory(NamedTuple):
    """The part of a state on which noise correlated over steps depends; it is secret.

    Attributes:
        step: the number of steps taken, int64 without dimensions.
        identity: a hash of the key and the plan of the noise, uint8 `[32]`.
        buffers: noise of earlier steps, or sums of it, in units of the deviation: like
            the parameters, in float64. Where all noise follows from the key, none.
    """

    step: Tensor
    identity: Tensor
    buffers: tuple[Params, ...]

    def __repr__(self) -> str:
        return "NoiseHistory(<secret>)"


@dataclass(frozen=True)
class Noise:
    """The noise of a step: normal numbers of a deviation, from streams of a key.

    A filter may make it depend on the draws of earlier steps, back to the step `first`.
    A deviation that changes over steps is a tensor without dimensions.
    """

    key: Tensor = field(repr=False)  # no log or traceback holds it
    step: int
    multiplier: float
    deviation: float | Tensor
    streams: "Streams"
    filter: Filter
    first: int
    history: Any = field(repr=False)

    def checked_history(self, function: str, history: Any) -> Tree:
        """Return the history, none before the first step; refuse another run's."""
        count = len(self.filter.weights)
        if history is None and count:
            raise ValueError(
                f"{function}: expected noise that follows from the key and the step, "
                f"got a plan whose noise depends on buffers, which private_step and "
                f"PrivateGradients keep in their states. Take one of those, or a plan "
                f"with bisr or band_inv_mf."
            )
        if history is None or self.step == self.first:
            return ()
        count *= not self.filter.cached
        if not isinstance(history, NoiseHistory):
            got = "none"
        elif (steps := int(history.step)) != self.step:
            got = f"one of {steps} steps"
        elif not torch.equal(history.identity.cpu(), _identity(self.key)):
            got = "one of another key or plan"
        elif len(history.buffers) != count:
            got = f"one of {len(history.buffers)} buffers"
        else:
            return history
        raise ValueError(
            f"{function}: expected the history of noise that {self.step} steps of "
            f"this run left in its state, with {count} buffers, got {got}. Noise that "
            f"is correlated over steps goes on from its last state alone: keep all "
            f"fields of a state together. A run of a new key needs plan.after(...)."
        )

    @property
    def tags(self) -> tuple[generators.Tag, ...]:
        """The numbers on which streams depend, besides the key."""
        if self.filter.correlated or isinstance(self.deviation, Tensor):
            return ("unit",)
        return self.multiplier, self.deviation

    def added(self, sums: Params, member: int = 0) -> Params:
        """Draw the noise of a member's sums, and add it."""
        [member] = checks.integers("add_gaussian_noise", minimum=0, member=member)
        return self.added_to(sums, member=member)[0]

    def advanced(self, sums: Params) -> tuple[Params, Tree]:
        """Draw the noise of sums, and add it; return the history of the next step."""
        if not self.filter.correlated:
            return self.added_to(sums)[0], ()
        old = self._buffers(sums)
        noisy, *new = self.added_to(sums, old)
        return noisy, self.after(sums, old, new)

    def after(self, sums: Params, old: Sequence[Params], new: Sequence[Params]) -> Tree:
        """Return the history of the next step, in which there is no cache."""
        if not self.filter.correlated:
            return ()
        buffers, after = self.filter.shifted(new, old), self.step + 1
        if self.filter.cached:
            self.streams.cache = self._place(sums, after), buffers
            buffers = ()
        return NoiseHistory(torch.tensor(after), _identity(self.key), buffers)

    def _buffers(self, sums: Params) -> tuple[Params, ...]:
        """Return the buffers before this step, zeros at the first one."""
        cached, count = self.filter.cached, len(self.filter.weights)
        if self.history and not cached:
            return tuple(_checked_buffer(x, sums) for x in self.history.buffers)
        if cached and self.streams.cache[0] == self._place(sums, self.step):
            return self.streams.cache[1]
        buffers = tuple(map_values(buffer_like, sums) for _ in range(count))
        for step in range(max(self.first, self.step - count), self.step):
            _, *new = replace(self, step=step).added_to(sums, buffers)
            buffers = self.filter.shifted(new, buffers)
        return buffers

    def _place(self, sums: Params, step: int) -> tuple:
        """Return all that cached draws depend on."""
        parts = {name: _part(total, name) for name, total in sums.items()}
        return bytes(self.key.cpu().numpy()), step, parts

    def added_to(
        self, sums: dict[Any, Tensor], old: Sequence[dict] = (), *, member: int = 0
    ) -> list[dict[Any, Tensor]]:
        """Return sums with noise, and new buffers after them.

        A name belongs to the member, or is a pair of a member and a name.
        """
        _check_sums(sums)
        if not self.multiplier:
            return [{name: x.to(wide(x.dtype), copy=True) for name, x in sums.items()}]
        inputs = [{name: _flat(x[name]) for name in sums} for x in (sums, *old)]
        kinds = None, *[torch.float64] * self.filter.new_buffer_count
        into = [
            {name: torch.empty_like(x, dtype=kind) for name, x in inputs[0].items()}
            for kind in kinds
        ]
        parts: dict[torch.device, dict[Any, Part]] = {}
        for name, x in inputs[0].items():
            parts.setdefault(x.device, {})[name] = _part(sums[name], name, member)
        for device, device_parts in parts.items():
            run = self._add_on_host if is_host(device) else self._add_on_device
            run(device_parts, inputs, into)
        noisy, *new = into
        return [
            {name: _finished(x, sums[name]) for name, x in noisy.items()},
            *({n: _like(x, sums[n]) for n, x in buffer.items()} for buffer in new),
        ]

    @property
    def _steps(self) -> range:
        """The steps whose draws are combined, the last one first."""
        earliest = max(self.first, self.step + 1 - len(self.filter.draw_weights))
        return range(self.step, earliest - 1, -1)

    def _add_on_host(
        self, parts: dict[Any, "Part"], inputs: list[dict], into: list[dict]
    ) -> None:
        """Add noise to flat sums, on all threads, each in a part of its cache."""
        arrays = [{name: x[name].numpy() for name in parts} for x in (*inputs, *into)]
        total, noisy = arrays[0], arrays[len(inputs)]
        old, targets = arrays[1 : len(inputs)], arrays[len(inputs) + 1 :]
        count = sum(map(len, total.values()))
        share = max(count // (2 * torch.get_num_threads()), 1)
        size = min(max(_LEAST_ON_HOST, 2 ** (share.bit_length() - 1)), _MOST_ON_HOST)
        layout = self.streams.layout(self, parts, HOST, size, size)
        deviation = float(self.deviation)
        grid = _grid(deviation)

        def add(number: int) -> None:
            try:
                memory = layout.memory.pop()
            except IndexError:  # other threads have the rest
                memory = Memory.of(size // TILE)

            def draw(step: int) -> np.ndarray:
                # Earlier steps one after the other in one memory.
                words = memory.words if step == self.step else memory.earlier
                words = layout.words(number, step, words)
                return normals_of_host(words, memory).reshape(-1)

            noise, last = self.filter.combined(map(draw, self._steps))
            places = [(x.name, x.entries, x.places()) for x in layout.groups[number]]
            for name, entries, place in places if targets else ():
                before = [buffer[name][entries] for buffer in old]
                x, new = self.filter.filtered(noise[place], last[place], before)
                for target, numbers in zip(targets, new, strict=True):
                    target[name][entries] = numbers
                noise[place] = x
            noise *= deviation
            for name, entries, place in places:
                noise[place] += total[name][entries]
            limit = 2.0**50 * grid  # NaN is not below it
            if -limit < noise.min(initial=0.0) and noise.max(initial=0.0) < limit:
                # Rounded to the grid, and without -0.0.
                noise += 1.5 * 2.0**52 * grid
                noise -= 1.5 * 2.0**52 * grid
            else:
                noise = _rounded(torch.from_numpy(noise), grid).numpy()
            with np.errstate(over="ignore"):  # it is infinite, as in torch
                for name, entries, place in places:
                    noisy[name][entries] = noise[place]
            layout.memory.append(memory)

        works = [partial(add, number) for number in range(len(layout.groups))]
        generators.on_threads(works, count)

    def _add_on_device(
        self, parts: dict[Any, "Part"], inputs: list[dict], into: list[dict]
    ) -> None:
        """Add noise to flat sums, in few ops for all of them."""
        device = inputs[0][next(iter(parts))].device
        sizes, grid = (ON_DEVICE, _MOST_ON_DEVICE), _grid(self.deviation)
        layout = self.streams.layout(self, parts, device, *sizes)

        for number, group in enumerate(layout.groups):
            parts_of = [
                [flat[p.name][p.entries] for p in group] for flat in (*inputs, *into)
            ]
            total, *old = map(_joined, parts_of[: len(inputs)])
            noise, last = self.filter.combined(layout.noise(number, self._steps))
            noise = _joined([noise[p.places(device)] for p in group])
            if self.filter.cached:
                last = _joined([last[p.places(device)] for p in group])
            value, new = self.filter.filtered(noise, last, old)
            value = _rounded((value * self.deviation).add_(total.double()), grid)
            targets = zip(parts_of[len(inputs) :], (value, *new), strict=True)
            for target, numbers in targets:
                if len(dtypes := {tensor.dtype for tensor in target}) == 1:
                    numbers = numbers.to(*dtypes)
                kernels.copy_all_(target, numbers.split([*map(len, target)]))

    def drawn(self, sums: Params) -> "Drawn | None":
        """Return the noise as an input of a graph; None where eager mode has to add."""
        _check_sums(sums)
        devices = {total.device for total in sums.values()}
        sharded = any(map(shards.is_distributed, sums.values()))
        if not self.multiplier or sharded or {*map(_drawn_on, devices)} != devices:
            return None
        [device] = devices
        parts = {name: _part(total, name) for name, total in sums.items()}
        layout = self.streams.layout(self, parts, device, chacha.TILES * TILE)
        fields = self.deviation, self.filter, self._buffers(sums)
        count = len(self.filter.draw_weights)
        steps = torch.arange(self.step, self.step - count, -1, device=device)
        weights = None if count == 1 else (steps >= self.first).double()
        if not is_host(device):
            stream = (*layout.table(0), chacha.nonces(steps))
            return Drawn(None, stream, weights, *fields)
        words = [layout.words(0, step) for step in self._steps]
        words += [torch.zeros_like(words[0]) for _ in range(count - len(words))]
        return Drawn(tuple(words), None, weights, *fields)


class Drawn(NamedTuple):
    """The noise of a step for a graph: words, or the keys and nonces of them."""

    words: tuple[Tensor, ...] | None  # of this step and of earlier ones
    stream: tuple[Tensor, Tensor, Tensor] | None  # keys and numbers of tiles, nonces
    weights: Tensor | None  # [K], zeros before the first step
    deviation: float | Tensor
    filter: Filter
    buffers: tuple[Params, ...]

    def advanced(self, sums: Params) -> tuple[Params, list[Params]]:
        """Add the noise, as a function of tensors; return new buffers too."""
        words: Any = self.words
        if self.stream is not None:
            keys, tiles, nonces = self.stream
            words = chacha.keystream(keys, nonces, tiles, unrolled=True).unbind()
        draws = [*map(_pairs, words)]
        if self.weights is not None:
            weights = self.weights.unbind()
            draws = [(a * w, b * w) for (a, b), w in zip(draws, weights, strict=True)]
        # Both numbers of a pair apart, so that a compiler joins all of it.
        halves = map(self.filter.combined, zip(*draws, strict=True))
        both = [torch.stack(pair, -2).reshape(-1) for pair in zip(*halves, strict=True)]
        noisy, buffers, start, grid = {}, {}, 0, _grid(self.deviation)
        for name, total in sums.items():
            numbers = [x[start : start + total.numel()].view(total.shape) for x in both]
            old = [buffer[name] for buffer in self.buffers]
            noise, buffers[name] = self.filter.filtered(*numbers, old)
            value = noise * self.deviation + total.double()
            noisy[name] = _rounded(value, grid).to(wide(total.dtype))
            start += TILE * math.ceil(total.numel() / TILE)
        places = range(self.filter.new_buffer_count)
        return noisy, [{name: new[i] for name, new in buffers.items()} for i in places]


class Privatizing(NamedTuple):
    """The state of `ADD_NOISE`: the noise of a step, and the scales of its sums."""

    noise: Any  # a `Noise`, a `DiscreteNoise`, or `Drawn` as tensors for a graph
    scales: Scales


def add_noise(
    grads: Params, state: Privatizing, params: Params | None = None
) -> tuple[dict[str, Any], Tree]:
    """Add noise to sums, and divide by their scales; return its state after that."""
    noisy, after = state.noise.advanced(grads)
    return unscaled(noisy, state.scales), after


ADD_NOISE = GradientTransformation(lambda params: (), add_noise)
"""Noise as a transformation of gradients, in front of an optimizer."""


def normals(words: Tensor) -> Tensor:
    """Make normal numbers of words, int64 `[..., 2, n]` -> float64 `[..., 2, n]`."""
    return torch.stack(_pairs(words), -2)


def _pairs(words: Tensor) -> tuple[Tensor, Tensor]:
    """Make pairs of normal numbers of words, int64 `[..., 2, n]`."""
    first, second = words.unbind(-2)
    # 63 bits of one word, then 11 of the other: above zero, at most 1. In float64 the
    # last ones count where the number is small.
    radius = (first & (2**63 - 1)).double()
    radius.sub_((second | -(2**11)).double(), alpha=2.0**-11).mul_(2.0**-63)
    radius = radius.log().mul_(-2).sqrt()
    # The other 53 bits are half of an angle t, whose cosine is 2 / (1 + tan(t / 2)^2)
    # - 1 and whose sine 2 tan(t / 2) / (1 + tan(t / 2)^2), which is faster than both.
    tangent = (second >> 11).double().mul_(math.pi * 2.0**-53).tan()
    scale = (radius / tangent.square().add_(1)).mul_(2)
    return scale - radius, tangent.mul_(scale)


class Memory(NamedTuple):
    """Memory of a host for words, and for the normal numbers that replace them."""

    words: Tensor
    earlier: Tensor  # words of an earlier step; memory that is not used costs nothing
    scratch: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, tiles: int) -> "Memory":
        """Return memory for so many tiles."""
        kinds = np.float64, np.float64, np.float64, np.bool_
        scratch = tuple(np.empty((tiles, TILE // 2), kind) for kind in kinds)
        return cls(chacha.memory(tiles), chacha.memory(tiles), scratch)


def normals_of_host(words: Tensor, memory: Memory) -> np.ndarray:
    """Make the numbers of `normals` in the place of words.

    MKL, which torch calls, would start threads in every thread that calls it.
    """
    tiles, bits = len(words), words.numpy()
    radius, tangent, scale, small = [numbers[:tiles] for numbers in memory.scratch]
    integers = scale.view(np.int64)
    np.bitwise_and(bits[:, 0], 2**63 - 1, out=integers)
    np.copyto(radius, integers)
    np.right_shift(bits[:, 1], 11, out=integers)
    np.copyto(tangent, integers)
    # Elsewhere float64 rounds the 11 bits away. Eight comparisons are read as one.
    np.less(radius, 2.0**54, out=small)
    places = np.flatnonzero(small.reshape(-1).view(np.int64))
    eights = bits.reshape(2 * tiles, -1, 8)
    row, column = np.divmod(places, eights.shape[1])
    last = (eights[2 * row + 1, column] | -(2**11)) * 2.0**-11
    radius.reshape(-1, 8)[places] -= last
    radius *= 2.0**-63
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    tangent *= math.pi * 2.0**-53
    np.tan(tangent, out=tangent)
    np.multiply(tangent, tangent, out=scale)
    scale += 1
    np.divide(radius, scale, out=scale)
    scale *= 2
    numbers = bits.view(np.float64)
    np.subtract(scale, radius, out=numbers[:, 0])
    np.multiply(tangent, scale, out=numbers[:, 1])
    return numbers


# Streams, and the parts of tensors.


class Streams:
    """The streams of a run, whose keys are made once and held where they are used."""

    def __init__(self) -> None:
        self._layouts: dict[tuple, tuple[tuple, _Layout]] = {}
        # The last draws of a run, of numbers that are drawn again where they are lost.
        self.cache: tuple[Any, tuple[Params, ...]] = None, ()

    def __reduce__(self) -> tuple:
        return Streams, ()  # no file has the keys, nor draws

    def layout(self, noise: Noise, parts: dict[Any, "Part"], *place: Any) -> "_Layout":
        """Return the tiles of parts of tensors: on a device, in groups of some size."""
        kind = bytes(noise.key.cpu().numpy()), noise.tags, tuple(parts.items())
        cached = self._layouts.get(place)
        if cached is None or cached[0] != kind:
            cached = self._layouts[place] = kind, _Layout(noise, parts, *place)
        return cached[1]


class _Layout:
    """Tiles of streams, in groups that are drawn at once."""

    def __init__(
        self,
        noise: Noise,
        parts: dict[Any, "Part"],
        device: torch.device,
        size: int,
        group_size: float = math.inf,
    ) -> None:
        self.groups: list[list[Piece]] = [[]]
        self._device = device
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        self.memory: list[Memory] = []
        self._ahead = -1, torch.empty(0)  # draws of steps, from the first one on
        count = 0
        for name, part in parts.items():
            place = "noise", *part.entry, str(list(part.shape)), *noise.tags
            keys: dict[int, bytes] = {}
            for block, entries in overlaps(part, size):
                begin = block * size
                number, tile = divmod(begin // TILE, chacha.TILES)
                if number not in keys:
                    stream_key = generators.fold_in(noise.key, *place, number)
                    keys[number] = stream_key.numpy().tobytes()
                tiles = math.ceil(min(size, math.prod(part.shape) - begin) / TILE)
                if count and count + tiles * TILE > group_size:
                    self.groups.append([])
                    count = 0
                of = name, part, entries, count, count - begin
                self.groups[-1].append(Piece(keys[number], tile, tiles, *of))
                count += tiles * TILE

    def noise(self, number: int, steps: range) -> Iterator[Tensor]:
        """Draw the normal numbers of a group at some steps, by ops of tensors."""
        first, drawn = self._ahead
        step, low = steps[0], steps[-1]
        if len(self.groups) > 1 or not first <= low <= step < first + len(drawn):
            keys, _ = self.table(number)
            # Each op draws for the next steps too, where one step has few numbers.
            ahead = ON_DEVICE // (TILE * len(keys)) if len(self.groups) == 1 else 1
            if ahead <= len(steps):
                yield from (self._drawn(number, step, 1)[0] for step in steps)
                return
            count = ahead if step == first + len(drawn) else len(steps)
            first, drawn = self._ahead = low, self._drawn(number, low, count)
        yield from (drawn[step - first] for step in steps)

    def _drawn(self, number: int, step: int, count: int) -> Tensor:
        keys, tiles = self.table(number)
        steps = torch.arange(count, device=self._device) + step
        words = chacha.keystream(keys, chacha.nonces(steps), tiles)
        return normals(words).view(count, -1)

    def words(self, number: int, step: int, memory: Tensor | None = None) -> Tensor:
        """Draw the words of a group at a step on the host, int64 `[N, 2, 256]`.

        On all threads, or on this one into memory that is given.
        """
        group = self.groups[number]
        count, in_thread = sum([piece.tiles for piece in group]), memory is not None
        if memory is None:
            memory = chacha.memory(count)
        part_tiles, works = _MOST_ON_HOST // TILE, []
        for piece in group:
            parts = memory[piece.start // TILE :][: piece.tiles].split(part_tiles)
            for i, words in enumerate(parts):
                place = piece.key, step, piece.tile + i * part_tiles
                works.append(partial(chacha.fill, words, *place))
        generators.on_threads(works, 0 if in_thread else count * TILE)
        return memory[:count]

    def table(self, number: int) -> tuple[Tensor, Tensor]:
        """Return key and number of each tile of a group, where they are drawn."""
        if number not in self._tables:
            keys, tiles = bytearray(), []
            for piece in self.groups[number]:
                keys += piece.key * piece.tiles
                tiles += range(piece.tile, piece.tile + piece.tiles)
            table = torch.frombuffer(keys, dtype=torch.int32).view(-1, 8)
            numbers = torch.tensor(tiles, device=HOST).to(self._device)
            self._tables[number] = table.to(self._device), numbers
        return self._tables[number]


class Part(NamedTuple):
    """A hyperrectangle of a sum of some shape, its entries in row-major order."""

    entry: tuple[int, str]  # the member, and the name of its sum
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def overlaps(part: Part, size: int) -> Iterator[tuple[int, slice]]:
    """Yield the blocks of `size` numbers of a tensor, and a part's entries in each."""
    count, low = math.prod(part.sizes), 0
    while low < count:
        block = places_of(part, low) // size
        # Places grow with entries.
        key, stop = partial(places_of, part), (block + 1) * size
        high = bisect_left(range(count), stop, low, key=key)
        yield block, slice(low, high)
        low = high


def places_of(part: Part, entries: _Index) -> _Index:
    """Return the places of a part's entries in the tensor."""
    if part.sizes == part.shape:
        return entries
    places, stride = 0 * entries, 1
    for length, offset, size in reversed(list(zip(*part[1:], strict=True))):
        places = places + (entries % size + offset) * stride
        entries = entries // size
        stride *= length
    return places


@dataclass
class Piece:
    """Tiles of a stream in a group, and the numbers among them that a sum needs."""

    key: bytes
    tile: int  # the first one
    tiles: int
    name: Any
    part: Part
    entries: slice  # of the part
    start: int  # of the tiles, in numbers of the group
    shift: int  # from places in the tensor to those in the group

    def __post_init__(self) -> None:
        low, high = self.entries.start, self.entries.stop
        first, last = (places_of(self.part, e) + self.shift for e in (low, high - 1))
        together = last - first == high - 1 - low
        self._slice = slice(first, last + 1) if together else None

    def places(self, device: torch.device = HOST) -> slice | Tensor:
        """Return the places of the entries in the group."""
        if self._slice is not None:
            return self._slice
        entries = torch.arange(self.entries.start, self.entries.stop, device=device)
        return places_of(self.part, entries) + self.shift


def _part(total: Tensor, name: Any, member: int = 0) -> Part:
    entry = name if isinstance(name, tuple) else (member, name)
    shape = tuple(total.shape)
    if not shards.is_distributed(total):
        return Part(entry, shape, (0,) * len(shape), shape)
    return Part(entry, shape, shards.offsets(total), tuple(shards.local(total).shape))


def _drawn_on(device: torch.device) -> torch.device:
    """Return where noise for a device is drawn: on the host, if it has no float64."""
    try:
        torch.empty((), dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return HOST
    return device


def _flat(total: Tensor) -> Tensor:
    """Return the part of a sum that this rank holds, where noise is drawn for it."""
    local = shards.local(total).detach()
    return local.to(_drawn_on(local.device), wide(local.dtype)).reshape(-1)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _grid(deviation: Any) -> Any:
    """Return the largest power of two that is at most 2^-16 deviations."""
    if isinstance(deviation, Tensor):  # its exponent alone, without a wait
        bits = (deviation.double() * _GRID).view(torch.int64)
        return (bits & (0x7FF << 52)).view(torch.float64)
    return 2.0 ** (math.frexp(deviation * _GRID)[1] - 1)


def _rounded(values: Tensor, grid: float | Tensor) -> Tensor:
    """Round float64 numbers to a grid, without -0.0."""
    # Products with powers of two are exact. No compiler leaves out a function or a bit,
    # as it may the addition and subtraction of a large number, or of zero.
    near = torch.round(values * (1 / grid)).mul_(grid)
    near = (near.view(torch.int64) * (near != 0)).view(torch.float64)
    # Far from zero float64 has no finer numbers, and the product may overflow.
    return torch.where(values.abs() < 2.0**52 * grid, near, values)


def _finished(flat: Tensor, total: Tensor) -> Tensor:
    """Bring the noise and a part's sum to its device, in a tensor like the whole."""
    local = shards.local(total)
    noisy = flat.to(total.device).view(local.shape)
    if local.requires_grad and torch.is_grad_enabled():
        near = noisy - (local.detach() - local)  # has the derivative
        noisy = torch.where(local.isfinite(), near, local)
    return shards.like(total, noisy)


def _like(flat: Tensor, total: Tensor) -> Tensor:
    return shards.like(total, flat.view(shards.local(total).shape))


def buffer_like(total: Tensor) -> Tensor:
    """Return zeros of a buffer for a sum, where noise is drawn for it."""
    size, device = shards.local(total).numel(), _drawn_on(total.device)
    return _like(torch.zeros(size, dtype=torch.float64, device=device), total)


def _identity(key: Tensor) -> Tensor:
    """Return a hash of the key and, since that depends on it, the plan of noise."""
    return generators.fold_in(key, "history")


def _check_sums(sums: dict[Any, Tensor]) -> None:
    """Refuse sums that noise is not for."""
    for name, total in sums.items():
        function = f"add_gaussian_noise(sums[{name!r}])"
        if not total.is_floating_point():
            raise TypeError(
                f"{function}: expected a tensor of real floating-point numbers, got "
                f"{total.dtype}. Noise is for sums of gradients."
            )
        sharded = shards.is_distributed(total)
        if sharded and (got := shards.unsupported_placements(total)):
            raise TypeError(
                f"{function}: expected a DTensor of Shard and Replicate alone, got "
                f"{got}. Noise comes after the reduction: redistribute the sum first."
            )


def _checked_buffer(buffer: Params, sums: Params) -> Params:
    """Return a buffer where noise is drawn; refuse one that is not like the sums."""
    checks.names("add_noise(history)", sums, buffer)
    for name, x in buffer.items():
        expected, got = _part(sums[name], name), _part(x, name)
        if expected != got or x.dtype != torch.float64:
            raise ValueError(
                f"add_noise(history): expected a buffer for the {expected}, in "
                f"float64, got one for the {got}, in {x.dtype}. Shard a state as a "
                f"whole."
            )
    return {name: x.to(_drawn_on(sums[name].device)) for name, x in buffer.items()}


def checked(
    function: str,
    sensitivity: Any,
    noise_multiplier: float,
    *,
    key: Tensor,
    step: int,
    first: int = 0,
) -> dict[str, Any]:
    """Check what a caller passes for a step's noise; return it as Python's numbers."""
    if not isinstance(sensitivity, Sensitivity):
        kind = type(sensitivity).__name__
        raise TypeError(
            f"{function}(sensitivity={checks.shown(sensitivity)}): expected the "
            f"Sensitivity of the sum, got a {kind}. Take the one that comes with the "
            f"sum, clipped_grad(...).sensitivity."
        )
    value = sensitivity.value
    if not isinstance(value, Tensor) and not math.isfinite(value):
        raise ValueError(
            f"{function}(sensitivity={sensitivity!r}): expected a finite sensitivity, "
            f"got {value}. Clip the gradients with a finite max_norm."
        )
    checks.non_negative(function, noise_multiplier=noise_multiplier)
    [multiplier] = checks.finite(function, noise_multiplier=noise_multiplier)
    [step] = checks.integers(function, minimum=first, step=step)
    checks.between(function, -1, 2**63, step=step)
    generators.check_key(function, key)
    return {"noise_multiplier": multiplier, "key": key, "step": step}
