"""The best of a random number of private runs, and its account.

The number of runs follows a truncated negative binomial distribution: for k >= 1, the
probability of k is proportional to `(1 - h)^k s (s + 1) ... (s + k - 1) / k!`, where s
is the shape and h follows from the mean.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Any

from torch import Tensor

from vgrad import checks
from vgrad.dp import accounting
from vgrad.dp.plan import Plan
from vgrad.generators import check_key, fold_in, secret_key, stream
from vgrad.tree import copied
from vgrad.typing import T, Tree


def best_of(
    plan: Plan,
    *,
    score: Any,
    mean: float = 8,
    shape: float = 1,
    key: Tensor | None = None,
) -> "BestOf":
    """Release the best of a random number of runs of a plan, for tuning with a budget.

    `.epsilon()` bounds the epsilon of the best run at the plan's delta, by Rényi
    divergences. It holds if

    * the score that chooses is computed from public data, `score="public"`, or is
      itself in the account: `score` is then the event of dp_accounting, of the plan's
      relation, that the score of each run spends;
    * each run has a fresh key, and its settings are drawn from one distribution
      (`run.choice`), whatever earlier runs gave;
    * the number of runs, the losers and their scores stay secret;
    * that number is drawn before the first run (which happens here) and never cut
      short: an interrupted search goes on from its `state_dict()`.

    Args:
        score: `"public"`, or an event such as `dp_accounting.GaussianDpEvent(10.0)`.
        mean: the mean number of runs, above 1 and below 10,000.
        shape: 1 for the geometric distribution, 0 for the logarithmic one, which costs
            less epsilon and more often is a single run.
        key: a secret key, the same on all ranks; by default from the operating system.

    Raises:
        ValueError: the plan has no account by Rényi divergences, or a plan before it;
            a number is out of range; or the event of the score has no account.

    Reference: Papernot and Steinke, Hyperparameter Tuning with Rényi Differential
    Privacy, arXiv 2110.03620.

    Example:
        >>> run = {"sampling_rate": 0.01, "noise_multiplier": 1.0, "steps": 7000}
        >>> plan = Plan(dataset_size=60_000, max_norm=1.0, delta=1e-5, **run)
        >>> best = best_of(plan, score="public", mean=8)
        >>> round(plan.epsilon(), 1), round(best.epsilon(), 1)
        (5.1, 9.3)
        >>> for run in best:  # each trains with run.key
        ...     rate = run.choice([0.1, 0.3, 1.0])
        ...     best.add(-abs(rate - 0.3), {"rate": rate})
        >>> best.result()["rate"] in (0.1, 0.3, 1.0)
        True
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"best_of(plan): expected a Plan, got a {type(plan).__name__}.")
    if "rdp" not in plan.accountants or plan.before is not None:
        raise ValueError(
            f"best_of(plan): expected a plan of its own with an account by 'rdp', got "
            f"one of {sorted(plan.accountants)} after {plan.earlier_steps} other steps."
        )
    [mean] = checks.between("best_of", 1, 10_000, mean=mean)
    checks.non_negative("best_of", shape=shape)
    [shape] = checks.between("best_of", -1, 1000, shape=shape)
    key = secret_key() if key is None else key
    check_key("best_of", key)
    best = BestOf(plan, score, float(mean), float(shape), key)
    event = str if score == "public" else checks.package("dp_accounting", "dp").DpEvent
    if not (isinstance(score, event) and accounting.has_rdp(best.dp_event())):
        raise ValueError(
            f"best_of(score={checks.shown(score)}): expected 'public' or an event of "
            f"dp_accounting, with an account by 'rdp', that the score of a run spends."
        )
    return best


@dataclass(frozen=True)
class Run:
    """One of the runs, with a fresh key."""

    key: Tensor = field(repr=False)

    def choice(self, values: Sequence[T]) -> T:
        """Return one of the values, each with the same probability, by the key."""
        return values[stream(self.key, "choice") % len(values)]


@dataclass(eq=False)
class BestOf:
    """Runs of a plan, of which the best one is released; `best_of` makes it."""

    plan: Plan
    score: Any
    mean: float
    shape: float
    _key: Tensor = field(repr=False)
    _finished: int = field(default=0, repr=False)
    _best: tuple[float, Tree] = field(default=(-math.inf, None), repr=False)

    def dp_event(self) -> Any:
        """Return the release of the best run as an event of dp_accounting."""
        library, event = checks.package("dp_accounting", "dp"), self.plan.dp_event()
        if self.score != "public":
            event = library.ComposedDpEvent([event, self.score])
        return library.dp_event.RepeatAndSelectDpEvent(event, self.mean, self.shape)

    def epsilon(self) -> float:
        """Bound the epsilon of the best run at the plan's delta."""
        delta, one = self.plan.delta, self.plan.account(self.plan.steps)
        if math.isinf(accounting.composed(one, delta, "rdp")):  # too little noise
            return math.inf
        return accounting.rdp_epsilon(self.dp_event(), delta)

    def __iter__(self) -> Iterator[Run]:
        """Yield the runs that are left, each of which `add` ends."""
        while (finished := self._finished) < self._number:
            yield Run(fold_in(self._key, "run", finished))
            if self._finished != finished + 1:
                raise RuntimeError(
                    "best_of(plan): expected one call of add(score, result) in each "
                    "run, got none or several. A run that failed has a score, too."
                )

    def add(self, score: float | Tensor, result: Tree) -> None:
        """End a run; a copy of the first result of the best score is kept.

        A score that is NaN is below all others.
        """
        if self._finished >= self._number:
            raise RuntimeError(
                "best_of(plan).add(score, result): expected one of its runs, got more, "
                "for which the account has no room."
            )
        score = -math.inf if math.isnan(score) else float(score)
        if not self._finished or score > self._best[0]:
            self._best = score, copied(result)
        self._finished += 1

    def result(self) -> Tree:
        """Return the result of the best run, once all have ended."""
        if self._finished < self._number:
            raise RuntimeError(
                "best_of(plan).result(): expected all runs, whose number was drawn "
                "before, got some. Go on with `for run in best`."
            )
        return self._best[1]

    def state_dict(self) -> dict[str, Any]:
        """Return a state from which the search goes on; as secret as the data."""
        state = {"key": self._key.clone(), "finished": self._finished}
        return state | {"best": self._best, "of": self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; the number of runs stays the one that was drawn."""
        checks.names("BestOf.load_state_dict", self.state_dict(), state)
        check_key("BestOf.load_state_dict", state["key"])
        if state["of"] != self._identity:
            raise ValueError(
                "BestOf.load_state_dict(state): expected a state of best_of with the "
                "same plan, score, mean and shape, got another one."
            )
        own = self.plan, self.score, self.mean, self.shape, state["key"].clone()
        self.__init__(*own, state["finished"], state["best"])
        self.__dict__.pop("_number", None)  # of the key before

    @property
    def _identity(self) -> list[Any]:
        digest = bytes(self.plan.digest.tolist()).hex()
        return [digest, self.plan.steps, repr(self.score), self.mean, self.shape]

    @functools.cached_property
    def _number(self) -> int:
        """The number of runs, which 128 bits of the key choose."""
        with localcontext(prec=60):
            shape, bits = Decimal(self.shape), stream(self._key, "number of runs")

            def mean_of(h: Decimal) -> Decimal:
                if not shape:
                    return (1 / h - 1) / -h.ln()
                return shape * (1 / h - 1) / (1 - h**shape)

            low, high = Decimal(0), Decimal(1)  # at the latter the mean is 1
            for _ in range(170):
                h = (low + high) / 2
                low, high = (low, h) if mean_of(h) < self.mean else (h, high)
            number, chance = 1, (1 - high) / -high.ln()
            if shape:
                chance = shape * (1 - high) / (high**-shape - 1)
            rest = Decimal(bits) / 2**128 - chance
            while rest >= 0:
                chance *= (1 - high) * (number + shape) / (number + 1)
                number, rest = number + 1, rest - chance
        return number
