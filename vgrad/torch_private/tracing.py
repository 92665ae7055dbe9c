"""How a function of tensors becomes a graph of ops, and a graph compiled code.

From torch/fx/experimental/proxy_tensor.py, torch/_guards.py and
torch/_inductor/__init__.py:

    traced      run a function once, and return all ops that it called as a graph
    untraced    a block whose ops leave nothing in the graph
    compiled    turn a graph into code for these shapes, without checks when called

From torch/utils/_python_dispatch.py, which torch documents in notes alone:

    DispatchMode   sees all ops of torch below its transforms and autograd

The first is documented as experimental (torch.fx.experimental), the last is what
`torch.compile` does once it has a graph. Public names for the two would end the need.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing as untraced
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = ["DispatchMode", "compiled", "dispatch_modes", "traced", "untraced"]

dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many modes see all ops of torch: a trace, fake tensors, a profiler of ops."""


def traced(function: Callable, *inputs: Tensor) -> fx.GraphModule:
    """Return the ops that a function calls, each with the shape of its result.

    torch keeps shapes as fake tensors, and makes a mode for each of them unless it
    finds one here; that took a third of the time.
    """
    mode = FakeTensorMode(allow_fallback_kernels=True, allow_non_fake_inputs=True)
    with tracing(TracingContext(mode)):
        return make_fx(function)(*inputs)


def compiled(
    graph: fx.GraphModule, inputs: Sequence[Tensor], *, small: bool
) -> Callable[..., Any]:
    """Compile a graph by Inductor for inputs of these shapes.

    Random ops stay torch's own, so that they draw the numbers of eager mode, and
    half precision is rounded after each op, as there. The kernels of a `small` graph
    are called from C++, and not from Python, and each runs on one thread: to wake up
    another takes longer than all that a kernel does.

    Tensors keep their layout on a CPU. Inductor would put the channels of all
    convolutions last, and then reduce over the pixels with large steps through memory,
    in one long sum: the norms around the convolutions and the layers' GroupNorm take up
    to a hundred times longer that way, at several times the error.
    """
    import torch._inductor as inductor

    patches = {"fallback_random": True, "emulate_precision_casts": True}
    if small:
        patches |= {"cpp_wrapper": True, "cpp.min_chunk_size": sys.maxsize}
    if all(each.device.type == "cpu" for each in inputs):
        patches["layout_optimization"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        return inductor.standalone_compile(
            graph,
            list(inputs),
            dynamic_shapes="from_example_inputs",
            options={"config_patches": patches},
        )
