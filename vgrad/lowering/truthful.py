"""What a tensor says about itself under `torch.vmap` while autograd runs below.

Inside the mapped function a tensor wraps one of all samples `[B, ...]`, which has the
graph. The wrapper says that it requires no grad and has no graph: code that asks takes
the path of inference, and gradients are lost without an error. So every tensor is made
to answer `requires_grad` as the one below would, and calls that ask for more raise.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vgrad.lowering.layouts import Layouts
from vgrad.torch_private import modes
from vgrad.torch_private import tensors as private
from vgrad.tree import tree_leaves


class UnsupportedOp(NotImplementedError):
    """A strategy cannot run an op of the loss; the message says which one can."""


def _methods(names: str) -> list[Callable]:
    return [getattr(Tensor, name) for name in names.split()]


def _attributes(names: str, *more: str, method: str = "__get__") -> list[Callable]:
    found = [getattr(Tensor, name, None) for name in (*names.split(), *more)]
    return [getattr(each, method) for each in found if each is not None]


REQUIRES_GRAD, *_ = _attributes("requires_grad")
"""The call that reads this attribute."""

GRAPH = {
    *_attributes("grad_fn is_leaf output_nr retains_grad grad_dtype", *private.GRAPH),
}
"""Questions that only a tensor without a graph, or a leaf, can answer."""

HOOKS = {
    torch.detach_,
    *_methods("detach_ register_hook retain_grad register_post_accumulate_grad_hook"),
}
"""Calls that act on the graph of a tensor that requires grad."""

MEMORY = {
    *_attributes("data", *private.MEMORY),
    *_attributes("data grad_dtype", *private.GRAPH[1:2], method="__set__"),
    *_methods("set_"),
    private.IS_VIEW,
}
"""Questions whose answer is never that of one sample."""

STRIDES = {
    torch.as_strided,
    torch.as_strided_,
    *_methods("as_strided as_strided_ as_strided_scatter"),
}
"""Calls that read memory in an order of their own."""

AUTOGRAD = {
    torch.autograd.grad,
    *_methods("backward requires_grad_"),
    *_attributes("requires_grad", method="__set__"),
}
"""Calls of a loss that differentiates on its own."""

ASKED = {REQUIRES_GRAD} | GRAPH | MEMORY
"""Calls that only read, and have to be watched all the same."""

_REFUSED: dict[Callable, Callable[[Tensor], bool]] = {
    **dict.fromkeys(GRAPH, lambda below: below.grad_fn is not None),
    **dict.fromkeys(HOOKS, lambda below: below.requires_grad),
    **dict.fromkeys(MEMORY | AUTOGRAD, lambda _: True),
}
"""Whether a call is refused, by what the first of its tensors wraps."""


@dataclass(frozen=True)
class Truth:
    """Answers for the tensors of one vmap.

    Attributes:
        level: that of the vmap.
        one: what it maps over, in a word.
        otherwise: what to use for a function that asks for more.
        layouts: how tensors lie in memory.
    """

    level: int
    one: str
    otherwise: str
    layouts: Layouts = field(default_factory=Layouts)

    def afresh(self) -> "Truth":
        """Return the same for another run, which knows of no tensors yet."""
        return replace(self, layouts=Layouts())

    def before(self, func: Callable, tensors: Sequence[Tensor]) -> None:
        """Prepare the tensors among the arguments of a call, or refuse the call."""
        for tensor in tensors:
            self.tell(tensor)
        self.refuse(func, tensors)

    def refuse(self, func: Callable, tensors: Sequence[Tensor]) -> None:
        """Refuse a call whose answer would be wrong for one sample."""
        refused = _REFUSED.get(func)
        if not tensors or (refused is None and func not in STRIDES):
            return
        first = tensors[0]
        if refused is None:
            if not self.layouts.is_odd(first):
                return
        elif modes.level_of(first) != self.level or not refused(modes.unwrapped(first)):
            return
        raise self.refusal(func)

    def refusal(self, func: Callable) -> UnsupportedOp:
        """Return the error for a call whose answer would be wrong for one sample."""
        if func in AUTOGRAD:
            return own_backward_pass(modes.op_name(func))
        return UnsupportedOp(
            f"{modes.op_name(func)}: expected a loss that leaves the graph, the hooks "
            f"and the memory of its tensors alone, got one that asks for them where "
            f"one tensor stands for all {self.one}s. Use {self.otherwise}."
        )

    def after(self, func: Callable, tensors: Sequence[Tensor], output: Any) -> None:
        """Make the results of a call truthful to code that no mode sees."""
        for each in output if isinstance(output, tuple | list) else (output,):
            if isinstance(each, Tensor):
                self.tell(each)
        self.layouts.after(func, tensors, output)

    def end(self, results: Iterable[Tensor]) -> None:
        """Refuse results that are not those of one sample."""
        with modes.without_modes():
            for tensor in results:
                self.tell(tensor)
            disturbed = self.layouts.disturbed()
        if disturbed:
            raise UnsupportedOp(
                f"loss: expected writes in place whose target is the same for one "
                f"{self.one} and for all, got one behind a reshape, flatten or "
                f"contiguous that copies here and not there. Write into a clone, or "
                f"use {self.otherwise}."
            )

    def tell(self, tensor: Tensor) -> bool:
        """Make a tensor, or what it wraps, say whether it requires grad.

        Returns whether this vmap maps over it.
        """
        level = modes.level_of(tensor)
        inner = level > self.level
        while level > self.level:
            tensor = modes.unwrapped(tensor)
            level = modes.level_of(tensor)
        if level != self.level:
            return False
        if not tensor.requires_grad:
            if modes.unwrapped(tensor).requires_grad:
                tensor.requires_grad = True
        elif tensor.grad_fn is not None:
            raise UnsupportedOp(
                f"loss: expected ops that leave autograd to torch, got one that made "
                f"a graph of its own where one tensor stands for all {self.one}s, as "
                f"functions of torch.jit.script do. Use {self.otherwise}."
            )
        return not inner

    def hides(self, tensor: Tensor) -> bool:
        """Tell whether the gradient inside this vmap hides the caller's.

        The transform inside takes for constant what only the caller differentiates.
        """
        if modes.level_of(tensor) > self.level + 1:
            return False
        while modes.is_wrapped(tensor):
            tensor = modes.unwrapped(tensor)
            if tensor.requires_grad:
                return True
        return False


def among(args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors among the arguments of a call."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list | dict):
            leaves = tree_leaves(value)
            found += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return found


def own_backward_pass(op: str) -> UnsupportedOp:
    """Return the error for a loss that calls autograd where it cannot."""
    return UnsupportedOp(
        f"{op}: expected a loss that runs no backward pass of its own, got one that "
        f"calls torch.autograd, as gradient penalties do. Use torch.func.grad inside "
        f'it, or strategy="loop".'
    )
