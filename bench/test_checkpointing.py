"""Time and memory of a GPT whose blocks are checkpointed, over those without.

12 layers, width 192, T=256, 8 samples. `ratio_to_plain` and `memory_ratio` compare with
the same transform of the model without checkpoints, two passes with one pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgrad
from bench import memory
from bench.case import memory_of
from bench.measure import interleaved
from bench.models import tokens
from tests import oracle

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, SAMPLES = 2000, 256, 192, 4, 12, 8
ROUNDS = 5


class Block(tokens.Block):
    """A block that keeps nothing but its input until the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def problem(checkpointed: bool) -> tuple[Callable, tuple]:
    """Make the loss, and the arguments of its transforms."""
    torch.manual_seed(0)
    model = tokens.GPT(VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS)
    for block in model.modules():
        if checkpointed and type(block) is tokens.Block:
            block.__class__ = Block
    fmodel, params, buffers = vgrad.make_functional_with_buffers(
        model, disable_autograd_tracking=True
    )
    text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    return vgrad.sample_loss(fmodel, loss), (params, buffers, text[:, :-1], text[:, 1:])


def norm(loss: Callable, arguments: tuple) -> Any:
    return {"": vgrad.per_sample_norm(loss, verify=False)(*arguments)}


def weighted(loss: Callable, arguments: tuple) -> Any:
    return vgrad.weighted_grad(loss)(torch.full((SAMPLES,), 0.1), *arguments)


def clipped(loss: Callable, arguments: tuple, passes: Any = 1) -> Any:
    return vgrad.clipped_grad(loss, max_norm=1.0, passes=passes, verify=False)(
        *arguments
    ).grads


TRANSFORMS = {
    "norm": (norm, norm),
    "weighted sum": (weighted, weighted),
    "clipped sum": (clipped, clipped),
    "clipped sum, two passes": (partial(clipped, passes=2), clipped),
}


def peak(name: str, checkpointed: bool) -> int:
    """Measure the memory of one of them, in this process."""
    run, plain = TRANSFORMS[name]
    run = partial(run if checkpointed else plain, *problem(checkpointed))
    run()
    return memory.above_base(run, "cpu")["peak_bytes"]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_checkpointed(benchmark: Any, name: str) -> None:
    benchmark.group = "activation checkpoints, GPT of 12 layers, T=256"
    run, plain = TRANSFORMS[name]
    run, plain = partial(run, *problem(True)), partial(plain, *problem(False))
    error = oracle.error(run(), plain())
    assert error < 1e-5
    interleaved(
        benchmark,
        run,
        plain,
        device="cpu",
        samples=SAMPLES,
        error=error,
        rounds=ROUNDS,
    )
    if not benchmark.disabled and memory.measurable("cpu"):
        peaks = [memory.in_fresh_process(peak, name, on) for on in (True, False)]
        benchmark.extra_info.update(memory_of(*peaks))
