"""Loss scales: keep gradients of low precision within the range of their dtype.

A loss is multiplied by a scale before its backward pass and gradients are divided by it
afterwards, so that small ones do not become zero on the way. Everything is a tensor
operation without a look at a value: it runs under `torch.vmap`, with one scale for each
member of an ensemble, and asks no device to wait.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from vgrad import checks
from vgrad.tree import (
    GetAttrKey,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
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


@dataclass(frozen=True, eq=False)
class StaticLossScale:
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

    def scale(self, tree: Tree) -> Tree:
        """Multiply floating tensors by the scale."""
        return _applied(torch.mul, tree, self.loss_scale)

    def unscale(self, tree: Tree) -> Tree:
        """Divide floating tensors by the scale."""
        return _applied(torch.div, tree, self.loss_scale)

    def adjust(self, finite: Tensor) -> "StaticLossScale":
        """Return the same."""
        return self


@dataclass(frozen=True, eq=False)
class DynamicLossScale:
    """A scale that shrinks after a step that was not finite, and grows after many.

    `adjust(finite)` returns the next one: on the `period`-th finite step in a row
    `loss_scale * factor`, at most `max`; after any other finite step the same; after
    one that was not finite `loss_scale / factor`, at least `min`. Both moves start the
    count anew. Scale and count are tensors, float32 and int64, which come to be where
    `finite` is; the rest is fixed.

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
        checks.whole("DynamicLossScale", least=1, period=self.period)
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

    def scale(self, tree: Tree) -> Tree:
        """Multiply floating tensors by the scale."""
        return _applied(torch.mul, tree, self.loss_scale)

    def unscale(self, tree: Tree) -> Tree:
        """Divide floating tensors by the scale."""
        return _applied(torch.div, tree, self.loss_scale)

    def adjust(self, finite: Tensor) -> "DynamicLossScale":
        """Return the scale after a step whose gradients were all finite, or not."""
        _check_predicate("DynamicLossScale.adjust(finite)", finite)
        now = _single(self.loss_scale).to(finite.device)
        counter = self.counter.to(finite.device)
        full = counter == self.period - 1
        grown = (now * self.factor).clamp(max=self.max)
        shrunk = (now / self.factor).clamp(min=self.min)
        scale = torch.where(finite, torch.where(full, grown, now), shrunk)
        counter = torch.where(finite & ~full, counter + 1, 0)
        return _rebuilt(DynamicLossScale, self.__dict__, (scale, counter))


def all_finite(tree: Tree) -> Tensor:
    """Tell whether the tensors of a tree are finite: a bool without dimensions.

    The answer stays on the device of the first floating tensor; a tree without one
    gives True. Cost: one pass over the tree.

    Example:
        >>> all_finite({"w": torch.tensor([1.0, float("nan")])})
        tensor(False)
    """
    leaves = [leaf for leaf in tree_leaves(tree) if _is_floating(leaf)]
    if not leaves:
        return torch.tensor(True)
    device = leaves[0].device
    return torch.stack([leaf.isfinite().all().to(device) for leaf in leaves]).all()


def select_tree(pred: Tensor, a: Tree, b: Tree) -> Tree:
    """Return the tensors of `a` where `pred` is true, else those of `b`.

    `pred` is a bool tensor without dimensions, and no one looks at it: that is how a
    step is skipped without a device sync. For members of an ensemble call this under
    `torch.vmap`.

    Raises:
        ValueError: the trees differ in structure, in a shape or dtype, or in something
            that is no tensor.
        TypeError: `pred` is no bool tensor without dimensions.

    Example:
        >>> new, old = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
        >>> select_tree(torch.tensor(False), new, old)
        {'w': tensor([0., 0.])}
    """
    _check_predicate("select_tree(pred)", pred)
    leaves, structure = tree_flatten(a)
    try:
        others = structure.flatten_up_to(b)
    except ValueError as error:
        raise ValueError(
            f"select_tree(a, b): expected two trees of one structure, got a "
            f"{type(a).__name__} and a {type(b).__name__} that differ. {error}"
        ) from error

    def select(one: Any, other: Any) -> Any:
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            # A tensor beside a number is refused unseen: comparing them is a look.
            if isinstance(one, Tensor) or isinstance(other, Tensor) or one != other:
                raise ValueError(
                    f"select_tree(a, b): expected tensors or equal values, got "
                    f"{one!r} and {other!r}."
                )
            return one
        if one.shape != other.shape or one.dtype != other.dtype:
            raise ValueError(
                f"select_tree(a, b): expected tensors of one shape and dtype, got "
                f"{one.dtype} {tuple(one.shape)} and {other.dtype} "
                f"{tuple(other.shape)}."
            )
        return torch.where(pred.to(one.device), one, other)

    chosen = [select(*pair) for pair in zip(leaves, others, strict=True)]
    return tree_unflatten(chosen, structure)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _applied(operation: Callable[..., Tensor], tree: Tree, scale: Tensor) -> Tree:
    """Compute with the floating tensors of a tree and the scale, float32 or wider."""
    scale = _single(scale)

    def apply(leaf: Any) -> Any:
        if not _is_floating(leaf):
            return leaf
        wide = leaf.to(torch.promote_types(leaf.dtype, torch.float32))
        return operation(wide, scale.to(leaf.device))

    return tree_map(apply, tree)


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


def _check_predicate(function: str, pred: Any) -> None:
    if not isinstance(pred, Tensor) or pred.dtype != torch.bool or pred.ndim:
        got = (
            f"{pred.dtype} {tuple(pred.shape)}"
            if isinstance(pred, Tensor)
            else type(pred).__name__
        )
        raise TypeError(
            f"{function}: expected a bool tensor without dimensions, got {got}. For "
            f"one answer per member use torch.vmap."
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

    def flatten(scale: Any) -> tuple[list[Any], dict[str, Any]]:
        fixed = {k: v for k, v in scale.__dict__.items() if k not in names}
        return [getattr(scale, name) for name in names], fixed

    def with_keys(scale: Any) -> tuple[list[Any], dict[str, Any]]:
        leaves, fixed = flatten(scale)
        keys = map(GetAttrKey, names)
        return list(zip(keys, leaves, strict=True)), fixed

    def unflatten(leaves: Iterable[Any], fixed: dict[str, Any]) -> Any:
        return _rebuilt(kind, fixed, leaves)

    register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=with_keys)


for _kind in _LEAVES:
    _register(_kind)
