"""An autograd.Function under vmap: by its vmap rule, or for one sample after another.

Torch runs a `vmap` of its own on the tensors of all samples and, where autograd runs
below the vmap, differentiates its ops. Only if it calls `apply` again is the gradient
the one that `backward` gives.

In a recorded pass autograd runs below the vmap. There a function that vmap cannot run
is called for one sample after another, and autograd goes through all calls: each gets
the plain tensors of one sample, and a context of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from vgrad.conditions import Unrepeatable, checks_collected
from vgrad.generators import RNG_LOCK, drawn_since, random_state, set_random_state
from vgrad.loss.grad_flags import UnsupportedOp, among
from vgrad.torch_private import modes
from vgrad.torch_private.autograd import graph_nodes
from vgrad.torch_private.tensors import memory, version_of
from vgrad.tree import tree_flatten, tree_leaves, tree_map, tree_unflatten

Foreign = Callable[[Tensor], bool]
"""Returns whether a tensor stands for a parameter."""


def for_samples(
    function: Any, args: tuple, kwargs: dict, foreign: Foreign
) -> tuple[Any, bool]:
    """Run an autograd.Function; return whether it was called for one after another."""
    plain = torch.autograd.Function
    ruled = function.generate_vmap_rule or function.vmap is not plain.vmap
    if not ruled or function.setup_context is plain.setup_context:  # torch cannot
        return one_by_one(function, args, kwargs, foreign), True
    given = [modes.unwrap_all(each) for each in among(args, kwargs)]
    versions = [version_of(each) for each in given]
    try:
        return custom_function(function, *args, **kwargs), False
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        written = versions != [version_of(each) for each in given]
        if written or modes.limit_of(str(error)) == "random numbers":
            raise
        try:
            return one_by_one(function, args, kwargs, foreign), True
        except UnsupportedOp:
            raise error from None


def custom_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an autograd.Function, and check that its `vmap` runs its `backward`."""
    output = modes.custom_function_call(function, *args, **kwargs)
    own = function.vmap is not torch.autograd.Function.vmap
    if own and torch.is_grad_enabled() and _mapped_once((args, kwargs)):
        given = [each for each in _below((args, kwargs)) if each.requires_grad]
        made = [each for each in _below(output) if each.requires_grad]
        if given and (not made or _passed_by(given, made)):
            name = function.__name__
            raise UnsupportedOp(
                f"{name}.apply: expected an autograd.Function whose vmap calls apply, "
                f"got one whose vmap computes something that autograd differentiates "
                f"instead of running {name}.backward. Call {name}.apply inside of "
                f'vmap, set generate_vmap_rule = True instead, or use strategy="loop".'
            )
    return output


def _mapped_once(values: Any) -> bool:
    """Return whether these tensors are mapped by the vmap over samples alone."""
    level = modes.current_level()
    for each in tree_leaves(values):
        if not isinstance(each, Tensor) or modes.level_of(each) != level:
            continue
        wraps = []
        while modes.is_wrapped(each):
            wraps.append(modes.is_batched(each))
            each = modes.unwrapped(each)
        if wraps[:1] == [True] and sum(wraps) == 1:
            return True
    return False


def _below(values: Any) -> Iterator[Tensor]:
    """Yield the tensors that have the graph, below all vmaps."""
    for each in tree_leaves(values):
        if isinstance(each, Tensor):
            while modes.is_batched(each):
                each = modes.unwrapped(each)
            yield each


def _passed_by(given: list[Tensor], made: list[Tensor]) -> bool:
    """Return whether a path from results to arguments passes no backward of its own."""
    leaves = {id(each) for each in given if each.grad_fn is None}
    ends = {each.grad_fn for each in given} - {None}

    def own_backward(node: Any) -> bool:
        return isinstance(node, BackwardCFunction) and node not in ends

    return any(
        node in ends or id(getattr(node, "variable", None)) in leaves
        for node in graph_nodes(made, own_backward)
    )


# For one sample after another.


def one_by_one(function: Any, args: tuple, kwargs: dict, foreign: Foreign) -> Any:
    """Call an autograd.Function for each sample, and stack its outputs."""
    call = _Call(function, args, kwargs, foreign)
    if modes.active_transforms() != ("Vmap",):
        raise call.refusal(
            "a recorded pass, and no transform of the loss's own around it", "one"
        )
    innermost: Any = modes.innermost()
    level, size = innermost.level(), innermost.batch_size()
    pairs = [(each, modes.in_front(each, level)) for each in call.tensors]
    given = [(each, False) if own is None else (own, True) for each, own in pairs]
    with modes.exit_all():
        found, mapped = call.run(given, size)
    if mapped:
        found = [modes.add_batch_axis(each, 0, level) for each in found]
    return call.output(found)


def once(function: Any, args: tuple, kwargs: dict, foreign: Foreign) -> Any:
    """Call an autograd.Function whose arguments are the same for all samples."""
    call = _Call(function, args, kwargs, foreign)
    with modes.exit_all():
        return call.output(call.run([(each, False) for each in call.tensors], 1)[0])


@contextmanager
def undrawn(
    tensors: Sequence[Tensor], refusal: Callable[[str, str], Exception]
) -> Iterator[None]:
    """Refuse random numbers in a block, and put the generators back."""
    with RNG_LOCK:
        state = random_state(tensors)
        yield
        if drawn_since(state, tensors):
            set_random_state(state)
            raise refusal("no random numbers", "some")


def refused(function: str, expected: str, got: str) -> UnsupportedOp:
    """Return the error for calls that one cannot stand for."""
    return UnsupportedOp(
        f"{function}.apply: expected {expected} where an autograd.Function has no "
        f'vmap rule that works, got {got}. Use strategy="loop".'
    )


class _Call:
    """One call of the loss, which stands for all samples."""

    def __init__(
        self, function: Any, args: tuple, kwargs: dict, foreign: Foreign
    ) -> None:
        self.refusal = partial(refused, function.__name__)
        if checks_collected():
            raise Unrepeatable(f"{function.__name__}.apply runs sample by sample")
        self._function = function
        self.foreign = foreign
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self.tensors = [each for each in self._leaves if isinstance(each, Tensor)]
        self._form: Any = None  # the output, with an ellipsis for each tensor

    def run(
        self, given: Sequence[tuple[Tensor, bool]], size: int
    ) -> tuple[list[Tensor], bool]:
        """Return the outputs, stacked if an argument is mapped, and whether one is."""
        tensors = [tensor for tensor, _ in given]
        mapped = any(own for _, own in given)
        columns = [_column(*each, size if mapped else 1) for each in given]
        with undrawn(tensors, self.refusal):
            rows = [self._one(row) for row in zip(*columns, strict=True)]
        if not mapped:
            return rows[0], False
        kinds = [[(e.shape, e.dtype, e.device, e.layout) for e in row] for row in rows]
        if any(kind != kinds[0] for kind in kinds):
            raise self.refusal("outputs of one shape and dtype", "others")
        return [torch.stack(each) for each in zip(*rows, strict=True)], True

    def _one(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors among the outputs of one call."""
        # Views of views, at which each sample's gradient is copied before another call
        # runs, which may write it to the same memory.
        tensors = [each[None][0] if each.requires_grad else each for each in tensors]
        own = iter(tensors)
        leaves = [next(own) if isinstance(e, Tensor) else e for e in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        versions = [version_of(each) for each in tensors]
        try:
            with _Watch(self, tensors):
                output = self._function.apply(*args, **kwargs)
        finally:
            if versions != [version_of(each) for each in tensors]:
                raise self.refusal("arguments left as they are", "one written in place")
        found = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        form = tree_map(lambda e: ... if isinstance(e, Tensor) else e, output)
        if self._form is None:
            self._form = form
        alike = repr(form) == repr(self._form)
        if not alike or any(type(each) not in _PLAIN for each in tree_leaves(form)):
            raise self.refusal(
                "tensors alone or values that all samples share", "others"
            )
        places = {memory(each) for each in tensors}
        if any(not e.requires_grad and memory(e) in places for e in found):
            raise self.refusal("outputs in memory of their own", "an argument's")
        return [each.clone() for each in found]  # so may the next call

    def output(self, found: Iterable[Tensor]) -> Any:
        """Return the output of one call with other tensors in it."""
        own = iter(found)
        return tree_map(lambda e: next(own) if e is ... else e, self._form)


class _Watch(TorchFunctionMode):
    """Refuses captured tensors of the loss, which would get no gradient."""

    def __init__(self, call: _Call, given: Iterable[Tensor]) -> None:
        super().__init__()
        self._call = call
        self._given = {id(each) for each in given}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for each in among(args, kwargs):
            if id(each) in self._given:
                continue
            if modes.is_wrapped(each) or self._call.foreign(each):
                raise self._call.refusal("all tensors as arguments", "a captured one")
        return func(*args, **kwargs)


_PLAIN = {type(None), bool, int, float, str, type(...)}
"""Kinds of outputs beside tensors."""


class _Rows(torch.autograd.Function):
    """The tensors of single samples, all of which get a gradient, or none."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tensor.unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        found = [grad for grad in grads if grad is not None]
        if 0 < len(found) < len(grads):  # zeros would go on where one sample stops
            raise UnsupportedOp(
                "backward: expected an autograd.Function that returns gradients for "
                "all samples or for none, where it has no vmap rule that works, got "
                'None for some. Return zeros, or use strategy="loop".'
            )
        return torch.stack(found) if found else None


def _column(tensor: Tensor, mapped: bool, size: int) -> Sequence[Tensor]:
    """Return each sample's tensor, on memory that no other sample's call can write."""
    if not mapped:
        return [tensor.clone() for _ in range(size)] if size > 1 else [tensor]
    rows = _Rows.apply(tensor) if tensor.requires_grad else tensor.unbind()
    if not tensor.stride(0):
        return [each.clone() for each in rows]
    return [each.contiguous() for each in rows]
