"""The privacy that steps of DP-SGD spend, and the noise that a budget requires."""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np

from vgrad import checks
from vgrad.dp.sampling import check_rate

Accountant = Literal["pld", "rdp"]

Neighbours = Literal["add_or_remove_one", "zero_out", "replace_one", "fixed_graph"]
"""The relation of two data sets: one has a sample more, the gradient of a sample is
zero in one, or a sample is another one. `fixed_graph`: all samples of a person are
zeroed, where samples have several owners, who stay."""


class Steps(NamedTuple):
    """Steps of DP-SGD of one kind: Gaussian noise on a sum over a Poisson batch.

    With the rate 1 every sample is in the batch. `truncated` has the largest batch and
    the size of the data set.
    """

    sampling_rate: float
    noise_multiplier: float
    steps: int
    truncated: tuple[int, int] | None = None
    neighbours: Neighbours = "add_or_remove_one"

    def event(self) -> Any:
        """Return the steps as an event of dp_accounting."""
        library = checks.package("dp_accounting", "dp")
        rate, noise, steps, truncated, *_ = self
        if truncated is not None:
            largest, size = truncated
            one = library.TruncatedSubsampledGaussianDpEvent(size, rate, largest, noise)
        else:
            one = library.GaussianDpEvent(noise)
            if rate < 1:
                one = library.PoissonSampledDpEvent(rate, one)
        return one if steps == 1 else library.SelfComposedDpEvent(one, steps)


# Below, epsilon is in the hundreds and exponentials of privacy losses overflow.
_LEAST_NOISE = 0.05
_MOST_NOISE = 2.0**40
MOST_STEPS = 10**10
"""Beyond, the grid of privacy losses would be too coarse for one step."""
_TOLERANCE = 1e-4
# Epsilon was at most 0.1 % above a grid's 16 times as fine, in two seconds.
_MOST_REFINED = 64
# Twice as many lines lower mu by less than 0.1 %.
_LINES = 150


def epsilon(
    *,
    sampling_rate: float,
    noise_multiplier: float,
    steps: int,
    delta: float,
    accountant: Accountant = "pld",
) -> float:
    """Bound the epsilon at `delta` that `steps` steps of DP-SGD have spent.

    The accountant "pld" composes the distribution of the privacy loss on a grid, in up
    to some seconds; "rdp" composes Rényi divergences, is faster and not as tight. Both
    err on the safe side. The result is infinite if there is no bound: without noise (a
    multiplier below 0.05 counts as none), and with "pld" if `delta` is within the
    rounding errors of the composition, `steps * 2^-52`. Choose `delta` well below one
    over the size of the data set.

    Raises:
        ValueError: "pld" gets more than 10^10 steps.
        ImportError: `dp-accounting` is not installed.

    Reference: arXiv 2207.04380 ("pld"), arXiv 1908.10530 ("rdp").

    Example:
        >>> run = {"sampling_rate": 0.01, "steps": 1000, "delta": 1e-5}
        >>> round(epsilon(noise_multiplier=1.0, **run), 2)
        1.83
    """
    [steps] = checks.integers("epsilon", minimum=0, steps=steps)
    rate, delta = check("epsilon", sampling_rate, steps, delta, accountant)
    checks.non_negative("epsilon", noise_multiplier=noise_multiplier)
    [noise] = checks.finite("epsilon", noise_multiplier=noise_multiplier)
    return composed([Steps(rate, noise, steps)], delta, accountant)


def composed(account: Sequence[Steps], delta: float, accountant: Accountant) -> float:
    """Bound the epsilon of steps of several kinds on one data set, all checked."""
    kinds = _kinds(account)
    if not kinds:
        return 0.0
    if any(_is_silent(kind) for kind in kinds):
        return math.inf
    library = checks.package("dp_accounting", "dp")
    with _quiet():
        # With much noise the bound of Renyi divergences falls below zero.
        return max(0.0, float(ACCOUNTANTS[accountant](library, kinds, delta)))


def _kinds(account: Sequence[Steps]) -> list[Steps]:
    """Add up the steps of each kind."""
    counts: dict[Steps, int] = {}
    for term in account:
        # More noise spends less, and its square would overflow.
        noise = min(term.noise_multiplier, _MOST_NOISE)
        kind = term._replace(noise_multiplier=noise, steps=1)
        counts[kind] = counts.get(kind, 0) + term.steps
    return [kind._replace(steps=steps) for kind, steps in counts.items() if steps]


def _is_silent(kind: Steps) -> bool:
    """Return whether steps count as steps without noise."""
    return kind.noise_multiplier < _LEAST_NOISE * _signal(kind)


LEAST_RATE = 1e-12
"""The least false positive rate of attacks that mu bounds. In the limit of a rate of
zero sampling is no help: mu would be the one of steps on all samples."""


class TradeOff(NamedTuple):
    """Bounds of the power of all attacks, by their false positive rates.

    Each (epsilon, delta), which holds in both directions of the relation, is two lines
    above the power at a rate r, `delta + exp(epsilon) r` and, with errors exchanged,
    `1 - exp(-epsilon) (1 - delta - r)`. Fewer lines make a bound that is less tight.
    """

    slopes: np.ndarray  # exp(epsilon), ascending from 1
    deltas: np.ndarray
    exact: float | None = None  # mu of a Gaussian mechanism, in place of the lines

    @classmethod
    def of(cls, account: Sequence[Steps]) -> "TradeOff":
        """Return the bounds of steps of several kinds on one data set, all checked."""
        library, kinds = checks.package("dp_accounting", "dp"), _kinds(account)
        sampled = [x for x in kinds if x.sampling_rate < 1 or x.truncated is not None]
        if not sampled and all(x.noise_multiplier for x in kinds):
            # Gaussian mechanisms compose to one.
            mus = (math.sqrt(x.steps) * _signal(x) / x.noise_multiplier for x in kinds)
            return cls(np.ones(1), np.ones(1), math.hypot(*mus))
        if any(map(_is_silent, kinds)):
            return cls(np.ones(1), np.ones(1), math.inf)
        with _quiet():
            losses, rounding = _composed_losses(library, kinds), _rounding(kinds)
            high, rest = 700.0, losses.get_delta_for_epsilon(700.0)
            if rest >= 0.5:  # and no line bounds mu
                return cls(np.ones(1), np.ones(1), math.inf)
            if rest < 0.1:  # of losses that are larger, or infinite
                high = min(high, losses.get_epsilon_for_delta(2 * rest + rounding))
            high = max(high, 1e-9)
            # Evenly for the middle of the curve, and more where most losses are small.
            epsilons = np.geomspace(high / 1000, high, _LINES // 3)
            epsilons = np.union1d(epsilons, np.linspace(0.0, high, _LINES))
            deltas = [float(losses.get_delta_for_epsilon(float(e))) for e in epsilons]
        return cls(np.exp(epsilons), np.minimum(np.array(deltas) + rounding, 1.0))

    def power(self, rate: float) -> float:
        """Bound the power at a false positive rate."""
        if self.exact is not None:
            special = checks.package("scipy.special", "dp")
            return float(special.ndtr(special.ndtri(rate) + self.exact))
        line = float((self.deltas + self.slopes * rate).min())
        return min(line, 1 - self._missed(rate))

    def _missed(self, rate: float) -> float:
        """Bound the false negative rate from below, by lines of exchanged errors."""
        return max(0.0, float(((1 - self.deltas - rate) / self.slopes).max()))

    def mu(self) -> float:
        """Return the least mu of a Gaussian mechanism whose power is above the bounds.

        Rates are from `LEAST_RATE` to one half. Below the rate of equal errors the
        first lines are the lower ones, and above it errors are exchanged. Two lines,
        the lowest ones at two rates, bound the power between these. As the power of the
        mechanism is concave, it is above them if it is at both rates and where the
        lines cross.
        """
        if self.exact is not None:
            return self.exact
        special = checks.package("scipy.special", "dp")
        equal = (1 - self.deltas[0]) / 2
        low = min(LEAST_RATE, self._missed(0.5))
        if low == 0:
            return math.inf
        high = equal if equal > LEAST_RATE else self._missed(LEAST_RATE)
        rates = np.geomspace(low, high, 10 * _LINES)
        lines = np.array([(self.deltas + self.slopes * r).argmin() for r in rates])
        if equal > LEAST_RATE:
            lines[-1] = 0  # but for rounding
        first, then = lines[:-1], lines[1:]
        first, then = first[first != then], then[first != then]
        rise = self.deltas[then] - self.deltas[first]
        rates = np.append(rates, rise / (self.slopes[first] - self.slopes[then]))
        lines = np.append(lines, first)
        power = np.minimum(self.deltas[lines] + self.slopes[lines] * rates, 1.0)
        mu = (special.ndtri(power) - special.ndtri(rates)).max()
        return max(0.0, float(mu)) * (1 + 1e-9)  # rounded up


def noise_multiplier_for(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    accountant: Accountant = "pld",
) -> float:
    """Find the smallest noise multiplier with which `steps` steps stay in the budget.

    Its epsilon has been computed and is at most `epsilon`. It is at least 0.05, and at
    most a factor of 1 + 1e-4 too large, more only after 10^8 steps. The search costs
    five to ten calls of `epsilon(...)`.

    Raises:
        ValueError: no noise is enough or needed.
        ImportError: `dp-accounting` is not installed.

    Example:
        >>> run = {"sampling_rate": 0.5, "steps": 200, "delta": 1e-5}
        >>> round(noise_multiplier_for(epsilon=3.0, **run), 2)
        9.91
    """
    function = "noise_multiplier_for"
    [steps] = checks.integers(function, minimum=1, steps=steps)
    sampling_rate, delta = check(function, sampling_rate, steps, delta, accountant)
    checks.positive(function, epsilon=epsilon)
    [epsilon] = checks.finite(function, epsilon=epsilon)
    call = f"{function}({epsilon=}, {delta=}, {sampling_rate=}, {steps=}, "
    call += f"{accountant=})"
    kind = Steps(sampling_rate, 1.0, steps)
    return least_noise(call, kind, epsilon, delta, accountant)


def least_noise(
    call: str,
    kind: Steps,
    epsilon: float,
    delta: float,
    accountant: Accountant,
    others: Sequence[Steps] = (),
) -> float:
    """Find the smallest noise multiplier of steps of a kind, beside other releases.

    `call` is for errors.
    """
    sampling_rate, _, steps, *_ = kind
    used = 1 - (1 - sampling_rate) ** steps
    if delta >= used:
        raise ValueError(
            f"{call}: expected delta below {used:.3g}, the probability that a given "
            f"sample is used at all. Such a delta allows releasing samples as they are."
        )

    floor = _LEAST_NOISE * _signal(kind)  # with less, epsilon is infinite

    @functools.cache
    def excess(log_noise: float) -> float:
        noise = max(math.exp(log_noise), floor)
        steps_of = kind._replace(noise_multiplier=noise)
        spent = composed([*others, steps_of], delta, accountant)
        if spent in (0.0, math.inf):
            return -1.0 if spent == 0.0 else 1.0  # only the sign counts
        # The logarithm of epsilon is nearly linear in the logarithm of the noise.
        return math.log(spent) - math.log(epsilon)

    # Many steps make the grid coarse, and finer results meaningless.
    tolerance = max(_TOLERANCE, 1e-12 * steps)
    # A guess from the signal of all steps, in sensitivities. With enough noise delta
    # alone pays for any epsilon above zero.
    drift = sampling_rate * math.sqrt(steps)
    enough = min(drift * math.sqrt(2 * math.log(1.25 / delta)) / epsilon, drift / delta)
    start = math.log(min(0.5 + enough, _MOST_NOISE))
    # The slope is about -1 or steeper.
    low, high, step = start, start, min(1.0, 1.1 * abs(excess(start))) + tolerance
    while excess(high) > 0:
        if high > math.log(_MOST_NOISE):
            raise ValueError(
                f"{call}: expected a budget that some noise multiplier up to "
                f"{_MOST_NOISE:.0e} meets, found none. Raise epsilon or delta, or use "
                "fewer steps."
            )
        low, high, step = high, high + step, 2 * step
    while excess(low) <= 0:
        if low <= math.log(floor):
            return floor
        low, high, step = max(low - step, math.log(floor)), low, 2 * step
    # SciPy comes with dp-accounting, which `excess` has imported by now.
    from scipy.optimize import brentq

    root: Any = brentq(excess, low, high, xtol=tolerance / 2)
    # On a coarse grid `excess` is not monotonic.
    step = tolerance / 2
    while excess(root) > 0:
        root, step = min(root + step, high), 2 * step
    return max(math.exp(root), floor)


def largest_count(excess: Callable[[int], float], high: int) -> int:
    """Find the largest count up to `high` whose excess over a budget is at most 1.

    Zero if there is none. The excess rises with the count. The result is at most a
    factor of 1 - 1e-4 too small.
    """
    low, under, count = 0, 0.0, 1
    while (over := excess(count)) <= 1:
        if count == high:
            return high
        low, under = count, over
        count = min(high, count * min(16, max(2, round(1 / max(over, 0.01)))))
    high, by_law = count, False
    while high - low > max(1, 1e-4 * low):
        middle, by_law = math.isqrt(low * high), not by_law
        if by_law and 0 < under and over < math.inf:
            share = math.log(1 / under) / math.log(over / under)
            middle = round(low * (high / low) ** share)
        middle = min(max(middle, low + 1), high - 1)
        value = excess(middle)
        if value <= 1:
            low, under = middle, value
        else:
            high, over = middle, value
    return low


def check(
    function: str, rate: float, steps: int, delta: float, accountant: str
) -> tuple[float, float]:
    """Refuse numbers of a run that are out of range; return the rate and delta."""
    rate = check_rate(function, rate)
    [delta] = checks.between(function, 0, 1, delta=delta)
    checks.between(function, -1, 2**63, steps=steps)
    checks.choice(function, ACCOUNTANTS, accountant=accountant)
    return rate, delta


@contextmanager
def _quiet() -> Iterator[None]:
    # dp-accounting warns hundreds of times about orders whose series do not converge,
    # which costs tightness at most. Without the handler absl would install one for
    # good.
    logger, root = logging.getLogger("absl"), logging.getLogger()
    handler = logging.NullHandler()

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in str(record.msg)

    root.addHandler(handler)
    logger.addFilter(keep)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logger.removeFilter(keep)
        root.removeHandler(handler)


def _rdp_accountant() -> Any:
    library = checks.package("dp_accounting", "dp")
    # The divergences of a sample that is absent and of one that is zeroed are the same.
    neighbours = library.NeighboringRelation.ADD_OR_REMOVE_ONE
    return library.rdp.RdpAccountant(neighboring_relation=neighbours)


def _rdp_epsilon(library: Any, kinds: Sequence[Steps], delta: float) -> float:
    accountant = _rdp_accountant()
    for kind in kinds:
        accountant.compose(kind.event())
    return accountant.get_epsilon(delta)


def has_rdp(event: Any) -> bool:
    """Return whether there is a bound of an event's Rényi divergences."""
    return _rdp_accountant().supports(event)


def rdp_epsilon(event: Any, delta: float) -> float:
    """Bound the epsilon of an event of dp_accounting by Rényi divergences."""
    with _quiet():
        return max(0.0, float(_rdp_accountant().compose(event).get_epsilon(delta)))


def _pld_epsilon(library: Any, kinds: Sequence[Steps], delta: float) -> float:
    delta = delta - _rounding(kinds)
    if delta <= 0:
        return math.inf
    losses = _composed_losses(library, kinds)
    epsilon = losses.get_epsilon_for_delta(delta)
    # It divides by exp(-epsilon), which is hardly a number between 709 and 745.
    if epsilon == math.inf and losses.get_delta_for_epsilon(750.0) <= delta:
        return 750.0
    return epsilon


def _rounding(kinds: Sequence[Steps]) -> float:
    # The library composes with an FFT and does not count its rounding errors, which
    # move delta by up to a quarter of this (measured against the closed form of the
    # Gaussian mechanism). Without it the epsilon of a small delta would be too low.
    return sum(kind.steps for kind in kinds) * 2.0**-52


def _composed_losses(library: Any, kinds: Sequence[Steps]) -> Any:
    """Return the distribution of the privacy loss of all steps."""
    steps = sum(kind.steps for kind in kinds)
    if steps > MOST_STEPS:
        raise ValueError(
            f'epsilon(steps={steps}, accountant="pld"): expected at most '
            f"{MOST_STEPS:.0e} steps, since the grid of this accountant is too coarse "
            f'for more. Use accountant="rdp", which has a bound of epsilon alone.'
        )
    # Distributions are composed on one grid. The finest one may have too many points
    # for the losses of other kinds.
    widths = [_width_of(kind) for kind in kinds]
    width = max(min(widths), max(widths) / _MOST_REFINED)
    losses = [_losses(library, kind, width) for kind in kinds]
    return functools.reduce(lambda one, other: one.compose(other), losses)


def _losses(library: Any, kind: Steps, width: float) -> Any:
    make, relations = library.pld.privacy_loss_distribution, library.NeighboringRelation
    options: dict[str, Any] = {"value_discretization_interval": width}
    name = {"zero_out": "REPLACE_SPECIAL", "fixed_graph": "REPLACE_SPECIAL"}.get(
        kind.neighbours, kind.neighbours.upper()
    )
    options["neighboring_relation"] = relations[name]
    if kind.truncated is not None:
        largest, size = kind.truncated
        numbers = size, kind.sampling_rate, largest, kind.noise_multiplier
        one = make.from_truncated_subsampled_gaussian_mechanism(*numbers, **options)
    else:
        options["sampling_prob"] = kind.sampling_rate
        one = make.from_gaussian_mechanism(kind.noise_multiplier, **options)
    # In two stages. In one the library would bound the result by Chernoff's inequality
    # at orders that fit the number of points it starts from, and raise that number to
    # the power of the steps: to a gigabit after 10^8.
    few = math.isqrt(kind.steps)
    times, rest = divmod(kind.steps, few)
    rounds = one.self_compose(few).self_compose(times)
    return rounds.compose(one.self_compose(rest)) if rest else rounds


def _signal(kind: Steps) -> int:
    """Return by how many sensitivities the mechanisms of a bound differ at most."""
    if kind.truncated is not None:
        return 4  # a sample that gives way, in the library's bound by replacement
    return 2 if kind.neighbours == "replace_one" else 1


def _width_of(kind: Steps) -> float:
    # Every spacing gives a valid bound; a fine one is tight, and costs time and memory.
    rate, noise, steps, truncated, *_ = kind
    multiplier = noise / _signal(kind)
    # With rate q and noise s, the loss of a step at z is log(1 - q + q exp(x)),
    # x = z / s + 1 / (2 s^2), where z is standard normal and hardly ever beyond 10.
    x = 10 / multiplier + 0.5 / multiplier**2
    largest = x + math.log(rate + (1 - rate) * math.exp(-x))
    noise = multiplier if truncated is None else noise
    # Two upper estimates of its standard deviation, for much and for little noise.
    deviation = min(
        rate * math.sqrt(math.expm1(1 / noise**2)),
        math.sqrt(rate) * math.hypot(0.5 / noise**2, 1 / noise),
    )
    return max(
        rate / noise / 50,  # 50 points per standard deviation of a step are enough,
        20 * math.sqrt(steps) * deviation / 2**20,  # 2^20 for all steps are.
        1e-6,  # finer ones lose the probability of a point in rounding errors.
        largest / 2**16,  # 2^16 for one step are.
    )


ACCOUNTANTS: dict[Accountant, Callable] = {"pld": _pld_epsilon, "rdp": _rdp_epsilon}
