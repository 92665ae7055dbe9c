"""A whole optimizer step, update and apply, against torch's loop over parameters.

The parameters have the shapes of ResNet-50 and GPT-2 small, and there are a thousand
tiny tensors of ten elements, where all the time goes into calls. The gradients are
random and stay the same. Contenders are torch's own implementations, with the functions
of `torch.optim.functional` where torch has them, TorchOpt where it is installed, and
vgrad's pure step: eager, compiled, and with the old parameters and state donated. The
plain step is `torch.optim` with `foreach=False` and `fused=False`; a sample is a step.

Every contender makes three steps before it is timed, after which its parameters are
compared with the plain step's. With `--benchmark-disable` that is all, on small
tensors, and compiled code stays Python.

`peak_bytes` is the need of a step above parameters, gradients and state, in a fresh
process (`memory.py`), `memory_ratio` that number over the bytes of the parameters.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch

from bench import memory
from bench.measure import DEVICES, interleaved
from vgrad import optim
from vgrad.typing import Params

# Without this an unused fixture, as under --benchmark-disable, would be an error.
pytestmark = pytest.mark.filterwarnings("ignore")

SECONDS = 1.5
CHECKED_STEPS = 3
CLOSE = 1e-4
"""Largest norm of the difference in float32, relative to the way from the start."""

Shapes = list[tuple[int, ...]]


def resnet(
    width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000
) -> Shapes:
    """List the parameters of ResNet-50: bottlenecks in four stages."""

    def convolved(inputs: int, outputs: int, size: int) -> Shapes:
        return [(outputs, inputs, size, size), (outputs,), (outputs,)]

    shapes = convolved(3, width, 7)
    inputs = width
    for stage, count in enumerate(blocks):
        inner, outer = width * 2**stage, 4 * width * 2**stage
        for block in range(count):
            shapes += convolved(inputs, inner, 1) + convolved(inner, inner, 3)
            shapes += convolved(inner, outer, 1)
            shapes += convolved(inputs, outer, 1) if block == 0 else []
            inputs = outer
    return [*shapes, (classes, inputs), (classes,)]


def gpt2(
    width: int = 768, layers: int = 12, words: int = 50_257, positions: int = 1024
) -> Shapes:
    """List the parameters of GPT-2 small; the output shares the embedding."""
    norm: Shapes = [(width,), (width,)]
    layer = list(norm)
    layer += [(width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += norm
    layer += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(words, width), (positions, width), *layers * layer, *norm]


def tiny(count: int = 1000) -> Shapes:
    return [(10,)] * count


SHAPES = {"resnet-50": resnet(), "gpt-2 small": gpt2(), "1,000 tiny tensors": tiny()}
UNCOMPILED = "1,000 tiny tensors"
SMALL = {
    "resnet-50": resnet(width=2, blocks=(1,), classes=3),
    "gpt-2 small": gpt2(width=4, layers=1, words=11, positions=5),
    "1,000 tiny tensors": tiny(5),
}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.1, momentum=0.9)),
    "adam": (torch.optim.Adam, dict(lr=1e-3)),
    "adamw": (torch.optim.AdamW, dict(lr=1e-3, weight_decay=1e-2)),
}


class Problem(NamedTuple):
    """Parameters and gradients, which contenders read but never change."""

    params: Params
    grads: Params


@lru_cache(maxsize=1)
def problem(shapes: str, device: str, small: bool) -> Problem:
    generator = torch.Generator().manual_seed(0)

    def normal(scale: float) -> Params:
        return {
            str(index): scale * torch.randn(shape, generator=generator).to(device)
            for index, shape in enumerate((SMALL if small else SHAPES)[shapes])
        }

    return Problem(normal(0.02), normal(1.0))


class Contender(NamedTuple):
    """A step, and the parameters that all steps so far have led to."""

    step: Callable[[], Any]
    params: Callable[[], Params]


def torch_contender(**flags: bool) -> Callable[..., Contender]:
    """Build an implementation of `torch.optim`, chosen by its flags."""

    def build(optimizer: str, problem: Problem, backend: str) -> Contender:
        leaves = {
            name: p.clone().requires_grad_() for name, p in problem.params.items()
        }
        for name, leaf in leaves.items():
            leaf.grad = problem.grads[name]
        kind, options = OPTIMIZERS[optimizer]
        stepper = kind(list(leaves.values()), **options, **flags)
        return Contender(stepper.step, lambda: leaves)

    return build


def functional_contender(optimizer: str, problem: Problem, backend: str) -> Contender:
    """Build the step of `torch.optim.functional`, which writes into lists."""
    module = pytest.importorskip("torch.optim.functional", reason="torch is too old")
    options: dict[str, Any] = {"weight_decay": 0.0, "maximize": False}
    options |= OPTIMIZERS[optimizer][1]
    params = {name: p.clone() for name, p in problem.params.items()}
    into, grads = list(params.values()), list(problem.grads.values())
    if optimizer == "sgd":
        options |= dict(dampening=0.0, nesterov=False)
        state: tuple[list, ...] = ([None] * len(into),)
    else:
        options |= dict(amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8)
        means, squares = ([*map(torch.zeros_like, into)] for _ in range(2))
        state = means, squares, [], [torch.zeros(()) for _ in into]
    update = getattr(module, optimizer)
    return Contender(lambda: update(into, grads, *state, **options), lambda: params)


def torchopt_contender(optimizer: str, problem: Problem, backend: str) -> Contender:
    torchopt = pytest.importorskip("torchopt", reason="TorchOpt is not installed")
    tx = getattr(torchopt, optimizer)(**OPTIMIZERS[optimizer][1])
    params, state = problem.params, tx.init(problem.params)

    def step() -> None:
        nonlocal params, state
        updates, state = tx.update(problem.grads, state, params=params, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)

    return Contender(step, lambda: params)


def vgrad_contender(how: str) -> Callable[..., Contender]:
    """Build vgrad's step: eager, compiled or donated."""

    def build(optimizer: str, problem: Problem, backend: str) -> Contender:
        tx = getattr(optim, optimizer)(**OPTIMIZERS[optimizer][1])
        params = {name: p.clone() for name, p in problem.params.items()}
        state = tx.init(params)

        def update(grads: Params, state: Any, params: Params) -> tuple[Params, Any]:
            return optim.step(tx, grads, state, params, donate=how == "donated")

        if how == "compiled":
            update = torch.compile(update, fullgraph=True, backend=backend)

        def step() -> None:
            nonlocal params, state
            params, state = update(problem.grads, state, params)

        return Contender(step, lambda: params)

    return build


PLAIN = torch_contender(foreach=False, fused=False)
CONTENDERS = {
    "torch loop": PLAIN,
    "torch foreach": torch_contender(foreach=True),
    "torch fused": torch_contender(fused=True),
    "torch functional": functional_contender,
    "torchopt": torchopt_contender,
    "vgrad eager": vgrad_contender("eager"),
    "vgrad compiled": vgrad_contender("compiled"),
    "vgrad donated": vgrad_contender("donated"),
}


def peak(
    name: str, optimizer: str, shapes: str, device: str, backend: str
) -> dict[str, float]:
    """Measure the memory of a contender in this process."""
    contender = CONTENDERS[name](
        optimizer, problem(shapes, device, small=False), backend
    )
    contender.step()
    return memory.above_base(contender.step, device)


COUNTERPARTS = {
    "vgrad eager": "torchopt",
    "vgrad compiled": "torch foreach",
    "vgrad donated": "torch fused",
}
"""What each of ours has to be compared with: the one that works in the same way."""


def difference(result: Params, expected: Params, start: Params) -> float:
    """Norm of the difference over the norm of the way from the start."""

    def norm(one: Params, other: Params) -> float:
        return math.hypot(*(float((one[n] - other[n]).double().norm()) for n in start))

    with torch.no_grad():
        return norm(result, expected) / norm(expected, start)


def test_the_shapes_are_those_of_the_models() -> None:
    assert sum(map(math.prod, SHAPES["resnet-50"])) == 25_557_032
    assert len(SHAPES["resnet-50"]) == 161
    assert sum(map(math.prod, SHAPES["gpt-2 small"])) == 124_439_808
    assert len(SHAPES["gpt-2 small"]) == 148


@pytest.mark.parametrize("name", CONTENDERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("device", DEVICES)
def test_optimizer_step(
    benchmark: Any, device: str, shapes: str, optimizer: str, name: str
) -> None:
    benchmark.group = f"{optimizer} step, {shapes}, {device}"
    if name == "vgrad compiled" and shapes == UNCOMPILED and not benchmark.disabled:
        pytest.skip("compiling so many tensors takes more than eight minutes")
    task = problem(shapes, device, small=benchmark.disabled)
    backend = "eager" if benchmark.disabled else "inductor"
    torch.compiler.reset()
    contender = CONTENDERS[name](optimizer, task, backend)
    plain = PLAIN(optimizer, task, backend)
    for _ in range(CHECKED_STEPS):
        contender.step()
        plain.step()
    error = difference(contender.params(), plain.params(), task.params)
    assert error < CLOSE
    if benchmark.disabled:
        return
    interleaved(
        benchmark,
        contender.step,
        plain.step,
        device=device,
        samples=1,
        error=error,
        seconds=SECONDS,
    )
    if memory.measurable(device):
        usage = memory.in_fresh_process(peak, name, optimizer, shapes, device, backend)
        size = sum(p.numel() * p.element_size() for p in task.params.values())
        benchmark.extra_info.update(
            peak_bytes=usage["peak_bytes"],
            memory_ratio=usage["peak_bytes"] / size,
        )


@pytest.mark.parametrize("name", COUNTERPARTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("device", DEVICES)
def test_against_the_counterpart(
    benchmark: Any, device: str, shapes: str, optimizer: str, name: str
) -> None:
    """Interleaved, so that a few hundredths mean something; the plain step is it."""
    if benchmark.disabled:
        pytest.skip("test_optimizer_step has checked it")
    if name == "vgrad compiled" and shapes == UNCOMPILED:
        pytest.skip("compiling so many tensors takes more than eight minutes")
    other = COUNTERPARTS[name]
    benchmark.group = f"{optimizer} step / that of {other}, {shapes}, {device}"
    task = problem(shapes, device, small=False)
    torch.compiler.reset()
    contender = CONTENDERS[name](optimizer, task, "inductor")
    counterpart = CONTENDERS[other](optimizer, task, "inductor")
    for _ in range(CHECKED_STEPS):
        contender.step()
        counterpart.step()
    error = difference(contender.params(), counterpart.params(), task.params)
    assert error < CLOSE
    interleaved(
        benchmark,
        contender.step,
        counterpart.step,
        device=device,
        samples=1,
        error=error,
        seconds=2 * SECONDS,
    )
