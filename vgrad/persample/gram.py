"""Inner products of the samples' gradients, within a batch and between two.

B samples of the batch, B' of a second one. The Gram form of a norm is another thing:
see `factors/reductions.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from vgrad import batches, tree
from vgrad.factors import Dense, Factor
from vgrad.generators import RNG_LOCK, random_state, set_random_state
from vgrad.persample.engine import (
    Call,
    Grouping,
    Groups,
    Inputs,
    Join,
    Joined,
    Listed,
    Mapped,
    Options,
    Quantity,
    Transform,
    check_groups,
    members,
    shows_options,
    verify,
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

    def evaluate(self, call: Call, *options: Any) -> Any:
        """Compute the products of a call; a second batch runs after the first."""
        if call.cross is None:
            return super().evaluate(call, *options)
        quantity: Any = self.quantity
        if call.draws.keys is not None:
            raise ValueError(
                "per_sample_gram(cross, keys): expected keys of one batch, got keys "
                "beside a second batch, whose samples have none. Leave the keys out."
            )
        verify(call, strict=False)
        names = members(call.function, quantity.groups, call.params)
        other = batches.read(call.function, call.cross)
        if not (call.batch.size and other.size):
            return quantity.of_groups(_zeros(call, names, call.batch.size, other.size))
        same, first = call.randomness == "same", Joined(call, quantity.joins())
        with RNG_LOCK if same else nullcontext():
            state = random_state(call.tensors) if same else None
            self.run_parts(call, first)
            if state is not None:
                set_random_state(state)  # all samples draw the same, of both batches
            first.close()
            factors = _collected(first.values["factors"], names)
            second = replace(call, batch=other, mask=None, cross=None, verify=False)
            columns = replace(self, quantity=_Columns(factors, names)).evaluate(second)
        order, dtype = first.order, call.dtype
        products = {name: order(x.mT).to(dtype) for name, x in columns.items()}
        return quantity.of_groups(products)


@overload
def per_sample_gram(
    loss: LossFn, *, groups: None = None, **options: Unpack[Options]
) -> GramFn[Tensor]: ...
@overload
def per_sample_gram(
    loss: LossFn, *, groups: Grouping, **options: Unpack[Options]
) -> GramFn[dict[str, Tensor]]: ...
@shows_options
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
    leaves all others as they are. So may one whose gradient, or a layer's input or
    gradient, is beyond 1e10, as products with it may leave the range of float32.

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

    def joins(self) -> dict[str, Join]:
        return {"factors": Listed()}

    def collector(self, call: Call) -> Mapped:
        return Mapped(lambda factor: factor)

    def check(self, call: Call) -> None:
        members(call.function, self.groups, call.params)

    def partial(self, collector: Mapped, call: Call) -> dict[str, Any]:
        return {"factors": [collector.values]}

    def total(self, parts: Joined) -> Any:
        call, order = parts.call, parts.order
        names = members(call.function, self.groups, call.params)
        if not call.batch.size:
            return self.of_groups(_zeros(call, names, 0, 0))
        factors = _collected(parts.values["factors"], names)
        with no_autocast(call.device):
            products = _summed(names, lambda name: _symmetric(factors.pop(name)))
        return self.of_groups(
            {n: order(order(x).mT).mT.to(call.dtype) for n, x in products.items()}
        )

    def of_groups(self, products: dict[str, Tensor]) -> Any:
        """Return products by group, or the only ones."""
        return products[""] if self.groups is None else products

    def selected(self, value: Any, rows: Any, inputs: Inputs | Call) -> Any:
        columns = rows if inputs.cross is None else slice(None)
        return tree.tree_map(lambda products: products[rows][:, columns], value)


@dataclass(frozen=True)
class _Columns(Quantity):
    """Inner products with the gradients of a first batch of A samples, [B, A]."""

    factors: dict[str, list[Factor]]  # of the first batch
    names: _Names

    def collector(self, call: Call) -> Mapped:
        return Mapped(lambda factor: factor)

    def partial(self, collector: Mapped, call: Call) -> dict[str, Any]:
        def product(name: str) -> Tensor:
            column = collector.values.pop(name)
            return torch.cat([row.gram(column) for row in self.factors[name]])

        products = _summed(self.names, product)
        return {"values": {group: total.mT for group, total in products.items()}}

    def total(self, parts: Joined) -> dict[str, Tensor]:
        return parts.values["values"]


def _zeros(call: Call, names: _Names, *sizes: int) -> dict[str, Tensor]:
    value = next(iter(call.params.values()))
    return {group: value.new_zeros(sizes, dtype=call.dtype) for group in names}


def _collected(
    parts: Iterable[dict[str, Factor]], names: _Names
) -> dict[str, list[Factor]]:
    factors: dict[str, list[Factor]] = {
        n: [] for group in names.values() for n in group
    }
    for part in parts:
        for name, collected in factors.items():
            collected.append(part.pop(name))
    for name, collected in factors.items():
        grads = [factor.g for factor in collected if isinstance(factor, Dense)]
        if 1 < len(collected) == len(grads):  # a loop has one for each sample
            factors[name] = [Dense(torch.cat(grads))]
    return factors


def _summed(names: _Names, product: Callable[[str], Tensor]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for group, parameters in names.items():
        for name in parameters:
            part = double(product(name)).real
            sums[group] = sums[group] + part if group in sums else part
    return sums


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
