"""Ops of control flow, and functions that `torch.compile` has made, as plain Python.

`torch.cond` and its like compile a function that calls one op. As it was written, that
function hands the op, and the user's functions in it, to function modes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.associative_scan import generic_associative_scan
from torch._higher_order_ops.flex_attention import sdpa_dense

from vgrad.torch_private.modes import inside_transform

_OPS: Any = torch.ops.higher_order


class _Kernel:
    """Stands for the mode of fake tensors of a context, if it has one."""

    in_kernel_invocation = True
    shape_env = None

    def __init__(self, mode: Any = None) -> None:
        self._mode = mode

    def __bool__(self) -> bool:
        return self._mode is not None

    def __enter__(self) -> Any:
        return self._mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._mode.__exit__(*raised)


_ALONE = TracingContext(_Kernel())


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run functions that `torch.compile` has made as written, in this thread's block.

    Dynamo would trace the mode around them, and lose levels of transforms.
    """
    # It compiles nothing inside of the kernel of a fake tensor, as a thread's context
    # says: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/eval_frame.py#L1096
    # `torch.compiler.set_stance` would say so for all threads.
    around, context = TracingContext.try_get(), _ALONE
    if around is not None and around.fake_mode is not None:
        context = TracingContext(_Kernel(around.fake_mode))
    with tracing(context):
        yield


def as_written(function: Any) -> Any:
    """Return the function that `torch.compile` has made another of, or itself."""
    # Wrappers of users may have its attributes, from `functools.wraps`.
    if not isinstance(function, FunctionType):
        return function
    compiled = function.__globals__.get("__name__") == _DYNAMO
    return getattr(function, _ORIGINAL, function) if compiled else function


_DYNAMO, _ORIGINAL = "torch._dynamo.eval_frame", "_torchdynamo_orig_callable"


def _cond(pred: Any, true_fn: Callable, false_fn: Callable, operands: Any) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _while_loop(cond_fn: Callable, body_fn: Callable, carried: Any, more: Any) -> Any:
    carried = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in carried)
    while cond_fn(*carried, *more):
        carried = body_fn(*carried, *more)
    return carried


def _scan(combine_fn: Callable, init: Any, xs: Any, more: Any) -> list:
    carry, rows = init, []
    for elements in zip(*xs, strict=True):
        output = list(combine_fn(*carry, *elements, *more))
        carry, row = output[: len(init)], output[len(init) :]
        rows.append(row)
    return [*carry, *map(torch.stack, zip(*rows, strict=True))]


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    if inside_transform():
        raise NotImplementedError(
            "flex_attention: expected attention that vmap can run, got one whose "
            "gradients of tensors in score_mod torch would sum over samples. Use "
            'scaled_dot_product_attention, or strategy="loop".'
        )
    return sdpa_dense(*args, **kwargs)


def _map(function: Callable, xs: Any, more: Any) -> Any:
    outputs = [function(*elements, *more) for elements in zip(*xs, strict=True)]
    return torch.utils._pytree.tree_map(lambda *each: torch.stack(each), *outputs)


CONTROL_FLOW: Mapping[Any, Callable] = {
    _OPS.cond: _cond,
    _OPS.while_loop: _while_loop,
    _OPS.scan: _scan,
    _OPS.map_impl: _map,
    _OPS.associative_scan: lambda combine_fn, xs, more: generic_associative_scan(
        combine_fn, xs, additional_inputs=more
    ),
    _OPS.flex_attention: _flex_attention,
    _OPS.strict_mode: lambda function, operands: function(*operands),
}
"""The semantics that torch documents for ops of control flow, with Python's own."""
