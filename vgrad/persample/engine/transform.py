"""Per-sample transforms: functions that run a call in chunks and join the results."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Self

import torch
from torch import Tensor

from vgrad.persample.engine.call import Call, Inputs, check_loss_scale
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.evaluation import Evaluation
from vgrad.persample.engine.guard import Fallbacks
from vgrad.persample.engine.strategies import STRATEGIES, Chunk
from vgrad.persample.engine.verify import verify
from vgrad.precision.loss_scale import LossScale
from vgrad.tree import map_tensors, no_autocast, tree_map
from vgrad.typing import Buffers, LossFn, Params, Result, Scales, Tree


class Quantity:
    """A quantity of the gradients of samples, which is computed chunk by chunk."""

    chunked = True  # partial values are trees of tensors, which a graph can return

    def collector(self, call: Call) -> Collector:
        """Return the collector of the factors of one chunk."""
        raise NotImplementedError

    def partial(self, collector: Any, call: Call) -> Tree:
        """Return the values of a chunk, from its factors."""
        raise NotImplementedError

    def total(self, partials: Iterator[Any], run: Evaluation) -> Any:
        """Return the quantity of the batch, from the values of all chunks."""
        raise NotImplementedError

    def mapped(self, function: Callable[[Tensor], Tensor], value: Any) -> Any:
        """Apply a function to the tensors of the quantity that are `[B, ...]`."""
        return tree_map(function, value)

    def selected(self, value: Any, rows: Any, inputs: "Inputs | Call") -> Any:
        """Keep the entries of some samples."""
        return self.mapped(lambda leaf: leaf[rows], value)


def eager(
    transform: "Transform",
    inputs: Inputs,
    evaluate: Callable[[Call], Evaluation] = Evaluation,
    ranks: int = 1,
) -> Any:
    """Compute a quantity op by op, of the samples that count."""
    value, mask = transform.run(inputs, evaluate), inputs.mask
    return value if mask is None else transform.selected(value, mask, inputs)


@dataclass(frozen=True, eq=False)
class Transform(Generic[Result]):
    """A per-sample transform of a loss: a function of `(params, buffers, *batch)`."""

    options: Call  # without tensors
    quantity: Quantity
    execute: Callable[..., Any] = eager  # in this process: op by op or as graphs
    reduce: Callable[..., Any] | None = None  # over processes, by `execute` in each
    keys: Tensor | None = None  # of the samples, for their random numbers

    def keyed(self, keys: Tensor | None) -> Self:
        """Return the same function of one batch, with keys of its samples."""
        return replace(self, keys=keys)

    def with_loss_scale(self, loss_scale: LossScale | None) -> Self:
        """Return the same function with another loss scale."""
        check_loss_scale(self.options.function, loss_scale)
        return replace(self, options=replace(self.options, loss_scale=loss_scale))

    def with_loss(self, loss: LossFn, chunk_size: int | None) -> Self:
        """Return the same function of a loss without aux, with captures of its own."""
        changes: dict[str, Any] = {"loss": loss, "chunk_size": chunk_size}
        changes |= {"has_aux": False, "fallbacks": Fallbacks(), "unreached": set()}
        options = replace(self.options, **changes)
        plain = replace(self, options=options, execute=eager, reduce=None, keys=None)
        execute: Any = self.execute
        return replace(
            plain,
            execute=eager if execute is eager else execute.of(plain),
            reduce=None if self.reduce is None else self.reduce.of(plain),
        )

    def with_scales(self, scales: Scales | None) -> Self:
        """Return the same function of gradients that are multiplied by tensors."""
        return replace(self, options=replace(self.options, scales=scales))

    def reports(self) -> tuple[Any, ...]:
        """Return a report of every capture; none in eager mode."""
        return getattr(self.execute, "reports", tuple)()

    def clear(self) -> None:
        """Forget all captures; the next call of each kind captures again."""
        getattr(self.execute, "clear", tuple)()

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
        return self.on(params, buffers, batch, mask)

    def on(self, *given: Any, **more: Any) -> Any:
        """Compute the quantity of `Inputs` but for fields of the options, and keys."""
        own = self.options
        more |= {"loss_scale": own.loss_scale, "max_norm": own.max_norm}
        inputs = Inputs(*given, **more, scales=own.scales, keys=self.keys)
        if own.fallbacks.keyed and self.keys is None:
            inputs = inputs.with_keys()
        return (self.reduce or self.execute)(self, inputs)

    def run(
        self, inputs: Inputs, evaluate: Callable[[Call], Evaluation] = Evaluation
    ) -> Any:
        """Compute the quantity, with entries for samples that do not count, too."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.run(inputs, evaluate)
        return self.evaluated(evaluate(self.options.on(inputs)))

    def evaluated(self, run: Evaluation) -> Any:
        """Compute the quantity."""
        verify(run.call, strict=run.reduce is not None)
        value = run.result(self.quantity.total(run.parts(self.measured), run))
        places = run.places
        return value if places is None else self.selected(value, places, run.call)

    def chunk(self, inputs: Inputs) -> Chunk:
        """Compute the values of one chunk: a pure function of its tensors."""
        return self.measured(self.options.on(inputs))

    def measured(self, call: Call) -> Chunk:
        """Compute the values of a chunk from its factors."""
        quantity = self.quantity
        chunk = STRATEGIES[call.strategy](call, partial(quantity.collector, call))
        recorded = chunk.strategy == "recorded"  # a constant for the caller
        with torch.no_grad() if recorded else nullcontext(), no_autocast(call.device):
            return chunk._replace(collected=quantity.partial(chunk.collected, call))

    def selected(self, value: Any, rows: Any, inputs: Inputs | Call) -> Any:
        """Keep the entries of some samples in a result."""
        value, *aux = value if self.options.has_aux else (value,)
        value = self.quantity.selected(value, rows, inputs)
        return (value, *map_tensors(lambda leaf: leaf[rows], aux)) if aux else value

    def mapped(self, function: Callable[[Tensor], Tensor], value: Any) -> Any:
        """Apply a function to all tensors of a result that are `[B, ...]`."""
        value, *aux = value if self.options.has_aux else (value,)
        value = self.quantity.mapped(function, value)
        return (value, *map_tensors(function, aux)) if aux else value
