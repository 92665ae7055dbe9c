"""Kernels that Inductor makes of a call on a GPU, counted without one.

Inductor takes the pretend accelerator of the tests for a GPU that has Triton, and fuses
a graph by its rules for GPUs. It is stopped before it writes code: its schedule has the
kernels. Products and convolutions, which are not Inductor's, are one kernel each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo import device_interface
from torch._inductor import config, ir, lowering, scheduler, utils
from torch._inductor.codegen import common, cpp_wrapper_gpu, triton, wrapper
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

NAME = "pretend"

H100 = SimpleNamespace(
    major=9,
    minor=0,
    name="H100",
    multi_processor_count=132,
    total_memory=80 * 2**30,
    warp_size=32,
    regs_per_multiprocessor=2**16,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    gcnArchName="",
)
"""The properties of a GPU on which Inductor's rules rest."""


class _Interface(device_interface.DeviceInterface):
    class Worker(device_interface.DeviceInterface.Worker):
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: H100)

    current_device = staticmethod(lambda: 0)
    get_device_properties = classmethod(lambda cls, device=None: H100)
    get_compute_capability = staticmethod(lambda device=None: 90)
    is_available = staticmethod(lambda: True)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    is_triton_capable = staticmethod(lambda device=None: True)
    synchronize = staticmethod(lambda device=None: None)


class _Scheduled(BaseException):
    """Raised when a graph is scheduled; no `except Exception` may take it."""


def kernels(run: Callable[[], Any]) -> int:
    """Count the kernels of a function that compiles one graph, on that device."""
    _register()
    counts: list[int] = []

    def count(self: Any) -> None:
        nodes = [
            node
            for node in self.nodes
            if not isinstance(node, scheduler.NopKernelSchedulerNode)
            # One of several results launches nothing.
            and not isinstance(node.node, ir.MultiOutput)
        ]
        counts.append(len(nodes))
        raise _Scheduled

    torch.compiler.reset()
    with _as_a_gpu(), mock.patch.object(scheduler.Scheduler, "codegen", count):
        try:
            run()
        except _Scheduled:
            return counts[0]
    raise RuntimeError("expected Inductor to schedule a graph; it had none")


@contextmanager
def _as_a_gpu() -> Iterator[None]:
    products = [getattr(torch.ops.aten, name).dtype for name in ("mm", "bmm", "addmm")]
    calls = {
        op: lowering.fallback_handler(op, add_to_fallback_set=False) for op in products
    }
    with (
        mock.patch.object(scheduler, "has_triton", return_value=True),
        mock.patch.object(utils, "GPU_TYPES", [*utils.GPU_TYPES, NAME]),
        mock.patch.object(utils, "is_big_gpu", return_value=False),
        mock.patch.dict(lowering.lowerings, calls),  # of which other GPUs have none
        config.patch(fx_graph_cache=False),
    ):
        yield


@cache
def _register() -> None:
    device_interface.register_interface_for_device(NAME, _Interface)
    wrappers = wrapper.PythonWrapperCodegen, cpp_wrapper_gpu.CppWrapperGpu
    common.register_backend_for_device(NAME, triton.TritonScheduling, *wrappers)
    common.register_device_op_overrides(NAME, CUDADeviceOpOverrides())
