"""Tables of `test_clipped.py`: `python -m bench.table RESULTS.json`.

The file is what `pytest --benchmark-json` or `python -m vgrad bench --out` wrote. A row
is a setting, a column a contender, a number the ratio to plain SGD of the same setting.
The last rows are geometric means, for each contender over the settings that it did, and
for comparison vgrad's over those same settings.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from bench.contenders import CLIPPED, GRADIENTS
from bench.models import SETTINGS
from vgrad.cli import bench

Row = dict[str, Any]
OURS = "vgrad"
TABLES = (
    ("clipped sum", "ratio_to_plain", "Time of the clipped sum / time of plain SGD"),
    ("clipped sum", "memory_ratio", "Memory of the clipped sum / memory of plain SGD"),
    ("stored gradients", "ratio_to_plain", "Time of stored gradients / plain SGD"),
)


def markdown(measured: list[Row]) -> str:
    """Return the tables of every device, and below them who was refused and why."""
    rows = [row for row in measured if "setting" in row]
    if not rows:
        return ""
    first = rows[0]
    text = [
        f"{first['date']}: {first['processor']}, {first['threads']} threads, torch "
        f"{first['torch']}. Ratios to the forward and backward pass of plain SGD.",
    ]
    for device in sorted({row["device"] for row in rows}):
        for kind, value, title in TABLES:
            chosen = [
                row
                for row in rows
                if row["device"] == device
                and row["group"].startswith(f"{kind},")
                and value in row
            ]
            if chosen:
                text += ["", f"**{title}, {device}**", "", *_table(chosen, value)]
                if value == "ratio_to_plain":
                    text += ["", *_reasons(chosen)]
    return "\n".join(text).rstrip() + "\n"


def _table(rows: list[Row], value: str) -> list[str]:
    ratios = {(row["setting"], row["contender"]): row[value] for row in rows}
    refused = {row["setting"]: row["refused"] for row in rows}
    settings = _ordered(SETTINGS, {row["setting"] for row in rows})
    names = _ordered(
        {**CLIPPED, **GRADIENTS},
        {row["contender"] for row in rows}.union(*refused.values()),
    )
    lines = [_line(["setting", *names]), "|" + " --- |" * (len(names) + 1)]
    for setting in settings:
        cells = []
        for name in names:
            reason = refused[setting].get(name, "")
            ratio = ratios.get((setting, name))
            cells.append(reason.split(":")[0] if ratio is None else f"{ratio:.2f}")
        lines.append(_line([SETTINGS[setting].title, *cells]))
    done = {name: [s for s in settings if (s, name) in ratios] for name in names}
    for title, who in (("geometric mean", None), (f"{OURS} on the same", OURS)):
        cells = [
            _mean([ratios.get((s, who or name)) for s in done[name]]) for name in names
        ]
        lines.append(_line([f"**{title}**", *cells]))
    return lines


def _mean(ratios: list[float | None]) -> str:
    """Geometric mean and how many it is of; empty where one of them is missing."""
    found = [ratio for ratio in ratios if ratio is not None]
    if not found or len(found) < len(ratios):
        return ""
    mean = math.exp(sum(map(math.log, found)) / len(found))
    return f"{mean:.2f} ({len(found)})"


def _reasons(rows: list[Row]) -> list[str]:
    """One line for each contender of a setting that was not timed."""
    refused = {row["setting"]: row["refused"] for row in rows}
    return [
        f"* {SETTINGS[setting].title}, {name}: {reason}"
        for setting in _ordered(SETTINGS, set(refused))
        for name, reason in refused[setting].items()
    ]


def _ordered(known: dict[str, Any], present: set[str]) -> list[str]:
    return [name for name in known if name in present]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.table", description=__doc__)
    parser.add_argument("results", type=Path)
    report = json.loads(parser.parse_args().results.read_text())
    print(markdown(report if isinstance(report, list) else bench.rows(report)), end="")
