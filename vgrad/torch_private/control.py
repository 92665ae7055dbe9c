"""Ops of control flow, and functions that `torch.compile` has made, as plain Python.

`torch.cond` and its like compile a function that calls one op. As it was written, that
function hands the op, and the user's functions in it, to function modes.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.associative_scan import associative_scan_op_dense
from torch._higher_order_ops.flex_attention import sdpa_dense
from torch._higher_order_ops.map import map_dense
from torch._higher_order_ops.while_loop import while_loop_dense

from vgrad.torch_private.modes import inside_transform


class _Kernel:
    """Stands for the mode of fake tensors of a trace, or for none."""

    in_kernel_invocation, shape_env = True, None

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def __bool__(self) -> bool:
        return self._mode is not None

    def __enter__(self) -> Any:
        return self._mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._mode.__exit__(*raised)


def uncompiled() -> AbstractContextManager:
    """Run functions that `torch.compile` has made as written, in a thread's block."""
    # Dynamo would trace the mode around them, and lose levels of transforms. It leaves
    # the kernels of fake tensors alone, by a context of this thread, where
    # `torch.compiler.set_stance` is one of all (torch/_dynamo/eval_frame.py).
    around = TracingContext.try_get()
    mode = None if around is None else around.fake_mode
    return tracing(_ALONE if mode is None else TracingContext(_kernel(mode)))


_kernel: Any = _Kernel
_ALONE = TracingContext(_kernel(None))


def _scan(combine_fn: Callable, init: Any, xs: Any, more: Any) -> list[Any]:
    rows, carry, outputs = [*zip(*xs, strict=True)], init, []
    # Without any, one of zeros has the shapes of what there would be.
    for elements in rows or [[x.new_zeros(x.shape[1:]) for x in xs]]:
        both = [*combine_fn(*carry, *elements, *more)]
        carry = both[: len(init)]
        outputs.append(both[len(init) :])
    stacked = map(torch.stack, zip(*outputs, strict=True))
    return [*carry, *stacked] if rows else [*init, *(output[:0] for output in stacked)]


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    if inside_transform():  # torch sums gradients over all that vmap maps over
        raise NotImplementedError(
            "flex_attention: expected attention that vmap can run, got one by a "
            'score_mod. Use scaled_dot_product_attention, or strategy="loop".'
        )
    return sdpa_dense(*args, **kwargs)


_OPS: Any = torch.ops.higher_order

CONTROL_FLOW: Mapping[Any, Callable] = {
    _OPS.cond: lambda pred, yes, no, operands: (yes if pred else no)(*operands),
    _OPS.while_loop: while_loop_dense,
    _OPS.scan: _scan,
    _OPS.map_impl: map_dense,
    _OPS.associative_scan: associative_scan_op_dense,
    _OPS.flex_attention: _flex_attention,
    _OPS.strict_mode: lambda function, operands: function(*operands),
}
"""The semantics that torch documents, in Python."""
