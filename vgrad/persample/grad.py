"""The gradient of every sample, its norm, and weighted sums of gradients."""

from dataclasses import dataclass
from functools import cached_property
from operator import methodcaller
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from vgrad.conditions import occurs
from vgrad.factors import Dense, Factor, Norm, Sums
from vgrad.factors.base import Norms as FactorNorms
from vgrad.factors.norms import LIMIT, Joint, computed, gathered, recomputed
from vgrad.persample.engine import (
    Call,
    Collector,
    Grouping,
    Groups,
    Holding,
    Inputs,
    Join,
    Joined,
    Mapped,
    Options,
    Quantity,
    Summed,
    Transform,
    check_groups,
    masked,
    members,
    shows_options,
)
from vgrad.tree import wide
from vgrad.typing import Buffers, LossFn, Params, Result, Tree


@overload
def per_sample_grad(
    loss: LossFn, *, has_aux: Literal[False] = False, **options: Unpack[Options]
) -> Transform[Params]: ...
@overload
def per_sample_grad(
    loss: LossFn, *, has_aux: Literal[True], **options: Unpack[Options]
) -> Transform[tuple[Params, Tree]]: ...
@shows_options
def per_sample_grad(
    loss: LossFn, *, has_aux: bool = False, **options: Unpack[Options]
) -> Transform[Any]:
    """Gradient of every sample: `(params, buffers, *batch) -> {name: [B, *shape]}`.

    The dtype is the parameters' own. It stores B gradients: for a norm or a sum use
    the transform that computes it. The options are in `vgrad.persample.Options`.

    Raises:
        TypeError: the loss is no function, a model, or one of a whole batch.
        ValueError: an option or the batch is not as `vgrad.persample` says.
        UnsupportedOp: the strategy cannot run an op of the loss.

    Example:
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum() ** 2
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> per_sample_grad(loss)({"w": torch.ones(2)}, {}, x)
        {'w': tensor([[ 2.,  0.],
                [ 6., 12.]])}
    """
    call = Call.of(per_sample_grad, loss, options, has_aux)
    return Transform(call, Gradients())


class Gradients(Quantity):
    """The gradients themselves."""

    def collector(self, call: Call) -> Mapped:
        return Mapped(methodcaller("grad"))

    def partial(self, collector: Mapped, call: Call) -> dict[str, Params]:
        return {"values": collector.values}

    def total(self, parts: Joined) -> Params:
        params, scaled = parts.call.params, parts.call.loss_scale is not None
        grads = parts.values["values"]
        grads = grads or {n: x.new_zeros(0, *x.shape) for n, x in params.items()}
        for name, value in params.items():
            grad = grads.pop(name)
            # An unscaled gradient might underflow in the parameter's dtype.
            grad = grad.to(wide(value.dtype) if scaled else value.dtype)
            if 0 in grad.stride():  # of vmap
                grad = grad.clone(memory_format=torch.contiguous_format)
            grads[name] = grad
        return grads

    def selected(self, value: Params, rows: Any, inputs: Inputs | Call) -> Params:
        # Each copy takes the place of its original.
        return {name: value.pop(name)[rows] for name in [*value]}


@overload
def per_sample_norm(
    loss: LossFn,
    *,
    groups: None = None,
    has_aux: Literal[False] = False,
    **options: Unpack[Options],
) -> Transform[Tensor]: ...
@overload
def per_sample_norm(
    loss: LossFn,
    *,
    groups: None = None,
    has_aux: Literal[True],
    **options: Unpack[Options],
) -> Transform[tuple[Tensor, Tree]]: ...
@overload
def per_sample_norm(
    loss: LossFn,
    *,
    groups: Grouping,
    has_aux: Literal[False] = False,
    **options: Unpack[Options],
) -> Transform[dict[str, Tensor]]: ...
@overload
def per_sample_norm(
    loss: LossFn,
    *,
    groups: Grouping,
    has_aux: Literal[True],
    **options: Unpack[Options],
) -> Transform[tuple[dict[str, Tensor], Tree]]: ...
@shows_options
def per_sample_norm(
    loss: LossFn,
    *,
    groups: Groups = None,
    has_aux: bool = False,
    **options: Unpack[Options],
) -> Transform[Any]:
    """L2 norm of every sample's gradient: `(params, buffers, *batch) -> [B]`.

    The norm is over all parameters, `sqrt(sum_p |dL_b/dp|^2)`, in float32 or wider.
    Squares of small numbers are not lost on the way, and a norm beyond 1e18 may be
    infinite. With `groups` the result is `{group: [B]}`: `"parameter"` for
    one group a parameter, `"layer"` for one a module, or a dictionary from a group's
    name to a list of patterns of its parameters' names (`vgrad.checks`). The other
    options are in `vgrad.persample.Options`.

    Raises:
        TypeError: the patterns of a group are no list or tuple.
        ValueError: a pattern of `groups` matches nothing, or two match one parameter.

    Example:
        >>> import torch
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> per_sample_norm(loss)({"w": torch.ones(2)}, {}, x)
        tensor([5., 0.])
    """
    check_groups("per_sample_norm", groups)
    call = Call.of(per_sample_norm, loss, options, has_aux)
    return Transform(call, Norms(groups))


class _NormCollector(Holding):
    """Computes the norms of all parameters, and cancelled ones again."""

    def __init__(self, call: Call, groups: Groups) -> None:
        super().__init__(call.device)
        self._grouping = call.function, groups, call.params
        self.norms: dict[str, list[Norm]] = {}

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """The names in each group, after a pass, whose errors are the loss's."""
        return members(*self._grouping)

    def add(self, name: str, factor: Factor) -> None:
        self.hold(name, factor.with_norms()[1], factor.bytes)

    def settle(self, pending: dict[str, FactorNorms]) -> None:
        firsts = {name: parts[0] for name, parts in pending.items() if len(parts) == 1}
        small = {n: first for n, first in firsts.items() if isinstance(first, Dense)}
        gathered(small, pending, self.groups.values())
        norms = computed(pending)
        columns = [norm.cancellation for parts in norms.values() for norm in parts]
        known = [column for column in columns if column is not None]
        if known and occurs(~(torch.stack(known) <= LIMIT)):
            norms = recomputed(norms)
        self.norms |= norms


@dataclass(frozen=True)
class Norms(Quantity):
    """The norms in groups, {group: [B]}, or [B] without groups."""

    groups: Groups

    def collector(self, call: Call) -> _NormCollector:
        return _NormCollector(call, self.groups)

    def check(self, call: Call) -> None:
        members(call.function, self.groups, call.params)

    def partial(self, collector: _NormCollector, call: Call) -> dict[str, Params]:
        collector.flush()
        grouped = collector.groups
        norms = Joint(collector.norms, grouped.values(), call.dtype).value
        copies = [norm.to(call.dtype, copy=True) for norm in norms]
        return {"values": dict(zip(grouped, copies, strict=True))}

    def total(self, parts: Joined) -> Any:
        if (norms := parts.values["values"]) is None:
            groups = members(parts.call.function, self.groups, parts.call.params)
            norms = dict.fromkeys(groups, parts.losses)
        return norms[""] if self.groups is None else norms


class WeightedGradFn(Transform[Result]):
    """The function of `weighted_grad`: `(weights, params, buffers, *batch)`."""

    def __call__(
        self,
        weights: Tensor,
        params: Params,
        buffers: Buffers,
        /,
        *batch: Tree,
        mask: Tensor | None = None,
    ) -> Result:
        """Sum the gradients of this batch with weights `[B]`.

        Args:
            mask: which samples count, bool `[B]`; the others add nothing.
        """
        return self.on(params, buffers, batch, mask, weights)


@overload
def weighted_grad(
    loss: LossFn, *, has_aux: Literal[False] = False, **options: Unpack[Options]
) -> WeightedGradFn[Params]: ...
@overload
def weighted_grad(
    loss: LossFn, *, has_aux: Literal[True], **options: Unpack[Options]
) -> WeightedGradFn[tuple[Params, Tree]]: ...
@shows_options
def weighted_grad(
    loss: LossFn, *, has_aux: bool = False, **options: Unpack[Options]
) -> WeightedGradFn[Any]:
    """Weighted sum: `(weights [B], params, buffers, *batch) -> {name: shape}`.

    The sum of gradients, `sum_b weights_b dL_b/dp`, in float32 or wider. As in plain
    arithmetic, a sample whose gradient is not finite spoils the sum even with weight
    zero, and so may one whose inputs or gradients times the weight leave the range of
    float32. The options are in `vgrad.persample.Options`.

    Raises:
        ValueError: `weights` is not `[B]`.

    Example:
        >>> import torch
        >>> loss = lambda params, buffers, x: (params["w"] * x).sum()
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> weights = torch.tensor([1.0, 0.5])
        >>> weighted_grad(loss)(weights, {"w": torch.ones(2)}, {}, x)
        {'w': tensor([1.5000, 1.0000])}
    """
    call = Call.of(weighted_grad, loss, options, has_aux)
    return WeightedGradFn(call, WeightedSum())


class _Weighted(Collector):
    """Sums with weights `[B]` that are known beforehand."""

    def __init__(self, call: Call) -> None:
        self.sums: Params = {}
        self._reducer, self._mask = call.reducer, call.mask
        self._weights: Any = call.weights
        if self._mask is not None:
            self._weights = torch.where(self._mask, self._weights, 0)

    def add(self, name: str, factor: Factor) -> None:
        if self._mask is not None:
            factor = masked(factor, self._mask)
        value = factor.weighted(self._weights)
        self.sums[name] = self._reducer.summed(name, value)


class WeightedSum(Quantity):
    """The sum of gradients with the weights of a call."""

    def joins(self) -> dict[str, Join]:
        return {"sums": Summed()}

    def check(self, call: Call) -> None:
        check_weights(call.weights, call.batch.size)

    def collector(self, call: Call) -> _Weighted:
        return _Weighted(call)

    def partial(self, collector: _Weighted, call: Call) -> dict[str, Params]:
        return {"sums": collector.sums}

    def total(self, parts: Joined) -> Params:
        return Sums(parts.values["sums"]).rounded(parts.call.params)

    def mapped(self, function: Any, value: Params) -> Params:
        return value


def check_weights(weights: Any, size: int) -> None:
    """Refuse anything but one real number for each sample."""
    real = isinstance(weights, Tensor) and not weights.is_complex()
    if not real or weights.shape != (size,):
        got = tuple(weights.shape) if real else type(weights).__name__
        raise ValueError(
            f"weighted_grad(loss)(weights, ...): expected one real weight a sample, a "
            f"tensor of shape ({size},), got {got}."
        )
