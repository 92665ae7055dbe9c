"""Inner products of the samples' gradients, within a batch and between two.

B samples of the batch, B' of a second one. The Gram form of a norm is another thing:
see `factors/reductions.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from vgrad import batches, tree
from vgrad.factors import Dense, Factor
from vgrad.generators import RNG_LOCK, random_state, set_random_state
from vgrad.persample.engine import (
    Call,
    Evaluation,
    Grouping,
    Groups,
    Mapped,
    Options,
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

    def __init__(self, options: Call, groups: Groups) -> None:
        super().__init__(options)
        self._groups: Groups = groups

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
        value = self.on_all(params, buffers, batch, mask, cross)
        return value if mask is None else self.selected(value, mask, cross)

    def called(self, run: Evaluation, more: Any) -> Any:
        """Multiply gradients; `more` is the second batch, if any."""
        names = members("per_sample_gram", self._groups, run.params)
        with RNG_LOCK if self.options.randomness == "same" else nullcontext():
            products = (
                _within(run, names) if more is None else _between(run, names, more)
            )
        products = {group: value.to(run.dtype) for group, value in products.items()}
        value = products[""] if self._groups is None else products
        return self.in_order(run, run.result(value, *tree.tensors(more)), more)

    def selected(self, value: Any, rows: Any, more: Any = None) -> Any:
        """Keep the rows of some samples, and within a batch their columns."""
        columns = rows if more is None else slice(None)
        return tree.tree_map(lambda products: products[rows][:, columns], value)


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
    return GramFn(Call.of(per_sample_gram, loss, options), groups)


def _within(run: Evaluation, names: _Names) -> dict[str, Tensor]:
    """Inner products of a batch's gradients for every group, [B, B]."""
    factors = _collected(run, names)
    if not run.done:
        return _zeros(run, names, 0, 0)
    with no_autocast(run.call.device):
        return _summed(names, lambda name: _symmetric(factors.pop(name)))


def _between(run: Evaluation, names: _Names, cross: tuple) -> dict[str, Tensor]:
    """Inner products with the gradients of a second batch for every group, [B, B']."""
    call = run.call
    if call.draws.keys is not None:
        raise ValueError(
            "per_sample_gram(cross, keys): expected keys of one batch, got keys "
            "beside a second batch, whose samples have none. Leave the keys out."
        )
    other = batches.read(call.function, cross)
    if not (call.batch.size and other.size):
        return _zeros(run, names, call.batch.size, other.size)
    same = call.randomness == "same"
    state = random_state(call.tensors) if same else None
    factors = _collected(run, names)
    if state is not None:
        set_random_state(state)  # all samples draw the same, of both batches
    strips = []
    second = Evaluation(replace(call, batch=other, mask=None))
    for chunk in second.chunks(_factors):

        def product(name: str, columns: dict[str, Factor] = chunk.values) -> Tensor:
            column = columns.pop(name)
            return torch.cat([row.gram(column) for row in factors[name]])

        with no_autocast(call.device):
            strips.append(_summed(names, product))
    products = {
        group: torch.cat([strip[group] for strip in strips], dim=1) for group in names
    }
    places = second.places
    if places is None:
        return products
    return {group: value[:, places] for group, value in products.items()}


def _factors() -> Mapped:
    return Mapped(lambda factor: factor)


def _zeros(run: Evaluation, names: _Names, *sizes: int) -> dict[str, Tensor]:
    value = next(iter(run.params.values()))
    return {group: value.new_zeros(sizes, dtype=run.dtype) for group in names}


def _collected(run: Evaluation, names: _Names) -> dict[str, list[Factor]]:
    """Run the batch, and keep all factors of each parameter that is in a group."""
    factors: dict[str, list[Factor]] = {n: [] for some in names.values() for n in some}
    for chunk in run.chunks(_factors):
        for name, collected in factors.items():
            collected.append(chunk.values.pop(name))
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
