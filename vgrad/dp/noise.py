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
  errors are independent, and 0.2 if all have one direction; `discrete.py` has a proof
  in the place of the estimate, at a multiple of the cost. In float32 some values are
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
compilation and the device do not change its words. The logarithm and the tangent may
differ in the last bit between libraries, and then about one number in 10^10 is rounded
to the next value of the grid. A step that is repeated from a checkpoint on the same
batch is therefore the same release, as far as the sums are the same numbers: processor,
device and torch decide on their rounding. Where these differ, or noise of an earlier
vgrad that had another generator, release the results of only one of the two attempts.
Two runs that continue from copies of one
state with other data, another loss or another optimizer would add the same noise to
different sums, whose difference then reveals everything: `state.fork()` gives one of
them a new key.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from vgrad import checks, generators
from vgrad.batches import Sensitivity
from vgrad.devices import HOST, is_host
from vgrad.dp import chacha
from vgrad.dp.noising import Filter
from vgrad.torch_private import kernels, shards
from vgrad.tree import map_values
from vgrad.typing import Params, Tree

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
    numbers = {"noise_multiplier": noise_multiplier, "key": key, "step": step}
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
    cached: bool = False,
    first: int = 0,
    history: Tree | None = None,
) -> "Noise":
    """Return the noise of a step, from streams that its run may hold.

    Noise of a filter starts at the step `first`, and takes the history that the step
    before has returned; None where nobody keeps one.
    """
    check_sensitivity(function, sensitivity)
    checks.non_negative(function, noise_multiplier=noise_multiplier)
    [noise_multiplier] = checks.finite(function, noise_multiplier=noise_multiplier)
    deviation: Any = noise_multiplier * sensitivity.value
    known = not isinstance(deviation, Tensor) and noise_multiplier != 0
    if known and not _LEAST < deviation < 1 / _LEAST:
        raise ValueError(
            f"{function}(noise_multiplier={noise_multiplier!r}, {sensitivity}): "
            f"expected a standard deviation between {_LEAST} and {1 / _LEAST}, got "
            f"{deviation!r}. Clip to another norm."
        )
    [step] = checks.whole(function, least=first, step=step)
    checks.between(function, -1, 2**63, step=step)
    generators.check_key(function, key)
    own = streams or Streams(), filter if noise_multiplier else INDEPENDENT
    kept = (cached and history is not None), first, history
    noise = Noise(key, step, float(noise_multiplier), deviation, *own, *kept)
    return replace(noise, history=noise.checked_history(function))


class Recurrence(NamedTuple):
    """The noise x of draws z, from buffers that a run keeps in float64.

    `x_t = sum_j draws[j] z_(t-j) + sum_i weights[i] buffers[i]`. The next buffers are
    `decays[i] buffers[i] + x_t`; without decays they are the last x, or the last z.
    """

    draws: tuple[float, ...]
    weights: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    of_draws: bool = False

    @classmethod
    def of(cls, filter: Filter, *, cached: bool = False) -> "Recurrence":
        """Return the recurrence of a filter, whose earlier draws may be cached."""
        if filter.feedback:
            first, *others = filter.feedback
            return cls((1 / first,), tuple(-each / first for each in others))
        if filter.decays:
            return cls((1.0,), tuple(-each for each in filter.scales), filter.decays)
        if cached:
            return cls(filter.draws[:1], filter.draws[1:], of_draws=True)
        return cls(filter.draws)

    @property
    def made(self) -> int:
        """The number of buffers that a step makes: the others are earlier ones."""
        return len(self.decays) or min(len(self.weights), 1)

    def combined(self, draws: Iterable[Any]) -> Any:
        """Return the sum of draws, the last one first, each with its weight."""
        total: Any = None
        for weight, draw in zip(self.draws, draws, strict=False):  # fewer at the start
            term = draw if weight == 1 else draw * weight
            total = term if total is None else total + term
        return total

    def filtered(self, drawn: Any, last: Any, old: Sequence[Any]) -> tuple[Any, list]:
        """Return x and new buffers, of the sum of draws and the last one of them."""
        x = drawn
        for weight, buffer in zip(self.weights, old, strict=True):
            x = x + weight * buffer
        if self.decays:
            pairs = zip(self.decays, old, strict=True)
            return x, [decay * buffer + x for decay, buffer in pairs]
        return x, [last if self.of_draws else x][: self.made]

    def shifted(self, new: Iterable[Any], old: Iterable[Any]) -> tuple[Any, ...]:
        """Return the buffers of the next step, without copies of old ones."""
        return (*new, *old)[: len(self.weights)]


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
    cached: bool
    first: int
    history: Any = field(repr=False)

    @cached_property
    def recurrence(self) -> Recurrence:
        """The recurrence of the filter."""
        return Recurrence.of(self.filter, cached=self.cached)

    @property
    def correlated(self) -> bool:
        """Whether noise depends on the draws of earlier steps."""
        return len(self.recurrence.draws + self.recurrence.weights) > 1

    def checked_history(self, function: str) -> Tree:
        """Return the history, none before the first step; refuse another run's."""
        history, count = self.history, len(self.recurrence.weights) * (not self.cached)
        if history is None and count:
            raise ValueError(
                f"{function}: expected noise that follows from the key and the step, "
                f"got a plan whose noise depends on buffers, which private_step and "
                f"PrivateGradients keep in their states. Take one of those, or a plan "
                f"with bisr or band_inv_mf."
            )
        if history is None or not self.correlated or self.step == self.first:
            return ()
        if not isinstance(history, NoiseHistory):
            got = "none"
        elif (taken := int(history.step)) != self.step:
            got = f"one of {taken} steps"
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
        if self.correlated or isinstance(self.deviation, Tensor):
            return ("unit",)
        return self.multiplier, self.deviation

    def added(self, sums: Params, member: int = 0) -> Params:
        """Draw the noise of a member's sums, and add it."""
        [member] = checks.whole("add_gaussian_noise", least=0, member=member)
        return self._added(sums, (), member)[0]

    def advanced(self, sums: Params) -> tuple[Params, Tree]:
        """Draw the noise of sums, and add it; return the history of the next step."""
        old = self._buffers(sums)
        noisy, new = self._added(sums, old)
        return noisy, self.after(sums, old, new)

    def after(self, sums: Params, old: Sequence[Params], new: Sequence[Params]) -> Tree:
        """Return the history of the next step, in which there is no cache."""
        if not self.correlated:
            return ()
        buffers, after = self.recurrence.shifted(new, old), self.step + 1
        if self.cached:
            self.streams.cache = (*self._kind(sums), after), buffers
            buffers = ()
        return NoiseHistory(torch.tensor(after), _identity(self.key), buffers)

    def _buffers(self, sums: Params) -> tuple[Params, ...]:
        """Return the buffers before this step, zeros at the first one."""
        if self.history and not self.cached:
            return tuple(_checked_buffer(x, sums) for x in self.history.buffers)
        count = len(self.recurrence.weights)
        if not count:
            return ()
        known, buffers = self.streams.cache
        if known == (*self._kind(sums), self.step):
            return buffers
        buffers = tuple(map_values(buffer_like, sums) for _ in range(count))
        for step in range(max(self.first, self.step - count), self.step):
            _, new = replace(self, step=step)._added(sums, buffers)
            buffers = self.recurrence.shifted(new, buffers)
        return buffers

    def _kind(self, sums: Params) -> tuple:
        """Return all that cached draws depend on, but the step."""
        parts = tuple((name, _part(total)) for name, total in sums.items())
        return bytes(self.key.cpu().numpy()), parts

    def _added(
        self, sums: Params, old: Sequence[Params], member: int = 0
    ) -> tuple[Params, Sequence[Params]]:
        entries = {(member, name): total for name, total in sums.items()}
        noisy, *new = (
            dict(zip(sums, each.values(), strict=True))
            for each in self.added_to(entries, old)
        )
        return noisy, new

    def added_to(
        self, sums: dict["Entry", Tensor], old: Sequence[Params] = ()
    ) -> list[dict["Entry", Tensor]]:
        """Return sums of members with noise, and new buffers after them."""
        _check_sums(sums)
        if not self.multiplier:
            return [{entry: _released(total, total) for entry, total in sums.items()}]
        devices: dict[torch.device, dict[Entry, Tensor]] = {}
        for entry, total in sums.items():
            devices.setdefault(_drawn_on(total.device), {})[entry] = total
        found = [{} for _ in range(1 + self.recurrence.made)]
        for device, some in devices.items():
            for whole, part in zip(found, self._run_on(device, some, old), strict=True):
                whole |= part
        return [{entry: each[entry] for entry in sums} for each in found]

    def _run_on(
        self, device: torch.device, sums: dict["Entry", Tensor], old: Sequence[Params]
    ) -> list[dict["Entry", Tensor]]:
        parts = {entry: _part(total) for entry, total in sums.items()}
        flat, noisy = {}, {}
        for entry, total in sums.items():
            local = _local(total).detach().to(device, _wide(total))
            flat[entry] = local.reshape(-1)
            noisy[entry] = local.new_empty(local.shape)  # row by row
        new = [
            map_values(partial(torch.empty_like, dtype=torch.float64), noisy)
            for _ in range(self.recurrence.made)
        ]
        before = [{e: _local(each[e[1]]).reshape(-1) for e in sums} for each in old]
        into = [{e: x.view(-1) for e, x in each.items()} for each in (noisy, *new)]
        run = self._run_on_host if is_host(device) else self._run_on_device
        run(parts, flat, before, into)
        noisy = {entry: _finished(noisy[entry], sums[entry]) for entry in sums}
        return [noisy, *({e: _like(each[e], sums[e]) for e in sums} for each in new)]

    def _run_on_host(
        self, parts: dict["Entry", "Part"], sums: Any, old: Any, into: Any
    ) -> None:
        """Add noise to flat sums, on all threads, each in a part of its cache."""
        count, recurrence = sum(map(len, sums.values())), self.recurrence
        share = max(count // (2 * torch.get_num_threads()), 1)
        size = min(max(_LEAST_ON_HOST, 2 ** (share.bit_length() - 1)), _MOST_ON_HOST)
        layout = self.streams.layout(self, parts, HOST, size, size)
        deviation = float(self.deviation)
        grid = _grid(deviation)
        sums = {entry: total.numpy() for entry, total in sums.items()}
        old = [{e: x.numpy() for e, x in each.items()} for each in old]
        noisy, *new = ({e: x.numpy() for e, x in each.items()} for each in into)

        def add(number: int) -> None:
            try:
                memory = layout.memory.pop()
            except IndexError:  # other threads have the rest
                memory = Memory.of(size // TILE)
            group, near = layout.groups[number], True
            draws = self._draws_on_host(layout, number, memory)
            last = next(draws)
            noise = recurrence.combined(chain((last,), draws))
            for piece in group if recurrence.weights else ():
                places, entries = piece.places(), piece.entries
                before = [each[piece.entry][entries] for each in old]
                x, made = recurrence.filtered(noise[places], last[places], before)
                for buffer, numbers in zip(new, made, strict=True):
                    buffer[piece.entry][entries] = numbers
                noise[places] = x
            noise *= deviation
            for piece in group:
                total = sums[piece.entry][piece.entries]
                near = near and _near_zero(total, grid)
                noise[piece.places()] += total
            if near:
                # Rounded to the grid, and without -0.0.
                noise += 1.5 * 2.0**52 * grid
                noise -= 1.5 * 2.0**52 * grid
            else:
                noise = _rounded(torch.from_numpy(noise), grid).numpy()
            with np.errstate(over="ignore"):  # it is infinite, as in torch
                for piece in group:
                    noisy[piece.entry][piece.entries] = noise[piece.places()]
            layout.memory.append(memory)

        works = [partial(add, number) for number in range(len(layout.groups))]
        generators.on_threads(works, count)

    @property
    def _steps(self) -> range:
        """The steps whose draws are combined, the last one first."""
        least = max(self.first, self.step + 1 - len(self.recurrence.draws))
        return range(self.step, least - 1, -1)

    def _draws_on_host(
        self, layout: "_Layout", number: int, memory: "Memory"
    ) -> Iterator[np.ndarray]:
        for step in self._steps:  # earlier ones one after the other in one memory
            own = memory if step == self.step else memory._replace(words=memory.earlier)
            words = layout.words(number, step, own.words)
            yield normals_of_host(own, len(words)).reshape(-1)

    def _run_on_device(
        self, parts: dict["Entry", "Part"], sums: Any, old: Any, into: Any
    ) -> None:
        """Add noise to flat sums, in few ops for all of them."""
        [device] = {each.device for each in into[0].values()}
        sizes, recurrence = (ON_DEVICE, _MOST_ON_DEVICE), self.recurrence
        layout = self.streams.layout(self, parts, device, *sizes)
        grid = _grid(self.deviation)
        for number, group in enumerate(layout.groups):

            def of_group(values: Any, group: list[Piece] = group) -> Tensor:
                return _joined([values[piece.entry][piece.entries] for piece in group])

            def placed(draws: Tensor, group: list[Piece] = group) -> Tensor:
                return _joined([draws[piece.places(device)] for piece in group])

            draws = layout.noise(number, self._steps)
            last = next(draws)
            drawn = placed(recurrence.combined(chain((last,), draws)))
            last = placed(last) if recurrence.of_draws else drawn
            noise, new = recurrence.filtered(drawn, last, [*map(of_group, old)])
            values = (noise * self.deviation).add_(of_group(sums).double())
            values = _rounded(values, grid)
            for each, numbers in zip(into, (values, *new), strict=True):
                target = [each[piece.entry][piece.entries] for piece in group]
                if len(dtypes := {each.dtype for each in target}) == 1:
                    numbers = numbers.to(*dtypes)
                kernels.copy_all_(target, numbers.split([*map(len, target)]))

    def drawn(self, sums: Params) -> "Drawn | None":
        """Return the noise as an input of a graph; None where eager mode has to add."""
        entries = {(0, name): total for name, total in sums.items()}
        _check_sums(entries)
        devices = {total.device for total in sums.values()}
        sharded = any(map(shards.is_distributed, sums.values()))
        if not self.multiplier or sharded or {*map(_drawn_on, devices)} != devices:
            return None
        [device] = devices
        parts = {entry: _part(total) for entry, total in entries.items()}
        layout = self.streams.layout(self, parts, device, chacha.TILES * TILE)
        own = self.deviation, self.recurrence, self._buffers(sums)
        count = len(self.recurrence.draws)
        steps = torch.arange(self.step, self.step - count, -1, device=device)
        weights = None if count == 1 else (steps >= self.first).double()
        if not is_host(device):
            stream = (*layout.table(0), chacha.nonces(steps))
            return Drawn(None, stream, weights, *own)
        words = [layout.words(0, step) for step in self._steps]
        words += [torch.zeros_like(words[0]) for _ in range(count - len(words))]
        return Drawn(tuple(words), None, weights, *own)


class Drawn(NamedTuple):
    """The noise of a step for a graph: words, or the keys and nonces of them."""

    words: tuple[Tensor, ...] | None  # of this step and of earlier ones
    stream: tuple[Tensor, Tensor, Tensor] | None  # keys and numbers of tiles, nonces
    weights: Tensor | None  # [K], zeros before the first step
    deviation: float | Tensor
    recurrence: Recurrence
    buffers: tuple[Params, ...]

    def added(self, sums: Params) -> tuple[Params, list[Params]]:
        """Add the noise, as a function of tensors; return new buffers too."""
        words: Any = self.words
        if self.stream is not None:
            keys, tiles, nonces = self.stream
            words = chacha.keystream(keys, nonces, tiles, unrolled=True)
            words = words.unbind()
        draws, recurrence = [*map(_pairs, words)], self.recurrence
        if self.weights is not None:
            weights = self.weights.unbind()
            draws = [(a * w, b * w) for (a, b), w in zip(draws, weights, strict=True)]
        # Both numbers of a pair apart, so that a compiler joins all of it.
        halves = [*map(recurrence.combined, zip(*draws, strict=True))], draws[0]
        both = [torch.stack([*pair], -2).reshape(-1) for pair in halves]
        noisy, made, start, grid = {}, {}, 0, _grid(self.deviation)
        for name, total in sums.items():
            own = [x[start : start + total.numel()].view(total.shape) for x in both]
            before = [each[name] for each in self.buffers]
            noise, made[name] = recurrence.filtered(*own, before)
            value = noise * self.deviation + total.double()
            noisy[name] = _rounded(value, grid).to(_wide(total))
            start += TILE * math.ceil(total.numel() / TILE)
        places = range(recurrence.made)
        return noisy, [{name: new[i] for name, new in made.items()} for i in places]


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
    radius: np.ndarray
    tangent: np.ndarray
    scale: np.ndarray
    small: np.ndarray

    @classmethod
    def of(cls, tiles: int) -> "Memory":
        """Return memory for so many tiles."""
        words, earlier = (np.empty((tiles, 2, TILE // 2), np.int64) for _ in range(2))
        kinds = np.float64, np.float64, np.float64, np.bool_
        rest = (np.empty((tiles, TILE // 2), kind) for kind in kinds)
        return cls(torch.from_numpy(words), torch.from_numpy(earlier), *rest)


def normals_of_host(memory: Memory, tiles: int) -> np.ndarray:
    """Make the numbers of `normals` in the memory of the first tiles of words.

    MKL, which torch calls, would start threads in every thread that calls it.
    """
    radius, tangent, scale, small = (numbers[:tiles] for numbers in memory[2:])
    bits, whole = memory.words[:tiles].numpy(), scale.view(np.int64)
    np.bitwise_and(bits[:, 0], 2**63 - 1, out=whole)
    np.copyto(radius, whole)
    np.right_shift(bits[:, 1], 11, out=whole)
    np.copyto(tangent, whole)
    # Elsewhere float64 rounds the 11 bits away. Eight comparisons are read as one.
    np.less(radius, 2.0**54, out=small)
    found = np.flatnonzero(small.reshape(-1).view(np.int64))
    eights = bits.reshape(2 * tiles, -1, 8)
    row, column = np.divmod(found, eights.shape[1])
    last = (eights[2 * row + 1, column] | -(2**11)) * 2.0**-11
    radius.reshape(-1, 8)[found] -= last
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


Entry = tuple[int, str]
"""The member and the name of a sum."""


class Streams:
    """The streams of a run, whose keys are made once and held where they are used."""

    def __init__(self) -> None:
        self._layouts: dict[tuple, tuple[tuple, _Layout]] = {}
        # The last draws of a run, of numbers that are drawn again where they are lost.
        self.cache: tuple[Any, tuple[Params, ...]] = None, ()

    def __reduce__(self) -> tuple:
        return Streams, ()  # no file has the keys, nor draws

    def layout(
        self, noise: Noise, parts: dict[Entry, "Part"], *place: Any
    ) -> "_Layout":
        """Return the tiles of parts of tensors: on a device, in groups of some size."""
        key = bytes(noise.key.cpu().numpy())
        kind = key, noise.tags, tuple(parts.items())
        known = self._layouts.get(place)
        if known is None or known[0] != kind:
            known = self._layouts[place] = kind, _Layout(noise, parts, *place)
        return known[1]


_NOTHING = -1, torch.empty(0)
"""The draws of no steps, from the first one on."""


class _Layout:
    """Tiles of streams, in groups that are drawn at once."""

    def __init__(
        self,
        noise: Noise,
        parts: dict[Entry, "Part"],
        device: torch.device,
        size: int,
        most: float = math.inf,
    ) -> None:
        self.groups: list[list[Piece]] = [[]]
        self._device = device
        self._openssl = is_host(device) and chacha.has_openssl()
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        self.memory: list[Memory] = []
        self._ahead = _NOTHING
        count = 0
        for (member, name), part in parts.items():
            place = "noise", member, name, str(list(part.shape))
            keys: dict[int, bytes] = {}
            for block in block_parts(part, size):
                number, tile = divmod(block.number * (size // TILE), chacha.TILES)
                if number not in keys:
                    own = generators.fold_in(noise.key, *place, *noise.tags, number)
                    keys[number] = own.numpy().tobytes()
                tiles = math.ceil(block.count / TILE)
                if count and count + tiles * TILE > most:
                    self.groups.append([])
                    count = 0
                of = (member, name), part, block, size, count
                self.groups[-1].append(Piece(keys[number], tile, tiles, *of))
                count += tiles * TILE

    def noise(self, number: int, steps: range) -> Iterator[Tensor]:
        """Draw the normal numbers of a group at some steps, by ops of tensors."""
        first, drawn = self._ahead
        step, low = steps[0], steps[-1]
        if len(self.groups) > 1 or not first <= low <= step < first + len(drawn):
            keys, _ = self.table(number)
            # Each op draws for the next steps too, where one step has few numbers.
            most = ON_DEVICE // (TILE * len(keys)) if len(self.groups) == 1 else 1
            if most <= len(steps):
                yield from (self._drawn(number, step, 1)[0] for step in steps)
                return
            count = most if step == first + len(drawn) else len(steps)
            first, drawn = self._ahead = low, self._drawn(number, low, count)
        yield from (drawn[each - first] for each in steps)

    def _drawn(self, number: int, step: int, count: int) -> Tensor:
        keys, tiles = self.table(number)
        steps = torch.arange(count, device=self._device) + step
        words = chacha.keystream(keys, chacha.nonces(steps), tiles)
        return normals(words).view(count, -1)

    def words(self, number: int, step: int, memory: Tensor | None = None) -> Tensor:
        """Draw the words of a group at a step on the host, int64 `[N, 2, 256]`.

        On all threads, or on this one into memory that is given.
        """
        if not self._openssl:
            keys, tiles = self.table(number)
            nonces = chacha.nonces(torch.tensor([step], device=HOST))
            drawn = chacha.keystream(keys, nonces, tiles)[0]
            return drawn if memory is None else memory[: len(drawn)].copy_(drawn)
        group = self.groups[number]
        count, alone = sum(piece.tiles for piece in group), memory is not None
        if memory is None:
            # Numpy's memory has large pages.
            memory = torch.from_numpy(np.empty((count, 2, TILE // 2), np.int64))
        words, works, at = memory[:count], [], 0
        for piece in group:
            for tile in range(0, piece.tiles, _MOST_ON_HOST // TILE):
                own = words[at : at + piece.tiles][tile : tile + _MOST_ON_HOST // TILE]
                place = piece.key, step, piece.tile + tile
                works.append(partial(chacha.fill, own, *place))
            at += piece.tiles
        generators.on_threads(works, 0 if alone else count * TILE)
        return words

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
    """A hyperrectangle of a tensor of some shape, its entries in row-major order."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class BlockPart(NamedTuple):
    """The overlap of a part and a block of numbers: `part[entries] = block[places]`."""

    number: int
    count: int
    places: slice | None  # None where they are apart: `places_of` has them
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
            together = end - begin == high - low
            places = slice(begin - start, end - start) if together else None
            yield BlockPart(number, stop - start, places, slice(low, high))
        low = high


def places_of(
    part: Part, block: BlockPart, size: int, device: torch.device
) -> slice | Tensor:
    """Return the places of a part's entries in a block."""
    if block.places is not None:
        return block.places
    entries = torch.arange(block.entries.start, block.entries.stop, device=device)
    return _places(part, entries) - block.number * size


def _places(part: Part, entries: _Index) -> _Index:
    places, stride = 0 * entries, 1
    for length, offset, size in reversed(list(zip(*part, strict=True))):
        places = places + (entries % size + offset) * stride
        entries = entries // size
        stride *= length
    return places


class Piece(NamedTuple):
    """Tiles of a stream in a group, and the numbers among them that a sum needs."""

    key: bytes
    tile: int  # the first one
    tiles: int
    entry: Entry
    part: Part
    block: BlockPart
    size: int  # of blocks
    start: int  # of the tiles, in numbers of the group

    def places(self, device: torch.device = HOST) -> Any:
        """Return the places of the numbers in the group."""
        places = places_of(self.part, self.block, self.size, device)
        if isinstance(places, slice):
            return slice(places.start + self.start, places.stop + self.start)
        return places + self.start

    @property
    def entries(self) -> slice:
        """The numbers of the sum, in row-major order."""
        return self.block.entries


def _local(total: Tensor) -> Tensor:
    return shards.local(total) if shards.is_distributed(total) else total


def _part(total: Tensor) -> Part:
    sharded = shards.is_distributed(total)
    offsets = shards.offsets(total) if sharded else (0,) * total.ndim
    return Part(tuple(total.shape), offsets, tuple(_local(total).shape))


def _drawn_on(device: torch.device) -> torch.device:
    """Return where noise for a device is drawn: on the host, if it has no float64."""
    try:
        torch.empty((), dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return HOST
    return device


def _wide(total: Tensor) -> torch.dtype:
    return torch.promote_types(total.dtype, torch.float32)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _grid(deviation: Any) -> Any:
    """Return the largest power of two that is at most 2^-16 deviations."""
    if isinstance(deviation, Tensor):  # its exponent alone, without a wait
        bits = (deviation.double() * _GRID).view(torch.int64)
        return (bits & (0x7FF << 52)).view(torch.float64)
    return 2.0 ** (math.frexp(deviation * _GRID)[1] - 1)


def _near_zero(values: np.ndarray, grid: float) -> bool:
    """Return whether all numbers are within 2^50 steps of the grid; NaN is not."""
    most = 2.0**50 * grid
    return not len(values) or (
        -most < float(values.min()) and float(values.max()) < most
    )


def _rounded(values: Tensor, grid: float | Tensor) -> Tensor:
    """Round float64 numbers to a grid, without -0.0."""
    # Products with powers of two are exact. No compiler leaves out a function, as it
    # may the addition and subtraction of a large number.
    near = torch.round(values * (1 / grid)).mul_(grid).add_(0.0)
    # Far from zero float64 has no finer numbers, and the product may overflow.
    return torch.where(values.abs() < 2.0**52 * grid, near, values)


def _finished(noisy: Tensor, total: Tensor) -> Tensor:
    """Bring the noise and a part's sum to its device, in a tensor like the whole."""
    noisy = noisy.to(total.device)
    if (local := _local(total)).requires_grad and torch.is_grad_enabled():
        near = noisy - (local.detach() - local)  # a zero, that has the derivative
        noisy = torch.where(local.isfinite(), near, local)
    return _like(noisy, total)


def _like(local: Tensor, total: Tensor) -> Tensor:
    return shards.like(total, local) if shards.is_distributed(total) else local


def buffer_like(total: Tensor) -> Tensor:
    """Return zeros of a buffer for a sum, where noise is drawn for it."""
    size, device = _local(total).shape, _drawn_on(total.device)
    return _like(torch.zeros(size, dtype=torch.float64, device=device), total)


def _identity(key: Tensor) -> Tensor:
    """Return a hash of the key and, since that depends on it, the plan of noise."""
    return generators.fold_in(key, "history")


def _released(value: Tensor, total: Tensor) -> Tensor:
    return value.to(total.device, _wide(total), copy=True)


def _check_sums(sums: dict[Entry, Tensor]) -> None:
    """Refuse sums that noise is not for."""
    for (_, name), total in sums.items():
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
    function = "add_noise(history)"
    checks.names(function, sums, buffer)
    for name, total in sums.items():
        part, kind = _part(buffer[name]), buffer[name].dtype
        if (part, kind) != (_part(total), torch.float64):
            raise ValueError(
                f"{function}: expected a buffer like the part {_part(total)} of "
                f"{name!r}, in float64, got {part} in {kind}. Shard a state as a whole."
            )
    return {name: x.to(_drawn_on(sums[name].device)) for name, x in buffer.items()}


def check_sensitivity(function: str, sensitivity: Any) -> None:
    """Refuse numbers, and an infinite sensitivity."""
    if not isinstance(sensitivity, Sensitivity):
        kind = type(sensitivity).__name__
        raise TypeError(
            f"{function}(sensitivity={checks.shown(sensitivity)}): expected the "
            f"Sensitivity of the sum, got a {kind}. Take the one that comes with the "
            f"sum, clipped_grad(...).sensitivity."
        )
    if not isinstance(sensitivity.value, Tensor) and not math.isfinite(
        sensitivity.value
    ):
        raise ValueError(
            f"{function}(sensitivity={sensitivity!r}): expected a finite sensitivity, "
            f"got {sensitivity.value}. Clip the gradients with a finite max_norm."
        )
