"""Calls of a loss that ask for more than values, and the limits of `torch.vmap`.

Inside the mapped function a tensor wraps one of all samples `[B, ...]`, which has the
graph. The wrapper has `requires_grad=False`, so that attribute is read below it, and
calls that read more of the graph raise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import torch
from torch import Tensor

from vgrad.torch_private import modes
from vgrad.torch_private import tensors as private
from vgrad.tree import tree_leaves


class UnsupportedOp(NotImplementedError):
    """A strategy cannot run an op of the loss; the message says which one can."""


def _methods(names: str) -> list[Callable]:
    return [getattr(Tensor, name) for name in names.split()]


def _attributes(names: str, *more: str, method: str = "__get__") -> list[Callable]:
    parts = [getattr(Tensor, name, None) for name in (*names.split(), *more)]
    return [getattr(attribute, method) for attribute in parts if attribute is not None]


REQUIRES_GRAD, *_ = _attributes("requires_grad")
"""The call that reads this attribute."""

GRAPH = {
    *_attributes("grad_fn is_leaf output_nr retains_grad grad_dtype", *private.GRAPH),
}
"""Attributes that are the same for one sample only without a graph, or of a leaf."""

HOOKS = {
    torch.detach_,
    *_methods("detach_ register_hook retain_grad register_post_accumulate_grad_hook"),
}
"""Calls that act on the graph of a tensor that requires grad."""

STRIDES = {
    torch.as_strided,
    *_methods("as_strided as_strided_scatter"),
}
"""Calls that read memory in an order of their own."""

MEMORY = {
    *_attributes(*private.MEMORY),
    *_attributes("data grad_dtype", *private.GRAPH[1:2], method="__set__"),
    torch.as_strided_,
    *_methods("set_ as_strided_"),
    private.IS_VIEW,
}
"""Calls whose result is never the same for one sample."""

RESIZES = {torch.resize_as_, *_methods("resize_ resize_as_")}
"""Calls that change the size of the tensor of all samples."""

RESHAPES = {torch.reshape, torch.flatten, torch.ravel}
RESHAPES |= {Tensor.reshape, Tensor.reshape_as, Tensor.flatten, Tensor.ravel}
RESHAPES |= {Tensor.contiguous}
"""Functions that return a view or a copy, for one sample perhaps the other one."""

AUTOGRAD = {
    torch.autograd.grad,
    *_methods("backward requires_grad_"),
    *_attributes("requires_grad", method="__set__"),
}
"""Calls of a loss that differentiates on its own."""

GRADS = {
    *_attributes("grad"),
    *_attributes("grad", method="__set__"),
    *_attributes("grad", method="__delete__"),
}
"""Calls that read, set or delete `.grad`, which a backward pass of the loss fills."""

WATCHED_READS = {REQUIRES_GRAD} | GRAPH | MEMORY
"""Calls that only read, and have to be watched too."""

_READS = {"size", "dim", "ndimension", "numel", "nelement", "stride", "element_size"}
_READS |= {"storage_offset", "get_device", "is_contiguous", "is_floating_point"}
_READS |= {"is_complex", "is_inference", "is_signed", "is_same_size", "__len__"}
_TENSORS = {"T", "mT", "H", "mH", "real", "imag", "data", "grad"}
"""Attributes that are tensors; the others describe one."""


def only_reads(func: Callable) -> bool:
    """Return whether a call reads sizes and the like, and computes nothing."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _TENSORS
    return name in _READS


@lru_cache(maxsize=4096)
def is_plain_read(func: Callable) -> bool:
    """Return whether a call reads something that is the same for one sample."""
    return only_reads(func) and func not in WATCHED_READS


_REFUSED: dict[Callable, Callable[[Tensor], bool]] = {
    **dict.fromkeys(GRAPH, lambda below: below.grad_fn is not None),
    **dict.fromkeys(HOOKS, lambda below: below.requires_grad),
    **dict.fromkeys(MEMORY | AUTOGRAD | RESIZES, lambda _: True),
    # Others have another layout than for one sample, perhaps.
    **dict.fromkeys(STRIDES, lambda _: True),
}
"""Whether a call is refused, by the tensor that the first of its tensors wraps."""


def is_refused(func: Callable) -> bool:
    """Return whether some calls of a function depend on more than values and flags."""
    return func in _REFUSED or func in GRADS or func == REQUIRES_GRAD


@dataclass(frozen=True)
class VmapLevel:
    """A vmap under which a loss runs."""

    level: int
    one: str  # a sample or a member
    otherwise: str  # the strategy for a function that reads more of the graph

    def refuse(self, func: Callable, tensors: Sequence[Tensor]) -> None:
        """Refuse a call whose result would be wrong for one sample."""
        refused = _REFUSED.get(func)
        if refused is None or not tensors:
            return
        first = tensors[0]
        if func in STRIDES or func in RESIZES:
            while modes.level_of(first) > self.level:
                first = modes.unwrapped(first)
            if func in STRIDES and first.is_contiguous():
                return
        if modes.level_of(first) == self.level and refused(modes.unwrapped(first)):
            raise self.refusal(func)

    def refusal(self, func: Callable) -> UnsupportedOp:
        """Return the error for a call whose result would be wrong for one sample."""
        if func in AUTOGRAD:
            return own_backward_pass(modes.op_name(func))
        return UnsupportedOp(
            f"{modes.op_name(func)}: expected a loss that leaves the graph, the hooks "
            f"and the memory of its tensors alone, got one that reads them where "
            f"one tensor stands for all {self.one}s. Use {self.otherwise}."
        )


def requires_grad(tensor: Tensor) -> bool:
    """Return whether a tensor, or one that it wraps, requires grad."""
    # A wrapper of vmap has no graph: the tensor of all samples below it has one.
    while not tensor.requires_grad:
        if not modes.is_wrapped(tensor):
            return False
        tensor = modes.unwrapped(tensor)
    return True


def among(args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors among the arguments of a call."""
    tensors = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):  # `|` would make a type
            tensors += among(tuple(value), {})
        elif isinstance(value, dict):
            tensors += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return tensors


def own_backward_pass(op: str) -> UnsupportedOp:
    """Return the error for a loss that calls autograd where it cannot."""
    return UnsupportedOp(
        f"{op}: expected a loss that runs no backward pass of its own, got one that "
        f"calls torch.autograd, as gradient penalties do. Use torch.func.grad inside "
        f'it, or strategy="loop".'
    )


_DIFFERENTIABLE = "expected ops that transforms of torch.func can differentiate, got"
_VMAP = (
    "expected ops that vmap can run for all {one}s at once, got one that %s. Use "
    'strategy="loop", which runs it {one} by {one}.'
)
_LIMITS = {
    "same random numbers": (
        'expected random numbers that all {one}s can share, since randomness="same", '
        "got some whose distribution depends on the {one}. Pass "
        'randomness="different", or use strategy="loop".'
    ),
    "saved tensors": (
        f"{_DIFFERENTIABLE} activation checkpointing (or other hooks on saved tensors "
        f'or nodes). Use strategy="auto" or "loop".'
    ),
    "setup_context": (
        f"{_DIFFERENTIABLE} an autograd.Function without setup_context. Give it "
        f'setup_context and a vmap rule, or use strategy="loop".'
    ),
    "retain_grad": (
        "expected a loss that leaves the graph of its tensors alone, got a call on a "
        "tensor that stands for all {one}s. Leave it out, or use "
        'strategy="loop".'
    ),
    "in place": _VMAP
    % "writes in place into a tensor that all {one}s share, or is too small",
    "vmap": _VMAP % "looks at values or has shapes that depend on them",
}
"""Limits of vmap, in words that say what to do instead; `one` is a sample or a member.
"""


def raise_clearly(
    error: RuntimeError, op: str, *, in_place: bool = False, one: str = "sample"
) -> NoReturn:
    """Raise an error of vmap in words that say what to do; others as they are."""
    if isinstance(error, torch.OutOfMemoryError | UnsupportedOp):
        raise error
    kind = modes.limit_of(str(error))
    if kind == "random numbers":
        raise RuntimeError(
            f'{op}: expected a loss without random numbers, since randomness="error". '
            f'Pass randomness="different" (each {one} draws its own) or "same".'
        ) from error
    if kind not in ("same random numbers", "saved tensors", "setup_context"):
        if op == "retain_grad":
            kind = op
        elif kind == "backward pass" or op in map(modes.op_name, AUTOGRAD):
            raise own_backward_pass(op) from error
        elif in_place:
            kind = "in place"
        elif kind != "vmap":
            if not getattr(error, "__notes__", ()):  # of the op, if this is around it
                error.add_note(
                    f"This happened in {op} while one {one} stood for all {one}s at "
                    f'once. If it works for a single {one}, strategy="loop" can run it.'
                )
            raise error
    raise UnsupportedOp(f"{op}: {_LIMITS[kind].format(one=one)}") from error
