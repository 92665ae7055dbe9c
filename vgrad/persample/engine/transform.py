"""What a per-sample transform returns, and how a call runs chunk after chunk."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from vgrad import batches, checks
from vgrad.batches import Batch
from vgrad.generators import ALONE, random_state, set_random_state
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.problem import Problem
from vgrad.persample.engine.strategies import STRATEGIES, Chunk, saved_bytes
from vgrad.persample.factors import reductions
from vgrad.torch_private import levels
from vgrad.torch_private.tensors import version_of
from vgrad.tree import tree_map, tree_map_only
from vgrad.typing import Buffers, Params, Tree

Collecting = TypeVar("Collecting", bound=Collector)


class Transform:
    """What the per-sample transforms return: a function of `(params, buffers, *batch)`.

    Attributes:
        options: what the transform was given.
    """

    def __init__(self, options: Problem, compute: Callable[..., Any]) -> None:
        """Check the options; `compute(call)` does the rest."""
        _check(options)
        self.options = options
        self._compute = compute

    def __call__(self, params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        """Compute the quantity of this batch."""
        return self._called(params, buffers, batch)

    def _called(self, params: Params, buffers: Buffers, batch: Tree, *more: Any) -> Any:
        """Compute; in inference mode, where autograd does not work, outside of it."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self._called(params, buffers, batch, *more)
        return self._compute(Call(self.options.on(params, buffers, batch)), *more)


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

    def chunks(
        self, collect: Callable[[], Collecting], batch: Batch | None = None
    ) -> Iterator[Collecting]:
        """Run the strategy, and yield what was collected of each chunk.

        After the last one, check that the loss left its inputs as they were. `batch` is
        another one than the call's own.
        """
        problem = self.problem
        batch = problem.batch if batch is None else batch
        if batch.size == 0:
            return
        if batch is not problem.batch:
            problem = replace(problem, batch=batch)
        fixed = {**problem.params, **problem.buffers}
        versions = {name: version_of(value) for name, value in fixed.items()}
        run = STRATEGIES[problem.strategy]
        # Only a loop asks the generators whether the loss drew what it must not.
        draws = problem.randomness != "error" or problem.strategy == "loop"
        alone = ALONE if draws else nullcontext()
        with alone:
            same = problem.randomness == "same"
            state = random_state(problem.tensors) if same else None

        def collected(start: int, stop: int) -> Collecting:
            with alone:
                if state is not None:
                    set_random_state(state)
                chunk = run(problem, collect, start, stop)
            self.done += stop - start
            self._chunks.append(chunk._replace(collected=None))
            return chunk.collected

        for start, stop in batches.chunks(batch.size, _at_a_time(problem)):
            yield collected(start, stop)
        for name, version in versions.items():
            if version_of(fixed[name]) != version:
                raise RuntimeError(
                    f"{problem.function}(loss): expected a loss that changes nothing "
                    f"it is given, but it wrote into {name!r} in place. Copy it first."
                )

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
        given = [
            each for each in (*self.problem.tensors, *others) if each.requires_grad
        ]
        if not given:
            return value
        wanted = {id(each): each for each in given}.values()

        def guard(leaf: Tensor) -> Tensor:
            real = leaf.is_floating_point() or leaf.is_complex()
            name = self.problem.function
            return _Constant.apply(name, leaf, *wanted) if real else leaf

        return tree_map_only(Tensor, guard, value)


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


def _at_a_time(problem: Problem) -> int | None:
    """Return how many samples a chunk has; None for all."""
    if problem.strategy == "loop":
        return 1
    if problem.chunk_size != "auto":
        return problem.chunk_size
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
