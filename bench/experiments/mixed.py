"""Training under policies, as the experiments on mixed precision have it in common."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from bench.experiments.data import Images
from bench.experiments.drawing import COLOURS, MEBIBYTE, finish
from bench.experiments.measuring import peak_bytes, side_by_side, tree_bytes
from bench.measure import has_instructions
from vgrad.precision import DynamicLossScale, LossScale, Policy
from vgrad.training import TrainState

LABELS = {
    "float32": "float32",
    "tf32": "TF32",
    "mixed_bfloat16": "mixed_bfloat16",
    "mixed_float16": "mixed_float16",
    "float16": "half",
}
"""What figures call a policy; TF32 is float32 with another setting of torch."""

PARTS = ("parameters", "optimizer", "activations")
"""Into which memory is split; gradients and what ops need count as activations."""

MOST = 0.75
"""The share of float32's memory that a step in 16 bits may need above the state."""

CRITICAL = {2: 9.925, 3: 4.604}
"""Student's t for two groups of so many seeds, which chance exceeds in one of 100."""


SLOW = (
    "Left out: {}, in which this device has no instructions, or torch no kernels that "
    "use them for gradients of convolutions: times of emulation tell nothing."
)


def batches(images: Images, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end, each epoch in an order of its own."""
    source = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(images.x), generator=source).to(images.x.device)
        for at in order.split(size):
            if len(at) == size:
                yield images.x[at], images.y[at]


def on(images: Images, device: str) -> Images:
    """Move images to a device."""
    return images._replace(x=images.x.to(device), y=images.y.to(device))


def fast(policy: str, device: str) -> bool:
    """Whether a device trains under a policy at its own speed.

    Torch has no quick gradient of a float16 convolution on any CPU, even where the
    forward pass has instructions.
    """
    kind = device.partition(":")[0]
    if policy == "tf32":
        return kind == "cuda"
    precision = str(Policy.parse(policy).compute_dtype).removeprefix("torch.")
    if kind == "cpu" and precision == "float16":
        return False
    return has_instructions(kind, precision)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let float32 on CUDA be TF32 in here, or be float32, as torch's default is not."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul, convolutions = before
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32 = convolutions


class Steps:
    """One batch again and again; keeps the state.

    Attributes:
        state: after the steps so far.
    """

    def __init__(
        self, start: tuple[Callable, TrainState], batch: tuple, *, tf32: bool = False
    ) -> None:
        self._step, self.state = start
        self._batch, self._tf32 = batch, tf32

    def __call__(self) -> None:
        with tf32(self._tf32):
            self.state, _ = self._step(self.state, *self._batch)


def scale_for(policy: str) -> LossScale | None:
    """Return the scale that a policy is timed with: float16 alone needs one."""
    float16 = Policy.parse(policy).compute_dtype == torch.float16
    return DynamicLossScale() if float16 else None


def memory(steps: Steps, device: str) -> dict[str, int]:
    """Measure the state in bytes, and the need of a step above it."""
    steps()
    state = {
        "parameters": tree_bytes(steps.state.params),
        "optimizer": tree_bytes(steps.state.optimizer),
    }
    needed = peak_bytes(steps, device)  # which gives the state away
    return {
        **state,
        "activations": needed["peak_bytes"],
        "resident": needed.get("resident_bytes", 0),
    }


def times(
    start: Callable[[str], tuple[Callable, TrainState]],
    policies: list[str],
    batch: tuple,
    device: str,
    rounds: int,
) -> dict[str, Any]:
    """Measure a step under each policy that the device is made for, in turn."""
    quick = [
        policy for policy in ("float32", "tf32", *policies[1:]) if fast(policy, device)
    ]
    steps = {
        policy: Steps(
            start("float32" if policy == "tf32" else policy),
            batch,
            tf32=policy == "tf32",
        )
        for policy in quick
    }
    spent = side_by_side(steps, device, rounds=rounds)
    left_out = [policy for policy in policies if policy not in quick]
    return {"steps": spent, "left_out": left_out}


def numbers(values: list[float | None]) -> np.ndarray:
    """Return a curve, with NaN where it was not finite."""
    return np.array([np.nan if value is None else value for value in values], float)


def smoothed(values: list[float | None], window: int) -> np.ndarray:
    """Return the mean over each window of steps."""
    return np.convolve(numbers(values), np.ones(window) / window, mode="valid")


def allowed(first: np.ndarray, second: np.ndarray, floor: float) -> float:
    """Return how far the means of two groups may be from each other by chance."""
    count = len(first)
    pooled = math.sqrt((first.var(ddof=1) + second.var(ddof=1)) / 2)
    return CRITICAL[count] * pooled * math.sqrt(2 / count) + floor


def draw_memory(axes: Axes, measured: Mapping[str, Any]) -> None:
    """Draw a bar for each policy, split into the `PARTS`."""
    policies = measured["policies"]
    low = np.zeros(len(policies))
    names = [
        f"{LABELS[name]}\n{_kibibytes(row['parameters'])} + "
        f"{_kibibytes(row['optimizer'])} KiB"
        for name, row in policies.items()
    ]
    for part, colour in zip(PARTS, COLOURS[3:], strict=False):
        sizes = [row[part] / MEBIBYTE for row in policies.values()]
        axes.bar(names, sizes, 0.6, bottom=low, color=colour, label=part)
        low += sizes
    _label_bars(axes, low)
    title = f"Memory of a step\n{measured['what']}"
    finish(axes, title, "KiB: parameters + optimizer", "MiB (of float32's)")
    axes.legend(fontsize="small", ncols=len(PARTS), loc="upper right")


def draw_time(axes: Axes, timed: Mapping[str, Any]) -> None:
    """Draw a bar for each policy that was timed."""
    names = [LABELS[name] for name in timed["steps"]]
    took = np.array([1e3 * row["seconds"] for row in timed["steps"].values()])
    axes.bar(names, took, 0.5, color=COLOURS[: len(took)])
    _label_bars(axes, took)
    axes.set_xlim(-0.7, max(len(took), 3) - 0.3)
    if timed["left_out"]:
        left_out = ", ".join(LABELS[policy] for policy in timed["left_out"])
        text = f"not timed, as no kernels here\nare made for it: {left_out}"
        where = {"ha": "right", "va": "top", "transform": axes.transAxes}
        axes.text(0.98, 0.97, text, fontsize="small", color="0.3", **where)
    title = f"Time of a step\n{timed['what']}"
    finish(axes, title, "", "ms (of float32's)", legend=False)


def narrowed(figure: Figure) -> None:
    """Make room for two lines above each part of a figure."""
    for axes in figure.axes:
        axes.title.set_fontsize("medium")


def _label_bars(axes: Axes, heights: np.ndarray) -> None:
    """Write each bar's height above it, and what share of the first one's that is."""
    for at, height in enumerate(heights):
        shown = f"{height:,.0f}" if height >= 100 else f"{height:.3g}"
        text = f"{shown}\n({height / heights[0]:.2f})"
        axes.text(at, height, text, ha="center", va="bottom", fontsize="small")
    axes.set_ylim(0, 1.45 * max(heights))
    axes.tick_params(axis="x", labelsize="small")


def _kibibytes(size: int) -> str:
    return f"{size / 1024:,.0f}"


def check_memory(policies: Mapping[str, Mapping]) -> list[str]:
    """Assert that no step in 16 bits needs more than a share of what float32's does."""
    seen = []
    for policy, row in list(policies.items())[1:]:
        share = row["activations"] / policies["float32"]["activations"]
        text = f"A step under {LABELS[policy]} needs {share:.2f} of the memory above "
        text += f"the state that one in float32 does, at most {MOST}."
        assert share <= MOST, text
        seen.append(text)
    return seen


def memory_table(policies: Mapping[str, Mapping]) -> list[str]:
    """Return the lines of a table of memory."""
    lines = [
        "| policy | parameters (KiB) | optimizer (KiB) | activations (MiB) | of "
        "float32's | resident (MiB) |",
        "|---|---|---|---|---|---|",
    ]
    for policy, row in policies.items():
        share = row["activations"] / policies["float32"]["activations"]
        lines.append(
            f"| {LABELS[policy]} | {row['parameters'] / 1024:.1f} | "
            f"{row['optimizer'] / 1024:.1f} | {row['activations'] / MEBIBYTE:.1f} | "
            f"{share:.2f} | {row['resident'] / MEBIBYTE:.1f} |"
        )
    return lines


def time_table(timed: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of times, and a note on settings left out."""
    lines = [
        f"Time of a step, {timed['what']}; the policies take turns.",
        "",
        "| policy | ms | of float32's | CPU ms |",
        "|---|---|---|---|",
    ]
    base = timed["steps"]["float32"]["seconds"]
    for name, row in timed["steps"].items():
        lines.append(
            f"| {LABELS[name]} | {1e3 * row['seconds']:.1f} | "
            f"{row['seconds'] / base:.2f} | {1e3 * row['cpu_seconds']:.1f} |"
        )
    if timed["left_out"]:
        names = ", ".join(LABELS[policy] for policy in timed["left_out"])
        lines += ["", SLOW.format(names)]
    return lines
