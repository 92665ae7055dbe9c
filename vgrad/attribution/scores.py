"""Scores of training samples for queries, from inner products of gradients.

B samples of a batch, N of all batches, Q queries, T positions of one sample.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor

from vgrad import checks
from vgrad.factors import Dense, Factor
from vgrad.factors.norms import far
from vgrad.functional.losses import check_model, sample_loss
from vgrad.functional.model import FunctionalModel
from vgrad.persample import per_sample_grad, per_sample_projection
from vgrad.persample.engine import (
    Call,
    Collector,
    Evaluation,
    Groups,
    Options,
    Quantity,
    Transform,
    check_groups,
    joined,
    members,
)
from vgrad.tree import double, wide
from vgrad.typing import Buffers, LossFn, Params, Tree

Batches = Iterable[tuple[Tree, ...]]


class Inverse(Protocol):
    """A curvature matrix that solves for vectors, `{name: [..., *shape]}`."""

    def solve(self, vector: Params, *, damping: float) -> Params:
        """Solve `(matrix + damping I) x = vector` for x."""
        ...


class Top(NamedTuple):
    """The largest scores of each query, and the numbers of their samples.

    -> values [Q, k], the largest first, and indices [Q, k], int64, in the order of the
    batches.
    """

    values: Tensor
    indices: Tensor


def influence(
    loss: LossFn,
    params: Params,
    buffers: Buffers,
    queries: tuple[Tree, ...],
    batches: Batches,
    *,
    curvature: Inverse | None = None,
    damping: float = 0.0,
    measurement: LossFn | None = None,
    groups: Groups = None,
    top: int | None = None,
    rank: int | None = None,
    per_position: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Influence of training samples on queries: scores [Q, N], positive is helpful.

    `g_q^T (H + damping I)^-1 g_n`, with the gradients of losses of a query and of a
    training sample, and a curvature matrix H that is a mean over samples. The options
    are in `vgrad.persample.Options`.

    Args:
        queries: one batch, such as `(x, y)`.
        curvature: of `vgrad.curvature`; None for the identity, inner products.
        measurement: a function of a query, larger is better, in the place of its loss.

    Reference: Koh and Liang, arXiv 1703.04730.

    Example:
        >>> import torch
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> params, x = {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [1.0, 0.0]])
        >>> influence(loss, params, {}, (x[:1],), [(x,)])
        tensor([[25.,  3.]])
    """
    if top is not None or rank is not None or per_position:
        raise NotImplementedError("influence")
    check_groups("influence", groups)
    names = members("influence", groups, params)
    vectors = _query_gradients(loss, params, buffers, queries, measurement, options)
    if curvature is not None:
        vectors = curvature.solve(vectors, damping=damping)
    factors = {
        name: [Dense(each.to(wide(params[name].dtype)))]
        for name, each in vectors.items()
    }
    call = Call.of(influence, loss, options)
    compute: Any = Transform(call, _Scores(factors, names))
    parts = [compute(params, buffers, *batch) for batch in _read("influence", batches)]
    scores = {group: torch.cat([part[group] for part in parts]).mT for group in names}
    return scores[""] if groups is None else scores


def self_influence(
    loss: LossFn,
    params: Params,
    buffers: Buffers,
    batches: Batches,
    *,
    curvature: Inverse | None = None,
    damping: float = 0.0,
    **options: Unpack[Options],
) -> Tensor:
    """Influence of every sample on itself, `g_n^T (H + damping I)^-1 g_n`: [N].

    Mislabelled and rare samples have large ones. It has the arguments of `influence`,
    and the options are in `vgrad.persample.Options`.

    Example:
        >>> import torch
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> x = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
        >>> self_influence(loss, {"w": torch.ones(2)}, {}, [(x,)])
        tensor([25.,  1.])
    """
    compute = per_sample_grad(loss, **options)
    parts = []
    for batch in _read("self_influence", batches):
        grads = compute(params, buffers, *batch)
        solved = grads
        if curvature is not None:
            solved = curvature.solve(grads, damping=damping)
        products = [
            (double(each) * double(solved[name])).flatten(1).sum(1)
            for name, each in grads.items()
        ]
        parts.append(torch.stack(products).sum(0).to(wide(products[0].dtype)))
    return torch.cat(parts).to(wide(next(iter(params.values())).dtype))


def trak(
    fmodel: FunctionalModel,
    params: Params,
    buffers: Buffers,
    queries: tuple[Tree, ...],
    batches: Batches,
    *,
    dim: int,
    seed: int,
    ridge: float,
    **options: Unpack[Options],
) -> Tensor:
    """Scores of TRAK for a classifier: [Q, N], positive is helpful.

    `phi_q (Phi^T Phi + ridge I)^-1 phi_n (1 - p_n)`, with phi the `dim` random
    projections of `margin`'s gradient, as of `per_sample_projection`, and p the
    probability of a sample's target. Batches are `(*inputs, target)`. The options are
    in `vgrad.persample.Options`.

    Reference: Park et al., arXiv 2303.14186.

    Example:
        >>> import torch, vgrad
        >>> model = torch.nn.Linear(2, 3)
        >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        >>> batch = torch.ones(4, 2), torch.tensor([0, 1, 2, 0])
        >>> options = {"dim": 8, "seed": 0, "ridge": 1.0}
        >>> trak(fmodel, params, buffers, batch, [batch], **options).shape
        torch.Size([4, 4])
    """
    [ridge] = checks.non_negative("trak", ridge=ridge)
    measure = margin(fmodel)

    def with_value(params: Params, buffers: Buffers, /, *sample: Tree) -> Any:
        value = measure(params, buffers, *sample)
        return value, value

    project = per_sample_projection(with_value, dim, seed=seed, has_aux=True, **options)
    query, _ = project(params, buffers, *queries)
    features, margins = zip(
        *(project(params, buffers, *batch) for batch in _read("trak", batches)),
        strict=True,
    )
    phi = double(torch.cat(features))
    kernel = phi.mT @ phi
    kernel.diagonal().add_(ridge)
    scores = double(query) @ torch.linalg.solve(kernel, phi.mT)
    return (scores * torch.cat(margins).neg().sigmoid()).to(query.dtype)


def margin(fmodel: FunctionalModel) -> LossFn:
    """Log odds of the target, `log p - log(1 - p)`: a measurement of a sample.

    The model's outputs are logits [B, C], and the last item of a sample is its class.

    Reference: Park et al., arXiv 2303.14186.

    Example:
        >>> import torch, vgrad
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> fmodel, _, buffers = vgrad.make_functional_with_buffers(model)
        >>> measure = margin(fmodel)
        >>> measure({"weight": torch.eye(2)}, buffers, torch.ones(2), torch.tensor(1))
        tensor(0.)
    """
    check_model("margin", fmodel)
    return sample_loss(fmodel, _margin)


def _margin(output: Tensor, target: Tensor) -> Tensor:
    if output.ndim != 2 or output.shape[1] < 2:
        raise ValueError(
            f"margin(fmodel): expected logits [B, C] of two classes at least, got "
            f"shape {tuple(output.shape)}."
        )
    place = target.unsqueeze(1)
    others = output.scatter(1, place, -torch.inf).logsumexp(1)
    return output.gather(1, place).squeeze(1) - others


def _query_gradients(
    loss: LossFn,
    params: Params,
    buffers: Buffers,
    queries: tuple[Tree, ...],
    measurement: LossFn | None,
    options: Options,
) -> Params:
    """Return the gradients of losses, or of measurements with a minus, [Q, *shape]."""
    [batch] = _read("influence", [queries])
    if measurement is None:
        return per_sample_grad(loss, **options)(params, buffers, *batch)
    grads = per_sample_grad(measurement, **options)(params, buffers, *batch)
    return {name: -each for name, each in grads.items()}


@dataclass
class _Products(Collector):
    """Adds up inner products with queries, [B, Q] in float64 for each group."""

    queries: Mapping[str, Sequence[Factor]]
    owner: dict[str, str]
    values: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, factor: Factor) -> None:
        if name not in self.owner:
            return
        group, others = self.owner[name], self.queries[name]
        if far({name: [factor, *others]}):
            factor, others = factor.double(), [each.double() for each in others]
        found = torch.cat([factor.gram(each) for each in others], 1)
        self.values[group] = self.values.get(group, 0.0) + double(found).real


@dataclass(frozen=True)
class _Scores(Quantity):
    queries: Mapping[str, Sequence[Factor]]
    groups: dict[str, list[str]]

    def collector(self, call: Call) -> _Products:
        owner = {name: group for group, some in self.groups.items() for name in some}
        return _Products(self.queries, owner)

    def partial(self, collector: _Products, call: Call) -> dict[str, Tensor]:
        return {n: each.to(call.dtype) for n, each in collector.values.items()}

    def total(self, partials: Iterator[Any], run: Evaluation) -> dict[str, Tensor]:
        chunks = list(partials)
        count = sum(each.size for each in next(iter(self.queries.values())))
        empty = torch.zeros(0, count, dtype=run.dtype, device=run.call.device)
        return {
            group: joined(empty, [chunk[group] for chunk in chunks])
            for group in self.groups
        }


def _read(function: str, batches: Iterable[Any]) -> Iterator[tuple[Tree, ...]]:
    empty = True
    for batch in batches:
        empty = False
        if not isinstance(batch, tuple | list):
            raise TypeError(
                f"{function}(batches): expected tuples of a sample's items, such as "
                f"[(x, y)], got a {type(batch).__name__}."
            )
        yield tuple(batch)
    if empty:
        raise ValueError(
            f"{function}(batches): expected a batch at least, got none. Pass a list of "
            f"batches, since an iterator is used up after its first use."
        )
