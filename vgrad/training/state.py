"""States of training, and the parts that all steps share. E members."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import count, takewhile
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.dp.noise import NoiseHistory, buffer_like
from vgrad.dp.plan import Plan, check_spent
from vgrad.ensemble.layout import Layout
from vgrad.ensemble.optimizer import of_members
from vgrad.generators import Tag, kept_random_state, secret_key, set_seed, torch_seed
from vgrad.optim.base import GradientTransformation, check_transformation
from vgrad.precision import LossScale, NoOpLossScale, Policy
from vgrad.precision.modules import loss_under
from vgrad.tree import (
    keystr,
    map_tensors,
    map_values,
    to_device,
    tree_map_with_path,
)
from vgrad.typing import Buffers, Params, T, Tree

State = TypeVar("State")
Metrics = dict[str, Any]
"""Tensors by name; with `has_aux` a tree of them under "aux"."""


class Step(Protocol[State]):
    """The type of a training step."""

    def __call__(self, state: State, /, *batch: Tree) -> tuple[State, Metrics]:
        """Return the state after the step, and its metrics."""
        ...


class TrainState(NamedTuple):
    """All that a step changes, a tree of tensors: save it and nothing is lost.

    Attributes:
        params: the parameters.
        buffers: the buffers.
        optimizer: the optimizer's state.
        step: the number of steps taken, int64 without dimensions.
        key: the secret key, uint8 `[32]`. With the step it fixes all that a step draws:
            the batch of `plan.sampler(state)`, noise, dropout. With it the noise can be
            removed: keep it as private as the data.
        plan_digest: a hash of the plan under which private steps were taken, uint8
            `[32]`, zeros before the first one; see `dp.Plan.after`.
        route: the strategy of private steps, by its place in `vgrad.typing.Strategy`:
            int64, 0 until the first batch that is not empty has chosen. A run keeps
            it, and so does one that resumes.
        loss_scale: the loss scale of the next step, a tree of tensors too.
        noise: the `NoiseHistory` of noise that is correlated over steps, which is as
            secret as the key; () before the first step, and of other noise.
        max_norm: the bound of the next step, float64 without dimensions, where the
            plan's adapts; () before the first step, and of other plans.
    """

    params: Params
    buffers: Buffers
    optimizer: Tree
    step: Tensor
    key: Tensor
    plan_digest: Tensor
    route: Tensor
    loss_scale: LossScale = NoOpLossScale()
    noise: Tree = ()
    max_norm: Tree = ()

    def __repr__(self) -> str:
        return redacted(self)

    @classmethod
    def create(
        cls,
        tx: GradientTransformation,
        params: Params,
        buffers: Buffers,
        *,
        seed: int | None = None,
        loss_scale: LossScale | None = None,
    ) -> "TrainState":
        """Start a run with a new secret key from the operating system.

        The state holds detached tensors, not copies, which only donated steps change.
        With a `seed` the key is a hash of it: a guess of the seed gives the noise,
        which voids every claim of privacy.

        `loss_scale` is as in `train_step`, without one the state takes the step's own.

        Example:
            >>> from vgrad import optim
            >>> TrainState.create(optim.sgd(0.1), {"w": torch.zeros(2)}, {}).step
            tensor(0)
        """
        check_transformation("TrainState.create", tx)
        _check_scale("TrainState.create", loss_scale)
        params, buffers = (map_values(Tensor.detach, x) for x in (params, buffers))
        device = device_of(params)
        scale = NoOpLossScale() if loss_scale is None else to_device(loss_scale, device)
        key = secret_key(seed=seed)
        start, no_plan = torch.tensor(0), torch.zeros_like(key)
        fields = params, buffers, tx.init(params), start, key, no_plan, start.clone()
        return cls(*fields, scale)

    def fork(self, plan: Plan | None = None) -> "TrainState":
        """Return the state of another run, with a new secret key.

        A state that was copied or saved repeats its steps: that is how a run resumes.
        If two runs resume from it and differ in anything (data, loss, optimizer), all
        but one need a fork. Otherwise both add the same noise to different sums, and
        the difference of their releases shows the private data. The steps taken and
        their plan stay in the account of each of them.

        Noise that is correlated over steps cannot go on under another key. A fork of
        such a run takes the `plan` of its next steps, made by `Plan.after` for the
        steps taken, with which other noise begins.

        Raises:
            ValueError: the plan does not begin after the steps taken, or there is none
                and the noise is correlated.

        Example:
            >>> from vgrad import optim
            >>> state = TrainState.create(optim.sgd(0.1), {"w": torch.zeros(2)}, {})
            >>> torch.equal(state.fork().key, state.key)
            False
        """
        function, steps = "TrainState.fork(plan)", int(self.step)
        if plan is not None:
            check_spent(function, plan, self.plan_digest, steps)
        begins = plan is not None and steps == plan.earlier_steps
        if not begins and (plan is not None or self.noise):
            got = "none" if plan is None else f"one after {plan.earlier_steps} steps"
            raise ValueError(
                f"{function}: expected a plan that begins after the {steps} steps "
                f"taken, since correlated noise cannot go on under another key, got "
                f"{got}. Make it with plan.after(other, {steps})."
            )
        return self._replace(key=secret_key(), noise=())


class EnsembleState(NamedTuple):
    """All that a step changes, a tree of tensors: save it and nothing is lost.

    Attributes:
        params: the parameters, `[E, ...]`, shared ones without member axis.
        buffers: the buffers, likewise.
        optimizer: the optimizer's state, of each member and of their shared entries.
        step: the number of steps taken, int64 without dimensions.
        key: the secret key, as in `TrainState`: all that a step draws follows from it.
        loss_scale: each member's loss scale of the next step.
        active: which members are trained, bool `[E]`. The others stay as they are; set
            it with `state._replace(active=...)`.
    """

    params: Params
    buffers: Buffers
    optimizer: Tree
    step: Tensor
    key: Tensor
    loss_scale: LossScale
    active: Tensor

    without_members = ("step", "key")

    def __repr__(self) -> str:
        return redacted(self)

    @classmethod
    def create(
        cls,
        tx: GradientTransformation,
        params: Params,
        buffers: Buffers,
        *,
        shared: Patterns = (),
        seed: int | None = None,
        loss_scale: LossScale | None = None,
    ) -> "EnsembleState":
        """Start a run of all members, every one of them active.

        `tx` is a transformation of one member, or the result of `for_members`. The
        state holds detached tensors, not copies, which only donated steps change.
        `shared` is as in `ensemble_grad`, `loss_scale` as in `train_step`.

        Example:
            >>> from vgrad import optim
            >>> params = {"w": torch.zeros(3, 2)}
            >>> state = EnsembleState.create(optim.sgd(0.1), params, {})
            >>> state.active
            tensor([True, True, True])
        """
        function = "EnsembleState.create"
        count = Layout.of(function, params, buffers, shared).members
        tx = of_members(function, tx, shared)
        start = TrainState.create(tx, params, buffers, seed=seed, loss_scale=loss_scale)
        return cls(
            *start[:5],  # all but the digest of a plan and the route
            loss_scale=for_each(start.loss_scale, count),
            active=torch.ones(count, dtype=torch.bool, device=device_of(params)),
        )

    def fork(self) -> "EnsembleState":
        """Return the state with a new secret key, see `TrainState.fork`."""
        return self._replace(key=secret_key())


def with_history(like: T, saved: Collection[str]) -> T:
    """Return a tree whose states have a history and a bound where saved ones had them.

    `saved` holds names as `tree.state_dict` makes them.
    """

    def fitted(path: Any, state: Any) -> Any:
        if not isinstance(state, TrainState):
            return state
        place, noise = f"{keystr(path)}.noise", ()
        if f"{place}.step" in saved:
            prefixes = (f"{place}.buffers[{i}][" for i in count())
            present = takewhile(
                lambda prefix: any(name.startswith(prefix) for name in saved), prefixes
            )
            buffers = tuple(map_values(buffer_like, state.params) for _ in present)
            noise = NoiseHistory(torch.tensor(0), torch.zeros_like(state.key), buffers)
        bound: Tree = ()
        if f"{keystr(path)}.max_norm" in saved:
            device = device_of(state.params)
            bound = torch.zeros((), dtype=torch.float64, device=device)
        return state._replace(noise=noise, max_norm=bound)

    return tree_map_with_path(fitted, like, is_leaf=lambda x: isinstance(x, TrainState))


def check_state(function: str, state: Any, kind: type) -> None:
    """Refuse another object than a state, such as a batch without one."""
    if not isinstance(state, kind):
        raise TypeError(
            f"{function}(state, *batch): expected a {kind.__name__}, as "
            f"{kind.__name__}.create makes it, got a {type(state).__name__}. A step "
            f"takes the state and then the batch, and returns the next state."
        )


def redacted(state: Any) -> str:
    """Print a state without its secrets, so that no log or traceback holds them."""
    secret = {"key": "<secret>", "plan_digest": "<digest>"}
    fields = (f"{n}={secret.get(n, value)}" for n, value in state._asdict().items())
    return f"{type(state).__name__}({', '.join(fields)})"


def device_of(params: Params) -> torch.device:
    """Return the device of the parameters."""
    if not params:
        raise ValueError(
            "TrainState(params={}): expected at least one parameter, got none. Are all "
            "of them frozen?"
        )
    return next(iter(params.values())).device


# Parts of a step.


def initial_loss_scale(
    function: str,
    loss_scale: LossScale | None,
    policy: Policy | str | None,
    for_float16: LossScale,
) -> LossScale | None:
    """Return the scale of the caller, or the default of a policy that needs one."""
    _check_scale(function, loss_scale)
    if loss_scale is not None or policy is None:
        return loss_scale
    low = Policy.parse(policy).compute_dtype == torch.float16
    return for_float16 if low else None


def _check_scale(function: str, loss_scale: LossScale | None) -> None:
    if loss_scale is not None and not hasattr(loss_scale, "adjust"):
        raise TypeError(
            f"{function}(loss_scale={checks.shown(loss_scale)}): expected a loss "
            f"scale such as precision.DynamicLossScale(), got a "
            f"{type(loss_scale).__name__}."
        )


def for_each(scale: LossScale, count: int) -> LossScale:
    """Return a scale with a number for every member."""
    if not is_scaled(scale):
        return scale
    return map_tensors(lambda x: x if x.ndim else x.expand(count).contiguous(), scale)


def is_scaled(scale: LossScale) -> bool:
    """Return whether a loss is multiplied by this scale at all."""
    return not isinstance(scale, NoOpLossScale)


def with_policy(policy: Policy | str | None, loss: Any) -> Any:
    """Return a loss that runs under a policy, as does its `.with_buffers`."""
    if policy is None:
        return loss
    run = loss_under(policy, loss)
    if hasattr(loss, "with_buffers"):
        vars(run)["with_buffers"] = loss_under(policy, loss.with_buffers)
    return run


@contextmanager
def seeded_from(state: Any, *tags: Tag) -> Iterator[None]:
    """Seed torch's generators from the state's key and step, and restore them.

    `tags` separate processes that draw at one step of one key. All threads share the
    generators: steps in several threads wait for each other, and a thread that draws
    meanwhile changes the numbers of the step.
    """
    seed = torch_seed(state.key, "loss", int(state.step), *tags)
    with kept_random_state(state.params.values()):
        set_seed(seed, state.params.values())
        yield
