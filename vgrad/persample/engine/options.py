"""What every per-sample transform is given, and how it runs its strategy."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vgrad import batches, checks
from vgrad.batches import ChunkSize
from vgrad.generators import ALONE, random_state, set_random_state
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.guard import Fallbacks
from vgrad.persample.engine.problem import Problem, Randomness
from vgrad.persample.engine.strategies import STRATEGIES, Chunk, saved_bytes
from vgrad.precision.loss_scale import LossScale
from vgrad.torch_private import levels
from vgrad.torch_private.tensors import version_of
from vgrad.tree import tree_map, tree_map_only
from vgrad.typing import Buffers, LossFn, Params, Tree


@dataclass(frozen=True)
class Options:
    """The options of one transform, checked once, and what it learns as it runs."""

    function: str
    loss: LossFn
    strategy: str
    chunk_size: ChunkSize
    randomness: Randomness
    has_aux: bool
    loss_scale: LossScale | None = None
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    unreached: set[frozenset[str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Refuse values that no strategy knows."""
        if not callable(self.loss):
            raise TypeError(
                f"{self.function}(loss={self.loss!r}): expected a function "
                f"loss(params, buffers, *sample), for example from sample_loss."
            )
        checks.one_of(self.function, tuple(STRATEGIES), strategy=self.strategy)
        batches.check_chunk_size(self.function, self.chunk_size)
        kinds = ("error", "different", "same")
        checks.one_of(self.function, kinds, randomness=self.randomness)
        if self.loss_scale is not None and not hasattr(self.loss_scale, "loss_scale"):
            raise TypeError(
                f"{self.function}(loss_scale={self.loss_scale!r}): expected a loss "
                f"scale such as precision.StaticLossScale(2.0**15), got a "
                f"{type(self.loss_scale).__name__}."
            )
        scale = torch.as_tensor(getattr(self.loss_scale, "loss_scale", 1.0))
        if scale.ndim:
            raise ValueError(
                f"{self.function}(loss_scale): expected a scale without dimensions, "
                f"got one of shape {tuple(scale.shape)}. For one scale a member use "
                f"torch.vmap."
            )

    def chunks(
        self,
        params: Params,
        buffers: Buffers,
        batch: Tree,
        collect: Callable[[], Collector],
        others: tuple[Tensor, ...] = (),
    ) -> Iterator[Chunk]:
        """Run the strategy, then check that the loss left its inputs as they were.

        `others` are tensors that the caller computes the result from as well.
        """
        checks.dictionaries(self.function, params=params, buffers=buffers)
        _check_tensors(self.function, params, buffers)
        problem = Problem(
            self.function,
            self.loss,
            {name: _ordinary(value) for name, value in params.items()},
            {name: _wanted(_ordinary(value)) for name, value in buffers.items()},
            batches.read(self.function, batch),
            self.randomness,
            self.has_aux,
            self.fallbacks,
            collect,
            self.loss_scale,
            others,
            self.unreached,
        )
        if problem.batch.size == 0:
            return
        fixed = {**problem.params, **problem.buffers}
        versions = {name: version_of(value) for name, value in fixed.items()}
        run = STRATEGIES[self.strategy]
        # Only a loop asks the generators whether a loss drew that was not to.
        draws = self.randomness != "error" or self.strategy == "loop"
        alone = ALONE if draws else nullcontext()
        with alone:
            same = self.randomness == "same"
            state = random_state(problem.tensors) if same else None

        def chunk(start: int, stop: int) -> Chunk:
            with alone:
                if state is not None:
                    set_random_state(state)
                return run(problem, start, stop)

        for start, stop in batches.chunks(
            problem.batch.size, self._rows_at_a_time(problem)
        ):
            yield chunk(start, stop)
        for name, version in versions.items():
            if version_of(fixed[name]) != version:
                raise RuntimeError(
                    f"{self.function}(loss): expected a loss that changes nothing it "
                    f"is given, but it wrote into {name!r} in place. Copy it first."
                )

    def result(self, value: Any, parts: list[Chunk]) -> Any:
        """Add the stacked aux where the loss returns one."""
        if self.has_aux:
            trees = [part.aux for part in parts]
            joint = parts and tree_map(lambda *each: torch.cat(each), *trees)
            value = value, joint if parts else None
        wanted = {id(each): each for part in parts for each in part.constants_of}
        if not wanted:
            return value

        def guard(leaf: Tensor) -> Tensor:
            real = leaf.is_floating_point() or leaf.is_complex()
            return (
                _Constant.apply(self.function, leaf, *wanted.values()) if real else leaf
            )

        return tree_map_only(Tensor, guard, value)

    def _rows_at_a_time(self, problem: Problem) -> int | None:
        if self.strategy == "loop":
            return 1
        if self.chunk_size != "auto":
            return self.chunk_size
        if levels.inside_transform():
            raise ValueError(
                f'{self.function}(chunk_size="auto"): expected a number inside a '
                f"transform of torch.func, where memory cannot be measured."
            )
        device = next(iter(problem.params.values())).device
        return batches.fitting(problem.params, saved_bytes(problem), device)


class _Constant(torch.autograd.Function):
    """A recorded result: who differentiates it gets an error, not zeros."""

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


class Transform:
    """What the per-sample transforms return: a function of `(params, buffers, *batch)`.

    Attributes:
        options: what the transform was given.
    """

    def __init__(self, options: Options, compute: Callable) -> None:
        """Take the function, which has the rest in its closure."""
        self.options = options
        self._compute = compute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute; in inference mode, where autograd does not work, outside of it."""
        if not torch.is_inference_mode_enabled():
            return self._compute(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return self._compute(*args, **kwargs)


def joined(empty: Tensor, parts: list[Tensor]) -> Tensor:
    """Concatenate over samples; one part is not copied, `empty` is for none."""
    if not parts:
        return empty
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ordinary(value: Tensor) -> Tensor:
    """Copy a tensor made in inference mode, which autograd cannot use."""
    return value.clone() if value.is_inference() else value


def _wanted(value: Tensor) -> Tensor:
    """Return what requires grad only if the caller wants to differentiate."""
    wanted = torch.is_grad_enabled() or not value.requires_grad
    return value if wanted else value.detach()


def _check_tensors(function: str, params: Params, buffers: Buffers) -> None:
    """Refuse parameters that have no gradient, and entries that are no tensors."""
    if not params:
        raise ValueError(
            f"{function}(params, ...): expected at least one parameter, got none. Are "
            f"all of them frozen?"
        )
    for name, value in (*params.items(), *buffers.items()):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{function}(params, buffers, ...): expected a tensor in {name!r}, got "
                f"a {type(value).__name__}."
            )
    for name, value in params.items():
        if not (value.is_floating_point() or value.is_complex()):
            raise ValueError(
                f"{function}(params, ...): expected floating-point parameters, got "
                f"{value.dtype} in {name!r}. Move it to the buffers."
            )
