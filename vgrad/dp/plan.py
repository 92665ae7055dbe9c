"""The numbers that sampler, noise and accountant of a private run share."""

import functools
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from vgrad import checks, generators
from vgrad.batches import Sensitivity
from vgrad.dp import accounting, canaries
from vgrad.dp.adaptive import QuantileClip
from vgrad.dp.audit import Audit
from vgrad.dp.canaries import audit, noisy_gradients
from vgrad.dp.discrete import DiscreteNoise
from vgrad.dp.events import Event
from vgrad.dp.group_clip import GroupClip, clip_of, scaled
from vgrad.dp.mechanisms import Combination, Mechanism, Sampling
from vgrad.dp.noise import Noise, Streams, checked, gaussian_noise
from vgrad.dp.noise_figure import Curve, draw
from vgrad.dp.noising import Fitted, Noising, band_inv_mf, band_mf, blt, independent
from vgrad.dp.sampling import StepBatches
from vgrad.dp.units import Units
from vgrad.optim.private import scales_of, unscaled
from vgrad.persample import Options
from vgrad.persample.clipped import LEAST, MOST
from vgrad.report import table
from vgrad.typing import Params, Scales, Tree

MECHANISM = "Gaussian noise on clipped sums of Poisson batches"

_CIPHER = "ChaCha20"
"""The cipher whose words noise is made of: the same key and step are another release
under another one."""

_NO_INTEGERS = (
    'expected discrete=False or "sum", got True, which no plan has any more: sums of '
    'integers took a pass for each sample. Pass discrete="sum" for discrete noise. A '
    "run that began with True goes on under a new plan, from its parameters: "
    "TrainState.create(tx, state.params, state.buffers). What both spend adds up."
)

INDEPENDENT = independent()

_PRICE_OF_AUTO = 1.01
"""Epsilon with `max_batch_size="auto"` over epsilon without a largest batch."""


@dataclass(frozen=True)
class Plan:
    """The numbers that the sampler, the noise and the accountant of one run share.

    A step draws a Poisson batch, clips the gradient of each sample to the L2 norm
    `max_norm`, divides the sum by `expected_batch_size` and adds noise. The size of the
    batch drawn, which depends on the data, is never the divisor.

    Choose `delta` well below `1 / dataset_size`; a larger one warns. A state that has
    spent under one plan can continue under another only if that accounts for both, see
    `after`.

    With `noise=` of `vgrad.dp.noising` the noise of a step is correlated with earlier
    noise. The whole run (with cyclic sampling each round of the groups) is then one
    Gaussian mechanism of multiplier `noise_multiplier`, and noise has the
    `deviation(step)`. Steps enter the sensitivity: such a plan cannot be lengthened.

    Attributes:
        max_norm: the bound of a sample's gradient; `dp.quantile_clip`, whose bound
            follows the norms; or bounds by patterns of names, or `dp.group_clip`.
        before: the run's previous plan, with the steps taken under it.
        noise: the correlation of noise over steps, with its optimised coefficients.
        sampling: "poisson"; "cyclic_poisson", where step t samples from group t mod b
            of b groups, drawn for each sample, with probability `b * sampling_rate`;
            "cyclic_equal", with groups of equal sizes; or "fixed_order", batches of one
            size in one order. By default the first one with an account for the noise.
        max_batch_size: the size that a random part is left of where a batch is larger,
            or "auto": the least one that costs at most 1 % of epsilon. The account is
            about data sets of at most `dataset_size` samples.
        neighbours: the relation of data sets that epsilon is about: a sample more
            ("add_or_remove_one"), with a gradient of zero ("zero_out"), another one
            ("replace_one"), or "fixed_graph", see `vgrad.dp.units`. By default the
            first one with an account.
        samples_per_unit: the number of samples drawn of each unit, a person or group;
            `dataset_size`, rates and batch sizes then count units.
        discrete: "sum" for discrete noise, on a sum that is rounded to its grid, see
            `vgrad/dp/discrete.py`.
        horizon: the steps that correlated noise is made for, in a plan that was left
            before, see `after`; by default `steps`.
        events: releases of others on the same data, see `after`.

    Raises:
        ValueError: a field is outside its range, or no account of the combination is
            known.

    Example:
        >>> run = {"sampling_rate": 0.01, "noise_multiplier": 1.0, "steps": 1000}
        >>> plan = Plan(dataset_size=60_000, max_norm=1.0, delta=1e-6, **run)
        >>> plan.expected_batch_size
        600.0
        >>> round(plan.epsilon(), 2), round(plan.epsilon(steps=10), 2)
        (2.12, 0.59)
    """

    dataset_size: int
    sampling_rate: float
    noise_multiplier: float
    max_norm: float | QuantileClip | GroupClip
    steps: int
    delta: float
    accountant: accounting.Accountant = "pld"
    before: "Plan | None" = None
    noise: Noising = INDEPENDENT
    sampling: Sampling | None = None
    max_batch_size: int | Literal["auto"] | None = None
    neighbours: accounting.Neighbours | None = None
    samples_per_unit: int | None = None
    discrete: Literal[False, "sum"] = False
    horizon: int | None = None
    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        counts = {"dataset_size": self.dataset_size, "steps": self.steps}
        size, steps = checks.integers("Plan", minimum=1, **counts)
        accounting.check("Plan", self.sampling_rate, steps, self.delta, self.accountant)
        values: dict[str, Any] = self.__dict__
        for name, kind, text in (
            ("before", Plan, "a Plan"),
            ("noise", Noising, "a scheme such as noising.band_mf(4)"),
        ):
            value = values[name]
            if isinstance(value, Mapping):  # as dataclasses.asdict writes them
                value = values[name] = kind(**value)
            if not isinstance(value, kind if name == "noise" else kind | None):
                raise TypeError(
                    f"Plan({name}): expected {text}, got a {type(value).__name__}."
                )
        events = self.events if isinstance(self.events, Sequence) else (self.events,)
        events = tuple(  # as dataclasses.asdict writes them
            Event(**x) if isinstance(x, Mapping) and "words" in x else x for x in events
        )
        if not all(isinstance(x, Event) for x in events):
            raise TypeError(
                f"Plan(events={checks.shown(self.events)}): expected the events of "
                f"another plan. Pass an event with words to plan.after."
            )
        values["events"] = events
        numbers = {"noise_multiplier": self.noise_multiplier}
        checks.non_negative("Plan", **numbers)
        if isinstance(self.max_norm, Mapping):
            values["max_norm"] = clip_of(self.max_norm)
        if not isinstance(self.max_norm, QuantileClip | GroupClip):
            checks.positive("Plan", max_norm=self.max_norm)
            numbers["max_norm"] = self.max_norm
        checks.finite("Plan", **numbers)
        # Plans of equal numbers are equal, whatever the types of the numbers.
        numbers |= {"sampling_rate": self.sampling_rate, "delta": self.delta}
        values.update({name: float(number) for name, number in numbers.items()})
        values.update(dataset_size=size, steps=steps)
        for name in ("samples_per_unit", "horizon", "max_batch_size"):
            if values[name] not in (None, "auto"):
                [values[name]] = checks.integers(
                    "Plan", minimum=1, **{name: values[name]}
                )
        if self.delta > 1 / self.dataset_size:
            warnings.warn(
                f"Plan(delta={self.delta!r}): expected at most 1 / dataset_size = "
                f"{1 / self.dataset_size:.3g}, got more, which allows releasing a "
                f"sample as it is. Choose a delta well below it.",
                stacklevel=3,
            )
        checks.choice("Plan", (False, True, "sum"), discrete=self.discrete)
        if self.discrete != "sum" and self.discrete:
            raise ValueError(f"Plan(discrete=True): {_NO_INTEGERS}")
        values["discrete"] = "sum" if self.discrete else False  # of strings of numpy
        kind, values["neighbours"] = self._combination.resolved()
        values["sampling"] = kind.sampling
        self._check_before()
        self._check_noise()
        if self.max_batch_size == "auto":
            values["max_batch_size"] = _least_batch(replace(self, max_batch_size=None))
        values["noise"] = self.mechanism.noise

    @property
    def _combination(self) -> Combination:
        noises = [self.noise.scheme] if self.noise.correlated else []
        noises += ["discrete"] if self.discrete else []
        noises += ["quantile_clip"] if self._adapts else []
        noise, largest = " and ".join(noises) or "independent", self.max_batch_size
        kinds = self.sampling, self.neighbours, noise, largest, self.accountant
        return Combination(*kinds)

    @property
    def mechanism(self) -> Mechanism:
        """The batches, the noise and the account of the plan's own steps."""
        return self._mechanism

    @functools.cached_property
    def _mechanism(self) -> Mechanism:
        kind, relation = self._combination.resolved()
        steps, largest = self.horizon or self.steps, self.max_batch_size
        assert largest != "auto"
        run = self.dataset_size, self.sampling_rate, self.noise_multiplier, self.noise
        start = self.earlier_steps
        mechanism = kind(*run, steps - start, start, relation, largest)
        mechanism.check()
        return mechanism.optimal()

    def _check_noise(self) -> None:
        if self.neighbours == "fixed_graph" and self.samples_per_unit != 1:
            raise ValueError(
                f"Plan(neighbours='fixed_graph', samples_per_unit="
                f"{self.samples_per_unit}): expected samples_per_unit=1, since the "
                f"relation is about units of one sample."
            )
        if self.discrete:
            checks.positive("Plan(discrete)", noise_multiplier=self.noise_multiplier)
        if isinstance(self.max_norm, QuantileClip):
            clip, size = self.max_norm, self.sampling_rate * self.dataset_size
            clip.gradient_multiplier(self.noise_multiplier, size)
            ends = {"lower / expected_batch_size": clip.lower / size}
            ends |= {"upper / expected_batch_size": clip.upper / size}
            checks.between("Plan(max_norm=quantile_clip(...))", LEAST, MOST, **ends)

    def _check_before(self) -> None:
        """Refuse a plan before this one that is not accounted for together with it."""
        before, horizon = self.before, self.horizon
        if self.accountant == "rdp" and any(x.truncated for x in self._beside):
            raise ValueError(
                "Plan(accountant='rdp', events=...): expected 'pld', which alone "
                "bounds truncated batches of others."
            )
        if horizon and not (self.noise.correlated and horizon >= self.steps):
            raise ValueError(
                f"Plan(horizon={horizon}, steps={self.steps}): expected no horizon, or "
                f"with correlated noise at least as many steps. It is for plans that "
                f"plan.after(other, steps) leaves."
            )
        if before is None:
            return
        kinds = "samples" if before.samples_per_unit is None else "units"
        if self.steps <= before.steps:
            name, expected = "steps", f"more than the {before.steps} steps taken before"
            way = "They count. Make it with plan.after(other, steps)."
        elif before.neighbours != self.neighbours:
            name, expected = "neighbours", f"{before.neighbours!r}, as the plan before"
            way = "Bounds of two relations do not add up. Pass it to one of the plans."
        elif (kinds == "samples") != (self.samples_per_unit is None):
            name, expected = "samples_per_unit", f"two plans of one kind, of {kinds}"
            way = "Bounds do not add up otherwise. Pass it to both, or to none."
        elif self.accountant not in before.accountants:
            name, expected = "accountant", "'pld', which alone bounds all steps"
            way = "The plan before has no bound by another one."
        else:
            return
        arguments = f"{name}={getattr(self, name)!r}, before=..."
        raise ValueError(f"Plan({arguments}): expected {expected}. {way}")

    @property
    def _adapts(self) -> bool:
        return isinstance(self.max_norm, QuantileClip)

    @property
    def accountants(self) -> set[str]:
        """The accountants that have a bound of all steps, earlier ones included."""
        names = {*self.mechanism.account_for(self.neighbours).accountants}
        if any(term.truncated for term in self._beside):
            names &= {"pld"}
        return names if self.before is None else names & self.before.accountants

    @classmethod
    def for_epsilon(
        cls,
        epsilon: float,
        *,
        dataset_size: int,
        max_norm: float | QuantileClip | GroupClip,
        delta: float,
        sampling_rate: float | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        noise_multiplier: float | None = None,
        accountant: accounting.Accountant = "pld",
        releases: int = 1,
        **fields: Any,
    ) -> "Plan":
        """Make the plan with the least noise whose epsilon is at most `epsilon`.

        Pass either `sampling_rate` and `steps`, or the expected `batch_size` and
        `epochs`, each of `round(dataset_size / batch_size)` steps at the rate
        `batch_size / dataset_size` (`.steps_per_epoch`). Other fields of the plan, such
        as `noise` and `max_batch_size`, are passed on; `releases` is as in `epsilon`.

        With a `noise_multiplier`, pass a rate or a batch size alone for the plan with
        the most steps, or `steps` alone for the one with the largest batches.

        Raises:
            ValueError: as `noise_multiplier_for` and `Plan`; or no number of steps and
                no batch size keeps the budget, or all do.

        Example:
            >>> data = {"dataset_size": 1000, "max_norm": 1.0, "delta": 1e-5}
            >>> plan = Plan.for_epsilon(3.0, batch_size=500, epochs=100, **data)
            >>> round(plan.noise_multiplier, 2), round(plan.epsilon(), 2)
            (9.91, 3.0)
            >>> plan == Plan.for_epsilon(3.0, sampling_rate=0.5, steps=200, **data)
            True
            >>> data |= {"noise_multiplier": 5.0}
            >>> Plan.for_epsilon(3.0, batch_size=100, **data).steps
            1247
        """
        function = "Plan.for_epsilon"
        checks.positive(function, epsilon=epsilon)
        [epsilon] = checks.finite(function, epsilon=epsilon)
        numbers: dict[str, Any] = {"dataset_size": dataset_size, "max_norm": max_norm}
        numbers |= {"delta": delta, "accountant": accountant, **fields}
        if noise_multiplier is not None:
            numbers |= {"noise_multiplier": noise_multiplier, "steps": steps}
            sizes = sampling_rate, batch_size, epochs
            return cls._largest(epsilon, releases, *sizes, **numbers)
        by_rate, by_epochs = (sampling_rate, steps), (batch_size, epochs)
        if batch_size is not None and epochs is not None and by_rate == (None, None):
            counts = {"dataset_size": dataset_size, "batch_size": batch_size}
            dataset_size, batch_size, epochs = checks.integers(
                function, minimum=1, **counts, epochs=epochs
            )
            if batch_size > dataset_size:
                raise ValueError(
                    f"Plan.for_epsilon(batch_size={batch_size}): expected at most the "
                    f"{dataset_size} samples of the data set."
                )
            sampling_rate = batch_size / dataset_size
            steps = epochs  # of one step each, until the sampling is known
        elif sampling_rate is None or steps is None or by_epochs != (None, None):
            raise ValueError(
                f"Plan.for_epsilon(sampling_rate={sampling_rate!r}, steps={steps!r}, "
                f"batch_size={batch_size!r}, epochs={epochs!r}): expected either "
                f"sampling_rate and steps or batch_size and epochs."
            )
        numbers |= {"sampling_rate": sampling_rate, "steps": steps}
        automatic = fields.get("max_batch_size") == "auto"
        if automatic:
            numbers["max_batch_size"] = None
        with warnings.catch_warnings():  # the plan itself warns of its delta
            warnings.simplefilter("ignore")
            plan = cls(noise_multiplier=1.0, **numbers)
            if epochs is not None:
                numbers["steps"] = epochs * plan.steps_per_epoch
                plan = cls(noise_multiplier=1.0, **numbers)
            noise = plan._least_noise(epsilon, releases)
            if automatic:
                largest = _least_batch(replace(plan, noise_multiplier=noise), releases)
                numbers["max_batch_size"] = largest
                plan = cls(noise_multiplier=1.0, **numbers)
                noise = plan._least_noise(epsilon, releases)
        return cls(noise_multiplier=noise, **numbers)

    def _least_noise(self, epsilon: float, releases: int) -> float:
        """Return the least noise multiplier for the budget; the plan's own is 1."""
        call = f"Plan.for_epsilon({epsilon=}, delta={self.delta}, sampling_rate="
        call += f"{self.sampling_rate}, steps={self.steps}, accountant="
        call += f"{self.accountant!r})"
        *others, kind = self._released(call, None, releases)
        rest = epsilon, self.delta, self.accountant, others
        return accounting.least_noise(call, kind, *rest)

    @classmethod
    def _largest(
        cls,
        epsilon: float,
        releases: int,
        sampling_rate: float | None,
        batch_size: int | None,
        epochs: int | None,
        **numbers: Any,
    ) -> "Plan":
        """Return the plan of some noise with the most steps or the largest batches."""
        steps, auto = numbers["steps"], numbers.get("max_batch_size") == "auto"
        correlated = getattr(numbers.get("noise"), "correlated", False)
        sizes = [x for x in (steps, sampling_rate, batch_size) if x is not None]
        if len(sizes) != 1 or epochs is not None or auto or correlated:
            raise ValueError(
                f"Plan.for_epsilon(noise_multiplier={numbers['noise_multiplier']!r}, "
                f"{steps=}, {sampling_rate=}, {batch_size=}, {epochs=}): expected one "
                f"of steps, sampling_rate and batch_size, no epochs, independent noise "
                f"and no max_batch_size='auto', to solve for steps or batches. Or "
                f"leave out noise_multiplier."
            )
        before: Any = numbers.get("before")
        earlier = before.steps if isinstance(before, Plan) else 0
        if batch_size is not None:
            counts = {"dataset_size": numbers["dataset_size"], "batch_size": batch_size}
            size, batch = checks.integers("Plan.for_epsilon", minimum=1, **counts)
            sampling_rate = batch / size
        numbers["steps"] = 1 + earlier if steps is None else steps
        numbers["sampling_rate"] = 1.0 if sampling_rate is None else sampling_rate
        with warnings.catch_warnings():  # the plan itself warns of its delta
            warnings.simplefilter("ignore")
            plan = cls(**numbers)
        *others, _ = plan._released("Plan.for_epsilon", None, releases)
        mechanism, size = plan.mechanism, plan.dataset_size

        def share(count: int) -> float:
            term = mechanism.spent(count)
            if steps is not None:
                rated = replace(mechanism, sampling_rate=count / size)
                term = rated.spent(plan.steps - earlier)
            account = [*others, term._replace(steps=term.steps * releases)]
            spent = accounting.composed(account, plan.delta, plan.accountant)
            return spent / epsilon

        limit = accounting.MOST_STEPS // (2 * releases) if steps is None else size
        count = accounting.largest_count(share, limit)
        if count == 0 or (steps is None and count == limit):
            unit = "one step" if steps is None else "batches of one sample"
            range_ = f"for {unit} at least" if count == 0 else f"below {limit} steps"
            raise ValueError(
                f"Plan.for_epsilon({epsilon=}, noise_multiplier="
                f"{plan.noise_multiplier}, delta={plan.delta}): expected a budget "
                f"{range_}, got another one. Change epsilon or noise_multiplier."
            )
        name, value = "sampling_rate", count / size
        if steps is None:
            name, value = "steps", earlier + count
        return cls(**{**numbers, name: value})

    def after(
        self, other: Any, steps: int | None = None, *, words: str | None = None
    ) -> "Plan":
        """Return this plan for a run that has taken `steps` steps under another one.

        Both are one account: `epsilon` includes everything spent under `other`, and
        steps are counted from the start of the run. The new plan ends `steps` steps
        later than this one and continues the state that `other` left, which no other
        plan does. Data sets may differ: the bound holds for each person in any of them.

        Or `other` is an event of dp_accounting, with `words` that name it: releases of
        the same data elsewhere, such as statistics or the choice of a learning rate.
        They are in the account from the first step on, once whatever `releases` is, in
        `summary` and in the claim of `training.release`. The event has to be about the
        plan's relation, and its units, and of Gaussian releases, sampled or not.

        Raises:
            ValueError: `other` has fewer steps, or this plan follows another already;
                or the event is of other releases.

        Example:
            >>> run = {"dataset_size": 1000, "max_norm": 1.0, "delta": 1e-5}
            >>> first = Plan(sampling_rate=0.1, noise_multiplier=2.0, steps=50, **run)
            >>> then = Plan(sampling_rate=0.2, noise_multiplier=4.0, steps=20, **run)
            >>> both = then.after(first, 50)
            >>> both.steps, round(both.epsilon(50), 2), round(both.epsilon(), 2)
            (70, 1.65, 1.9)
            >>> import dp_accounting
            >>> counts = dp_accounting.GaussianDpEvent(10.0)
            >>> third = then.after(counts, words="a histogram of the labels")
            >>> round(then.epsilon(), 2), round(third.epsilon(), 2)
            (0.9, 0.98)
        """
        if not isinstance(other, Plan):
            event = Event.of(other, words)
            if steps is not None:
                raise ValueError(
                    f"Plan.after(event, {steps=}): expected no steps beside an event, "
                    f"all of which is spent, got some. Leave them out."
                )
            return replace(self, events=(*self.events, event))
        if words is not None or steps is None:
            raise ValueError(
                f"Plan.after(other, {steps=}, {words=}): expected the number of steps "
                f"taken under the other plan, and no words beside it."
            )
        if self.before is not None:
            raise ValueError(
                "Plan.after(other): expected a plan without another before it, got one "
                "that follows another already. Call it on the original plan."
            )
        [steps] = checks.integers("Plan.after", minimum=0, steps=steps)
        if steps > other.steps:
            raise ValueError(
                f"Plan.after(other, steps={steps}): expected at most the "
                f"{other.steps} steps of the plan before, got {steps}."
            )
        events = self.events  # and the ones of plans under which no step was taken
        while other.before is not None and 0 < steps <= other.earlier_steps:
            events, other = (*other.events, *events), other.before
        if steps == 0:
            events = (*other.all_events, *events)
            return self if events == self.events else replace(self, events=events)
        before = replace(other, steps=steps)
        if other.noise.correlated:
            before = replace(before, horizon=other.horizon or other.steps)
        return replace(self, steps=steps + self.steps, before=before, events=events)

    @property
    def all_events(self) -> tuple[Event, ...]:
        """The events of this plan, after the ones of the plans before it."""
        earlier = () if self.before is None else self.before.all_events
        return *earlier, *self.events

    @property
    def earlier_steps(self) -> int:
        """The number of steps taken under the plans before this one."""
        return 0 if self.before is None else self.before.steps

    @property
    def digest(self) -> Tensor:
        """The identity of the plan, uint8 `[32]`, which a state carries.

        It is a hash of all fields but delta, accountant and, of independent noise,
        steps, of the plans before, and of the cipher that noise comes from.
        """
        return generators.from_bytes(self._identity)

    @functools.cached_property
    def _identity(self) -> bytes:
        return self._identity_with()

    def _identity_with(self, **changed: Any) -> bytes:
        other, before = self.before, None
        if other is not None:
            before = [other._identity.hex(), other.steps]
        fields = [*self._numbers, before, *self._kinds_with(**changed)]
        text = json.dumps([MECHANISM, _CIPHER, *fields])
        return hashlib.blake2b(text.encode(), digest_size=len(NO_PLAN)).digest()

    @property
    def _numbers(self) -> tuple[int, float, float, float]:
        numbers = self.dataset_size, self.sampling_rate, self.noise_multiplier
        return *numbers, self.first_max_norm

    @functools.cached_property
    def _kinds(self) -> tuple[str, ...]:
        return self._kinds_with()

    def _kinds_with(self, **changed: Any) -> tuple[str, ...]:
        """Return the fields that Poisson batches and plain noise lack, as JSON."""
        plain: dict[str, Any] = {field.name: field.default for field in fields(self)}
        plain |= {"sampling": "poisson", "neighbours": "add_or_remove_one"}
        names = "sampling max_batch_size neighbours samples_per_unit discrete".split()
        kinds = {name: getattr(self, name) for name in names} | changed
        kinds["events"] = tuple(event.steps for event in self.events)
        kinds = {name: kind for name, kind in kinds.items() if kind != plain[name]}
        if isinstance(self.max_norm, QuantileClip):
            kinds["max_norm"] = self.max_norm.identity
        if isinstance(self.max_norm, GroupClip):
            kinds["max_norm"] = asdict(self.max_norm)
        if self.noise.correlated:
            kinds["noise"], kinds["steps"] = asdict(self.noise), self.mechanism.steps
            del kinds["noise"]["cache"]  # which changes no number
        return (json.dumps(kinds, sort_keys=True),) if kinds else ()

    def digest_at(self, steps: int) -> Tensor:
        """Return the digest in a state of so many steps, maybe of a plan before."""
        if self.before is not None and steps <= self.before.steps:
            return self.before.digest_at(steps)
        return generators.from_bytes(self._identity if steps else NO_PLAN)

    @property
    def expected_batch_size(self) -> float:
        """The mean size of a batch, `sampling_rate * dataset_size`, not rounded."""
        return self.mechanism.expected_batch_size

    @property
    def first_max_norm(self) -> float:
        """The bound of a gradient, at the first step where it adapts."""
        norm = self.max_norm
        if isinstance(norm, GroupClip):
            return norm.total
        return norm.start if isinstance(norm, QuantileClip) else norm

    @property
    def clipping(self) -> dict[str, Any]:
        """The options of `clipped_grad` that make the plan's sums."""
        options = {"normalize_by": self.expected_batch_size}
        if isinstance(self.max_norm, GroupClip):
            return {"max_norm": self.max_norm.bounds, "clipping": "per_layer"} | options
        return {"max_norm": self.first_max_norm} | options

    def scales(self, params: Params) -> dict[str, tuple[Any]]:
        """Return numbers by which sums are multiplied until they have their noise."""
        norm = self.max_norm
        return norm.scales(params) if isinstance(norm, GroupClip) else {}

    @property
    def largest_batch(self) -> int | None:
        """The size that no batch exceeds, None if there is none but the data set's."""
        return self.mechanism.largest_batch

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of a pass over the data, `1 / sampling_rate`, rounded.

        In a fixed order it is rounded up: the last batch may be short.
        """
        return self.mechanism.steps_per_epoch

    @property
    def fitted(self) -> Fitted:
        """The scheme of the noise, fitted to the steps and to their batches."""
        return self.mechanism.fitted

    def deviation(self, step: int | Tensor) -> Any:
        """Return the deviation of the noise of a step, of each number of the mean.

        It is `noise_multiplier * max_norm / expected_batch_size`, for correlated noise
        times the sensitivity of the scheme and the norm of row `step` of its inverse;
        for a `group_clip` it is a dictionary, by pattern.
        A tensor is the count of an optimizer, such as `adam_bc(deviation=...)`, under
        this plan: the deviation is the same at all steps then, or NaN if `max_norm`
        adapts, until `private_step` sets it.

        Raises:
            ValueError: `max_norm` adapts: the deviation is then in the state; or a
                tensor is passed and noise is correlated or differs between groups.
        """
        groups = isinstance(self.max_norm, GroupClip)
        scale = self._gradient_multiplier * self.noise_norm / self.expected_batch_size
        if isinstance(step, Tensor):
            if self.noise.correlated or groups:
                raise ValueError(
                    f"Plan.deviation(step, a tensor): expected independent noise, of "
                    f"one deviation, for an optimizer that counts steps, got "
                    f"{self.noise.scheme} noise and max_norm={self.max_norm}. Pass a "
                    f"step as an int."
                )
            return math.nan if self._adapts else scale
        if self.before is not None and step < self.earlier_steps:
            return self.before.deviation(step)
        [step] = checks.integers("Plan.deviation", minimum=0, step=step)
        if step >= self.steps:
            raise ValueError(
                f"Plan.deviation(step={step}): expected one of the {self.steps} steps "
                f"of the plan, counted from zero."
            )
        if isinstance(self.max_norm, QuantileClip):
            raise ValueError(
                "Plan.deviation(step): expected a plan of a fixed max_norm, got one "
                "that adapts it. The bound of a step is in the state."
            )
        scale *= self.mechanism.deviation(step)
        if isinstance(self.max_norm, GroupClip):
            return {group: scale * x for group, x in self.max_norm.deviations.items()}
        return scale

    @property
    def noise_norm(self) -> float:
        """The bound of a gradient, in the units in which it gets noise."""
        norm = self.max_norm
        return norm.norm if isinstance(norm, GroupClip) else self.first_max_norm

    @property
    def _gradient_multiplier(self) -> float:
        """The multiplier of the noise on gradients, which a count leaves over."""
        multiplier, clip = self.noise_multiplier, self.max_norm
        if isinstance(clip, QuantileClip):
            return clip.gradient_multiplier(multiplier, self.expected_batch_size)
        return multiplier

    def epsilon(self, steps: int | None = None, *, releases: int = 1) -> float:
        """Return the epsilon spent after `steps` steps; after all of them by default.

        Steps of plans before are included. It is about data sets of the relation
        `neighbours`, and compares with no bound for another one.

        Args:
            releases: the runs of the plan on the same data that are released together,
                each with a key of its own, such as the members of an ensemble.

        Raises:
            ValueError: `steps` is above the steps of the plan.
        """
        account = self._released("Plan.epsilon", steps, releases)
        return accounting.composed(account, self.delta, self.accountant)

    def mu(self, steps: int | None = None, *, releases: int = 1) -> float:
        """Return the mu of Gaussian privacy that `steps` steps have; all by default.

        No attack has more power than the one that tells a normal number of mean 0 from
        one of mean mu: at a false positive rate r it is at most `Phi(Phi^-1(r) + mu)`,
        for rates from 1e-12 to one half. Other than a pair of epsilon and delta, mu
        compares mechanisms, and is all there is to say of Gaussian ones: without
        sampling it is exact, at all rates. Otherwise it is above the least mu by about
        0.1 %, by more after 10^5 steps, and infinite above an epsilon of some 700.

        It comes from the distribution of the privacy loss, whatever the accountant is,
        in up to some seconds. Arguments are as in `epsilon`.

        Reference: arXiv 1905.02383, arXiv 2503.10945.

        Example:
            >>> data = {"dataset_size": 1000, "max_norm": 1.0, "delta": 1e-5}
            >>> run = {"sampling_rate": 0.1, "noise_multiplier": 2.0, "steps": 50}
            >>> plan = Plan(**data, **run)
            >>> round(plan.mu(), 2), round(plan.mu(1), 2)
            (0.47, 0.2)
        """
        account = self._released("Plan.mu", steps, releases)
        return accounting.TradeOff.of(account).mu()

    def true_positive_rates(
        self, rates: Sequence[float], steps: int | None = None, *, releases: int = 1
    ) -> list[float]:
        """Bound the power of attacks from above, at false positive rates.

        An attack guesses whether a sample was in the data set, by all that the steps
        release. The bounds hold in both directions of the relation, and are tighter
        than the one of `mu`, which is right at all rates at once.

        Raises:
            ValueError: a rate is not between 0 and 1.

        Example:
            >>> data = {"dataset_size": 1000, "max_norm": 1.0, "delta": 1e-5}
            >>> run = {"sampling_rate": 0.1, "noise_multiplier": 2.0, "steps": 50}
            >>> power = Plan(**data, **run).true_positive_rates([1e-3, 1e-2])
            >>> [round(rate, 4) for rate in power]
            [0.0037, 0.0268]
        """
        function = "Plan.true_positive_rates"
        if not hasattr(rates, "__iter__"):
            raise TypeError(f"{function}({rates=}): expected a list of rates.")
        account = self._released(function, steps, releases)
        named = {f"rates[{place}]": rate for place, rate in enumerate(rates)}
        numbers = checks.between(function, 0, 1, **named)
        bounds = accounting.TradeOff.of(account)
        return [bounds.power(rate) for rate in numbers]

    def _released(
        self, function: str, steps: int | None, releases: int
    ) -> list[accounting.Steps]:
        """List the releases of others, and the first steps of all of the plan's own."""
        account = self.account(self._counted(function, steps))
        [releases] = checks.integers(function, minimum=1, releases=releases)
        account = [term._replace(steps=term.steps * releases) for term in account]
        return [*self._beside, *account]

    @property
    def _beside(self) -> list[accounting.Steps]:
        """The releases of others, also beside the plans before."""
        terms = [term for event in self.all_events for term in event.steps]
        relation: Any = self.neighbours
        return [term._replace(neighbours=relation) for term in terms]

    def _counted(self, function: str, steps: int | None) -> int:
        """Return a number of steps of the plan, all of them by default."""
        steps = self.steps if steps is None else steps
        [steps] = checks.integers(function, minimum=0, steps=steps)
        if steps > self.steps:
            raise ValueError(
                f"{function}(steps={steps}): expected at most the {self.steps} steps "
                f"of the plan, got {steps}. Make a plan with more steps."
            )
        return steps

    def account(self, steps: int) -> list[accounting.Steps]:
        """List the steps of each kind among the first `steps` steps, without events."""
        earlier = min(steps, self.earlier_steps)
        account = [] if self.before is None else self.before.account(earlier)
        rest = steps - earlier
        return [*account, *([self.mechanism.spent(rest)] if rest else [])]

    def __repr__(self) -> str:
        """Show fields that are not the default, and no coefficients of noise."""
        texts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                text = str(value) if field.name == "noise" else repr(value)
                texts.append(f"{field.name}={text}")
        return f"Plan({', '.join(texts)})"

    def summary(self) -> str:
        """Describe the plan, with epsilon and mu of all its steps, for a screen.

        Example:
            >>> data = {"dataset_size": 1000, "max_norm": 1.0, "delta": 1e-5}
            >>> run = {"sampling_rate": 0.1, "noise_multiplier": 2.0, "steps": 50}
            >>> print(Plan(**data, **run).summary())
            epsilon   1.65 at delta 1e-05
            mu        0.468 at false positive rates from 1e-12 on
            power     at most 0.00365 at a false positive rate of 0.001
            relation  add_or_remove_one
            steps     50, 10 in an epoch
            batches   Poisson batches, 100 of 1,000 samples on average
            noise     2 times a max_norm of 1, independent
        """
        bounds = accounting.TradeOff.of(self._released("Plan.summary", None, 1))
        power, rate = bounds.power(1e-3), accounting.LEAST_RATE
        count, of = self.samples_per_unit, f"of {self.dataset_size:,}"
        kind = "samples" if count is None else f"units of {count} samples at most"
        batches = f"{self.expected_batch_size:,.6g} {of} {kind} on average"
        if (largest := self.largest_batch) is not None:
            batches += f", at most {largest:,}"
        norm = f"{self.first_max_norm:.6g}" + " at first" * self._adapts
        noise = "discrete" if self.discrete else str(self.noise)
        noise = f"{self.noise_multiplier:.6g} times a max_norm of {norm}, {noise}"
        rows = [
            ("epsilon", f"{self.epsilon():.3g} at delta {self.delta:.3g}"),
            ("mu", f"{bounds.mu():.3g} at false positive rates from {rate:g} on"),
            ("power", f"at most {power:.3g} at a false positive rate of 0.001"),
            ("relation", str(self.neighbours)),
            ("steps", f"{self.steps:,}, {self.steps_per_epoch:,} in an epoch"),
            ("batches", f"{self.mechanism.batches}, {batches}"),
            ("noise", noise),
        ]
        if (earlier := self.earlier_steps) > 0:
            rows.append(("before", f"{earlier:,} of the steps, {self.before}"))
        for event in self.all_events:
            texts = (str(term.event()) for term in event.steps)
            rows.append(("others", f"{event.words}: {', '.join(texts)}"))
        return table(rows)

    def dp_event(self, steps: int | None = None) -> Any:
        """Return the first steps as an event of dp_accounting, all of them by default.

        Its relation is `neighbours`, where "zero_out" and "fixed_graph" are
        dp_accounting's REPLACE_SPECIAL.

        Raises:
            ImportError: `dp-accounting` is not installed.

        Example:
            >>> data = {"dataset_size": 1000, "max_norm": 1.0, "delta": 1e-5}
            >>> run = {"sampling_rate": 0.1, "noise_multiplier": 2.0, "steps": 50}
            >>> Plan(**data, **run).dp_event().count
            50
        """
        account = self._released("Plan.dp_event", steps, 1)
        events = [term.event() for term in account]
        library = checks.package("dp_accounting", "dp")
        if len(events) == 1:
            return events[0]
        return library.ComposedDpEvent(events) if events else library.NoOpDpEvent()

    def plot_noise(
        self,
        schemes: Sequence[Noising] | None = None,
        *,
        epsilons: Sequence[float] = (1, 2, 4, 8, 16),
    ) -> Any:
        """Draw the error that schemes of noise leave, against epsilon.

        The root loss is the root mean squared noise in the sum of the gradients of the
        first t steps, the mean over t, in units of `max_norm / expected_batch_size`:
        the error of the parameters of SGD with a constant rate. Each scheme has the
        size of the data set, the rate, the steps and the delta of this plan, and the
        default sampling and relation of its noise, which the legend names: epsilons of
        two relations do not compare. Cost: up to a second for each point.

        Args:
            schemes: of `vgrad.dp.noising`; by default independent noise and the ones
                that the plan's rate allows.

        Raises:
            ImportError: `matplotlib` is not installed.

        Returns:
            A `matplotlib.figure.Figure`.

        Example:
            >>> from vgrad.dp import noising
            >>> data = {"dataset_size": 1200, "max_norm": 1.0, "delta": 1e-4}
            >>> plan = Plan(sampling_rate=0.1, noise_multiplier=1.0, steps=300, **data)
            >>> figure = plan.plot_noise([noising.independent()], epsilons=[16])
            >>> [line] = figure.axes[0].lines
            >>> [round(float(loss), 1) for loss in line.get_ydata()]
            [10.1]
        """
        size, rate, steps = self.dataset_size, self.sampling_rate, self.mechanism.steps
        run: dict[str, Any] = {"dataset_size": size, "sampling_rate": rate}
        run |= {"steps": steps, "delta": self.delta, "max_norm": 1.0}
        if schemes is None:
            batch = self.expected_batch_size
            is_integer = batch >= 1 and math.isclose(batch, round(batch), rel_tol=1e-9)
            schemes = [independent(), *(band_mf(b) for b in (2, 4, 8) if b * rate <= 1)]
            schemes += [band_inv_mf(4), blt(2)] if is_integer else []
        curves = []
        for scheme in schemes:
            plans = [Plan.for_epsilon(e, noise=scheme, **run) for e in epsilons]
            losses = [plan.mechanism.root_loss() for plan in plans]
            size = "" if scheme == independent() else scheme.size
            kind = f"{plans[0].sampling}, {plans[0].neighbours}"
            line = "o-" if plans[0].neighbours == "add_or_remove_one" else "s--"
            curves.append(Curve(f"{scheme.scheme}({size})", kind, losses, line))
        title = (
            f"Noise in sums of gradients: {self.dataset_size:,} samples, {steps:,} "
            f"steps of {self.expected_batch_size:g}, delta {self.delta:g}"
        )
        return draw(title, epsilons, curves)

    def sample(self, *, key: Tensor, step: int) -> Tensor:
        """Draw the batch of one step. -> indices of samples or units, int64 [B]."""
        return self.mechanism.drawing(self._subkey(key))(step)

    def drawing(self, key: Tensor, units: Units | None) -> Callable[[int], list[Any]]:
        """Return the batches of steps, of whole units where a plan has any."""
        key, count = self._subkey(key), self.samples_per_unit
        draw = self.mechanism.drawing(key)
        if units is None or count is None:
            return lambda step: draw(step).tolist()
        one = functools.partial(units.drawn, count=count, key=key)
        return lambda step: [one(unit, step=step) for unit in draw(step).tolist()]

    def sampler(self, state: Any, units: Any = None) -> StepBatches:
        """Return the batches from the state's step to the last one, for one pass.

        The state is a `TrainState`, a `PrivateGradients` or anything else with a `key`
        and a `step`; its `plan_digest` is checked if it has one. Steps on other batches
        are outside of the plan, which is not detected. Samples are not checked either:
        pad them to a fixed length, or use a mask, since padding to the longest of a
        batch breaks the bound.

        A plan of units, with `samples_per_unit`, draws from `units`: `dp.Units`, or one
        id for each sample. Which samples of a unit a batch has follows from the key,
        the step and the unit's id. `dp.unit_loader` takes such a sampler.

        Raises:
            ValueError: the state has taken more steps than the plan has, or has spent
                under another plan, or the plan counts other units.
        """
        if not (hasattr(state, "key") and hasattr(state, "step")):
            raise TypeError(
                f"Plan.sampler(state): expected a state with a key and a step, such as "
                f"a TrainState, got a {type(state).__name__}. The batch of one step "
                f"alone is plan.sample(key=key, step=step)."
            )
        digest, step = getattr(state, "plan_digest", None), int(state.step)
        check_spent("Plan.sampler(state)", self, digest, step)
        units = units_of("Plan.sampler(state, units)", self, units)
        place = repr(self.sampling_rate), *self._kinds
        place += () if units is None else (units.digest,)
        run = self.drawing(state.key, units), self.dataset_size, self.steps, step
        return StepBatches(*run, key=self._subkey(state.key), place=place)

    def add_noise(
        self,
        sums: Params,
        sensitivity: Sensitivity,
        *,
        key: Tensor,
        step: int,
        member: int = 0,
        max_norm: Tensor | None = None,
    ) -> Params:
        """Add the noise of one step to clipped sums. {name: shape} -> {name: shape}.

        Their sensitivity must be `max_norm / expected_batch_size`; for bounds of groups
        it is the very one of `clipped_grad(loss, **plan.clipping)`. The noise is a
        function of the key, the step, the member and the plan; dtypes are as in
        `add_gaussian_noise`.

        Raises:
            ValueError: the sensitivity is another one (relative tolerance 1e-9), or as
                `add_gaussian_noise`.
        """
        checks.dictionaries("add_gaussian_noise", sums=sums)
        first = self.earlier_steps if self.noise.correlated else 0
        place: dict[str, Any] = {"key": key, "step": step, "first": first}
        numbers = checked("Plan.add_noise", sensitivity, self.noise_multiplier, **place)
        place = {"key": key, "step": numbers["step"], "max_norm": max_norm}
        noise = self.step_noise(sensitivity, Streams(), **place)
        scales = self.scales(sums)
        return unscaled(noise.added(scaled(sums, scales), member), scales)

    def step_noise(
        self,
        sensitivity: Sensitivity,
        streams: Streams,
        *,
        key: Tensor,
        step: int,
        history: Tree | None = None,
        max_norm: Tensor | None = None,
    ) -> Noise | DiscreteNoise:
        """Return the noise of one step, from streams that the caller holds.

        Sums are multiplied by `scales` before it, and divided afterwards. Where it is
        correlated over steps, it takes the history that the step before has
        returned; None where the caller keeps none. Where the bound adapts, it takes the
        `max_norm` of the step.
        """
        self._check_sum(sensitivity, max_norm)
        options: dict[str, Any] = {"key": self._subkey(key), "step": step}
        options |= {"streams": streams, "history": history}
        multiplier = self._gradient_multiplier * self.mechanism.sensitivity
        options["noise_multiplier"] = multiplier
        if self.noise.correlated:
            options |= {"filter": self.fitted.filter, "first": self.earlier_steps}
        if isinstance(self.max_norm, GroupClip):
            sensitivity = Sensitivity(self.noise_norm / self.expected_batch_size)
        noise = gaussian_noise("add_gaussian_noise", sensitivity, **options)
        if not self.discrete:
            return noise
        deviation: Any = noise.deviation  # a number
        return DiscreteNoise(noise.key, noise.step, deviation)

    def _check_sum(self, sensitivity: Sensitivity, max_norm: Tensor | None) -> None:
        """Refuse the sensitivity of a sum that was clipped or divided otherwise."""
        clip, size = self.max_norm, self.expected_batch_size
        bound, divisor = sensitivity.made_of or (None, 0.0)
        how = "clipped_grad(loss, **plan.clipping)"
        if isinstance(clip, QuantileClip):
            # The very tensor, since a device would wait for values.
            fits = max_norm is not None and bound is max_norm
            fits = fits and math.isclose(divisor, size)
            expected = f"one of a sum / {size!r}, clipped to the max_norm of a state"
            how += ".with_max_norm(state.max_norm), pass max_norm=state.max_norm"
        elif isinstance(clip, GroupClip):
            fits = bound == clip.bounds and math.isclose(divisor, size)
            expected = f"one of a sum / {size!r}, clipped to the bounds of groups"
        else:
            fits = math.isclose(sensitivity.value, clip / size, rel_tol=1e-9)
            expected = f"the value max_norm / expected_batch_size = {clip / size!r}"
        if not fits:
            raise ValueError(
                f"Plan.add_noise(sensitivity): expected {expected}, got "
                f"{checks.shown(sensitivity.value)}. Clip with {how}, and pass its "
                f".sensitivity."
            )

    def next_max_norm(self, max_norm: Tensor, count: Tensor, **place: Any) -> Tensor:
        """Return the bound of the next step, from a step's sum of b_i - 1/2."""
        clip: Any = self.max_norm
        place["key"] = generators.fold_in(self._subkey(place["key"]), "count")
        return clip.following(max_norm, count, self.expected_batch_size, **place)

    def audit(
        self,
        step: Any,
        state: Any,
        *,
        canaries: int,
        batch: tuple | None = None,
        guesses: tuple[int, int] | None = None,
        significance: float = 0.05,
        seed: int | None = None,
    ) -> Audit:
        """Bound from below how much a private step spends, by canaries it is given.

        `step` is the result of `private_step(loss, tx, plan)`, also compiled or over
        the ranks of `data_parallel`, and `state` is a state for it. Both stay as they
        are: the audit takes steps from the plan's start, under a new key. Their batches
        are `canaries` samples of another loss, the inner product of the parameters and
        a direction, so an audit needs no data. All else is the step's own: clipping,
        sum, division, ranks, graphs and noise.

        Directions lie in all parameters, in one of them, or in one rank's shard, nearly
        orthogonal to each other; gradients have 1, 10 and 10^4 times the norm
        `max_norm`. A coin decides whether a canary is in both steps of its round. In
        the first one it has the sign plus. Then the state is saved and loaded, and it
        has the sign minus, so that noise which repeats itself cancels. Its score is the
        inner product of its direction and the difference of both noisy gradients.

        The bounds are beside the claim of the same two steps at a sampling rate of 1,
        as canaries bypass the sampler, which no audit sees. Take a thousand canaries at
        least; two steps have at most half as many as there are parameters. An optimizer
        that scales gradients keeps the scales of `state`.

        Args:
            batch: real samples to add to all batches, `(*batch)` as the step takes
                them. The result is then as private as they are.
            guesses: as of `vgrad.dp.audit.one_run`; an eighth of the canaries each.
            significance: the probability that a true step exceeds its claim.
            seed: draws canaries, coins and noise again, for tests.

        Raises:
            TypeError: the step was made for another plan, or is no private step.
            ValueError: the plan has no noise or fewer than two steps, or `batch` is
                there with correlated noise.

        Example:
            >>> from vgrad import optim, training
            >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
            >>> tx, params = optim.sgd(0.1), {"w": torch.zeros(500)}
            >>> run = {"sampling_rate": 0.1, "steps": 10, "delta": 1e-5}
            >>> plan = Plan(1000, noise_multiplier=2.0, max_norm=1.0, **run)
            >>> step = training.private_step(loss, tx, plan)
            >>> state = training.TrainState.create(tx, params, {})
            >>> result = plan.audit(step, state, canaries=200, significance=1e-6)
            >>> round(result.claimed_mu, 3), result.exceeded
            (0.707, False)
        """
        if getattr(getattr(step, "source", None), "plan", None) != self:
            raise TypeError(
                f"Plan.audit(step): expected the step that private_step(loss, tx, "
                f"plan) makes with this plan, or vgrad.compile or data_parallel of it, "
                f"got a {type(step).__name__}."
            )
        key = step.reduce.agreed(generators.secret_key(seed=seed))
        settings: Any = {"canaries": canaries, "guesses": guesses, "key": key}
        settings |= {"significance": significance, "scales": scales_of(state.optimizer)}
        start = self.digest_at(self.earlier_steps)
        release = partial(noisy_gradients, step, state, start)
        run = release, step.source.transform.options, state.params, batch
        return self.audit_of("Plan.audit", *run, **settings)

    def audit_of(
        self,
        function: str,
        release: canaries.Release,
        options: Options,
        params: Params,
        batch: tuple | None = None,
        *,
        scales: Scales = MappingProxyType({}),
        **numbers: Any,
    ) -> Audit:
        """Audit what `release` releases of the clipped sum of some options."""
        clip = self.max_norm
        densities = clip.densities(params) if isinstance(clip, GroupClip) else {}
        numbers |= {"densities": densities, "scales": {**self.scales(params), **scales}}
        numbers |= {"bound": self.noise_norm, "delta": self.delta}
        arguments = self.mechanism, release, options, params, batch
        return audit(function, *arguments, **numbers)

    def _subkey(self, key: Tensor) -> Tensor:
        # So that two plans never share batches or noise.
        before = () if self.before is None else (self._identity.hex(),)
        return generators.fold_in(key, *self._numbers, *before, *self._kinds)


NO_PLAN = bytes(32)
"""The identity in a state that has spent under no plan."""


def check_spent(function: str, plan: Plan, digest: Tensor | None, steps: int) -> bytes:
    """Return the identity of a plan that accounts for a run of so many steps."""
    identity, before, spent = plan._identity, plan.before, None
    if digest is not None:
        if digest.dtype != torch.uint8 or digest.shape != (len(NO_PLAN),):
            raise ValueError(
                f"{function}: expected a state with a plan_digest of uint8 "
                f"({len(NO_PLAN)},), got {digest.dtype} {tuple(digest.shape)}. Pass "
                f"the states of an ensemble one by one."
            )
        spent = digest.cpu().numpy().tobytes()
    follows = before is not None and spent == before._identity
    early = before is not None and steps < before.steps
    if early or (follows and steps > plan.earlier_steps):
        raise ValueError(
            f"{function}: expected a state that has taken the {plan.earlier_steps} "
            f"steps that plan.after(other, steps) counts, got one that has taken "
            f"{steps}. Pass the number of steps that were taken."
        )
    fresh = spent is None or (before is None and spent == NO_PLAN)
    if spent == NO_PLAN and steps and fresh and (plan.noise.correlated or plan._adapts):
        raise ValueError(
            f"{function}: expected a state whose {steps} steps were taken under this "
            f"plan, whose noise or bound goes on from them, got one of plain steps. "
            f"Start the plan's run from TrainState.create(tx, state.params, "
            f"state.buffers)."
        )
    if follows or fresh or spent == identity:
        return identity
    if spent == NO_PLAN:
        raise ValueError(
            f"{function}: expected a state that has spent under the plan before this "
            f"one, got one that has spent under none. Leave out plan.after."
        )
    if spent == plan._identity_with(discrete=True):
        raise ValueError(f"{function}, a state of Plan(discrete=True): {_NO_INTEGERS}")
    raise ValueError(
        f"{function}: expected a state whose private steps were taken under this plan, "
        f"got one that has spent under another, of another dataset_size, "
        f"sampling_rate, noise_multiplier, max_norm or history. "
        f"plan.after(other, steps) makes the plan that accounts for both."
    )


def units_of(function: str, plan: Plan, units: Any) -> Units | None:
    """Return the units of a plan, if it has any; refuse others."""
    count, neighbours = plan.samples_per_unit, plan.neighbours
    if (units is None) != (count is None):
        got = "samples_per_unit alone" if units is None else "units alone"
        raise ValueError(
            f"{function}: expected units and a plan that counts them, got {got}. Pass "
            f"units=ids, and make the plan with Plan(samples_per_unit=k)."
        )
    if units is None:
        return None
    units = Units.of(units)
    if len(units) != plan.dataset_size:
        raise ValueError(
            f"{function}: expected a plan for {len(units)} units, got one for "
            f"{plan.dataset_size}. Pass dataset_size=len(dp.Units(ids))."
        )
    several = units.several_owners
    if several != (neighbours == "fixed_graph"):
        kind = "several owners" if several else "one owner"
        raise ValueError(
            f"{function}: got samples of {kind}, and a plan of {neighbours!r} with "
            f"samples_per_unit={count}. Expected for several owners "
            f'neighbours="fixed_graph" and samples_per_unit=1 (more would need an '
            f"account of groups), for one owner another relation."
        )
    return units


@functools.cache
def _least_batch(plan: Plan, releases: int = 1) -> int:
    """Return the least `max_batch_size` that costs at most 1 % of epsilon."""
    limit = _PRICE_OF_AUTO * plan.epsilon(releases=releases)
    mean = plan.expected_batch_size
    low, high = math.ceil(mean), plan.mechanism.sampled  # where all fit
    # Hardly a batch is seven deviations above the mean.
    middle = math.ceil(mean + 7 * math.sqrt(mean))
    while low < high:
        middle = middle if low < middle < high else (low + high) // 2
        cut = replace(plan, max_batch_size=middle)
        fits = cut.epsilon(releases=releases) <= limit
        low, high = (low, middle) if fits else (middle + 1, high)
    return high
