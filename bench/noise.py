"""Private noise: its time, its distribution and its edges, by `python -m bench.noise`.

Contenders take turns in one process; a time is the least of all rounds, per number, by
the clock and of all threads together. Of noise that is correlated over steps it is the
median, and its price that over the one of independent noise. The tables are written to
`bench/results/cpu_2_threads/noise.md`. The last rows are of 10^8 numbers: how many the
functions of numpy and of torch round to different values of the grid, and how many lie
so close to the edge between two values that libraries might.
"""

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

import vgrad
from vgrad.dp import noise, noising
from vgrad.dp.discrete import DiscreteNoise
from vgrad.generators import on_threads

ROOT = Path(__file__).parent.parent
NUMBERS, ROUNDS, MANY = 2**21, 25, 10**8
CLOSE = 2**20
"""Rounding errors from an edge that are counted, since a single one is too rare."""

KEY = vgrad.dp.secret_key(seed=0)
DEVIATION, GRID = 0.6, 2.0**-17


def step_of(streams: noise.Streams, step: int) -> noise.Noise:
    """Return the noise of a step of one run."""
    options = {"noise_multiplier": 1.5, "key": KEY, "step": step, "streams": streams}
    return noise.gaussian_noise("bench", vgrad.Sensitivity(0.4), **options)


def contenders() -> dict[str, Callable[[int], object]]:
    """Return functions of a step that draw as many normal numbers each."""
    sums, streams = {"w": torch.zeros(NUMBERS)}, noise.Streams()
    numbers = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        added = torch.compile(noise.Drawn.advanced)
        added(step_of(streams, 0).drawn(sums), sums)
    return {
        "vgrad, eager: words, normal numbers, sum, grid": lambda step: step_of(
            streams, step
        ).added(sums),
        "vgrad, compiled: the same": lambda step: added(
            step_of(streams, step).drawn(sums), sums
        ),
        "vgrad, discrete: words, integers, sum": lambda step: DiscreteNoise(
            KEY, step, DEVIATION
        ).added(sums),
        "vgrad: words of ChaCha20 alone": lambda step: step_of(streams, step).drawn(
            sums
        ),
        "numpy: `standard_normal`": lambda step: numbers.standard_normal(NUMBERS),
        "torch: `randn`, float32": lambda step: torch.randn(NUMBERS),
        "torch: `randn`, float64": lambda step: torch.randn(
            NUMBERS, dtype=torch.float64
        ),
    }


def times() -> dict[str, tuple[float, float]]:
    """Time all in turns, in nanoseconds per number: by the clock, of all threads."""
    functions = contenders()
    best = dict.fromkeys(functions, (math.inf, math.inf))
    for step in range(ROUNDS):
        for name, run in functions.items():
            wall, busy = time.perf_counter(), time.process_time()
            run(step)
            spent = time.perf_counter() - wall, time.process_time() - busy
            pairs = zip(best[name], spent, strict=True)
            best[name] = tuple(min(old, 1e9 * new / NUMBERS) for old, new in pairs)
    return best


SCHEMES = {
    "`independent()`": noising.independent(),
    "`bisr(4)`": noising.bisr(4),
    "`bisr(4, cache=True)`": noising.bisr(4, cache=True),
    "`band_mf(4)`": noising.band_mf(4),
    "`blt(3)`": noising.blt(3),
}


class Run:
    """The noise of the steps of a run."""

    def __init__(self, scheme: noising.Noising, sums: dict, compiled: Any) -> None:
        filter = scheme.fitted(1000, separation=100, participations=10).filter
        self.options = {"filter": filter, "noise_multiplier": 1.5, "key": KEY}
        self.streams, self.history = noise.Streams(), ()
        self.sums, self.compiled = sums, compiled

    def step(self, step: int) -> None:
        """Take the next step."""
        arguments = {"step": step, "streams": self.streams, "history": self.history}
        scheme = noise.gaussian_noise(
            "bench", vgrad.Sensitivity(0.4), **arguments, **self.options
        )
        if self.compiled is None:
            _, self.history = scheme.advanced(self.sums)
            return
        drawn = scheme.drawn(self.sums)
        _, result = self.compiled(drawn, self.sums)
        self.history = scheme.after(self.sums, drawn.buffers, result)


def prices() -> dict[str, list[float]]:
    """Return nanoseconds per number of each scheme, eager and compiled."""
    sums = {"w": torch.zeros(NUMBERS)}
    ways = None, torch.compile(noise.Drawn.advanced, dynamic=False)
    runs = {n: [Run(s, sums, way) for way in ways] for n, s in SCHEMES.items()}
    spent: dict[str, list[list[float]]] = {name: [[], []] for name in runs}
    for step in range(ROUNDS):
        for name, pair in runs.items():
            for run, spans in zip(pair, spent[name], strict=True):
                start = time.perf_counter()
                run.step(step)
                spans.append(1e9 * (time.perf_counter() - start) / NUMBERS)
    return {n: [*map(statistics.median, x)] for n, x in spent.items()}


def distribution() -> dict[str, float]:
    """Return p-values of ten million numbers: of tests by Kolmogorov and Pearson."""
    sums = {"w": torch.zeros(10_000_000, dtype=torch.float64)}
    drawn = step_of(noise.Streams(), 1).added(sums)["w"].numpy() / DEVIATION
    # The steps of the grid are spread out, or the edges of cells would cut them.
    drawn += np.random.default_rng(0).uniform(-0.5, 0.5, len(drawn)) * GRID / DEVIATION
    edges = stats.norm.ppf(np.linspace(0, 1, 1001))
    counts = np.histogram(drawn, edges)[0]
    size, gap = len(drawn), drawn.var() - 1
    return {
        "Kolmogorov and Smirnov": stats.kstest(drawn, "norm").pvalue,
        "chi-square, 1,000 cells": stats.chisquare(counts).pvalue,
        "variance": 2 * stats.norm.sf(abs(gap) / math.sqrt(2 / size)),
        "mean": 2 * stats.norm.sf(abs(drawn.mean()) * math.sqrt(size)),
        "neighbours": 2
        * stats.norm.sf(
            abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) * math.sqrt(size)
        ),
    }


def edges() -> tuple[int, int]:
    """Count numbers that two libraries round apart, and those close to an edge."""
    size = 2**16
    parts = {"w": noise.Part((0, "w"), (MANY,), (0,), (MANY,))}
    layout = noise.Streams().layout(
        step_of(noise.Streams(), 2), parts, noise.HOST, size, size
    )
    apart, close = [], []

    def count(number: int) -> None:
        memory = noise.Memory.of(size // noise.TILE)
        words = layout.words(number, 2, memory.words)
        other = noise.normals(words).view(-1).numpy() * DEVIATION
        one = noise.normals_of_host(words, memory).reshape(-1) * DEVIATION
        apart.append(int((np.rint(one / GRID) != np.rint(other / GRID)).sum()))
        places = one / GRID
        gaps = np.abs(np.abs(places - np.rint(places)) - 0.5) * GRID
        close.append(int((gaps <= CLOSE * np.spacing(np.abs(one))).sum()))

    works = [
        lambda number=number: count(number) for number in range(len(layout.groups))
    ]
    on_threads(works, MANY)
    return sum(apart), sum(close)


def main() -> None:
    """Write the table."""
    torch.set_num_threads(2)
    lines = [
        "# Noise",
        "",
        f"{NUMBERS:,} numbers, {os.uname().machine}, two threads, load "
        f"{os.getloadavg()[0]:.0f} from other processes too.",
        "",
    ]
    lines += ["| | ns per number | of both threads |", "| --- | ---: | ---: |"]
    for name, (wall, busy) in times().items():
        lines.append(f"| {name} | {wall:.2f} | {busy:.2f} |")
    lines += ["", "| noise | ns, eager | price | ns, compiled | price |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    costs = prices()
    (eager, compiled), *_ = costs.values()
    lines += [
        f"| {name} | {one:.1f} | {one / eager:.2f} | {two:.1f} | {two / compiled:.2f} |"
        for name, (one, two) in costs.items()
    ]
    lines += ["", "| test of 10,000,000 numbers | p |", "| --- | ---: |"]
    lines += [f"| {name} | {p:.3f} |" for name, p in distribution().items()]
    apart, close = edges()
    share = close / MANY / CLOSE
    lines += [
        "",
        f"Of {MANY:,} numbers the functions of numpy and of torch round {apart} to "
        f"different values of the grid. {close:,} lie within {CLOSE:,} units in the "
        f"last place of an edge, which makes {share:.1e} within one.",
    ]
    path = ROOT / "bench/results/cpu_2_threads/noise.md"
    path.write_text("\n".join(lines) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
