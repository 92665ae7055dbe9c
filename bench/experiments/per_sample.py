"""Per-sample gradients: a loop, `vmap(grad)`, functorch and vgrad against batch size.

SimpleCNN on 28 x 28 images, as in the article on functorch, which found `vmap` 4 to 9
times as fast as a loop on GPUs of its time.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

import vgrad
from bench.experiments import drawing
from bench.experiments.measuring import peak_bytes, side_by_side
from bench.experiments.study import Piece, Place, Result, Results, Show, Study
from bench.test_per_sample import GRADIENTS, Gradients, Setting
from tests import oracle

EQUAL = "equality"
EXACT = 1e-8
CHECKED_SAMPLES = 4
ARTICLE = (4, 9)
"""Speed-up of `vmap` over a loop in the article."""


def functorch_gradients(setting: Setting) -> Gradients:
    """Use what functorch called `make_functional_with_buffers`, now deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import functorch

        fmodel, params, buffers = functorch.make_functional_with_buffers(setting.model)

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(fmodel(params, buffers, x[None]), y[None])

    names = [name for name, _ in setting.model.named_parameters()]
    mapped = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def run() -> dict[str, Tensor]:
        grads = mapped(params, setting.x, setting.y)
        return dict(zip(names, grads, strict=True))

    return run


def compiled_gradients(setting: Setting) -> Gradients:
    """Capture vgrad's call as a graph."""
    compute = vgrad.compile(vgrad.per_sample_grad(setting.loss))
    return lambda: compute(setting.params, setting.buffers, setting.x, setting.y)


MADE: dict[str, Callable[[Setting], Gradients]] = {
    "loop": GRADIENTS["loop"],
    "vmap(grad)": GRADIENTS["vmap"],
    "functorch": functorch_gradients,
    "vgrad": GRADIENTS["vgrad"],
    (COMPILED := "vgrad, compiled"): compiled_gradients,
}


def pieces(place: Place) -> list[Piece]:
    """See that all are equal, then one piece for each batch size."""
    sizes = place.pick(
        tiny=[2, 4], small=[16, 32, 64, 128, 256], full=[16, 64, 256, 512, 1024]
    )
    rounds = place.pick(tiny=1, small=5, full=15)
    timed = [
        Piece(f"B = {samples}", partial(_timed, place, samples, rounds))
        for samples in sizes
    ]
    return [Piece(EQUAL, partial(_errors, place)), *timed]


def _errors(place: Place, show: Show) -> Result:
    """Compare all contenders with a loop in float64."""
    setting = Setting(place.device, torch.float64, CHECKED_SAMPLES)

    def loss(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(model(x), y)

    batch = setting.x, setting.y
    exact = oracle.model_gradients(setting.model, loss, batch, CHECKED_SAMPLES)
    return {name: oracle.error(make(setting)(), exact) for name, make in MADE.items()}


def _timed(place: Place, samples: int, rounds: int, show: Show) -> Result:
    setting = Setting(place.device, torch.float32, samples)
    runs = {name: make(setting) for name, make in MADE.items()}
    times = side_by_side(runs, place.device, rounds=rounds)
    for done, (name, run) in enumerate(runs.items(), start=1):
        # The counter of tensors is a mode, and under modes no graph runs.
        if name != COMPILED or place.device != "cpu":
            times[name] |= peak_bytes(run, place.device)
        show(done / len(runs))
    return {"samples": samples, "contenders": times}


def check(results: Results) -> list[str]:
    """See that all contenders are equal to a loop in float64."""
    for name, error in results[EQUAL].items():
        assert error < EXACT, f"{name}: relative error {error:.2g} in float64"
    worst = max(results[EQUAL].values())
    return [
        f"all contenders equal a loop in float64 to {worst:.1g} of the largest entry"
    ]


def table(results: Results) -> str:
    """Milliseconds and speed-up over the loop, MiB."""
    sizes = [result for name, result in results.items() if name != EQUAL]
    times, memory = [], []
    for result in sizes:
        rows = result["contenders"].values()
        loop = result["contenders"]["loop"]["seconds"]
        row = [(1e3 * one["seconds"], loop / one["seconds"]) for one in rows]
        times.append([result["samples"], *(f"{t:.3g} ({gain:.1f})" for t, gain in row)])
        peaks = [one.get("peak_bytes") for one in rows]
        cells = ["" if b is None else f"{b / drawing.MEBIBYTE:.0f}" for b in peaks]
        memory.append([result["samples"], *cells])
    head = ["B", *MADE]
    times, memory = drawing.markdown(head, times), drawing.markdown(head, memory)
    return (
        f"Milliseconds a batch, and in brackets how many times as fast as the loop:"
        f"\n\n{times}\n\nPeak memory, MiB:\n\n{memory}"
    )


def draw(results: Results, figure: Figure) -> None:
    """Draw time, speed-up and memory against batch size."""
    time, gain, memory = figure.subplots(1, 3)
    batches = [result for name, result in results.items() if name != EQUAL]
    sizes = [result["samples"] for result in batches]
    for number, name in enumerate(MADE):
        rows = [result["contenders"][name] for result in batches]
        loop = [result["contenders"]["loop"]["seconds"] for result in batches]
        seconds = [one["seconds"] for one in rows]
        drawing.line(time, sizes, [1e3 * s for s in seconds], name, number)
        gains = [a / b for a, b in zip(loop, seconds, strict=True)]
        if name != "loop":
            drawing.line(gain, sizes, gains, name, number)
        if "peak_bytes" in rows[0]:
            peaks = [one["peak_bytes"] / drawing.MEBIBYTE for one in rows]
            drawing.line(memory, sizes, peaks, name, number)
    for axes in (time, gain, memory):
        drawing.by_powers(axes, sizes)
    time.set_yscale("log")
    memory.set_yscale("log")
    gain.axhspan(*ARTICLE, color="0.9", label="vmap in the article, on GPUs")
    gain.set_ylim(bottom=0)
    drawing.finish(time, "time", "batch size", "ms")
    drawing.finish(gain, "speed-up over the loop", "batch size", "times as fast")
    drawing.finish(memory, "peak memory", "batch size", "MiB", legend=False)


STUDY = Study(
    "Per-sample gradients of SimpleCNN, random 28 x 28 images",
    pieces,
    check,
    table,
    draw,
    figsize=(13, 4.2),
)
