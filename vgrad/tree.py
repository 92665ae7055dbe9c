"""Operations on dictionaries and other trees of tensors."""

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vgrad import checks
from vgrad.typing import Buffers, Params, Tree


def map_values(function: Callable[..., Any], *trees: Mapping[str, Any]) -> dict:
    """Apply `function` to the entries of one name, for every name of the first tree."""
    first = trees[0]
    return {name: function(*(tree[name] for tree in trees)) for name in first}


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """Move every tensor of a tree to `device`; everything else stays as it is.

    A tensor that requires grad stays a leaf that requires grad, so a dictionary of
    parameters can be moved before training starts.

    Example:
        >>> to_device({"weight": torch.ones(2), "steps": 3}, "cpu")
        {'weight': tensor([1., 1.]), 'steps': 3}
    """

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_leaf and leaf.requires_grad:
            return leaf.detach().to(device).requires_grad_()
        return leaf.to(device)

    return pytree.tree_map(move, tree)


def freeze(params: Params, buffers: Buffers, *patterns: str) -> tuple[Params, Buffers]:
    """Move the parameters that match a shell-style pattern among the buffers.

    The moved tensors are detached; nothing is copied, the given dictionaries stay.

    Raises:
        ValueError: a pattern matches no parameter.

    Example:
        >>> params = {"encoder.weight": torch.ones(2), "head.weight": torch.ones(2)}
        >>> trained, constant = freeze(params, {}, "encoder.*")
        >>> list(trained), list(constant)
        (['head.weight'], ['encoder.weight'])
    """
    moved: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(params, pattern)
        if not matched:
            raise ValueError(
                f"freeze({pattern!r}): expected a pattern that matches a parameter, "
                f"got none. The names are {checks.listed(params)}."
            )
        moved.update(matched)
    kept = {name: value for name, value in params.items() if name not in moved}
    frozen = {name: params[name].detach() for name in params if name in moved}
    return kept, {**buffers, **frozen}
