"""How much privacy the steps of DP-SGD spend, and how much noise a budget asks for.

Every step draws a Poisson batch at `sampling_rate` and adds Gaussian noise of
`noise_multiplier` times the sensitivity. Two data sets are neighbours when one has
exactly one sample more. The numbers come from the library `dp-accounting`.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from vgrad import checks
from vgrad.dp.sampling import check_rate

# Below, epsilon is in the hundreds and exponentials of privacy losses overflow.
_LEAST_NOISE = 0.05
_MOST_NOISE = 2.0**40
_TOLERANCE = 1e-4


def epsilon(
    *,
    sampling_rate: float,
    noise_multiplier: float,
    steps: int,
    delta: float,
    accountant: str = "pld",
) -> float:
    """Bound the epsilon at `delta` that `steps` steps of DP-SGD have spent.

    The accountant "pld" composes the distribution of the privacy loss on a grid and
    takes up to some seconds; "rdp" composes Rényi divergences, is faster and not as
    tight. Both err on the safe side. The answer is infinite where no bound can be
    given: without noise (a multiplier below 0.05 counts as none), and with "pld" where
    `delta` is not above the rounding errors of the composition, `steps * 2^-52`.

    Choose `delta` well below one over the size of the data set.

    Raises:
        ValueError: an argument is outside its range.
        ImportError: `dp-accounting` is not installed.

    Reference:
        Doroshenko et al., arXiv 2207.04380 ("pld"); Mironov et al., arXiv 1908.10530
        ("rdp").

    Example:
        >>> spent = epsilon(
        ...     sampling_rate=0.01, noise_multiplier=1.0, steps=1000, delta=1e-5
        ... )
        >>> round(spent, 2)
        1.83
    """
    _check("epsilon", sampling_rate, delta, accountant)
    checks.whole("epsilon", least=0, steps=steps)
    checks.non_negative("epsilon", noise_multiplier=noise_multiplier)
    checks.finite("epsilon", noise_multiplier=noise_multiplier)
    if steps == 0:
        return 0.0
    return _spent(sampling_rate, noise_multiplier, steps, delta, accountant)


def noise_multiplier_for(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    accountant: str = "pld",
) -> float:
    """Find the smallest noise multiplier with which `steps` steps stay in the budget.

    The answer is at most a factor of 1 + 1e-4 too large and never too small: its
    epsilon has been computed and is at most `epsilon`. It is at least 0.05. The search
    costs about ten calls of `epsilon(...)`.

    Raises:
        ValueError: an argument is outside its range, or no noise multiplier gives the
            target, or none is needed for it.
        ImportError: `dp-accounting` is not installed.

    Example:
        >>> found = noise_multiplier_for(
        ...     epsilon=3.0, delta=1e-5, sampling_rate=0.5, steps=200
        ... )
        >>> round(found, 2)
        9.91
    """
    _check("noise_multiplier_for", sampling_rate, delta, accountant)
    checks.whole("noise_multiplier_for", least=1, steps=steps)
    checks.positive("noise_multiplier_for", epsilon=epsilon)
    checks.finite("noise_multiplier_for", epsilon=epsilon)
    call = (
        f"noise_multiplier_for({epsilon=!r}, {delta=!r}, {sampling_rate=!r}, "
        f"{steps=!r}, {accountant=!r})"
    )
    used = 1 - (1 - sampling_rate) ** steps
    if delta >= used:
        raise ValueError(
            f"{call}: expected delta below {used:.3g}, the probability that a given "
            f"sample is used at all, got {delta!r}. Such a delta allows to release "
            "samples as they are."
        )

    @functools.cache
    def excess(log_noise: float) -> float:
        # The logarithm of epsilon is nearly linear in that of the noise.
        noise = math.exp(log_noise)
        spent = _spent(sampling_rate, noise, steps, delta, accountant)
        return math.log(min(max(spent, 1e-300), 1e300) / epsilon)

    diffusion = sampling_rate * math.sqrt(2 * steps * math.log(1.25 / delta))
    found = _root(excess, math.log(0.5 + diffusion / epsilon))
    if found is None or excess(found) > 0:
        raise ValueError(
            f"{call}: expected a budget that some noise multiplier up to "
            f"{_MOST_NOISE:.0e} meets, found none. Raise epsilon or delta, or use "
            "fewer steps."
        )
    return math.exp(found)


def _root(excess: Callable[[float], float], start: float) -> float | None:
    """Return where `excess` falls through zero, plus at most `_TOLERANCE`."""
    step, low, high = 0.5, start, start
    while excess(high) > 0:
        if high > math.log(_MOST_NOISE):
            return None
        low, high, step = high, high + step, 2 * step
    while excess(low) <= 0:
        low, high, step = low - step, low, 2 * step
    # It comes with dp-accounting, whose absence `excess` has reported by now.
    from scipy.optimize import brentq

    root: Any = brentq(excess, low, high, xtol=_TOLERANCE / 2)
    return root + _TOLERANCE / 2


def _check(function: str, sampling_rate: float, delta: float, accountant: str) -> None:
    check_rate(function, sampling_rate)
    checks.between(function, 0, 1, delta=delta)
    checks.one_of(function, ACCOUNTANTS, accountant=accountant)


def _spent(
    sampling_rate: float,
    noise_multiplier: float,
    steps: int,
    delta: float,
    accountant: str,
) -> float:
    """Return epsilon for arguments that have been checked."""
    if noise_multiplier < _LEAST_NOISE:
        return math.inf
    library = _library()
    step = library.PoissonSampledDpEvent(
        sampling_rate, library.GaussianDpEvent(noise_multiplier)
    )
    event = library.SelfComposedDpEvent(step, steps)
    with _quiet():
        return float(ACCOUNTANTS[accountant](library, event, delta))


def _library() -> Any:
    """Import `dp-accounting`, which only this file needs."""
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError(
            "vgrad.dp: expected the package dp-accounting, which is not installed. "
            'Run pip install "vgrad[dp]".'
        ) from error
    return dp_accounting


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide that Rényi orders are left out, and leave logging as it was.

    dp-accounting warns about every order whose series does not converge, hundreds of
    times, though it costs tightness at most. Its other messages get through. The
    handler is there because absl would otherwise install one for good.
    """
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


def _rdp_epsilon(library: Any, event: Any, delta: float) -> float:
    neighbours = library.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = library.rdp.RdpAccountant(neighboring_relation=neighbours)
    return accountant.compose(event).get_epsilon(delta)


def _pld_epsilon(library: Any, event: Any, delta: float) -> float:
    # The library composes with an FFT and does not count its rounding errors, which
    # move delta by up to a quarter of this (measured against the closed form of the
    # Gaussian mechanism); without this, small deltas give an epsilon that is too low.
    delta = delta - event.count * 2.0**-52
    if delta <= 0:
        return math.inf
    sampled = event.event
    width = _grid_width(
        sampled.sampling_probability, sampled.event.noise_multiplier, event.count
    )
    neighbours = library.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = library.pld.PLDAccountant(neighbours, width)
    return accountant.compose(event).get_epsilon(delta)


def _grid_width(rate: float, noise: float, steps: int) -> float:
    """Return the spacing of the grid of privacy losses.

    Every spacing gives a valid bound. A fine one gives a tight bound, and costs time
    and memory in proportion to the number of points.
    """
    # With rate q and noise s, the loss of a step at z is log(1 - q + q exp(x)),
    # x = z / s + 1 / (2 s^2), where z is standard normal; 10 is as good as its end.
    x = 10 / noise + 0.5 / noise**2
    largest = x + math.log(rate + (1 - rate) * math.exp(-x))
    # Two upper estimates of its standard deviation, for much and for little noise.
    deviation = min(
        rate * math.sqrt(math.expm1(1 / noise**2)),
        math.sqrt(rate) * math.hypot(0.5 / noise**2, 1 / noise),
    )
    return max(
        rate / noise / 50,  # 50 points per standard deviation of a step are enough,
        largest / 2**16,  # 2^16 points for one step,
        20 * math.sqrt(steps) * deviation / 2**20,  # and 2^20 for all of them.
        1e-6,  # Finer ones lose the probability of a point in rounding errors.
    )


ACCOUNTANTS = {"pld": _pld_epsilon, "rdp": _rdp_epsilon}
