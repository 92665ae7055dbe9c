"""An autograd.Function under vmap: by its vmap rule, or for one sample after another.

Torch runs a `vmap` of its own on the tensors of all samples and, where autograd runs
below the vmap, differentiates its ops. Only if it calls `apply` again is the gradient
the one that `backward` gives.

A function that vmap cannot run is called for one sample after another: each call gets
the plain tensors of one sample, and a context of its own. Under a vmap alone, autograd
runs below it and goes through all calls. Where a gradient is taken inside of the vmap,
each call has a graph of its own, which its backward pass runs.
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

Mapped = tuple[Tensor, int | None]
"""A tensor of all samples and the axis that they have, or one that all share."""


def for_samples(
    function: Any, args: tuple, kwargs: dict, foreign: Foreign
) -> tuple[Any, bool]:
    """Run an autograd.Function; return whether it was called for one after another."""
    if not _has_rule(function):
        return one_by_one(function, args, kwargs, foreign), True
    given = [modes.unwrap_all(each) for each in among(args, kwargs)]
    versions = [version_of(each) for each in given]
    try:
        return custom_function(function, *args, **kwargs), False
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        written = versions != [version_of(each) for each in given]
        if written or modes.RANDOM_ERROR in str(error):
            raise
        try:
            return one_by_one(function, args, kwargs, foreign), True
        except UnsupportedOp:
            raise error from None


def _has_rule(function: Any) -> bool:
    """Return whether torch can run a function under vmap."""
    plain = torch.autograd.Function
    if function.setup_context is plain.setup_context:
        return False
    return function.generate_vmap_rule or function.vmap is not plain.vmap


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
    match modes.active_transforms():
        case ("Vmap",):
            level, size = _innermost()
            given = [_split(each, level) for each in call.tensors]
            with modes.exit_all():
                found, mapped = call.run(given, size, call.one)
            if mapped:
                found = [modes.add_batch_axis(each, 0, level) for each in found]
        case ("Vmap", "Grad"):
            found = _Apart.apply(call, *call.tensors)
        case _:
            raise call.refusal("no transform of the loss's own around it", "one")
    return call.output(found)


def once(function: Any, args: tuple, kwargs: dict, foreign: Foreign) -> Any:
    """Call an autograd.Function whose arguments are the same for all samples."""
    call = _Call(function, args, kwargs, foreign)
    given = [(each, None) for each in call.tensors]
    with modes.exit_all():
        return call.output(call.run(given, 1, call.one)[0])


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
        self._foreign = foreign
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self.tensors = [each for each in self._leaves if isinstance(each, Tensor)]
        self._grad = torch.is_grad_enabled()
        direct = {id(each) for each in args}  # autograd follows no tensors in lists
        self._wanted = [
            self._grad and each.requires_grad and id(each) in direct
            for each in self.tensors
        ]
        self._graphs: list[tuple[Sequence[Tensor], list[Tensor]]] = []
        self._form: Any = None  # the output, with an ellipsis for each tensor
        self._shared = False  # whether one call stands for all samples

    def run(
        self, given: Sequence[Mapped], size: int, one: Callable
    ) -> tuple[list[Tensor], bool]:
        """Return the outputs, stacked if an argument is mapped, and whether one is."""
        tensors = [tensor for tensor, _ in given]
        mapped = any(axis is not None for _, axis in given)
        self._shared = not mapped
        columns = [_column(*each, size if mapped else 1) for each in given]
        with undrawn(tensors, self.refusal):
            rows = [one(row) for row in zip(*columns, strict=True)]
        if not mapped:
            return rows[0], False
        kinds = [[(e.shape, e.dtype, e.device, e.layout) for e in row] for row in rows]
        if any(kind != kinds[0] for kind in kinds):
            raise self.refusal("outputs of one shape and dtype", "others")
        return [torch.stack(each) for each in zip(*rows, strict=True)], True

    def one(self, tensors: Sequence[Tensor]) -> list[Tensor]:
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

    def is_foreign(self, tensor: Tensor) -> bool:
        """Return whether a tensor that was no argument belongs to the loss."""
        return modes.is_wrapped(tensor) or self._foreign(tensor)

    def output(self, found: Iterable[Tensor]) -> Any:
        """Return the output of one call with other tensors in it."""
        own = iter(found)
        return tree_map(lambda e: next(own) if e is ... else e, self._form)

    def apart(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Do as `one`, and keep the graph of this call."""
        leaves, found = self._graph(tensors)
        self._graphs.append((leaves, found))
        return [each.detach() for each in found]

    def _graph(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return leaves for the arguments of a call, and its outputs."""
        pairs = zip(tensors, self._wanted, strict=True)
        leaves = [each.detach().requires_grad_(wanted) for each, wanted in pairs]
        with torch.set_grad_enabled(self._grad):
            return leaves, self.one(leaves)

    def constants(self, outputs: Iterable[Tensor]) -> list[Tensor]:
        """Return the outputs of all samples through which no call has a gradient."""
        columns = zip(*(found for _, found in self._graphs), strict=True)
        follows = [any(each.requires_grad for each in column) for column in columns]
        return [each for each, on in zip(outputs, follows, strict=True) if not on]

    def check_constant(self, tensors: Iterable[Tensor]) -> None:
        """Refuse a derivative that goes beyond the graphs of the calls."""
        if self._grad and any(each.requires_grad for each in tensors):
            raise self.refusal("one derivative", "a second one")

    def back(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward passes of all calls, given the gradients at the outputs."""
        if modes.active_transforms() != ("Vmap",):
            raise self.refusal("one derivative", "several")
        level, size = _innermost()
        given = [None if each is None else _split(each, level) for each in grads]
        with modes.exit_all():
            tensors = [each[0] for each in given if each is not None]
            self.check_constant(tensors)
            none = [None] * size
            columns = [none if e is None else _column(*e, size) for e in given]
            with undrawn(tensors, self.refusal):
                rows = [
                    self._back(number, row)
                    for number, row in enumerate(zip(*columns, strict=True))
                ]
            leaves = self._graphs[0][0]
            found = [
                _filled(leaf, each)
                for leaf, each in zip(leaves, zip(*rows, strict=True), strict=True)
            ]
        return [
            None if each is None else modes.add_batch_axis(each, 0, level)
            for each in found
        ]

    def _back(self, number: int, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward pass of one sample's call, or of the one that all share."""
        leaves, outputs = self._graphs[0 if self._shared else number]
        if self._shared:  # and a backward pass may write into what was saved
            leaves, outputs = self._graph([each.clone() for each in leaves])
        wanted = [each for each in leaves if each.requires_grad]
        ends = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        if not ends or not wanted:
            return [None] * len(leaves)
        with _Watch(self, leaves):
            found = iter(
                torch.autograd.grad(
                    [output for output, _ in ends],
                    wanted,
                    [grad for _, grad in ends],
                    retain_graph=True,
                    allow_unused=True,
                )
            )
        own = (next(found) if each.requires_grad else None for each in leaves)
        return [None if each is None else each.clone() for each in own]


class _Apart(torch.autograd.Function):
    """All calls, under a gradient that is taken inside of the vmap."""

    foreign = True  # its backward pass runs the one of the user's function

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run one call, whose arguments all samples share."""
        call.check_constant(tensors)
        given = [(each, None) for each in tensors]
        return tuple(call.run(given, 1, call.apart)[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *tensors: Tensor) -> Any:
        """Run the calls of all samples."""
        call.check_constant(tensors)
        given = [
            (each if axis is None else each.movedim(axis, 0), axis)
            for each, axis in zip(tensors, in_dims[1:], strict=True)
        ]
        found, _ = call.run(given, info.batch_size, call.apart)
        return tuple(found), (0,) * len(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the graphs."""
        ctx.call, *_ = inputs
        ctx.mark_non_differentiable(*ctx.call.constants(output))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        """Run the backward passes of all calls."""
        return None, *ctx.call.back(grads)


class _Watch(TorchFunctionMode):
    """Refuses tensors of the loss that a function uses beside its arguments.

    They would get no gradient.
    """

    def __init__(self, call: _Call, given: Iterable[Tensor]) -> None:
        super().__init__()
        self._call = call
        self._given = {id(each) for each in given}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for each in among(args, kwargs):
            if id(each) not in self._given and self._call.is_foreign(each):
                raise self._call.refusal("all tensors as arguments", "a captured one")
        return func(*args, **kwargs)


_PLAIN = {type(None), bool, int, float, str, type(...)}
"""Kinds of outputs beside tensors."""


def _innermost() -> tuple[int, int]:
    """Return the level of the innermost vmap, and how many samples it maps over."""
    interpreter: Any = modes.innermost()
    return interpreter.level(), interpreter.batch_size()


def _split(tensor: Tensor, level: int) -> Mapped:
    """Return the samples of a tensor in front, and whether there are any."""
    if modes.level_of(tensor) != level or not modes.is_batched(tensor):
        return tensor, None
    return modes.unwrapped(tensor).movedim(modes.batch_axis(tensor), 0), 0


def _column(tensor: Tensor, axis: int | None, size: int) -> Sequence[Tensor]:
    """Return each sample's tensor, on memory that no other sample's call can write."""
    if axis is None:
        return [tensor.clone() for _ in range(size)] if size > 1 else [tensor]
    rows = tensor.unbind()
    if not tensor.stride(0):
        return [each.clone() for each in rows]
    return [each.contiguous() for each in rows]


def _filled(leaf: Tensor, grads: Sequence[Tensor | None]) -> Tensor | None:
    """Stack gradients, with zeros for calls that have none."""
    if all(each is None for each in grads):
        return None
    dense = [torch.zeros_like(leaf) if each is None else each for each in grads]
    return torch.stack([each.to_dense() if each.is_sparse else each for each in dense])
