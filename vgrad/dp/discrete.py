"""Integer noise on sums of integers, whose claim holds for the numbers in memory.

The gradient of each sample is computed alone, clipped, and rounded to a grid of 2^-24
deviations of the noise. Its norm is compared with the bound in integers. Sums are
int64, and the noise is a discrete Gaussian from words of ChaCha20, without a
floating-point number on the way. So no rounding error is left between the proof and the
release:

* Two sums that differ by one sample differ by integers x of a norm of at most 2^24 / z,
  z the noise multiplier. The Rényi divergence of order a between the noise with and
  without x is at most `a |x|^2 / 2^49 <= a / (2 z^2)`, as for real numbers (Canonne,
  Kamath and Steinke, arXiv 2004.00010, theorem 4, for one number; divergences of
  independent numbers add up).
* For Poisson batches at a rate q, P the noise around x, Q around zero and M = (1 - q) Q
  + q P, a binomial expansion bounds the divergence of M from Q at whole orders by the
  sum for real numbers, term by term. The divergence of Q from M is not larger (Mironov,
  Talwar and Zhang, arXiv 1908.10530, theorem 5): `y -> x - y` maps integers to integers
  and turns P into Q, and of each such pair of points the two terms are in this order.
  `tests/dp/test_discrete.py` compares both with sums over all integers.
* A gradient has to follow from its sample and the parameters alone: each is computed
  on a copy of the sample, in memory of its own, in a batch of one. Random numbers of a
  loss count as independent of the data. Kernels that a library chooses by the time they
  took, or by earlier calls, are outside of the claim. So are the draws of batches, and
  times, losses and norms, as for other plans.

A sample takes a pass of its own, and a number of noise some 130 ns on the host
(`bench/noise.py`), fifteen times as long as by `vgrad/dp/noise.py`.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vgrad import checks, generators
from vgrad.dp import chacha
from vgrad.factors import Sums
from vgrad.persample.clipped import ClippedGradFn, ClippedSum
from vgrad.persample.engine import Call, Chunk
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

Take = Callable[[int], np.ndarray]
"""Returns the next words of a stream, uint64 `[n]`."""


# Sums of integers.


def bound(noise_multiplier: float) -> int:
    """Return the largest square of the norm of a sample's integers."""
    return int(Fraction(4**BITS) / Fraction(noise_multiplier) ** 2)


def check(function: str, noise_multiplier: float, dataset_size: int) -> None:
    """Refuse numbers of a plan whose integers do not fit."""
    checks.between(function, 2.0**-7, 2.0**BITS, noise_multiplier=noise_multiplier)
    largest = dataset_size * math.isqrt(bound(noise_multiplier))
    if largest >= 2**62:
        raise ValueError(
            f"{function}(discrete=True, dataset_size={dataset_size}, "
            f"{noise_multiplier=}): expected sums below 2^62 steps of the grid, which "
            f"int64 holds, got up to {largest:.2e}. Pass a larger noise multiplier or "
            f"discrete='sum'."
        )


def integer_sums(clipped: ClippedGradFn, noise_multiplier: float) -> ClippedGradFn:
    """Make a clipped sum one of integers, int64, on the grid of the noise.

    Raises:
        ValueError: several samples would be computed together.
    """
    options, rule = clipped.options, clipped.quantity
    assert isinstance(rule, ClippedSum)
    if options.chunk_size not in (None, 1):
        raise ValueError(
            f"clipped_grad(chunk_size={options.chunk_size!r}): expected chunks of one "
            f"sample for a plan with discrete=True, whose gradients may not depend on "
            f"each other. Leave chunk_size out, or pass a plan with discrete='sum'."
        )
    sums = IntegerSum(**vars(rule), squares=bound(noise_multiplier))
    return _Alone(replace(options, chunk_size=1), sums)


class _Alone(ClippedGradFn):
    """Computes each sample in a batch of one, on a copy of it."""

    def measured(self, call: Call) -> Chunk:
        # Kernels may add up in another order where memory starts at another place,
        # which in a batch depends on the samples before. Other ranks get integers.
        tensors = [tensor.clone() for tensor in call.batch.tensors]
        batch = replace(call.batch, tensors=tensors)
        reducer = call.reducer.of_part()
        return super().measured(replace(call, batch=batch, reducer=reducer))


@dataclass(frozen=True)
class IntegerSum(ClippedSum):
    """The sum of clipped gradients, each rounded to integers."""

    squares: int = field(kw_only=True)  # bound of the sum of squares of each sample

    def sums(self) -> Sums:
        """Return where integers are added up."""
        return _IntegerSums()

    def partial(self, collector: Any, call: Call) -> tuple:
        """Return the integers of a sample."""
        assert call.batch.size == 1
        sums, *others = super().partial(collector, call)
        return integers(sums, self.rule.total, self.squares), *others


class _IntegerSums(Sums):
    """Exact sums of integers."""

    def add(self, part: Params) -> None:
        totals = self.totals
        self.totals = {n: totals[n] + x for n, x in part.items()} if totals else part

    def divide(self, by: float) -> None:
        """Leave it to the noise, which turns integers into numbers."""

    def rounded(self, params: Params) -> Params:
        if self.totals:
            return self.totals
        return {n: torch.zeros_like(x, dtype=torch.int64) for n, x in params.items()}


def integers(grads: Params, norm: float, squares: int) -> Params:
    """Round a gradient of a norm of at most `norm` to integers on the grid, int64.

    The sum of their squares is at most `squares`, whatever numbers come in.
    """
    flat = torch.cat([grad.detach().double().reshape(-1) for grad in grads.values()])
    largest = math.isqrt(squares)
    # By so much at most rounding makes a norm larger.
    room = largest - math.sqrt(len(flat)) / 2
    if room < largest / 2:
        raise ValueError(
            f"discrete=True: expected a grid on which a gradient has a norm above "
            f"sqrt({len(flat)}), got one of {largest}. Take a smaller noise "
            f"multiplier, or discrete='sum'."
        )
    flat = (flat * (room / norm)).nan_to_num(0.0, 0.0, 0.0).clamp(-(2**31), 2**31)
    whole = flat.round().long()
    # From here on no floating-point number decides: `root` may be any that is at
    # least the norm, and the last comparison says whether it was.
    high, low = _squared(whole)
    root = ((high.double() * 2**31 + low).sqrt() * (1 + 2**-40)).ceil().long() + 1
    smaller = whole.sign() * (whole.abs() * largest // root)
    whole = torch.where(_at_most(high, low, squares), whole, smaller)
    whole = whole * _at_most(*_squared(whole), squares)
    pieces = whole.split([grad.numel() for grad in grads.values()])
    named = zip(grads.items(), pieces, strict=True)
    return {name: piece.view(grad.shape) for (name, grad), piece in named}


def _squared(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Sum squares of integers of up to 2^31: `high 2^31 + low`, low below 2^31."""
    squares = whole * whole
    low = (squares & (2**31 - 1)).sum()
    return (squares >> 31).sum() + (low >> 31), low & (2**31 - 1)


def _at_most(high: Tensor, low: Tensor, squares: int) -> Tensor:
    most = divmod(squares, 2**31)
    return (high < most[0]) | ((high == most[0]) & (low <= most[1]))


# Noise.


@dataclass(frozen=True)
class DiscreteNoise:
    """The noise of a step: integers, times a step of the grid."""

    key: Tensor = field(repr=False)  # no log or traceback holds it
    step: int
    deviation: float
    dtypes: Mapping[str, torch.dtype] | None = None  # of parameters, for integers

    def of(self, params: Params) -> "DiscreteNoise":
        """Return the noise of sums over the gradients of these parameters."""
        dtypes = {name: x.dtype for name, x in params.items()}
        return self if self.dtypes is None else replace(self, dtypes=dtypes)

    def added(self, sums: Params, member: int = 0) -> Params:
        """Add noise to a member's sums, and turn them into numbers.

        Sums of numbers are rounded to the grid first.
        """
        [member] = checks.whole("add_gaussian_noise", least=0, member=member)
        grid, noisy = self.deviation * 2.0**-BITS, {}
        for name, total in sums.items():
            self._check(name, total)
            noise = self._drawn(member, name, tuple(total.shape)).to(total.device)
            dtype = total.dtype if self.dtypes is None else self.dtypes[name]
            if self.dtypes is None:
                total = (total.detach().double() / grid).round()
            noisy[name] = ((total + noise).double() * grid).to(wide(dtype))
        return noisy

    def advanced(self, sums: Params) -> tuple[Params, Tree]:
        """Add noise, and return its history, none."""
        return self.added(sums), ()

    def _check(self, name: str, total: Tensor) -> None:
        discrete, expected = "sum", "real floating-point numbers"
        fits, sharded = total.is_floating_point(), shards.is_distributed(total)
        got = "a DTensor" if sharded else str(total.dtype)
        if self.dtypes is not None:
            discrete, fits = True, total.dtype == torch.int64 and name in self.dtypes
            expected = "integers, as private_step and PrivateGradients form them,"
        if sharded or not fits:
            raise TypeError(
                f"add_noise(sums[{name!r}]): expected {expected} in a whole tensor for "
                f"a plan with {discrete=}, got {got}. Pass gather(params, mesh) for a "
                f"DTensor, and for sums of your own a plan with discrete='sum'."
            )

    def drawn(self, sums: Params) -> None:
        """Return None: no graph draws integers."""

    def _drawn(self, member: int, name: str, shape: tuple[int, ...]) -> Tensor:
        place = "discrete noise", member, name, str(list(shape))
        noise = np.empty(math.prod(shape), np.int64)

        def draw(number: int) -> None:
            tags = *place, self.deviation, number
            own = generators.fold_in(self.key, *tags).numpy().tobytes()
            part = noise[number * BLOCK :][:BLOCK]
            part[:] = gaussian(len(part), Words(own, self.step).take)

        blocks = range(math.ceil(len(noise) / BLOCK))
        generators.on_threads([partial(draw, block) for block in blocks], len(noise))
        return torch.from_numpy(noise).view(shape)


class Words:
    """The words of a stream, one after the other."""

    def __init__(self, key: bytes, step: int) -> None:
        self._key, self._step, self._tile = key, step, 0
        self._left = np.empty(0, np.uint64)

    def take(self, count: int) -> np.ndarray:
        """Return the next words, uint64 `[n]`."""
        if count > len(self._left):
            tiles = max(-(-count // _WORDS), 64)
            fresh = chacha.memory(tiles)
            chacha.fill(fresh, self._key, self._step, self._tile)
            words = fresh.view(-1).numpy().view(np.uint64)
            self._left = np.concatenate([self._left, words])
            self._tile += tiles
        words, self._left = self._left[:count], self._left[count:]
        return words


def gaussian(count: int, take: Take, bits: int = BITS) -> np.ndarray:
    """Draw integers x, each with a probability proportional to `exp(-x^2 / 2 s^2)`.

    s is 2^bits, from 2 to 2^24. Of |x| = s v + u with u < s, v comes with a probability
    proportional to `exp(-v^2 / 2)`, and stays with `exp(-v u / s - u^2 / 2 s^2)`, as in
    Karney's algorithm for normal numbers (arXiv 1303.6257). The exponents have bits
    that end, so each probability can be compared with words bit by bit.
    """
    found = np.empty(0, np.int64)
    while len(found) < count:
        tries = 3 * (count - len(found)) // 2 + 64  # 0.72 of them stay
        wholes, words = deviations(tries, take), take(tries)
        parts = (words >> np.uint64(64 - bits)).view(np.int64)
        stay = happens(parts * parts << (_FRACTION - 1 - 2 * bits), take)
        stay[stay] = happens(parts[stay] << (_FRACTION - bits), take, wholes[stay])
        values = (wholes << bits) + parts
        minus = (words & np.uint64(1)).astype(np.bool_)
        stay &= ~minus | (values > 0)  # zero has one sign
        found = np.concatenate([found, np.where(minus, -values, values)[stay]])
    return found[:count]


def deviations(count: int, take: Take) -> np.ndarray:
    """Draw v = 0, 1, ..., each with a probability proportional to `exp(-v^2 / 2)`."""
    words, table = take(count), np.array(_thresholds(64), np.uint64)
    values = np.searchsorted(table, words)
    for place in np.flatnonzero(table[np.minimum(values, len(table) - 1)] == words):
        number, bits = int(words[place]), 64
        while number in _thresholds(bits):  # more bits decide
            number, bits = (number << 64) + int(take(1)[0]), bits + 64
        values[place] = bisect_left(_thresholds(bits), number)
    return values


@functools.cache
def _thresholds(bits: int) -> list[int]:
    """Return probabilities of at most v = 0, 1, ..., rounded down to so many bits."""
    last = math.isqrt(2 * bits)  # beyond, all of them are 1 - 2^-bits
    with localcontext(prec=bits):
        parts = [(-Decimal(v * v) / 2).exp() for v in range(2 * last)]
        sums = [sum(parts[: v + 1]) / sum(parts) for v in range(last)]
        return [int(each * 2**bits) for each in sums]


def happens(x: np.ndarray, take: Take, times: np.ndarray | None = None) -> np.ndarray:
    """Return whether events happen, each of the probability `exp(-x times / 2^49)`.

    x is int64 from 0 to 2^49, times is one by default. A chain of events of the
    probabilities x / 2^49 / 1, x / 2^49 / 2, ... ends after an even number of them with
    this probability (arXiv 2004.00010, algorithm 1).
    """
    result = np.ones(len(x), np.bool_)
    if times is not None:
        number = 0
        while len(left := np.flatnonzero(result & (times > number))):
            result[left] = happens(x[left], take)
            number += 1
        return result
    left, side = np.arange(len(x)), 1
    while len(left):
        left = left[event(x[left], side, take)]
        result[left] = ~result[left]
        side += 1
    return result


def event(x: np.ndarray, sides: int, take: Take) -> np.ndarray:
    """Return whether events happen, each of the probability `x / 2^49 / sides`."""
    words = take(len(x))
    hit = (words >> np.uint64(64 - _FRACTION)).view(np.int64) < x
    die = words & np.uint64(_SIDES - 1)
    fair = _SIDES // sides * sides
    while len(again := np.flatnonzero(hit & (die >= fair))):
        die[again] = take(len(again)) & np.uint64(_SIDES - 1)
    return hit & (die % np.uint64(sides) == 0)
