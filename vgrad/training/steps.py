"""Training steps: `step(state, *batch) -> (new state, metrics)`.

A step is a source of gradients and an optimizer: `train_step` has `BatchSource` or
`SampleSource`, `private_step` has `LogicalBatchSource`, `ensemble_train_step` has
`MemberSource`. Members that rest (`EnsembleState.active` is false) and members whose
gradients are not finite keep their old values, running statistics of batch norm
included, which are buffers of each member. E members.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Generic, NamedTuple, Unpack

import torch
from torch import Tensor

from vgrad import batches
from vgrad.conditions import surely
from vgrad.devices import is_host
from vgrad.dp.plan import Plan, check_spent
from vgrad.dp.private_gradients import (
    PrivateSource,
    clipped_sums,
    metrics_of,
    route_of,
)
from vgrad.dp.units import UnitLoss, check_units
from vgrad.ensemble.execution import run_eager
from vgrad.ensemble.gradients import EnsembleGradFn, ensemble_grad, returning_buffers
from vgrad.ensemble.layout import (
    EnsembleOptions,
    shared_names,
    shows_member_options,
)
from vgrad.ensemble.optimizer import MembersState, of_members
from vgrad.functional.losses import SampleLoss, check_loss, gradient
from vgrad.generators import Tag, from_bytes
from vgrad.optim.base import GradientTransformation, check_transformation
from vgrad.optim.private import has_deviation, scales_of, stepped, uses_of_noise
from vgrad.overlaps import disjoint
from vgrad.persample.engine import advanced, check_options
from vgrad.persample.grad import weighted_grad
from vgrad.precision import (
    DynamicLossScale,
    LossScale,
    Policy,
    StaticLossScale,
    all_finite,
    select_tree,
)
from vgrad.precision.autocasting import AutocastMode
from vgrad.torch_private import modes
from vgrad.training import saved
from vgrad.training.state import (
    EnsembleState,
    Metrics,
    State,
    Step,
    TrainState,
    check_state,
    device_of,
    for_each,
    initial_loss_scale,
    is_scaled,
    seeded_from,
    with_policy,
)
from vgrad.tree import map_tensors, map_values, to_device, tree_map, widened
from vgrad.typing import (
    BatchLossFn,
    Buffers,
    ChunkSize,
    LossFn,
    Params,
    Passes,
    Randomness,
    Strategy,
    Tree,
)


class Gradients(NamedTuple):
    """The result of a source of gradients."""

    grads: Params
    loss: Tensor  # [], or of each member [E]
    buffers: Buffers  # of the next state
    aux: Tree
    # Whether the step is taken, [], or by each member [E] and then by the entries that
    # they share; empty where no step is skipped.
    masks: tuple[Tensor, ...]
    metrics: Metrics  # all but the loss and aux
    changes: dict[str, Any]  # other fields of the next state
    step: Callable | None = None  # with noise in front, as `stepped` is without


class StepReducer:
    """The processes that take a step together: by default there is one."""

    @contextmanager
    def together(
        self, step: "TrainingStep", state: Any, batch: tuple
    ) -> Iterator[tuple["TrainingStep", tuple[Tag, ...]]]:
        """Yield the step of this process, and tags of its random numbers."""
        check_state(f"{step.name}(...)", state, step.source.kind)
        yield step, ()

    def of(self, step: "TrainingStep") -> "StepReducer":
        """Return the processes of another step."""
        return self

    def agreed(self, key: Tensor) -> Tensor:
        """Return one key for all processes."""
        return key

    def share(self, batch: Tree) -> Tree:
        """Return the samples of this process."""
        return batch

    def reloaded(self, state: Any) -> Any:
        """Save a state, and load it."""
        with TemporaryDirectory() as parent:
            saved.save(Path(parent, "state"), state)
            return saved.load(Path(parent, "state"), state)

    def execution(self, captures: Any) -> Any:
        """Return how a compiled step runs."""
        return captures

    def reduced(
        self, step: "TrainingStep", compute: Callable[[], Gradients], state: Any
    ) -> Gradients:
        """Return the gradients for all processes."""
        return compute()


ONE_PROCESS = StepReducer()


@dataclass(frozen=True, eq=False)
class TrainingStep(Generic[State]):
    """A step: gradients, an optimizer, and the old values where a step is skipped."""

    name: str
    source: "Source"
    tx: GradientTransformation
    first_scale: LossScale | None  # the loss scale of a state that has none yet
    donate: bool
    has_aux: bool
    execute: Any = run_eager  # runs functions of tensors, or captures of them
    reduce: StepReducer = ONE_PROCESS

    def __repr__(self) -> str:
        plan = getattr(self.source, "plan", None)
        captured = "" if self.execute is run_eager else ", captured"
        return f"<{self.name}(loss, tx{f', {plan!r}' if plan else ''}){captured}>"

    def reports(self) -> tuple[Any, ...]:
        """Return a report of every capture; none in eager mode."""
        return getattr(self.execute, "reports", tuple)()

    def clear(self) -> None:
        """Forget all captures; the next call of each kind captures again."""
        getattr(self.execute, "clear", tuple)()

    @property
    def explain(self) -> Callable[..., Any]:
        """Explains the captures of a step, which has no report of eager mode."""
        explanation = self.execute.explanation  # absent in eager mode
        return lambda *_: explanation(None)

    def __call__(self, state: State, /, *batch: Tree) -> tuple[State, Metrics]:
        """Take a step."""
        old: Any = state
        with self.reduce.together(self, old, batch) as (step, tags):
            scale, device = old.loss_scale, device_of(old.params)
            if self.first_scale is not None and not is_scaled(scale):
                scale = to_device(self.first_scale, device)
            inputs = old._replace(loss_scale=scale)
            if isinstance(old, EnsembleState):
                inputs = old._replace(
                    loss_scale=for_each(scale, len(old.active)),
                    active=old.active.to(device),  # early stopping may count on the CPU
                )
            # A graph can neither write into the state nor reach other processes.
            one_graph = step.source.in_one_graph and not step.donate
            with torch.no_grad(), seeded_from(old, *tags):
                if one_graph and step.reduce is ONE_PROCESS:
                    arguments = run_eager, _without_key(inputs), batch
                    new, metrics = step.execute(step._advance, *arguments)
                else:
                    new, metrics = step._advance(step.execute, inputs, batch)
        return new._replace(key=old.key, step=old.step + 1), metrics

    def _advance(
        self, execute: Callable, state: Any, batch: tuple
    ) -> tuple[Any, Metrics]:
        compute = partial(self.source, state, batch)
        if self.source.transform is None:  # it is a function of tensors
            inputs = _without_key(state)._replace(optimizer=())
            compute = partial(execute, self.source, inputs, batch)
        result = self.reduce.reduced(self, compute, state)
        all_taken = all(map(surely, result.masks))  # to choose is a pass over all
        donate = self.donate and all_taken and self.tx.donated is not None
        loss, aux = result.loss, result.aux
        # A buffer, which stays, may have the memory of a parameter.
        if donate and result.buffers and not modes.inside_transform():
            memory = [*state.params.values(), *result.buffers.values()]
            donate = torch.compiler.is_compiling() or disjoint(memory)
        if donate:
            loss, aux = map_tensors(Tensor.clone, (loss, aux))  # they may be parameters
        arguments = self.tx, result.grads, state.optimizer, state.params
        update = result.step or stepped
        params, optimizer, more = update(execute, *arguments, donate=donate)
        new, changes = (params, result.buffers, optimizer), {**result.changes, **more}
        if not all_taken:
            new = self.source.selected(result.masks, new, state)
        fields = dict(zip(("params", "buffers", "optimizer"), new, strict=True))
        metrics = {"loss": loss, **result.metrics}
        if self.has_aux:
            metrics["aux"] = aux
        return state._replace(**fields, **changes), metrics


def _without_key(state: Any) -> Any:
    """Leave out the key and others that no function of tensors needs."""
    names = {"key", "step", "plan_digest", "route", "noise"}.intersection(state._fields)
    return state._replace(**dict.fromkeys(names))


# Sources of gradients: `(state, batch) -> Gradients`.


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """How a step computes gradients."""

    kind: ClassVar[type] = TrainState
    in_one_graph: ClassVar = False  # together with the optimizer, where there is one
    transform: Any = None  # a per-sample transform, if that computes them

    def __call__(self, state: Any, batch: tuple) -> Gradients:
        """Compute gradients."""
        raise NotImplementedError

    def selected(self, masks: tuple[Tensor, ...], new: tuple, old: Any) -> tuple:
        """Return parameters, buffers and optimizer, the old ones of a skipped step."""
        [finite] = masks
        return select_tree(finite, new, tuple(old[:3]))


def mean_gradients(
    state: TrainState, grads: Params, loss: Tensor, buffers: Buffers, aux: Tree = ()
) -> Gradients:
    """Return gradients of a plain step, which is skipped if a scaled one overflows."""
    scale, loss = state.loss_scale, widened(loss)
    if not is_scaled(scale):
        return Gradients(grads, loss, buffers, aux, (), {}, {})
    finite, factor = all_finite(grads), torch.as_tensor(scale.loss_scale)
    metrics = {"loss_scale": factor, "skipped": (~finite).float()}
    changes = {"loss_scale": scale.adjust(finite)}
    return Gradients(grads, loss, buffers, aux, (finite,), metrics, changes)


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchSource(Source):
    """Gradients of the loss of a batch, in a forward and a backward pass."""

    loss: Callable[..., Any]  # returns (loss, aux) and new buffers
    name: ClassVar = "train_step"

    def __call__(self, state: TrainState, batch: tuple) -> Gradients:
        """Compute the gradients of a batch."""
        scale = state.loss_scale

        def of_params(params: Params) -> tuple[Tensor, tuple]:
            with AutocastMode(params.values()):
                (value, aux), new = self.loss(params, state.buffers, *batch)
            return scale.scale(value), (value, aux, new)

        with torch.no_grad():
            grads, (value, aux, new), _ = gradient(of_params, state.params)
            aux, value = map_tensors(Tensor.detach, (aux, value))
            new = _kept_dtypes(new, state.buffers)
            return mean_gradients(state, scale.unscale(grads), value, new, aux)


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleSource(Source):
    """Means of the gradients of samples, which `transform` sums; its aux are losses."""

    def __call__(self, state: TrainState, batch: tuple) -> Gradients:
        """Compute the mean of the gradients of samples."""
        samples, compute = batches.read("train_step", batch), self.transform
        if is_scaled(state.loss_scale):
            compute = compute.with_loss_scale(state.loss_scale)
        ones = torch.ones(samples.size, device=samples.tensors[0].device)
        sums, losses = compute(ones, state.params, state.buffers, *batch)
        if losses is None:
            raise ValueError(
                "train_step(loss)(state, *batch): expected a sample at least, got a "
                "batch of none, which has no mean. Skip the step."
            )
        grads = map_values(lambda total: total / len(losses), sums)
        buffers = advanced(compute.options, state.params, state.buffers, batch)
        return mean_gradients(state, grads, widened(losses).mean(), buffers)


@dataclass(frozen=True, eq=False, kw_only=True)
class LogicalBatchSource(PrivateSource, Source):
    """Private gradients of logical batches; data skip no step."""

    has_aux: bool
    samples_per_unit: int | None  # of the batches
    start: int = 0  # samples of other processes that come before these

    def __call__(self, state: TrainState, batch: tuple) -> Gradients:
        """Compute the clipped sum of a batch, and the noise for it."""
        function, plan, steps = "private_step(plan)(state)", self.plan, int(state.step)
        identity = check_spent(function, plan, state.plan_digest, steps)
        if not 0 <= steps < plan.steps:
            raise RuntimeError(
                f"{function}: expected a state of fewer than the {plan.steps} steps "
                f"that the plan accounts for, got {steps}."
            )
        if self.samples_per_unit is not None:
            check_units(function, batch, self.samples_per_unit)
        size = batches.read("private_step", batch).size
        if size > (limit := plan.largest_batch or plan.dataset_size):
            raise ValueError(
                f"private_step(plan)(state, *batch): expected a batch of at most the "
                f"{limit} samples that a batch of the plan can have, got {size}. Draw "
                f"batches with plan.sampler(state)."
            )
        scale = state.loss_scale
        place = state.max_norm, state.params, steps, int(state.route)
        compute: Any = self.at(*place)
        if is_scaled(scale):
            compute = compute.with_loss_scale(scale)
        if uses := uses_of_noise(state.optimizer):
            if plan.noise.correlated or plan.scales(state.params):
                raise ValueError(
                    f"private_step(tx, plan): expected independent noise of one "
                    f"deviation for adam_bc or scale_then_privatize, whose rules hold "
                    f"for no other, got {plan.noise.scheme} noise and max_norm="
                    f"{plan.max_norm}. Take another optimizer, such as adam."
                )
            compute = compute.with_scales(scales_of(uses))
        places = range(self.start, self.start + size)
        arguments = compute, places, state.key, steps, state.params, state.buffers
        result, keyed = self.computed(*arguments, *batch)
        result, aux = result if self.has_aux else (result, None)
        buffers = advanced(compute.options, state.params, state.buffers, batch)
        arguments = compute, result, state.params, state.noise
        release = self.released(*arguments, keyed=keyed, key=state.key, step=steps)
        metrics: Metrics = metrics_of(result)
        changes = {
            "plan_digest": from_bytes(identity).to(state.plan_digest.device),
            "route": torch.tensor(route_of(compute)),
            "loss_scale": scale.adjust(result.nonfinite == 0),
            "max_norm": release.max_norm,
        }
        if uses:
            release = release._replace(scales=scales_of(uses))
        fields = release.sums, metrics.pop("loss"), buffers, aux, (), metrics, changes
        deviates = any(map(has_deviation, uses))
        return Gradients(*fields, partial(release.step, deviates=deviates))


@dataclass(frozen=True, eq=False, kw_only=True)
class MemberSource(Source):
    """Gradients of every member's loss; members that rest count nowhere."""

    gradient: EnsembleGradFn
    name: ClassVar = "ensemble_train_step"
    kind: ClassVar = EnsembleState
    in_one_graph: ClassVar = True

    def __call__(self, state: EnsembleState, batch: tuple) -> Gradients:
        """Compute the gradients of all members."""
        scale, active, gradient = state.loss_scale, state.active, self.gradient
        shared, scaled = self.shared_names(state), is_scaled(scale)
        shares = not shared.isdisjoint(state.params)
        if scaled and shares:
            raise ValueError(
                f"ensemble_train_step(shared={list(gradient.options.shared)!r}, "
                f"loss_scale): expected one of the two, got both: each member has a "
                f"scale of its own. Compute in bfloat16, which needs no scale."
            )
        arguments, weights = (state.params, state.buffers, *batch), scale.loss_scale
        if shares:
            (gradient, arguments), weights = self._with_active(state, batch), active
        result: Any = gradient(*arguments, loss_scale=weights)
        (grads, losses, buffers), aux = result if gradient.has_aux else (result, None)
        if scaled:
            grads = torch.vmap(lambda scale, grads: scale.unscale(grads))(scale, grads)
        if shares:
            losses = losses.masked_fill(~active, torch.nan)
        with torch.no_grad():
            buffers = _kept_dtypes(buffers, state.buffers)
            unshared = [value for name, value in grads.items() if name not in shared]
            finite = _members_finite(unshared, active)
            masks = (active & finite,)
            if shared:
                masks += (self.together(state, grads, active.any()),)
            metrics: Metrics = {"skipped": (active & ~finite).float()}
            changes = {}
            if scaled:
                metrics["loss_scale"] = torch.as_tensor(scale.loss_scale).clone()
                adjusted = torch.vmap(lambda scale, ok: scale.adjust(ok))(scale, finite)
                changes["loss_scale"] = _select_members(active, adjusted, scale)
        return Gradients(grads, widened(losses), buffers, aux, masks, metrics, changes)

    def shared_names(self, state: EnsembleState) -> frozenset[str]:
        """Return the names of the entries without a member axis."""
        patterns = self.gradient.options.shared
        names = {**state.params, **state.buffers} if patterns else {}
        return shared_names(self.name, names, patterns)

    def together(
        self, state: EnsembleState, grads: Params, any_active: Tensor
    ) -> Tensor:
        """Return whether shared entries take the step: their gradients are finite."""
        shared = self.shared_names(state)
        sums = [value for name, value in grads.items() if name in shared]
        return torch.stack([any_active, *(x.isfinite().all() for x in sums)]).all()

    def selected(
        self, masks: tuple[Tensor, ...], new: tuple, old: EnsembleState
    ) -> tuple:
        """Return parameters, buffers and optimizer, the old ones where skipped."""
        trained, together = masks[0], masks[-1]
        shared = self.shared_names(old)

        def of(new: Params, old: Params) -> Params:
            masks = {name: together if name in shared else trained for name in new}
            return {n: _select_members(masks[n], new[n], old[n]) for n in new}

        params, buffers, optimizer = new
        optimizer = MembersState(
            _select_members(trained, optimizer.members, old.optimizer.members),
            _select_members(together, optimizer.shared, old.optimizer.shared),
        )
        return of(params, old.params), of(buffers, old.buffers), optimizer

    def _with_active(
        self, state: EnsembleState, batch: tuple
    ) -> tuple[EnsembleGradFn, tuple]:
        """Return a gradient, and arguments with active members for resting ones."""
        # Weighing by zero is not enough: zero times the NaN of a member is a NaN.
        active, gradient = state.active, self.gradient
        if surely(active):
            return gradient, (state.params, state.buffers, *batch)
        rows = torch.arange(len(active), device=active.device)
        rows = torch.where(active, rows, active.int().argmax())
        call = gradient.options.on(state.params, state.buffers, batch).select(rows)
        options = replace(gradient.options, in_dims=call.dims)
        arguments = (call.params, call.buffers, *call.items)
        return replace(gradient, options=options), arguments


def _kept_dtypes(buffers: Buffers, old: Buffers) -> Buffers:
    """Bring buffers back from the dtype that a policy computed in, without a graph."""
    return map_values(
        lambda x, y: (x.to(y.dtype) if x.is_floating_point() else x).detach(),
        buffers,
        old,
    )


def _select_members(mask: Tensor, new: Tree, old: Tree) -> Tree:
    """Take `new` where a mask of members `[E]`, or one for all, is true, else `old`."""

    def choose(new: Tensor, old: Tensor) -> Tensor:
        aligned = mask.reshape((*mask.shape, *[1] * (new.ndim - mask.ndim)))
        return torch.where(aligned, new, old)

    return tree_map(choose, new, old)


def _members_finite(grads: list[Tensor], like: Tensor) -> Tensor:
    """Return whether each member's gradients are finite, `[E]`, without a sync."""
    finite = torch.ones_like(like)
    # A finite sum has finite terms, and takes a fraction of the time.
    if is_host(like.device) and all(surely(grad.sum().isfinite()) for grad in grads):
        return finite
    for grad in grads:
        finite = finite & grad.isfinite().reshape(len(finite), grad[0].numel()).all(1)
    return finite


# Steps.


def train_step(
    loss: BatchLossFn | LossFn,
    tx: GradientTransformation,
    *,
    policy: Policy | str | None = None,
    loss_scale: LossScale | None = None,
    donate: bool = False,
    has_aux: bool = False,
) -> Step[TrainState]:
    """Make an ordinary step: gradient of a batch loss, optimizer, new buffers.

    `(state, *batch) -> (state, {"loss": scalar})`. One forward and one backward pass.
    `loss` is the loss of a batch, from `batch_loss` or a function of your own
    `(params, buffers, *batch) -> scalar`. Without `.with_buffers` it changes none. A
    loss of one sample, from `sample_loss`, is averaged over the batch; it changes the
    buffers that follow from parameters alone, as power iterations do.

    Under a `policy` the passes run in its dtypes, while parameters and the optimizer
    keep theirs: float32 parameters are master weights.

    With a loss scale the loss is multiplied by it before the backward pass and the
    gradients are divided by it in float32. A step whose gradients are not finite leaves
    parameters, optimizer and buffers as they were, without a device sync; the metrics
    then also have `loss_scale`, the one that was used, and `skipped`, 1 or 0. Metrics
    are float32 or wider. A state that has no scale yet starts with `loss_scale`, which
    for a policy that computes in float16 is a `DynamicLossScale()` by default.

    Args:
        policy: dtypes of the passes, a `Policy` or its text; None for those given.
        loss_scale: multiplies losses before the backward pass; results are without it.
        donate: the step may write into the old state, which must not be used again.
        has_aux: the loss returns `(scalar, aux)`, and `metrics["aux"]` holds aux.

    Raises:
        ValueError: when called, if the loss returns something else than a scalar, or a
            loss of one sample gets a batch without any.

    Example:
        >>> import vgrad
        >>> model = torch.nn.Linear(2, 1)
        >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        >>> loss = vgrad.batch_loss(fmodel, torch.nn.functional.mse_loss)
        >>> tx = vgrad.optim.sgd(0.1)
        >>> state = TrainState.create(tx, params, buffers)
        >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
        >>> state, metrics = train_step(loss, tx)(state, x, y)
        >>> state.step
        tensor(1)
    """
    function = "train_step"
    scale = initial_loss_scale(function, loss_scale, policy, DynamicLossScale())
    check_transformation(function, tx)
    if isinstance(loss, SampleLoss):
        if has_aux:
            raise TypeError(
                "train_step(loss, has_aux=True): expected a loss that returns "
                "(scalar, aux), got one from sample_loss, which has no aux. Write a "
                "loss of a whole batch."
            )
        single = with_policy(policy, loss)

        def with_value(params: Params, buffers: Buffers, /, *sample: Tree) -> tuple:
            value = single(params, buffers, *sample)
            return value, value

        weighted = weighted_grad(with_value, randomness="different", has_aux=True)
        source: Source = SampleSource(transform=weighted)
    else:
        check_loss(function, loss, of_batch=True)
        run = with_policy(policy, loss)
        run = returning_buffers(function, run, has_aux=has_aux)
        source = BatchSource(loss=run)
    return TrainingStep(function, source, tx, scale, donate, has_aux)


def private_step(
    loss: LossFn,
    tx: GradientTransformation,
    plan: Plan,
    *,
    passes: Passes = 1,
    strategy: Strategy = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    verify: bool = True,
    policy: Policy | str | None = None,
    loss_scale: LossScale | None = None,
    donate: bool = False,
    has_aux: bool = False,
) -> Step[TrainState]:
    """Make a step of DP-SGD: clip every sample, sum, add noise once, optimizer.

    `(state, *batch) -> (state, metrics)`, where the batch is one logical batch as the
    plan's sampler draws it, empty ones included; `chunk_size` only says how much of it
    is processed at a time, `passes` how often (see `clipped_grad`). The clipped sum is
    divided by the expected batch size. Power iterations and others that read parameters
    alone advance once a step, empty or not. A buffer with more of the data is refused.

    Noise follows from the state's key and step. A step repeated from the same state on
    the same batch is the same release, so a run may resume from a checkpoint; batches
    must then come from `plan.sampler(state)`, which repeats them too. Random numbers of
    the loss follow from key, step and a sample's place in the batch, with `"same"` from
    key and step: they are the same in any chunks, strategy, graph or number of ranks.
    Where a loss draws others, see `vgrad/dp/noise.py`. A step on another
    batch, or with another loss or optimizer, needs `state.fork()` first. A state that
    has spent under another plan needs one that accounts for both, `plan.after`.

    The metrics are `loss` (mean over the batch, NaN where it is empty), `samples`,
    `clipped` and `nonfinite`. They are computed from the private data without noise:
    publishing them voids the guarantee.

    Under a `policy` the loss runs in its dtypes; norms, sums, noise and the optimizer
    stay in float32 or wider. A loss scale (of a policy that computes in float16
    `StaticLossScale(2**10)` by default) is taken out of every sample before clipping,
    so neither the bound nor the noise depends on it. A sample that overflows adds zero
    and is counted; the step is never skipped, which would depend on the data. The
    history of a `DynamicLossScale` does depend on them, without noise: choose it where
    the state, which holds the scale, stays private.

    Aux is stacked over the samples (`None` for an empty batch): private data too.

    Reference: Abadi et al., Deep Learning with Differential Privacy, arXiv 1607.00133.

    Args:
        strategy, chunk_size, randomness, verify: see `vgrad.persample.Options`.
        policy, loss_scale, donate, has_aux: as in `train_step`.

    Raises:
        RuntimeError: when called, if the plan's steps have all been taken, or the state
            counts fewer than none.
        ValueError: when called, if the batch has more samples than the data set, or the
            state has spent under another plan.
    """
    function = "private_step"
    check_loss(function, loss)
    check_transformation(function, tx)
    if not isinstance(plan, Plan):
        raise TypeError(
            f"private_step(plan): expected a dp.Plan, got a {type(plan).__name__}. "
            f"Make one with dp.Plan.for_epsilon; train_step trains without privacy."
        )
    default = StaticLossScale(2.0**10)
    scale = initial_loss_scale(function, loss_scale, policy, default)
    if plan.samples_per_unit is not None and not isinstance(loss, UnitLoss):
        if has_aux:
            raise ValueError(
                "private_step(plan, has_aux=True): expected a loss without aux for a "
                "plan of units, whose loss is a mean over samples. Leave has_aux out."
            )
        loss = UnitLoss(loss)
    options: Any = {"passes": passes, "strategy": strategy, "chunk_size": chunk_size}
    options |= {"randomness": randomness, "verify": verify, "has_aux": has_aux}
    clipped = clipped_sums(function, with_policy(policy, loss), plan, **options)
    fields = {"has_aux": has_aux, "samples_per_unit": plan.samples_per_unit}
    source = LogicalBatchSource(transform=clipped, plan=plan, **fields)
    return TrainingStep(function, source, tx, scale, donate, has_aux)


@shows_member_options
def ensemble_train_step(
    loss: BatchLossFn | LossFn,
    tx: GradientTransformation,
    *,
    policy: Policy | str | None = None,
    loss_scale: LossScale | None = None,
    donate: bool = False,
    has_aux: bool = False,
    **options: Unpack[EnsembleOptions],
) -> Step[EnsembleState]:
    """Make one step of all members: gradient of each one's loss, optimizer, buffers.

    `(state, *batch) -> (state, metrics)` with `loss` `[E]` and `skipped` `[E]`. `tx` is
    a transformation of one member, or the result of `for_members`, with which learning
    rates and all other numbers may differ between members. Each member has a loss scale
    of its own (and, if there is one, a metric `loss_scale`), as in `train_step`, and
    aux.

    A member that is not active, or whose gradients are not finite, keeps parameters,
    optimizer and buffers as they were; the other members do not notice. Shared entries
    get the sum of the active members' gradients, and are skipped when that is not
    finite. Inactive members are then evaluated with an active member's values and
    report a NaN loss. `zero_nans` and similar transformations never see non-finite
    gradients, because such steps are skipped first.

    Args:
        policy, loss_scale, donate, has_aux: as in `train_step`; `in_dims`,
            `randomness`, `strategy` and `shared` as in `ensemble_grad`.

    Raises:
        ValueError: parameters are shared and losses scaled, which would weigh members
            by their scales; else as `ensemble_grad`.

    Example:
        >>> import vgrad
        >>> models = [torch.nn.Linear(2, 1) for _ in range(3)]
        >>> fmodel, params, buffers = vgrad.stack(models)
        >>> loss = vgrad.batch_loss(fmodel, torch.nn.functional.mse_loss)
        >>> tx = vgrad.for_members(vgrad.optim.sgd, lr=torch.tensor([0.01, 0.1, 1.0]))
        >>> state = EnsembleState.create(tx, params, buffers)
        >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
        >>> state, metrics = ensemble_train_step(loss, tx)(state, x, y)
        >>> metrics["loss"].shape
        torch.Size([3])
    """
    function = "ensemble_train_step"
    check_loss(function, loss, of_batch=True)
    scale = initial_loss_scale(function, loss_scale, policy, DynamicLossScale())
    check_options(ensemble_train_step, options, EnsembleOptions)
    tx = of_members(function, tx, options.get("shared", ()))
    gradient: Any = ensemble_grad(with_policy(policy, loss), has_aux=has_aux, **options)
    source = MemberSource(gradient=gradient)
    return TrainingStep(function, source, tx, scale, donate, has_aux)
