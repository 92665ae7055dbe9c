"""The nodes of autograd's graphs, and the nodes that are not torch's own.

`torch._C._functions` has the classes of all nodes that torch compiles in. Nodes of an
autograd.Function have classes of Python, and nodes that a library compiles have one
that stands for all unknown ones. Functions of vgrad write into memory of their own
alone, but for those with `foreign`, which run code of the user. Ops that libraries
register are the others of `torch.ops`. A documented way to list the classes would end
the need.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from vgrad.torch_private.tensors import OPS

__all__ = ["foreign", "is_foreign_op", "nodes"]

_COMPILED: Any = torch._C
_OWN = {each for each in vars(_COMPILED._functions).values() if isinstance(each, type)}


def nodes(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Yield each node of the graphs that lead to these tensors."""
    left: list[Any] = [each.grad_fn for each in tensors]
    seen: set[Any] = {None}
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += [each for each, _ in node.next_functions]


def foreign(tensors: Iterable[Tensor]) -> list[str]:
    """Name the nodes of these graphs whose backward passes are not torch's own."""
    return [node.name() for node in nodes(tensors) if not _is_own(type(node))]


def _is_own(kind: type) -> bool:
    """Return whether a class of nodes is torch's, or a function of vgrad itself."""
    if kind in _OWN:
        return True
    function = getattr(kind, "_forward_cls", None)
    own = getattr(function, "__module__", "").startswith("vgrad.")
    return own and not getattr(function, "foreign", False)


def is_foreign_op(func: Callable) -> bool:
    """Return whether a function is an op of `torch.ops` that a library registered."""
    return isinstance(func, OPS) and not str(func).startswith(("aten.", "prims."))
