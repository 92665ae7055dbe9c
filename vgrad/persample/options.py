"""What every per-sample transform is given, and how it runs its strategy."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vgrad import checks
from vgrad.persample import batches
from vgrad.persample.batches import ChunkSize
from vgrad.persample.guard import Fallbacks
from vgrad.persample.strategies import (
    STRATEGIES,
    Chunk,
    Problem,
    Randomness,
    saved_bytes,
)
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
    fallbacks: Fallbacks = field(default_factory=Fallbacks)

    def __post_init__(self) -> None:
        """Refuse values that no strategy knows."""
        if not callable(self.loss):
            raise TypeError(
                f"{self.function}(loss={self.loss!r}): expected a function "
                f"loss(params, buffers, *sample), for example from sample_loss."
            )
        checks.one_of(self.function, ("auto", *STRATEGIES), strategy=self.strategy)
        batches.check_chunk_size(self.function, self.chunk_size)
        kinds = ("error", "different", "same")
        checks.one_of(self.function, kinds, randomness=self.randomness)

    def chunks(self, params: Params, buffers: Buffers, batch: Tree) -> Iterator[Chunk]:
        """Run the strategy, then check that the loss left its inputs as they were."""
        checks.dictionaries(self.function, params=params, buffers=buffers)
        _check_tensors(self.function, params, buffers)
        problem = Problem(
            self.function,
            self.loss,
            {name: _ordinary(value) for name, value in params.items()},
            {name: _ordinary(value) for name, value in buffers.items()},
            batches.read(self.function, batch),
            self.randomness,
            self.has_aux,
            self.fallbacks,
        )
        if problem.batch.size == 0:
            return
        fixed = {**problem.params, **problem.buffers}
        versions = {name: value._version for name, value in fixed.items()}
        strategy = "vmap" if self.strategy == "auto" else self.strategy
        yield from STRATEGIES[strategy](problem, self._rows_at_a_time(problem))
        for name, version in versions.items():
            if fixed[name]._version != version:
                raise RuntimeError(
                    f"{self.function}(loss): expected a loss that changes nothing it "
                    f"is given, but it wrote into {name!r} in place. Copy it first."
                )

    def result(self, value: Any, parts: list[Chunk]) -> Any:
        """Add the stacked aux where the loss returns one."""
        if not self.has_aux:
            return value
        trees = [part.aux for part in parts]
        if not trees:
            return value, None
        return value, pytree.tree_map(lambda *leaves: torch.cat(leaves), *trees)

    def _rows_at_a_time(self, problem: Problem) -> int | None:
        if self.chunk_size != "auto":
            return self.chunk_size
        if checks.inside_transform():
            raise ValueError(
                f'{self.function}(chunk_size="auto"): expected a number inside a '
                f"transform of torch.func, where memory cannot be measured."
            )
        device = next(iter(problem.params.values())).device
        return batches.fitting(problem.params, saved_bytes(problem), device)


def outside_inference_mode(function: Callable) -> Callable:
    """Run a function where autograd works, without a graph for the caller."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args)

    return run


def joined(empty: Tensor, parts: list[Tensor]) -> Tensor:
    """Concatenate over samples; one part is not copied, `empty` is for none."""
    if not parts:
        return empty
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ordinary(value: Tensor) -> Tensor:
    """Copy a tensor made in inference mode, which autograd cannot use."""
    return value.clone() if value.is_inference() else value


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
