"""Training steps as pure functions: `step(state, *batch) -> (new state, metrics)`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import batches, optim
from vgrad.batches import ChunkSize
from vgrad.dp.plan import Plan
from vgrad.dtypes import widened
from vgrad.generators import ALONE, secret_key, torch_seed
from vgrad.optim.base import GradientTransformation
from vgrad.persample.clipped import clipped_grad
from vgrad.persample.engine.problem import Randomness
from vgrad.precision import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    Policy,
    StaticLossScale,
    all_finite,
    select_tree,
)
from vgrad.precision.autocasting import AutocastMode
from vgrad.precision.modules import loss_under
from vgrad.tree import map_values, to_device
from vgrad.typing import BatchLossFn, Buffers, LossFn, Params, Tree

Metrics = dict[str, Tensor]
Step = Callable[..., tuple["TrainState", Metrics]]


class TrainState(NamedTuple):
    """All that a step changes, a tree of tensors: save it and nothing is lost.

    Attributes:
        params: the parameters.
        buffers: the buffers.
        optimizer: the optimizer's state.
        step: how many steps were taken, int64 without dimensions.
        key: the secret key, uint8 `[32]`. With the step it fixes all that a step draws:
            the batch of `plan.sampler(state)`, noise, dropout. Who has it can take the
            noise away: it is no more for release than the data.
        loss_scale: the loss scale of the next step, a tree of tensors too.
    """

    params: Params
    buffers: Buffers
    optimizer: Tree
    step: Tensor
    key: Tensor
    loss_scale: LossScale = NoOpLossScale()

    def __repr__(self) -> str:
        """Show all but the key, so that no log or traceback holds it."""
        shown = {**self._asdict(), "key": "<secret>"}
        fields = ", ".join(f"{name}={value}" for name, value in shown.items())
        return f"TrainState({fields})"

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

        The state holds detached tensors, not copies: no step changes them. With a
        `seed` the key is a hash of it: whoever guesses the seed knows the noise, which
        voids every claim of privacy. Without `loss_scale` the state takes that of the
        first step.

        Example:
            >>> from vgrad import optim
            >>> params = {"w": torch.zeros(2)}
            >>> state = TrainState.create(optim.sgd(0.1), params, {})
            >>> state.step
            tensor(0)
        """
        check_scale("TrainState.create", loss_scale)
        params, buffers = detached(params), detached(buffers)
        device = device_of(params)
        scale = NoOpLossScale() if loss_scale is None else to_device(loss_scale, device)
        key = secret_key(seed=seed)
        return cls(params, buffers, tx.init(params), torch.tensor(0), key, scale)

    def fork(self) -> "TrainState":
        """Return the same state with a new secret key.

        A state that was copied or saved repeats its steps: that is what makes a run go
        on. Where two runs go on from it that differ in anything (data, loss, optimizer)
        all but one need a fork. Otherwise both add the same noise to different sums,
        and the difference of what they release shows the private data.

        Example:
            >>> from vgrad import optim
            >>> state = TrainState.create(optim.sgd(0.1), {"w": torch.zeros(2)}, {})
            >>> torch.equal(state.fork().key, state.key)
            False
        """
        return self._replace(key=secret_key())


def train_step(
    loss: BatchLossFn,
    tx: GradientTransformation,
    *,
    policy: Policy | str | None = None,
    loss_scale: LossScale | None = None,
) -> Step:
    """Make an ordinary step: gradient of a batch loss, optimizer, new buffers.

    `(state, *batch) -> (state, {"loss": scalar})`. One forward and one backward pass.
    Under a `policy` they run in its dtypes, while parameters and the optimizer keep
    theirs: float32 parameters are master weights.

    With a loss scale the loss is multiplied by it before the backward pass and the
    gradients are divided by it in float32. A step whose gradients are not finite leaves
    parameters, optimizer and buffers as they were, without a device sync; the metrics
    then also have `loss_scale`, the one that was used, and `skipped`, 1 or 0. Metrics
    are float32 or wider. A state that has no scale yet starts with `loss_scale`, which
    for a policy that computes in float16 is a `DynamicLossScale()` by default.

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
    check_scale("train_step", loss_scale)
    if loss_scale is None and in_float16(policy):
        loss_scale = DynamicLossScale()
    with_buffers = getattr(loss, "with_buffers", None)
    if with_buffers is None:
        raise TypeError(
            f"train_step(loss={loss!r}): expected a loss of a whole batch that also "
            f"returns buffers, as batch_loss makes it."
        )
    run = with_buffers if policy is None else loss_under(policy, with_buffers)

    def step(state: TrainState, /, *batch: Tree) -> tuple[TrainState, Metrics]:
        scale = _scale_of(state, loss_scale)
        scaled = not isinstance(scale, NoOpLossScale)

        def of_params(params: Params) -> tuple[Tensor, tuple[Tensor, Buffers]]:
            with AutocastMode(params.values()):
                value, buffers = run(params, state.buffers, *batch)
            return scale.scale(value), (value, buffers)

        with torch.no_grad(), own_randomness(state):
            grads, aux = torch.func.grad(of_params, has_aux=True)(state.params)
            value, buffers = aux
            grads = scale.unscale(grads)
            params, optimizer = optim.step(tx, grads, state.optimizer, state.params)
            new = (params, optimizer, kept_dtypes(detached(buffers), state.buffers))
            metrics = {"loss": widened(value)}
            if scaled:
                finite = all_finite(grads)
                old = (state.params, state.optimizer, state.buffers)
                new = select_tree(finite, new, old)
                metrics["loss_scale"] = torch.as_tensor(scale.loss_scale)
                metrics["skipped"] = (~finite).float()
                scale = scale.adjust(finite)
        params, optimizer, buffers = new
        following = state.step + 1
        return TrainState(
            params, buffers, optimizer, following, state.key, scale
        ), metrics

    return step


def private_step(
    loss: LossFn,
    tx: GradientTransformation,
    plan: Plan,
    *,
    strategy: str = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    policy: Policy | str | None = None,
    loss_scale: LossScale | None = None,
) -> Step:
    """Make a step of DP-SGD: clip every sample, sum, add noise once, optimizer.

    `(state, *batch) -> (state, metrics)`, where the batch is one logical batch as the
    plan's sampler draws it, empty ones included; `chunk_size` only says how much of it
    is worked on at a time. The clipped sum is divided by the expected batch size.
    Buffers do not change: statistics of private data would be released without noise.

    Noise follows from the state's key and step. A step repeated from the same state on
    the same batch is the same release, so a run may go on from a checkpoint; batches
    must then come from `plan.sampler(state)`, which repeats them too. A step on another
    batch, or with another loss or optimizer, needs `state.fork()` first.

    The metrics are `loss` (mean over the batch, NaN where it is empty), `samples`,
    `clipped` and `nonfinite`. They are computed from the private data without noise: to
    publish them is to leave the guarantee.

    Under a `policy` the loss runs in its dtypes; norms, sums, noise and the optimizer
    stay in float32 or wider. A loss scale (of a policy that computes in float16
    `StaticLossScale(2**10)` by default) is taken out of every sample before clipping,
    so neither the bound nor the noise knows it. A sample that overflows adds zero and
    is counted; the step is never skipped, which would depend on the data. The history
    of a `DynamicLossScale` does depend on them, without noise: choose it where the
    state, which holds the scale, stays private.

    Reference: Abadi et al., Deep Learning with Differential Privacy, arXiv 1607.00133.

    Raises:
        RuntimeError: when called, if the plan's steps have all been taken, or the state
            says that fewer than none were.
        ValueError: when called, if the batch has more samples than the data set.
    """
    check_scale("private_step", loss_scale)
    if loss_scale is None and in_float16(policy):
        loss_scale = StaticLossScale(2.0**10)
    clipped = clipped_grad(
        loss if policy is None else loss_under(policy, loss),
        max_norm=plan.max_norm,
        normalize_by=plan.expected_batch_size,
        strategy=strategy,
        chunk_size=chunk_size,
        randomness=randomness,
    )

    def step(state: TrainState, /, *batch: Tree) -> tuple[TrainState, Metrics]:
        taken = int(state.step)
        if not 0 <= taken < plan.steps:
            raise RuntimeError(
                f"private_step(plan)(state): expected a state of fewer than the "
                f"{plan.steps} steps that the plan accounts for, got {taken}."
            )
        size = batches.read("private_step", batch).size
        if size > plan.dataset_size:
            raise ValueError(
                f"private_step(plan)(state, *batch): expected a batch of at most the "
                f"{plan.dataset_size} samples of the plan's data set, got {size}. Draw "
                f"batches with plan.sampler(state)."
            )
        scale = _scale_of(state, loss_scale)
        compute = clipped
        if not isinstance(scale, NoOpLossScale):
            compute = clipped.with_loss_scale(scale)
        with torch.no_grad(), own_randomness(state):
            result = compute(state.params, state.buffers, *batch)
            grads = plan.add_noise(
                result.grads, clipped.sensitivity, key=state.key, step=taken
            )
            params, optimizer = optim.step(tx, grads, state.optimizer, state.params)
        metrics = {
            "loss": widened(result.losses).mean(),
            "samples": torch.tensor(len(result.losses)),
            "clipped": result.clipped,
            "nonfinite": result.nonfinite,
        }
        scale = scale.adjust(result.nonfinite == 0)
        following = state.step + 1
        return TrainState(
            params, state.buffers, optimizer, following, state.key, scale
        ), metrics

    return step


def check_scale(function: str, loss_scale: LossScale | None) -> None:
    """Refuse a plain number, among others."""
    if loss_scale is not None and not hasattr(loss_scale, "adjust"):
        raise TypeError(
            f"{function}(loss_scale={loss_scale!r}): expected a loss scale such as "
            f"precision.DynamicLossScale(), got a {type(loss_scale).__name__}."
        )


def in_float16(policy: Policy | str | None) -> bool:
    """Tell whether a policy's gradients have the narrow range of float16."""
    if policy is None:
        return False
    own = policy if isinstance(policy, Policy) else Policy.parse(policy)
    return own.compute_dtype == torch.float16


def _scale_of(state: TrainState, first: LossScale | None) -> LossScale:
    """Return the scale that a state carries, or that of the first step."""
    if first is None or not isinstance(state.loss_scale, NoOpLossScale):
        return state.loss_scale
    return to_device(first, device_of(state.params))


def kept_dtypes(buffers: Buffers, old: Buffers) -> Buffers:
    """Bring buffers back from the dtype that a policy computed in."""

    def like(new: Tensor, old: Tensor) -> Tensor:
        return new.to(old.dtype) if new.is_floating_point() else new

    return map_values(like, buffers, old)


@contextmanager
def own_randomness(state: Any) -> Iterator[None]:
    """Let torch's own generators draw what follows from the state's key and step.

    They are left as they were. They are one for all threads, so steps in several
    threads wait for each other; a thread that draws from them by itself meanwhile
    changes the numbers of the step.
    """
    device = device_of(state.params)
    on_cuda = device.type == "cuda"
    seed = torch_seed(state.key, "loss", int(state.step))
    with ALONE, torch.random.fork_rng([device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            own = torch.Generator(device).manual_seed(seed)
            torch.cuda.set_rng_state(own.get_state(), device)
        yield


def detached(values: dict[str, Any]) -> dict[str, Any]:
    """Take the entries out of their graphs."""
    return map_values(torch.Tensor.detach, values)


def device_of(params: Params) -> torch.device:
    """Return where the parameters are."""
    if not params:
        raise ValueError(
            "TrainState(params={}): expected at least one parameter, got none. Are all "
            "of them frozen?"
        )
    return next(iter(params.values())).device
