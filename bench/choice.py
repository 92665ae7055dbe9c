"""The way that `strategy="auto"` takes, beside the others: `python -m bench.choice`.

A table of CPU times of clipped sums by every strategy that runs a loss, all in turn on
one thread, with the launches and bytes of recorded passes and of vmap. Bytes are of all
inputs and outputs of ops, weights that are expanded over the samples counted once.
"""

import platform
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vgrad
from bench import programs
from bench.floor import Bytes

RESULTS = Path(__file__).parent / "results/cpu_1_thread/choice.md"
STRATEGIES = ("auto", "recorded", "vmap", "loop")
BATCHES, MOST = (8, 32, 256), 32
"""Sizes of batches; the loop runs on 32 samples at most."""

SECONDS, ROUNDS = 1.0, (3, 25)
"""Of a row, and the fewest and most rounds in it."""


class Problem(NamedTuple):
    """A loss and the first arguments of its transforms."""

    loss: Callable[..., Tensor]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    batch: tuple[Tensor, ...]


def of_model(model: nn.Module, x: Tensor, y: Tensor) -> Problem:
    functional = vgrad.make_functional_with_buffers(
        model, disable_autograd_tracking=True
    )
    loss = vgrad.sample_loss(functional[0], F.cross_entropy)
    return Problem(loss, functional[1], functional[2], (x, y))


def reads_words(p: dict, b: dict, x: Tensor, length: Tensor) -> Tensor:
    """The mean of as many rows as a sample says."""
    return programs.net(p, x[: length.item()]).mean().square()


def problems(size: int) -> dict[str, Problem]:
    """Return the losses by name, for batches of this size."""
    losses = {}
    for name, widths in {"tiny": (8, 16, 4), "wide": (784, 256, 10)}.items():
        layers = [nn.Linear(*pair) for pair in pairwise(widths)]
        model = nn.Sequential(layers[0], nn.ReLU(), *layers[1:])
        classes = torch.randint(widths[-1], (size,))
        x = torch.randn(size, widths[0])
        losses[f"perceptron, {name}"] = of_model(model, x, classes)
    conv, classes = nn.Conv2d(1, 8, 3, stride=2), torch.randint(4, (size,))
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    losses["small CNN"] = of_model(model, torch.randn(size, 1, 14, 14), classes)
    block = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 16), block, nn.Flatten(), nn.Linear(128, 4))
    words, classes = torch.randint(50, (size, 8)), torch.randint(4, (size,))
    losses["transformer"] = of_model(model, words, classes)
    x, lengths = torch.randn(size, 300, 3), torch.randperm(300)[:size] + 1
    rows = programs.programs(size, 32, 8, torch.float32)
    params = rows["Laplacian"].params
    losses["sequences, all of other lengths"] = Problem(
        reads_words, params, {}, (x, lengths)
    )
    for name in ("Laplacian", "forces", "gradient penalty", "step of MAML"):
        loss, params, batch, by_func, _ = rows[name]
        batch = tuple(item[:size] for item in batch)
        losses[name] = Problem(loss, params, {}, batch)
        if by_func is not None:
            losses[f"{name}, torch.func"] = Problem(by_func, params, {}, batch)
    return losses


def ways(problem: Problem) -> dict[str, Callable[[], Any]]:
    """Return the clipped sum by every strategy that runs the loss."""
    loss, *arguments = problem
    runs = {}
    for name in STRATEGIES:
        if name == "loop" and len(problem.batch[0]) > MOST:
            continue
        compute = vgrad.clipped_grad(loss, max_norm=1.0, strategy=name, verify=False)
        run = partial(compute, *arguments[:2], *problem.batch)
        try:
            for _ in range(1 if name == "loop" else 3):
                run()
        except (vgrad.UnsupportedOp, RuntimeError):
            continue
        runs[name] = run
    return runs


def row(name: str, problem: Problem) -> tuple[str, ...]:
    """Time one loss, and count."""
    runs = ways(problem)
    explained = vgrad.explain(vgrad.clipped_grad(problem.loss, max_norm=1.0))
    chosen = explained(*problem[1:3], *problem.batch).strategy
    times: dict[str, list[float]] = {way: [] for way in runs}
    end, number = time.process_time() + SECONDS, 0
    while number < ROUNDS[0] or (number < ROUNDS[1] and time.process_time() < end):
        names, number = [*runs], number + 1
        for way in names[number % len(names) :] + names[: number % len(names)]:
            if way != "loop":
                runs[way]()  # so that its caches are warm
            start = time.process_time()
            runs[way]()
            times[way].append(time.process_time() - start)
    medians = {way: statistics.median(spent) for way, spent in times.items()}
    auto, size = medians.pop("auto"), len(problem.batch[0])
    cells = [name, str(size), chosen, f"{auto / min(medians.values()):.2f}"]
    cells += [f"{medians[e] * 1e3:.1f}" if e in runs else "" for e in STRATEGIES[1:]]
    for way in ("recorded", "vmap"):
        if way in runs:
            with Bytes() as moved:
                runs[way]()
            cells.append(f"{moved.launches}, {moved.total / size / 1e3:,.0f}")
        else:
            cells.append("")
    return tuple(cells)


def main() -> None:
    """Write the table."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", vgrad.FallbackWarning)
    heads = ("", "B", "auto takes", "auto / best")
    heads += tuple(f"{strategy}, ms" for strategy in STRATEGIES[1:])
    heads += ("recorded: launches, KB a sample", "vmap")
    tables = [problems(size) for size in BATCHES]
    lines = [heads, ("---", "---:", "---", *["---:"] * 6)]
    for name in tables[0]:
        for table in tables:
            lines.append(row(name, table[name]))
            print(*lines[-1], flush=True)
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    RESULTS.write_text(f"""\
# The choice of strategy="auto"

Clipped sums, {platform.machine()}, one thread, CPU time, medians of up to {ROUNDS[1]}
rounds of all in turn (`python -m bench.choice`).

{text}
""")


if __name__ == "__main__":
    main()
