"""The ways to compute per-sample gradients: same numbers, different cost."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from vgrad import checks, tree
from vgrad.conditions import Unrepeatable
from vgrad.factors.base import Dense, Factor
from vgrad.factors.columns import Columns
from vgrad.functional.guards import Protected
from vgrad.generators import (
    RandomState,
    kept_random_state,
    random_state,
    set_random_state,
)
from vgrad.loss.functions import refused, undrawn
from vgrad.loss.grad_flags import VmapLevel, raise_clearly
from vgrad.loss.mode import SAMPLES, SINGLE
from vgrad.loss.values import Partition, SplitBatch
from vgrad.persample.engine.call import Call, Inputs
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.guard import (
    NON_RETRYABLE,
    Failure,
    Fallbacks,
    UnsupportedOp,
    own_backward_passes,
)
from vgrad.persample.engine.hooks import check_saved
from vgrad.persample.engine.proxies import copy_on_arrival
from vgrad.persample.engine.record import Recorder, Take
from vgrad.torch_private import autograd, modes
from vgrad.torch_private.autograd import foreign_nodes
from vgrad.torch_private.shards import is_distributed
from vgrad.torch_private.tensors import Lazy
from vgrad.tree import map_tensors, map_values, no_autocast, tree_map_only
from vgrad.typing import Buffers, Params, Strategy, Tree


class Chunk(NamedTuple):
    """The result of a strategy for b samples."""

    collected: Any  # the collector, with the factors of all parameters
    losses: Tensor  # [b]
    aux: Tree  # stacked
    strategy: Strategy  # recorded results are constants for the caller's autograd


Collect = Callable[[], Collector]


def recorded(call: Call, collect: Collect) -> Chunk:
    """Run one backward pass and keep the factors of every use of a parameter."""
    if modes.inside_transform():
        raise UnsupportedOp(
            f'{call.function}(strategy="recorded"): expected a call outside of '
            f'transforms of torch.func. Use strategy="vmap" inside them.'
        )
    collector = collect()
    twice = collector.first_pass is not None
    draws = twice and call.randomness != "error"
    state = random_state(call.tensors) if draws else None
    chunk = _recorded(call, collector, state)
    if not twice or (single := collector.single_pass()) is None:
        return chunk
    call.fallbacks.warn(
        f"{call.function}(passes=2): expected a loss of which two backward passes "
        f"compute the same gradients, got others in the second one, as checkpoints "
        f"have that draw new random numbers. Samples run once more, and factors are "
        f"kept; pass preserve_rng_state=True to checkpoints, or passes=1."
    )
    if state is not None:
        set_random_state(state)
    return _recorded(call, single)


def _recorded(
    call: Call, collector: Collector, state: RandomState | None = None
) -> Chunk:
    # `state` is the generators' state now, if random numbers may be drawn.
    # Of the caller's grad mode. Inside the loss a sample keeps `requires_grad=True`,
    # but it is detached from the caller's graph.
    differentiable, inputs = call.differentiable, call.batch.inputs

    def run() -> tuple[Recorder, Tensor, Tree]:
        recorder = Recorder(call, collector.callback)
        stack.callback(recorder.close)
        tensors = [
            tensor
            if not tensor.requires_grad
            else recorder.anchor(tensor)
            if differentiable
            else tensor.detach()
            for tensor in inputs
        ]
        with modes.vmapped(call.batch.size, call.randomness) as (inside, outside):
            samples = tuple(map(inside, tensors))
            result = call.run_loss(recorder.params, samples, recorder.mode())
            losses, aux = recorder.checked(result)
            return recorder, outside(losses), map_tensors(outside, aux)

    def back(accept: Take, *, last: bool) -> None:
        looped = call.fallbacks.looped
        alike: AbstractContextManager = nullcontext()
        if looped and not call.captured:  # otherwise eager mode has found out
            alike = undrawn(call.tensors, partial(refused, next(iter(looped))))
        with torch.no_grad(), no_autocast(losses.device), alike:
            pair = call.cotangent(losses, aux), call.unscaled(accept)
            columns = _columns(call, *pair) if call.columns else nullcontext(pair)
            with columns as (scales, receive):
                recorder.backward(losses, scales, receive, last=last)

    # A checkpoint around this call runs all again.
    plain = autograd.plain()
    with _clear_errors(call), torch.enable_grad(), plain, ExitStack() as stack:
        recorder, losses, aux = run()
        foreign = recorder.foreign(losses)
        call.fallbacks.foreign.update(foreign)
        if collector.first_pass is not None:
            back(collector.first_pass, last=bool(foreign))
            with torch.no_grad(), no_autocast(losses.device):
                collector.between_passes()
            if foreign:  # nodes that may have written into their saved tensors
                if state is not None:
                    set_random_state(state)
                recorder, losses, aux = run()
                recorder.foreign(losses)
        back(collector.add, last=True)
    if recorder.unreached:
        _check_unreached(call, frozenset(recorder.unreached))
    if recorder.saves:
        _check_saved(call)
    aux = map_tensors(Tensor.detach, aux)
    return Chunk(collector, losses.detach(), aux, "recorded")


@contextmanager
def _columns(call: Call, scales: Tensor, add: Take) -> Iterator[tuple[Tensor, Take]]:
    """Run a backward pass for several columns under a vmap over them."""
    if (count := scales.shape[1]) == 1:
        yield scales[:, 0], lambda name, factor: add(name, Columns.one(factor))
    else:
        with modes.vmapped(count) as (inside, outside):

            def add_joint(name: str, factor: Factor) -> None:
                joint = Columns.of(factor, count, outside)
                with modes.without_innermost():
                    add(name, joint)

            yield inside(scales.movedim(1, 0)), add_joint


def vmap(call: Call, collect: Collect) -> Chunk:
    """Differentiate under `torch.vmap`: all gradients are stored, several times."""

    def one(tensors: tuple[Tensor, ...]) -> tuple:
        level = VmapLevel(modes.current_level(), "sample", 'strategy="loop"')

        def of_params(params: Params) -> tuple[Tensor, Tree]:
            mode = call.mode(handlers=SAMPLES, vmap=level, rooms=call.fallbacks.rooms)
            return call.run_loss(params, tensors, mode)

        return _functional_gradient(of_params, call)

    mapped = torch.vmap(one, randomness=call.randomness)
    with _clear_errors(call):
        grads, losses, aux = mapped(call.batch.inputs)
    return _collected(call, collect, grads, losses, aux, "vmap")


def loop(call: Call, collect: Collect) -> Chunk:
    """Differentiate one sample by plain autograd."""
    result = tree_map_only(Tensor, lambda leaf: leaf.unsqueeze(0), _one_sample(call))
    grads, losses, aux = result
    return _collected(call, collect, grads, losses, aux, "loop")


def auto(call: Call, collect: Collect) -> Chunk:
    """Record; else differentiate under `torch.vmap`; else one sample after another.

    A loss that was refused is so again for tensors of the same kinds, unless it reads
    values. So it takes its way at once from then on. A private run keeps the route of
    its first step, or raises.
    """
    history = call.history
    if modes.inside_transform():
        return vmap(call, collect)
    if call.captured:  # eager mode has run the loss before
        if history.way == "loop":
            raise Unrepeatable("its samples run one after another")
        return STRATEGIES[history.way](call, collect)
    route = call.fallbacks.route if call.private else "auto"
    if route == "loop":
        before = Failure("its first step", "the run began so", refused=True)
        history.failure, history.lasting = history.failure or before, True
    if route != "auto":
        history.way = route
    elif not history.lasting:
        history.way, history.failure = history.first, history.refuted
    state = random_state(call.tensors) if call.randomness != "error" else None
    refused = True
    while history.way != "loop":
        try:
            chunk = STRATEGIES[history.way](call, collect)
        except NON_RETRYABLE:
            raise
        except Exception as error:
            failure = Failure.of(error)
            if route != "auto":
                raise _changes_its_way(call, failure) from error
            if state is not None:  # the next strategy draws the same numbers
                set_random_state(state)
            refused &= failure.refused
            history.lasting = False
            if history.way == "recorded":
                history.way, history.failure = "vmap", failure
            else:
                history.way = "loop"
        else:
            if history.failure is not None and not history.failure.refused:
                call.fallbacks.fell_back(
                    f"{call.function}: the recorder stopped at "
                    f"{history.failure.where}, so all gradients are stored, which is "
                    f"slow. {history.failure.why}"
                )
            history.lasting = refused and not call.draws.values_read
            return chunk
    failure = cast(Failure, history.failure)
    if not history.lasting:
        try:  # raises the error of plain autograd for the first sample
            with kept_random_state(call.tensors):
                _one_sample(call.select(slice(1)))
        except Exception as error:
            if failure.refused:
                why = _ADVICE.sub("", failure.why)
                error.add_note(
                    f"A loop was tried, since a recorded pass ended in: {why}."
                )
            raise
        history.lasting = refused and not call.draws.values_read
    call.fallbacks.fell_back(
        f"{call.function}: runs one sample after another, since neither a recorded "
        f"pass nor vmap can run the loss. The numbers are right, but slow. It stopped "
        f"at {failure.where}: {failure.why}"
    )
    raise SplitBatch(
        Partition(torch.arange(call.batch.size).split(1), failure.where, "loop")
    )


def _changes_its_way(call: Call, failure: Failure) -> UnsupportedOp:
    return UnsupportedOp(
        f"{call.function}(loss, strategy={call.strategy!r}): expected a loss that runs "
        f"by {call.history.way!r} for every batch, as it did before, since the way of "
        f"private training must not depend on the samples, got {failure.why} at "
        f'{failure.where}. Use strategy="loop".'
    )


STRATEGIES: dict[Strategy, Callable[[Call, Collect], Chunk]] = {
    "auto": auto,
    "recorded": recorded,
    "vmap": vmap,
    "loop": loop,
}

_ADVICE = re.compile(r'[,.]? (or )?(use )?strategy="loop".*', re.IGNORECASE)
"""Advice of errors to use a loop, which was tried."""


def _one_sample(call: Call) -> tuple[Params, Tensor, Tree]:
    inside = modes.inside_transform()
    gradient = _functional_gradient if inside else plain_gradient
    before = random_state(call.tensors)
    tensors = call.batch.one(0)

    def of_params(params: Params) -> tuple[Tensor, Tree]:
        mode = call.mode(handlers=SINGLE)
        return call.run_loss(params, tensors, mode, unbatched=True)

    with _no_weight_cache():
        result = gradient(of_params, call)
        # Of a private step that draws others again, two sums would have one noise.
        own, again = call.draws.used_generator, partial(gradient, of_params, call)
        call.refuse_draws(before, "sample", again, own=call.private and own)
    return result


def saved_bytes(call: Call) -> int:
    """Return how many bytes autograd keeps for the backward pass of one sample."""
    seen: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Lazy):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would make a cycle

    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with hooks, _trial(call):
        loss = _first(call, _leaves(call))
    # Factors hold as much again where a node is not torch's own.
    return sum(seen.values()) * (2 if foreign_nodes([loss]) else 1)


def _first(
    call: Call, params: Params, *protected: Protected, seen: bool = False
) -> Tensor:
    mode = call.mode(*protected, handlers=SINGLE, seen=seen)
    return call.run_loss(params, call.batch.one(0), mode, unbatched=True)[0].sum()


def advanced(options: Call, params: Params, buffers: Buffers, batch: Tree) -> Buffers:
    """Return buffers after a step, as the loss leaves them for a sample of zeros.

    So they hold nothing of the batch, and an empty one advances them too. A sample of
    ones stands in where the loss takes no zeros.
    """
    seen, empty = options.fallbacks.written, not len(tree.tensors(batch)[0])
    cut = any(map(is_distributed, params.values()))
    if not seen and (cut or not buffers or not empty):
        return buffers
    written: dict[str, Any] = {}
    failure: Exception | None = None
    for number in () if cut else (0, 1):
        probe = map_tensors(lambda x, n=number: x.new_full((1, *x.shape[1:]), n), batch)
        notes, failure = Fallbacks(), None
        with torch.inference_mode(False), torch.no_grad():
            trial = options.replaced(fallbacks=notes)
            trial = trial.on(Inputs(params, buffers, probe))
            try:
                with _trial(trial):
                    _first(trial, dict(trial.params))
            except NON_RETRYABLE:
                raise
            except Exception as raised:  # of the loss, perhaps after the model wrote
                failure = raised
        written = notes.written
        if written.keys() >= seen.keys() and (seen or failure is None):
            break
    new = dict(buffers)
    for name in {**written, **seen} if empty else [*seen]:
        value, expected = written.get(name), seen.get(name)
        if isinstance(expected, Tensor) and value is not None:
            expected = checks.same_values(expected, value)
        if expected is None and value is None:
            continue  # it was written in earlier steps alone
        if expected is False or value is None or name not in buffers:
            seen.clear()
            raise RuntimeError(
                f"{options.function}(loss): expected a forward pass that writes the "
                f"same into buffers of the state for all samples and for one of zeros "
                f"or ones, as power iterations do, or nothing, got another write into "
                f"{name!r}. Call .eval() of its module, or gather parameters that are "
                f"DTensors."
            ) from failure
        if value.shape == buffers[name].shape:  # else it is a cache, made in each call
            new[name] = value.to(buffers[name].dtype)
    seen.update(dict.fromkeys(seen))  # as written in an earlier step
    return new


def _check_unreached(call: Call, names: frozenset[str]) -> None:
    """Confirm with plain autograd that gradients that did not arrive are zero."""
    if call.confirmed(names):
        return
    leaves = {n: p.detach().requires_grad_() for n, p in call.params.items()}
    grads: Sequence[Tensor | None] = [None] * len(names)
    with _trial(call):
        value = _first(call, leaves, seen=True)
        if value.requires_grad:
            wanted = [leaves[name] for name in sorted(names)]
            grads = torch.autograd.grad(value, wanted, allow_unused=True)
    pairs = zip(sorted(names), grads, strict=True)
    if reached := [name for name, grad in pairs if grad is not None]:
        raise UnsupportedOp(
            f"loss: expected gradients of all samples wherever one sample has some, "
            f"got none of {checks.listed(reached)}: an op hides its graph from the "
            f'recorder. Use strategy="vmap" or "loop".'
        )
    call.unreached.add(names)


def _check_saved(call: Call) -> None:
    """Check hooks on the tensors that one sample saves, whose shapes are others."""

    def begun() -> Callable[[], AbstractContextManager]:
        check_saved(captured=call.captured)
        return nullcontext

    with _trial(call):
        _first(call, _leaves(call), Protected({}, "", "", begun))


def _collected(
    call: Call,
    collect: Collect,
    grads: Params,
    losses: Tensor,
    aux: Tree,
    strategy: Strategy,
) -> Chunk:
    """Pass stored gradients on, so that no more than one is held twice."""
    collector = collect()
    add = call.unscaled(collector.add)
    with no_autocast(losses.device):
        for name in list(grads):
            add(name, Dense(grads.pop(name)))
    return Chunk(collector, losses, aux, strategy)


def _leaves(call: Call) -> Params:
    """Return the tensors to differentiate: views of the parameters, or new leaves."""
    # Where a caller can differentiate the result they are views, and not the parameters
    # themselves, which the loss may also reach by another route.
    differentiable = call.differentiable
    return {
        name: value.view_as(value)
        if differentiable and value.requires_grad
        else value.detach().requires_grad_()
        for name, value in call.params.items()
    }


def plain_gradient(of_params: Callable, call: Call) -> tuple:
    """Return gradients, loss and aux of one sample, by plain autograd."""
    leaves, create_graph = _leaves(call), call.differentiable
    params = call.params.values() if create_graph else ()
    with torch.enable_grad():
        value, aux = of_params(leaves)
        _copied_on_arrival(value, leaves, call)
        scales = call.cotangent(value, aux)
        if not value.requires_grad:  # it depends on no parameter
            more = scales.shape[:1] if call.columns else ()
            zeros = {
                n: leaf.new_zeros((*more, *leaf.shape)) for n, leaf in leaves.items()
            }
            return zeros, value, aux
        if autograd.reenters(value):
            raise UnsupportedOp(autograd.REENTRANT_ERROR)

        def back(scales: Tensor) -> list[Tensor]:
            for leaf in leaves.values():
                if leaf.is_leaf:
                    leaf.grad = None  # in which the loss has accumulated for itself
            grads = torch.autograd.grad(
                value,
                list(leaves.values()),
                grad_outputs=scales,
                create_graph=create_graph,
                retain_graph=create_graph or call.columns,
                allow_unused=True,
                materialize_grads=True,
            )
            # Gradients of a backward pass inside of that one, as of reversible layers.
            inner = [leaf.grad if leaf.is_leaf else None for leaf in leaves.values()]
            return [
                (grad if more is None else grad + more).to_dense()
                for grad, more in zip(grads, inner, strict=True)
            ]

        with no_autocast(value.device), own_backward_passes(params):
            if call.columns:
                columns = zip(*map(back, scales.unbind()), strict=True)
                grads = [*map(torch.stack, columns)]
            else:
                grads = back(scales)
    if not create_graph:
        value, aux = tree_map_only(Tensor, torch.Tensor.detach, (value, aux))
    return dict(zip(leaves, grads, strict=True)), value, aux


def _functional_gradient(of_params: Callable, call: Call) -> tuple:
    def watched(params: Params) -> tuple[Tensor, Tree]:
        value, aux = of_params(params)
        _copied_on_arrival(value, params, call)
        return value, aux

    forward = torch.func.vjp(watched, dict(call.params), has_aux=True)
    value, pullback, aux = cast(tuple[Tensor, Callable, Tree], forward)
    # As in eager training, autocast covers the forward pass alone.
    with no_autocast(value.device):
        scales = call.cotangent(value, aux)
        if not call.columns:
            (grads,) = pullback(scales)
        else:  # a vmap over columns would be inside another, for which rules are wrong
            columns = [pullback(scale)[0] for scale in scales.unbind()]
            grads = map_values(lambda *grads: torch.stack(grads), *columns)
    return grads, value, aux


def _copied_on_arrival(value: Tensor, params: Params, call: Call) -> None:
    if call.fallbacks.hooks or foreign_nodes([value]):  # they may write in place
        for param in params.values():
            copy_on_arrival(param)


@contextmanager
def _trial(call: Call) -> Iterator[None]:
    with kept_random_state(call.tensors), torch.enable_grad(), _no_weight_cache():
        yield


@contextmanager
def _clear_errors(call: Call) -> Iterator[None]:
    """Add advice to errors and warnings of vmap."""
    with (
        call.fallbacks.reported(call.function),
        _no_weight_cache(),
        modes.unoptimized_scripts(),
        autograd.for_all(old_style=True),
    ):
        try:
            yield
        except UnsupportedOp:
            raise
        except RuntimeError as error:
            raise_clearly(error, call.function)


@contextmanager
def _no_weight_cache() -> Iterator[None]:
    # A cast that was cached at one level of a transform is a constant for the next one,
    # whose gradient then is zero, without an error.
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
