"""The mechanisms of private training: batches, noise and the account of both.

A mechanism is one class: the sampling that draws its batches, the noise on their
clipped sums, and the relations of data sets for which an account of both is known. A
combination of these has an account if the `accounts` of a class list it, and no other
one makes a plan.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from torch import Tensor

from vgrad import checks
from vgrad.dp.accounting import ACCOUNTANTS, Accountant, Neighbours, Steps
from vgrad.dp.noising import Fitted, Noising, Scheme
from vgrad.dp.sampling import in_order, poisson_sample, random_groups, random_order
from vgrad.report import table

Sampling = Literal["poisson", "cyclic_poisson", "cyclic_equal", "fixed_order"]

NOISES = *get_args(Scheme), "discrete", "quantile_clip"
"""Kinds of noise: the schemes; discrete noise; and noise on a sum and on the count of
norms below a bound that adapts. The last two are independent from step to step."""


class Account(NamedTuple):
    """The kinds of noise, and the accountants, that bound epsilon for a relation."""

    noises: tuple[str, ...]
    accountants: tuple[Accountant, ...] = tuple(ACCOUNTANTS)


# The norm of a gradient that is zeroed counts as small, so no count of norms is
# accounted for where samples are zeroed.
_PLAIN = "independent", "discrete"
_ONE_BOUND: tuple[Accountant, ...] = ("pld",)


@dataclass(frozen=True)
class Mechanism:
    """Noise on the clipped sums of the batches that one sampling draws.

    Attributes:
        steps: the number of steps that noise is made for.
        start: the number of steps of a run that came before them.
    """

    dataset_size: int
    sampling_rate: float
    noise_multiplier: float
    noise: Noising
    steps: int
    start: int
    neighbours: Neighbours
    max_batch_size: int | None

    sampling: ClassVar[Sampling]
    truncated: ClassVar[bool] = False
    batches: ClassVar[str]
    accounts: ClassVar[Mapping[Neighbours, Account]]

    @classmethod
    def account_for(cls, relation: object) -> Account:
        """Return the account for a relation, of no noise if none is known."""
        matching = [x for name, x in cls.accounts.items() if name == relation]
        return matching[0] if matching else Account((), ())

    @classmethod
    def takes(cls, noise: str) -> bool:
        """Return whether there is an account of some noise."""
        return any(noise in account.noises for account in cls.accounts.values())

    def check(self) -> None:
        """Refuse numbers that the mechanism has no account for."""

    def optimal(self) -> "Mechanism":
        """Return the mechanism with the optimised coefficients of its noise."""
        return replace(self, noise=self.noise.optimal(**self._participation))

    @property
    def expected_batch_size(self) -> float:
        """The mean size of a batch, not rounded."""
        return self.sampling_rate * self.dataset_size

    @property
    def largest_batch(self) -> int | None:
        """The size that no batch exceeds, None if there is none but the data set's."""
        return self.max_batch_size

    @property
    def sampled(self) -> int:
        """The number of samples that a batch is drawn from."""
        return self.dataset_size

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of a pass over the data."""
        # Halves stay halves, however the rate was rounded.
        return max(1, round(round(1 / self.sampling_rate, 6)))

    @functools.cached_property
    def fitted(self) -> Fitted:
        """The scheme of the noise, fitted to the steps and to their batches."""
        return self.noise.fitted(**self._participation)

    @functools.cached_property
    def sensitivity(self) -> float:
        """The sensitivity of all steps to a sample, which the noise of each multiplies.

        One for independent noise, which is accounted for step by step.
        """
        return self.fitted.sensitivity() if self.noise.correlated else 1.0

    def deviation(self, step: int) -> float:
        """Return the deviation of a step's noise, in units of independent noise."""
        if not self.noise.correlated:
            return 1.0
        row = self.fitted.row_norms(self.steps)[step - self.start]
        return self.sensitivity * float(row)

    @property
    def _participation(self) -> dict[str, int]:
        return {"steps": self.steps, "separation": 1, "participations": 1}

    def root_loss(self) -> float:
        """Return the root mean squared noise of a prefix sum of the steps.

        It is in units of the clipped gradient of one sample in the mean of a batch.
        """
        errors = self.fitted.errors(self.steps)
        return self.noise_multiplier * self.sensitivity * math.sqrt(errors.mean())

    def spent(self, steps: int) -> Steps:
        """Return the first steps as steps of the accountant."""
        return self._sampled_steps(self.sampling_rate, steps)

    def _sampled_steps(self, rate: float, steps: int) -> Steps:
        truncated = None
        if self.max_batch_size is not None:
            truncated = self.max_batch_size, self.sampled
        kind = truncated, self.neighbours
        return Steps(min(rate, 1.0), self.noise_multiplier, steps, *kind)

    def drawing(self, key: Tensor) -> Callable[[int], Tensor]:
        """Return the batches of steps, as a function of the step of the run."""
        raise NotImplementedError


class Poisson(Mechanism):
    """Every sample is in a batch independently, with one probability."""

    sampling = "poisson"
    batches = "Poisson batches"
    accounts: ClassVar = {
        "add_or_remove_one": Account((*_PLAIN, "quantile_clip")),
        "zero_out": Account(_PLAIN),
        "replace_one": Account((*_PLAIN, "quantile_clip"), _ONE_BOUND),
        "fixed_graph": Account(_PLAIN),
    }

    def drawing(self, key: Tensor) -> Callable[[int], Tensor]:
        """Return the batches of steps, as a function of the step of the run."""
        options: Any = {"key": key, "max_batch_size": self.max_batch_size}
        run = self.dataset_size, self.sampling_rate
        return lambda step: poisson_sample(*run, step=step, **options)


class TruncatedPoisson(Poisson):
    """Poisson batches, of which a random part is left where they are too large."""

    truncated = True
    accounts: ClassVar = {
        "add_or_remove_one": Account((*_PLAIN, "quantile_clip"), _ONE_BOUND),
        "zero_out": Account(_PLAIN, _ONE_BOUND),
        "fixed_graph": Account(_PLAIN, _ONE_BOUND),
    }


class CyclicPoisson(Mechanism):
    """Step t samples from group t mod b of b groups; each sample draws its group.

    The noise of `band_mf` depends on the last b - 1 draws, so a round of the groups is
    one Gaussian mechanism on a batch of b times the rate.
    """

    sampling = "cyclic_poisson"
    batches = "cyclic Poisson batches"
    accounts: ClassVar = {
        "add_or_remove_one": Account(("band_mf",)),
        "zero_out": Account(("band_mf",)),
    }
    equal: ClassVar = False

    def check(self) -> None:
        """Refuse groups that would have to be sampled too often."""
        if (bands := self.noise.size) * self.sampling_rate > 1:
            raise ValueError(
                f"Plan(sampling_rate={self.sampling_rate}, noise=...): expected a rate "
                f"of at most 1 / {bands}, since a step samples from one of {bands} "
                f"groups with {bands} times the rate. Use fewer bands."
            )

    @property
    def sampled(self) -> int:
        """The number of samples of a group."""
        return -(-self.dataset_size // self.noise.size)

    @property
    def _participation(self) -> dict[str, int]:
        # A round is one event, in which a sample is once.
        return super()._participation | {"separation": self.noise.size}

    def spent(self, steps: int) -> Steps:
        """Return the rounds of the first steps as steps of the accountant."""
        bands = self.noise.size
        return self._sampled_steps(bands * self.sampling_rate, -(-steps // bands))

    def drawing(self, key: Tensor) -> Callable[[int], Tensor]:
        """Return the batches of steps, as a function of the step of the run."""
        bands, start, size = self.noise.size, self.start, self.dataset_size
        groups = random_groups(size, bands, key=key, equal=self.equal)
        run = size, bands * self.sampling_rate
        options: Any = {"key": key, "max_batch_size": self.max_batch_size}

        def draw(step: int) -> Tensor:
            among = groups == (step - start) % bands
            return poisson_sample(*run, step=step, among=among, **options)

        return draw


class CyclicEqual(CyclicPoisson):
    """Cyclic batches from groups of equal sizes, in which no sample can be absent."""

    sampling = "cyclic_equal"
    batches = "cyclic Poisson batches of equal groups"
    accounts: ClassVar = {"zero_out": Account(("band_mf",))}
    equal: ClassVar = True


class TruncatedCyclicEqual(CyclicEqual):
    """Cyclic batches of equal groups, of which a random part is left if too large."""

    truncated = True
    accounts: ClassVar = {"zero_out": Account(("band_mf",), _ONE_BOUND)}


class FixedOrder(Mechanism):
    """Batches of one size, in one order that does not depend on the data.

    Privacy is not amplified. Correlated noise makes one mechanism of all steps.
    """

    sampling = "fixed_order"
    batches = "batches in a fixed order"
    accounts: ClassVar = {
        "zero_out": Account((*get_args(Scheme), "discrete")),
        "replace_one": Account(NOISES, _ONE_BOUND),
    }

    def check(self) -> None:
        """Refuse batches of a size that is no whole number."""
        size = self.expected_batch_size
        if round(size) < 1 or abs(size - round(size)) > 1e-9 * size:
            raise ValueError(
                f"Plan(sampling_rate={self.sampling_rate}, dataset_size="
                f"{self.dataset_size}, sampling='fixed_order'): expected batches of a "
                f"whole number of samples, got {size!r}. Pass sampling_rate="
                f"batch_size / dataset_size."
            )

    @property
    def largest_batch(self) -> int:
        """The size of a batch; the last one of an epoch may be short."""
        return round(self.expected_batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of a pass over the data, the last one maybe short."""
        return -(-self.dataset_size // self.largest_batch)

    @property
    def _participation(self) -> dict[str, int]:
        apart = self.steps_per_epoch
        times = -(-self.steps // apart)
        return {"steps": self.steps, "separation": apart, "participations": times}

    def spent(self, steps: int) -> Steps:
        """Return the first steps as Gaussian mechanisms on all samples."""
        times, multiplier = -(-steps // self.steps_per_epoch), self.noise_multiplier
        if self.noise.correlated:
            times = 1  # the leading block of one mechanism
            if steps < self.steps:
                multiplier *= self.sensitivity / self.fitted.sensitivity(steps)
        return Steps(1.0, multiplier, times, None, self.neighbours)

    def drawing(self, key: Tensor) -> Callable[[int], Tensor]:
        """Return the batches of steps, as a function of the step of the run."""
        order = random_order(self.dataset_size, key=key)
        return lambda step: in_order(order, self.largest_batch, step - self.start)


MECHANISMS: tuple[type[Mechanism], ...] = (
    Poisson,
    TruncatedPoisson,
    CyclicPoisson,
    CyclicEqual,
    TruncatedCyclicEqual,
    FixedOrder,
)
"""All mechanisms; the first one with some noise has the default sampling for it."""


class Combination(NamedTuple):
    """A choice of mechanism, relation, noise and accountant, by a plan's fields."""

    sampling: Sampling | None
    neighbours: Neighbours | None
    noise: str
    max_batch_size: int | str | None
    accountant: Accountant

    def find(self) -> tuple[type[Mechanism], Neighbours] | None:
        """Return the mechanism and the relation with an account; None if none has."""
        usual = (kind.sampling for kind in MECHANISMS if kind.takes(self.noise))
        place = self.sampling or next(usual, None), bool(self.max_batch_size)
        for kind in MECHANISMS:
            if (kind.sampling, kind.truncated) != place:
                continue
            relation = self.neighbours or next(iter(kind.accounts))
            noises, accountants = kind.account_for(relation)
            if self.noise in noises and self.accountant in accountants:
                return kind, relation
        return None

    def resolved(self) -> tuple[type[Mechanism], Neighbours]:
        """Return the mechanism and the relation; refuse a choice without an account."""
        if (pair := self.find()) is not None:
            return pair
        values = {
            "sampling": get_args(Sampling),
            "neighbours": get_args(Neighbours),
            "noise": NOISES,
            "max_batch_size": (None,) if self.max_batch_size else (),
            "accountant": tuple(ACCOUNTANTS),
        }
        ways = []
        for name, others in values.items():
            works = [x for x in others if self._replace(**{name: x}).find()]
            if works:
                ways.append(f"{name} {' or '.join(map(repr, works))}")
        choices = {n: x for n, x in self._asdict().items() if x not in (None, False)}
        text = ", ".join(f"{name}={checks.shown(x)}" for name, x in choices.items())
        raise ValueError(
            f"Plan({text}): expected a combination with an account, got one of which "
            f"no epsilon is known. With all else as it is, take "
            f"{'; or '.join(ways) or 'the defaults of sampling and neighbours'}."
        )


def accounts() -> str:
    """Return the table of all combinations with an account; all others are refused."""
    rows: list[tuple[str, ...]] = [("mechanism", "relation", "accountants", "noise")]
    for kind in MECHANISMS:
        for relation in get_args(Neighbours):
            noises, accountants = kind.account_for(relation)
            refused = [noise for noise in NOISES if noise not in noises]
            text = ", ".join(noises) or "none"
            if len(noises) > len(refused):
                text = f"all but {', '.join(refused)}" if refused else "all"
            rows.append((kind.__name__, relation, ", ".join(accountants), text))
    return table(rows)
