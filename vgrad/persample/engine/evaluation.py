"""The run of a call in chunks and parts, and its results as one."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from vgrad.conditions import checks_collected
from vgrad.factors import Sums, reductions
from vgrad.generators import RNG_LOCK, drawn_since, random_state, set_random_state
from vgrad.loss.mode import run_or_split
from vgrad.loss.randomness import check_drawn
from vgrad.loss.values import Partition
from vgrad.persample.engine.call import Call, usable
from vgrad.persample.engine.chunk_size import at_a_time
from vgrad.persample.engine.guard import Failure
from vgrad.persample.engine.strategies import Chunk
from vgrad.torch_private import modes
from vgrad.torch_private.tensors import version_of
from vgrad.tree import map_tensors, map_values, tree_leaves, tree_map
from vgrad.typing import Arguments, Params, Result

Reduce = Callable[[Params], Params]


class Evaluation:
    """One run of a call, chunk after chunk; `reduce` sums tensors over ranks.

    `whole` runs a chunk that has not been split.
    """

    def __init__(
        self,
        call: Call,
        reduce: Reduce | None = None,
        whole: Callable[[Call], Chunk] | None = None,
    ) -> None:
        self.call, self.reduce, self.whole = call, reduce, whole
        self.params = call.params
        self.dtype = call.dtype
        self.done = 0  # samples
        self.chunks_run: list[Chunk] = []  # without the values that were collected
        self._rows: list[Sequence[int]] = []
        self._split = self._recorded = False

    def parts(self, execute: Callable[[Call], Chunk]) -> Iterator[Any]:
        """Run chunk after chunk, and yield their values."""
        call = self.call
        if call.batch.size == 0:
            return
        fixed = [*call.params.items(), *call.buffers.items()]
        versions = [version_of(value) for _, value in fixed]
        size = call.batch.size
        step = at_a_time(call) or size
        chunks = (range(size)[start : start + step] for start in range(0, size, step))
        calls = ((call.take(slice(rows.start, rows.stop)), rows) for rows in chunks)
        for chunk, rows in in_parts(calls, self.whole or execute, execute, _note):
            self.done += len(rows)
            copies = len(chunk.losses) - len(rows)  # which fill up a part
            self._rows.append([*rows, *[size] * copies])
            self._split |= not isinstance(rows, range)
            self._recorded |= chunk.strategy == "recorded"
            self.chunks_run.append(chunk._replace(collected=None))
            yield chunk.collected
        for version, (name, value) in zip(versions, fixed, strict=True):
            if version_of(value) != version:
                raise RuntimeError(
                    f"{call.function}(loss): expected a loss that changes nothing it "
                    f"is given, but it wrote into {name!r} in place. Copy it first."
                )

    def summed(self, sums: Sums, *counts: Tensor) -> list[Tensor]:
        """Reduce sums in place, and return reduced `counts`."""
        if self.reduce is None:
            return list(counts)
        sums.totals = self.reduce(sums.rounded(self.params))  # one dtype for all
        numbered = {str(number): count for number, count in enumerate(counts)}
        return [*self.reduce(numbered).values()] if counts else []

    @property
    def places(self) -> Tensor | None:
        """The place of each sample in the order of the run; None if it is its own."""
        if not self._split:
            return None
        rows = [row for part in self._rows for row in part]
        if len(rows) == self.done and rows == sorted(rows):
            return None
        return torch.tensor(rows).argsort()[: self.done]

    @property
    def losses(self) -> Tensor:
        if not self.chunks_run:
            return reductions.no_norms(self.params, self.dtype)
        return joined([chunk.losses for chunk in self.chunks_run])

    def result(self, value: Any) -> Any:
        """Add the stacked aux, and mark recorded results as constants."""
        if self.call.has_aux:
            trees = [chunk.aux for chunk in self.chunks_run]
            joint = trees and tree_map(lambda *leaves: torch.cat(leaves), *trees)
            value = value, joint if trees else None
        if not (self._recorded and self.call.differentiable):
            return value
        return constant(self.call.function, value, self.call.tensors)


def constant(function: str, value: Any, inputs: Iterable[Tensor]) -> Any:
    """Mark a result as a constant for all inputs that are differentiated by."""
    found = (x for x in inputs if x.requires_grad or unpack_dual(x).tangent is not None)
    wanted = {id(each): each for each in found}.values()

    def guard(leaf: Any) -> Any:
        if is_dataclass(type(leaf)):  # a matrix of curvature
            return replace(leaf, **map_values(mapped, vars(leaf)))
        tensor = isinstance(leaf, Tensor)
        real = tensor and (leaf.is_floating_point() or leaf.is_complex())
        return _Constant.apply(function, leaf, *wanted) if real else leaf

    mapped = partial(tree_map, guard, is_leaf=lambda x: isinstance(x, torch.Size))
    return mapped(value) if wanted else value


class _Constant(torch.autograd.Function):
    """A result without a graph: its derivative is an error, not zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: str, value: Tensor, *tensors: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.function = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{ctx.function}: expected a result that is not differentiated again, "
            f"since it was computed without a graph. If a derivative is wanted, use "
            f'strategy="vmap" of a per-sample transform; if not, .detach() the result, '
            f"or let no parameter require grad: make_functional_with_buffers(model, "
            f"disable_autograd_tracking=True)."
        )

    jvp = backward


def constants(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function run without a graph, in inference mode as outside of it.

    Where its arguments require grad, its results are constants, which say so.
    """
    name = function.__qualname__.partition(".<")[0].replace("._", ".")

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        given = [*_within((args, kwargs))]
        with torch.inference_mode(False), torch.no_grad():
            if any(map(Tensor.is_inference, given)):
                args, kwargs = map_tensors(usable, (args, kwargs))
            result = function(*args, **kwargs)
        inputs = given if torch.is_grad_enabled() else ()
        return constant(name, result, inputs)

    return run


def _within(value: Any) -> Iterator[Tensor]:
    """Yield tensors, those in matrices of curvature and products with them, too."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from _within(vars(leaf))
        elif isinstance(leaf, partial):
            yield from _within((leaf.args, leaf.keywords))


def joined(parts: list[Tensor]) -> Tensor:
    """Concatenate over samples; one part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def assembled(partials: Iterable[Params], size: int) -> Params:
    """Join `{name: [b, ...]}` of chunks, written into one result as they arrive."""
    whole: Params = {}
    rest: list[Params] = []
    done = 0
    for part in partials:
        first = next(iter(part.values()))
        end = done + len(first)
        # Autograd follows a join, and a part may be filled up with more samples.
        graph = modes.inside_transform() or first.requires_grad
        if rest or graph or end > size or len(first) == size:
            rest.append(part)
            continue
        for name in [*part]:  # which refers to a chunk until the next one has run
            value = part.pop(name)
            if not done:
                whole[name] = value.new_empty((size, *value.shape[1:]))
            whole[name][done:end] = value
        done = end
    parts = [{name: each[:done] for name, each in whole.items()}] if whole else []
    parts += rest
    return {n: joined([each[n] for each in parts]) for n in parts[0]} if parts else {}


def in_parts(
    calls: Iterable[tuple[Any, Sequence[int]]],
    run: Callable[[Any], Any],
    again: Callable[[Any], Any],
    note: Callable[[Any, Partition], None],
) -> Iterator[tuple[Any, Sequence[int]]]:
    """Run calls of samples or members, each with its rows; yield results and rows.

    Where values split a call, its parts run `again`; `note` is called for each split.
    """
    state = None
    for call, all_rows in calls:
        left = [(call, all_rows, run)]
        while left:
            part, rows, execute = left.pop(0)
            # Only a loop checks the generators for a loss that must not draw.
            draws = part.randomness != "error" or part.strategy == "loop"
            with RNG_LOCK if draws else nullcontext():
                if call.randomness == "same":
                    if state is not None:
                        set_random_state(state)
                    state = state or random_state(call.tensors)
                # A capture must not miss a random op.
                keyed = part.draws.keys is not None and not checks_collected()
                split = _keyed if keyed else run_or_split
                result, part = split(part, execute, again)
            if not isinstance(result, Partition):
                yield result, rows
                continue
            note(part, result)
            part = part.replaced(strategy=result.strategy or part.strategy)
            several = len(result.rows) > 1
            left[:0] = [
                (
                    part.take(places).by_itself() if several else part.take(places),
                    [rows[place] for place in places.tolist()],
                    again,
                )
                for places in result.rows
            ]


def _note(part: Call, parts: Partition) -> None:
    fallbacks = part.fallbacks
    if parts.strategy is None:
        fallbacks.tell(parts, part.function)
    elif parts.why:
        fallbacks.split = Failure(parts.where, parts.why, refused=True)
        fallbacks.warn(
            f"{part.function}: runs samples one after another because of {parts.why}, "
            f"at {parts.where}. The numbers are right, but slow."
        )


def _keyed(
    part: Any, run: Callable[[Any], Any], again: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """Run samples that have keys; refuse numbers that are drawn outside of the loss."""
    fallbacks, draws, before = part.fallbacks, part.draws, random_state(part.tensors)
    if fallbacks.draws is False:
        # None is looked for in a loss that had none so far, unless it draws now.
        draws.idle = True
        chunk, _ = run_or_split(part, run, again)
        draws.idle = False
        if not (draws.own or drawn_since(before, part.tensors)):
            return chunk, part
        set_random_state(before)
        fallbacks.draws, run = True, again
    chunk, _ = run_or_split(part, run, again)
    check_drawn(before, part.tensors, partial(run_or_split, part, run, again))
    fallbacks.draws = draws.drew or bool(fallbacks.draws)
    return chunk, part
