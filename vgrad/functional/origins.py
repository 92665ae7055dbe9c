"""What follows a module's registered tensors: views on their memory, and results.

In eager mode a view of a parameter follows it, in memory and in gradients, and so does
what was computed from it. A copy of either would be a constant.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vgrad.torch_private.tensors import memory


class Origins:
    """The registered tensors of a module, as the origins of others."""

    def __init__(self, model: nn.Module) -> None:
        """Note the tensors and their memory."""
        tensors = [*model.parameters(), *model.buffers()]
        self._ids = {id(tensor) for tensor in tensors}
        self._memory = {memory(tensor) for tensor in tensors} - {None}

    def hold(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is one of them, or shares memory with one."""
        return id(tensor) in self._ids or memory(tensor) in self._memory

    def lead_to(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is or shares one of them, or was computed from them."""
        return self.hold(tensor) or any(id(x) in self._ids for x in _leaves(tensor))


def check_apart(function: str, model: nn.Module) -> None:
    """Refuse two registered tensors that hold the same numbers in memory.

    In eager mode a step on one of them changes the other.
    """
    groups: dict[int, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (where := memory(tensor)) is not None:
            groups.setdefault(where, {}).setdefault(id(tensor), (name, tensor))
    for group in groups.values():
        names, tensors = zip(*group.values(), strict=True)
        if len(tensors) > 1 and _overlap(tensors):
            raise TypeError(
                f"{function}({type(model).__name__}): expected parameters and buffers "
                f"with memory of their own, or one tensor under several names, got "
                f"several on one memory: {', '.join(map(repr, names))}. Tie them by "
                f"assigning the tensor itself (b.weight = a.weight), or clone one."
            )


def _overlap(tensors: Iterable[Tensor]) -> bool:
    """Tell whether any two tensors on one memory have numbers in common."""
    spans = []
    for tensor in tensors:
        sides = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((n - 1) * step for n, step in sides)
        size = tensor.element_size()
        if tensor.numel():
            spans.append((tensor.storage_offset() * size, (last + 1) * size, tensor))
    spans.sort(key=lambda span: span[0])
    if all(a[1] <= b[0] for a, b in pairwise(spans)):
        return False
    if len({tensor.element_size() for *_, tensor in spans}) > 1:
        return True
    # What is interleaved, as the halves of columns are, may still be apart.
    numbers = torch.arange(spans[0][2].untyped_storage().nbytes(), device="cpu")
    taken = torch.zeros_like(numbers, dtype=torch.bool)
    for *_, tensor in spans:
        own = numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if bool(taken[own].any()):
            return True
        taken[own] = True
    return False


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that a graph leads to."""
    left: list[Any] = [tensor.grad_fn]
    seen: set[Any] = {None}
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor):
                yield variable
            left += [each for each, _ in node.next_functions]
