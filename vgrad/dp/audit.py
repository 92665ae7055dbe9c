"""Audits: lower bounds of the privacy that a mechanism spends, from scores of canaries.

A canary is a sample made to be seen. A coin decides whether it takes part in a run, and
its score is high if it seems to have. A bound above the claim refutes the claim; one
below it proves nothing.

* `one_run`, `one_run_fdp`: bound epsilon, from the canaries of one run
* `clopper_pearson`: bound epsilon, from canaries that are independent of each other
* `gaussian`: bound mu, from scores that are normal
* `Bound`: the result of each of them
* `Audit`: the result of `Plan.audit`, which makes canaries of its own
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vgrad import batches, checks
from vgrad.dp.plan import Plan, as_digest, spent_under
from vgrad.generators import block, fold_in, secret_key, stream
from vgrad.report import Report, table
from vgrad.torch_private import shards
from vgrad.tree import map_tensors
from vgrad.typing import LossFn, Params

__all__ = ["Audit", "Bound", "clopper_pearson", "gaussian", "one_run", "one_run_fdp"]

Scores = Tensor | Sequence[float] | np.ndarray

_COINS = "each canary took part by a fair coin of its own"
_FIXED = "the guesses or the threshold were fixed before the scores were seen"
_GAUSSIAN = "the mechanism is Gaussian, as its claim"
_INDEPENDENT = "the scores are independent of each other"
_NORMAL = "the scores are normal, with one deviation, and many"

_UNFAIR = 6.0
"""Deviations from one half that fair coins show in 2 of 10^9 audits."""

_FEW = 30
"""Scores whose mean and deviation are not normal yet."""

_NORMS = 1.0, 10.0, 1e4
"""Norms of canaries' gradients before they are clipped, in bounds of the clip."""

_ROUND = 256
"""Canaries in the two steps of a round at least, where the data set has as many."""

_AT_A_TIME = 2**24
"""Numbers of the directions that are held at once."""


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
        ImportError: SciPy is not installed.

    Reference: Steinke et al., arXiv 2305.08846.

    Example:
        >>> bound = one_run([3.0] * 50, [0.0] * 50, guesses=(40, 40), delta=1e-5)
        >>> bound.correct, round(bound.value, 2), round(bound.ceiling, 2)
        (80, 3.26, 3.26)
    """
    special = _special("one_run")

    def margin(epsilon: float, count: int, guessed: int, correct: int) -> float:
        fewer = np.arange(correct + 1)
        tails = special.bdtrc(correct - fewer - 1, guessed, special.expit(epsilon))
        rise = np.max((tails[1:] - tails[0]) / fewer[1:], initial=0.0)
        return significance - tails[0] - 2 * count * delta * rise

    run = _guessed("one_run", included, excluded, guesses, significance, delta)
    return _of_guesses(run, margin, lambda epsilon: epsilon)


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
        ValueError, ImportError: as `one_run`.

    Reference: Mahloujifar et al., arXiv 2410.22235.

    Example:
        >>> bound = one_run_fdp([3.0] * 50, [0.0] * 50, guesses=(40, 40), delta=1e-5)
        >>> round(bound.value, 2)
        7.41
    """
    special = _special("one_run_fdp")

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

    run = _guessed("one_run_fdp", included, excluded, guesses, significance, delta)
    return _of_guesses(run, margin, lambda mu: epsilon_of(mu, delta), _GAUSSIAN)


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
        ImportError: SciPy is not installed.

    Reference: Jagielski et al., arXiv 2006.07709; Nasr et al., arXiv 2101.04535.

    Example:
        >>> scores = {"included": [1.0] * 500, "excluded": [0.0] * 500}
        >>> round(clopper_pearson(**scores, threshold=0.5, significance=0.01).value, 2)
        4.54
    """
    function = "clopper_pearson"
    special = _special(function)
    _check(function, significance, delta)
    high, low = _scores(function, included, excluded)

    def limit(errors: int, count: int) -> float:
        if errors == count:
            return 1.0
        return special.betaincinv(errors + 1, count - errors, 1 - significance / 2)

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
        ImportError: SciPy is not installed.

    Reference: Nasr et al., arXiv 2302.07956; Agrawal et al., arXiv 2606.12733.

    Example:
        >>> scores = torch.linspace(-1, 1, 100)
        >>> round(gaussian(scores + 1, scores).value, 2)
        1.4
    """
    special = _special("gaussian")
    _check("gaussian", significance)
    high, low = _scores("gaussian", included, excluded)
    if min(len(high), len(low)) < _FEW:
        raise ValueError(
            f"gaussian(included, excluded): expected {_FEW} scores of each kind at "
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
        """Draw the scores beside the claim, and the bounds. -> matplotlib's `Figure`.

        Raises:
            ImportError: `matplotlib` is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "Audit.plot: expected the package matplotlib, which is not installed. "
                'Run pip install "vgrad[demo]".'
            ) from error
        figure = Figure(figsize=(9.5, 4.2), layout="constrained")
        verdict = "is exceeded" if self.exceeded else "stands"
        figure.suptitle(
            f"{len(self.included) + len(self.excluded):,} canaries: the claim "
            f"{verdict} at significance {self.significance:g}\n"
            f"epsilon at least {self.epsilon.value:.2f}, claimed "
            f"{self.claimed_epsilon:.2f}, and up to {self.epsilon.ceiling:.2f} can be "
            f"seen",
            fontsize="medium",
        )
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        scores = torch.cat([self.included, self.excluded])
        # Of a broken step, scores may be anywhere.
        ends = scores.quantile(torch.tensor([0.01, 0.99], dtype=scores.dtype)).tolist()
        low, high = min(ends[0], -4.0), max(ends[1], self.claimed_mu + 4)
        bins = np.linspace(low, high, 41)
        places = np.linspace(low, high, 401)
        sides = {"in": (self.included, self.claimed_mu), "out": (self.excluded, 0.0)}
        for number, (name, (some, mean)) in enumerate(sides.items()):
            shown = some.clamp(low, high).numpy()
            more = {"density": True, "alpha": 0.4, "color": f"C{number}"}
            left.hist(shown, bins, label=f"{name}, {len(some)} canaries", **more)
            curve = np.exp(-((places - mean) ** 2) / 2) / math.sqrt(math.tau)
            left.plot(places, curve, f"C{number}", label=f"{name}, as claimed")
        left.set(xlabel="score, in deviations of the noise claimed", ylabel="density")
        left.legend(fontsize="small")
        names = [*self.groups][::-1]
        values = [self.groups[name].value for name in names]
        right.barh(names, values, color="C0", alpha=0.6)
        right.axvline(self.claimed_mu, color="k")
        right.set_title(f"line: claimed, {self.claimed_mu:.3g}", fontsize="small")
        right.set(xlabel="mu is at least")
        if max(values) > 20:
            right.set_xscale("symlog")
        return figure

    def __str__(self) -> str:
        rows: list[Sequence[str | int]] = [("canaries", "in", "out", "mu at least")]
        for name, each in self.groups.items():
            rows.append((name, each.included, each.excluded, f"{each.value:.3f}"))
        run, verdict = self.epsilon, "is exceeded" if self.exceeded else "stands"
        return (
            f"{table(rows, right={1, 2, 3})}\n\n"
            f"epsilon at least {run.value:.3f}, from {run.correct} right guesses of "
            f"{run.guessed}, which could show {run.ceiling:.3f}\n"
            f"claim: mu {self.claimed_mu:.3f}, epsilon {self.claimed_epsilon:.3f} at "
            f"delta {run.delta:.3g}; it {verdict} at significance {self.significance:g}"
        )


class Audited(Protocol):
    """The releases of a plan that an audit can have with a loss of its own."""

    @property
    def options(self) -> Any:
        """The options of the clipped sum, its loss among them."""
        ...

    @property
    def params(self) -> Params:
        """The parameters, which stay as they are."""
        ...

    def agreed(self, key: Tensor) -> Tensor:
        """Return one key for all processes."""
        ...

    def noisy_gradients(
        self, loss: LossFn, key: Tensor, batches: Sequence[tuple], chunk_size: Any
    ) -> list[tuple[Params, float]]:
        """Take the plan's first steps with another loss, on batches of all processes.

        The state is saved and loaded before the last one. -> the noisy gradients of
        each step, and the bound that it clipped to.
        """
        ...


class OfStep(NamedTuple):
    """The releases of a private step, `Audited`."""

    step: Any
    state: Any

    @property
    def options(self) -> Any:
        return self.step.source.transform.options

    @property
    def params(self) -> Params:
        return self.state.params

    def agreed(self, key: Tensor) -> Tensor:
        return self.step.reduce.agreed(key)

    def noisy_gradients(
        self, loss: LossFn, key: Tensor, batches: Sequence[tuple], chunk_size: Any
    ) -> list[tuple[Params, float]]:
        plan, state = self.step.source.plan, self.state
        start, digest = plan.earlier_steps, spent_under(plan, plan.earlier_steps)
        fresh = state._replace(
            key=key,
            step=torch.full_like(state.step, start),
            plan_digest=as_digest(digest).to(state.plan_digest.device),
            noise=(),
            max_norm=(),
        )
        return self.step.noisy_gradients(loss, fresh, batches, chunk_size=chunk_size)


def audit(
    function: str,
    plan: Plan,
    audited: Audited,
    batch: tuple | None = None,
    *,
    canaries: int,
    guesses: tuple[int, int] | None,
    significance: float,
    seed: int | None,
) -> Audit:
    """Audit the releases of a plan, as `Plan.audit` says."""
    steps = plan.steps - plan.earlier_steps
    if plan.noise_multiplier == 0 or steps < 2:
        raise ValueError(
            f"{function}: expected a plan with noise and two steps at least, got a "
            f"noise_multiplier of {plan.noise_multiplier} and {steps} steps."
        )
    signs, weights, mu = _signal(plan)
    if batch and abs(weights.sum()) > 1e-9:
        raise ValueError(
            f"{function}(batch): expected independent noise, with which samples that "
            f"are in all steps cancel, got {plan.noise.scheme!r}. Leave batch out."
        )
    [count] = checks.whole(function, least=4 * _FEW, canaries=canaries)
    _check(function, significance)
    key, options = audited.agreed(secret_key(seed=seed)), audited.options
    made = Canaries.drawn(audited.params, count, key)
    loss = made.loss(options.loss if batch else None, has_aux=options.has_aux)
    chunk: Any = options.chunk_size or plan.dataset_size
    if chunk != "auto":
        entries = sum(value.numel() for value in audited.params.values())
        chunk = max(1, min(chunk, _AT_A_TIME // entries))
    real = batches.read(function, batch).size if batch else 0
    most = max(2 * round(plan.expected_batch_size), _ROUND)
    most = min(most, plan.largest_batch or plan.dataset_size)
    score = torch.zeros(count, dtype=torch.float64)
    for rows in torch.arange(count).split(max(1, most - real)):
        inside = rows[made.coins[rows]]
        given = [
            made.batch(inside if sign else rows[:0], sign * plan.first_max_norm, batch)
            for sign in signs
        ]
        own = fold_in(key, "noise", int(rows[0]))
        found = audited.noisy_gradients(loss, own, given, chunk)
        for weight, (grads, bound) in zip(weights, found, strict=True):
            score[rows] += weight / bound * made.scores(rows, grads)
    score *= plan.expected_batch_size
    sides = score[made.coins], score[~made.coins]
    bounds = {}
    for name, some in made.groups.items():
        parts = score[some & made.coins], score[some & ~made.coins]
        if min(map(len, parts)) >= _FEW:
            share = significance / (4 if name == "all" else 4 * len(made.groups) - 4)
            bounds[name] = gaussian(*parts, significance=share)
    guesses = guesses or (count // 8, count // 8)
    delta = min(plan.delta, 0.01 / count)
    half = {"delta": delta, "significance": significance / 2}
    return Audit(
        mu=max(bounds.values(), key=lambda bound: bound.value),
        epsilon=one_run(*sides, guesses=guesses, **half),
        claimed_mu=mu,
        claimed_epsilon=epsilon_of(mu, delta),
        groups=bounds,
        significance=significance,
        included=sides[0],
        excluded=sides[1],
        private=batch is not None,
    )


def _signal(plan: Plan) -> tuple[np.ndarray, np.ndarray, float]:
    """Return signs of a canary in the steps of a round, their weights, and mu.

    Plus in the first step and minus in the last one, s, with steps in between through
    which the noise is correlated. Multiplied by C, the gradients are C s with a noise
    of one deviation, and their best test is the product with C s.
    """
    last = min(plan.noise.size, plan.steps - plan.earlier_steps - 1)
    column, unit = np.eye(1, last + 1)[0], plan.noise_multiplier
    if plan.noise.scheme != "independent":
        column = plan.fitted.column(last + 1)
        unit *= plan.fitted.sensitivity()
    rows = np.arange(last + 1)
    matrix = np.where(rows[:, None] < rows, 0.0, column[rows[:, None] - rows])
    signs = 1.0 * (rows == 0) - (rows == last)
    signal = matrix @ signs
    length = float(np.linalg.norm(signal))
    return signs, matrix.T @ signal / (length * unit), length / unit


class Block(NamedTuple):
    """Entries of a parameter that follow each other, in one shard."""

    name: str
    size: int
    shard: int


@dataclass(frozen=True)
class Canaries:
    """m canaries: samples of a linear loss, with a direction and a coin for each.

    A direction is a wave over the entries of each block that it is in; waves of two
    frequencies are orthogonal. Signs, drawn once for all entries, make noise of them.
    """

    blocks: list[Block]
    signs: Params
    frequencies: Tensor  # in each block, int64 [m, blocks]
    weights: Tensor  # the norm in each block, [m, blocks]; in all of them 1
    norms: Tensor  # of the gradient, in bounds of the clip, [m]
    coins: Tensor  # whether it takes part, bool [m]
    groups: dict[str, Tensor]  # bool [m]

    def __repr__(self) -> str:
        return f"Canaries of {len(self.coins)} directions"  # coins are secret

    @classmethod
    def drawn(cls, params: Params, count: int, key: Tensor) -> "Canaries":
        """Draw directions, and coins from a key of their own."""
        blocks = [each for item in params.items() for each in _blocks(*item)]
        sizes = np.array([each.size for each in blocks])
        names = np.array([each.name for each in blocks])
        parts = np.array([each.shard for each in blocks])
        draw = block(stream(key, "directions"), 0)
        flips = (draw.integers(0, 2, value.numel()) for value in params.values())
        numbers = np.arange(count)
        # With a stride that has no divisor in common with the size, frequencies repeat
        # after all of them.
        strides = draw.integers(1, sizes + 1, (100, len(blocks)))
        best = np.gcd(strides, sizes).argmin(0)
        strides = strides[best, np.arange(len(blocks))]
        frequencies = draw.integers(sizes) + numbers[:, None] * strides
        kinds = 2 + (parts.max() > 0)  # one shard is all parameters
        kind, norms = numbers // len(_NORMS) % kinds, np.resize(_NORMS, count)
        owner = draw.choice(len(blocks), count, p=sizes / sizes.sum())
        name, part = names[owner][:, None], parts[owner][:, None]
        inside = np.where(kind[:, None] == 1, names == name, parts == part)
        squares = np.where((kind[:, None] == 0) | inside, sizes, 0)
        groups = {"all": kind >= 0, "of all parameters": kind == 0}
        groups["of one parameter"] = kind == 1
        for shard in range(parts.max() + 1 if kinds == 3 else 0):
            groups[f"of shard {shard}"] = (kind == 2) & (parts[owner] == shard)
        for norm in _NORMS:
            groups[f"of norm {norm:g} max_norm"] = norms == norm
        made = {
            "frequencies": frequencies % sizes,
            "weights": np.sqrt(squares / squares.sum(1, keepdims=True)),
            "norms": norms,
            "coins": block(stream(key, "coins"), 0).integers(0, 2, count) == 1,
        }
        return cls(
            blocks=blocks,
            signs={
                name: torch.from_numpy(1 - 2 * each).float().to(value.device)
                for (name, value), each in zip(params.items(), flips, strict=True)
            },
            groups={name: torch.from_numpy(each) for name, each in groups.items()},
            **{name: torch.from_numpy(each) for name, each in made.items()},
        )

    def batch(self, rows: Tensor, norm: float, real: tuple | None) -> tuple:
        """Make canaries whose gradients have multiples of a norm, and real samples."""
        device = next(iter(self.signs.values())).device
        weights = self.weights[rows] * (self.norms[rows] * norm)[:, None]
        made = self.frequencies[rows].to(device), weights.float().to(device)
        if real is None:
            return made
        size = batches.read("Plan.audit", real).size

        def before(x: Tensor) -> Tensor:
            return torch.cat([x.new_zeros(size, *x.shape[1:]), x])

        def filled(x: Tensor) -> Tensor:
            return torch.cat([x, x[:1].expand(len(rows), *x.shape[1:])])

        counts = 1 - before(torch.ones(len(rows), device=device))
        return counts, *map(before, made), *map_tensors(filled, real)

    def loss(self, real: LossFn | None, *, has_aux: bool) -> LossFn:
        """Return the loss of a canary, or of canaries and real samples."""
        blocks, signs = self.blocks, self.signs

        def of_canary(params, buffers, frequencies, weights):
            waves: dict[str, list[Tensor]] = {name: [] for name in params}
            for place, (name, size, _) in enumerate(blocks):
                turns = torch.arange(size, device=weights.device) * frequencies[place]
                angles = (turns % size).to(weights.dtype) * (math.tau / size)
                wave = (angles.sin() + angles.cos()) / math.sqrt(size)
                waves[name].append(wave * weights[place])
            value = 0.0
            for name, param in params.items():
                if not waves[name]:  # it has no entries
                    continue
                direction = torch.cat(waves[name]) * signs[name]
                value = value + (direction.view(param.shape) * param).sum()
            return value

        if real is None:
            return of_canary

        def of_both(params, buffers, counts, frequencies, weights, *sample):
            value: Any = real(params, buffers, *sample)
            value = value[0] if has_aux else value
            return counts * value + of_canary(params, buffers, frequencies, weights)

        return of_both

    def scores(self, rows: Tensor, grads: Params) -> Tensor:
        """Return inner products of directions and gradients, float64 `[rows]`."""
        flat = {}
        for name, value in grads.items():
            whole: Any = value
            whole = whole.full_tensor() if shards.is_distributed(value) else whole
            flat[name] = (whole.reshape(-1) * self.signs[name]).cpu().double()
        total = torch.zeros(len(rows), dtype=torch.float64)
        for place, (name, size, _) in enumerate(self.blocks):
            entries, flat[name] = flat[name][:size], flat[name][size:]
            # The products with waves of all frequencies at once.
            waves = torch.fft.fft(entries)
            products = (waves.real - waves.imag) / math.sqrt(size)
            total += self.weights[rows, place] * products[self.frequencies[rows, place]]
        return total


def _blocks(name: str, value: Tensor) -> list[Block]:
    """Cut a parameter as it is cut among ranks, along the first dimension."""
    parts = 1
    if shards.is_distributed(value):
        cut: Any = value
        parts = cut.device_mesh.size() if cut.placements[0].is_shard() else 1
    rows = len(value) if value.ndim else 1
    lengths = [len(part) for part in torch.empty(rows, device="meta").chunk(parts)]
    sizes = [value.numel() // rows * length for length in lengths] if rows else []
    return [Block(name, size, part) for part, size in enumerate(sizes) if size]


def epsilon_of(mu: float, delta: float) -> float:
    """Return epsilon at `delta` of the Gaussian mechanism with a sensitivity of mu."""
    import dp_accounting

    if mu in (0.0, math.inf):
        return mu
    return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta, tol=1e-9))


def _of_guesses(
    run: dict[str, Any],
    margin: Callable[[float, int, int, int], float],
    epsilon: Callable[[float], float],
    *assumes: str,
) -> Bound:
    """Find the largest parameter that is rejected, at a margin above zero."""
    from scipy.optimize import brentq

    count = run["included"] + run["excluded"]

    def largest(correct: int) -> float:
        numbers = count, run["guessed"], correct
        if margin(0.0, *numbers) <= 0:
            return 0.0
        low, high = 0.0, 1.0
        while margin(high, *numbers) > 0:
            low, high = high, 2 * high
        root: Any = brentq(margin, low, high, args=numbers, xtol=1e-9)
        return epsilon(root)

    value, ceiling = largest(run["correct"]), largest(run["guessed"])
    conditions = _COINS, _FIXED, *assumes
    return Bound(value=value, of="epsilon", ceiling=ceiling, assumes=conditions, **run)


def _guessed(
    function: str,
    included: Scores,
    excluded: Scores,
    guesses: tuple[int, int],
    significance: float,
    delta: float,
) -> dict[str, Any]:
    """Check coins and guesses, and count the right ones."""
    _check(function, significance, delta)
    high, low = _scores(function, included, excluded)
    count = len(high) + len(low)
    if abs(len(high) - len(low)) > _UNFAIR * math.sqrt(count):
        raise ValueError(
            f"{function}(included, excluded): expected scores of canaries that took "
            f"part by fair coins, got {len(high)} and {len(low)}. Draw a coin for each."
        )
    most, least = checks.whole(function, least=0, **_named(guesses))
    if not 0 < most + least <= count:
        raise ValueError(
            f"{function}(guesses={guesses}): expected between one guess and as many as "
            f"the {count} scores, got {most + least}."
        )
    # By score, and of equal scores the wrong guesses first.
    scores = np.concatenate([high, low])
    inside = np.arange(count) < len(high)
    top = np.lexsort((inside, -scores))[:most]
    rest = np.setdiff1d(np.arange(count), top)
    bottom = rest[np.lexsort((~inside[rest], scores[rest]))[:least]]
    return {
        "significance": significance,
        "delta": delta,
        "included": len(high),
        "excluded": len(low),
        "guessed": most + least,
        "correct": int(inside[top].sum() + (~inside[bottom]).sum()),
    }


def _named(guesses: tuple[int, int]) -> dict[str, int]:
    return {f"guesses[{place}]": number for place, number in enumerate(guesses)}


def _scores(function: str, *given: Scores) -> list[np.ndarray]:
    """Return scores as float64 `[n]`."""
    arrays = []
    for scores in given:
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


def _check(function: str, significance: float, delta: float = 0.0) -> None:
    checks.between(function, 0, 0.5, significance=significance)
    checks.between(function, -1e-300, 1, delta=delta)


def _special(function: str) -> Any:
    try:
        from scipy import special
    except ImportError as error:
        raise ImportError(
            f"{function}: expected the package scipy, which is not installed. Run "
            f'pip install "vgrad[dp]".'
        ) from error
    return special
