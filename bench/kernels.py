"""Kernels of a call that Inductor compiles, counted in the code that it makes.

Nothing is compiled: the code is taken as soon as it is written. Without a GPU it is
code for a CPU, where Inductor puts neighbouring loops into one function; on a GPU each
group of loops is a kernel. So two numbers are counted: functions of the generated code
that are called, and groups of loops, each with the calls of kernels that are not
Inductor's (products, convolutions).
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._inductor import config, graph, ir, scheduler

CALL = re.compile(r"(?<!void )(?<!void  )\bcpp_fused\w*\(")


class Kernels(NamedTuple):
    """Functions that are called, and groups of loops, each with the calls of others."""

    functions: int
    groups: int


class _Written(BaseException):
    """Raised when the code is there; no `except Exception` may take it."""


def kernels(run: Callable[[], Any]) -> Kernels:
    """Count the kernels of a function that compiles, and then runs, one graph."""
    groups, calls = 0, 0
    code: list[str] = []
    generate = scheduler.Scheduler.codegen

    def count(self: Any) -> None:
        nonlocal groups, calls
        for node in self.nodes:
            if isinstance(node, scheduler.NopKernelSchedulerNode):
                continue
            if isinstance(node, scheduler.ExternKernelSchedulerNode):
                # One of several results launches nothing.
                calls += not isinstance(node.node, ir.MultiOutput)
            else:
                groups += 1
        generate(self)

    def written(text: str) -> None:
        code.append(text)
        raise _Written

    caught = staticmethod(written)
    torch.compiler.reset()
    with (
        mock.patch.object(scheduler.Scheduler, "codegen", count),
        mock.patch.object(graph.GraphLowering, "save_output_code", caught),
        config.patch(fx_graph_cache=False),
    ):
        try:
            run()
        except _Written:
            functions = len(CALL.findall(code[0]))
            return Kernels(functions + calls, groups + calls)
    raise RuntimeError("expected Inductor to write code; it wrote none")
