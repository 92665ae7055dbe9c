"""One call of a per-sample transform: chunk after chunk, and the parts of a chunk."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vgrad import batches
from vgrad.conditions import checks_collected
from vgrad.generators import RNG_LOCK, drawn_since, random_state, set_random_state
from vgrad.lowering.mode import tried
from vgrad.lowering.randomness import Draws, check_drawn
from vgrad.lowering.value_reads import Parts
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.guard import Fallbacks
from vgrad.persample.engine.ladder import STRATEGIES
from vgrad.persample.engine.problem import Problem
from vgrad.persample.engine.strategies import Chunk, saved_bytes
from vgrad.persample.factors import Sums, reductions
from vgrad.torch_private import modes
from vgrad.torch_private.tensors import version_of
from vgrad.tree import tree_map, tree_map_only
from vgrad.typing import Params

Reduce = Callable[[Params], Params]


class Call:
    """One call of a transform: its problem, and what its chunks have in common.

    `dtype` is that of norms over all parameters, `done` how many samples were run. With
    `reduce` others take part in the call, each with samples of its own: it returns the
    sums of what all of them give it.
    """

    def __init__(self, problem: Problem, reduce: Reduce | None = None) -> None:
        """Start before the first chunk."""
        self.reduce = reduce
        self.problem = problem
        self.params = problem.params
        self.dtype = reductions.norm_dtype(problem.params)
        self.done = 0
        self._chunks: list[Chunk] = []
        self._rows: list[Sequence[int]] = []
        self._split = False

    def parts(
        self,
        execute: Callable[[Problem], Chunk],
        problem: Problem | None = None,
        whole: Callable[[Problem], Chunk] | None = None,
    ) -> Iterator[Any]:
        """Run chunk after chunk, and yield what was collected of each.

        After the last one, check that the loss left its inputs as they were. `problem`
        is another one than the call's own, and `whole` another way to run a chunk, but
        not the parts into which it may fall.
        """
        problem = problem or self.problem
        if problem.batch.size == 0:
            return
        fixed = {**problem.params, **problem.buffers}
        versions = {name: version_of(value) for name, value in fixed.items()}
        # Only a loop asks the generators whether the loss drew what it must not.
        draws = problem.randomness != "error" or problem.strategy == "loop"
        alone = RNG_LOCK if draws else nullcontext()
        with alone:
            same = problem.randomness == "same"
            state = random_state(problem.tensors) if same else None
        first = True
        for start, stop in batches.chunks(problem.batch.size, at_a_time(problem)):
            left: list[tuple[Problem, Sequence[int]]]
            left = [(problem.part(start, stop), range(start, stop))]
            run = whole or execute
            while left:
                part, rows = left.pop(0)
                with alone:
                    if state is not None and not first:
                        set_random_state(state)
                    first = False
                    found = _run(part, run, execute)
                if not isinstance(found, Chunk):
                    left[:0] = [
                        (each, [rows[place] for place in own.tolist()])
                        for each, own in found
                    ]
                    self._split, run = True, execute
                    continue
                self.done += len(rows)
                self._rows.append(rows)
                self._chunks.append(found._replace(collected=None))
                yield found.collected
        for name, version in versions.items():
            if version_of(fixed[name]) != version:
                raise RuntimeError(
                    f"{problem.function}(loss): expected a loss that changes nothing "
                    f"it is given, but it wrote into {name!r} in place. Copy it first."
                )

    def chunks(
        self, collect: Callable[[], Collector], problem: Problem | None = None
    ) -> Iterator[Any]:
        """Run chunk after chunk, and yield the collector of each."""

        def execute(part: Problem) -> Chunk:
            return STRATEGIES[part.strategy](part, collect)

        return self.parts(execute, problem)

    def summed(self, sums: Sums, *others: Tensor) -> list[Tensor]:
        """Make sums those of all that take part in the call, and return `others` so."""
        if self.reduce is None:
            return list(others)
        sums.totals = self.reduce(sums.rounded(self.params))  # one dtype for all
        numbered = {str(number): each for number, each in enumerate(others)}
        return [*self.reduce(numbered).values()] if others else []

    @property
    def places(self) -> Tensor | None:
        """Where each sample is among those that were run; None if they ran in order."""
        if not self._split:
            return None
        rows = [row for part in self._rows for row in part]
        if rows == sorted(rows):
            return None
        return torch.tensor(rows).argsort()

    @property
    def losses(self) -> Tensor:
        """The losses of all samples that were run."""
        empty = reductions.no_norms(self.params, self.dtype)
        return joined(empty, [chunk.losses for chunk in self._chunks])

    def result(self, value: Any, *others: Tensor) -> Any:
        """Add the stacked aux where the loss returns one; mark what is a constant.

        `others` are tensors from which the value was computed as well.
        """
        if self.problem.has_aux:
            trees = [chunk.aux for chunk in self._chunks]
            joint = trees and tree_map(lambda *each: torch.cat(each), *trees)
            value = value, joint if trees else None
        recorded = any(chunk.recorded for chunk in self._chunks)
        if not recorded or not torch.is_grad_enabled():
            return value
        given = [*self.problem.tensors, *others]
        return constant(self.problem.function, value, given)


def constant(function: str, value: Any, given: Iterable[Tensor]) -> Any:
    """Mark a result as a constant for those of its inputs that require grad."""
    wanted = {id(each): each for each in given if each.requires_grad}.values()

    def guard(leaf: Tensor) -> Tensor:
        real = leaf.is_floating_point() or leaf.is_complex()
        return _Constant.apply(function, leaf, *wanted) if real else leaf

    return tree_map_only(Tensor, guard, value) if wanted else value


def joined(empty: Tensor, parts: list[Tensor]) -> Tensor:
    """Concatenate over samples; one part is not copied, `empty` is for none."""
    if not parts:
        return empty
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Constant(torch.autograd.Function):
    """A recorded result: whoever differentiates it gets an error, not zeros."""

    @staticmethod
    def forward(ctx: Any, function: str, value: Tensor, *tensors: Tensor) -> Tensor:
        """Return the value."""
        ctx.function = function
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Say which strategy has a derivative."""
        raise RuntimeError(
            f"{ctx.function}: expected a result that is not differentiated again, "
            f"since it was recorded in one backward pass. If a derivative is wanted, "
            f'use strategy="vmap"; if not, .detach() the result, or let no parameter '
            f"require grad: make_functional_with_buffers(model, "
            f"disable_autograd_tracking=True)."
        )


def at_a_time(problem: Problem) -> int | None:
    """Return how many samples a chunk has; None for all."""
    if problem.strategy == "loop":
        return 1
    if problem.chunk_size != "auto":
        return problem.chunk_size
    if checks_collected():  # whoever captures this has split the batch
        return None
    if modes.inside_transform():
        raise ValueError(
            f'{problem.function}(chunk_size="auto"): expected a number inside a '
            f"transform of torch.func, where memory cannot be measured."
        )
    return batches.fitting(problem.params, saved_bytes(problem), problem.device)


def _keyed(
    fallbacks: Fallbacks,
    run: Callable[[Draws], Any],
    draws: Draws,
    tensors: Sequence[Tensor],
    *,
    differ: bool,
    again: Callable[[Draws], Any],
) -> tuple[Any, Draws]:
    """Run samples that have keys.

    Nobody looks for random ops in a loss that had none so far, unless it draws now.

    Raises:
        Unkeyed: numbers were drawn elsewhere than in the loss.
    """
    if checks_collected():  # whoever captures this must not miss a random op
        return tried(run, draws, tensors, differ=differ)
    before = random_state(tensors)
    if fallbacks.draws is False:
        draws.idle = True
        found, _ = tried(run, draws, tensors, differ=differ)
        draws.idle = False
        if not drawn_since(before, tensors):
            return found, draws
        set_random_state(before)
        fallbacks.draws, run = True, again
    found, _ = tried(run, draws, tensors, differ=differ)
    check_drawn(before, tensors)
    fallbacks.draws = draws.drew or bool(fallbacks.draws)
    return found, draws


def _run(
    part: Problem,
    run: Callable[[Problem], Chunk],
    again: Callable[[Problem], Chunk],
) -> Chunk | list[tuple[Problem, Tensor]]:
    """Run a chunk, or return the problems and the rows of the parts it falls into."""

    def with_draws(run: Callable[[Problem], Chunk]) -> Callable[[Draws], Chunk]:
        return lambda draws: run(
            part if draws is part.draws else replace(part, draws=draws)
        )

    try_ = tried if part.draws.keys is None else partial(_keyed, part.fallbacks)
    found, draws = try_(
        with_draws(run),
        part.draws,
        part.tensors,
        differ=part.randomness == "different",
        again=with_draws(again),
    )
    if not isinstance(found, Parts):
        return found
    if found.strategy is None:
        part.fallbacks.tell(found, part.function)
    elif found.why:
        part.fallbacks.warn(
            f"{part.function}: runs samples one after another because of {found.why}, "
            f"at {found.where}. The numbers are right, but slow."
        )
    part = replace(part, draws=draws)
    return [(part.rows(rows, found.strategy), rows) for rows in found.rows]
