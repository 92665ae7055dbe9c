"""Attribution and its judge: scores against 100 models trained on halves of the data.

Logistic regression and an MLP on digits, full-batch Adam with decay in the objective.
Scores of a training sample for a test sample are judged by the linear datamodeling
score (LDS): the rank correlation of their sums over subsets with log p of the models
that were trained on these subsets.

Reference: Park et al., TRAK, arXiv 2303.14186; Koh and Liang, arXiv 1703.04730;
Grosse et al., arXiv 2308.03296 (EK-FAC).
"""

import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

import vgrad
from bench.experiments import data, drawing
from bench.experiments.study import Piece, Place, Result, Results, Show, Study
from vgrad import curvature
from vgrad.attribution import influence, self_influence, trak
from vgrad.training import EnsembleState, ensemble_train_step

DECAY, DIM = 1e-3, 512
DAMPINGS = 1e-4, 1e-3, 2e-3, 1e-2, 1e-1, 1.0
"""Of all matrices; the decay is part of it."""

RIDGES = 10.0, 0.1, 1e-3
GGN, TRAK, DOT, COSINE = "GGN", f"TRAK-1, {DIM} directions", "inner product", "cosine"
FISHER, BLOCKS = "empirical Fisher", "GGN, blocks of layers"
KFAC, EKFAC, APART = "K-FAC", "EK-FAC", ", bias apart"
METHODS = GGN, FISHER, BLOCKS, KFAC, EKFAC, KFAC + APART, EKFAC + APART
NAMES = *METHODS, TRAK, DOT, COSINE


DENSE = {
    "LR": {
        GGN: {DECAY + 1e-3: 0.951, DECAY + 1e-2: 0.814, DECAY + 1e-1: 0.512},
        FISHER: {1e-3: 0.819, 1e-2: 0.617, 1e-1: 0.432},
        EKFAC: {2e-3: 0.802},
        TRAK: {10.0: 0.802, 0.1: 0.560, 1e-3: 0.455},
        DOT: {0.0: 0.379},
        COSINE: {0.0: 0.270},
    },
    "MLP": {
        GGN: {DECAY + 1e-3: 0.814, DECAY + 1e-2: 0.752, DECAY + 1e-1: 0.522},
        FISHER: {1e-3: 0.658, 1e-2: 0.523, 1e-1: 0.365},
        BLOCKS: {2e-3: 0.791},
        KFAC: {2e-3: 0.654},
        EKFAC: {2e-3: 0.640},
        TRAK: {10.0: 0.555, 0.1: 0.354, 1e-3: 0.334},
        DOT: {0.0: 0.295},
        COSINE: {0.0: 0.192},
    },
}
"""LDS on digits by dense formulas and plain autograd, without vgrad."""


class Task(NamedTuple):
    """A net and its learning rate."""

    net: str
    build: Callable[[], nn.Sequential]
    rate: float


def pieces(place: Place) -> list[Piece]:
    """Train and judge one net in each."""
    hidden = place.pick(tiny=4, small=32, full=32)

    def mlp() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10))

    tasks = [
        Task("LR", lambda: nn.Sequential(nn.Linear(64, 10)), 0.02),
        Task("MLP", mlp, 0.01),
    ]
    return [Piece(task.net, partial(measure, place, task)) for task in tasks]


def retrained(
    loss: Callable, tx: Any, params: Any, batch: tuple, subsets: Tensor, steps: int
) -> Any:
    """Train a model on each subset, bool [S, N], in whole batches, as one ensemble."""

    def mean(params: Any, buffers: Any, x: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
        losses = torch.vmap(loss, (None, None, 0, 0))(params, buffers, x, y)
        return torch.where(chosen, losses, 0).sum() / chosen.sum()

    copies = {
        name: value.detach().expand(len(subsets), *value.shape).clone()
        for name, value in params.items()
    }
    state = EnsembleState.create(tx, copies, {}, seed=0)
    step = ensemble_train_step(mean, tx, in_dims=(None, None, 0), donate=True)
    for _ in range(steps):
        state, metrics = step(state, *batch, subsets.to(batch[0].device))
        assert not metrics["skipped"].any(), "gradients that are not finite"
    return state.params


def lds(scores: Tensor, subsets: Tensor, outputs: Tensor) -> float:
    """Mean over queries of rank correlations: sums of scores [Q, N], outputs [S, Q]."""
    sums = (subsets.double() @ scores.detach().double().cpu().mT).mT
    results = outputs.detach().double().cpu().mT
    pairs = zip(sums.numpy(), results.numpy(), strict=True)
    return sum(stats.spearmanr(*pair).statistic for pair in pairs) / len(sums)


def measure(place: Place, task: Task, show: Show) -> Result:
    """Train a net on all samples and on each subset, and judge all scores."""
    count, queries, members, steps = place.pick(
        tiny=(80, 8, 12, 40), small=(1200, 300, 100, 300), full=(1200, 300, 100, 300)
    )
    title, x, y = _digits(place)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        train, test = torch.randperm(len(x))[: count + queries].split(count)
        subsets = torch.rand(members, count) < 0.5
        module = task.build().to(place.device)
    batch, queried = (x[train], y[train]), (x[test], y[test])
    fmodel, params, _ = vgrad.make_functional_with_buffers(module)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)

    def decayed(params: Any, buffers: Any, *sample: Tensor) -> Tensor:
        squares = sum(value.square().sum() for value in params.values())
        return loss(params, buffers, *sample) + DECAY / 2 * squares

    start = time.perf_counter()
    tx, every = vgrad.optim.adam(task.rate), torch.cat([subsets[:1] | True, subsets])
    trained = retrained(decayed, tx, params, batch, every, steps)
    seconds = {"models": time.perf_counter() - start}
    show(0.5)
    halves = {name: value[1:] for name, value in trained.items()}
    logits = vgrad.ensemble_forward(fmodel)(halves, {}, queried[0])
    right = queried[1].expand(members, -1)
    outputs = logits.log_softmax(2).gather(2, right[..., None])[..., 0]
    first = {name: value[0] for name, value in trained.items()}
    results: dict[str, dict[str, float]] = {}
    for name, damping, scores in _scores(fmodel.to_module(first, {}), batch, queried):
        results.setdefault(name, {})[f"{damping:g}"] = lds(scores, subsets, outputs)
        show(0.5 + len(results) / len(NAMES) / 2)
    return {
        "net": task.net,
        "data": title,
        "parameters": sum(value.numel() for value in params.values()),
        "samples": count,
        "queries": queries,
        "models": members,
        "accuracy": float((logits.argmax(2) == right).double().mean()),
        "seconds": seconds
        | {"scores": time.perf_counter() - start - seconds["models"]},
        "lds": results,
    }


def _digits(place: Place) -> tuple[str, Tensor, Tensor]:
    """Return title, images `[N, 64]` and labels, of digits as they come."""
    if place.data is None:
        x, y = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
        title, x, y = "digits", torch.from_numpy(x / 16).float(), torch.from_numpy(y)
    else:
        title, x, y, _ = data.images(place.data, 1500, 8, channels=1)
    return title, x.flatten(1).to(place.device), y.to(place.device)


def _scores(
    module: nn.Module, batch: tuple[Tensor, ...], queries: tuple[Tensor, ...]
) -> Iterator[tuple[str, float, Tensor]]:
    """Yield a method, its damping or ridge, and scores `[Q, N]`, in float64."""
    (x, y), (queried, target) = batch, queries
    queries = queried.double(), target
    batches = [*zip(x.double().split(200), y.split(200), strict=True)]
    inputs = [(x,) for x, _ in batches]
    split = vgrad.make_functional_with_buffers(module.double())

    def scored(model: tuple, **options: Any) -> Tensor:
        fmodel, *values = model
        loss = vgrad.sample_loss(fmodel, F.cross_entropy)
        return influence(loss, *values, queries, batches, **options)

    plain = scored(split)
    yield DOT, 0.0, plain
    loss = vgrad.sample_loss(split[0], F.cross_entropy)
    of_queries, others = (
        self_influence(loss, *split[1:], b) for b in ([queries], batches)
    )
    yield COSINE, 0.0, plain / of_queries[:, None].sqrt() / others.sqrt()
    for ridge in RIDGES:
        options = {"dim": DIM, "seed": 0, "ridge": ridge}
        yield TRAK, ridge, trak(*split, queries, batches, **options)

    def ggn(make: Callable, *model: Any) -> tuple[Any, Any]:
        fmodel, *values = model
        matrix = curvature.ggn(fmodel, "categorical")
        return model, make(matrix, *values, inputs)

    layers = dict.fromkeys(name.rpartition(".")[0] for name in split[1])
    frozen = [[n for n in split[1] if n.rpartition(".")[0] != path] for path in layers]
    fisher = curvature.empirical_fisher(split[0], "categorical")
    joint: Any = {"separate_weight_and_bias": False}
    parts = {
        GGN: [ggn(curvature.full, *split)],
        FISHER: [(split, curvature.full(fisher, *split[1:], batches))],
        BLOCKS: [
            ggn(curvature.full, split[0], *vgrad.freeze(*split[1:], names))
            for names in frozen
        ],
        KFAC: [ggn(partial(curvature.kfac, **joint), *split)],
        EKFAC: [ggn(partial(curvature.ekfac, **joint), *split)],
        KFAC + APART: [ggn(curvature.kfac, *split)],
        EKFAC + APART: [ggn(curvature.ekfac, *split)],
    }
    for name, matrices in parts.items():
        extra = {d for dense in DENSE.values() for d in dense.get(name, ())}
        for damping in sorted(extra.union(DAMPINGS)):
            total = [
                scored(model, curvature=matrix, damping=damping)
                for model, matrix in matrices
            ]
            yield name, damping, torch.stack(total).sum(0)


def check(results: Results) -> list[str]:
    """Compare with the dense formulas, and see that curvature is worth its price."""
    seen = []
    for net, result in results.items():
        scores, chance = result["lds"], 0.1
        accuracy = result["accuracy"]
        assert accuracy > 3 * chance, f"{net}: accuracy {accuracy:.3f} of the models"
        best, plain = max(scores[GGN].values()), scores[DOT]["0"]
        assert best > plain, (
            f"{net}: an LDS of {best:.3f} by the GGN, of {plain:.3f} without curvature"
        )
        if not _is_published(result):
            seen.append(f"{net}: the GGN's LDS is {best:.3f}, {plain:.3f} without it.")
            continue
        worst = 0.0
        for name, dense in DENSE[net].items():
            for damping, expected in dense.items():
                value = scores[name][f"{damping:g}"]
                room = 0.01 if (name, damping) == (GGN, DECAY + 1e-3) else 0.02
                worst = max(worst, abs(value - expected))
                assert abs(value - expected) <= room, (
                    f"{net}: an LDS of {value:.3f} by {name} at {damping:g}, "
                    f"{expected} by dense formulas"
                )
        seen.append(
            f"{net}: all scores have the LDS of dense formulas to {worst:.3f}; the "
            f"GGN has {best:.3f}, K-FAC {max(scores[KFAC].values()):.3f}, EK-FAC "
            f"{max(scores[EKFAC].values()):.3f}, TRAK {max(scores[TRAK].values()):.3f} "
            f"at best, {plain:.3f} without curvature."
        )
    return seen


def _is_published(result: Result) -> bool:
    """Return whether the recipe is the one of `DENSE`."""
    return result["models"] == 100 and result["data"] == "digits"


def table(results: Results) -> str:
    """Return the LDS by method and damping, of dense formulas in parentheses."""
    lines = []
    for net, result in results.items():
        scores, dense = result["lds"], DENSE[net] if _is_published(result) else {}
        dampings = sorted({d for row in scores.values() for d in row}, key=float)
        rows = []
        for name in NAMES:
            row = [name]
            for damping in dampings:
                value = scores[name].get(damping)
                expected = dense.get(name, {}).get(float(damping))
                text = "" if value is None else f"{value:.3f}"
                row.append(text + (f" ({expected:.3f})" if expected else ""))
            rows.append(row)
        seconds = result["seconds"]
        lines += [
            f"{net}, {result['parameters']} parameters: LDS of {result['queries']} "
            f"queries ({result['data']}) by damping, or ridge; in parentheses by dense "
            f"formulas and plain autograd.",
            "",
            drawing.markdown(["scores", "none", *dampings[1:]], rows),
            "",
            f"{result['models']} models of halves of {result['samples']} samples, with "
            f"an accuracy of {result['accuracy']:.1%}, took {seconds['models']:.0f} s, "
            f"and all scores {seconds['scores']:.0f} s.",
            "",
        ]
    return "\n".join(lines)


def draw(results: Results, figure: Figure) -> None:
    """Draw the LDS against damping."""
    panels = figure.subplots(1, len(results), sharey=True)
    for axes, (net, result) in zip(panels, results.items(), strict=True):
        for number, name in enumerate(METHODS):
            scores = result["lds"][name]
            dampings, values = [float(key) for key in scores], [*scores.values()]
            style = ":" if name.endswith(APART) else "-"
            colour = number - 2 * name.endswith(APART)
            drawing.line(axes, dampings, values, name, colour, linestyle=style)
        for name, style in ((TRAK, "--"), (DOT, ":")):
            best = max(result["lds"][name].values())
            label = f"{name}{', best ridge' if name == TRAK else ''}"
            axes.axhline(best, color="grey", linestyle=style, label=label)
        axes.set_xscale("log")
        axes.set_xticks(
            [1e-4, 1e-3, 1e-2, 1e-1, 1], ["1e-4", "1e-3", "0.01", "0.1", "1"]
        )
        axes.minorticks_off()
        title = f"{net}, {result['parameters']} parameters"
        y = "LDS, mean over queries" if axes is panels[0] else ""
        drawing.finish(axes, title, "damping", y, legend=axes is panels[-1])
    first = next(iter(results.values()))
    figure.suptitle(f"{first['data']}, {first['models']} models")


STUDY = Study(
    "Attribution judged by retraining",
    pieces,
    check,
    table,
    draw,
    figsize=(11, 5),
)
