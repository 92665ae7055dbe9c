"""Per-sample transforms that run as graphs."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from vgrad import batches, tree
from vgrad.compiled import buckets
from vgrad.compiled.captures import Captures
from vgrad.compiled.reports import CaptureReport, CompiledExplanation
from vgrad.persample.engine import Call, Chunk, Evaluation, Transform, at_a_time
from vgrad.persample.explain import explain
from vgrad.persample.grad import WeightedGradFn, check_weights
from vgrad.persample.gram import GramFn
from vgrad.precision.loss_scale import LossScale
from vgrad.typing import Buffers, Params, Tree


class CompiledTransform:
    """What `compile` returns for a per-sample transform: the same function.

    It has the attributes of what was compiled, and `reports()`.
    """

    def __init__(
        self,
        transform: Transform,
        captures: Captures,
        batch_sizes: tuple[int, ...] | None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._transform = transform
        self._captures = captures
        self._buckets = batch_sizes
        self._scale = transform.options.loss_scale if loss_scale is None else loss_scale
        self._evaluation: Callable[[Call], Evaluation] | None = None
        self._keys: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._transform, name)

    def reports(self) -> tuple[CaptureReport, ...]:
        """Return what is known of every capture."""
        return self._captures.reports()

    def explain(self, *arguments: Any) -> CompiledExplanation:
        """Say what is known of captures, and how the transform runs in eager mode."""
        found = explain(self._transform)(*arguments)
        return CompiledExplanation(self.reports(), found)

    @property
    def plain(self) -> Transform:
        """What was compiled."""
        return self._transform

    def with_loss_scale(self, loss_scale: LossScale | None) -> "CompiledTransform":
        """Return the same function with another loss scale, an input of the graph."""
        same = copy(self)
        same._scale = loss_scale
        return same

    def over(
        self, evaluation: Callable[[Call], Evaluation], parts: int = 1
    ) -> "CompiledTransform":
        """Return the same function, in whose calls others take part.

        A graph holds what a chunk needs, and others are asked outside of it. Batches
        are one of so many `parts`.
        """
        same = copy(self)
        same._evaluation = evaluation
        if self._buckets is not None:
            same._buckets = tuple(sorted({-(-size // parts) for size in self._buckets}))
        return same

    def keyed(self, keys: Tensor | None) -> "CompiledTransform":
        """Return the same function of one batch, with keys of its samples.

        No graph repeats what follows from them: a loss that draws runs in eager mode.
        """
        same = copy(self)
        same._keys = keys
        return same

    def __call__(
        self,
        *arguments: Any,
        mask: Tensor | None = None,
        cross: tuple | None = None,
    ) -> Any:
        """Compute the quantity of a batch, of arguments as the transform takes them."""
        transform, more, given = self._transform, cross, arguments
        if isinstance(transform, WeightedGradFn) and given:
            more, *given = given
        if len(given) < 2 or not (cross is None or isinstance(transform, GramFn)):
            options: dict[str, Any] = {} if cross is None else {"cross": cross}
            return transform(*arguments, **options)  # which raises
        params, buffers, *batch = given
        return self._of(params, buffers, tuple(batch), mask, more)

    def _of(
        self, params: Params, buffers: Buffers, batch: Tree, mask: Any, more: Any
    ) -> Any:
        transform = self._transform
        function, options = transform.on_all, transform.options
        whole = options.chunk_size is None and options.strategy != "loop"
        plain = self._buckets is None and mask is None and self._evaluation is None
        if plain and whole and len(batch):
            if _first_size(batch):
                given = (params, buffers, batch, None, more, self._scale)
                return self._captures(function, *given, self._keys)
        size = batches.read(options.function, batch).size
        if mask is not None:
            batches.check_mask(options.function, mask, size)
        if not size or options.strategy == "loop":
            if size:
                self._captures.refuse(function, 'strategy="loop" runs any Python')
            if self._evaluation is not None:
                function = transform.over(self._evaluation).on_all
            given = (params, buffers, batch, mask, more, self._scale)
            found = function(*given, self._keys)
            return found if mask is None else transform.selected(found, mask, more)
        return self._padded(params, buffers, batch, mask, more, size)

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
        transform, sizes, keys = self._transform, self._buckets, self._keys
        rows: Any = slice(0, size) if mask is None else mask
        if sizes is not None:
            total = buckets.padded_size(size, sizes)
            device = next(iter(tree.tensors(batch))).device
            counted = buckets.counted(size, total, device)
            if mask is not None:
                counted[:size] &= mask
                rows = counted
            mask, batch = counted, buckets.filled(batch, size, total)
            if isinstance(transform, WeightedGradFn):
                check_weights(more, size)
                more = buckets.filled(more, size, total)
            keys = None if keys is None else buckets.filled(keys, size, total)
        else:
            total = size
        limit = total
        if transform.options.chunk_size is not None:
            call = transform.options.on(params, buffers, batch)
            limit = min(limit, at_a_time(call) or limit)
        if sizes is not None:
            limit = min(limit, sizes[-1])
        alone = self._evaluation is None
        given = (params, buffers, batch, mask, more, self._scale, keys)
        if alone and (total <= limit or transform.quantity is None):
            found = self._captures(transform.on_all, *given)
        else:
            options = replace(transform.options, chunk_size=limit)
            run = (self._evaluation or Evaluation)(options.on(*given))
            found = transform.of(run, self._part)
        return found if mask is None else transform.selected(found, rows, more)

    def _part(self, part: Call) -> Chunk:
        """Run one part of a batch."""
        batch = part.batch.sample(tuple(part.batch.tensors))
        return self._captures(
            self._transform.part,
            part.params,
            part.buffers,
            batch,
            part.mask,
            part.weights,
            self._scale,
            part.draws.keys,
        )


def _first_size(batch: Sequence[Tree]) -> int:
    """Return how many samples there are, as far as one tensor tells."""
    first = batch[0]
    return len(first) if isinstance(first, Tensor) and first.ndim else 0
