"""Inner products of the samples' gradients, within a batch and between two.

B samples of the batch, B' of a second one. The Gram form of a norm is another thing:
`factors/reductions.py` has it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from vgrad import batches, tree
from vgrad.generators import RNG_LOCK, random_state, set_random_state
from vgrad.persample.engine import Call, Factors, Options, Problem, Transform
from vgrad.persample.engine.grouping import Grouping, Groups, check_groups, members
from vgrad.persample.factors import Dense, Factor
from vgrad.tree import double, no_autocast
from vgrad.typing import Buffers, LossFn, Params, Result, Tree

_Parts = Mapping[str, Sequence[str]]
"""The names of parameters in each group."""


class GramFn(Transform[Result]):
    """What `per_sample_gram` returns: `(params, buffers, *batch, cross=None)`."""

    def __init__(self, options: Problem, groups: Groups) -> None:
        """Keep what `per_sample_gram` was given."""
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
        """Multiply the gradients of this batch with their own, or those of `cross`.

        Args:
            mask: which samples count, bool `[B]`; the others add nothing.
        """
        _check_cross(cross)
        found = self.on_all(params, buffers, batch, mask, cross)
        return found if mask is None else self.selected(found, mask, cross)

    def called(self, call: Call, more: Any) -> Any:
        """Multiply gradients; `more` is the second batch, if any."""
        parts = members("per_sample_gram", self._groups, call.params)
        with RNG_LOCK if self.options.randomness == "same" else nullcontext():
            found = (
                _within(call, parts) if more is None else _between(call, parts, more)
            )
        found = {group: value.to(call.dtype) for group, value in found.items()}
        value = found[""] if self._groups is None else found
        found = call.result(value, *tree.tensors(more))
        return self.in_order(call, found, more)

    def selected(self, found: Any, rows: Any, more: Any = None) -> Any:
        """Keep the rows of some samples, and the columns where they have such."""
        columns = rows if more is None else slice(None)
        return tree.tree_map(lambda products: products[rows][:, columns], found)


@overload
def per_sample_gram(
    loss: LossFn, *, groups: None = None, **options: Unpack[Options]
) -> GramFn[Tensor]: ...
@overload
def per_sample_gram(
    loss: LossFn, *, groups: Grouping, **options: Unpack[Options]
) -> GramFn[dict[str, Tensor]]: ...
def per_sample_gram(
    loss: LossFn,
    *,
    groups: Groups = None,
    **options: Unpack[Options],
) -> GramFn[Any]:
    """Inner products of gradients: `(params, buffers, *batch, cross=None) -> [B, B]`.

    Entry (i, j) is `sum_p <dL_i/dp, dL_j/dp>`, the empirical neural tangent kernel of
    the loss, in float32 or wider. The matrix is exactly symmetric. With `cross`, a
    second batch as a tuple, it is `[B, B']`: samples of the batch against those of
    `cross`, which may have other sizes wherever the loss allows it. With `groups` the
    result is `{group: [B, B]}`, as for `per_sample_norm`. Complex
    parameters count as pairs of real ones.

    A sample whose gradient is not finite has no finite entry in its row and column, and
    leaves all others as they are.

    Cost: products of what the layers saw and of the gradients at their outputs, or of
    gradients, one layer's at a time, where that is cheaper. Recorded, it holds both
    tensors of every layer for all B samples, whatever the chunk size; `"vmap"` and
    `"loop"` hold all gradients, B x P numbers. Chunks of b samples bound the rest: b^2
    products of all positions with all, or gradients of one layer. Of `cross` one chunk
    is held at a time, so make it the larger side.

    Reference: Jacot et al., Neural Tangent Kernel, arXiv 1806.07572.

    The options are in `vgrad.persample.Options`, without `has_aux`.

    Raises:
        TypeError: `cross` is not a tuple; else as `per_sample_norm`.
        ValueError: as `per_sample_norm`.
        UnsupportedOp: as `per_sample_grad`.

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
    return GramFn(Problem.of(per_sample_gram, loss, options), groups)


def _within(call: Call, parts: _Parts) -> dict[str, Tensor]:
    """Inner products of a batch's gradients for every group, [B, B]."""
    held = _held(call, parts)
    if not call.done:
        return _zeros(call, parts, 0, 0)
    with no_autocast(call.problem.device):
        return _summed(parts, lambda name: _symmetric(held.pop(name)))


def _between(call: Call, parts: _Parts, cross: tuple) -> dict[str, Tensor]:
    """Inner products with the gradients of a second batch for every group, [B, B']."""
    problem = call.problem
    if problem.draws.keys is not None:
        raise ValueError(
            "per_sample_gram(cross, keys): expected keys of one batch, got those of a "
            "batch beside a second one, whose samples have none. Leave the keys out."
        )
    other = batches.read(problem.function, cross)
    if not (problem.batch.size and other.size):
        return _zeros(call, parts, problem.batch.size, other.size)
    same = problem.randomness == "same"
    state = random_state(problem.tensors) if same else None
    held = _held(call, parts)
    if state is not None:
        set_random_state(state)  # all samples draw the same, of both batches
    strips = []
    second = Call(replace(problem, batch=other, mask=None))
    for chunk in second.chunks(Factors):

        def product(name: str, factors: dict[str, Factor] = chunk.factors) -> Tensor:
            factor = factors.pop(name)
            return torch.cat([each.gram(factor) for each in held[name]])

        with no_autocast(problem.device):
            strips.append(_summed(parts, product))
    found = {
        group: torch.cat([strip[group] for strip in strips], dim=1) for group in parts
    }
    places = second.places
    if places is None:
        return found
    return {group: products[:, places] for group, products in found.items()}


def _zeros(call: Call, parts: _Parts, *sizes: int) -> dict[str, Tensor]:
    value = next(iter(call.params.values()))
    return {group: value.new_zeros(sizes, dtype=call.dtype) for group in parts}


def _held(call: Call, parts: _Parts) -> dict[str, list[Factor]]:
    """Run the batch, and keep all factors of each parameter that is in a group."""
    held: dict[str, list[Factor]] = {n: [] for names in parts.values() for n in names}
    for chunk in call.chunks(Factors):
        for name, factors in held.items():
            factors.append(chunk.factors.pop(name))
    return {name: _joined(factors) for name, factors in held.items()}


def _check_cross(cross: Any) -> None:
    """Refuse a bare tensor, which would be taken for a tuple of its rows."""
    if cross is not None and not isinstance(cross, tuple | list):
        raise TypeError(
            f"per_sample_gram(loss)(params, buffers, *batch, cross): expected a second "
            f"batch as a tuple, such as (x, y), got a {type(cross).__name__}."
        )


def _summed(parts: _Parts, product: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Sum over the parameters of every group, in float64."""
    found: dict[str, Tensor] = {}
    for group, names in parts.items():
        for name in names:
            part = double(product(name)).real
            found[group] = found[group] + part if group in found else part
    return found


def _symmetric(factors: Sequence[Factor]) -> Tensor:
    """Inner products within and between chunks, each pair of them once."""
    count = len(factors)
    blocks: dict[tuple[int, int], Tensor] = {}
    for row in range(count):
        own = factors[row].gram(factors[row])
        # Matrix products may round (i, j) and (j, i) differently.
        blocks[row, row] = own.triu() + own.triu(1).mH
        for column in range(row + 1, count):
            block = factors[row].gram(factors[column])
            blocks[row, column], blocks[column, row] = block, block.mH
    rows = [[blocks[row, column] for column in range(count)] for row in range(count)]
    return torch.cat([torch.cat(row, dim=1) for row in rows])


def _joined(factors: list[Factor]) -> list[Factor]:
    """Make one factor of gradients that exist: strategies that loop have many."""
    grads = [factor.g for factor in factors if isinstance(factor, Dense)]
    if len(factors) < 2 or len(grads) < len(factors):
        return factors
    return [Dense(torch.cat(grads))]
