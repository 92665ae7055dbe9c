"""Training steps of all members at once: `step(state, *batch) -> (state, metrics)`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks, optim
from vgrad.dtypes import widened
from vgrad.ensemble.axes import members, shared_names
from vgrad.ensemble.execution import Call, InDims, Randomness, Strategy
from vgrad.ensemble.gradients import (
    EnsembleGradFn,
    EnsembleGrads,
    check_loss,
    ensemble_grad,
)
from vgrad.ensemble.optimizer import MembersState, of_members
from vgrad.generators import secret_key
from vgrad.optim.base import GradientTransformation
from vgrad.precision import DynamicLossScale, LossScale, NoOpLossScale, Policy
from vgrad.precision.modules import loss_under
from vgrad.training.steps import (
    TrainState,
    check_scale,
    device_of,
    in_float16,
    kept_dtypes,
    own_randomness,
)
from vgrad.tree import to_device, tree_map, tree_map_only
from vgrad.typing import BatchLossFn, Buffers, Params, Tree

Metrics = dict[str, Tensor]
Step = Callable[..., tuple["EnsembleState", Metrics]]


class EnsembleState(NamedTuple):
    """All that a step changes, a tree of tensors: save it and nothing is lost.

    Attributes:
        params: the parameters, `[E, ...]`, those that are shared without member axis.
        buffers: the buffers, likewise.
        optimizer: the optimizer's state, of each member and of what they share.
        step: how many steps were taken, int64 without dimensions.
        key: the secret key, as in `TrainState`: all that a step draws follows from it.
        loss_scale: each member's loss scale of the next step.
        active: which members are trained, bool `[E]`. The others stay as they are; put
            your own with `state._replace(active=...)`.
    """

    params: Params
    buffers: Buffers
    optimizer: Tree
    step: Tensor
    key: Tensor
    loss_scale: LossScale
    active: Tensor

    @classmethod
    def create(
        cls,
        tx: GradientTransformation,
        params: Params,
        buffers: Buffers,
        *,
        shared: Sequence[str] = (),
        seed: int | None = None,
        loss_scale: LossScale | None = None,
    ) -> "EnsembleState":
        """Start a run of all members, every one of them active.

        `tx` is a transformation of one member, or what `for_members` returns. The state
        holds detached tensors, not copies, which only donated steps change.

        Example:
            >>> from vgrad import optim
            >>> params = {"w": torch.zeros(3, 2)}
            >>> state = EnsembleState.create(optim.sgd(0.1), params, {})
            >>> state.active
            tensor([True, True, True])
        """
        count = members(params, buffers, shared)
        tx = of_members("EnsembleState.create", tx, shared)
        start = TrainState.create(tx, params, buffers, seed=seed, loss_scale=loss_scale)
        device = next(iter(params.values())).device
        return cls(
            *start[:-1],
            _of_each(start.loss_scale, count),
            torch.ones(count, dtype=torch.bool, device=device),
        )

    def fork(self) -> "EnsembleState":
        """Return the same state with a new secret key, as `TrainState.fork` does."""
        return self._replace(key=secret_key())


def ensemble_train_step(
    loss: BatchLossFn,
    tx: GradientTransformation,
    *,
    in_dims: InDims = None,
    randomness: Randomness = "different",
    strategy: Strategy = "auto",
    shared: Sequence[str] = (),
    policy: Policy | str | None = None,
    loss_scale: LossScale | None = None,
    donate: bool = False,
) -> Step:
    """Make one step of all members: gradient of each one's loss, optimizer, buffers.

    `(state, *batch) -> (state, metrics)` with `loss` `[E]` and `skipped` `[E]`. `tx` is
    a transformation of one member, or what `for_members` returns: there learning rates
    and all other numbers may differ between members. Options are those of
    `ensemble_grad`; `policy` and `loss_scale` those of `train_step`, with a scale (and,
    if there is one, a metric `loss_scale`) for every member.

    A member that is not active, or whose gradients are not finite, keeps parameters,
    optimizer and buffers as they were, and does so alone. What members share gets the
    sum of the active members' gradients, and is skipped when that is not finite; then
    the loss of a member that is not active is not computed, and NaN. Transformations
    that mend gradients which are not finite, such as `zero_nans`, thus never see any.

    With `donate=True` the state that a step is given must not be used again: its memory
    may be written to, which saves time for models with many parameters, as in
    `optim.step`.

    Raises:
        ValueError: parameters are shared and losses scaled, which would weigh members
            by their scales; else as `ensemble_grad`.

    Example:
        >>> import vgrad
        >>> models = [torch.nn.Linear(2, 1) for _ in range(3)]
        >>> fmodel, params, buffers = vgrad.stack(models)
        >>> loss = vgrad.batch_loss(fmodel, torch.nn.functional.mse_loss)
        >>> rates = torch.tensor([0.01, 0.1, 1.0])
        >>> tx = vgrad.for_members(vgrad.optim.sgd, lr=rates)
        >>> state = EnsembleState.create(tx, params, buffers)
        >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
        >>> state, metrics = ensemble_train_step(loss, tx)(state, x, y)
        >>> metrics["loss"].shape
        torch.Size([3])
    """
    check_loss("ensemble_train_step", loss)
    check_scale("ensemble_train_step", loss_scale)
    if loss_scale is None and in_float16(policy):
        loss_scale = DynamicLossScale()
    tx = of_members("ensemble_train_step", tx, shared)
    if policy is not None:
        loss = _Under(policy, loss)
    options: dict[str, Any] = {"in_dims": in_dims, "randomness": randomness}
    compute = ensemble_grad(loss, strategy=strategy, shared=shared, **options)

    def step(state: EnsembleState, /, *batch: Tree) -> tuple[EnsembleState, Metrics]:
        # What stops members early may count on the CPU.
        active = state.active.to(device_of(state.params))
        state = state._replace(active=active)
        scale = state.loss_scale
        if loss_scale is not None and isinstance(scale, NoOpLossScale):
            scale = to_device(loss_scale, state.active.device)
            scale = _of_each(scale, len(state.active))
        scaled = not isinstance(scale, NoOpLossScale)
        whole = shared_names([*state.params, *state.buffers], shared)
        if scaled and whole & state.params.keys():
            raise ValueError(
                f"ensemble_train_step(shared={list(shared)!r}, loss_scale): expected "
                f"one of the two, got both: each member has a scale of its own. "
                f"Compute in bfloat16, which needs no scale."
            )
        with torch.no_grad(), own_randomness(state):
            given = (state.params, state.buffers, *batch)
            if scaled:
                result = compute(*given, loss_scale=scale.loss_scale)
                unscaled = torch.vmap(lambda scale, grads: scale.unscale(grads))
                result = result._replace(grads=unscaled(scale, result.grads))
            elif whole & state.params.keys():
                result = _of_active(compute, state.active, given, in_dims, shared)
            else:
                result = compute(*given)
            grads = result.grads
            own = [grad for name, grad in grads.items() if name not in whole]
            finite = _finite(own, state.active)
            trained = state.active & finite
            # Looking at values costs nothing on a CPU, and choosing a pass over all.
            everyone = (
                trained.device.type == "cpu" and not whole and bool(trained.all())
            )
            given = (state.optimizer, state.params)
            params, optimizer = optim.step(
                tx, grads, *given, donate=donate and everyone
            )
            buffers = kept_dtypes(result.buffers, state.buffers)
            if not everyone:
                common = [grads[name].isfinite().all() for name in whole & grads.keys()]
                together = torch.stack([state.active.any(), *common]).all()

                def chosen(new: dict, old: dict) -> dict:
                    return {
                        n: torch.where(
                            together if n in whole else _aligned(trained, new[n]),
                            new[n],
                            old[n],
                        )
                        for n in new
                    }

                params = chosen(params, state.params)
                buffers = chosen(buffers, state.buffers)
                optimizer = MembersState(
                    _where(trained, optimizer.members, state.optimizer.members),
                    _where(together, optimizer.shared, state.optimizer.shared),
                )
            metrics = {
                "loss": widened(result.losses),
                "skipped": (state.active & ~finite).float(),
            }
            if scaled:
                metrics["loss_scale"] = torch.as_tensor(scale.loss_scale).clone()
                adjusted = torch.vmap(lambda scale, ok: scale.adjust(ok))(scale, finite)
                scale = _where(state.active, adjusted, scale)
        new = EnsembleState(
            params,
            buffers,
            optimizer,
            state.step + 1,
            state.key,
            scale,
            state.active,
        )
        return new, metrics

    return step


class EarlyStopping(NamedTuple):
    """Which members no longer improve; a tree of tensors, one entry for each member.

    Attributes:
        best: each member's best value so far, `[E]`.
        waited: how many values in a row were no better, `[E]`.
        patience: after how many such values a member stops.
        min_delta: how much lower a value has to be to count as better.

    Example:
        >>> stopping = EarlyStopping.create(2, patience=1)
        >>> for values in ([1.0, 1.0], [0.5, 1.0]):
        ...     stopping = stopping.update(torch.tensor(values))
        >>> stopping.active
        tensor([ True, False])
    """

    best: Tensor
    waited: Tensor
    patience: Tensor
    min_delta: Tensor

    @classmethod
    def create(
        cls, members: int, *, patience: int, min_delta: float = 0.0
    ) -> "EarlyStopping":
        """Start with nothing seen; a lower value is a better one."""
        checks.whole("EarlyStopping.create", least=1, members=members)
        checks.whole("EarlyStopping.create", least=1, patience=patience)
        checks.non_negative("EarlyStopping.create", min_delta=min_delta)
        return cls(
            torch.full((members,), torch.inf, dtype=torch.float64),
            torch.zeros(members, dtype=torch.int64),
            torch.tensor(patience),
            torch.tensor(min_delta, dtype=torch.float64),
        )

    def update(self, values: Tensor) -> "EarlyStopping":
        """Take each member's value, `[E]`; NaN is never better, stopped stays stopped.

        The best parameters are not kept: where `waited` is zero, save them.
        """
        if values.shape != self.best.shape:
            raise ValueError(
                f"EarlyStopping.update(values of shape {tuple(values.shape)}): "
                f"expected one value a member, {tuple(self.best.shape)}."
            )
        values = values.to(self.best)
        better = self.active & (values < self.best - self.min_delta)
        return self._replace(
            best=torch.where(better, values, self.best),
            waited=torch.where(better, 0, self.waited + 1),
        )

    @property
    def active(self) -> Tensor:
        """Which members go on, bool `[E]`: what `EnsembleState.active` takes."""
        return self.waited < self.patience


class _Under:
    """A loss under a policy, with its buffers."""

    def __init__(self, policy: Policy | str, loss: BatchLossFn) -> None:
        self._run = loss_under(policy, loss)
        if hasattr(loss, "with_buffers"):
            self.with_buffers = loss_under(policy, loss.with_buffers)

    def __call__(self, params: Params, buffers: Buffers, /, *batch: Tree) -> Tensor:
        return self._run(params, buffers, *batch)


def _of_active(
    compute: EnsembleGradFn,
    active: Tensor,
    given: tuple,
    in_dims: InDims,
    shared: Sequence[str],
) -> EnsembleGrads:
    """Differentiate; members that are not active give shared parameters nothing.

    An active one stands in for them: zero times their NaN would still be a NaN.
    """
    name, (params, buffers, *batch) = "ensemble_train_step", given
    call = Call(name, params, buffers, tuple(batch), in_dims=in_dims, shared=shared)
    rows = torch.arange(call.members, device=active.device)
    rows = torch.where(active, rows, active.int().argmax())
    result = compute(*call.instead(rows), loss_scale=active)
    return result._replace(losses=result.losses.masked_fill(~active, torch.nan))


def _of_each(scale: LossScale, count: int) -> LossScale:
    """Give every member a scale of its own."""

    def expanded(leaf: Tensor) -> Tensor:
        return leaf.expand(count, *leaf.shape).contiguous() if leaf.ndim == 0 else leaf

    return tree_map_only(Tensor, expanded, scale)


def _finite(grads: Sequence[Tensor], like: Tensor) -> Tensor:
    """Tell which members' gradients are finite, `[E]`, without a device sync."""
    finite = torch.ones_like(like)
    if like.device.type == "cpu":
        # A sum that is finite says so of all it is of, in a fraction of the time.
        if all(bool(grad.sum().isfinite()) for grad in grads):
            return finite
    for grad in grads:
        each = grad.isfinite().reshape(len(finite), grad[0].numel())
        finite = finite & each.all(1)
    return finite


def _aligned(mask: Tensor, like: Tensor) -> Tensor:
    """Give a mask of members, `[E]`, the dimensions of `[E, ...]`."""
    return mask.reshape(-1, *[1] * (like.ndim - 1))


def _where(mask: Tensor, new: Tree, old: Tree) -> Tree:
    """Choose between trees by member, or as a whole if the mask is a scalar."""

    def choose(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(_aligned(mask, new) if mask.ndim else mask, new, old)

    return tree_map(choose, new, old)
