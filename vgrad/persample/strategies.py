"""The ways to compute per-sample gradients: same numbers, different cost.

A strategy yields chunks of samples, in order, so that what is a sum can be reduced
inside the chunk and memory does not grow with the batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vgrad import checks
from vgrad.persample import batches
from vgrad.persample.guard import Fallbacks, LossGuard, UnsupportedOp, raise_clearly
from vgrad.typing import Buffers, LossFn, Params, Tree

Randomness = Literal["error", "different", "same"]


class Chunk(NamedTuple):
    """What a strategy knows about b samples: gradients [b, ...], losses [b], aux."""

    grads: Params
    losses: Tensor
    aux: Tree

    def without_grads(self) -> "Chunk":
        """Return what is kept of a chunk whose gradients have been reduced."""
        return self._replace(grads={})


@dataclass(frozen=True)
class Problem:
    """One call of a per-sample transform."""

    function: str
    loss: LossFn
    params: Params
    buffers: Buffers
    batch: batches.Batch
    randomness: Randomness
    has_aux: bool
    fallbacks: Fallbacks

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that were given."""
        leaves = [leaf for leaf in self.batch.leaves if isinstance(leaf, Tensor)]
        return [*self.params.values(), *self.buffers.values(), *leaves]

    @property
    def differentiable(self) -> bool:
        """Whether the caller can differentiate the result once more."""
        wanted = any(tensor.requires_grad for tensor in self.tensors)
        return torch.is_grad_enabled() and wanted

    def run_loss(
        self, params: Params, tensors: tuple[Tensor, ...], *, vmapped: bool
    ) -> tuple[Tensor, Tree]:
        """Return `(scalar, aux)` of one sample, a copy, which the loss may change."""
        sample = self.batch.sample(tuple(tensor.clone() for tensor in tensors))
        with LossGuard(vmapped=vmapped):
            # Dictionaries of its own, in which the loss may bind names anew.
            result = self.loss(dict(params), dict(self.buffers), *sample)
        if self.has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise ValueError(
                f"{self.function}(loss, has_aux=True): expected a loss that returns "
                f"(scalar, aux), got a {type(result).__name__}."
            )
        value, aux = result if self.has_aux else (result, ())
        if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
            tensor = isinstance(value, Tensor)
            got = f"{value.dtype} {tuple(value.shape)}" if tensor else type(value)
            raise ValueError(
                f"{self.function}(loss): expected a loss that returns a real tensor "
                f"without dimensions (with has_aux=True a pair of it and aux), got "
                f"{got}."
            )
        for leaf in pytree.tree_leaves(aux):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"{self.function}(loss, has_aux=True): expected tensors in aux, "
                    f"got a {type(leaf).__name__}."
                )
        return value, aux


def vmap(problem: Problem, chunk_size: int | None) -> Iterator[Chunk]:
    """Differentiate under `torch.vmap`: B gradients are stored, several times over."""

    def one(tensors: tuple[Tensor, ...]) -> tuple:
        def of_params(params: Params) -> tuple[Tensor, Tree]:
            return problem.run_loss(params, tensors, vmapped=True)

        forward = torch.func.vjp(of_params, dict(problem.params), has_aux=True)
        value, pullback, aux = cast(tuple[Tensor, Callable, Tree], forward)
        # As in eager training, autocast covers the forward pass alone.
        with torch.autocast(value.device.type, enabled=False):
            (grads,) = pullback(torch.ones_like(value))
        return grads, value, aux

    mapped = torch.vmap(one, randomness=problem.randomness)
    same = problem.randomness == "same"
    state = _random_state(problem) if same else None
    for start, stop in batches.chunks(problem.batch.size, chunk_size):
        if state is not None:
            _set_random_state(state)
        with problem.fallbacks.reported(problem.function), _no_weight_cache():
            try:
                chunk = Chunk(*mapped(tuple(problem.batch.rows(start, stop))))
            except UnsupportedOp:
                raise
            except RuntimeError as error:
                raise_clearly(error, problem.function)
        yield chunk
        del chunk  # the consumer may have let go of it: free it before the next one


def loop(problem: Problem, _: int | None) -> Iterator[Chunk]:
    """Differentiate sample after sample: runs whatever plain autograd runs."""
    inside = checks.inside_transform()
    gradient = _functional_gradient if inside else _plain_gradient
    leaves = dict(problem.params) if inside else _leaves(problem)
    state = _random_state(problem)
    for start, stop in batches.chunks(problem.batch.size, 1):
        if problem.randomness == "same":
            _set_random_state(state)
        tensors = tuple(row.squeeze(0) for row in problem.batch.rows(start, stop))

        def of_params(
            params: Params, tensors: tuple[Tensor, ...] = tensors
        ) -> tuple[Tensor, Tree]:
            return problem.run_loss(params, tensors, vmapped=False)

        with _no_weight_cache():
            one = gradient(of_params, leaves, problem.differentiable)
        if problem.randomness == "error":
            _check_nothing_drawn(problem, state)
        yield pytree.tree_map_only(Tensor, lambda leaf: leaf.unsqueeze(0), one)


STRATEGIES: dict[str, Callable[[Problem, int | None], Iterator[Chunk]]] = {
    "loop": loop,
    "vmap": vmap,
}


def saved_bytes(problem: Problem) -> int:
    """Return how many bytes autograd keeps for the backward pass of one sample."""
    seen: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would make a cycle

    state = _random_state(problem)
    leaves = _leaves(problem)
    tensors = tuple(row.squeeze(0) for row in problem.batch.rows(0, 1))
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with hooks, torch.enable_grad(), _no_weight_cache():
        problem.run_loss(leaves, tensors, vmapped=False)
    _set_random_state(state)
    return sum(seen.values())


def _leaves(problem: Problem) -> Params:
    """Return what autograd differentiates: the parameters, or leaves of their values.

    The leaves are made once. Where a caller can differentiate the result they are views
    of the parameters and not these themselves, which the loss may reach on other ways.
    """
    return {
        name: value.view_as(value)
        if problem.differentiable and value.requires_grad
        else value.detach().requires_grad_()
        for name, value in problem.params.items()
    }


def _plain_gradient(of_params: Callable, leaves: Params, create_graph: bool) -> Chunk:
    """Differentiate by autograd."""
    with torch.enable_grad():
        value, aux = of_params(leaves)
        if not value.requires_grad:  # nothing that is differentiated has a part in it
            zeros = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
            return Chunk(zeros, value, aux)
        with torch.autocast(value.device.type, enabled=False):
            grads = torch.autograd.grad(
                value,
                list(leaves.values()),
                create_graph=create_graph,
                allow_unused=True,
                materialize_grads=True,
            )
    grads = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
    if not create_graph:
        value, aux = pytree.tree_map_only(Tensor, torch.Tensor.detach, (value, aux))
    return Chunk(dict(zip(leaves, grads, strict=True)), value, aux)


def _functional_gradient(of_params: Callable, leaves: Params, _: bool) -> Chunk:
    """Differentiate by torch.func, which works inside its other transforms."""
    grads, (value, aux) = torch.func.grad_and_value(of_params, has_aux=True)(leaves)
    return Chunk(grads, value, aux)


@contextmanager
def _no_weight_cache() -> Iterator[None]:
    """Switch off autocast's cache of cast weights.

    A cast that was cached at one level of a transform is a constant for the next one,
    whose gradient then is zero, without an error.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


RandomState = tuple[Tensor, dict[int, Tensor]]


def _random_state(problem: Problem) -> RandomState:
    """Return the state of torch's own generators that the loss may use."""
    devices = {each.device.index for each in problem.tensors if each.is_cuda}
    states = {index: torch.cuda.get_rng_state(index) for index in devices}
    return torch.get_rng_state(), states


def _set_random_state(state: RandomState) -> None:
    torch.set_rng_state(state[0])
    for index, of_device in state[1].items():
        torch.cuda.set_rng_state(of_device, index)


def _check_nothing_drawn(problem: Problem, before: RandomState) -> None:
    """Raise, with the generators as they were, if a sample drew random numbers."""
    after = _random_state(problem)
    drawn = not torch.equal(before[0], after[0]) or any(
        not torch.equal(state, after[1][index]) for index, state in before[1].items()
    )
    if drawn:
        _set_random_state(before)
        raise RuntimeError(
            f"{problem.function}: expected a loss without random numbers, since "
            f'randomness="error". Pass randomness="different" (each sample draws its '
            f'own) or "same".'
        )
