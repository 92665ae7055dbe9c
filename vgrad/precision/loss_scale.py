"""Loss scales: keep gradients of low precision within the range of their dtype.

A loss is multiplied by a scale before its backward pass and gradients are divided by it
afterwards, so that small ones do not become zero on the way. Everything is a tensor
operation that reads no value: it runs under `torch.vmap`, with one scale for each
member of an ensemble, and makes no device wait.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from vgrad import checks
from vgrad.precision.skipping import check_predicate, is_floating
from vgrad.tree import GetAttrKey, register_pytree_node, tree_map, widened
from vgrad.typing import Tree


class LossScale(Protocol):
    """What a step needs of a loss scale; all three kinds below have it."""

    @property
    def loss_scale(self) -> Tensor | float:
        """The number that a loss is multiplied by."""
        ...

    def scale(self, tree: Tree) -> Tree:
        """Multiply floating tensors by the scale."""
        ...

    def unscale(self, tree: Tree) -> Tree:
        """Divide floating tensors by the scale."""
        ...

    def adjust(self, finite: Tensor) -> "LossScale":
        """Return the scale of the next step."""
        ...


@dataclass(frozen=True, eq=False)
class NoOpLossScale:
    """No scaling: trees come back as they are.

    Example:
        >>> NoOpLossScale().loss_scale
        1.0
    """

    @property
    def loss_scale(self) -> float:
        """One."""
        return 1.0

    def scale(self, tree: Tree) -> Tree:
        """Return the tree."""
        return tree

    def unscale(self, tree: Tree) -> Tree:
        """Return the tree."""
        return tree

    def adjust(self, finite: Tensor) -> "NoOpLossScale":
        """Return the same."""
        return self


class _Scaling:
    """How a scale that is a tensor is applied, float32 or wider."""

    loss_scale: Any

    def scale(self, tree: Tree) -> Tree:
        """Multiply floating tensors by the scale."""
        return self._applied(torch.mul, tree)

    def unscale(self, tree: Tree) -> Tree:
        """Divide floating tensors by the scale."""
        return self._applied(torch.div, tree)

    def _applied(self, operation: Callable[..., Tensor], tree: Tree) -> Tree:
        scale = _single(self.loss_scale)

        def apply(leaf: Any) -> Any:
            if not is_floating(leaf):
                return leaf
            return operation(widened(leaf), scale.to(leaf.device))

        return tree_map(apply, tree)


@dataclass(frozen=True, eq=False)
class StaticLossScale(_Scaling):
    """A scale that stays.

    `loss_scale` is kept as a float32 tensor. `scale` and `unscale` work in
    `promote_types(dtype, float32)`, which is the dtype of what they return, and touch
    floating tensors only.

    Raises:
        ValueError: not a number above zero within float32; a tensor passes unseen. Or a
            scale for each member of an ensemble, used outside of `torch.vmap`.

    Example:
        >>> scale = StaticLossScale(2.0**8)
        >>> scaled = scale.scale(torch.tensor(0.5, dtype=torch.float16))
        >>> scaled, scale.unscale(scaled)
        (tensor(128.), tensor(0.5000))
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        """Keep a tensor."""
        if not isinstance(self.loss_scale, Tensor):
            _check("StaticLossScale", loss_scale=self.loss_scale)
        object.__setattr__(self, "loss_scale", _number(self.loss_scale))

    def adjust(self, finite: Tensor) -> "StaticLossScale":
        """Return the same."""
        return self


@dataclass(frozen=True, eq=False)
class DynamicLossScale(_Scaling):
    """A scale that shrinks after a step that was not finite, and grows after many.

    `adjust(finite)` returns the next one: on the `period`-th finite step in a row
    `loss_scale * factor`, at most `max`; after any other finite step the same; after
    one that was not finite `loss_scale / factor`, at least `min`. Both moves start the
    count anew. Scale and count are tensors, float32 and int64, on the device of
    `finite`; the rest is fixed.

    Under `torch.vmap` all of it works for scales and `finite` of shape `[E]`: a member
    backs off alone. The history of a scale depends on the data it saw; in private
    training that is released with the model unless the scale is static.

    Args:
        init: the first scale, within `min` and `max`; a tensor passes unseen.
        period: finite steps after which the scale grows.
        factor: what it grows and shrinks by.

    Raises:
        ValueError: a number that is not above zero or outside of float32, a factor of
            one or less, a period below one, or `init` outside of `min` and `max`. Or a
            scale for each member of an ensemble, used outside of `torch.vmap`.
        TypeError: `finite` is no bool tensor without dimensions.

    Reference: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.

    Example:
        >>> scale = DynamicLossScale(2.0**15, period=2)
        >>> scale.adjust(torch.tensor(False)).loss_scale
        tensor(16384.)
        >>> finite = torch.tensor(True)
        >>> scale.adjust(finite).adjust(finite).loss_scale
        tensor(65536.)
    """

    init: InitVar[Any] = 2.0**15
    _: KW_ONLY
    period: int = 2000
    factor: float = 2.0
    min: float = 2.0**-14
    max: float = 2.0**24
    loss_scale: Tensor = field(init=False)
    counter: Tensor = field(init=False)

    def __post_init__(self, init: Tensor | float) -> None:
        """Start at `init`, with no finite step counted."""
        numbers = {"factor": self.factor, "min": self.min, "max": self.max}
        given = isinstance(init, Tensor)
        _check("DynamicLossScale", **numbers, **({} if given else {"init": init}))
        [period] = checks.whole("DynamicLossScale", least=1, period=self.period)
        object.__setattr__(self, "period", period)
        if self.factor <= 1:
            raise ValueError(
                f"DynamicLossScale(factor={self.factor!r}): expected factor > 1."
            )
        if self.min > self.max or not (given or self.min <= init <= self.max):
            raise ValueError(
                f"DynamicLossScale(init={init!r}, min={self.min!r}, "
                f"max={self.max!r}): expected min <= init <= max."
            )
        scale = _number(init)
        object.__setattr__(self, "loss_scale", scale)
        counter = torch.zeros_like(scale, dtype=torch.int64)
        object.__setattr__(self, "counter", counter)

    def adjust(self, finite: Tensor) -> "DynamicLossScale":
        """Return the scale after a step whose gradients were all finite, or not."""
        check_predicate("DynamicLossScale.adjust(finite)", finite)
        now = _single(self.loss_scale).to(finite.device)
        counter = self.counter.to(finite.device)
        full = counter == self.period - 1
        grown = (now * self.factor).clamp(max=self.max)
        shrunk = (now / self.factor).clamp(min=self.min)
        scale = torch.where(finite, torch.where(full, grown, now), shrunk)
        counter = torch.where(finite & ~full, counter + 1, 0)
        return _rebuilt(DynamicLossScale, self.__dict__, (scale, counter))


def _number(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32).detach()


def _single(scale: Tensor) -> Tensor:
    """Refuse the scales of an ensemble, which would pass for those of the last axis."""
    if scale.ndim:
        raise ValueError(
            f"loss_scale: expected a scale without dimensions, got shape "
            f"{tuple(scale.shape)}. For one scale per member use torch.vmap."
        )
    return scale


def _check(function: str, **values: Any) -> None:
    checks.positive(function, **values)
    limits = torch.finfo(torch.float32)
    for name, value in values.items():
        if not limits.tiny <= value <= limits.max:
            raise ValueError(
                f"{function}({name}={value!r}): expected a number within float32, "
                f"{limits.tiny:.1e} to {limits.max:.1e}."
            )


def _rebuilt(kind: Any, fixed: Mapping[str, Any], leaves: Iterable[Any]) -> Any:
    """Make a scale of other leaves, which a tree_map may have made anything."""
    scale = object.__new__(kind)
    scale.__dict__.update({**fixed, **dict(zip(_LEAVES[kind], leaves, strict=True))})
    return scale


_LEAVES: dict[type, tuple[str, ...]] = {
    NoOpLossScale: (),
    StaticLossScale: ("loss_scale",),
    DynamicLossScale: ("loss_scale", "counter"),
}
"""What changes, or differs from member to member; the rest is the tree's structure."""


def _register(kind: type) -> None:
    names = _LEAVES[kind]

    def with_keys(scale: Any) -> tuple[list[Any], dict[str, Any]]:
        fixed = {k: v for k, v in scale.__dict__.items() if k not in names}
        return [(GetAttrKey(name), getattr(scale, name)) for name in names], fixed

    def flatten(scale: Any) -> tuple[list[Any], dict[str, Any]]:
        keyed, fixed = with_keys(scale)
        return [leaf for _, leaf in keyed], fixed

    def unflatten(leaves: Iterable[Any], fixed: dict[str, Any]) -> Any:
        return _rebuilt(kind, fixed, leaves)

    register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=with_keys)


for _kind in _LEAVES:
    _register(_kind)
