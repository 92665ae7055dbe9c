"""Noise that is correlated over steps, so that sums of many steps have less of it.

The noise of the steps is `C^-1 z` times the deviation: z has standard normal entries,
and the strategy C is a lower triangular Toeplitz matrix, given by its first column.
A run is the Gaussian mechanism on `C g`, where g are the clipped sums of the steps, so
the deviation is the noise multiplier times the sensitivity of `C g` in units of a step.
A sample takes part in at most `participations` steps, any two of them at least
`separation` steps apart.

Errors are variances of the noise in prefix sums of the gradients, which are the
parameters of SGD with a constant rate. Momentum, decay and schedules are other
workloads.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from vgrad import checks

# Shapes: n steps, b bands, d buffers, k participations.

__all__ = [
    "Filter",
    "Fitted",
    "Noising",
    "band_inv_mf",
    "band_mf",
    "bisr",
    "blt",
    "from_coefficients",
    "independent",
]

Scheme = Literal["independent", "bisr", "band_inv_mf", "band_mf", "blt"]
Kind = Literal["mean", "max"]
Array = NDArray[np.float64]

_CACHED = ("bisr", "band_inv_mf")
# Of n x n numbers, for strategies that no closed formula covers.
_MOST_DENSE = 512


def __dir__() -> list[str]:
    return __all__


class Filter(NamedTuple):
    """The recursion that makes the noise x of standard normal numbers z, in one form.

    * `draws`: `x_t = sum_j draws[j] z_(t-j)`, z zero before the first step
    * `feedback`: `x_t = (z_t - sum_(j>0) feedback[j] x_(t-j)) / feedback[0]`
    * `decays`, `scales`: `x_t = z_t - sum_i scales[i] S_i`, and then
      `S_i = decays[i] S_i + x_t`, from zero

    A step adds `weights` times buffers to the last draws times `draw_weights`. The
    buffers are S, or the last x, or of `cached` draws the last z: the draw of a step
    alone is new.
    """

    draws: tuple[float, ...] = (1.0,)
    feedback: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    cached: bool = False

    @property
    def draw_weights(self) -> tuple[float, ...]:
        """The weights of the draws that a step takes, the last one first."""
        if self.feedback:
            return (1 / self.feedback[0],)
        return self.draws[:1] if self.cached else self.draws

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the buffers."""
        if self.feedback:
            return tuple([-x / self.feedback[0] for x in self.feedback[1:]])
        return self.draws[1:] if self.cached else tuple([-x for x in self.scales])

    @property
    def new_buffer_count(self) -> int:
        """The number of buffers that a step makes: the others are earlier ones."""
        return len(self.decays) or min(len(self.weights), 1)

    @property
    def correlated(self) -> bool:
        """Whether noise depends on the draws of earlier steps."""
        return bool(self.decays) or len(self.draws) > 1 or len(self.feedback) > 1

    def combined(self, draws: Iterable[Any]) -> tuple[Any, Any]:
        """Return the sum of draws, the last one first, with their weights; and it."""
        draws = iter(draws)
        last, (first, *others) = next(draws), self.draw_weights
        total = last if first == 1 else last * first
        for weight, draw in zip(others, draws, strict=False):  # fewer at the start
            total = total + draw * weight
        return total, last

    def filtered(self, drawn: Any, last: Any, old: Sequence[Any]) -> tuple[Any, list]:
        """Return x and new buffers, of the sum of draws and the last one of them."""
        x = drawn
        for weight, buffer in zip(self.weights, old, strict=True):
            x = x + weight * buffer
        if self.decays:
            pairs = zip(self.decays, old, strict=True)
            return x, [decay * buffer + x for decay, buffer in pairs]
        return x, [last if self.cached else x][: self.new_buffer_count]

    def shifted(self, new: Iterable[Any], old: Iterable[Any]) -> tuple[Any, ...]:
        """Return the buffers of the next step, without copies of old ones."""
        return (*new, *old)[: len(self.weights)]


@dataclass(frozen=True)
class Noising:
    """A scheme of noise, as `band_mf(4)` makes it: plain numbers and strings.

    Attributes:
        size: the bands of C (`"band_mf"`) or of C^-1 (`"bisr"`, `"band_inv_mf"`), or
            the buffers of `"blt"`.
        coefficients: the first ones of C or C^-1, which are then not optimised, or the
            decays of `"blt"` and its scales.
        cache: the last draws are kept in memory and not drawn again at the next step.

    Raises:
        ValueError: a field is outside its range, or no field of the scheme.
    """

    scheme: Scheme
    size: int = 1
    coefficients: tuple[float, ...] = ()
    cache: bool = False

    def __post_init__(self) -> None:
        checks.choice("Noising", get_args(Scheme), scheme=self.scheme)
        [size] = checks.integers("Noising", minimum=1, size=self.size)
        named = {f"coefficients[{j}]": c for j, c in enumerate(self.coefficients)}
        checks.finite("Noising", **named)
        numbers = tuple(map(float, self.coefficients))
        self.__dict__.update(size=size, coefficients=numbers)
        counts = {"independent": (0,), "bisr": (0,), "blt": (0, 2 * size)}
        allowed = counts.get(self.scheme, (0, size))
        if len(numbers) not in allowed or (self.scheme == "independent" and size > 1):
            raise ValueError(
                f"Noising(scheme={self.scheme!r}, size={size}, coefficients="
                f"{checks.shown(numbers)}): expected "
                f"{' or '.join(map(str, allowed))} coefficients, got {len(numbers)}. "
                f"Make it with a function of vgrad.dp.noising."
            )
        if self.scheme == "blt":
            checks.non_negative("Noising", **named)
            inside = all(decay <= 1 for decay in numbers[:size])
        else:
            inside = not numbers or numbers[0] > 0
        if not inside:
            raise ValueError(
                f"Noising(scheme={self.scheme!r}, coefficients="
                f"{checks.shown(numbers)}): expected a first coefficient above zero, "
                f"and decays of at most one."
            )
        if self.cache and self.scheme not in _CACHED:
            raise ValueError(
                f"Noising(scheme={self.scheme!r}, cache=True): expected one of "
                f"{', '.join(_CACHED)}, whose noise is a sum of the last draws."
            )

    def __str__(self) -> str:
        return f"{self.scheme}({self.size})" if self.correlated else self.scheme

    @property
    def correlated(self) -> bool:
        """Whether the noise of a step depends on earlier noise."""
        return self.scheme != "independent"

    def fitted(self, steps: int, *, separation: int, participations: int) -> "Fitted":
        """Return the strategy for a run, optimised where the scheme says so.

        The strategy is the one of the least error of prefix sums at the sensitivity of
        the run: the mean error for bands, the largest one for `blt`. Cost: below a
        second for some thousand steps, and once, since results are cached.

        Raises:
            ValueError: a number is below one.
            ImportError: SciPy, which comes with `dp-accounting`, is not installed.

        Example:
            >>> run = {"separation": 4, "participations": 1}
            >>> fitted = band_mf(4).fitted(16, **run)
            >>> round(fitted.root_loss(), 5), round(fitted.sensitivity(), 5)
            (1.93753, 1.0)
            >>> independent().fitted(16, **run).root_loss() ** 2
            8.5
        """
        run = {"separation": separation, "participations": participations}
        numbers = checks.integers("Noising.fitted", minimum=1, steps=steps, **run)
        scheme = self.optimal(steps, **run)
        coefficients, size = scheme.coefficients, scheme.size
        if self.scheme == "bisr":
            coefficients = tuple(_half(size, -0.5).tolist())
        forms = {
            "band_mf": Filter(feedback=coefficients),
            "blt": Filter(decays=coefficients[:size], scales=coefficients[size:]),
        }
        of_draws = Filter(coefficients or (1.0,), cached=self.cache)
        fitted = Fitted(forms.get(self.scheme, of_draws), *numbers)
        with np.errstate(all="ignore"):
            finite = math.isfinite(fitted.root_loss()) if self.coefficients else True
        if not finite:
            raise ValueError(
                f"Noising.fitted(steps={steps}): expected coefficients "
                f"of which noise and sensitivity stay finite, got "
                f"{checks.shown(self.coefficients)}. Let none be larger than the first."
            )
        return fitted

    def optimal(self, steps: int, *, separation: int, participations: int) -> "Noising":
        """Return the scheme with coefficients optimised for a run, if it has any.

        Other versions of SciPy find them a little otherwise, and then noise that is
        made again would differ: a plan and its checkpoints hold the optimised one.
        """
        if self.coefficients or self.scheme in ("independent", "bisr"):
            return self
        numbers = _optimised(self.scheme, self.size, steps, separation, participations)
        return replace(self, coefficients=numbers)


def independent() -> Noising:
    """Make noise that is independent from step to step.

    Example:
        >>> fitted = independent().fitted(8, separation=2, participations=4)
        >>> fitted.sensitivity(), fitted.sensitivity(1)
        (2.0, 1.0)
    """
    return Noising("independent")


def bisr(bands: int, *, cache: bool = False) -> Noising:
    """Make C^-1 of the first coefficients of `(1 - x)^(1/2)`: 1, -1/2, -1/8, -1/16, ...

    The noise of a step is a sum of `bands` draws, which follow from the key: a run
    stores nothing. `cache=True` keeps the last draws in memory, at `bands` times the
    size of the parameters in float64.

    Reference: arXiv 2505.12128.

    Example:
        >>> bisr(4).fitted(100, separation=100, participations=1).filter.draws
        (1.0, -0.5, -0.125, -0.0625)
    """
    return Noising("bisr", bands, cache=cache)


def band_inv_mf(bands: int, *, cache: bool = False) -> Noising:
    """Make C^-1 of `bands` coefficients, optimised for the run; else as `bisr`.

    Reference: arXiv 2505.12128.

    Example:
        >>> run = {"separation": 100, "participations": 5}
        >>> schemes = band_inv_mf(4), bisr(4)
        >>> [round(s.fitted(500, **run).root_loss(), 2) for s in schemes]
        [7.86, 14.4]
    """
    return Noising("band_inv_mf", bands, cache=cache)


def band_mf(bands: int) -> Noising:
    """Make C of `bands` coefficients and norm one, optimised for the number of steps.

    Sampling by groups, each in every `bands`-th step, amplifies the privacy of it. The
    state holds `bands - 1` times the parameters in float64.

    Reference: arXiv 2306.08153, 2405.15913.

    Example:
        >>> fitted = band_mf(2).fitted(16, separation=2, participations=1)
        >>> [round(c, 4) for c in fitted.filter.feedback]
        [0.8565, 0.5161]
    """
    return Noising("band_mf", bands)


def blt(buffers: int) -> Noising:
    """Make C of coefficients `1, sum_i scales[i] decays[i]^(t-1)`, optimised.

    The state holds `buffers` times the parameters in float64.

    Reference: arXiv 2404.16706, 2408.08868.

    Example:
        >>> fitted = blt(2).fitted(1000, separation=1000, participations=1)
        >>> round(fitted.root_loss("max"), 3)
        3.321
    """
    return Noising("blt", buffers)


def from_coefficients(
    coefficients: Sequence[float], *, inverse: bool = False
) -> Noising:
    """Make a scheme of the first coefficients of C, or of C^-1 with `inverse=True`.

    It is `band_mf` or `band_inv_mf`, not optimised; the other coefficients are zero.

    Example:
        >>> run = {"separation": 2, "participations": 3}
        >>> round(from_coefficients([1.0, 0.5]).fitted(6, **run).sensitivity() ** 2, 3)
        3.75
    """
    scheme = "band_inv_mf" if inverse else "band_mf"
    return Noising(scheme, len(coefficients), tuple(coefficients))


@dataclass(frozen=True)
class Fitted:
    """The strategy C of a run of `steps` steps.

    Attributes:
        filter: the recursion that makes the noise of a step.
        separation: the least number of steps between two participations of a sample.
        participations: the number of them at most.
    """

    filter: Filter
    steps: int
    separation: int
    participations: int

    def column(self, n: int) -> Array:
        """Return the first `n` entries of the first column of C, float64 `[n]`."""
        draws, feedback, decays, scales, _ = self.filter
        if decays:
            powers = np.power.outer(decays, np.arange(n - 1))
            return np.append(1.0, np.array(scales) @ powers)
        return _padded(feedback, n) if feedback else _divided([1.0], draws, n)

    def inverse(self, n: int) -> Array:
        """Return the first `n` entries of the first column of C^-1, float64 `[n]`."""
        draws, feedback, decays, scales, _ = self.filter
        if decays:
            # The buffers follow a symmetric matrix when they are divided by the root of
            # their scales.
            roots = np.sqrt(scales)
            values, vectors = np.linalg.eigh(np.diag(decays) - np.outer(roots, roots))
            powers = values[:, None] ** np.arange(n - 1)
            return np.append(1.0, -((roots @ vectors) ** 2) @ powers)
        return _divided([1.0], feedback, n) if feedback else _padded(draws, n)

    def sensitivity(self, steps: int | None = None) -> float:
        """Return the sensitivity of the first `steps` steps, of all by default.

        It is in units of a single step: one for independent noise and one
        participation. Exact for bands that are at most `separation`, and for
        coefficients of C that are non-negative and do not increase; else a bound.

        Reference: arXiv 2405.13763, theorem 2.
        """
        steps = self.steps if steps is None else steps
        [steps] = checks.integers("Fitted.sensitivity", minimum=1, steps=steps)
        column = self.column(steps)
        return column_sensitivity(column, self.separation, self.participations)

    def row_norms(self, n: int) -> Array:
        """Return the norms of the first `n` rows of C^-1, float64 `[n]`.

        They are the deviations of the noise of the steps, for z of deviation one.
        """
        return np.sqrt(np.cumsum(self.inverse(n) ** 2))

    def errors(self, n: int) -> Array:
        """Return the variance of the first `n` prefix sums of the noise, float64 `[n]`.

        Of one coordinate, for z of variance one.
        """
        return np.cumsum(np.cumsum(self.inverse(n)) ** 2)

    def root_loss(self, kind: Kind = "mean") -> float:
        """Return the root of the mean or largest error, times the sensitivity.

        It is the deviation of a prefix sum at noise multiplier one, in units of the
        sensitivity of a single step.
        """
        checks.choice("Fitted.root_loss", get_args(Kind), kind=kind)
        errors = self.errors(self.steps)
        error = errors.mean() if kind == "mean" else errors[-1]
        return self.sensitivity() * float(np.sqrt(error))


def column_sensitivity(column: Array, separation: int, participations: int) -> float:
    """Bound the sensitivity of the Toeplitz matrix with a first column `[n]`."""
    n, sizes = len(column), np.abs(column)
    times = min(participations, -(-n // separation))
    bands = int(np.flatnonzero(sizes)[-1]) + 1
    if times == 1 or bands <= separation:
        return float(np.linalg.norm(_repeated(sizes, separation, times)))
    falling = np.maximum.accumulate(sizes[::-1])[::-1]
    bound = float(np.linalg.norm(_repeated(falling, separation, times)))
    if n <= _MOST_DENSE and not np.array_equal(falling, column):
        rows = np.arange(n)[:, None] - np.arange(n)
        matrix = np.where(rows >= 0, column[np.abs(rows)], 0.0)
        bound = min(bound, matrix_sensitivity(matrix, separation, participations))
    return bound


def matrix_sensitivity(matrix: Array, separation: int, participations: int) -> float:
    """Bound the sensitivity of any matrix `[n, n]`.

    For each row of `|C^T C|` the best pattern of participation is summed, and then the
    best pattern of these sums.
    """

    def best_sum(values: Array) -> Array:
        """Sum the best entries of the last axis that are `separation` apart."""
        n = values.shape[-1]
        best = np.zeros((n + separation, *values.shape[:-1]))
        for _ in range(min(participations, -(-n // separation))):
            more = np.zeros_like(best)
            for i in reversed(range(n)):
                with_entry = values[..., i] + best[i + separation]
                more[i] = np.maximum(with_entry, more[i + 1])
            best = more
        return best[0]

    return float(np.sqrt(best_sum(best_sum(np.abs(matrix.T @ matrix)))))


def _repeated(column: Array, separation: int, times: int) -> Array:
    """Sum the columns 0, `separation`, ..., `times` of them. [n] -> [n]."""
    n = len(column)
    rows = np.pad(column, (0, -n % separation)).reshape(-1, separation)
    sums = np.cumsum(rows, axis=0)
    sums[times:] -= sums[:-times].copy()
    return sums.reshape(-1)[:n]


def _padded(coefficients: Sequence[float] | Array, n: int) -> Array:
    """Cut coefficients to `n`, or append zeros."""
    missing = max(0, n - len(coefficients))
    return np.pad(np.asarray(coefficients, float)[:n], (0, missing))


def _divided(
    series: Sequence[float] | Array, by: Sequence[float] | Array, n: int
) -> Array:
    """Divide power series, to `n` coefficients."""
    signal = checks.package("scipy.signal", "dp")
    return np.asarray(signal.lfilter([1.0], by, _padded(series, n)))


@functools.lru_cache(maxsize=256)
def _optimised(
    scheme: Scheme, size: int, n: int, separation: int, participations: int
) -> tuple[float, ...]:
    """Return the coefficients of a scheme for a run: a pure function."""
    times = min(participations, -(-n // separation))
    if scheme == "blt":
        coefficients = _blt(n, size, separation, times)
    elif scheme == "band_mf":
        coefficients = _padded(_bands(n, min(size, n)), size)
    else:
        coefficients = _padded(_inverse_bands(n, min(size, n), separation, times), size)
    return tuple(coefficients.tolist())


def _half(bands: int, power: float) -> Array:
    """Return the first coefficients of `(1 - x)^-power`."""
    j = np.arange(1.0, bands)
    ratios: Array = np.append(1.0, (j - 1 + power) / j)
    return ratios.cumprod()


def _bands(n: int, bands: int) -> Array:
    """Return the C of norm one with the least mean error."""
    weights = np.arange(n, 0, -1) / n

    def loss(tail: Array) -> tuple[float, Array]:
        c = np.array([1.0, *tail])
        sums = _divided(np.ones(n), c, n)
        slopes, weighted = _divided(sums, c, n), weights * sums
        squares, error = c @ c, weighted @ sums
        moved = [weighted[j:] @ slopes[: n - j] for j in range(1, bands)]
        slope = tail / squares - np.array(moved) / error
        return math.log(squares * error), 2 * slope

    c = np.array([1.0, *_minimum(loss, _half(bands, 0.5)[1:])])
    return c / np.linalg.norm(c)


def _inverse_bands(n: int, bands: int, separation: int, times: int) -> Array:
    """Return the C^-1 with the least mean error for the bound of the sensitivity.

    Its sums fall from one and stay positive, so that C is positive and decays.
    """
    weights = np.arange(n, 0, -1) / n
    weights = np.append(weights[: bands - 1], weights[bands - 1 :].sum())
    places = np.arange(n)

    def sums(free: Array) -> Array:
        return np.exp(-np.cumsum(np.append(0.0, np.logaddexp(0, -free))))

    def loss(free: Array) -> tuple[float, Array]:
        of_error = weights * sums(free)
        error = of_error @ sums(free)
        k = np.diff(sums(free), prepend=0.0)
        c = _divided([1.0], k, n)
        falling = np.maximum.accumulate(c[::-1])[::-1] if times > 1 else c
        total = _repeated(falling, separation, times)
        squares, back = total @ total, _repeated(total[::-1], separation, times)[::-1]
        # Where c rises, its next maximum stands for it.
        maxima = np.where(c == falling, places, n)
        maxima = np.minimum.accumulate(maxima[::-1])[::-1]
        back = np.bincount(maxima, back, minlength=n)
        slopes = _divided(c, k, n)
        of_k = [-back[j:] @ slopes[: n - j] for j in range(bands)]
        of_sums = of_error / error - np.diff(of_k, append=0.0) / squares
        of_logs = np.cumsum((of_sums * sums(free))[:0:-1])[::-1]
        return math.log(squares * error), 2 * of_logs / (1 + np.exp(free))

    start = _half(bands, 0.5)
    ratios = start[1:] / start[:-1]
    partial_sums = sums(_minimum(loss, np.log(ratios / (1 - ratios))))
    return np.diff(partial_sums, prepend=0.0)


def _blt(n: int, buffers: int, separation: int, times: int) -> Array:
    """Return the decays and scales with the least largest error.

    C is the product of `(1 - back x) / (1 - decay x)`. Between a decay and the
    next smaller one lies a `back`, so that scales are positive and coefficients of C
    fall. All terms below are positive, and all are computed from gaps: one minus the
    decays and one minus the backs.
    """
    last = n - (times - 1) * separation  # steps from the last participation on
    hits = np.arange(times)[:, None]

    def gaps(free: Array) -> tuple[Array, Array]:
        falling = np.exp(-np.cumsum(np.logaddexp(0, -free)))
        decay, back = falling[::-1].reshape(-1, 2).T
        return decay, back

    def scales(decay: Array, back: Array) -> Array:
        among = decay - decay[:, None] + np.eye(buffers)
        return (back - decay[:, None]).prod(1) / among.prod(1)

    def sums(logs: Array, n: Any) -> Array:
        return np.expm1(n * logs) / np.expm1(logs)  # of n powers

    def loss(free: Array) -> float:
        decay, back = gaps(free)
        logs, omega = np.log1p(-decay), scales(decay, back)
        before = sums(separation * logs, hits) * np.exp((separation - 1) * logs)
        after = sums(separation * logs, hits + 1) * omega
        pairs = logs + logs[:, None]
        squares = ((1 + before @ omega) ** 2).sum()
        squares += (after[:-1].T @ after[:-1] * sums(pairs, separation - 1)).sum()
        squares += after[-1] @ sums(pairs, last - 1) @ after[-1]

        logs, rest = np.log1p(-back), (decay / back).prod()
        parts = -scales(back, decay) / back
        error = n * rest**2 + 2 * rest * (parts @ sums(logs, n))
        error += parts @ sums(logs + logs[:, None], n) @ parts
        return np.log(squares * error)

    minima = []
    for smallest in (1e-3, 0.1):  # with several participations there are two minima
        start = np.geomspace(0.5, smallest, 2 * buffers)
        ratios = start / np.append(1.0, start[:-1])
        minima.append(_minimum(loss, np.log(ratios / (1 - ratios)), "3-point"))
    decay, back = gaps(min(minima, key=loss))
    return np.concatenate([1 - decay, scales(decay, back)])


def _minimum(loss: Any, start: Array, slopes: Any = True) -> Array:
    from scipy.optimize import minimize

    if not len(start):
        return start
    options = {"ftol": 1e-15, "gtol": 1e-9, "maxiter": 2000, "maxfun": 10**5}
    # Logistic functions of these numbers are neither zero nor one.
    bounds = [(-40.0, 20.0)] * len(start)
    how: Any = {"method": "L-BFGS-B", "bounds": bounds, "options": options}
    return minimize(loss, start, jac=slopes, **how).x
