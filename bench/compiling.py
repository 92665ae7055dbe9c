"""Contenders that are compiled, and all that the tables of `test_compiled.py` compare.

Plain SGD is compiled as one function of the parameters, its gradient included, which is
faster than a compiled loss with a backward pass behind it. `captures` is where reports
of `vgrad.compile` are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import vgrad
from bench.contenders import (
    CLIPPED,
    MAX_NORM,
    STRATEGY,
    Build,
    Contender,
    Grads,
    Run,
    functional,
)
from bench.models import Problem

SUM, STEP = "compiled clipped sum", "private step on Poisson draws"
"""The two things that are timed."""

BACKENDS = ("replay", "inductor", "auto", "cudagraph")
PLAIN = "plain-compiled"
INDUCTOR = (PLAIN, "vgrad-inductor", "vgrad-auto")
"""Contenders that take a minute or more to build."""

ON_GPU = ("vgrad-cudagraph",)


@dataclass(frozen=True)
class Compiled:
    """A run of what `vgrad.compile` returned."""

    run: Callable[..., Any]
    source: Any

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


def compiled(transform: Any, backend: str) -> Any:
    """Compile one of vgrad's transforms or steps.

    A replay is compared with eager mode at a few of thousands of calls, which no table
    counts; of compiled code the first comparison decides whether it is taken.
    """
    return vgrad.compile(transform, backend=backend, verify=backend != "replay")


def captures(run: Any) -> dict[str, Any]:
    """Sum up what a compiled contender reports; nothing of another one."""
    if not isinstance(run, Compiled):
        return {}
    report = run.source.reports()
    return {
        "captures": len(report),
        "redos": sum(capture.redos for capture in report),
        "nodes": sum(capture.nodes for capture in report),
        "capture_seconds": sum(capture.build_seconds for capture in report),
        "backends": sorted({capture.backend for capture in report}),
    }


def mean_gradient(problem: Problem) -> Callable[[Grads, Tensor, Tensor], Grads]:
    """Make the gradient of plain SGD as a function of the parameters."""

    def loss(params: Grads, x: Tensor, y: Tensor) -> Tensor:
        output = torch.func.functional_call(problem.model, params, (x,))
        return problem.mean_loss(output, y)

    return torch.func.grad(loss)


def compile_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile plain torch into one graph, recurrent nets included."""
    compiled = torch.compile(function, fullgraph=True, dynamic=False)

    def run(*args: Any) -> Any:
        with torch._dynamo.config.patch(allow_rnn=True):
            return compiled(*args)

    return run


def plain_compiled(problem: Problem) -> Run:
    """Forward and backward pass of plain SGD, compiled."""
    params = {name: p.detach() for name, p in problem.model.named_parameters()}
    gradient = compile_plain(mean_gradient(problem))
    return lambda x, y: gradient(params, x, y)


def vgrad_compiled(backend: str) -> Build:
    """Compile the clipped sum."""

    def build(problem: Problem) -> Run:
        loss, params, buffers = functional(problem)
        eager = vgrad.clipped_grad(
            loss, max_norm=MAX_NORM, strategy=STRATEGY, verify=False
        )
        compute = compiled(eager, backend)
        return Compiled(lambda x, y: compute(params, buffers, x, y).grads, compute)

    return build


def in_jax(name: str) -> Build:
    """Build a contender of `jax_peers.py`, if JAX is installed."""

    def build(problem: Problem) -> Run:
        from bench import jax_peers

        return jax_peers.CLIPPED[name](problem)

    return build


COMPILED = {
    PLAIN: Contender(plain_compiled, clips=False, per_shape=True),
    "vgrad": CLIPPED["vgrad"],
    **{
        f"vgrad-{backend}": Contender(vgrad_compiled(backend), per_shape=True)
        for backend in BACKENDS
    },
    **{name: CLIPPED[name] for name in ("vmap", "opacus-hooks", "opacus-ghost")},
    "jax-vmap": Contender(in_jax("vmap"), per_shape=True),
    "jax-privacy": Contender(in_jax("privacy"), per_shape=True),
}
