"""Skipping a step whose gradients are not finite, without a look at a value."""

from typing import Any

import torch
from torch import Tensor

from vgrad.tree import tree_flatten, tree_leaves, tree_unflatten
from vgrad.typing import Tree


def all_finite(tree: Tree) -> Tensor:
    """Tell whether the tensors of a tree are finite: a bool without dimensions.

    The answer stays on the device of the first floating tensor; a tree without one
    gives True. Cost: one pass over the tree.

    Example:
        >>> all_finite({"w": torch.tensor([1.0, float("nan")])})
        tensor(False)
    """
    leaves = [leaf for leaf in tree_leaves(tree) if is_floating(leaf)]
    if not leaves:
        return torch.tensor(True)
    device = leaves[0].device
    return torch.stack([leaf.isfinite().all().to(device) for leaf in leaves]).all()


def select_tree(pred: Tensor, a: Tree, b: Tree) -> Tree:
    """Return the tensors of `a` where `pred` is true, else those of `b`.

    `pred` is a bool tensor without dimensions. Its value is never read, so a step is
    skipped without a device sync. For members of an ensemble call this under
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
    check_predicate("select_tree(pred)", pred)
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


def is_floating(leaf: Any) -> bool:
    """Tell whether something is a tensor of real or complex floating numbers."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def check_predicate(function: str, pred: Any) -> None:
    """Refuse what is no bool tensor without dimensions."""
    if isinstance(pred, Tensor) and pred.dtype == torch.bool and not pred.ndim:
        return
    kind = type(pred).__name__
    got = f"{pred.dtype} {tuple(pred.shape)}" if isinstance(pred, Tensor) else kind
    raise TypeError(
        f"{function}: expected a bool tensor without dimensions, got {got}. For "
        f"one answer per member use torch.vmap."
    )
