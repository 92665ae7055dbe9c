"""How a training step grows with the members: `python -m bench.growth RESULTS.json`.

The file comes from `pytest --benchmark-json` or `python -m bench.suites --out`.
A picture of the same name shows time, as a multiple of a loop's over the
members, and peak memory against the number of members: of the loop, vmap, tensordict
and vgrad.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench import suites
from bench.experiments import drawing

Row = dict[str, Any]
NAMES = ("loop", "vmap", "tensordict", "vgrad")
COMPARED = "ensemble, training step, "
FINER = "members, training step, "
"""Groups of all contenders, and of vgrad for more numbers of members."""


def draw(measured: list[Row]) -> Figure:
    """Draw a line of panels for each setting and device.

    Raises:
        ValueError: no training step of an ensemble was measured.
    """
    rows = [row for row in measured if row["group"].startswith(COMPARED)]
    cases = list(dict.fromkeys(_case(row) for row in rows))
    if not cases:
        raise ValueError(
            "bench.growth: expected results of test_ensemble.py, got none."
        )
    finer = [
        {**row, "contender": "vgrad"}
        for row in measured
        if row["group"].startswith(FINER)
    ]
    figure = Figure(figsize=(10, 2.9 * len(cases)), layout="constrained")
    panels = figure.subplots(len(cases), 2, squeeze=False)
    for case, (time, memory) in zip(cases, panels, strict=True):
        for number, name in enumerate(NAMES):
            # Interleaved measurements take the place of others.
            by_members = {
                row["members"]: row
                for row in (*finer, *rows)
                if _case(row) == case and row["contender"] == name
            }
            at = sorted(by_members)
            ratios = [by_members[n]["ratio_to_plain"] for n in at]
            if name != "loop":  # which the others are measured beside
                drawing.line(time, at, ratios, name, number)
            with_memory = [n for n in at if "peak_bytes" in by_members[n]]
            peaks = [by_members[n]["peak_bytes"] / suites.MEBIBYTE for n in with_memory]
            drawing.line(memory, with_memory, peaks, name, number)
        time.axhline(1, color=drawing.COLOURS[0], linestyle="--", label="loop")
        ticks = sorted({row["members"] for row in rows if _case(row) == case})
        for axes in (time, memory):
            axes.set_xscale("log")
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
        y = "time / time of the loop"
        drawing.finish(time, case, "members", y, legend=False)
        y = "MiB above the members"
        drawing.finish(memory, f"{case}: peak memory", "members", y, legend=False)
    title, said = "A training step of an ensemble, by ways to run its members", rows[0]
    machine = f"{said['processor']}, {said['threads']} threads, torch {said['torch']}"
    figure.suptitle(f"{title}\n{machine}, {said['date']}")
    lines, names = panels[0, 1].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(NAMES))
    return figure


def _case(row: Row) -> str:
    """Return setting and device."""
    group = row["group"].removeprefix(COMPARED).removeprefix(FINER)
    return group.replace(f", {row['members']} members", "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("results", type=Path)
    results = parser.parse_args().results
    measured = suites.rows(json.loads(results.read_text()))
    draw(measured).savefig(results.with_suffix(".png"), dpi=100)
