"""How a training step grows with the members: `python -m bench.growth RESULTS.json`.

The file is what `pytest --benchmark-json` or `python -m vgrad bench ensemble --out`
wrote. A picture of the same name shows time and peak memory against the number of
members, the loop over members beside them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from vgrad.cli import bench

Row = dict[str, Any]
GROUP = "members, training step, "


def draw(measured: list[Row], path: Path) -> None:
    """Write the picture.

    Raises:
        ValueError: nothing was measured against the number of members.
    """
    from matplotlib.figure import Figure

    rows = [row for row in measured if row["group"].startswith(GROUP)]
    groups = sorted({row["group"] for row in rows})
    if not groups:
        raise ValueError(
            "bench.growth: expected results of test_ensemble.py::test_members."
        )
    figure = Figure(figsize=(9, 3.2 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for group, (time, memory) in zip(groups, panels, strict=True):
        chosen = sorted(
            (row for row in rows if row["group"] == group),
            key=lambda row: row["members"],
        )
        members = [row["members"] for row in chosen]
        loop = [1e3 * row["plain_seconds"] for row in chosen]
        time.plot(members, loop, "o--", label="loop of torch")
        ours = [1e3 * row["median_seconds"] for row in chosen]
        time.plot(members, ours, "o-", label="vgrad")
        time.set(title=group.removeprefix(GROUP), ylabel="ms a step")
        time.legend()
        known = [row for row in chosen if "peak_bytes" in row]
        peaks = [row["peak_bytes"] / bench.MEBIBYTE for row in known]
        memory.plot([row["members"] for row in known], peaks, "o-")
        memory.set(title="peak memory of vgrad above the members", ylabel="MiB")
        for axes in (time, memory):
            axes.set_xlabel("members")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("results", type=Path)
    results = parser.parse_args().results
    report = json.loads(results.read_text())
    draw(
        report if isinstance(report, list) else bench.rows(report),
        results.with_suffix(".png"),
    )
