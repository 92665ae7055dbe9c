"""A CNN in mixed precision, as with haiku and jmp: memory, time, losses, loss scales.

A batch whose step was skipped comes again, so that the k-th step that was taken has the
same batch under every policy, and losses can be compared step by step.

Reference: Babuschkin et al., The DeepMind JAX Ecosystem, 2020; Micikevicius et al.,
Mixed Precision Training, arXiv 1710.03740.
"""

from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch.nn import functional as F

import vgrad
from bench.experiments import data, mixed, nets
from bench.experiments.drawing import COLOURS, finish
from bench.experiments.mixed import LABELS
from bench.experiments.study import Piece, Place, Result, Results, Show, Study, number
from vgrad.precision import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    Policy,
    StaticLossScale,
    policy_for,
)
from vgrad.training import TrainState, train_step

POLICIES = ["float32", "mixed_bfloat16", "mixed_float16", "float16"]
SCALES = ("NoOp", "Static", "Dynamic")
HIGHEST = 2.0**24
"""Where the dynamic scale starts: the gradients of no net are finite with it."""
SEEDS = 3
RATE = 2e-3


class Size(NamedTuple):
    """Images of a side, a net of a width (its first channels), samples of a batch."""

    side: int
    width: int
    batch: int

    def summary(self, title: str) -> str:
        """Say in words what is trained on what."""
        widths = "-".join(str(self.width * 2**step) for step in range(3))
        return f"CNN of {widths} channels, batch {self.batch}, {title}"


def scale(kind: str, steps: int) -> LossScale:
    """Return a loss scale; the dynamic one starts too high."""
    return {
        "NoOp": NoOpLossScale(),
        "Static": StaticLossScale(2.0**10),
        "Dynamic": DynamicLossScale(HIGHEST, period=max(4, steps // 10)),
    }[kind]


def start(
    policy: str,
    width: int,
    images: data.Images,
    *,
    seed: int = 0,
    scale: LossScale | None,
) -> tuple[Callable, TrainState]:
    """Return a step and its first state; `float16` keeps parameters in it, too."""
    build = partial(nets.cnn, images.classes, width=width)
    model = nets.seeded(build, seed).to(images.x.device)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    chosen = Policy.parse(policy)
    loss = vgrad.batch_loss(policy_for(fmodel, chosen), F.cross_entropy)
    tx = vgrad.optim.adamw(RATE)
    params = chosen.cast(params, to="param")
    state = TrainState.create(tx, params, buffers, seed=seed, loss_scale=scale)
    return train_step(loss, tx, loss_scale=scale, donate=True), state


def curve(
    place: Place, size: Size, steps: int, policy: str, kind: str, seed: int, show: Show
) -> Result:
    """Train until so many steps were taken, or three times as many were skipped."""
    images = _images(place, size)
    batches = mixed.batches(images, size.batch, seed)
    step, state = start(policy, size.width, images, seed=seed, scale=scale(kind, steps))
    losses: list[float | None] = []
    scales, skipped = [], []
    batch = next(batches)
    while len(losses) < steps and sum(skipped) < 3 * steps:
        with mixed.tf32(False):
            state, metrics = step(state, *batch)
        scales.append(float(metrics.get("loss_scale", 1.0)))
        skipped.append(int(metrics.get("skipped", 0)))
        if not skipped[-1]:
            losses.append(number(metrics["loss"]))
            batch = next(batches)
            show(len(losses) / steps)
    return {
        "what": size.summary(images.title),
        "policy": policy,
        "scale": kind,
        "seed": seed,
        "losses": losses,
        "scales": scales,
        "skipped": skipped,
    }


def memory(place: Place, size: Size, show: Show) -> Result:
    """Measure a step under each policy."""
    images = _images(place, size)
    by_policy = {}
    for done, policy in enumerate(POLICIES):
        started = start(policy, size.width, images, scale=mixed.scale_for(policy))
        batch = next(mixed.batches(images, size.batch, 0))
        with mixed.tf32(False):
            by_policy[policy] = mixed.memory(mixed.Steps(started, batch), place.device)
        show((done + 1) / len(POLICIES))
    return {"what": size.summary(images.title), "policies": by_policy}


def time(place: Place, size: Size, rounds: int, show: Show) -> Result:
    """Time a step under each policy that the device is made for."""
    images = _images(place, size)
    batch = next(mixed.batches(images, size.batch, 0))

    def begin(policy: str) -> tuple[Callable, TrainState]:
        return start(policy, size.width, images, scale=mixed.scale_for(policy))

    times = mixed.times(begin, POLICIES, batch, place.device, rounds)
    return {"what": size.summary(images.title), **times}


def pieces(place: Place) -> list[Piece]:
    """Memory and time at one size, curves at another, where it has to be smaller."""
    tiny, article = Size(16, 4, 8), Size(128, 32, 256)
    remembered = place.pick(tiny=Size(32, 4, 8), small=Size(128, 16, 2), full=article)
    timed = place.pick(tiny=tiny, small=Size(128, 32, 8), full=article)
    trained = place.pick(tiny=tiny, small=Size(32, 4, 16), full=article)
    rounds = place.pick(tiny=1, small=9, full=30)
    steps = place.pick(tiny=16, small=100, full=300)
    runs = [("mixed_bfloat16", "NoOp", 0), ("mixed_float16", "Dynamic", 0)]
    runs += [("float32", "NoOp", seed) for seed in range(SEEDS)]
    low = [(policy, kind) for policy in ("mixed_float16", "float16") for kind in SCALES]
    runs += [(*pair, 0) for pair in low if (*pair, 0) not in runs]
    return [
        Piece("memory", partial(memory, place, remembered)),
        Piece("time", partial(time, place, timed, rounds)),
        *(
            Piece(_name(*run), partial(curve, place, trained, steps, *run))
            for run in runs
        ),
    ]


def check(results: Results) -> list[str]:
    """Losses coincide, scales fall and rise, memory is as small as it should be."""
    policies = results["memory"]["policies"]
    full, half = policies["float32"], policies["float16"]
    seen = [*_check_losses(results), *_check_scales(results)]
    seen += mixed.check_memory(policies)
    assert 2 * half["parameters"] == full["parameters"], "half parameters"
    seen.append("The parameters of half are half as large as float32's.")
    return seen


def apart(results: Results, name: str, other: str = "float32, NoOp, seed 0") -> float:
    """Return the mean distance of two smoothed curves, relative to the second."""
    curves = [results[key]["losses"] for key in (name, other)]
    window = max(1, len(curves[1]) // 10)
    first, second = (mixed.smoothed(curve, window) for curve in curves)
    if len(first) != len(second):
        return np.inf
    return float(np.abs(first - second).mean() / second.mean())


def _check_losses(results: Results) -> list[str]:
    """Assert that mixed policies change less than the seed does."""
    seeds = [name for name in results if name.startswith("float32, ")]
    spread = np.mean([apart(results, *pair) for pair in combinations(seeds, 2)])
    seen = [f"Losses of float32 with different seeds are {spread:.4f} apart on average"]
    for name, result in results.items():
        if not str(result.get("policy")).startswith("mixed"):
            continue
        gap = apart(results, name)
        assert gap <= spread / 2, (
            f"the losses of {name} are {gap:.4f} from float32's, the spread over seeds "
            f"is {spread:.4f}"
        )
        seen.append(f"those of {name} are {gap:.4f} from float32's")
    first, last = _ends(results["float32, NoOp, seed 0"]["losses"])
    assert last < first, f"the loss went from {first:.3f} to {last:.3f}"
    seen.append(f"the loss of float32 went from {first:.3f} to {last:.3f}.")
    return ["; ".join(seen)]


def _check_scales(results: Results) -> list[str]:
    """Assert that dynamic scales fall until steps are taken, and rise later on."""
    seen = []
    for policy in ("mixed_float16", "float16"):
        name = _name(policy, "Dynamic", 0)
        result = results[name]
        scales, skipped = result["scales"], result["skipped"]
        falls = skipped.index(0)
        rises = sum(b > a for a, b in pairwise(scales))
        assert scales[0] == HIGHEST, f"{name}: the scale starts at {scales[0]}"
        assert falls > 0, f"{name}: no step was skipped first"
        assert scales[falls] == HIGHEST / 2**falls, f"{name}: the scale fell otherwise"
        assert rises > 0, f"{name}: the scale never rose"
        lost = [loss for loss in result["losses"] if loss is None]
        assert not lost, f"{name}: {len(lost)} losses were not finite"
        seen.append(
            f"{LABELS[policy]}: the dynamic scale fell from {HIGHEST:.0f} to "
            f"{scales[falls]:.0f} in {falls} skipped steps, rose {rises} times later "
            f"and skipped {sum(skipped) - falls} more of {len(skipped)} steps."
        )
    return seen


def table(results: Results) -> str:
    """Memory and time of a step, then losses and skipped steps."""
    needs, timed = results["memory"], results["time"]
    lines = [
        f"Memory of a step, {needs['what']}; activations are all that it needs above "
        f"the state.",
        "",
        *mixed.memory_table(needs["policies"]),
    ]
    lines += ["", *mixed.time_table(timed), "", "| run | first loss | last loss | "]
    lines[-1] += "from float32's | steps | skipped | last scale |"
    lines.append("|---|---|---|---|---|---|---|")
    for name, result in results.items():
        if "losses" not in result:
            continue
        first, last = _ends(result["losses"])
        lines.append(
            f"| {name} | {first:.3f} | {last:.3f} | {apart(results, name):.4f} | "
            f"{len(result['skipped'])} | {sum(result['skipped'])} | "
            f"{result['scales'][-1]:.0f} |"
        )
    return "\n".join(lines)


def draw(results: Results, figure: Figure) -> None:
    """Losses, scales, memory and time."""
    (losses, scales), (memory, time) = figure.subplots(2, 2)
    _draw_losses(results, losses)
    _draw_scales(results, scales)
    mixed.draw_memory(memory, results["memory"])
    mixed.draw_time(time, results["time"])
    mixed.narrowed(figure)


def _draw_losses(results: Results, axes: Axes) -> None:
    """Draw the run of each policy that suits it, and the spread over seeds."""
    seeds = [name for name in results if name.startswith("float32, ")]
    curves = [results[name]["losses"] for name in seeds]
    window = max(1, len(curves[0]) // 10)
    bands = np.array([mixed.smoothed(curve, window) for curve in curves])
    at = np.arange(bands.shape[1]) + window
    low, high = bands.min(0), bands.max(0)
    label = f"float32, {len(seeds)} seeds"
    axes.fill_between(at, low, high, color="0.85", label=label)
    shown = [("float32", "NoOp"), ("mixed_bfloat16", "NoOp")]
    shown += [("mixed_float16", "Dynamic"), ("float16", "Dynamic"), ("float16", "NoOp")]
    for place, (policy, kind) in enumerate(shown):
        name = _name(policy, kind, 0)
        values = mixed.smoothed(results[name]["losses"], window)
        label = f"{LABELS[policy]}, {kind}"
        if policy != "float32":
            label += f": {100 * apart(results, name):.2g} % off"
        style = ("-", "--", ":", "-.", (0, (1, 3)))[place]
        colour = COLOURS[POLICIES.index(policy)]
        at = np.arange(len(values)) + window
        axes.plot(at, values, color=colour, linestyle=style, label=label)
    setup = results["float32, NoOp, seed 0"]["what"]
    title = f"Losses (mean of {window}) and their distance from float32's\n{setup}"
    finish(axes, title, "steps that were taken", "cross entropy")


def _draw_scales(results: Results, axes: Axes) -> None:
    """Draw the dynamic scales, with a mark at each skipped step."""
    for policy in ("mixed_float16", "float16"):
        result = results[_name(policy, "Dynamic", 0)]
        scales, skipped = np.array(result["scales"]), np.array(result["skipped"]) > 0
        at, colour = np.arange(1, len(scales) + 1), COLOURS[POLICIES.index(policy)]
        axes.step(at, scales, where="mid", color=colour, label=LABELS[policy])
        axes.plot(at[skipped], scales[skipped], "x", color=colour)
    axes.plot([], [], "x", color="0.4", label="skipped: not finite")
    axes.set_yscale("log", base=2)
    finish(axes, f"The dynamic loss scale\n{result['what']}", "steps", "scale")


def _ends(losses: list[Any]) -> tuple[float, float]:
    """Return the mean loss over the first and the last steps."""
    values, window = mixed.numbers(losses), max(3, len(losses) // 10)
    if not len(values):
        return np.nan, np.nan
    return float(values[:window].mean()), float(values[-window:].mean())


def _name(policy: str, kind: str, seed: int) -> str:
    return f"{LABELS[policy]}, {kind}, seed {seed}"


def _images(place: Place, size: Size) -> data.Images:
    """Return a few epochs' worth of images, on the device."""
    count = place.pick(tiny=64, small=512, full=4096)
    return mixed.on(data.images(place.data, count, size.side), place.device)


STUDY = Study(
    "Mixed precision as with haiku and jmp",
    pieces,
    check,
    table,
    draw,
    figsize=(11, 8),
)
