"""The functions that `compile` returns: per-sample transforms, steps, ensembles.

A batch of a transform may be filled up to one of a few sizes, the buckets, since each
size is a capture of its own and a Poisson batch has another one at every step. A mask
leaves the copies of the first sample out, which fill it up.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vgrad import batches, checks, tree
from vgrad.compiled.captures import CaptureReport, Captures, CompiledExplanation
from vgrad.dp.plan import Plan
from vgrad.persample.engine import Call, Chunk, Evaluation, Transform, at_a_time
from vgrad.persample.explain import explain
from vgrad.persample.grad import WeightedGradFn, check_weights
from vgrad.persample.gram import GramFn
from vgrad.precision.loss_scale import LossScale
from vgrad.typing import Buffers, Params, Tree


class CompiledFunction:
    """A function of an ensemble that runs as graphs, with the attributes it has."""

    def __init__(self, function: Any, captures: Captures) -> None:
        self._function = function
        self._captures = captures

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._function, name)

    @property
    def plain(self) -> Any:
        """The function that was compiled."""
        return self._function

    def reports(self) -> tuple[CaptureReport, ...]:
        """Return a report of every capture."""
        return self._captures.reports()

    def explain(self, *arguments: Any) -> CompiledExplanation:
        """Explain captures, and how the function runs in eager mode."""
        eager = self._function.explain(*arguments)
        return CompiledExplanation(self.reports(), eager)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the function."""
        if options:
            return self._captures(self._with, arguments, options)
        return self._captures(self._function, *arguments)

    def with_buffers(self, *arguments: Any) -> Any:
        """Run the function, and return new buffers too."""
        return self._captures(self._function.with_buffers, *arguments)

    def _with(self, arguments: tuple, options: dict[str, Any]) -> Any:
        return self._function(*arguments, **options)


class CompiledStep(CompiledFunction):
    """A training step that runs its gradients and its optimizer as graphs."""

    def explain(self, *_: Any) -> CompiledExplanation:
        """Explain captures; a step has no explanation in eager mode."""
        return CompiledExplanation(self.reports(), None)

    def __call__(self, *arguments: Any) -> Any:
        """Take a step."""
        return self._function(*arguments)


class CompiledTransform(CompiledFunction):
    """A per-sample transform that runs as graphs."""

    def __init__(
        self,
        transform: Transform,
        captures: Captures,
        batch_sizes: tuple[int, ...] | None,
    ) -> None:
        super().__init__(transform, captures)
        self._buckets = batch_sizes
        self._scale = transform.options.loss_scale
        self._evaluation: Callable[[Call], Evaluation] | None = None
        self._keys: Tensor | None = None

    def explain(self, *arguments: Any) -> CompiledExplanation:
        """Explain captures, and how the transform runs in eager mode."""
        eager = explain(self._function)(*arguments)
        return CompiledExplanation(self.reports(), eager)

    def with_loss_scale(self, loss_scale: LossScale | None) -> "CompiledTransform":
        """Return the same function with another loss scale, an input of the graph."""
        return self._with_values(_scale=loss_scale)

    def over(
        self, evaluation: Callable[[Call], Evaluation], parts: int = 1
    ) -> "CompiledTransform":
        """Return the same function, in whose calls others take part.

        A graph is of one chunk; the others take part outside of it. Batches are one of
        so many `parts`.
        """
        sizes = self._buckets
        if sizes is not None:
            sizes = tuple(sorted({-(-size // parts) for size in sizes}))
        return self._with_values(_evaluation=evaluation, _buckets=sizes)

    def keyed(self, keys: Tensor | None) -> "CompiledTransform":
        """Return the same function of one batch, with keys of its samples.

        A loss that draws by keys runs in eager mode.
        """
        return self._with_values(_keys=keys)

    def _with_values(self, **values: Any) -> "CompiledTransform":
        same = copy(self)
        vars(same).update(values)
        return same

    def __call__(
        self,
        *arguments: Any,
        mask: Tensor | None = None,
        cross: tuple | None = None,
    ) -> Any:
        """Compute the quantity of a batch."""
        transform, options, more = self._function, self._function.options, cross
        values = arguments
        if isinstance(transform, WeightedGradFn) and values:
            more, *values = values
        if len(values) < 2 or not (cross is None or isinstance(transform, GramFn)):
            named: dict[str, Any] = {} if cross is None else {"cross": cross}
            return transform(*arguments, **named)  # which raises
        params, buffers, *samples = values
        batch, run = tuple(samples), transform.on_all
        given = params, buffers, batch, mask, more, self._scale, self._keys
        plain = self._buckets is None and mask is None and self._evaluation is None
        if plain and options.chunk_size is None and options.strategy != "loop":
            first = batch[0] if batch else None
            if isinstance(first, Tensor) and first.ndim and len(first):
                return self._captures(run, *given)
        size = batches.read(options.function, batch).size
        if mask is not None:
            batches.check_mask(options.function, mask, size)
        if size and options.strategy != "loop":
            return self._padded(params, buffers, batch, mask, more, size)
        if size:
            self._captures.refuse(transform, 'strategy="loop" runs any Python')
        if self._evaluation is not None:
            run = transform.over(self._evaluation).on_all
        result = run(*given)
        return result if mask is None else transform.selected(result, mask, more)

    def _padded(
        self,
        params: Params,
        buffers: Buffers,
        batch: Tree,
        mask: Tensor | None,
        more: Any,
        size: int,
    ) -> Any:
        """Fill up a batch and run it, in parts where it is large."""
        transform, sizes, keys = self._function, self._buckets, self._keys
        rows: Any = slice(0, size) if mask is None else mask
        total = size
        if sizes is not None:
            total = padded_size(size, sizes)
            device = next(iter(tree.tensors(batch))).device
            counts = torch.arange(total, device=device) < size
            if mask is not None:
                counts[:size] &= mask
                rows = counts
            mask, batch = counts, filled(batch, size, total)
            if isinstance(transform, WeightedGradFn):
                check_weights(more, size)
                more = filled(more, size, total)
            keys = None if keys is None else filled(keys, size, total)
        limit = total
        if transform.options.chunk_size is not None:
            call = transform.options.on(params, buffers, batch)
            limit = min(limit, at_a_time(call) or limit)
        if sizes is not None:
            limit = min(limit, sizes[-1])
        given = params, buffers, batch, mask, more, self._scale, keys
        if self._evaluation is None and (total <= limit or transform.quantity is None):
            result = self._captures(transform.on_all, *given)
        else:
            call = replace(transform.options, chunk_size=limit).on(*given)
            result = transform.of((self._evaluation or Evaluation)(call), self._part)
        return result if mask is None else transform.selected(result, rows, more)

    def _part(self, part: Call) -> Chunk:
        return self._captures(
            self._function.part,
            part.params,
            part.buffers,
            part.batch.sample(tuple(part.batch.tensors)),
            part.mask,
            part.weights,
            self._scale,
            part.draws.keys,
        )


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

    One and a half deviations apart, from one below the mean to four above it, so that
    padding costs less than a deviation on average.
    """
    mean = plan.expected_batch_size
    deviation = math.sqrt(mean * (1 - plan.sampling_rate))
    sizes = [mean + place * deviation for place in (-1.0, 0.5, 2.0, 4.0)]
    return tuple(
        sorted({min(plan.dataset_size, max(1, math.ceil(size))) for size in sizes})
    )


def padded_size(size: int, buckets: Sequence[int]) -> int:
    """Return the size that a batch is filled up to.

    Beyond the largest bucket the batch is split; its rest is filled up.
    """
    whole, rest = divmod(size, buckets[-1])
    if rest == 0:
        return size
    return whole * buckets[-1] + next(each for each in buckets if each >= rest)


def filled(samples: Tree, size: int, total: int) -> Any:
    """Fill up `[B, ...]` with copies of the first sample, -> `[total, ...]`."""

    def fill(tensor: Tensor) -> Tensor:
        copies = tensor[:1].expand(total - size, *tensor.shape[1:])
        return torch.cat([tensor, copies])

    return tree.map_tensors(fill, samples) if total > size else samples
