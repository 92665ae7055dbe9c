"""Random projections of the samples' gradients, which keep their inner products.

B samples, P numbers in a parameter, of which O are in its first dimension.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Required, Unpack, get_args, overload

import torch
from torch import Tensor

from vgrad import checks
from vgrad.factors import Factor, Probes
from vgrad.generators import hashed_bits, unit
from vgrad.persample.engine import (
    Call,
    Collector,
    Joined,
    Options,
    Quantity,
    Transform,
    shows_options,
)
from vgrad.tree import double, wide
from vgrad.typing import LossFn, Params, Tree

Kind = Literal["rademacher", "gaussian"]

Sides = Mapping[str, tuple[Tensor | None, Tensor | None]]
"""For each parameter the directions of both sides, [k_o, O] and [k_i, P / O]."""


class ProjectionOptions(Options, total=False):
    """The options of random projections."""

    seed: Required[int]
    kind: Kind


@overload
def per_sample_projection(
    loss: LossFn,
    dim: int,
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[ProjectionOptions],
) -> Transform[Tensor]: ...
@overload
def per_sample_projection(
    loss: LossFn,
    dim: int,
    *,
    has_aux: Literal[True],
    **options: Unpack[ProjectionOptions],
) -> Transform[tuple[Tensor, Tree]]: ...
@overload
def per_sample_projection(
    loss: LossFn,
    dim: tuple[int, int],
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[ProjectionOptions],
) -> Transform[Params]: ...
@overload
def per_sample_projection(
    loss: LossFn,
    dim: tuple[int, int],
    *,
    has_aux: Literal[True],
    **options: Unpack[ProjectionOptions],
) -> Transform[tuple[Params, Tree]]: ...
@overload
def per_sample_projection(
    loss: LossFn,
    dim: Sides,
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[Options],
) -> Transform[Params]: ...
@overload
def per_sample_projection(
    loss: LossFn, dim: Sides, *, has_aux: Literal[True], **options: Unpack[Options]
) -> Transform[tuple[Params, Tree]]: ...
@shows_options
def per_sample_projection(
    loss: LossFn,
    dim: int | tuple[int, int] | Sides,
    *,
    seed: int | None = None,
    kind: Kind = "rademacher",
    has_aux: bool = False,
    **options: Unpack[Options],
) -> Transform[Any]:
    """Random projection of every gradient: `(params, buffers, *batch) -> [B, dim]`.

    Inner products of projections are, on average over seeds, the gradients' own:
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
    taken of the whole gradients, and the added terms are summed. Signs never have more
    variance than normal numbers.

    With `dim=(k_o, k_i)` there is a result for each parameter, `{name: [B, k_o k_i]}`,
    which keeps inner products in the same sense: `P_o G_b P_i^T` of the matrix G_b `[O,
    P / O]`, by rows, with k_o x O and k_i x P / O random numbers, over `sqrt(k_o k_i)`.
    A side that is no longer than its k is kept as it is, and adds no variance. A
    parameter with fewer than two dimensions has k_o k_i directions, at most P.

    With sides of its own for each parameter, `{name: (left [k_o, O] | None, right [k_i,
    P / O] | None)}`, the result is `left G_b right^T` as it is, by rows. None is the
    identity. A left side of P columns, and no right one, holds directions of the whole
    parameter, such as a bias. There is no seed. `curvature.Kronecker.sides` has
    eigenvectors, which keep the most curved directions and leave all others out: their
    projections do not keep inner products.

    All parameters as one are `torch.cat([*features.values()], 1)`, [B, sum of k].

    The directions follow from `seed`, the parameter's name and its shape alone: the
    same for every batch, chunk size, strategy, dtype and device, and with any other
    parameters. Generators of torch stay as they are. Directions are float32,
    `dim * (O + P / O)` numbers for each parameter (`dim * P` below two dimensions); the
    returned function draws them at its first call, on the device of the parameter, and
    keeps them. The other options are in `vgrad.persample.Options`.

    Cost: recorded, the inputs of a layer and the gradients at its outputs are
    projected, for each position, or gradients, one layer's at a time, where that is
    cheaper. For the same number of features in all, pairs of directions take about
    `sqrt(dim)` times fewer operations.

    Reference: Park et al., TRAK, arXiv 2303.14186; Sun et al., Tensor Random Projection
    for Low Memory Dimension Reduction, arXiv 2105.00105; Choe et al., LoGra, arXiv
    2405.13954 (both sides of a layer).

    Raises:
        ValueError: `dim` is no positive whole number or pair of them, `seed` is
            negative or no whole number, `kind` is unknown. When called: sides are not
            of these parameters.

    Example:
        >>> import torch
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> project = per_sample_projection(loss, 1000, seed=0)
        >>> x = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
        >>> projections = project({"w": torch.ones(2)}, {}, x)
        >>> projections.shape
        torch.Size([2, 1000])
        >>> (projections @ projections.T).diagonal()  # signs keep norms of one number
        tensor([9.0000, 4.0000])
        >>> per_sample_projection(loss, (8, 8), seed=0)({"w": torch.ones(2)}, {}, x)
        {'w': tensor([[3., 0.],
                [0., 2.]])}
    """
    function = "per_sample_projection"
    call = Call.of(per_sample_projection, loss, options, has_aux)
    if (seed is None) != isinstance(dim, Mapping):
        raise TypeError(
            f"{function}(dim, seed={checks.shown(seed)}): expected a seed of random "
            f"directions, and none for sides, which are not drawn."
        )
    if isinstance(dim, Mapping):
        return Transform(call, Projection(sides=dim))
    sides: dict[str, Any] = {"dim": dim}
    if isinstance(dim, tuple | list) and len(dim) == 2:
        sides = {"dim[0]": dim[0], "dim[1]": dim[1]}
    sizes = tuple(checks.integers(function, minimum=1, **sides))
    [seed] = checks.integers(function, minimum=0, seed=seed)
    checks.choice(function, get_args(Kind), kind=kind)
    return Transform(call, Projection(Directions(sizes, seed, kind)))


@dataclass
class _Projected(Collector):
    """Keeps inner products with directions, [B, dim]; their sum in float64 as ""."""

    probes: Mapping[str, Probes]
    joint: bool
    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, factor: Factor) -> None:
        probes = self.probes[name]
        products = factor.project(probes).view(factor.size, probes.dim)
        if self.joint:
            name, products = "", self.values.get("", 0.0) + double(products)
        self.values[name] = products


@dataclass(frozen=True)
class Projection(Quantity):
    """Projections on random directions, or on sides."""

    directions: "Directions | None" = None
    sides: Sides | None = None

    def collector(self, call: Call) -> _Projected:
        return _Projected(self._of(call.params), not self.pairs)

    def check(self, call: Call) -> None:
        if self.pairs:
            self._of(call.params)

    def partial(self, collector: _Projected, call: Call) -> dict[str, Params]:
        values = {}
        for name, value in collector.values.items():
            if self.directions is not None:
                value = value / self.directions.scale(collector.probes.get(name))
            values[name] = value.to(call.dtype)
        return {"values": values}

    def total(self, parts: Joined) -> Any:
        if (projections := parts.values["values"]) is None:
            sizes = {"": math.prod(self.directions.sizes) if self.directions else 0}
            if self.pairs:
                sizes = {n: x.dim for n, x in self._of(parts.call.params).items()}
            projections = {
                name: parts.losses.new_zeros(0, n) for name, n in sizes.items()
            }
        return projections if self.pairs else projections[""]

    @property
    def pairs(self) -> bool:
        """Whether each parameter has directions for pairs of vectors."""
        return self.directions is None or self.directions.pairs

    def _of(self, params: Params) -> dict[str, Probes]:
        if self.directions is not None:
            drawn = self.directions
            return {name: drawn.of(name, value) for name, value in params.items()}
        sides: Any = self.sides
        checks.names("per_sample_projection(sides)", params, sides)
        return {name: _of_sides(name, x, sides[name]) for name, x in params.items()}


@dataclass(eq=False)
class Directions:
    """The random directions of a transform: each is drawn once, and kept.

    `sizes` are the number of directions, or of the vectors on both sides of pairs.
    """

    sizes: tuple[int, ...]
    seed: int
    kind: Kind
    _drawn: dict[tuple, Probes] = field(default_factory=dict, init=False, repr=False)

    @property
    def pairs(self) -> bool:
        """Whether there is a direction for each pair of vectors."""
        return len(self.sizes) == 2

    def of(self, name: str, like: Tensor) -> Probes:
        """Return the directions of a parameter."""
        shape = _real_shape(like)
        key = (name, shape, like.device)
        if key not in self._drawn:
            # Keys of 128 bits: of a seed for the CPU torch uses 32, in which the names
            # of large models would meet. Nor does torch draw under vmap.
            digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
            split = len(shape) > 1
            counts = self.sizes if split else [math.prod(self.sizes)]
            size, device = math.prod(shape[split:]), like.device
            right = self._draw(digest[16:], counts[-1], size, device)
            left = None
            if split:
                left = self._draw(digest[:16], counts[0], shape[0], device)
            self._drawn[key] = Probes(left, right, self.pairs)
        return self._drawn[key]

    def scale(self, probes: Probes | None) -> float:
        """Return the number that keeps inner products, for None of all parameters."""
        if probes is None:
            return math.sqrt(self.sizes[0])
        sides = (side for side in probes[:2] if isinstance(side, Tensor))
        # Of pairs, a side that is the identity has none.
        return math.sqrt(math.prod(len(x) for x in sides if len(x) < x.shape[1]))

    def _draw(self, key: bytes, rows: int, size: int, device: torch.device) -> Tensor:
        """Draw a matrix [rows, size]; for pairs it is square at most, then identity."""
        if self.pairs and rows >= size:
            return torch.eye(size, device=device, dtype=torch.float32)
        count = rows * size
        if self.kind == "gaussian":
            numbers = unit(hashed_bits(key, count, device), 53, torch.float64)
            numbers += 2.0**-54  # neither 0 nor 1
            return torch.special.ndtri(numbers).to(torch.float32).view(rows, size)
        octets = hashed_bits(key, -(-count // 64), device).view(torch.uint8)
        places = torch.arange(8, dtype=torch.uint8, device=device)
        bits = (octets.unsqueeze(-1) >> places) & 1
        signs = bits.view(-1)[:count].to(torch.float32) * 2 - 1
        return signs.view(rows, size)


def _real_shape(like: Tensor) -> tuple[int, ...]:
    return (*like.shape, 2) if like.is_complex() else tuple(like.shape)


def _of_sides(
    name: str, like: Tensor, sides: tuple[Tensor | None, Tensor | None]
) -> Probes:
    """Return the directions of both sides, or those on the left of an undivided one."""
    shape, (left, right) = _real_shape(like), sides
    size, undivided = math.prod(shape), len(shape) < 2
    undivided |= right is None and left is not None and left.shape[1:] == (size,)
    lengths = (size, 0) if undivided else (shape[0], math.prod(shape[1:]))
    directions = []
    for place, side, length in zip(("left", "right"), sides, lengths, strict=True):
        if side is None:
            side = torch.eye(length)
        elif side.shape[1:] != (length,) or not length:
            raise ValueError(
                f"per_sample_projection(sides): expected directions [k, {length}] on "
                f"the {place} of {name!r}, got shape {tuple(side.shape)}."
            )
        directions.append(side.detach().to(like.device, wide(like.dtype)))
    return Probes(None, directions[0]) if undivided else Probes(*directions, pairs=True)
