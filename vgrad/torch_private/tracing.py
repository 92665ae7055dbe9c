"""How a function of tensors becomes a graph of ops, and a graph compiled code.

`untraced` is a block whose ops leave nothing in the graph. A `DispatchMode` sees all
ops of torch below its transforms and autograd.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing as untraced
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = [
    "DispatchMode",
    "compiled",
    "dispatch_modes",
    "fake",
    "traced",
    "untraced",
]

dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many modes see all ops of torch: a trace, fake tensors, a profiler of ops."""


def traced(function: Callable, *inputs: Tensor) -> fx.GraphModule:
    """Return the ops that a function calls, each with the shape of its result."""
    # torch keeps shapes as fake tensors, and makes a mode for each of them unless it
    # finds one here; that took a third of the time.
    mode = FakeTensorMode(allow_fallback_kernels=True, allow_non_fake_inputs=True)
    with tracing(TracingContext(mode)):
        # Without a table, torch 2.15 leaves `detach` out, at which derivatives end.
        return make_fx(function, decomposition_table={})(*inputs)


def fake(tensor: Tensor, graph: fx.Graph) -> Tensor:
    """Return a tensor without values, as the nodes of a traced graph have them."""
    values = (node.meta.get("val") for node in graph.nodes)
    modes = (each.fake_mode for each in values if isinstance(each, FakeTensor))
    if (mode := next(modes, None)) is None:
        return tensor.to("meta")
    return mode.from_tensor(tensor)


def compiled(
    graph: fx.GraphModule, inputs: Sequence[Tensor], *, small: bool
) -> Callable[..., Any]:
    """Compile a graph by Inductor for inputs of these shapes, which no call checks."""
    import torch._inductor as inductor

    # Random ops draw the numbers of eager mode, and half precision is rounded after
    # each op, as there.
    patches = {"fallback_random": True, "emulate_precision_casts": True}
    if small:  # called from C++, on one thread: to wake up another takes longer
        patches |= {"cpp_wrapper": True, "cpp.min_chunk_size": sys.maxsize}
    # Inductor would put the channels of convolutions last and reduce over the pixels in
    # one long sum: norms take up to a hundred times longer, at several times the error.
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
