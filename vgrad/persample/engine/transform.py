"""Per-sample transforms: functions that run a call in chunks and join the results."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, Self

import torch
from torch import Tensor

from vgrad.persample.engine.call import Call, Inputs, check_loss_scale
from vgrad.persample.engine.chunk_size import at_a_time
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.constants import constant
from vgrad.persample.engine.guard import Fallbacks
from vgrad.persample.engine.joins import Concatenated, Join, Joined
from vgrad.persample.engine.parts import note_split, run_in_parts
from vgrad.persample.engine.strategies import STRATEGIES, Chunk
from vgrad.persample.engine.verify import confirm, verify
from vgrad.precision.loss_scale import LossScale
from vgrad.torch_private.tensors import version_of
from vgrad.tree import map_tensors, no_autocast, tree_map
from vgrad.typing import Buffers, LossFn, Params, Result, Scales, Tree


class Quantity:
    """A quantity of the gradients of samples: values of each chunk, and their join."""

    chunked = True  # values are trees of tensors, which a graph can return

    def joins(self) -> dict[str, Join]:
        """Return how values of chunks are joined, by name."""
        return {"values": Concatenated()}

    def options(self) -> dict[str, Any]:
        """Return the options of the quantity, by name, that are to be shown."""
        return {}

    def check(self, call: Call) -> None:
        """Refuse options that do not fit the parameters, before the loss runs."""

    def collector(self, call: Call) -> Collector:
        """Return the collector of the factors of one chunk."""
        raise NotImplementedError

    def partial(self, collector: Any, call: Call) -> dict[str, Any]:
        """Return the values of a chunk from its factors, by their joins' names."""
        raise NotImplementedError

    def total(self, parts: Joined) -> Any:
        """Return the quantity of the batch from joined values."""
        raise NotImplementedError

    def mapped(self, function: Callable[[Tensor], Tensor], value: Any) -> Any:
        """Apply a function to the tensors of the quantity that are `[B, ...]`."""
        return tree_map(function, value)

    def selected(self, value: Any, rows: Any, inputs: "Inputs | Call") -> Any:
        """Keep the entries of some samples."""
        return self.mapped(lambda leaf: leaf[rows], value)


class Across(Protocol):
    """The ranks that compute a quantity of a batch together."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def of(self, call: Call) -> Call:
        """Return the call of this rank, which sends off sums once they are formed."""
        ...

    def summed(self, tensors: Params) -> Params:
        """Sum tensors over the ranks."""
        ...


def eager(transform: "Transform", inputs: Inputs, across: Across | None = None) -> Any:
    """Compute a quantity op by op, of the samples that count."""
    value, mask = transform.run(inputs, across), inputs.mask
    return value if mask is None else transform.selected(value, mask, inputs)


@dataclass(frozen=True, eq=False)
class Transform(Generic[Result]):
    """A per-sample transform of a loss: a function of `(params, buffers, *batch)`."""

    options: Call  # without tensors
    quantity: Quantity
    execute: Callable[..., Any] = eager  # in this process: op by op or as graphs
    reduce: Callable[..., Any] | None = None  # over processes, by `execute` in each
    keys: Tensor | None = None  # of the samples, for their random numbers

    def __repr__(self) -> str:
        options = self.quantity.options() | self.options.changed
        text = "".join(f", {name}={value!r}" for name, value in options.items())
        captured = "" if self.execute is eager else ", captured"
        return f"<{self.options.function}({self.options.loss!r}{text}){captured}>"

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

    def on(self, *arguments: Any, **more: Any) -> Any:
        """Compute the quantity of `Inputs` but for fields of the options, and keys."""
        options = self.options
        more |= {"loss_scale": options.loss_scale, "max_norm": options.max_norm}
        inputs = Inputs(*arguments, **more, scales=options.scales, keys=self.keys)
        keyless = self.keys is None and self.reduce is None
        if options.fallbacks.keyed and keyless:
            inputs = inputs.with_keys()
        if self.reduce is not None:  # which prepares where an error reaches all ranks
            return self.reduce(self, inputs)
        return self.execute(self, self.prepared(inputs))

    def prepared(self, inputs: Inputs) -> Inputs:
        """Return the inputs of the loss from the caller's."""
        return inputs

    def run(self, inputs: Inputs, across: Across | None = None) -> Any:
        """Compute the quantity, with entries for samples that do not count, too."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.run(inputs, across)
        return self.evaluate(self.options.on(inputs), across)

    def evaluate(
        self,
        call: Call,
        across: Across | None = None,
        chunk: Callable[[Call], Chunk] | None = None,
    ) -> Any:
        """Compute the quantity of a call, whole chunks by `chunk` if there is one."""
        strict = across is not None
        doubt = verify(call, strict=strict)
        whole = call
        if across is not None:
            call = across.of(call)
        self.quantity.check(call)
        parts = Joined(call, self.quantity.joins())
        self.run_parts(call, parts, chunk)
        joint = frozenset(c.strategy for c in parts.chunks if len(c.losses) > 1)
        if not confirm(whole, joint, doubt, strict=strict):
            return self.evaluate(whole, across)
        if call.private and call.batch.size and call.fallbacks.route == "auto":
            route = call.history.way if call.strategy == "auto" else call.strategy
            call.fallbacks.route = route
        if across is not None:
            parts.reduce(across.summed)
        parts.close()
        value: Any = self.quantity.total(parts)
        value = (value, parts.aux) if call.has_aux else value
        recorded = any(chunk.strategy == "recorded" for chunk in parts.chunks)
        if recorded and call.differentiable:
            return constant(call.function, value, call.tensors)
        return value

    def run_parts(
        self, call: Call, parts: Joined, chunk: Callable[[Call], Chunk] | None = None
    ) -> None:
        """Run a call chunk after chunk, in parts where values split one."""
        if not (size := call.batch.size):
            return
        fixed = [*call.params.items(), *call.buffers.items()]
        versions = [version_of(value) for _, value in fixed]
        step = at_a_time(call) or size
        chunks = (range(size)[start : start + step] for start in range(0, size, step))
        calls = ((call.select(slice(rows.start, rows.stop)), rows) for rows in chunks)
        run_in_parts(
            calls, chunk or self.measured, self.measured, note_split, parts.add
        )
        for version, (name, value) in zip(versions, fixed, strict=True):
            if version_of(value) != version:
                raise RuntimeError(
                    f"{call.function}(loss): expected a loss that changes nothing it "
                    f"is given, but it wrote into {name!r} in place. Copy it first."
                )

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
