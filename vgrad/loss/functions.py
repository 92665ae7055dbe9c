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

from vgrad.conditions import Unrepeatable
from vgrad.generators import RNG_LOCK, drawn_since, random_state, set_random_state
from vgrad.loss.grad_flags import UnsupportedOp, among
from vgrad.torch_private import modes
from vgrad.torch_private.autograd import graph_nodes
from vgrad.torch_private.tensors import memory, version_of
from vgrad.tree import tree_flatten, tree_leaves, tree_map, tree_unflatten


def for_samples(
    mode: Any, function: Any, args: tuple, kwargs: dict
) -> tuple[Any, bool]:
    """Run an autograd.Function; return whether it was called for one after another."""
    plain = torch.autograd.Function
    ruled = function.generate_vmap_rule or function.vmap is not plain.vmap
    if not ruled or function.setup_context is plain.setup_context:  # torch cannot
        return one_by_one(mode, function, args, kwargs), True
    tensors = [modes.unwrap_all(tensor) for tensor in among(args, kwargs)]
    versions = [version_of(tensor) for tensor in tensors]
    try:
        return custom_function(function, *args, **kwargs), False
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        written = versions != [version_of(tensor) for tensor in tensors]
        if written or modes.limit_of(str(error)) == "random numbers":
            raise
        try:
            return one_by_one(mode, function, args, kwargs), True
        except UnsupportedOp:
            raise error from None


def custom_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an autograd.Function, and check that its `vmap` runs its `backward`."""
    output = modes.custom_function_call(function, *args, **kwargs)
    has_vmap = function.vmap is not torch.autograd.Function.vmap
    if has_vmap and torch.is_grad_enabled() and _mapped_once((args, kwargs)):
        inputs = [tensor for tensor in _below((args, kwargs)) if tensor.requires_grad]
        results = [tensor for tensor in _below(output) if tensor.requires_grad]
        if inputs and (not results or _passed_by(inputs, results)):
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
    for tensor in tree_leaves(values):
        if not isinstance(tensor, Tensor) or modes.level_of(tensor) != level:
            continue
        wraps = []
        while modes.is_wrapped(tensor):
            wraps.append(modes.is_batched(tensor))
            tensor = modes.unwrapped(tensor)
        if wraps[:1] == [True] and sum(wraps) == 1:
            return True
    return False


def _below(values: Any) -> Iterator[Tensor]:
    """Yield the tensors that have the graph, below all vmaps."""
    for tensor in tree_leaves(values):
        if isinstance(tensor, Tensor):
            while modes.is_batched(tensor):
                tensor = modes.unwrapped(tensor)
            yield tensor


def _passed_by(inputs: list[Tensor], results: list[Tensor]) -> bool:
    """Return whether a path from results to arguments passes no backward of its own."""
    leaves = {id(tensor) for tensor in inputs if tensor.grad_fn is None}
    ends = {tensor.grad_fn for tensor in inputs} - {None}

    def own_backward(node: Any) -> bool:
        return isinstance(node, BackwardCFunction) and node not in ends

    return any(
        node in ends or id(getattr(node, "variable", None)) in leaves
        for node in graph_nodes(results, own_backward)
    )


# For one sample after another.


def one_by_one(mode: Any, function: Any, args: tuple, kwargs: dict) -> Any:
    """Call an autograd.Function for each sample, and stack its outputs."""
    call = _Call(mode, function, args, kwargs)
    if modes.active_transforms() != ("Vmap",):
        raise call.refusal(
            "a recorded pass, and no transform of the loss's own around it", "one"
        )
    innermost: Any = modes.innermost()
    level, size = innermost.level(), innermost.batch_size()
    pairs = [(tensor, modes.in_front(tensor, level)) for tensor in call.tensors]
    inputs = [(leaf, False) if rows is None else (rows, True) for leaf, rows in pairs]
    with modes.exit_all():
        outputs, mapped = call.run(inputs, size)
    if mapped:
        outputs = [modes.add_batch_axis(output, 0, level) for output in outputs]
    return call.output(outputs)


def once(mode: Any, function: Any, args: tuple, kwargs: dict) -> Any:
    """Call an autograd.Function whose arguments are the same for all samples."""
    call = _Call(mode, function, args, kwargs)
    with modes.exit_all():
        return call.output(call.run([(tensor, False) for tensor in call.tensors], 1)[0])


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

    def __init__(self, mode: Any, function: Any, args: tuple, kwargs: dict) -> None:
        self.refusal = partial(refused, function.__name__)
        if mode.captured:
            raise Unrepeatable(f"{function.__name__}.apply runs sample by sample")
        self._function = function
        self.is_parameter = mode.is_parameter
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._form: Any = None  # the output, with an ellipsis for each tensor

    def run(
        self, inputs: Sequence[tuple[Tensor, bool]], size: int
    ) -> tuple[list[Tensor], bool]:
        """Return the outputs, stacked if an argument is mapped, and whether one is."""
        tensors = [tensor for tensor, _ in inputs]
        mapped = any(is_mapped for _, is_mapped in inputs)
        columns = [_column(*pair, size if mapped else 1) for pair in inputs]
        with undrawn(tensors, self.refusal):
            rows = [self._one(row) for row in zip(*columns, strict=True)]
        if not mapped:
            return rows[0], False
        kinds = [[(e.shape, e.dtype, e.device, e.layout) for e in row] for row in rows]
        if any(kind != kinds[0] for kind in kinds):
            raise self.refusal("outputs of one shape and dtype", "others")
        return [torch.stack(column) for column in zip(*rows, strict=True)], True

    def _one(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors among the outputs of one call."""
        # Views of views, at which each sample's gradient is copied before another call
        # runs, which may write it to the same memory.
        tensors = [item[None][0] if item.requires_grad else item for item in tensors]
        inputs = iter(tensors)
        leaves = [next(inputs) if isinstance(e, Tensor) else e for e in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        versions = [version_of(tensor) for tensor in tensors]
        try:
            with _Watch(self, tensors):
                output = self._function.apply(*args, **kwargs)
        finally:
            if versions != [version_of(tensor) for tensor in tensors]:
                raise self.refusal("arguments left as they are", "one written in place")
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        form = tree_map(lambda e: ... if isinstance(e, Tensor) else e, output)
        if self._form is None:
            self._form = form
        alike = repr(form) == repr(self._form)
        if not alike or any(type(leaf) not in _PLAIN for leaf in tree_leaves(form)):
            raise self.refusal(
                "tensors alone or values that all samples share", "others"
            )
        places = {memory(tensor) for tensor in tensors}
        if any(not e.requires_grad and memory(e) in places for e in outputs):
            raise self.refusal("outputs in memory of their own", "an argument's")
        return [output.clone() for output in outputs]  # so may the next call

    def output(self, tensors: Iterable[Tensor]) -> Any:
        """Return the output of one call with other tensors in it."""
        outputs = iter(tensors)
        return tree_map(lambda e: next(outputs) if e is ... else e, self._form)


class _Watch(TorchFunctionMode):
    """Refuses captured tensors of the loss, which would get no gradient."""

    def __init__(self, call: _Call, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self._call = call
        self._input_ids = {id(tensor) for tensor in inputs}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in among(args, kwargs):
            if id(tensor) in self._input_ids:
                continue
            if modes.is_wrapped(tensor) or self._call.is_parameter(tensor):
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
        defined = [grad for grad in grads if grad is not None]
        if 0 < len(defined) < len(grads):  # zeros would go on where one sample stops
            raise UnsupportedOp(
                "backward: expected an autograd.Function that returns gradients for "
                "all samples or for none, where it has no vmap rule that works, got "
                'None for some. Return zeros, or use strategy="loop".'
            )
        return torch.stack(defined) if defined else None


def _column(tensor: Tensor, mapped: bool, size: int) -> Sequence[Tensor]:
    """Return each sample's tensor, on memory that no other sample's call can write."""
    if not mapped:
        return [tensor.clone() for _ in range(size)] if size > 1 else [tensor]
    rows = _Rows.apply(tensor) if tensor.requires_grad else tensor.unbind()
    if not tensor.stride(0):
        return [row.clone() for row in rows]
    return [row.contiguous() for row in rows]
