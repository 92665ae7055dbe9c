"""The numbers that sampler, noise and accountant of a private run share."""

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vgrad import checks, generators
from vgrad.batches import Sensitivity
from vgrad.dp import accounting
from vgrad.dp.noise import Noise, Streams, check_sensitivity, gaussian_noise
from vgrad.dp.sampling import PoissonBatchSampler, poisson_sample
from vgrad.typing import Params

if TYPE_CHECKING:
    from vgrad.dp.audit import Audit

MECHANISM = "Gaussian noise on clipped sums of Poisson batches"

_CIPHER = "ChaCha20"
"""The cipher whose words noise is made of: the same key and step are another release
under another one."""


@dataclass(frozen=True)
class Plan:
    """The numbers that the sampler, the noise and the accountant of one run share.

    A step draws a Poisson batch, clips the gradient of each sample to the L2 norm
    `max_norm`, divides the sum by `expected_batch_size` and adds noise. The size of the
    batch drawn, which depends on the data, is never the divisor.

    Choose `delta` well below `1 / dataset_size`; a larger one warns. A state that has
    spent under one plan can continue under another only if that accounts for both, see
    `after`.

    Attributes:
        before: the run's previous plan, with the steps taken under it.

    Raises:
        ValueError: a field is outside its range.

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
    max_norm: float
    steps: int
    delta: float
    accountant: accounting.Accountant = "pld"
    before: "Plan | None" = None

    def __post_init__(self) -> None:
        counts = {"dataset_size": self.dataset_size, "steps": self.steps}
        size, steps = checks.whole("Plan", least=1, **counts)
        accounting.check("Plan", self.sampling_rate, steps, self.delta, self.accountant)
        noise, norm = self.noise_multiplier, self.max_norm
        checks.non_negative("Plan", noise_multiplier=noise)
        checks.positive("Plan", max_norm=norm)
        checks.finite("Plan", noise_multiplier=noise, max_norm=norm)
        # Plans of equal numbers are equal, whatever the types of the numbers.
        names = ("sampling_rate", "noise_multiplier", "max_norm", "delta")
        floats = {name: float(getattr(self, name)) for name in names}
        self.__dict__.update(floats, dataset_size=size, steps=steps)
        if isinstance(self.before, Mapping):  # as dataclasses.asdict writes it
            self.__dict__.update(before=Plan(**self.before))
        if not isinstance(self.before, Plan | None):
            raise TypeError(
                f"Plan(before): expected a Plan, got a {type(self.before).__name__}."
            )
        if self.steps <= self.earlier_steps:
            raise ValueError(
                f"Plan(steps={self.steps}, before=...): expected more than the "
                f"{self.earlier_steps} steps taken before, which count. Make it with "
                f"plan.after(other, steps)."
            )
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

        Pass either `sampling_rate` and `steps`, or the expected `batch_size` and
        `epochs`, each of `round(dataset_size / batch_size)` steps at the rate
        `batch_size / dataset_size` (`.steps_per_epoch`).

        Raises:
            ValueError: as `noise_multiplier_for`.

        Example:
            >>> data = {"dataset_size": 1000, "max_norm": 1.0, "delta": 1e-5}
            >>> plan = Plan.for_epsilon(3.0, batch_size=500, epochs=100, **data)
            >>> round(plan.noise_multiplier, 2), round(plan.epsilon(), 2)
            (9.91, 3.0)
            >>> plan == Plan.for_epsilon(3.0, sampling_rate=0.5, steps=200, **data)
            True
        """
        by_rate, by_epochs = (sampling_rate, steps), (batch_size, epochs)
        if batch_size is not None and epochs is not None and by_rate == (None, None):
            counts = {"dataset_size": dataset_size, "batch_size": batch_size}
            dataset_size, batch_size, epochs = checks.whole(
                "Plan.for_epsilon", least=1, **counts, epochs=epochs
            )
            if batch_size > dataset_size:
                raise ValueError(
                    f"Plan.for_epsilon(batch_size={batch_size}): expected at most the "
                    f"{dataset_size} samples of the data set."
                )
            sampling_rate = batch_size / dataset_size
            steps = epochs * _steps_per_epoch(sampling_rate)
        elif sampling_rate is None or steps is None or by_epochs != (None, None):
            raise ValueError(
                f"Plan.for_epsilon(sampling_rate={sampling_rate!r}, steps={steps!r}, "
                f"batch_size={batch_size!r}, epochs={epochs!r}): expected either "
                f"sampling_rate and steps or batch_size and epochs."
            )
        run: dict[str, Any] = {"sampling_rate": sampling_rate, "steps": steps}
        run |= {"delta": delta, "accountant": accountant}
        noise = accounting.noise_multiplier_for(epsilon=epsilon, **run)
        data: dict[str, Any] = {"dataset_size": dataset_size, "max_norm": max_norm}
        return cls(noise_multiplier=noise, **data, **run)

    def after(self, other: "Plan", steps: int) -> "Plan":
        """Return this plan for a run that has taken `steps` steps under another one.

        Both are one account: `epsilon` includes everything spent under `other`, and
        steps are counted from the start of the run. The new plan ends `steps` steps
        later than this one and continues the state that `other` left, which no other
        plan does. Data sets may differ: the bound holds for each person in any of them.

        Raises:
            ValueError: `other` has fewer steps, or this plan follows another already.

        Example:
            >>> run = {"dataset_size": 1000, "max_norm": 1.0, "delta": 1e-5}
            >>> first = Plan(sampling_rate=0.1, noise_multiplier=2.0, steps=50, **run)
            >>> then = Plan(sampling_rate=0.2, noise_multiplier=4.0, steps=20, **run)
            >>> both = then.after(first, 50)
            >>> both.steps, round(both.epsilon(50), 2), round(both.epsilon(), 2)
            (70, 1.65, 1.9)
        """
        if not isinstance(other, Plan):
            raise TypeError(
                f"Plan.after(other): expected a Plan, got a {type(other).__name__}."
            )
        if self.before is not None:
            raise ValueError(
                "Plan.after(other): expected a plan without another before it, got one "
                "that follows another already. Call it on the original plan."
            )
        [steps] = checks.whole("Plan.after", least=0, steps=steps)
        if steps > other.steps:
            raise ValueError(
                f"Plan.after(other, steps={steps}): expected at most the "
                f"{other.steps} steps of the plan before, got {steps}."
            )
        while steps and steps <= other.earlier_steps:  # none was taken under `other`
            assert other.before is not None
            other = other.before
        if steps == 0:
            return self
        before = replace(other, steps=steps)
        return replace(self, steps=steps + self.steps, before=before)

    @property
    def earlier_steps(self) -> int:
        """The number of steps taken under the plans before this one."""
        return 0 if self.before is None else self.before.steps

    @property
    def digest(self) -> Tensor:
        """The identity of the plan, uint8 `[32]`, which a state carries.

        It is a hash of all fields but steps, delta and accountant, of the plans before,
        and of the cipher that noise comes from.
        """
        return as_digest(self._identity)

    @property
    def _identity(self) -> bytes:
        return self._identity_under(_CIPHER)

    def _identity_under(self, *cipher: str) -> bytes:
        other, before = self.before, None
        if other is not None:
            before = [other._identity_under(*cipher).hex(), other.steps]
        numbers = [self.sampling_rate, self.noise_multiplier, self.max_norm]
        text = json.dumps([MECHANISM, *cipher, self.dataset_size, *numbers, before])
        return hashlib.blake2b(text.encode(), digest_size=len(NO_PLAN)).digest()

    def accounts_for(self, spent: Any) -> bool:
        """Return whether an identity is the plan's, or the one that it once had.

        Until vgrad 0.1 noise came from no cipher: steps after these are other releases.
        """
        return spent in (self._identity, self._identity_under())

    @property
    def expected_batch_size(self) -> float:
        """The mean size of a batch, `sampling_rate * dataset_size`, not rounded."""
        return self.sampling_rate * self.dataset_size

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of a pass over the data, `1 / sampling_rate`, rounded."""
        return _steps_per_epoch(self.sampling_rate)

    def epsilon(self, steps: int | None = None) -> float:
        """Return the epsilon spent after `steps` steps; after all of them by default.

        Steps of plans before are included.

        Raises:
            ValueError: `steps` is above the steps of the plan.
        """
        steps = self.steps if steps is None else steps
        [steps] = checks.whole("Plan.epsilon", least=0, steps=steps)
        if steps > self.steps:
            raise ValueError(
                f"Plan.epsilon(steps={steps}): expected at most the {self.steps} steps "
                f"of the plan, got {steps}. Make a plan with more steps."
            )
        return accounting.composed(self.account(steps), self.delta, self.accountant)

    def account(self, steps: int) -> list[accounting.Steps]:
        """List the steps of each kind among the first `steps` steps."""
        earlier = min(steps, self.earlier_steps)
        account = [] if self.before is None else self.before.account(earlier)
        rate, noise = self.sampling_rate, self.noise_multiplier
        return [*account, accounting.Steps(rate, noise, steps - earlier)]

    def sample(self, *, key: Tensor, step: int) -> Tensor:
        """Draw the Poisson batch of one step. -> indices, int64 [B], B varies."""
        key = self._subkey(key)
        return poisson_sample(self.dataset_size, self.sampling_rate, key=key, step=step)

    def sampler(self, state: Any) -> PoissonBatchSampler:
        """Return the batches from the state's step to the last one, for one pass.

        The state is a `TrainState`, a `PrivateGradients` or anything else with a `key`
        and a `step`; its `plan_digest` is checked if it has one. Steps on other batches
        are outside of the plan, which is not detected. Samples are not checked either:
        pad them to a fixed length, or use a mask, since padding to the longest of a
        batch breaks the bound.

        Raises:
            ValueError: the state has taken more steps than the plan has, or has spent
                under another plan.
        """
        if not (hasattr(state, "key") and hasattr(state, "step")):
            raise TypeError(
                f"Plan.sampler(state): expected a state with a key and a step, such as "
                f"a TrainState, got a {type(state).__name__}. The batch of one step "
                f"alone is plan.sample(key=key, step=step)."
            )
        digest, step = getattr(state, "plan_digest", None), int(state.step)
        check_spent("Plan.sampler(state)", self, digest, step)
        run = self.dataset_size, self.sampling_rate, self.steps
        return PoissonBatchSampler(*run, key=self._subkey(state.key), start=step)

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

        Their sensitivity must be `max_norm / expected_batch_size`. The noise is a
        function of the key, the step, the member and the plan; dtypes are as in
        `add_gaussian_noise`.

        Raises:
            ValueError: the sensitivity is another one (relative tolerance 1e-9), or as
                `add_gaussian_noise`.
        """
        checks.dictionaries("add_gaussian_noise", sums=sums)
        place = {"key": key, "step": step}
        return self.noise(sensitivity, Streams(), **place).added(sums, member)

    def noise(
        self, sensitivity: Sensitivity, streams: Streams, *, key: Tensor, step: int
    ) -> Noise:
        """Return the noise of one step, from streams that the caller holds."""
        check_sensitivity("Plan.add_noise", sensitivity)
        expected = self.max_norm / self.expected_batch_size
        if not math.isclose(sensitivity.value, expected, rel_tol=1e-9):
            raise ValueError(
                f"Plan.add_noise(sensitivity={sensitivity!r}): expected the value "
                f"max_norm / expected_batch_size = {expected!r}, got "
                f"{sensitivity.value!r}. Clip with clipped_grad(loss, "
                f"max_norm=plan.max_norm, normalize_by=plan.expected_batch_size)."
            )
        own: dict[str, Any] = {"key": self._subkey(key), "step": step}
        own |= {"noise_multiplier": self.noise_multiplier, "streams": streams}
        return gaussian_noise("add_gaussian_noise", sensitivity, **own)

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
    ) -> "Audit":
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
        least, and at most half as many as there are parameters.

        Args:
            batch: real samples to add to all batches, `(*batch)` as the step takes
                them. The result is then as private as they are.
            guesses: as of `vgrad.dp.audit.one_run`; an eighth of the canaries each.
            significance: the probability that a true step exceeds its claim.
            seed: draws canaries, coins and noise again, for tests.

        Raises:
            TypeError: the step was made for another plan, or is no private step.
            ValueError: the plan has no noise, or fewer than two steps.

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
        from vgrad.dp.audit import audit_step

        options = {"guesses": guesses, "significance": significance, "seed": seed}
        return audit_step(self, step, state, batch, canaries=canaries, **options)

    def _subkey(self, key: Tensor) -> Tensor:
        # So that two plans never share batches or noise.
        before = () if self.before is None else (self._identity.hex(),)
        numbers = self.sampling_rate, self.noise_multiplier, self.max_norm
        return generators.fold_in(key, self.dataset_size, *numbers, *before)


NO_PLAN = bytes(32)
"""The identity in a state that has spent under no plan."""


def as_digest(identity: bytes) -> Tensor:
    """Return the identity of a plan as a tensor, uint8 `[32]`."""
    return torch.frombuffer(bytearray(identity), dtype=torch.uint8)


def spent_under(plan: Plan, steps: int) -> bytes:
    """Return the identity of the plan of step number `steps`, maybe a plan before."""
    while plan.before is not None and steps <= plan.before.steps:
        plan = plan.before
    return plan._identity if steps else NO_PLAN


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
    follows = before is not None and before.accounts_for(spent)
    early = before is not None and steps < before.steps
    if early or (follows and steps > plan.earlier_steps):
        raise ValueError(
            f"{function}: expected a state that has taken the {plan.earlier_steps} "
            f"steps that plan.after(other, steps) counts, got one that has taken "
            f"{steps}. Pass the number of steps that were taken."
        )
    fresh = spent is None or (before is None and spent == NO_PLAN)
    if follows or fresh or plan.accounts_for(spent):
        return identity
    if spent == NO_PLAN:
        raise ValueError(
            f"{function}: expected a state that has spent under the plan before this "
            f"one, got one that has spent under none. Leave out plan.after."
        )
    raise ValueError(
        f"{function}: expected a state whose private steps were taken under this plan, "
        f"got one that has spent under another, of another dataset_size, "
        f"sampling_rate, noise_multiplier, max_norm or history. "
        f"plan.after(other, steps) makes the plan that accounts for both."
    )


def _steps_per_epoch(rate: float) -> int:
    # Halves stay halves, however the rate was rounded.
    return max(1, round(round(1 / rate, 6)))
