"""Loss scales keep gradients of low precision within the range of their dtype.

Everything is a tensor operation that reads no value: it runs under `torch.vmap`, with
one scale per member of an ensemble, and never syncs a device.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, Self

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
    widened,
)
from vgrad.typing import Tree


class LossScale:
    """The base of loss scales, with the methods that a step uses."""

    loss_scale: Any

    def scale(self, tree: Tree) -> Tree:
        """Multiply floating tensors by the scale."""
        return self._applied(torch.mul, tree)

    def unscale(self, tree: Tree) -> Tree:
        """Divide floating tensors by the scale."""
        return self._applied(torch.div, tree)

    def adjust(self, finite: Tensor) -> Self:
        """Return the scale of the next step, the same unless a class changes it."""
        return self

    def _applied(self, operation: Callable[..., Tensor], tree: Tree) -> Tree:
        scale = _single(self.loss_scale)

        def apply(leaf: Any) -> Any:
            if not _is_floating(leaf):
                return leaf
            return operation(widened(leaf), scale.to(leaf.device))

        return tree_map(apply, tree)


@dataclass(frozen=True, eq=False)
class NoOpLossScale(LossScale):
    """No scaling: trees come back as they are.

    Example:
        >>> NoOpLossScale().loss_scale
        1.0
    """

    loss_scale = 1.0

    def scale(self, tree: Tree) -> Tree:
        """Return the tree."""
        return tree

    unscale = scale


@dataclass(frozen=True, eq=False)
class StaticLossScale(LossScale):
    """A constant scale, kept as a float32 tensor.

    `scale` and `unscale` compute in and return `promote_types(dtype, float32)`, and
    change floating tensors only.

    Raises:
        ValueError: not a positive number within float32; tensors are not checked. Or a
            scale per member of an ensemble, used outside of `torch.vmap`.

    Example:
        >>> scale = StaticLossScale(2.0**8)
        >>> scaled = scale.scale(torch.tensor(0.5, dtype=torch.float16))
        >>> scaled, scale.unscale(scaled)
        (tensor(128.), tensor(0.5000))
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        _check("StaticLossScale", loss_scale=self.loss_scale)
        object.__setattr__(self, "loss_scale", _float32(self.loss_scale))


@dataclass(frozen=True, eq=False)
class DynamicLossScale(LossScale):
    """A scale that shrinks after a step that was not finite, and grows after many.

    `adjust(finite)` returns the next one: on the `period`-th finite step in a row
    `loss_scale * factor`, at most `max`; after any other finite step the same; after
    one that was not finite `loss_scale / factor`, at least `min`. Both changes reset
    the count. Scale and count are tensors, float32 and int64, on the device of
    `finite`; the other fields are constants. `scale` is as in `StaticLossScale`.

    Under `torch.vmap` scales and `finite` have shape `[E]`, and members back off
    independently. The history of a scale depends on the data; in private training it is
    released with the model unless the scale is static.

    Raises:
        ValueError: a number that is not positive or outside of float32, a factor of
            one or less, a period below one, or `init` outside of `min` and `max`
            (tensors are not checked). Or as `StaticLossScale`.
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
        numbers = {"factor": self.factor, "min": self.min, "max": self.max}
        _check("DynamicLossScale", **numbers, init=init)
        [period] = checks.integers("DynamicLossScale", minimum=1, period=self.period)
        if self.factor <= 1:
            raise ValueError(
                f"DynamicLossScale(factor={self.factor!r}): expected factor > 1."
            )
        within = isinstance(init, Tensor) or self.min <= init <= self.max
        if self.min > self.max or not within:
            raise ValueError(
                f"DynamicLossScale(init={init!r}, min={self.min!r}, "
                f"max={self.max!r}): expected min <= init <= max."
            )
        scale = _float32(init)
        counter = torch.zeros_like(scale, dtype=torch.int64)
        self.__dict__.update(period=period, loss_scale=scale, counter=counter)

    def adjust(self, finite: Tensor) -> Self:
        """Return the scale after a step, `finite` if all its gradients were."""
        _check_predicate("DynamicLossScale.adjust(finite)", finite)
        scale = _single(self.loss_scale).to(finite.device)
        counter = self.counter.to(finite.device)
        full = counter == self.period - 1
        grown = (scale * self.factor).clamp(max=self.max)
        shrunk = (scale / self.factor).clamp(min=self.min)
        scale = torch.where(finite, torch.where(full, grown, scale), shrunk)
        counter = torch.where(finite & ~full, counter + 1, 0)
        fields = {**self.__dict__, "loss_scale": scale, "counter": counter}
        return _from_fields(type(self), fields)


def _float32(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32).detach()


def _single(scale: Tensor) -> Tensor:
    """Refuse the scales of an ensemble, which would broadcast over the last axis."""
    if scale.ndim:
        raise ValueError(
            f"loss_scale: expected a scale without dimensions, got shape "
            f"{tuple(scale.shape)}. For one scale per member use torch.vmap."
        )
    return scale


def _check(function: str, **values: Any) -> None:
    """Refuse anything but tensors and positive numbers within float32."""
    values = {n: value for n, value in values.items() if not isinstance(value, Tensor)}
    checks.positive(function, **values)
    limits = torch.finfo(torch.float32)
    for name, value in values.items():
        if not limits.tiny <= value <= limits.max:
            raise ValueError(
                f"{function}({name}={value!r}): expected a number within float32, "
                f"{limits.tiny:.1e} to {limits.max:.1e}."
            )


def _from_fields(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Make a scale without checks, since a tree_map may have made its leaves."""
    scale = object.__new__(kind)
    scale.__dict__.update(fields)
    return scale


def _register(kind: type, *names: str) -> None:
    """Register a class: the fields `names` are leaves, the others its structure."""
    keys = [GetAttrKey(name) for name in names]

    def flatten(scale: Any) -> tuple[list[Any], dict[str, Any]]:
        fixed = {k: v for k, v in vars(scale).items() if k not in names}
        return [getattr(scale, name) for name in names], fixed

    def flatten_with_keys(scale: Any) -> tuple[list[Any], dict[str, Any]]:
        leaves, fixed = flatten(scale)
        return [*zip(keys, leaves, strict=True)], fixed

    def unflatten(leaves: Iterable[Any], fixed: dict[str, Any]) -> Any:
        return _from_fields(kind, fixed | dict(zip(names, leaves, strict=True)))

    register_pytree_node(
        kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys
    )


_register(NoOpLossScale)
_register(StaticLossScale, "loss_scale")
_register(DynamicLossScale, "loss_scale", "counter")


def all_finite(tree: Tree) -> Tensor:
    """Return whether all tensors of a tree are finite, a bool without dimensions.

    The result is on the device of the first floating tensor; True if there is none.

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
    """Return the tensors of `a` where `pred` is true, else the tensors of `b`.

    `pred` is a bool tensor without dimensions, whose value is never read: a step is
    skipped without a device sync. For members of an ensemble use `torch.vmap`.

    Raises:
        ValueError: the trees differ in structure, a shape or dtype, or another leaf.
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
            # A tensor and a number are not compared, which would read the tensor.
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

    selected = [select(*pair) for pair in zip(leaves, others, strict=True)]
    return tree_unflatten(selected, structure)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _check_predicate(function: str, pred: Any) -> None:
    if isinstance(pred, Tensor) and pred.dtype == torch.bool and not pred.ndim:
        return
    kind = type(pred).__name__
    got = f"{pred.dtype} {tuple(pred.shape)}" if isinstance(pred, Tensor) else kind
    raise TypeError(
        f"{function}: expected a bool tensor without dimensions, got {got}. For one "
        f"predicate per member use torch.vmap."
    )
