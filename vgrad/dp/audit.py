"""Audits: lower bounds of the privacy that a mechanism spends, from scores of canaries.

A canary is a sample made to be seen. A coin decides whether it takes part in a run, and
its score is high if it seems to have. A bound above the claim refutes the claim; one
below it proves nothing. `Plan.audit` makes canaries of its own; the functions here take
scores from any attack.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vgrad import checks
from vgrad.report import Report, table

__all__ = ["Audit", "Bound", "clopper_pearson", "gaussian", "one_run", "one_run_fdp"]

Scores = Tensor | Sequence[float] | np.ndarray

_COINS = "each canary took part by a fair coin of its own"
_FIXED = "the guesses or the threshold were fixed before the scores were seen"
_GAUSSIAN = "the mechanism is Gaussian, as its claim"
_INDEPENDENT = "the scores are independent of each other"
_NORMAL = "the scores are normal, with one deviation, and many"

_UNFAIR = 6.0
"""Deviations from one half that fair coins show in 2 of 10^9 audits."""

_LARGEST = 100.0
"""An epsilon, or a mu, that no number of guesses rejects."""

FEW = 30
"""Scores whose mean and deviation are not normal yet."""


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Bound:
    """A lower bound from scores of canaries, with the conditions it rests on.

    Attributes:
        value: the bound, above the truth with a probability of at most `significance`.
        of: the quantity, `"epsilon"` at `delta`, or `"mu"` of Gaussian privacy.
        ceiling: the largest bound that so many canaries could have given.
        included, excluded: canaries that took part, and that did not.
        guessed, correct: guesses, and how many of them were right, if there were any.
        assumes: conditions that the scores alone cannot show.
    """

    value: float
    of: Literal["epsilon", "mu"]
    significance: float
    ceiling: float
    included: int
    excluded: int
    assumes: tuple[str, ...]
    delta: float = 0.0
    guessed: int = 0
    correct: int = 0

    def epsilon(self, delta: float) -> float:
        """Return the bound as one of epsilon at `delta`, also if it is one of mu."""
        if self.of == "mu":
            checks.between("Bound.epsilon", 0, 1, delta=delta)
            return epsilon_of(self.value, delta)
        if delta != self.delta:
            raise ValueError(
                f"Bound.epsilon({delta=}): expected delta={self.delta!r}, at which the "
                f"bound holds, got another one. Compute a bound at it."
            )
        return self.value


def one_run(
    included: Scores,
    excluded: Scores,
    *,
    guesses: tuple[int, int],
    delta: float,
    significance: float = 0.05,
) -> Bound:
    """Bound epsilon at `delta` from the scores of one run's canaries.

    Of all m scores the `guesses[0]` highest ones are guessed to be of canaries that
    took part, the `guesses[1]` lowest ones of canaries that did not; both numbers have
    to be fixed before the run. If v of r guesses are right, the claim (epsilon, delta)
    has the p-value `b(v) + 2 m delta max_i (b(v - i) - b(v)) / i`, where b(v) is the
    probability that at least v of r coins show heads, each with the probability
    `1 / (1 + exp(-epsilon))`. The bound is the largest epsilon that is rejected. Equal
    scores around the last place among the guesses count as wrong as they can be.

    A few sure guesses show more than many vague ones, but r guesses bound no epsilon
    above the `ceiling` of the result, some `log(r / log(1 / significance))`.

    Raises:
        ValueError: there are more guesses than scores, or the coins cannot be fair.

    Reference: Steinke et al., arXiv 2305.08846.

    Example:
        >>> bound = one_run([3.0] * 50, [0.0] * 50, guesses=(40, 40), delta=1e-5)
        >>> bound.correct, round(bound.value, 2), round(bound.ceiling, 2)
        (80, 3.26, 3.26)
    """
    special = checks.package("scipy.special", "dp")
    significance, delta = check_numbers("one_run", significance, delta)

    def margin(epsilon: float, count: int, guessed: int, correct: int) -> float:
        fewer = np.arange(correct + 1)
        tails = special.bdtrc(correct - fewer - 1, guessed, special.expit(epsilon))
        rise = np.max((tails[1:] - tails[0]) / fewer[1:], initial=0.0)
        return significance - tails[0] - 2 * count * delta * rise

    run = included, excluded, guesses, significance, delta
    return _of_guesses("one_run", margin, lambda epsilon: epsilon, *run)


def one_run_fdp(
    included: Scores,
    excluded: Scores,
    *,
    guesses: tuple[int, int],
    delta: float,
    significance: float = 0.05,
) -> Bound:
    """Bound epsilon at `delta` of a Gaussian mechanism, from one run's canaries.

    Guesses are made as in `one_run`, and the claims that they may reject are whole
    trade-off curves of Gaussian privacy, one for each mu. The bound is the epsilon at
    `delta` of the largest mu that is rejected, some twice as large. It holds
    for Gaussian mechanisms alone.

    Raises:
        ValueError: as `one_run`.

    Reference: Mahloujifar et al., arXiv 2410.22235.

    Example:
        >>> bound = one_run_fdp([3.0] * 50, [0.0] * 50, guesses=(40, 40), delta=1e-5)
        >>> round(bound.value, 2)
        7.41
    """
    special = checks.package("scipy.special", "dp")
    significance, delta = check_numbers("one_run_fdp", significance, delta)

    def margin(mu: float, count: int, guessed: int, correct: int) -> float:
        right = significance * correct / count
        wrong = significance * (guessed - correct) / count
        for place in range(correct - 1, -1, -1):
            more = max(wrong, special.ndtr(special.ndtri(right) - mu))
            if more == wrong:  # nothing changes any more
                break
            right = min(right + place / (guessed - place) * (more - wrong), 1.0)
            wrong = more
        return right + wrong - guessed / count

    run = included, excluded, guesses, significance, delta, _GAUSSIAN
    return _of_guesses("one_run_fdp", margin, lambda mu: epsilon_of(mu, delta), *run)


def clopper_pearson(
    included: Scores,
    excluded: Scores,
    *,
    threshold: float,
    delta: float = 0.0,
    significance: float = 0.05,
) -> Bound:
    """Bound epsilon at `delta` from the errors of a test at one threshold.

    A score of at least `threshold`, which has to be fixed beforehand, is guessed to be
    of a canary that took part. The bound is `log((1 - delta - fn) / fp)`, where fn and
    fp are upper confidence limits of both error rates, each at half the significance.
    Scores have to be independent of each other: best is a run for each canary.

    Raises:
        ValueError: there are no scores of one kind.

    Reference: Jagielski et al., arXiv 2006.07709; Nasr et al., arXiv 2101.04535.

    Example:
        >>> scores = {"included": [1.0] * 500, "excluded": [0.0] * 500}
        >>> round(clopper_pearson(**scores, threshold=0.5, significance=0.01).value, 2)
        4.54
    """
    function = "clopper_pearson"
    special = checks.package("scipy.special", "dp")
    significance, delta = check_numbers(function, significance, delta)
    high, low = _scores(function, included, excluded)

    def limit(errors: int, count: int) -> float:
        rate = special.bdtri(errors, count, significance / 2)
        return rate if errors < count else 1.0

    def bound(missed: int, false: int) -> float:
        right = 1 - delta - limit(missed, len(high))
        return max(0.0, math.log(right / limit(false, len(low)))) if right > 0 else 0.0

    missed, false = int((high < threshold).sum()), int((low >= threshold).sum())
    return Bound(
        value=bound(missed, false),
        of="epsilon",
        significance=significance,
        ceiling=bound(0, 0),
        included=len(high),
        excluded=len(low),
        assumes=(_INDEPENDENT, _FIXED),
        delta=delta,
        guessed=len(high) + len(low),
        correct=len(high) + len(low) - missed - false,
    )


def gaussian(
    included: Scores, excluded: Scores, *, significance: float = 0.05
) -> Bound:
    """Bound mu, the distance of two normal distributions of scores in deviations.

    The Gaussian mechanism with a sensitivity of mu deviations spends just that. The
    bound is an estimate, the difference of both means over the deviation of the
    excluded scores, less a normal quantile times its standard error. It is asymptotic:
    right in the limit of many scores, and no guarantee for any number of them.

    Raises:
        ValueError: there are fewer than 30 scores of one kind.

    Reference: Nasr et al., arXiv 2302.07956; Agrawal et al., arXiv 2606.12733.

    Example:
        >>> scores = torch.linspace(-1, 1, 100)
        >>> round(gaussian(scores + 1, scores).value, 2)
        1.4
    """
    special = checks.package("scipy.special", "dp")
    significance, _ = check_numbers("gaussian", significance)
    high, low = _scores("gaussian", included, excluded)
    if min(len(high), len(low)) < FEW:
        raise ValueError(
            f"gaussian(included, excluded): expected {FEW} scores of each kind at "
            f"least, got {len(high)} and {len(low)}. Take more canaries."
        )
    rise, spread = high.mean() - low.mean(), low.std(ddof=1)
    if spread == 0:
        value = math.inf if rise > 0 else 0.0
    else:
        mu = rise / spread
        # The deviation is an estimate, too.
        variance = high.var(ddof=1) / spread**2 / len(high) + 1 / len(low)
        error = math.sqrt(variance + mu**2 / (2 * len(low)))
        value = max(0.0, mu + special.ndtri(significance) * error)
    return Bound(
        value=float(value),
        of="mu",
        significance=significance,
        ceiling=math.inf,
        included=len(high),
        excluded=len(low),
        assumes=(_GAUSSIAN, _INDEPENDENT, _NORMAL),
    )


@dataclass(frozen=True)
class Audit(Report):
    """The result of `Plan.audit`: bounds, beside the claim of the steps audited.

    Attributes:
        mu: the largest bound of mu, by `gaussian`, of all canaries or of some of them.
        epsilon: the bound of epsilon, by `one_run`, at the plan's delta, or at 0.01
            over the number of canaries if that is less, since a larger one would leave
            guesses little to show.
        claimed_mu, claimed_epsilon: the claim for the steps audited, in all of which a
            canary is or is not: two steps at a sampling rate of 1.
        groups: bounds of mu by the name of the canaries, each at a share of the
            significance, so that all of them hold together.
        significance: a true step exceeds its claim with this probability at most. Half
            of it is for the bounds of mu, half for the bound of epsilon.
        included, excluded: scores, in deviations of the noise that the plan claims.
        private: whether there were real samples in the batches, so that the result has
            to be kept as they are.
    """

    mu: Bound
    epsilon: Bound
    claimed_mu: float
    claimed_epsilon: float
    groups: dict[str, Bound]
    significance: float
    included: Tensor = field(repr=False)
    excluded: Tensor = field(repr=False)
    private: bool

    @property
    def exceeded(self) -> bool:
        """Whether a bound is above the claim: the step spends more than it says."""
        mu, epsilon = self.mu.value, self.epsilon.value
        return mu > self.claimed_mu or epsilon > self.claimed_epsilon

    def plot(self) -> Any:
        """Draw scores beside the claim, and bounds. -> matplotlib's `Figure`."""
        figures = checks.package("matplotlib.figure", "demo")
        figure = figures.Figure(figsize=(9.5, 4.2), layout="constrained")
        figure.suptitle(str(self).partition("\n\n")[2], fontsize="medium")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        scores = torch.cat([self.included, self.excluded]).numpy()
        # Of a broken step, scores may be anywhere.
        low, high = np.quantile(scores, (0.01, 0.99))
        low, high = min(low, -4.0), max(high, self.claimed_mu + 4)
        places = np.linspace(low, high, 401)
        sides = ("in", self.included, self.claimed_mu), ("out", self.excluded, 0.0)
        for color, (name, side, mean) in zip(("C0", "C1"), sides, strict=True):
            shown, label = side.clamp(low, high), f"{name}, {len(side)} canaries"
            style: Any = {"density": True, "alpha": 0.4}
            style |= {"color": color, "label": label, "range": (low, high)}
            left.hist(shown.numpy(), 40, **style)
            curve = np.exp(-((places - mean) ** 2) / 2) / math.sqrt(math.tau)
            left.plot(places, curve, color, label=f"{name}, as claimed")
        left.set(xlabel="score, in deviations of the noise claimed", ylabel="density")
        left.legend(fontsize="small")
        values = {name: bound.value for name, bound in reversed(self.groups.items())}
        right.barh([*values], [*values.values()], color="C0", alpha=0.6)
        right.axvline(self.claimed_mu, color="k")
        right.set_title(f"line: claimed, {self.claimed_mu:.3g}", fontsize="small")
        right.set(xlabel="mu is at least")
        if self.mu.value > 20:
            right.set_xscale("symlog")
        return figure

    def __str__(self) -> str:
        rows: list[Sequence[str | int]] = [("canaries", "in", "out", "mu at least")]
        for name, bound in self.groups.items():
            rows.append((name, bound.included, bound.excluded, f"{bound.value:.3f}"))
        run, verdict = self.epsilon, "is exceeded" if self.exceeded else "stands"
        return (
            f"{table(rows, right={1, 2, 3})}\n\n"
            f"epsilon at least {run.value:.3f}, from {run.correct} right guesses of "
            f"{run.guessed}, which could show {run.ceiling:.3f}\n"
            f"claim: mu {self.claimed_mu:.3f}, epsilon {self.claimed_epsilon:.3f} at "
            f"delta {run.delta:.3g}; it {verdict} at significance {self.significance:g}"
        )


def epsilon_of(mu: float, delta: float) -> float:
    """Return epsilon at `delta` of the Gaussian mechanism with a sensitivity of mu."""
    if mu in (0.0, math.inf):
        return mu
    library = checks.package("dp_accounting", "dp")
    return float(library.get_epsilon_gaussian(1 / mu, delta, tol=1e-9))


def _of_guesses(
    function: str,
    margin: Callable[[float, int, int, int], float],
    epsilon: Callable[[float], float],
    included: Scores,
    excluded: Scores,
    guesses: tuple[int, int],
    significance: float,
    delta: float,
    *assumes: str,
) -> Bound:
    """Find the largest parameter that guesses reject, at a margin above zero."""
    optimize = checks.package("scipy.optimize", "dp")
    high, low = _scores(function, included, excluded)
    count = len(high) + len(low)
    if abs(len(high) - len(low)) > _UNFAIR * math.sqrt(count):
        raise ValueError(
            f"{function}(included, excluded): expected scores of canaries that took "
            f"part by fair coins, got {len(high)} and {len(low)}. Draw a coin for each."
        )
    named = {f"guesses[{place}]": number for place, number in enumerate(guesses)}
    guesses_in, guesses_out = checks.integers(function, minimum=0, **named)
    guessed = guesses_in + guesses_out
    if not 0 < guessed <= count:
        raise ValueError(
            f"{function}(guesses={guesses}): expected between one guess and as many as "
            f"the {count} scores, got {guessed}."
        )
    # By score, and of equal scores the wrong guesses first.
    scores, inside = np.concatenate([high, low]), np.arange(count) < len(high)
    top, rest = np.split(np.lexsort((inside, -scores)), [guesses_in])
    bottom = rest[np.lexsort((~inside[rest], scores[rest]))[:guesses_out]]

    def largest(correct: int) -> float:
        numbers = count, guessed, correct
        if margin(0.0, *numbers) <= 0:
            return 0.0
        return epsilon(optimize.brentq(margin, 0.0, _LARGEST, args=numbers, xtol=1e-9))

    correct = int(inside[top].sum() + (~inside[bottom]).sum())
    return Bound(
        value=largest(correct),
        of="epsilon",
        significance=significance,
        ceiling=largest(guessed),
        included=len(high),
        excluded=len(low),
        assumes=(_COINS, _FIXED, *assumes),
        delta=delta,
        guessed=guessed,
        correct=correct,
    )


def _scores(function: str, *sides: Scores) -> list[np.ndarray]:
    """Return scores as float64 `[n]`."""
    arrays = []
    for scores in sides:
        if isinstance(scores, Tensor):
            scores = scores.detach().cpu().double().numpy()
        array = np.asarray(scores, dtype=np.float64)
        if array.ndim != 1 or not len(array) or np.isnan(array).any():
            raise ValueError(
                f"{function}(included, excluded): expected scores in one dimension, "
                f"none of them NaN and at least one of each kind, got "
                f"{checks.shown(array)}."
            )
        arrays.append(array)
    return arrays


def check_numbers(
    function: str, significance: float, delta: float = 0.0
) -> list[float]:
    [significance] = checks.between(function, 0, 0.5, significance=significance)
    return [significance, *checks.between(function, -1e-300, 1, delta=delta)]
