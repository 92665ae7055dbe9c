"""What data attribution asks of per-sample gradients: inner products and projections.

B samples, P numbers in a parameter, of which O are in its first dimension. The options
are those that `quantities.py` explains.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vgrad import batches, checks
from vgrad.batches import ChunkSize
from vgrad.dtypes import double, no_autocast
from vgrad.generators import ALONE, random_state, set_random_state
from vgrad.persample.engine.collectors import Factors, Projections
from vgrad.persample.engine.options import Options, Transform, joined
from vgrad.persample.engine.problem import Randomness
from vgrad.persample.factors import reductions
from vgrad.persample.factors.base import Dense, Factor, Probes
from vgrad.persample.grouping import Grouping
from vgrad.precision.loss_scale import LossScale
from vgrad.typing import Buffers, LossFn, Params, Tree

Kind = Literal["rademacher", "gaussian"]


def per_sample_gram(
    loss: LossFn,
    *,
    groups: str | Mapping[str, str | Sequence[str]] | None = None,
    strategy: str = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    loss_scale: LossScale | None = None,
) -> Transform:
    """Inner products of gradients: `(params, buffers, *batch, cross=None) -> [B, B]`.

    Entry (i, j) is `sum_p <dL_i/dp, dL_j/dp>`, the empirical neural tangent kernel of
    the loss, in float32 or wider. The matrix is exactly symmetric. With `cross`, a
    second batch as a tuple, it is `[B, B']`: samples of the batch against those of
    `cross`, which may have other sizes in all dimensions that the loss allows. With
    `groups` the result is `{group: [B, B]}`, as for `per_sample_norm`. Complex
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

    Raises:
        TypeError: `cross` is not a tuple.
        ValueError: as `per_sample_norm`.
        UnsupportedOp: as `per_sample_grad`.

    Example:
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
    function = "per_sample_gram"
    options = Options(
        function,
        loss,
        strategy,
        chunk_size,
        randomness,
        has_aux=False,
        loss_scale=loss_scale,
    )
    grouping = Grouping(function, {"": "*"} if groups is None else groups)

    def gram(*args: Any, **kwargs: Any) -> Any:
        with ALONE if randomness == "same" else nullcontext():
            return computed(*args, **kwargs)

    def computed(
        params: Params, buffers: Buffers, /, *batch: Tree, cross: tuple | None = None
    ) -> Any:
        checks.dictionaries(function, params=params, buffers=buffers)
        _check_cross(cross)
        members = grouping.members(params)
        dtype = reductions.norm_dtype(params)
        both = (batch, batch if cross is None else cross)
        sizes = [batches.read(function, each).size for each in both]
        same = randomness == "same" and cross is not None
        state = random_state((*params.values(), *buffers.values())) if same else None
        held: dict[str, list[Factor]] = {
            name: [] for names in members.values() for name in names
        }
        parts = []
        for chunk in options.chunks(params, buffers, batch, Factors):
            for name, factors in held.items():
                factors.append(chunk.collected.factors.pop(name))
            parts.append(chunk._replace(collected=None))
        for name, factors in held.items():
            held[name] = _joined(factors)
        if state is not None:
            set_random_state(state)  # all samples draw the same, of both batches
        if 0 in sizes:
            value = next(iter(params.values()))
            found = {group: value.new_zeros(sizes, dtype=dtype) for group in members}
        elif cross is None:
            with no_autocast(next(iter(params.values())).device):
                found = _summed(members, lambda name: _symmetric(held.pop(name)))
        else:
            strips = []
            for chunk in options.chunks(params, buffers, cross, Factors):
                with no_autocast(next(iter(params.values())).device):
                    strips.append(_strip(held, chunk.collected.factors, members))
                parts.append(chunk._replace(collected=None))
            found = {
                group: torch.cat([strip[group] for strip in strips], dim=1)
                for group in members
            }
        found = {group: value.to(dtype) for group, value in found.items()}
        return options.result(found[""] if groups is None else found, parts)

    return Transform(options, gram)


def per_sample_projection(
    loss: LossFn,
    dim: int,
    *,
    seed: int,
    kind: Kind = "rademacher",
    strategy: str = "auto",
    chunk_size: ChunkSize = None,
    randomness: Randomness = "error",
    has_aux: bool = False,
    loss_scale: LossScale | None = None,
) -> Transform:
    """Random projection of every gradient: `(params, buffers, *batch) -> [B, dim]`.

    Inner products of projections are, on average over seeds, those of the gradients:
    `E <f_i, f_j> = sum_p <dL_i/dp, dL_j/dp>`. Entry k of a row is
    `sum_p <dL_b/dp, R_pk> / sqrt(dim)`. For a parameter with two or more dimensions,
    seen as a matrix `[O, P / O]`, the direction `R_pk` is the outer product of two
    random vectors; else it is one random vector. Their numbers are signs
    (`"rademacher"`) or normal. The result is float32 or wider.

    The price of outer products is variance. With G and H the two gradients of one
    matrix, normal directions without structure have an inner product of variance
    `(|G|^2 |H|^2 + <G, H>^2) / dim`. Outer products of normal vectors add
    `2 (|G^T H|^2 + |G H^T|^2 + tr(G H^T G H^T)) / dim`, at most three times as much:
    to be as good as directions without structure they take four times `dim` at worst,
    where gradients are of rank one and parallel, and little more where these have many
    comparable singular values. Over several parameters, |G|^2, |H|^2 and <G, H> are
    those of the whole gradients and what is added is summed. Signs never have more
    variance than normal numbers.

    The directions follow from `seed`, the parameter's name and its shape alone (and
    numpy's version, which draws them): the same for every batch, chunk size, strategy,
    dtype and device, and whichever other parameters there are. Generators of torch stay
    as they are. Directions are float32, `dim * (O + P / O)` numbers for each parameter
    (`dim * P` below two dimensions); the function that is returned draws them at its
    first call and keeps them.

    Cost: recorded, what a layer saw and the gradients at its outputs are projected, for
    each position, or gradients, one layer's at a time, where that is cheaper.

    Reference: Park et al., TRAK, arXiv 2303.14186; Sun et al., Tensor Random Projection
    for Low Memory Dimension Reduction, arXiv 2105.00105.

    Raises:
        ValueError: `dim` or `seed` is no whole number above zero (from zero on for the
            seed), `kind` is another; else as `per_sample_grad`.
        UnsupportedOp: as `per_sample_grad`.

    Example:
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> project = per_sample_projection(loss, 1000, seed=0)
        >>> x = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
        >>> found = project({"w": torch.ones(2)}, {}, x)
        >>> found.shape
        torch.Size([2, 1000])
        >>> (found @ found.T).diagonal()  # signs keep the norm of a single number
        tensor([9.0000, 4.0000])
    """
    function = "per_sample_projection"
    checks.whole(function, least=1, dim=dim)
    checks.whole(function, least=0, seed=seed)
    checks.one_of(function, ("rademacher", "gaussian"), kind=kind)
    options = Options(
        function, loss, strategy, chunk_size, randomness, has_aux, loss_scale=loss_scale
    )
    directions = _Directions(dim, seed, kind)

    def projections(params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        checks.dictionaries(function, params=params, buffers=buffers)
        dtype = reductions.norm_dtype(params)
        found, parts = [], []

        def collect() -> Projections:
            probes = {name: directions.of(name, each) for name, each in params.items()}
            return Projections(probes)

        for chunk in options.chunks(params, buffers, batch, collect):
            found.append((chunk.collected.sums / math.sqrt(dim)).to(dtype))
            parts.append(chunk._replace(collected=None))
        empty = reductions.no_norms(params, dtype).new_zeros(0, dim)
        return options.result(joined(empty, found), parts)

    return Transform(options, projections)


class _Directions:
    """Random directions for every parameter, each drawn once."""

    def __init__(self, dim: int, seed: int, kind: Kind) -> None:
        """Draw nothing yet, since nothing is known about the parameters."""
        self._dim, self._seed, self._kind = dim, seed, kind
        self._drawn: dict[tuple, Probes] = {}

    def of(self, name: str, like: Tensor) -> Probes:
        """Return the directions of one parameter, on its device."""
        shape = (*like.shape, 2) if like.is_complex() else tuple(like.shape)
        key = (name, shape, like.device)
        if key not in self._drawn:
            # A key of 128 bits: of a seed for the CPU torch uses 32, in which the names
            # of large models would meet. Nor does torch draw under vmap.
            digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
            bits = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
            source = np.random.Generator(bits)
            split = len(shape) > 1
            left = self._draw(source, shape[0]).to(like.device) if split else None
            right = self._draw(source, math.prod(shape[split:])).to(like.device)
            self._drawn[key] = Probes(left, right)
        return self._drawn[key]

    def _draw(self, source: np.random.Generator, size: int) -> Tensor:
        sizes = (self._dim, size)
        if self._kind == "gaussian":
            return torch.from_numpy(source.standard_normal(sizes, np.float32))
        signs = source.integers(0, 2, sizes, np.int8)
        return torch.from_numpy(signs).to(torch.float32) * 2 - 1


def _check_cross(cross: Any) -> None:
    """Refuse a bare tensor, which would be taken for a tuple of its rows."""
    if cross is not None and not isinstance(cross, tuple | list):
        raise TypeError(
            f"per_sample_gram(loss)(params, buffers, *batch, cross): expected a second "
            f"batch as a tuple, such as (x, y), got a {type(cross).__name__}."
        )


def _strip(
    held: Mapping[str, Sequence[Factor]],
    others: dict[str, Factor],
    members: Mapping[str, Sequence[str]],
) -> dict[str, Tensor]:
    """Inner products with the samples of one chunk; drops its factors as it goes."""

    def product(name: str) -> Tensor:
        other = others.pop(name)
        return torch.cat([factor.gram(other) for factor in held[name]])

    return _summed(members, product)


def _summed(
    members: Mapping[str, Sequence[str]], product: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Sum over the parameters of every group, in float64."""
    found: dict[str, Tensor] = {}
    for group, names in members.items():
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
