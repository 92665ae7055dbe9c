"""Per-sample transforms as graphs, of batches that are filled up to a few sizes.

Each size is a capture of its own, and a Poisson batch has another one at every step. A
mask leaves the copies of the first sample out, which fill it up.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from vgrad import batches, checks
from vgrad.compiled.captures import CaptureReport, Captures, CompiledExplanation
from vgrad.dp.plan import Plan
from vgrad.persample.engine import (
    Across,
    Call,
    Chunk,
    Inputs,
    Transform,
    at_a_time,
    eager,
)
from vgrad.persample.grad import check_weights


@dataclass(frozen=True, eq=False)
class Captured:
    """The execution of a per-sample transform as graphs, of batches or of chunks."""

    plain: Transform  # in eager mode
    captures: Captures
    batch_sizes: tuple[int, ...] | None

    def of(self, plain: Transform) -> "Captured":
        """Return the execution of another transform, with captures of its own."""
        return replace(self, plain=plain, captures=copy.copy(self.captures))

    def reports(self) -> tuple[CaptureReport, ...]:
        """Return a report of every capture."""
        return self.captures.reports()

    def clear(self) -> None:
        """Forget all captures."""
        self.captures.clear()

    def explanation(self, eager: Any) -> CompiledExplanation:
        """Explain captures, beside the report of eager mode."""
        return self.captures.explanation(eager)

    def __call__(
        self,
        transform: Transform,
        inputs: Inputs,
        across: Across | None = None,
    ) -> Any:
        """Compute the quantity of a batch."""
        # Other ranks take part outside of the graphs: a graph is of one chunk, and the
        # batch the part of one of the ranks.
        options, batch, mask = self.plain.options, inputs.batch, inputs.mask
        plain = self.batch_sizes is None and mask is None and across is None
        if plain and options.chunk_size is None and options.strategy != "loop":
            first = batch[0] if batch else None
            if isinstance(first, Tensor) and first.ndim and len(first):
                return self.captures(self.plain.run, inputs)
        size = batches.read(options.function, batch).size
        if mask is not None:
            batches.check_mask(options.function, mask, size)
        if size and options.strategy != "loop":
            return self._padded(inputs, size, across)
        if size:
            self.captures.refuse(self.plain, 'strategy="loop" runs any Python')
        return eager(self.plain, inputs, across)

    def _padded(self, inputs: Inputs, size: int, across: Across | None) -> Any:
        """Fill up a batch and run it, in parts where it is large."""
        transform, limit = self.plain, size
        rows: Any = inputs.mask
        if self.batch_sizes is not None:
            ranks = 1 if across is None else across.size
            sizes = sorted({-(-each // ranks) for each in self.batch_sizes})
            total = padded_size(size, sizes)
            if inputs.weights is not None:
                check_weights(inputs.weights, size)
            inputs = inputs.padded(size, total)
            rows = slice(size) if rows is None else inputs.mask
            size, limit = total, min(total, sizes[-1])
        if transform.options.chunk_size is not None:
            call = transform.options.on(inputs)
            limit = min(limit, at_a_time(call) or limit)
        chunked = transform.quantity.chunked
        if across is None and (size <= limit or not chunked):
            result = self.captures(transform.run, inputs)
        else:
            call = replace(transform.options, chunk_size=limit).on(inputs)
            result = transform.evaluate(call, across, self._chunk)
        return (
            result if inputs.mask is None else transform.selected(result, rows, inputs)
        )

    def _chunk(self, call: Call) -> Chunk:
        batch = call.batch.sample(tuple(call.batch.tensors))
        tensors = call.params, call.buffers, batch, call.mask, call.weights, call.cross
        more = call.loss_scale, call.draws.keys, call.max_norm, call.scales
        return self.captures(self.plain.chunk, Inputs(*tensors, *more))


def checked_sizes(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Check and sort the sizes of buckets."""
    if not isinstance(batch_sizes, list | tuple) or not batch_sizes:
        raise ValueError(
            f"compile(batch_sizes={batch_sizes!r}): expected at least one size in a "
            f"list, such as [256, 320]."
        )
    sizes = (checks.whole("compile", least=1, batch_sizes=size) for size in batch_sizes)
    return tuple(sorted({number for numbers in sizes for number in numbers}))


def sizes_of_plan(plan: Plan) -> tuple[int, ...]:
    """Return sizes that hold all but one in about 10^4 batches of a plan.

    Batches that have a largest size are filled up to it, for one graph.
    """
    if plan.largest_batch is not None:
        return (plan.largest_batch,)
    # One and a half deviations apart: padding costs less than one on average.
    mean = plan.expected_batch_size
    deviation = math.sqrt(mean * (1 - plan.sampling_rate))
    sizes = [mean + place * deviation for place in (-1.0, 0.5, 2.0, 4.0)]
    return tuple(
        sorted({min(plan.dataset_size, max(1, math.ceil(size))) for size in sizes})
    )


def padded_size(size: int, buckets: Sequence[int]) -> int:
    """Return the size that a batch, or the rest beyond whole parts, is filled up to."""
    whole, rest = divmod(size, buckets[-1])
    if rest == 0:
        return size
    return whole * buckets[-1] + next(each for each in buckets if each >= rest)
