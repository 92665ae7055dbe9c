"""Flags of tensors under `torch.vmap`, where autograd runs below, and its limits.

Inside the mapped function a tensor wraps one of all samples `[B, ...]`, which has the
graph. The wrapper reports `requires_grad=False`: code that branches on it would take
its inference path and silently lose gradients. So the flag is copied from the tensor
below, and calls that read more of the graph raise.

Tensors may share memory by their strides: `reshape`, `flatten` and `contiguous` return
a view where they can, else a copy. Under vmap the result of an op may have other
strides than for one sample, and then one is a view and the other a copy: a write into
either gives other numbers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from vgrad.torch_private import modes
from vgrad.torch_private import tensors as private
from vgrad.torch_private.tensors import storage, version_of
from vgrad.tree import tree_leaves

RESHAPES = {torch.reshape, torch.flatten, torch.ravel}
RESHAPES |= {Tensor.reshape, Tensor.reshape_as, Tensor.flatten, Tensor.ravel}
RESHAPES |= {Tensor.contiguous}
"""Functions that may return a view or a copy."""


class UnsupportedOp(NotImplementedError):
    """A strategy cannot run an op of the loss; the message says which one can."""


def _methods(names: str) -> list[Callable]:
    return [getattr(Tensor, name) for name in names.split()]


def _attributes(names: str, *more: str, method: str = "__get__") -> list[Callable]:
    parts = [getattr(Tensor, name, None) for name in (*names.split(), *more)]
    return [getattr(each, method) for each in parts if each is not None]


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

MEMORY = {
    *_attributes(*private.MEMORY),
    *_attributes("data grad_dtype", *private.GRAPH[1:2], method="__set__"),
    torch.as_strided_,
    *_methods("set_ as_strided_"),
    private.IS_VIEW,
}
"""Calls whose result is never the same for one sample."""

STRIDES = {
    torch.as_strided,
    *_methods("as_strided as_strided_scatter"),
}
"""Calls that read memory in an order of their own."""

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
    **dict.fromkeys(MEMORY | AUTOGRAD, lambda _: True),
}
"""Whether a call is refused, by the tensor that the first of its tensors wraps."""


def is_refused(func: Callable) -> bool:
    """Return whether some calls of a function depend on more than values and flags."""
    own = func in STRIDES or func in GRADS or func == REQUIRES_GRAD
    return own or func in _REFUSED


@dataclass(frozen=True)
class GradFlags:
    """The flags, and the memory, of the tensors in one run of a loss under vmap."""

    level: int  # of the vmap
    one: str  # a sample or a member
    otherwise: str  # the strategy for a function that reads more of the graph
    _odd: set[Any] = field(default_factory=set)  # memory not laid out as for one sample
    _doubtful: list[tuple[Tensor, int]] = field(default_factory=list)

    def afresh(self) -> "GradFlags":
        """Return the same for another run, without tensors."""
        return GradFlags(self.level, self.one, self.otherwise)

    def refuse(self, func: Callable, tensors: Sequence[Tensor]) -> None:
        """Refuse a call whose result would be wrong for one sample."""
        refused = _REFUSED.get(func)
        if not tensors or (refused is None and func not in STRIDES):
            return
        first = tensors[0]
        if refused is None:
            if not self._is_odd(first):
                return
        elif modes.level_of(first) != self.level or not refused(modes.unwrapped(first)):
            return
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

    def after(self, func: Callable, tensors: Sequence[Tensor], output: Any) -> None:
        """Set the flags of the results of a call, for code that no mode sees."""
        if isinstance(output, Tensor):
            outputs = [output]
        elif isinstance(output, tuple | list):
            outputs = [each for each in output if isinstance(each, Tensor)]
        else:
            if func is Tensor.register_hook:  # on a node that a write may replace
                self._doubt(tensors[0])
            return
        self.sync(outputs)
        if func in RESHAPES:
            if not tensors[0].is_contiguous() and self._is_odd(tensors[0]):
                for each in (tensors[0], *outputs):
                    self._doubt(each)
            return
        for each in outputs:
            if not modes.is_wrapped(each) or each.is_contiguous():
                continue
            # A view has the layout of its base; a result with the layout of an operand
            # would have it for one sample, too.
            place, layout = _memory(each), (each.shape, each.stride())
            for tensor in tensors:
                same = layout == (tensor.shape, tensor.stride())
                if (same and not self._is_odd(tensor)) or _memory(tensor) == place:
                    break
            else:
                self._odd.add(place)

    def _doubt(self, tensor: Tensor) -> None:
        below = modes.unwrap_all(tensor)
        self._doubtful.append((below, version_of(below)))

    def _is_odd(self, tensor: Tensor) -> bool:
        """Return whether a tensor may have another layout than for one sample."""
        return bool(self._odd) and _memory(tensor) in self._odd

    def end(self, results: Iterable[Tensor]) -> None:
        """Refuse results that would be others for one sample."""
        with modes.without_modes():
            self.sync(results)
            written = any([version_of(each) != was for each, was in self._doubtful])
        self._odd.clear()  # another run has no use for them
        self._doubtful.clear()
        if written:
            raise UnsupportedOp(
                f"loss: expected writes in place whose target is the same for one "
                f"{self.one} and for all, got one behind a reshape, flatten or "
                f"contiguous that copies here and not there, or into a tensor with a "
                f"hook. Write into a clone, or use {self.otherwise}."
            )

    def sync(self, tensors: Iterable[Tensor]) -> bool:
        """Copy `requires_grad` from below; return whether this vmap maps over some."""
        mapped = False
        for tensor in tensors:
            level = outermost = modes.level_of(tensor)
            while level > self.level:
                tensor = modes.unwrapped(tensor)
                level = modes.level_of(tensor)
            if level != self.level:
                continue
            mapped |= level == outermost
            below = modes.unwrapped(tensor)
            if not tensor.requires_grad:
                if below.requires_grad:
                    tensor.requires_grad = True
            elif tensor.grad_fn is not None:
                raise UnsupportedOp(
                    f"loss: expected ops that leave autograd to torch, got one that "
                    f"made a graph of its own where one tensor stands for all "
                    f"{self.one}s, as functions of torch.jit.script do. Use "
                    f"{self.otherwise}."
                )
            elif type(tensor) is not Tensor and not below.requires_grad:
                raise UnsupportedOp(
                    f"loss: expected tensors that requires_grad_ differentiates by, "
                    f"got a leaf that no mode sees made, as torch.nn.Parameter makes "
                    f"one, where it stands for all {self.one}s. Use {self.otherwise}."
                )
        return mapped

    def hides(self, tensor: Tensor) -> bool:
        """Return whether a gradient inside takes the caller's tensors for constants."""
        if modes.level_of(tensor) > self.level + 1:
            return False
        while modes.is_wrapped(tensor):
            tensor = modes.unwrapped(tensor)
            if tensor.requires_grad:
                return True
        return False


def _memory(tensor: Tensor) -> Any:
    return storage(modes.unwrap_all(tensor))


def among(args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors among the arguments of a call."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):  # `|` would make a type
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


# Limits of vmap, in words that say what to do instead.


def raise_clearly(
    error: RuntimeError, op: str, *, in_place: bool = False, one: str = "sample"
) -> NoReturn:
    """Raise an error of vmap in words that say what to do; others as they are.

    vmap maps over `one`: a sample or a member.
    """
    if isinstance(error, torch.OutOfMemoryError | UnsupportedOp):
        raise error
    kind = modes.limit_of(str(error))
    differentiable = "expected ops that transforms of torch.func can differentiate, got"
    if kind == "random numbers":
        raise RuntimeError(
            f'{op}: expected a loss without random numbers, since randomness="error". '
            f'Pass randomness="different" (each {one} draws its own) or "same".'
        ) from error
    if kind == "same random numbers":
        limit = (
            f"expected random numbers that all {one}s can share, since "
            f'randomness="same", got some whose distribution depends on the {one}. '
            f'Pass randomness="different", or use strategy="loop".'
        )
    elif kind == "saved tensors":
        limit = (
            f"{differentiable} activation checkpointing (or other hooks on saved "
            f'tensors or nodes). Use strategy="auto" or "loop".'
        )
    elif kind == "setup_context":
        limit = (
            f"{differentiable} an autograd.Function without setup_context. Give it "
            f'setup_context and a vmap rule, or use strategy="loop".'
        )
    elif op == "retain_grad":
        limit = (
            f"expected a loss that leaves the graph of its tensors alone, got a call "
            f"on a tensor that stands for all {one}s. Leave it out, or use "
            f'strategy="loop".'
        )
    elif kind == "backward pass" or op in map(modes.op_name, AUTOGRAD):
        raise own_backward_pass(op) from error
    elif kind == "vmap" or in_place:
        shared = f"writes in place into a tensor that all {one}s share, or is too small"
        values = "looks at values or has shapes that depend on them"
        limit = (
            f"expected ops that vmap can run for all {one}s at once, got one that "
            f'{shared if in_place else values}. Use strategy="loop", which runs it '
            f"{one} by {one}."
        )
    else:
        if not getattr(error, "__notes__", ()):  # of the op, if this is around it
            error.add_note(
                f"This happened in {op} while one {one} stood for all {one}s at once. "
                f'If it works for a single {one}, strategy="loop" can run it.'
            )
        raise error
    raise UnsupportedOp(f"{op}: {limit}") from error
