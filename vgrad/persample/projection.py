"""Random projections of the samples' gradients, which keep their inner products.

B samples, P numbers in a parameter, of which O are in its first dimension.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack, get_args, overload

import torch
from torch import Tensor

from vgrad import checks
from vgrad.factors import Factor, Probes, reductions
from vgrad.generators import hashed_bits, unit
from vgrad.persample.engine import (
    Call,
    Collector,
    Evaluation,
    Options,
    Quantity,
    Transform,
    joined,
)
from vgrad.tree import double
from vgrad.typing import LossFn, Tree

Kind = Literal["rademacher", "gaussian"]


@overload
def per_sample_projection(
    loss: LossFn,
    dim: int,
    *,
    seed: int,
    kind: Kind = "rademacher",
    has_aux: Literal[False] = False,
    **options: Unpack[Options],
) -> Transform[Tensor]: ...
@overload
def per_sample_projection(
    loss: LossFn,
    dim: int,
    *,
    seed: int,
    kind: Kind = "rademacher",
    has_aux: Literal[True],
    **options: Unpack[Options],
) -> Transform[tuple[Tensor, Tree]]: ...
def per_sample_projection(
    loss: LossFn,
    dim: int,
    *,
    seed: int,
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

    The directions follow from `seed`, the parameter's name and its shape alone: the
    same for every batch, chunk size, strategy, dtype and device, and with any other
    parameters. Generators of torch stay as they are. Directions are float32,
    `dim * (O + P / O)` numbers for each parameter (`dim * P` below two dimensions); the
    returned function draws them at its first call, on the device of the parameter, and
    keeps them. The other options are in `vgrad.persample.Options`.

    Cost: recorded, the inputs of a layer and the gradients at its outputs are
    projected, for each position, or gradients, one layer's at a time, where that is
    cheaper.

    Reference: Park et al., TRAK, arXiv 2303.14186; Sun et al., Tensor Random Projection
    for Low Memory Dimension Reduction, arXiv 2105.00105.

    Raises:
        ValueError: `dim` is no positive whole number, `seed` is negative or no whole
            number, `kind` is unknown.

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
    """
    function = "per_sample_projection"
    [dim] = checks.whole(function, least=1, dim=dim)
    [seed] = checks.whole(function, least=0, seed=seed)
    checks.choice(function, get_args(Kind), kind=kind)
    call = Call.of(per_sample_projection, loss, options, has_aux)
    return Transform(call, _Projection(dim, seed, kind))


@dataclass
class _Projections(Collector):
    """Adds up inner products with random directions, [B, dim] in float64."""

    probes: Mapping[str, Probes]
    sums: Any = 0.0

    def take(self, name: str, factor: Factor) -> None:
        self.sums = self.sums + double(factor.project(self.probes[name]))


@dataclass(frozen=True)
class _Projection(Quantity):
    """Projections on random directions, each of which is drawn once."""

    dim: int
    seed: int
    kind: Kind
    _drawn: dict[tuple, Probes] = field(default_factory=dict, compare=False, repr=False)

    def collector(self, call: Call) -> _Projections:
        probes = {name: self._of(name, each) for name, each in call.params.items()}
        return _Projections(probes)

    def partial(self, collector: _Projections, call: Call) -> Tensor:
        return (collector.sums / math.sqrt(self.dim)).to(call.dtype)

    def total(self, partials: Iterator[Tensor], run: Evaluation) -> Tensor:
        empty = reductions.no_norms(run.params, run.dtype).new_zeros(0, self.dim)
        return joined(empty, list(partials))

    def _of(self, name: str, like: Tensor) -> Probes:
        shape = (*like.shape, 2) if like.is_complex() else tuple(like.shape)
        key = (name, shape, like.device)
        if key not in self._drawn:
            # Keys of 128 bits: of a seed for the CPU torch uses 32, in which the names
            # of large models would meet. Nor does torch draw under vmap.
            digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
            split = len(shape) > 1
            left = self._draw(digest[:16], shape[0], like.device) if split else None
            right = self._draw(digest[16:], math.prod(shape[split:]), like.device)
            self._drawn[key] = Probes(left, right)
        return self._drawn[key]

    def _draw(self, key: bytes, size: int, device: torch.device) -> Tensor:
        count = self.dim * size
        if self.kind == "gaussian":
            numbers = unit(hashed_bits(key, count, device), 53, torch.float64)
            numbers += 2.0**-54  # neither 0 nor 1
            return torch.special.ndtri(numbers).to(torch.float32).view(self.dim, size)
        octets = hashed_bits(key, -(-count // 64), device).view(torch.uint8)
        places = torch.arange(8, dtype=torch.uint8, device=device)
        bits = (octets.unsqueeze(-1) >> places) & 1
        signs = bits.view(-1)[:count].to(torch.float32) * 2 - 1
        return signs.view(self.dim, size)
