"""What a per-sample transform returns."""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, Self

import torch
from torch import Tensor

from vgrad.persample.engine.calls import Call
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.ladder import STRATEGIES
from vgrad.persample.engine.problem import Problem, check_loss_scale
from vgrad.persample.engine.strategies import Chunk
from vgrad.precision.loss_scale import LossScale
from vgrad.tree import tree_map
from vgrad.typing import Buffers, Params, Result, Tree


class Quantity(NamedTuple):
    """How a quantity is computed chunk by chunk.

    Attributes:
        collect: makes what the factors of a chunk are handed to, given its problem.
        measure: what is taken from that, a tree of tensors, given the problem too.
        join: the quantity of the batch, given that of every chunk and the call.
    """

    collect: Callable[[Problem], Collector]
    measure: Callable[[Any, Problem], Tree]
    join: Callable[[Iterator[Any], Call], Any]


class Transform(Generic[Result]):
    """What the per-sample transforms return: a function of `(params, buffers, *batch)`.

    A `mask` `[B]` says which samples count. The others, such as copies that fill a
    batch up to a fixed size, are run too, but add exactly zero and appear in no result.

    Attributes:
        options: what the transform was given.
        calls: what makes a call of a problem.
        keys: those of the samples, from which their random numbers follow.
    """

    calls: Callable[[Problem], Call] = Call
    keys: Tensor | None = None

    def __init__(self, options: Problem, quantity: Quantity | None = None) -> None:
        """Without a quantity a subclass has its own `called`."""
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

    def over(self, calls: Callable[[Problem], Call], parts: int = 1) -> Self:
        """Return the same function, in whose calls others take part, `parts` in all."""
        same = copy(self)
        same.calls = calls
        return same

    def keyed(self, keys: Tensor | None) -> Self:
        """Return the same function of one batch, with keys of its samples.

        They are those of `Problem.on`.
        """
        same = copy(self)
        same.keys = keys
        return same

    def with_loss_scale(self, loss_scale: LossScale | None) -> Self:
        """Return the same function with another loss scale."""
        same = copy(self)
        check_loss_scale(self.options.function, loss_scale)
        same.options = replace(self.options, loss_scale=loss_scale)
        return same

    def __call__(
        self,
        params: Params,
        buffers: Buffers,
        /,
        *batch: Tree,
        mask: Tensor | None = None,
    ) -> Result:
        """Compute the quantity of this batch.

        Args:
            mask: which samples count, bool `[B]`; the others add nothing.
        """
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
        keys: Tensor | None = None,
    ) -> Any:
        """Compute the quantity, with entries for the samples that do not count too.

        In inference mode, where autograd does not work, compute outside of it. `more`
        is what some transforms are given beside a batch, `loss_scale` takes the place
        of that of the options, and `keys` of those of `keyed`.
        """
        keys = self.keys if keys is None else keys
        given = params, buffers, batch, mask
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.on_all(*given, more, loss_scale, keys)
        weights = more if self.joins else None
        problem = self.options.on(*given, weights, loss_scale, keys)
        return self.called(self.calls(problem), more)

    def called(self, call: Call, more: Any) -> Any:
        """Compute the quantity; `more` are the call's weights, if any."""
        return self.of(call)

    def of(self, call: Call, execute: Callable[[Problem], Chunk] | None = None) -> Any:
        """Compute the quantity of a call; `execute` runs a chunk of it."""
        quantity = self.quantity
        parts = call.parts(partial(_measured, quantity), whole=execute)
        return self.in_order(call, call.result(quantity.join(parts, call)))

    def in_order(self, call: Call, found: Any, more: Any = None) -> Any:
        """Put the entries of samples in order again, if they were run in another."""
        places = call.places
        return found if places is None else self.selected(found, places, more)

    def part(
        self,
        params: Params,
        buffers: Buffers,
        batch: Tree,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        loss_scale: LossScale | None = None,
        keys: Tensor | None = None,
    ) -> Chunk:
        """Compute what there is to know of one chunk."""
        given = params, buffers, batch, mask, weights, loss_scale, keys
        problem = self.options.on(*given)
        return _measured(self.quantity, problem)

    def selected(self, found: Any, rows: Any, more: Any = None) -> Any:
        """Keep the entries of some samples in a result; `more` is that of `on_all`."""
        return self.mapped(lambda leaf: leaf[rows], found)

    def mapped(self, function: Callable[[Tensor], Tensor], found: Any) -> Any:
        """Apply a function to all tensors of a result `[B, ...]`."""
        if not self.options.has_aux:
            return self.of_samples(function, found)
        value, aux = found
        own = None if aux is None else tree_map(function, aux)
        return self.of_samples(function, value), own

    def of_samples(self, function: Callable[[Tensor], Tensor], value: Any) -> Any:
        """Apply a function to what the quantity has of single samples, `[B, ...]`."""
        return tree_map(function, value)


def _measured(quantity: Quantity, problem: Problem) -> Chunk:
    """Run the strategy, and measure what was collected."""
    chunk = STRATEGIES[problem.strategy](problem, lambda: quantity.collect(problem))
    return chunk._replace(collected=quantity.measure(chunk.collected, problem))
