"""Operations on dictionaries and other trees of tensors, and the dtypes of arithmetic.

The only place that imports `torch.utils._pytree`, which torch does not promise.
"""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple
from functools import cache, partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._pytree import GetAttrKey as GetAttrKey
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import register_pytree_node as register_pytree_node
from torch.utils._pytree import tree_flatten_with_path, tree_structure
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_map_with_path as tree_map_with_path
from torch.utils._pytree import tree_unflatten as tree_unflatten

from vgrad import checks
from vgrad.torch_private.tensors import with_attributes
from vgrad.typing import T, Tree


def tree_flatten(tree: Tree) -> tuple[list[Any], TreeSpec]:
    """Flatten a tree; a mapping of a class that torch does not know is a dictionary."""
    leaves, spec = pytree.tree_flatten(tree)
    if _has_mappings(leaves):
        return tree_flatten(_dictionaries(tree))
    return leaves, spec


def tree_leaves(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the leaves of a tree, in the order of `tree_flatten`."""
    return (
        with_leaves(tree)[1] if is_leaf is None else pytree.tree_leaves(tree, is_leaf)
    )


def with_leaves(tree: Tree) -> tuple[Tree, list[Any]]:
    """Return a tree, mappings of unknown classes as dictionaries, and its leaves."""
    # A tuple of tensors goes without pytree, which is slower than small kernels.
    if type(tree) is tuple and all([isinstance(leaf, Tensor) for leaf in tree]):
        return tree, [*tree]
    leaves = pytree.tree_leaves(tree)
    return with_leaves(_dictionaries(tree)) if _has_mappings(leaves) else (tree, leaves)


def _has_mappings(leaves: list[Any]) -> bool:
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and isinstance(leaf, Mapping):
            return True
    return False


def _dictionaries(tree: Tree) -> Tree:
    return tree_map_only(Mapping, dict, tree)


def map_values(function: Callable[..., Any], *trees: Mapping[str, Any]) -> dict:
    """Apply `function` to the entries of one name, for every name of the first tree."""
    first = trees[0]
    return {name: function(*[tree[name] for tree in trees]) for name in first}


def tensors(tree: Tree) -> list[Tensor]:
    """List the tensors of a tree, in order."""
    # Dictionaries and sequences go without pytree, which is slower than small kernels.
    if isinstance(tree, Tensor):
        return [tree]
    kind = type(tree)
    if kind is dict:
        tree = tree.values()
    elif not (kind is tuple or kind is list or _is_named(kind)):
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    leaves = []
    for branch in tree:
        if isinstance(branch, Tensor):
            leaves.append(branch)
        elif branch is not None:
            leaves += tensors(branch)
    return leaves


def map_tensors(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Apply `function` to the tensors of a tree; everything else stays as it is."""
    if isinstance(tree, Tensor):
        return function(tree)
    kind = type(tree)
    if kind is dict:
        return {
            key: function(value)
            if isinstance(value, Tensor)
            else map_tensors(function, value)
            for key, value in tree.items()
        }
    plain = kind is tuple or kind is list
    if not (plain or _is_named(kind)):
        return tree_map(lambda leaf: _map_leaf(function, leaf), tree)
    mapped = [
        function(branch)
        if isinstance(branch, Tensor)
        else map_tensors(function, branch)
        for branch in tree
    ]
    return kind(mapped) if plain else kind(*mapped)


def _map_leaf(function: Callable[[Tensor], Any], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if not isinstance(leaf, Mapping):
        return leaf
    mapped = map_tensors(function, dict(leaf))
    if not isinstance(leaf, MutableMapping):
        return mapped
    same: Any = copy.copy(leaf)  # as transformers' BatchEncoding and UserDict are
    for key, value in mapped.items():
        same[key] = value
    return same


def map_once(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply `function` to the tensors of a tree; one that is there twice stays one."""
    mapped: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in mapped:
            mapped[id(tensor)] = function(tensor)
        return mapped[id(tensor)]

    return map_tensors(once, tree)


def copied(tree: Tree) -> Tree:
    """Copy the tensors of a tree; one that is there twice stays one."""
    if isinstance(tree, Tensor):
        return with_attributes(tree.clone(), tree)
    return map_once(copied, tree)


def _is_named(kind: type) -> bool:
    return tuple in kind.__bases__ and hasattr(kind, "_fields")


def to_device(tree: T, device: torch.device | str) -> T:
    """Move every tensor of a tree to `device`; everything else stays as it is.

    A tensor that requires grad stays a leaf that requires grad, so a dictionary of
    parameters can be moved before training starts.

    Example:
        >>> to_device({"weight": torch.ones(2), "steps": 3}, "cpu")
        {'weight': tensor([1., 1.]), 'steps': 3}
    """

    def move(leaf: Tensor) -> Tensor:
        if leaf.is_leaf and leaf.requires_grad:
            return leaf.detach().to(device).requires_grad_()
        return leaf.to(device)

    return map_tensors(move, tree)


def state_dict(tree: Tree) -> dict[str, Tensor]:
    """Name every tensor of a tree by its place, as a file of tensors needs it.

    Example:
        >>> state_dict({"moments": (torch.ones(2), torch.zeros(2))})
        {"['moments'][0]": tensor([1., 1.]), "['moments'][1]": tensor([0., 0.])}
    """
    leaves, _ = tree_flatten_with_path(tree)
    named = {keystr(path): leaf for path, leaf in leaves}
    for name, leaf in named.items():
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"state_dict: expected a tensor at {name}, got a {type(leaf).__name__}."
            )
    return named


def named_leaves(tree: Tree) -> tuple[dict[str, Any], TreeSpec]:
    """Return the leaves of a tree by their places, and the tree's structure.

    The keys and numbers of a place are joined by dots; a leaf alone is the "value".

    Example:
        >>> named_leaves({"a": (1, 2), "b": 3})[0]
        {'a.0': 1, 'a.1': 2, 'b': 3}
    """
    places: Any
    places, spec = tree_flatten_with_path(with_leaves(tree)[0])
    named = {
        ".".join(str(key) for part in path for key in astuple(part)): leaf
        for path, leaf in places
    }
    return {name or "value": leaf for name, leaf in named.items()}, spec


def load_state_dict(template: T, tensors: Mapping[str, Tensor]) -> T:
    """Build a tree like `template`, on its devices, from tensors by `state_dict`.

    Tensors that are there already are not copied: a donated step writes to them.

    Example:
        >>> saved = state_dict((torch.ones(2), torch.tensor(3)))
        >>> load_state_dict((torch.zeros(2), torch.tensor(0)), saved)
        (tensor([1., 1.]), tensor(3))
    """
    expected = state_dict(template)
    check_fit("load_state_dict", expected, tensors)
    leaves = [tensors[name].to(leaf.device) for name, leaf in expected.items()]
    return tree_unflatten(leaves, tree_structure(template))


def check_fit(
    where: str, expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Refuse tensors whose names, shapes or dtypes are not those expected."""
    checks.names(where, expected, tensors)
    checks.shapes(where, expected, tensors)
    for name, tensor in expected.items():
        if tensors[name].dtype != tensor.dtype:
            raise ValueError(
                f"{where}: expected {tensor.dtype} in {name!r}, got "
                f"{tensors[name].dtype}. Was it saved from other code?"
            )


promoted: Callable[[torch.dtype, torch.dtype], torch.dtype] = cache(torch.promote_types)
"""The dtype of arithmetic on numbers of two dtypes; torch's function is an op."""

wide: Callable[[torch.dtype], torch.dtype] = partial(promoted, torch.float32)
"""The dtype for arithmetic on numbers of a dtype: float32 or wider."""


_WIDE = torch.float32, torch.float64, torch.complex64, torch.complex128


def widened(tensor: Tensor) -> Tensor:
    """Cast a tensor to float32 or wider."""
    return tensor if tensor.dtype in _WIDE else tensor.to(wide(tensor.dtype))


def double(tensor: Tensor) -> Tensor:
    """Cast a tensor to float64, or to its complex numbers."""
    return cast(tensor, promoted(tensor.dtype, torch.float64))


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor; `to` without effect would cost as much as a small sum."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def no_autocast(device: torch.device) -> AbstractContextManager:
    """Switch off a surrounding autocast in a block."""
    kind = device.type
    # The context takes several times as long as the question.
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
