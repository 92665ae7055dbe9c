"""The ways to compute per-sample gradients: same numbers, different cost.

A strategy runs the loss on the samples of one chunk and hands one factor for each
parameter to a collector, so that what is a sum can be reduced inside the chunk and
memory does not grow with the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from vgrad import checks, tree
from vgrad.conditions import are_collected
from vgrad.dtypes import no_autocast
from vgrad.generators import (
    drawn_since,
    kept_random_state,
    random_state,
    set_random_state,
)
from vgrad.lowering.truthful import Truth
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.guard import LossGuard, UnsupportedOp, raise_clearly
from vgrad.persample.engine.problem import Problem
from vgrad.persample.engine.questions import Split
from vgrad.persample.engine.record import Recorder
from vgrad.persample.factors.base import Dense, Factor
from vgrad.persample.rules.table import RULES
from vgrad.torch_private import levels, modes
from vgrad.tree import tree_map_only
from vgrad.typing import Params, Tree


class Chunk(NamedTuple):
    """What a strategy knows about b samples: their losses [b], and stacked aux."""

    collected: Any  # the collector, which has taken the factors of all parameters
    losses: Tensor
    aux: Tree
    recorded: bool = False  # all of it is a constant for the caller's autograd


Collect = Callable[[], Collector]
"""Makes what the factors of a chunk are handed to."""


def auto(problem: Problem, collect: Collect) -> Chunk:
    """Record; else differentiate under `torch.vmap`; else one sample after another.

    Whatever stops the first two, plain autograd may still be able to run the loss.
    """
    if levels.inside_transform():
        return vmap(problem, collect)
    if are_collected() and problem.fallbacks.mapped:
        return vmap(problem, collect)  # as the call before did, but without a trial
    draws = problem.randomness != "error"
    state = random_state(problem.tensors) if draws else None
    problem.fallbacks.mapped = False
    first: Exception | None = None
    for strategy in (recorded, vmap):
        try:
            return strategy(problem, collect)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if first is not None and are_collected():
                raise
            first = first or error
            if state is not None:
                set_random_state(state)
            problem.fallbacks.mapped = True
    assert first is not None
    return _one_by_one(problem, first)


def _one_by_one(problem: Problem, error: Exception) -> NoReturn:
    """Run each sample by itself, if plain autograd runs the first one.

    Raises:
        Exception: it does not; this is the error that tells most.
    """
    try:
        with _trial(problem):
            problem.run_loss(_leaves(problem), problem.batch.one(0), _guard(problem))
    except Exception as plain:
        raise plain if isinstance(error, UnsupportedOp) else error from None
    problem.fallbacks.warn(
        f"{problem.function}: runs one sample after another, since neither a recorded "
        f"pass nor vmap can run the loss. The numbers are right, but slow. What stops "
        f"them: {str(error).partition(chr(10))[0]}"
    )
    rows = torch.arange(problem.batch.size).split(1)
    raise Split(rows, str(error), "loop")


def recorded(problem: Problem, collect: Collect) -> Chunk:
    """Run one backward pass and keep the factors of every use of a parameter."""
    if levels.inside_transform():
        raise UnsupportedOp(
            f'{problem.function}(strategy="recorded"): expected a call outside of '
            f'transforms of torch.func. Use strategy="vmap" inside them.'
        )
    collected = collect()

    def take(name: str, factor: Factor) -> None:
        with torch.no_grad():
            collected.take(name, problem.unscaled(factor))

    recorder = Recorder(RULES, problem, problem.batch.size, take, collected.tell)

    def one(tensors: tuple[Tensor, ...]) -> tuple:
        result = problem.run_loss(recorder.params, tensors, recorder.inside())
        recorder.check_result(result)
        return result

    # A sample that requires grad says so to the loss, but leads to the caller no more.
    again = problem.differentiable
    tensors = tuple(
        recorder.anchor(each) if again and each.requires_grad else each.detach()
        for each in problem.batch.inputs
    )
    with _clear_errors(problem), torch.enable_grad():
        mapped = torch.vmap(one, randomness=problem.randomness)
        # What is computed again in the backward pass is not under vmap any more.
        with torch.autograd.graph.disable_saved_tensors_hooks(_NO_HOOKS):
            losses, aux = mapped(tensors)
        with no_autocast(losses.device):
            recorder.backward(losses, problem.cotangent(losses))
    _check_unreached(problem, frozenset(recorder.unreached))
    losses, aux = tree_map_only(Tensor, torch.Tensor.detach, (losses, aux))
    return Chunk(collected, losses, aux, recorded=True)


_NO_HOOKS = "saved tensor hooks are not supported while a loss is recorded"


def vmap(problem: Problem, collect: Collect) -> Chunk:
    """Differentiate under `torch.vmap`: all gradients are stored, several times."""

    def one(tensors: tuple[Tensor, ...]) -> tuple:
        truth = Truth(levels.current_level(), "sample", 'strategy="loop"')

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
    inside = levels.inside_transform()
    gradient = _functional_gradient if inside else _plain_gradient
    before = random_state(problem.tensors)
    tensors = problem.batch.one(0)

    def of_params(params: Params) -> tuple[Tensor, Tree]:
        return problem.run_loss(params, tensors, _guard(problem))

    with _no_weight_cache():
        found = gradient(of_params, problem)
    if problem.randomness == "error" and drawn_since(before, problem.tensors):
        set_random_state(before)
        raise RuntimeError(
            f"{problem.function}: expected a loss without random numbers, since "
            f'randomness="error". Pass randomness="different" (each sample draws its '
            f'own) or "same".'
        )
    one = tree_map_only(Tensor, lambda leaf: leaf.unsqueeze(0), found)
    return _collected(problem, collect, *one)


STRATEGIES: dict[str, Callable[[Problem, Collect], Chunk]] = {
    "auto": auto,
    "recorded": recorded,
    "vmap": vmap,
    "loop": loop,
}


def saved_bytes(problem: Problem) -> int:
    """Return how many bytes autograd keeps for the backward pass of one sample."""
    seen: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would make a cycle

    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with hooks, _trial(problem):
        problem.run_loss(_leaves(problem), problem.batch.one(0), _guard(problem))
    return sum(seen.values())


def _guard(
    problem: Problem, truth: Truth | None = None, *, again: bool = False
) -> LossGuard:
    """Watch a loss that is handed the memory of the caller's tensors."""
    given = {**problem.params, **problem.buffers}
    return LossGuard(truth, given=given, again=again)


def _check_unreached(problem: Problem, names: frozenset[str]) -> None:
    """Refuse to take for zero what is not zero to plain autograd."""
    if not names or names in problem.unreached:
        return
    leaves = {n: each.detach().requires_grad_() for n, each in problem.params.items()}
    found: Sequence[Tensor | None] = [None] * len(names)
    with _trial(problem):
        watch = _guard(problem, again=True)
        value, _ = problem.run_loss(leaves, problem.batch.one(0), watch)
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
    with torch.enable_grad():
        value, aux = of_params(leaves)
        if not value.requires_grad:  # nothing that is differentiated has a part in it
            zeros = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
            return zeros, value, aux
        with no_autocast(value.device):
            grads = torch.autograd.grad(
                value,
                list(leaves.values()),
                grad_outputs=problem.cotangent(value),
                create_graph=create_graph,
                allow_unused=True,
                materialize_grads=True,
            )
    grads = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
    if not create_graph:
        value, aux = tree_map_only(Tensor, torch.Tensor.detach, (value, aux))
    return dict(zip(leaves, grads, strict=True)), value, aux


def _functional_gradient(of_params: Callable, problem: Problem) -> tuple:
    """Differentiate by torch.func, which works inside its other transforms."""
    forward = torch.func.vjp(of_params, dict(problem.params), has_aux=True)
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
