"""One object for a private training run, so that its parts cannot disagree."""

import math
import warnings
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vgrad import checks, generators
from vgrad.dp import accounting
from vgrad.dp.noise import add_gaussian_noise, check_sensitivity
from vgrad.dp.sampling import PoissonBatchSampler, check_rate, poisson_sample
from vgrad.sensitivity import Sensitivity
from vgrad.typing import Params


class Keyed(Protocol):
    """A state of a run, from whose key and step its randomness follows."""

    @property
    def key(self) -> Tensor:
        """The secret key."""
        ...

    @property
    def step(self) -> Tensor | int:
        """How many steps have been taken."""
        ...


@dataclass(frozen=True)
class Plan:
    """What the sampler, the noise and the accountant of one run have in common.

    A step draws a Poisson batch, clips the gradient of each sample to the L2 norm
    `max_norm`, divides the sum by `expected_batch_size` and adds noise. The divisor is
    a constant of the plan and never the size of the batch drawn, which depends on the
    data.

    Choose `delta` well below `1 / dataset_size`: a `delta` of that size would allow
    releasing one sample as it is. A larger one warns.

    Raises:
        TypeError: a field is not a number.
        ValueError: a field is outside its range.

    Example:
        >>> plan = Plan(
        ...     dataset_size=60_000,
        ...     sampling_rate=0.01,
        ...     noise_multiplier=1.0,
        ...     max_norm=1.0,
        ...     steps=1000,
        ...     delta=1e-6,
        ... )
        >>> plan.expected_batch_size
        600.0
        >>> round(plan.epsilon(), 2), round(plan.epsilon(steps=10), 2)
        (2.12, 0.59)
    """

    dataset_size: int
    sampling_rate: float
    noise_multiplier: float
    max_norm: float
    steps: int
    delta: float
    accountant: accounting.Accountant = "pld"

    def __post_init__(self) -> None:
        """Check the fields."""
        checks.whole("Plan", least=1, dataset_size=self.dataset_size, steps=self.steps)
        check_rate("Plan", self.sampling_rate)
        checks.non_negative("Plan", noise_multiplier=self.noise_multiplier)
        checks.positive("Plan", max_norm=self.max_norm)
        checks.finite(
            "Plan", noise_multiplier=self.noise_multiplier, max_norm=self.max_norm
        )
        checks.between("Plan", 0, 1, delta=self.delta)
        checks.one_of("Plan", accounting.ACCOUNTANTS, accountant=self.accountant)
        if self.delta > 1 / self.dataset_size:
            warnings.warn(
                f"Plan(delta={self.delta!r}): expected at most 1 / dataset_size = "
                f"{1 / self.dataset_size:.3g}, got more, which allows releasing a "
                f"sample as it is. Choose a delta well below it.",
                stacklevel=3,
            )

    @classmethod
    def for_epsilon(
        cls,
        epsilon: float,
        *,
        dataset_size: int,
        max_norm: float,
        delta: float,
        sampling_rate: float | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        accountant: accounting.Accountant = "pld",
    ) -> "Plan":
        """Make the plan with the least noise whose epsilon is at most `epsilon`.

        How much is drawn is said by `sampling_rate` and `steps`, or by the expected
        `batch_size` and `epochs`, each of `round(dataset_size / batch_size)` steps at
        the rate `batch_size / dataset_size` (`.steps_per_epoch`).

        Raises:
            ValueError: as the class and `noise_multiplier_for`, or what is drawn is
                said in both ways or in neither.
            ImportError: `dp-accounting` is not installed.

        Example:
            >>> plan = Plan.for_epsilon(
            ...     3.0,
            ...     dataset_size=1000,
            ...     sampling_rate=0.5,
            ...     max_norm=1.0,
            ...     steps=200,
            ...     delta=1e-5,
            ... )
            >>> round(plan.noise_multiplier, 2), round(plan.epsilon(), 2)
            (9.91, 3.0)
            >>> plan == Plan.for_epsilon(
            ...     3.0,
            ...     dataset_size=1000,
            ...     batch_size=500,
            ...     max_norm=1.0,
            ...     epochs=100,
            ...     delta=1e-5,
            ... )
            True
        """
        sampling_rate, steps = _rate_and_steps(
            dataset_size, (sampling_rate, steps), (batch_size, epochs)
        )
        noise_multiplier = accounting.noise_multiplier_for(
            epsilon=epsilon,
            delta=delta,
            sampling_rate=sampling_rate,
            steps=steps,
            accountant=accountant,
        )
        return cls(
            dataset_size=dataset_size,
            sampling_rate=sampling_rate,
            noise_multiplier=noise_multiplier,
            max_norm=max_norm,
            steps=steps,
            delta=delta,
            accountant=accountant,
        )

    @property
    def expected_batch_size(self) -> float:
        """The mean size of a batch, `sampling_rate * dataset_size`, not rounded."""
        return self.sampling_rate * self.dataset_size

    @property
    def steps_per_epoch(self) -> int:
        """How many steps a pass over the data takes, `1 / sampling_rate`, rounded."""
        return _steps_per_epoch(self.sampling_rate)

    def epsilon(self, steps: int | None = None) -> float:
        """Return the epsilon spent after `steps` steps; after all of them by default.

        Raises:
            ValueError: `steps` is not a whole number from 0 to the steps of the plan.
            ImportError: `dp-accounting` is not installed.
        """
        taken = self.steps if steps is None else steps
        checks.whole("Plan.epsilon", least=0, steps=taken)
        if taken > self.steps:
            raise ValueError(
                f"Plan.epsilon(steps={taken}): expected at most the {self.steps} steps "
                f"of the plan, got {taken}. Make a plan with more steps."
            )
        return accounting.epsilon(
            sampling_rate=self.sampling_rate,
            noise_multiplier=self.noise_multiplier,
            steps=taken,
            delta=self.delta,
            accountant=self.accountant,
        )

    def sample(self, *, key: Tensor, step: int) -> Tensor:
        """Draw the Poisson batch of one step. -> indices, int64 [B], B varies.

        Raises:
            TypeError, ValueError: as `poisson_sample`.
        """
        own = self._own(key)
        return poisson_sample(self.dataset_size, self.sampling_rate, key=own, step=step)

    def sampler(self, state: Keyed) -> PoissonBatchSampler:
        """Return the batches from the state's step to the last one, for one pass.

        The state is a `TrainState`, a `PrivateGradients` or anything else with a `key`
        and a `step`, from which the batches follow: a state that was saved gives those
        that the lost run drew. Steps on batches of your own are not the plan's, and
        nothing can detect that. Nor can it look at samples: pad them to a fixed length,
        or use a mask, since padding to the longest of a batch breaks the bound.

        Raises:
            ValueError: the state has taken more steps than the plan has.
        """
        return PoissonBatchSampler(
            self.dataset_size,
            self.sampling_rate,
            self.steps,
            key=self._own(state.key),
            start=int(state.step),
        )

    def add_noise(
        self,
        sums: Params,
        sensitivity: Sensitivity,
        *,
        key: Tensor,
        step: int,
        member: int = 0,
    ) -> Params:
        """Add the noise of one step to clipped sums. {name: shape} -> {name: shape}.

        The sums must have been clipped to `max_norm` and divided by
        `expected_batch_size`, so that their sensitivity is the quotient of the two,
        and that is checked. The noise follows from the key, the step, the member and
        the plan; dtypes are those of `add_gaussian_noise`.

        Raises:
            ValueError: the sensitivity is another one (relative tolerance 1e-9), or as
                `add_gaussian_noise`.
            TypeError: as `add_gaussian_noise`.
        """
        check_sensitivity("Plan.add_noise", sensitivity)
        expected = self.max_norm / self.expected_batch_size
        if not math.isclose(sensitivity.value, expected, rel_tol=1e-9):
            raise ValueError(
                f"Plan.add_noise(sensitivity={sensitivity!r}): expected the value "
                f"max_norm / expected_batch_size = {expected!r}, got "
                f"{sensitivity.value!r}. Clip with clipped_grad(loss, "
                "max_norm=plan.max_norm, normalize_by=plan.expected_batch_size)."
            )
        return add_gaussian_noise(
            sums,
            sensitivity,
            noise_multiplier=self.noise_multiplier,
            key=self._own(key),
            step=step,
            member=member,
        )

    def _own(self, key: Tensor) -> Tensor:
        """Derive the plan's own key, so that two plans never share batches or noise."""
        return generators.subkey(
            key,
            self.dataset_size,
            float(self.sampling_rate),
            float(self.noise_multiplier),
            float(self.max_norm),
        )


def _rate_and_steps(
    dataset_size: int,
    direct: tuple[float | None, int | None],
    by_epochs: tuple[int | None, int | None],
) -> tuple[float, int]:
    """Return sampling rate and steps, however they were given."""
    rate, steps = direct
    batch_size, epochs = by_epochs
    if rate is not None and steps is not None and by_epochs == (None, None):
        return rate, steps
    if batch_size is None or epochs is None or direct != (None, None):
        raise ValueError(
            f"Plan.for_epsilon(sampling_rate={rate!r}, steps={steps!r}, "
            f"batch_size={batch_size!r}, epochs={epochs!r}): expected either "
            f"sampling_rate and steps or batch_size and epochs."
        )
    checks.whole(
        "Plan.for_epsilon",
        least=1,
        dataset_size=dataset_size,
        batch_size=batch_size,
        epochs=epochs,
    )
    if batch_size > dataset_size:
        raise ValueError(
            f"Plan.for_epsilon(batch_size={batch_size}): expected at most the "
            f"{dataset_size} samples of the data set."
        )
    rate = batch_size / dataset_size
    return rate, epochs * _steps_per_epoch(rate)


def _steps_per_epoch(rate: float) -> int:
    # Halves stay halves, whichever way the rate was rounded.
    return max(1, round(round(1 / rate, 6)))
