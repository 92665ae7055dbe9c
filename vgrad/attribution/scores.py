"""Scores of training samples for queries, from inner products of gradients.

B samples of a batch, N of all batches, Q queries, T positions of one sample.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor

from vgrad import batches as _batches
from vgrad import checks
from vgrad.attribution.store import OfFeatures, Store, in_order
from vgrad.curvature import Full, Kronecker
from vgrad.factors import Dense, Factor, Outer, Rows
from vgrad.factors.reductions import norm_dtype
from vgrad.functional.losses import check_model, sample_loss
from vgrad.functional.model import FunctionalModel
from vgrad.persample import per_sample_grad, per_sample_norm, per_sample_projection
from vgrad.persample.engine import (
    Call,
    Collector,
    Groups,
    Join,
    Joined,
    Listed,
    Mapped,
    Options,
    Quantity,
    Transform,
    check_groups,
    constants,
    members,
    shows_options,
)
from vgrad.persample.moments import InnerProducts
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


@shows_options
@constants
def influence(
    loss: LossFn,
    params: Params,
    buffers: Buffers,
    queries: tuple[Tree, ...],
    batches: Batches | Store,
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
    training sample, and a curvature matrix H that is a mean over samples. It is, to
    first order and up to 1 / N, how much a query's loss rises when the training sample
    is left out of a mean loss with a decay of `damping / 2 |params|^2`. Scores are
    float32 or wider.

    Over checkpoints, `sum(rate * influence(loss, each, ...) for each, rate in ...)` is
    TracIn. `vgrad.freeze` leaves layers out.

    Cost: the gradients of the queries, which are solved for once, and a recorded pass
    of each training batch, whose factors are multiplied with them as they come, by up
    to `2 Q P` operations a sample. No gradient is stored, and 4 million numbers of one
    layer's are formed at once. The options are in `vgrad.persample.Options`.

    Args:
        queries: one batch, such as `(x, y)`.
        batches: training samples in the order of the columns, gone through once; or a
            `Store`, whose features stand for their gradients, and no pass of them runs.
            Its curvature is of `Store.curvature` or `Store.empirical_fisher`.
        curvature: a matrix of `vgrad.curvature` (`kfac`, `ekfac`, `full`, `iterative`),
            or any object with its `solve`; None for the identity, inner products of
            gradients.
        measurement: a function of a query that has the form of a loss, such as
            `margin`, in the place of its loss; larger is better. With the loss as a
            measurement all signs change, and `top` has the most harmful samples.
        groups: as for `vgrad.per_sample_norm`, {group: scores}, which add up to the
            whole.
        top: keep the `top` largest scores of each query alone, as a `Top`; [Q, N] is
            never formed.
        rank: approximate the queries' matrix of each layer, after the solve, by the
            nearest one of this rank, which takes less memory, and less time for layers
            with few positions.
        per_position: split scores over the T positions of a sample that a layer is
            applied to, [Q, N, T]. Weights of linear layers and embeddings alone have
            positions: select them by `groups`, or by `vgrad.freeze`. A weight that is
            used twice has the positions of both uses, one after the other.

    Raises:
        ValueError: no batch; a loader that shuffles; two options do not go together;
            `per_position`, and a parameter without positions, or with another number of
            them; a store of another loss or model.

    Reference: Koh and Liang, arXiv 1703.04730; Grosse et al., arXiv 2308.03296; Pruthi
    et al., TracIn, arXiv 2002.08484.

    Example:
        >>> import torch
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> params, x = {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [1.0, 0.0]])
        >>> influence(loss, params, {}, (x[:1],), [(x,)])
        tensor([[25.,  3.]])
        >>> influence(loss, params, {}, (x[:1],), [(x,)], top=1).indices
        tensor([[0]])
    """
    if top is not None:
        [top] = checks.integers("influence", minimum=1, top=top)
    if rank is not None:
        [rank] = checks.integers("influence", minimum=1, rank=rank)
    if per_position and (top is not None or rank is not None):
        raise ValueError(
            "influence(per_position=True): expected neither top nor rank. Take the "
            "largest of the scores by torch.topk."
        )
    check_groups("influence", groups)
    names = members("influence", groups, params)
    [batch] = _batches.each("influence", [queries])
    sign, of_query = (1, loss) if measurement is None else (-1, measurement)
    of_call = Call.of(influence, of_query, options), Call.of(influence, loss, options)
    arguments = params, buffers, *batch
    grads: Any
    store = batches if isinstance(batches, Store) else None
    _check("influence", curvature, damping, store)
    if isinstance(batches, Store):
        if groups is not None or rank is not None or per_position:
            raise ValueError(
                "influence(store): expected neither groups nor rank nor per_position. "
                "Pass the batches themselves."
            )
        batches.check(loss, params, buffers)
        grads = batches.project(of_query, *arguments, **options)
        grads = _solved(curvature, grads, damping)
        parts = (_dot(features, grads) for features in batches)
    else:
        if curvature is None and rank is None and not per_position:
            factors: Any = Transform(of_call[0], _Queries())(*arguments)
        else:
            grads = per_sample_grad(of_query, **options)(*arguments)
            grads = _solved(curvature, grads, damping)
            factors = {n: [_of_rank(grads[n], rank, params[n])] for n in grads}
        compute: Any = Transform(of_call[1], _Scores(factors, names, per_position))
        read = in_order("influence", batches)
        parts = (compute(params, buffers, *batch) for batch in read)
    results: dict[str, list[Any]] = {group: [] for group in names}
    start = 0
    for part in parts:
        for group, scores in part.items():
            scores = sign * scores.movedim(0, 1)
            if top is None:
                results[group].append(scores)
            else:
                results[group] = [_largest(results[group], scores, start, top)]
        start += scores.shape[1]
    joint = {n: torch.cat(x, 1) if top is None else x[0] for n, x in results.items()}
    return joint[""] if groups is None else joint


def _dot(features: Params, others: Params) -> Params:
    """Inner products of features with features of queries, [n, Q]."""
    products = []
    for name, rows in features.items():
        products.append(double(rows) @ double(others[name].to(rows.device)).mT)
    return {"": torch.stack(products).sum(0).to(norm_dtype(features))}


@shows_options
@constants
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

    Cost: for a matrix of `kfac` or `ekfac` the gradients of one layer at a time,
    rotated; without a curvature norms; else all gradients of a chunk.

    Example:
        >>> import torch
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> x = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
        >>> self_influence(loss, {"w": torch.ones(2)}, {}, [(x,)])
        tensor([25.,  1.])
    """
    read = in_order("self_influence", batches)
    _check("self_influence", curvature, damping)
    if curvature is None:
        norms = per_sample_norm(loss, **options)
        return torch.cat([norms(params, buffers, *batch).square() for batch in read])
    if isinstance(curvature, Kronecker) and not isinstance(curvature, Full):
        curvature.check("self_influence(curvature)", params)
        weights = curvature.inverse("self_influence", damping)
        call = Call.of(self_influence, loss, options)
        squares = Transform(call, InnerProducts(*curvature.bases, weights))
        parts = [squares(params, buffers, *batch)[:, 0, 0] for batch in read]
        return torch.cat(parts).to(norm_dtype(params))
    gradients, parts = per_sample_grad(loss, **options), []
    for batch in read:
        grads = gradients(params, buffers, *batch)
        solved = _solved(curvature, grads, damping)
        pairs = ((double(grad), double(solved[name])) for name, grad in grads.items())
        products = ((one * other).reshape(len(one), -1) for one, other in pairs)
        parts.append(torch.cat([*products], 1).sum(1))
    return torch.cat(parts).to(norm_dtype(params))


@shows_options
@constants
def trak(
    fmodel: FunctionalModel,
    params: Params | Sequence[Params],
    buffers: Buffers | Sequence[Buffers],
    queries: tuple[Tree, ...],
    batches: Batches,
    *,
    dim: int,
    seed: int,
    ridge: float,
    **options: Unpack[Options],
) -> Tensor:
    """Scores of TRAK for a classifier: [Q, N], positive is helpful.

    `phi_q (Phi^T Phi + ridge I)^-1 phi_n (1 - p_n)`, with phi the random projections
    [dim] of `margin`'s gradient, by `vgrad.per_sample_projection`, and p the
    probability of a sample's target; the sum `Phi^T Phi` is over all N samples. Of M
    checkpoints, the factor before `1 - p` and `1 - p` are averages over them. Batches
    are `(*inputs, target)`. The options are in `vgrad.persample.Options`.

    Cost: one recorded pass of each batch and checkpoint, and `N dim` numbers.

    Args:
        params: of one model, or a list of the dictionaries of several, each trained on
            its own part of the samples, or from its own start.
        buffers: the same; one dictionary may be for all.
        batches: a list for several checkpoints, each of which goes through it.

    Raises:
        ValueError: `Phi^T Phi + ridge I` is singular.

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

    [dim] = checks.integers("trak", minimum=1, dim=dim)
    project = per_sample_projection(with_value, dim, seed=seed, has_aux=True, **options)
    checkpoints = [params] if isinstance(params, Mapping) else [*params]
    states = [buffers] * len(checkpoints) if isinstance(buffers, Mapping) else buffers
    if not checkpoints or len(states) != len(checkpoints):
        raise ValueError(
            f"trak(params, buffers): expected as many dictionaries of buffers as of "
            f"parameters, got {len(states)} and {len(checkpoints)}."
        )
    [query] = _batches.each("trak", [queries])
    scores: Any = 0.0
    weights: Any = 0.0
    first: Any = None  # the targets of a pass
    for checkpoint, state in zip(checkpoints, states, strict=True):
        read = in_order("trak", batches)
        parts = [(*project(checkpoint, state, *x), x[-1]) for x in read]
        phi, margins, targets = map(torch.cat, zip(*parts, strict=True))
        first = targets if first is None else first
        if not checks.same_values(first, targets):
            raise ValueError(
                "trak(batches): expected the same samples in each pass, one for each "
                "checkpoint, got others. Pass a list."
            )
        phi = double(phi)
        if not bool((finite := phi.isfinite().all(1)).all()):
            raise ValueError(
                f"trak(batches): expected finite gradients of margins, got others of "
                f"sample {int(finite.int().argmin())}. Leave it out."
            )
        kernel = phi.mT @ phi
        kernel.diagonal().add_(ridge)
        phi_q = double(project(checkpoint, state, *query)[0])
        scores = scores + phi_q @ torch.cholesky_solve(phi.mT, _root(kernel))
        weights = weights + double(margins).neg().sigmoid()
    result = scores * weights / len(checkpoints) ** 2
    return result.to(parts[0][0].dtype)


def _root(kernel: Tensor) -> Tensor:
    """Return the lower root of a matrix; refuse one that is singular by rounding."""
    root, failed = torch.linalg.cholesky_ex(kernel)
    smallest, largest = root.diagonal().square().aminmax()
    if failed or smallest <= len(kernel) * torch.finfo(kernel.dtype).eps * largest:
        raise ValueError(
            "trak(ridge): expected a larger number, since the kernel of the features "
            "is singular, as it is for fewer samples than dim."
        )
    return root


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
    try:
        logit = output.gather(1, place).squeeze(1)
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        raise ValueError(
            f"margin(fmodel): expected a class from 0 to {output.shape[1] - 1} as the "
            f"last item of a sample, got another: {error}."
        ) from error
    return logit - output.scatter(1, place, -torch.inf).logsumexp(1)


def _check(
    function: str, curvature: Any, damping: float, store: Store | None = None
) -> None:
    """Refuse damping of nothing, and a matrix of other vectors: sizes may agree."""
    if curvature is None and damping:
        raise ValueError(
            f"{function}(damping={damping}): expected a curvature beside it, got none."
        )
    binding = curvature.store if isinstance(curvature, OfFeatures) else None
    solves = binding == (store and store.binding) and hasattr(curvature, "solve")
    if curvature is not None and not solves:
        raise ValueError(
            f"{function}(curvature): expected a matrix of the parameters for batches, "
            f"as vgrad.curvature.ekfac(ggn, params, buffers, batches) makes it, and "
            f"for a store one of its Store.curvature or Store.empirical_fisher, got a "
            f"{type(curvature).__name__} of "
            f"{'the parameters' if binding is None else 'another store'}."
        )


def _solved(curvature: Inverse | None, vectors: Params, damping: float) -> Params:
    if curvature is None:
        return vectors
    solved = curvature.solve(vectors, damping=damping)
    checks.names("influence(curvature).solve", vectors, solved)
    checks.shapes("influence(curvature).solve", vectors, solved)
    return solved


def _of_rank(vectors: Tensor, rank: int | None, param: Tensor) -> Factor:
    """Return vectors [Q, *shape], or the nearest matrices of a rank as two sides."""
    shape, dtype = param.shape, wide(param.dtype)
    if rank is None or param.ndim < 2 or rank >= min(shape[0], shape[1:].numel()):
        return Dense(vectors.to(dtype))
    left, values, right = torch.linalg.svd(double(vectors).flatten(2), False)
    outputs = (left * values.unsqueeze(1))[..., :rank].mT
    inputs, outputs = (x.unsqueeze(1).to(dtype) for x in (right[:, :rank], outputs))
    return Outer(inputs, outputs, shape)


def _largest(best: list[Top], scores: Tensor, start: int, count: int) -> Top:
    """Merge the largest scores so far, if any, with one more batch's, [Q, b]."""
    indices = torch.arange(start, start + scores.shape[1], device=scores.device)
    scores = torch.cat([*(entry.values for entry in best), scores], 1)
    indices = indices.expand(len(scores), -1)
    indices = torch.cat([*(entry.indices for entry in best), indices], 1)
    values, places = scores.topk(min(count, scores.shape[1]), 1)
    return Top(values, indices.gather(1, places))


@dataclass(frozen=True)
class _Queries(Quantity):
    """The factors of queries, or their gradients where products with these are less."""

    chunked = False

    def joins(self) -> dict[str, Join]:
        return {"factors": Listed()}

    def collector(self, call: Call) -> Mapped:
        return Mapped(_compact)

    def partial(self, collector: Mapped, call: Call) -> dict[str, Any]:
        return {"factors": [collector.values]}

    def total(self, parts: Joined) -> dict[str, Any]:
        order, places = parts.order, torch.arange(parts.call.batch.size)
        chunks = parts.values["factors"]
        factors = {n: [chunk[n] for chunk in chunks] for n in parts.call.params}
        if torch.equal(order(places), places):
            return factors
        grads = {n: torch.cat([x.grad() for x in rows]) for n, rows in factors.items()}
        return {name: [Dense(order(grad))] for name, grad in grads.items()}

    def selected(self, value: Any, rows: Any, inputs: Any) -> Any:
        return value


def _compact(factor: Factor) -> Factor:
    match factor:
        case Outer() if factor.crosses(factor):
            return factor
        case Rows() if factor.index.shape[1] < factor.shape[0] // 4:
            return factor
    return Dense(factor.grad())


@dataclass
class _Products(Collector):
    """Adds up inner products with queries, [B, Q] or [B, Q, T] in float64."""

    queries: Mapping[str, Sequence[Factor]]
    owner: dict[str, str]
    per_position: bool
    values: dict[str, Tensor] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)  # their numbers of positions

    def add(self, name: str, factor: Factor) -> None:
        if name not in self.owner:
            return
        group, others = self.owner[name], self.queries[name]
        if self.per_position:
            [products] = [factor.by_position(other.grad()) for other in others]
        else:
            products = torch.cat([factor.gram(other) for other in others], 1)
        total = self.values.get(group)
        if products is None or (total is not None and total.shape != products.shape):
            self.refused[name] = 0 if products is None else products.shape[2]
        else:
            products = double(products).real
            self.values[group] = products if total is None else total + products


@dataclass(frozen=True)
class _Scores(Quantity):
    queries: Mapping[str, Sequence[Factor]]
    groups: dict[str, list[str]]
    per_position: bool

    def collector(self, call: Call) -> _Products:
        owner = {name: group for group, names in self.groups.items() for name in names}
        return _Products(self.queries, owner, self.per_position)

    def partial(self, collector: _Products, call: Call) -> dict[str, Any]:
        for name, positions in collector.refused.items():
            raise ValueError(
                f"influence(per_position=True): expected parameters of recorded linear "
                f"layers or embeddings, used at as many positions as the others of "
                f"their group, got {name!r}, with {positions or 'none'}. Leave it out, "
                f"by groups={{'': ['*.weight']}} or vgrad.freeze."
            )
        products = collector.values.items()
        return {"values": {n: product.to(call.dtype) for n, product in products}}

    def total(self, parts: Joined) -> dict[str, Tensor]:
        count = sum(factor.size for factor in next(iter(self.queries.values())))
        empty = parts.losses.new_zeros(0, count)
        return parts.values["values"] or dict.fromkeys(self.groups, empty)
