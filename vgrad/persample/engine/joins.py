"""Joins of the values of chunks, and of parts of chunks, to the values of a batch."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vgrad.factors import Sums
from vgrad.persample.engine.call import Call
from vgrad.persample.engine.strategies import Chunk
from vgrad.torch_private import modes
from vgrad.tree import tree_map
from vgrad.typing import Params, Tree

Reduce = Callable[[Params], Params]
"""Sums tensors over ranks."""

Order = Callable[[Tensor], Tensor]
"""Brings samples that were joined part by part into the order of the batch."""


class Join:
    """Joins the values of the parts of a batch, one after the other."""

    value: Any = None  # None for a list without samples

    def add(self, value: Any, rows: Sequence[int], size: int) -> None:
        """Add the value of the samples at these places of a batch."""
        raise NotImplementedError

    def close(self, order: Order) -> None:
        """Bring the samples of all parts into the order of the batch."""

    def reduce(self, reduce: Reduce, call: Call) -> None:
        """Take sums over ranks; lists of samples stay on theirs."""


class Concatenated(Join):
    """Named tensors `[b, ...]`, which are written into whole ones as they arrive."""

    def __init__(self) -> None:
        self._parts: list[Params] = []

    def add(self, value: Params, rows: Sequence[int], size: int) -> None:
        first = next(iter(value.values()))
        graph = modes.inside_transform() or first.requires_grad
        if not self.value and (graph or self._parts):
            self._parts.append(value)  # autograd follows a join
            return
        self.value = self.value or {}
        chunk = isinstance(rows, range)
        places: Any = slice(rows.start, rows.stop) if chunk else rows
        for name in [*value]:  # each is freed before the next one is copied
            part = value.pop(name)
            if name not in self.value:
                self.value[name] = part.new_empty((size, *part.shape[1:]))
            self.value[name][places] = part

    def close(self, order: Order) -> None:
        if parts := self._parts:
            names = parts[0]
            self.value = {n: order(torch.cat([x[n] for x in parts])) for n in names}


class Summed(Join):
    """Sums over samples of each parameter; empty without samples."""

    def __init__(self) -> None:
        self.value: Params = {}

    def add(self, value: Params, rows: Sequence[int], size: int) -> None:
        sums = Sums(self.value)
        sums.add(value)
        self.value = sums.totals

    def reduce(self, reduce: Reduce, call: Call) -> None:
        self.value = reduce(Sums(self.value).rounded(call.params))  # of one dtype


class Counts(Join):
    """Some whole numbers, each the count of some samples."""

    def __init__(self, number: int) -> None:
        self.value: tuple[Any, ...] = (0,) * number

    def add(self, value: Sequence[Tensor], rows: Sequence[int], size: int) -> None:
        pairs = zip(self.value, value, strict=True)
        self.value = tuple(count + more for count, more in pairs)

    def reduce(self, reduce: Reduce, call: Call) -> None:
        counts = [torch.as_tensor(count, device=call.device) for count in self.value]
        names = map(str, range(len(counts)))
        self.value = (*reduce(dict(zip(names, counts, strict=True))).values(),)


class Listed(Join):
    """Lists of values of parts, one after the other."""

    def __init__(self) -> None:
        self.value: list[Any] = []

    def add(self, value: list[Any], rows: Sequence[int], size: int) -> None:
        self.value += value


class Joined:
    """The values of the parts of a call, joined field by field."""

    def __init__(self, call: Call, joins: Mapping[str, Join]) -> None:
        self.call, self._joins = call, joins
        self.chunks: list[Chunk] = []  # without their values
        self._rows: list[Sequence[int]] = []

    def add(self, chunk: Chunk, rows: Sequence[int]) -> None:
        """Add the values of some samples."""
        size, chunked = self.call.batch.size, isinstance(rows, range)
        for name, join in self._joins.items():
            value = chunk.collected.pop(name)
            if chunked and len(rows) == size:
                join.value = value
            else:
                join.add(value, rows, size)
        self._rows.append(rows)
        self.chunks.append(chunk._replace(collected=None))

    def reduce(self, reduce: Reduce) -> None:
        """Take sums over ranks."""
        for join in self._joins.values():
            join.reduce(reduce, self.call)

    def close(self) -> None:
        """Join what there is: `values` by name, `losses` and `aux` of all samples."""
        call, chunks = self.call, self.chunks
        self.aux: Tree = None
        if not chunks:
            first = next(iter(call.params.values()))
            self.losses = first.new_zeros(0, dtype=call.dtype)
        elif len(chunks) == 1 and isinstance(self._rows[0], range):
            self.losses, self.aux = chunks[0].losses, chunks[0].aux
        else:
            for join in self._joins.values():
                join.close(self.order)
            self.losses = self.order(torch.cat([chunk.losses for chunk in chunks]))
            trees = [chunk.aux for chunk in chunks]
            if call.has_aux:
                self.aux = tree_map(lambda *x: self.order(torch.cat(x)), *trees)
        self.values = {name: join.value for name, join in self._joins.items()}

    @cached_property
    def order(self) -> Order:
        """The permutation from the order of all parts to the order of the batch."""
        rows = [row for rows in self._rows for row in rows]
        if rows == sorted(rows):
            return lambda values: values
        places = torch.tensor(rows).argsort()
        return lambda values: values[places]
