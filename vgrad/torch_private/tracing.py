"""How ops are seen, and a graph of them becomes compiled code.

A `DispatchMode` sees all ops of torch below its transforms and autograd. `Tensors` is a
dictionary by identity, which keeps no tensor.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils.weak import TensorWeakRef
from torch.utils.weak import WeakTensorKeyDictionary as Tensors

__all__ = [
    "DispatchMode",
    "TensorWeakRef",
    "Tensors",
    "compiled",
    "dispatch_modes",
]

dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many modes see all ops of torch: a trace, fake tensors, a profiler of ops."""


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
    if all(tensor.device.type == "cpu" for tensor in inputs):
        patches["layout_optimization"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        return inductor.standalone_compile(
            graph,
            list(inputs),
            dynamic_shapes="from_example_inputs",
            options={"config_patches": patches},
        )
