"""Training steps as pure functions: `step(state, *batch) -> (new state, metrics)`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import optim
from vgrad.dp.noise import generator
from vgrad.dp.plan import Plan
from vgrad.optim.base import GradientTransformation
from vgrad.persample.batches import ChunkSize
from vgrad.persample.clipping import clipped_grad
from vgrad.persample.problem import Randomness
from vgrad.tree import map_values
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
        generators: states of random generators by use: `noise` for private noise, the
            names of devices for what the loss draws (dropout).
    """

    params: Params
    buffers: Buffers
    optimizer: Tree
    step: Tensor
    generators: dict[str, Tensor]

    @classmethod
    def create(
        cls,
        tx: GradientTransformation,
        params: Params,
        buffers: Buffers,
        *,
        seed: int | None = None,
    ) -> "TrainState":
        """Start a run; the generators are seeded by the operating system or by `seed`.

        The state holds detached tensors, not copies: no step changes them. A fixed seed
        fixes the noise too, which voids every claim of privacy.

        Example:
            >>> from vgrad import optim
            >>> params = {"w": torch.zeros(2)}
            >>> state = TrainState.create(optim.sgd(0.1), params, {})
            >>> state.step
            tensor(0)
        """
        params, buffers = _detached(params), _detached(buffers)
        device = _device(params)
        uses = {"noise": device, "cpu": torch.device("cpu"), device.type: device}
        generators = {}
        for number, (use, where) in enumerate(uses.items()):
            chosen = None if seed is None else seed + number
            generators[use] = generator(where, seed=chosen).get_state()
        return cls(params, buffers, tx.init(params), torch.tensor(0), generators)


def train_step(loss: BatchLossFn, tx: GradientTransformation) -> Step:
    """Make an ordinary step: gradient of a batch loss, optimizer, new buffers.

    `(state, *batch) -> (state, {"loss": scalar})`. One forward and one backward pass.

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
    gradient = torch.func.grad_and_value(loss.with_buffers, has_aux=True)

    def step(state: TrainState, /, *batch: Tree) -> tuple[TrainState, Metrics]:
        with torch.no_grad(), _own_randomness(state) as generators:
            grads, (value, buffers) = gradient(state.params, state.buffers, *batch)
            params, optimizer = optim.step(tx, grads, state.optimizer, state.params)
        new = TrainState(
            params, _detached(buffers), optimizer, state.step + 1, generators
        )
        return new, {"loss": value}

    return step


def private_step(
    loss: LossFn,
    tx: GradientTransformation,
    plan: Plan,
    *,
    strategy: str = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
) -> Step:
    """Make a step of DP-SGD: clip every sample, sum, add noise once, optimizer.

    `(state, *batch) -> (state, metrics)`, where the batch is one logical batch as the
    plan's sampler draws it, empty ones included; `chunk_size` only says how much of it
    is worked on at a time. The clipped sum is divided by the expected batch size.
    Buffers do not change: statistics of private data would be released without noise.

    The metrics are `loss` (mean over the batch, NaN where it is empty), `samples`,
    `clipped` and `nonfinite`. They are computed from the private data without noise: to
    publish them is to leave the guarantee.

    Reference: Abadi et al., Deep Learning with Differential Privacy, arXiv 1607.00133.

    Raises:
        RuntimeError: when called, if the plan's steps have all been taken.
    """
    clipped = clipped_grad(
        loss,
        max_norm=plan.max_norm,
        normalize_by=plan.expected_batch_size,
        strategy=strategy,
        chunk_size=chunk_size,
        randomness=randomness,
    )

    def step(state: TrainState, /, *batch: Tree) -> tuple[TrainState, Metrics]:
        if int(state.step) >= plan.steps:
            raise RuntimeError(
                f"private_step(plan)(state): expected a state of fewer than the "
                f"{plan.steps} steps that the plan accounts for, got {int(state.step)}."
            )
        with torch.no_grad(), _own_randomness(state) as generators:
            result = clipped(state.params, state.buffers, *batch)
            noise = torch.Generator(_device(state.params))
            noise.set_state(generators["noise"])
            grads = plan.add_noise(result.grads, clipped.sensitivity, generator=noise)
            params, optimizer = optim.step(tx, grads, state.optimizer, state.params)
            generators["noise"] = noise.get_state()
        metrics = {
            "loss": result.losses.mean(),
            "samples": torch.tensor(len(result.losses)),
            "clipped": result.clipped,
            "nonfinite": result.nonfinite,
        }
        new = TrainState(params, state.buffers, optimizer, state.step + 1, generators)
        return new, metrics

    return step


@contextmanager
def _own_randomness(state: TrainState) -> Iterator[dict[str, Tensor]]:
    """Let torch's own generators run from the state, and leave them as they were.

    Yields the generators' states, which hold the new ones when the block has ended.
    """
    generators = dict(state.generators)
    device = _device(state.params)
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if on_cuda else []):
        torch.set_rng_state(generators["cpu"])
        if on_cuda:
            torch.cuda.set_rng_state(generators["cuda"], device)
        yield generators
        generators["cpu"] = torch.get_rng_state()
        if on_cuda:
            generators["cuda"] = torch.cuda.get_rng_state(device)


def _detached(values: dict[str, Any]) -> dict[str, Any]:
    return map_values(torch.Tensor.detach, values)


def _device(params: Params) -> torch.device:
    """Return where the parameters are."""
    if not params:
        raise ValueError(
            "TrainState(params={}): expected at least one parameter, got none. Are all "
            "of them frozen?"
        )
    return next(iter(params.values())).device
