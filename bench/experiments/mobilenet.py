"""MobileNetV2 on images shaped like CIFAR-10's, with and without mixed precision.

Each seed fixes weights, batches and dropout; all policies start from the same ones.
Their final losses have to be equal within the spread of the seeds.

Reference: Sandler et al., arXiv 1801.04381.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

import vgrad
from bench.experiments import data, mixed, nets
from bench.experiments.drawing import COLOURS, finish
from bench.experiments.study import Piece, Place, Result, Results, Show, Study, number
from vgrad.precision import policy_for
from vgrad.training import TrainState, train_step

SIDE = 32
RATE = 3e-3
ENOUGH = 50
"""Steps that a net learns something in."""

ENDS = {"loss": "train loss", "accuracy": "held-out accuracy"}
"""What has to be equal."""


class Size(NamedTuple):
    """The net's share of its width, samples of a batch, of training and held out."""

    width: float
    batch: int
    samples: int
    held_out: int

    def summary(self, images: data.Images) -> str:
        """Say in words what is trained on what."""
        return f"MobileNetV2, width {self.width}, batch {self.batch}, {images.title}"


class Net:
    """A net from a seed: its training step under a policy, and its accuracy."""

    def __init__(self, size: Size, classes: int, seed: int, device: str) -> None:
        build = partial(nets.mobile, 2, classes, width=size.width)
        model = nets.seeded(build, seed).to(device)
        self._seed = seed
        train, self._params, self._buffers = vgrad.make_functional_with_buffers(
            model.train()
        )
        self._loss = vgrad.batch_loss(train, F.cross_entropy)
        self._evaluated, _, _ = vgrad.make_functional_with_buffers(model.eval())

    def start(self, policy: str, steps: int = 100) -> tuple[Callable, TrainState]:
        """Return a step under a policy and its first state.

        The rate falls to zero, or accuracies would depend on the last few batches.
        """
        rate = vgrad.optim.schedules.cosine(RATE, steps)
        tx, scale = vgrad.optim.adamw(rate), mixed.scale_for(policy)
        step = train_step(self._loss, tx, policy=policy, loss_scale=scale, donate=True)
        # A step may write into its state, which is not to be this net's.
        params, buffers = map(_copied, (self._params, self._buffers))
        state = TrainState.create(
            tx, params, buffers, seed=self._seed, loss_scale=scale
        )
        return step, state

    def accuracy(self, policy: str, state: TrainState, images: data.Images) -> float:
        """Return the share of images that the net gets right under the policy."""
        run = policy_for(self._evaluated, policy)
        right = 0
        with torch.no_grad():
            pairs = zip(images.x.split(256), images.y.split(256), strict=True)
            for x, y in pairs:
                logits = run(state.params, state.buffers, x)
                right += int((logits.argmax(1) == y).sum())
        return right / len(images.x)


def policies(device: str) -> list[str]:
    """Return the policies to compare; float16 only on CUDA."""
    on_cuda = device.startswith("cuda")
    return ["float32", "mixed_bfloat16", *(["mixed_float16"] if on_cuda else [])]


def training(
    place: Place, size: Size, steps: int, policy: str, seed: int, show: Show
) -> Result:
    """Train from a seed; return losses and accuracy, and whether steps suffice."""
    train, held_out = _images(place, size)
    net = Net(size, train.classes, seed, place.device)
    step, state = net.start(policy, steps)
    batches = mixed.batches(train, size.batch, seed)
    losses, skipped = [], []
    with mixed.tf32(False):
        for done in range(steps):
            state, metrics = step(state, *next(batches))
            losses.append(metrics["loss"])
            skipped.append(metrics.get("skipped", torch.tensor(0.0)))
            show(done / steps)
        accuracy = net.accuracy(policy, state, held_out)
    return {
        "what": size.summary(train),
        "policy": policy,
        "seed": seed,
        "losses": [number(loss) for loss in losses],
        "skipped": int(sum(float(count) for count in skipped)),
        "accuracy": accuracy,
        "chance": 1 / train.classes,
        "held_out": size.held_out,
        "learns": steps >= ENOUGH,
    }


def memory(place: Place, size: Size, show: Show) -> Result:
    """Measure a step under each policy."""
    train, _ = _images(place, size)
    net, by_policy = Net(size, train.classes, 0, place.device), {}
    batch = next(mixed.batches(train, size.batch, 0))
    chosen = policies(place.device)
    for done, policy in enumerate(chosen):
        with mixed.tf32(False):
            by_policy[policy] = mixed.memory(
                mixed.Steps(net.start(policy), batch), place.device
            )
        show((done + 1) / len(chosen))
    return {"what": size.summary(train), "policies": by_policy}


def time(place: Place, size: Size, rounds: int, show: Show) -> Result:
    """Time a step under each policy that the device is made for."""
    train, _ = _images(place, size)
    net = Net(size, train.classes, 0, place.device)
    batch = next(mixed.batches(train, size.batch, 0))
    chosen = policies(place.device)
    spent = mixed.times(net.start, chosen, batch, place.device, rounds)
    return {"what": size.summary(train), **spent}


def pieces(place: Place) -> list[Piece]:
    """Memory, time, and a run of each seed under each policy."""
    size = place.pick(
        tiny=Size(0.1, 8, 32, 16),
        small=Size(0.35, 32, 2048, 512),
        full=Size(1.0, 512, 20_000, 5_000),
    )
    # Without instructions a step takes too long to learn by.
    fast = all(mixed.fast(policy, place.device) for policy in policies(place.device))
    steps = place.pick(tiny=2, small=300 if fast else 10, full=400)
    seeds = place.pick(tiny=2, small=3, full=3)
    rounds = place.pick(tiny=1, small=9, full=30)
    train = partial(training, place, size, steps)
    runs = [
        (policy, seed) for seed in range(seeds) for policy in policies(place.device)
    ]
    return [
        Piece("memory", partial(memory, place, size)),
        Piece("time", partial(time, place, size, rounds)),
        *(Piece(f"{run[0]}, seed {run[1]}", partial(train, *run)) for run in runs),
    ]


def ends(results: Results) -> dict[str, dict[str, np.ndarray]]:
    """Return what each policy ended with, one number for each seed.

    The loss is the mean over the last tenth of the steps.
    """
    result: dict[str, dict[str, np.ndarray]] = {}
    for policy, runs in _runs(results).items():
        last = max(1, len(runs[0]["losses"]) // 10)
        losses = [mixed.numbers(run["losses"])[-last:].mean() for run in runs]
        accuracies = [run["accuracy"] for run in runs]
        result[policy] = {"loss": np.array(losses), "accuracy": np.array(accuracies)}
    return result


def check(results: Results) -> list[str]:
    """Losses and accuracies are equal within the spread of seeds, memory is smaller.

    The means of two groups of n seeds may differ by Student's t times the standard
    error of their difference, `s sqrt(2 / n)` with the pooled deviation s, plus what
    does not count. So many seeds cannot show less.
    """
    reached, seen = ends(results), []
    runs = _runs(results)["float32"]
    for policy in list(reached)[1:]:
        for kind, title in ENDS.items():
            first, second = reached["float32"][kind], reached[policy][kind]
            bound = mixed.allowed(first, second, floor(kind, runs[0]))
            gap = abs(float(second.mean() - first.mean()))
            text = (
                f"{title}: {second.mean():.3f} under {policy}, {first.mean():.3f} in "
                f"float32, means over {len(first)} seeds; the difference is {gap:.3f}, "
                f"the spread over seeds allows {bound:.3f}"
            )
            assert gap <= bound, text
            seen.append(f"{text}.")
            learned = _learned(kind, first, runs)
            if runs[0]["learns"]:
                assert bound < learned / 2, (
                    f"{text}, too wide for {learned:.3f} learned"
                )
    if runs[0]["learns"]:
        lowest, chance = reached["float32"]["accuracy"].min(), runs[0]["chance"]
        assert lowest > 2 * chance, f"an accuracy of {lowest:.3f}, by chance {chance}"
        seen.append(f"The lowest accuracy in float32 is {lowest:.3f}, chance {chance}.")
    return seen + mixed.check_memory(results["memory"]["policies"])


def floor(kind: str, run: Result) -> float:
    """Return the difference that does not count: seeds may lie close by chance.

    For accuracies that has their standard error on so many images, at most.
    """
    if kind == "loss":
        return 0.05
    return 0.01 + 0.5 / math.sqrt(run["held_out"])


def table(results: Results) -> str:
    """What policies end with, then memory and time."""
    reached, used = ends(results), results["memory"]
    runs = _runs(results)
    lines = [
        f"{used['what']}; mean and standard deviation over "
        f"{len(runs['float32'])} seeds of {len(runs['float32'][0]['losses'])} steps.",
        "",
        "| policy | train loss | held-out accuracy | of each seed | skipped steps |",
        "|---|---|---|---|---|",
    ]
    for policy, figures in reached.items():
        loss, accuracy = (
            f"{figures[kind].mean():.3f} ± {figures[kind].std(ddof=1):.3f}"
            for kind in ENDS
        )
        all_of_them = ", ".join(f"{one:.3f}" for one in figures["accuracy"])
        skipped = sum(run["skipped"] for run in runs[policy])
        lines.append(f"| {policy} | {loss} | {accuracy} | {all_of_them} | {skipped} |")
    lines += ["", *mixed.memory_table(used["policies"]), ""]
    return "\n".join([*lines, *mixed.time_table(results["time"])])


def draw(results: Results, figure: Figure) -> None:
    """Losses over steps, accuracies of all seeds, memory and time."""
    (losses, accuracies), (memory, time) = figure.subplots(2, 2)
    _draw_losses(results, losses)
    _draw_accuracies(results, accuracies)
    mixed.draw_memory(memory, results["memory"])
    mixed.draw_time(time, results["time"])
    mixed.narrowed(figure)


def _draw_losses(results: Results, axes: Axes) -> None:
    """Draw mean and range over seeds of the smoothed losses."""
    for place, (policy, runs) in enumerate(_runs(results).items()):
        window = max(1, len(runs[0]["losses"]) // 10)
        curves = np.array([mixed.smoothed(run["losses"], window) for run in runs])
        at = np.arange(curves.shape[1]) + window
        colour, style = COLOURS[place], ("-", "--", ":")[place]
        axes.plot(at, curves.mean(0), color=colour, linestyle=style, label=policy)
        low, high = curves.min(0), curves.max(0)
        axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
    title = f"Training losses (mean of {window}); bands: range of {len(runs)} seeds\n"
    title += runs[0]["what"]
    finish(axes, title, "steps", "cross entropy")


def _draw_accuracies(results: Results, axes: Axes) -> None:
    """Draw a bar with its deviation for each policy, and a point for each seed."""
    for place, (policy, figures) in enumerate(ends(results).items()):
        values = 100 * figures["accuracy"]
        mean, deviation = values.mean(), values.std(ddof=1)
        axes.bar(policy, mean, 0.5, color=COLOURS[place], alpha=0.6)
        axes.errorbar(place, mean, deviation, color="black", capsize=6)
        places = place + np.linspace(-0.12, 0.12, len(values))
        axes.plot(places, values, "o", color="white", markeredgecolor="black")
        axes.text(place + 0.27, mean, f"{mean:.1f}", va="center", fontsize="small")
    run = _runs(results)["float32"][0]
    axes.axhline(100 * run["chance"], color="0.4", linestyle=":", label="chance")
    axes.plot([], [], "o", color="white", markeredgecolor="black", label="a seed")
    axes.set_ylim(0, 100)
    axes.set_xlim(-0.7, place + 0.7)
    title = f"Accuracy on {run['held_out']:,} held-out images; bars: deviation\n"
    title += run["what"]
    finish(axes, title, "", "% right")


def _learned(kind: str, last: np.ndarray, runs: list[Result]) -> float:
    """Return how far float32 went from where it started, or from chance."""
    if kind == "accuracy":
        return float(last.mean()) - runs[0]["chance"]
    steps = max(1, len(runs[0]["losses"]) // 10)
    start = np.mean([mixed.numbers(run["losses"])[:steps].mean() for run in runs])
    return float(start - last.mean())


def _runs(results: Results) -> dict[str, list[Result]]:
    """Return the runs of each policy, in the order of the seeds."""
    runs: dict[str, list[Result]] = {}
    for result in results.values():
        if "losses" in result:
            runs.setdefault(result["policy"], []).append(result)
    return runs


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _images(place: Place, size: Size) -> tuple[data.Images, data.Images]:
    """Return training and held-out images, on the device."""
    images = data.images(place.data, size.samples + size.held_out, SIDE)
    return mixed.on(images, place.device).split(size.held_out)


STUDY = Study(
    "MobileNetV2 with and without mixed precision",
    pieces,
    check,
    table,
    draw,
    figsize=(11, 8),
)
