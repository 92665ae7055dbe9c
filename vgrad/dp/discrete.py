"""Discrete Gaussian noise, for a sum that is rounded to its grid.

A plan with `discrete="sum"` rounds the sum to multiples of 2^-24 deviations of the
noise, and adds integers from words of ChaCha20, drawn without a floating-point number
on the way (Canonne, Kamath and Steinke, arXiv 2004.00010). The proof is of the noise
alone: how far a sample moves the rounded sum follows from floating-point numbers, as
for other plans, so epsilon is as for them.

A number takes some 130 ns on the host (`bench/noise.py`), fifteen times as long as by
`vgrad/dp/noise.py`.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vgrad import checks, generators
from vgrad.dp import chacha
from vgrad.torch_private import shards
from vgrad.tree import wide
from vgrad.typing import Params, Tree

BITS = 24
"""A deviation of the noise is 2^24 steps of the grid."""

BLOCK = 2**15
"""Numbers of one stream, which are drawn together."""

_WORDS = 8 * chacha.BLOCKS
"""Words of a tile."""

_FRACTION = 2 * 24 + 1
"""Bits of a word that a probability is compared with; the others throw a die."""

_SIDES = 2 ** (64 - _FRACTION)

Draw = Callable[[int], np.ndarray]
"""Returns the next words of a stream, uint64 `[n]`."""


@dataclass(frozen=True)
class DiscreteNoise:
    """The noise of a step: integers, times a step of the grid."""

    key: Tensor = field(repr=False)  # no log or traceback holds it
    step: int
    deviation: float

    def added(self, sums: Params, member: int = 0) -> Params:
        """Round a member's sums to the grid, and add noise."""
        [member] = checks.integers("add_gaussian_noise", minimum=0, member=member)
        grid, noisy = self.deviation * 2.0**-BITS, {}
        for name, total in sums.items():
            self._check(name, total)
            noise = self._drawn(member, name, tuple(total.shape)).to(total.device)
            rounded = (total.detach().double() / grid).round()
            noisy[name] = ((rounded + noise) * grid).to(wide(total.dtype))
        return noisy

    def advanced(self, sums: Params) -> tuple[Params, Tree]:
        """Add noise, and return its history, none."""
        return self.added(sums), ()

    def _check(self, name: str, total: Tensor) -> None:
        sharded = shards.is_distributed(total)
        if sharded or not total.is_floating_point():
            raise TypeError(
                f"add_noise(sums[{name!r}]): expected real floating-point numbers in a "
                f"whole tensor for a plan with discrete='sum', got "
                f"{'a DTensor' if sharded else total.dtype}. Pass "
                f"gather(params, mesh) for a DTensor."
            )

    def _drawn(self, member: int, name: str, shape: tuple[int, ...]) -> Tensor:
        place = "discrete noise", member, name, str(list(shape))
        noise = np.empty(math.prod(shape), np.int64)

        def draw(number: int) -> None:
            tags = *place, self.deviation, number
            key = generators.fold_in(self.key, *tags).numpy().tobytes()
            part = noise[number * BLOCK :][:BLOCK]
            part[:] = gaussian(len(part), Words(key, self.step).draw)

        blocks = range(math.ceil(len(noise) / BLOCK))
        generators.on_threads([partial(draw, block) for block in blocks], len(noise))
        return torch.from_numpy(noise).view(shape)


class Words:
    """The words of a stream, one after the other."""

    def __init__(self, key: bytes, step: int) -> None:
        self._key, self._step, self._tile = key, step, 0
        self._unused = np.empty(0, np.uint64)

    def draw(self, count: int) -> np.ndarray:
        """Return the next words, uint64 `[n]`."""
        if count > len(self._unused):
            tiles = max(-(-count // _WORDS), 64)
            fresh = chacha.memory(tiles)
            chacha.fill(fresh, self._key, self._step, self._tile)
            words = fresh.view(-1).numpy().view(np.uint64)
            self._unused = np.concatenate([self._unused, words])
            self._tile += tiles
        words, self._unused = self._unused[:count], self._unused[count:]
        return words


def gaussian(count: int, draw: Draw, bits: int = BITS) -> np.ndarray:
    """Draw integers x, each with a probability proportional to `exp(-x^2 / 2 s^2)`.

    s is 2^bits, from 2 to 2^24. Of |x| = s v + u with u < s, v comes with a probability
    proportional to `exp(-v^2 / 2)`, and stays with `exp(-v u / s - u^2 / 2 s^2)`, as in
    Karney's algorithm for normal numbers (arXiv 1303.6257). The exponents have bits
    that end, so each probability can be compared with words bit by bit.
    """
    integers = np.empty(0, np.int64)
    while len(integers) < count:
        tries = 3 * (count - len(integers)) // 2 + 64  # 0.72 of them stay
        wholes, words = deviations(tries, draw), draw(tries)
        parts = (words >> np.uint64(64 - bits)).view(np.int64)
        stay = happens(parts * parts << (_FRACTION - 1 - 2 * bits), draw)
        stay[stay] = happens(parts[stay] << (_FRACTION - bits), draw, wholes[stay])
        values = (wholes << bits) + parts
        minus = (words & np.uint64(1)).astype(np.bool_)
        stay &= ~minus | (values > 0)  # zero has one sign
        integers = np.concatenate([integers, np.where(minus, -values, values)[stay]])
    return integers[:count]


def deviations(count: int, draw: Draw) -> np.ndarray:
    """Draw v = 0, 1, ..., each with a probability proportional to `exp(-v^2 / 2)`."""
    words, table = draw(count), np.array(_thresholds(64), np.uint64)
    values = np.searchsorted(table, words)
    for place in np.flatnonzero(table[np.minimum(values, len(table) - 1)] == words):
        number, bits = int(words[place]), 64
        while number in _thresholds(bits):  # more bits decide
            number, bits = (number << 64) + int(draw(1)[0]), bits + 64
        values[place] = bisect_left(_thresholds(bits), number)
    return values


@functools.cache
def _thresholds(bits: int) -> list[int]:
    """Return probabilities of at most v = 0, 1, ..., rounded down to so many bits."""
    last = math.isqrt(2 * bits)  # beyond, all of them are 1 - 2^-bits
    with localcontext(prec=bits):
        parts = [(-Decimal(v * v) / 2).exp() for v in range(2 * last)]
        sums = [sum(parts[: v + 1]) / sum(parts) for v in range(last)]
        return [int(total * 2**bits) for total in sums]


def happens(x: np.ndarray, draw: Draw, times: np.ndarray | None = None) -> np.ndarray:
    """Return whether events happen, each of the probability `exp(-x times / 2^49)`.

    x is int64 from 0 to 2^49, times is one by default. A chain of events of the
    probabilities x / 2^49 / 1, x / 2^49 / 2, ... ends after an even number of them with
    this probability (arXiv 2004.00010, algorithm 1).
    """
    result = np.ones(len(x), np.bool_)
    if times is not None:
        number = 0
        while len(pending := np.flatnonzero(result & (times > number))):
            result[pending] = happens(x[pending], draw)
            number += 1
        return result
    pending, side = np.arange(len(x)), 1
    while len(pending):
        pending = pending[event(x[pending], side, draw)]
        result[pending] = ~result[pending]
        side += 1
    return result


def event(x: np.ndarray, sides: int, draw: Draw) -> np.ndarray:
    """Return whether events happen, each of the probability `x / 2^49 / sides`."""
    words = draw(len(x))
    hit = (words >> np.uint64(64 - _FRACTION)).view(np.int64) < x
    die = words & np.uint64(_SIDES - 1)
    fair = _SIDES // sides * sides
    while len(retries := np.flatnonzero(hit & (die >= fair))):
        die[retries] = draw(len(retries)) & np.uint64(_SIDES - 1)
    return hit & (die % np.uint64(sides) == 0)
