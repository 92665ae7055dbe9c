"""Inner products of the samples' gradients, within a batch and between two.

B samples of the batch, B' of a second one. The Gram form of a norm is another thing:
see `factors/reductions.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from vgrad import batches, tree
from vgrad.factors import Dense, Factor
from vgrad.factors.norms import far
from vgrad.generators import RNG_LOCK, random_state, set_random_state
from vgrad.persample.engine import (
    Call,
    Evaluation,
    Grouping,
    Groups,
    Inputs,
    Mapped,
    Options,
    Quantity,
    Transform,
    check_groups,
    members,
)
from vgrad.tree import double, no_autocast
from vgrad.typing import Buffers, LossFn, Params, Result, Tree

_Names = Mapping[str, Sequence[str]]
"""The names of parameters in each group."""


class GramFn(Transform[Result]):
    """The function of `per_sample_gram`: `(params, buffers, *batch, cross=None)`."""

    def __call__(
        self,
        params: Params,
        buffers: Buffers,
        /,
        *batch: Tree,
        cross: tuple | None = None,
        mask: Tensor | None = None,
    ) -> Result:
        """Multiply the gradients of this batch with each other, or those for `cross`.

        Args:
            mask: which samples count, bool `[B]`; the others add nothing.
        """
        if cross is not None and not isinstance(cross, tuple | list):
            raise TypeError(  # a bare tensor would be taken for a tuple of its rows
                f"per_sample_gram(loss)(params, buffers, *batch, cross): expected a "
                f"second batch as a tuple, such as (x, y), got a "
                f"{type(cross).__name__}."
            )
        return self.on(params, buffers, batch, mask, cross=cross)


@overload
def per_sample_gram(
    loss: LossFn, *, groups: None = None, **options: Unpack[Options]
) -> GramFn[Tensor]: ...
@overload
def per_sample_gram(
    loss: LossFn, *, groups: Grouping, **options: Unpack[Options]
) -> GramFn[dict[str, Tensor]]: ...
def per_sample_gram(
    loss: LossFn, *, groups: Groups = None, **options: Unpack[Options]
) -> GramFn[Any]:
    """Inner products of gradients: `(params, buffers, *batch, cross=None) -> [B, B]`.

    Entry (i, j) is `sum_p <dL_i/dp, dL_j/dp>`, the empirical neural tangent kernel of
    the loss, in float32 or wider. The matrix is exactly symmetric. With `cross`, a
    second batch as a tuple, it is `[B, B']`: samples of the batch against samples of
    `cross`, which may have other sizes wherever the loss allows it. With `groups` the
    result is `{group: [B, B]}`, as for `per_sample_norm`. Complex parameters count as
    pairs of real ones. The other options are in `vgrad.persample.Options`.

    A sample whose gradient is not finite has no finite entry in its row and column, and
    leaves all others as they are.

    Cost: products of the inputs of layers and of the gradients at their outputs, or of
    gradients, one layer's at a time, where that is cheaper. Recorded, it holds both
    tensors of every layer for all B samples, whatever the chunk size; `"vmap"` and
    `"loop"` hold all gradients, B x P numbers. Chunks of b samples bound the rest: b^2
    products of all positions with all, or gradients of one layer. Of `cross` one chunk
    is held at a time, so make it the larger side.

    Reference: Jacot et al., Neural Tangent Kernel, arXiv 1806.07572.

    Raises:
        TypeError: `cross` is not a tuple.

    Example:
        >>> import torch
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> gram = per_sample_gram(loss)
        >>> params, x = {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [1.0, 0.0]])
        >>> gram(params, {}, x)
        tensor([[25.,  3.],
                [ 3.,  1.]])
        >>> gram(params, {}, x, cross=(torch.tensor([[0.0, 1.0]]),))
        tensor([[4.],
                [0.]])
    """
    check_groups("per_sample_gram", groups)
    return GramFn(Call.of(per_sample_gram, loss, options), Products(groups))


@dataclass(frozen=True)
class Products(Quantity):
    """The inner products of gradients; factors of all samples are kept for them."""

    groups: Groups
    chunked = False

    def collector(self, call: Call) -> Mapped:
        return Mapped(lambda factor: factor)

    def partial(self, collector: Mapped, call: Call) -> dict[str, Factor]:
        return collector.values

    def total(self, partials: Iterator[dict[str, Factor]], run: Evaluation) -> Any:
        names = members("per_sample_gram", self.groups, run.params)
        with RNG_LOCK if run.call.randomness == "same" else nullcontext():
            products = (
                _within(partials, run, names)
                if run.call.cross is None
                else self._between(partials, run, names)
            )
        products = {group: value.to(run.dtype) for group, value in products.items()}
        return products[""] if self.groups is None else products

    def selected(self, value: Any, rows: Any, inputs: Inputs | Call) -> Any:
        columns = rows if inputs.cross is None else slice(None)
        return tree.tree_map(lambda products: products[rows][:, columns], value)

    def _between(
        self, partials: Iterator[dict[str, Factor]], run: Evaluation, names: _Names
    ) -> dict[str, Tensor]:
        """Inner products with the gradients of a second batch, [B, B']."""
        call = run.call
        if call.draws.keys is not None:
            raise ValueError(
                "per_sample_gram(cross, keys): expected keys of one batch, got keys "
                "beside a second batch, whose samples have none. Leave the keys out."
            )
        other = batches.read(call.function, call.cross)
        if not (call.batch.size and other.size):
            return _zeros(run, names, call.batch.size, other.size)
        same = call.randomness == "same"
        state = random_state(call.tensors) if same else None
        factors = _collected(partials, names)
        if state is not None:
            set_random_state(state)  # all samples draw the same, of both batches
        strips = []
        second = Evaluation(replace(call, batch=other, mask=None, cross=None))
        transform = Transform(call, self)
        for columns in second.parts(transform.measured):
            with no_autocast(call.device):
                strips.append(_strip(factors, columns, names))
        products = {
            group: torch.cat([strip[group] for strip in strips], dim=1)
            for group in names
        }
        places = second.places
        if places is None:
            return products
        return {group: value[:, places] for group, value in products.items()}


def _strip(
    rows: dict[str, list[Factor]], columns: dict[str, Factor], names: _Names
) -> dict[str, Tensor]:
    """Inner products with one chunk of a second batch for every group, [B, b]."""
    wide = far({name: [*some, columns[name]] for name, some in rows.items()})

    def product(name: str) -> Tensor:
        column, *some = _widened([columns.pop(name), *rows[name]], name in wide)
        return torch.cat([row.gram(column) for row in some])

    return _summed(names, product)


def _within(
    partials: Iterator[dict[str, Factor]], run: Evaluation, names: _Names
) -> dict[str, Tensor]:
    factors = _collected(partials, names)
    if not run.done:
        return _zeros(run, names, 0, 0)
    with no_autocast(run.call.device):
        wide = far(factors)
        return _summed(
            names, lambda name: _symmetric(_widened(factors.pop(name), name in wide))
        )


def _zeros(run: Evaluation, names: _Names, *sizes: int) -> dict[str, Tensor]:
    value = next(iter(run.params.values()))
    return {group: value.new_zeros(sizes, dtype=run.dtype) for group in names}


def _collected(
    partials: Iterator[dict[str, Factor]], names: _Names
) -> dict[str, list[Factor]]:
    factors: dict[str, list[Factor]] = {n: [] for some in names.values() for n in some}
    for chunk in partials:
        for name, collected in factors.items():
            collected.append(chunk.pop(name))
    for name, collected in factors.items():
        grads = [factor.g for factor in collected if isinstance(factor, Dense)]
        if 1 < len(collected) == len(grads):  # a loop has one for each sample
            factors[name] = [Dense(torch.cat(grads))]
    return factors


def _summed(names: _Names, product: Callable[[str], Tensor]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for group, some in names.items():
        for name in some:
            part = double(product(name)).real
            sums[group] = sums[group] + part if group in sums else part
    return sums


def _widened(factors: Sequence[Factor], wide: bool) -> Sequence[Factor]:
    return [factor.double() for factor in factors] if wide else factors


def _symmetric(factors: Sequence[Factor]) -> Tensor:
    """Inner products within and between chunks, each pair of them once."""
    count = len(factors)
    blocks: dict[tuple[int, int], Tensor] = {}
    for row in range(count):
        square = factors[row].gram(factors[row])
        # Matrix products may round (i, j) and (j, i) differently.
        blocks[row, row] = square.triu() + square.triu(1).mH
        for column in range(row + 1, count):
            block = factors[row].gram(factors[column])
            blocks[row, column], blocks[column, row] = block, block.mH
    rows = [[blocks[row, column] for column in range(count)] for row in range(count)]
    return torch.cat([torch.cat(row, dim=1) for row in rows])
