"""What a per-sample transform returns, and how a call runs chunk after chunk."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import batches, checks
from vgrad.conditions import are_collected
from vgrad.generators import ALONE, random_state, set_random_state
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.problem import Problem
from vgrad.persample.engine.strategies import STRATEGIES, Chunk, saved_bytes
from vgrad.persample.factors import reductions
from vgrad.precision.loss_scale import LossScale
from vgrad.torch_private import levels
from vgrad.torch_private.tensors import version_of
from vgrad.tree import tree_map, tree_map_only
from vgrad.typing import Buffers, Params, Tree


class Quantity(NamedTuple):
    """How a quantity is computed chunk by chunk.

    Attributes:
        collect: makes what the factors of a chunk are handed to, given its problem.
        measure: what is taken from that, a tree of tensors, given the problem too.
        join: the quantity of the batch, given that of every chunk and the call.
    """

    collect: Callable[[Problem], Collector]
    measure: Callable[[Any, Problem], Tree]
    join: Callable[[Iterator[Any], "Call"], Any]


class Transform:
    """What the per-sample transforms return: a function of `(params, buffers, *batch)`.

    A `mask` `[B]` says which samples count. The others, such as copies that fill a
    batch up to a fixed size, are run too, but add exactly zero and appear in no result.

    Attributes:
        options: what the transform was given.
    """

    def __init__(self, options: Problem, quantity: Quantity | None = None) -> None:
        """Check the options; without a quantity a subclass has its own `called`."""
        _check(options)
        self.options = options
        self._quantity = quantity

    @property
    def quantity(self) -> Quantity:
        """How the quantity is computed chunk by chunk."""
        assert self._quantity is not None
        return self._quantity

    @property
    def joins(self) -> bool:
        """Whether the quantity of a batch follows from those of its chunks."""
        return self._quantity is not None

    def __call__(
        self,
        params: Params,
        buffers: Buffers,
        /,
        *batch: Tree,
        mask: Tensor | None = None,
    ) -> Any:
        """Compute the quantity of this batch."""
        found = self.on_all(params, buffers, batch, mask)
        return found if mask is None else self.selected(found, mask)

    def on_all(
        self,
        params: Params,
        buffers: Buffers,
        batch: Tree,
        mask: Tensor | None = None,
        more: Any = None,
        loss_scale: LossScale | None = None,
    ) -> Any:
        """Compute the quantity, with entries for the samples that do not count too.

        In inference mode, where autograd does not work, compute outside of it. `more`
        is what some transforms are given beside a batch, and `loss_scale` takes the
        place of that of the options.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.on_all(params, buffers, batch, mask, more, loss_scale)
        weights = more if self.joins else None
        problem = self.options.on(params, buffers, batch, mask, weights, loss_scale)
        return self.called(Call(problem), more)

    def called(self, call: "Call", more: Any) -> Any:
        """Compute the quantity; `more` are the call's weights, if any."""
        return self.of(call)

    def of(
        self, call: "Call", execute: Callable[[Problem], Chunk] | None = None
    ) -> Any:
        """Compute the quantity of a call; `execute` runs a chunk of it."""
        quantity = self.quantity
        parts = call.parts(execute or partial(_measured, quantity))
        return call.result(quantity.join(parts, call))

    def part(
        self,
        params: Params,
        buffers: Buffers,
        batch: Tree,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        loss_scale: LossScale | None = None,
    ) -> Chunk:
        """Compute what there is to know of one chunk."""
        problem = self.options.on(params, buffers, batch, mask, weights, loss_scale)
        return _measured(self.quantity, problem)

    def selected(self, found: Any, rows: Any, more: Any = None) -> Any:
        """Keep the entries of some samples in a result; `more` is that of `on_all`."""
        if not self.options.has_aux:
            return self.of_samples(found, rows)
        value, aux = found
        kept = None if aux is None else tree_map(lambda leaf: leaf[rows], aux)
        return self.of_samples(value, rows), kept

    def of_samples(self, value: Any, rows: Any) -> Any:
        """Keep the entries of some samples in the quantity."""
        return tree_map(lambda leaf: leaf[rows], value)


def _measured(quantity: Quantity, problem: Problem) -> Chunk:
    """Run the strategy, and measure what was collected."""
    chunk = STRATEGIES[problem.strategy](problem, lambda: quantity.collect(problem))
    return chunk._replace(collected=quantity.measure(chunk.collected, problem))


class Call:
    """One call of a transform: its problem, and what its chunks have in common.

    `dtype` is that of norms over all parameters, `done` how many samples were run.
    """

    def __init__(self, problem: Problem) -> None:
        """Start before the first chunk."""
        self.problem = problem
        self.params = problem.params
        self.dtype = reductions.norm_dtype(problem.params)
        self.done = 0
        self._chunks: list[Chunk] = []

    def parts(
        self, execute: Callable[[Problem], Chunk], problem: Problem | None = None
    ) -> Iterator[Any]:
        """Run chunk after chunk, and yield what was collected of each.

        After the last one, check that the loss left its inputs as they were. `problem`
        is another one than the call's own.
        """
        problem = problem or self.problem
        if problem.batch.size == 0:
            return
        fixed = {**problem.params, **problem.buffers}
        versions = {name: version_of(value) for name, value in fixed.items()}
        # Only a loop asks the generators whether the loss drew what it must not.
        draws = problem.randomness != "error" or problem.strategy == "loop"
        alone = ALONE if draws else nullcontext()
        with alone:
            same = problem.randomness == "same"
            state = random_state(problem.tensors) if same else None

        def run(start: int, stop: int) -> Any:
            with alone:
                if state is not None and start:
                    set_random_state(state)
                chunk = execute(problem.part(start, stop))
            self.done += stop - start
            self._chunks.append(chunk._replace(collected=None))
            return chunk.collected

        for start, stop in batches.chunks(problem.batch.size, at_a_time(problem)):
            yield run(start, stop)
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
            f'since it was recorded in one backward pass. Use strategy="vmap", or '
            f"torch.no_grad() or detached parameters if no derivative is wanted."
        )


def at_a_time(problem: Problem) -> int | None:
    """Return how many samples a chunk has; None for all."""
    if problem.strategy == "loop":
        return 1
    if problem.chunk_size != "auto":
        return problem.chunk_size
    if are_collected():  # whoever captures this has split the batch
        return None
    if levels.inside_transform():
        raise ValueError(
            f'{problem.function}(chunk_size="auto"): expected a number inside a '
            f"transform of torch.func, where memory cannot be measured."
        )
    return batches.fitting(problem.params, saved_bytes(problem), problem.device)


def _check(options: Problem) -> None:
    """Refuse options that no strategy knows."""
    function, loss_scale = options.function, options.loss_scale
    if not callable(options.loss):
        raise TypeError(
            f"{function}(loss={options.loss!r}): expected a function "
            f"loss(params, buffers, *sample), for example from sample_loss."
        )
    checks.one_of(function, tuple(STRATEGIES), strategy=options.strategy)
    batches.check_chunk_size(function, options.chunk_size)
    kinds = ("error", "different", "same")
    checks.one_of(function, kinds, randomness=options.randomness)
    if loss_scale is not None and not hasattr(loss_scale, "loss_scale"):
        raise TypeError(
            f"{function}(loss_scale={loss_scale!r}): expected a loss scale such as "
            f"precision.StaticLossScale(2.0**15), got a {type(loss_scale).__name__}."
        )
    scale = torch.as_tensor(getattr(loss_scale, "loss_scale", 1.0))
    if scale.ndim:
        raise ValueError(
            f"{function}(loss_scale): expected a scale without dimensions, got one of "
            f"shape {tuple(scale.shape)}. For one scale a member use torch.vmap."
        )
