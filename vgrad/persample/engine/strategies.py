"""The ways to compute per-sample gradients: same numbers, different cost.

A strategy runs the loss on the samples of one chunk and hands one factor for each
parameter to a collector, so that what is a sum can be reduced inside the chunk and
memory does not grow with the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
)
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from vgrad import checks, tree
from vgrad.conditions import Unrepeatable, checks_collected
from vgrad.generators import (
    RandomState,
    drawn_since,
    kept_random_state,
    random_state,
    set_random_state,
)
from vgrad.lowering.functions import refused, undrawn
from vgrad.lowering.grad_flags import Truth, raise_clearly
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.guard import (
    LossGuard,
    UnsupportedOp,
    own_backward_passes,
)
from vgrad.persample.engine.problem import Problem
from vgrad.persample.engine.record import Recorder
from vgrad.persample.engine.sites import copy_at_once
from vgrad.persample.factors.base import Dense, Factor
from vgrad.persample.rules.table import RULES
from vgrad.torch_private import autograd, modes
from vgrad.torch_private.autograd import foreign_nodes
from vgrad.torch_private.tensors import Lazy
from vgrad.tree import no_autocast, tree_map_only
from vgrad.typing import Params, Tree


class Chunk(NamedTuple):
    """What a strategy knows about b samples: their losses [b], and stacked aux."""

    collected: Any  # the collector, which has taken the factors of all parameters
    losses: Tensor
    aux: Tree
    recorded: bool = False  # all of it is a constant for the caller's autograd


Collect = Callable[[], Collector]
"""Makes what the factors of a chunk are handed to."""


def recorded(problem: Problem, collect: Collect) -> Chunk:
    """Run one backward pass and keep the factors of every use of a parameter."""
    if modes.inside_transform():
        raise UnsupportedOp(
            f'{problem.function}(strategy="recorded"): expected a call outside of '
            f'transforms of torch.func. Use strategy="vmap" inside them.'
        )
    collected = collect()
    twice = collected.look is not None
    draws = twice and problem.randomness != "error"
    state = random_state(problem.tensors) if draws else None
    found = _recorded(problem, collected, state)
    if not twice or (kept := collected.once()) is None:
        return found
    problem.fallbacks.warn(
        f"{problem.function}(passes=2): expected a loss of which two backward passes "
        f"compute the same gradients, got others in the second one, as checkpoints "
        f"have that draw new random numbers. Samples run once more, and factors are "
        f"kept; pass preserve_rng_state=True to checkpoints, or passes=1."
    )
    if state is not None:
        set_random_state(state)
    return _recorded(problem, kept)


def _recorded(
    problem: Problem, collected: Collector, state: RandomState | None = None
) -> Chunk:
    """Record the loss, and hand the factors of one backward pass or two on.

    `state` is that of the generators now, where random numbers may be drawn.
    """
    accept = collected.look or collected.take
    # Of the caller's grad mode. A sample that requires grad says so to the loss, but
    # leads to the caller no more.
    again, inputs = problem.differentiable, problem.batch.inputs

    def take(name: str, factor: Factor) -> None:
        with torch.no_grad():
            accept(name, problem.unscaled(factor))

    def run() -> tuple[Recorder, Tensor, Tree]:
        recorder = Recorder(RULES, problem, problem.batch.size, take, collected.tell)
        around.enter_context(closing(recorder))

        def one(tensors: tuple[Tensor, ...]) -> tuple:
            result = problem.run_loss(recorder.params, tensors, recorder)
            recorder.check_result(result)
            return result

        tensors = tuple(
            recorder.anchor(each) if again and each.requires_grad else each.detach()
            for each in inputs
        )
        losses, aux = torch.vmap(one, randomness=problem.randomness)(tensors)
        return recorder, losses, aux

    with ExitStack() as around:
        around.enter_context(_clear_errors(problem))
        around.enter_context(torch.enable_grad())
        around.enter_context(autograd.plain())  # a checkpoint around runs all again
        recorder, losses, aux = run()
        others = recorder.foreign(losses)
        problem.fallbacks.foreign.update(others)
        if collected.look is not None:
            with no_autocast(losses.device), _same_numbers(problem):
                scales = problem.cotangent(losses)
                recorder.backward(losses, scales, last=bool(others))
                accept = collected.take
                collected.again()
            if others:  # nodes that may have written into what they saved
                if state is not None:
                    if checks_collected():
                        raise Unrepeatable("it draws the same random numbers twice")
                    set_random_state(state)
                recorder, losses, aux = run()
                recorder.foreign(losses)
        with no_autocast(losses.device), _same_numbers(problem):
            recorder.backward(losses, problem.cotangent(losses))
    _check_unreached(problem, frozenset(recorder.unreached))
    losses, aux = tree_map_only(Tensor, torch.Tensor.detach, (losses, aux))
    return Chunk(collected, losses, aux, recorded=True)


def _same_numbers(problem: Problem) -> AbstractContextManager:
    """Refuse random numbers in the backward passes of functions that no vmap runs."""
    looped = problem.fallbacks.looped
    if not looped:
        return nullcontext()
    return undrawn(problem.tensors, partial(refused, next(iter(looped))))


def vmap(problem: Problem, collect: Collect) -> Chunk:
    """Differentiate under `torch.vmap`: all gradients are stored, several times."""

    def one(tensors: tuple[Tensor, ...]) -> tuple:
        truth = Truth(modes.current_level(), "sample", 'strategy="loop"')

        def of_params(params: Params) -> tuple[Tensor, Tree]:
            result = problem.run_loss(params, tensors, _guard(problem, truth))
            truth.end(tree.tensors(result))
            return result

        return _functional_gradient(of_params, problem)

    mapped = torch.vmap(one, randomness=problem.randomness)
    with _clear_errors(problem):
        grads, losses, aux = mapped(problem.batch.inputs)
    return _collected(problem, collect, grads, losses, aux)


def loop(problem: Problem, collect: Collect) -> Chunk:
    """Differentiate one sample: runs whatever plain autograd runs."""
    found = tree_map_only(Tensor, lambda leaf: leaf.unsqueeze(0), alone(problem))
    return _collected(problem, collect, *found)


def alone(problem: Problem) -> tuple[Params, Tensor, Tree]:
    """Return gradient, loss and aux of the first sample."""
    inside = modes.inside_transform()
    gradient = _functional_gradient if inside else _plain_gradient
    before = random_state(problem.tensors)
    tensors = problem.batch.one(0)

    def of_params(params: Params) -> tuple[Tensor, Tree]:
        return problem.run_loss(params, tensors, _guard(problem), alone=True)

    with _no_weight_cache():
        found = gradient(of_params, problem)
    if problem.randomness == "error" and drawn_since(before, problem.tensors):
        set_random_state(before)
        raise RuntimeError(
            f"{problem.function}: expected a loss without random numbers, since "
            f'randomness="error". Pass randomness="different" (each sample draws its '
            f'own) or "same".'
        )
    return found


def saved_bytes(problem: Problem) -> int:
    """Return how many bytes autograd keeps for the backward pass of one sample.

    Factors hold as much again where a node is not torch's own: see `Recorder.foreign`.
    """
    seen: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Lazy):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would make a cycle

    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with hooks, _trial(problem):
        loss = _first(problem, _leaves(problem))
    return sum(seen.values()) * (2 if foreign_nodes([loss]) else 1)


def _first(problem: Problem, params: Params, *, again: bool = False) -> Tensor:
    """Return the loss of the first sample."""
    tensors, watch = problem.batch.one(0), _guard(problem, again=again)
    return problem.run_loss(params, tensors, watch, alone=True)[0]


def _guard(problem: Problem, truth: Truth | None = None, **options: bool) -> LossGuard:
    """Watch a loss that is handed the memory of the caller's tensors."""
    given = {**problem.params, **problem.buffers}
    draws, looped = problem.draws, problem.fallbacks.looped
    return LossGuard(truth, given=given, draws=draws, looped=looped, **options)


def _check_unreached(problem: Problem, names: frozenset[str]) -> None:
    """Refuse to take for zero what is not zero to plain autograd."""
    asked = problem.draws.asked  # what is reached follows from the answers
    if not names or (names in problem.unreached and not asked):
        return
    leaves = {n: each.detach().requires_grad_() for n, each in problem.params.items()}
    found: Sequence[Tensor | None] = [None] * len(names)
    with _trial(problem):
        value = _first(problem, leaves, again=True)
        if value.requires_grad:
            wanted = [leaves[name] for name in sorted(names)]
            found = torch.autograd.grad(value, wanted, allow_unused=True)
    pairs = zip(sorted(names), found, strict=True)
    if reached := [name for name, grad in pairs if grad is not None]:
        raise UnsupportedOp(
            f"loss: expected gradients of all samples wherever one sample has some, "
            f"got none of {checks.listed(reached)}: an op hides its graph from the "
            f'recorder. Use strategy="vmap" or "loop".'
        )
    if not asked:
        problem.unreached.add(names)


def _collected(
    problem: Problem, collect: Collect, grads: Params, losses: Tensor, aux: Tree
) -> Chunk:
    """Hand stored gradients on, so that no more than one is held twice."""
    collected = collect()
    with no_autocast(losses.device):
        for name in list(grads):
            collected.take(name, problem.unscaled(Dense(grads.pop(name))))
    return Chunk(collected, losses, aux)


def _leaves(problem: Problem) -> Params:
    """Return what autograd differentiates: the parameters, or leaves of their values.

    Where a caller can differentiate the result they are views of the parameters and not
    these themselves, which the loss may also reach by another route.
    """
    return {
        name: value.view_as(value)
        if problem.differentiable and value.requires_grad
        else value.detach().requires_grad_()
        for name, value in problem.params.items()
    }


def _plain_gradient(of_params: Callable, problem: Problem) -> tuple:
    """Differentiate by autograd."""
    leaves, create_graph = _leaves(problem), problem.differentiable
    params = problem.params.values() if create_graph else ()
    with torch.enable_grad():
        value, aux = of_params(leaves)
        _copied_at_once(value, leaves)
        if not value.requires_grad:  # nothing that is differentiated has a part in it
            zeros = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
            return zeros, value, aux
        if autograd.reenters(value):
            raise UnsupportedOp(autograd.REENTRANT_ERROR)
        for leaf in leaves.values():
            if leaf.is_leaf:
                leaf.grad = None  # in which the loss has accumulated for itself
        with no_autocast(value.device), own_backward_passes(params):
            grads = torch.autograd.grad(
                value,
                list(leaves.values()),
                grad_outputs=problem.cotangent(value),
                create_graph=create_graph,
                allow_unused=True,
                materialize_grads=True,
            )
    # What a backward pass inside of that one, as of reversible layers, has found.
    inner = [leaf.grad if leaf.is_leaf else None for leaf in leaves.values()]
    grads = [
        (grad if more is None else grad + more).to_dense()
        for grad, more in zip(grads, inner, strict=True)
    ]
    if not create_graph:
        value, aux = tree_map_only(Tensor, torch.Tensor.detach, (value, aux))
    return dict(zip(leaves, grads, strict=True)), value, aux


def _copied_at_once(value: Tensor, params: Params) -> None:
    """Copy gradients as they come to parameters, before another node writes there."""
    if foreign_nodes([value]):
        for each in params.values():
            copy_at_once(each)


def _functional_gradient(of_params: Callable, problem: Problem) -> tuple:
    """Differentiate by torch.func, which works inside its other transforms."""

    def watched(params: Params) -> tuple[Tensor, Tree]:
        value, aux = of_params(params)
        _copied_at_once(value, params)
        return value, aux

    forward = torch.func.vjp(watched, dict(problem.params), has_aux=True)
    value, pullback, aux = cast(tuple[Tensor, Callable, Tree], forward)
    # As in eager training, autocast covers the forward pass alone.
    with no_autocast(value.device):
        (grads,) = pullback(problem.cotangent(value))
    return grads, value, aux


@contextmanager
def _trial(problem: Problem) -> Iterator[None]:
    """Run the loss on one sample, and put the generators back."""
    with kept_random_state(problem.tensors), torch.enable_grad(), _no_weight_cache():
        yield


@contextmanager
def _clear_errors(problem: Problem) -> Iterator[None]:
    """Say in errors and warnings of vmap what can be done."""
    with (
        problem.fallbacks.reported(problem.function),
        _no_weight_cache(),
        modes.unoptimized_scripts(),
        autograd.old_style_shown(),
    ):
        try:
            yield
        except UnsupportedOp:
            raise
        except RuntimeError as error:
            raise_clearly(error, problem.function)


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
