"""Tables of `test_clipped.py` and `test_compiled.py`: `python -m bench.table FILE`.

The file is by `pytest --benchmark-json` or `python -m bench.suites --out`. A row
is a setting, a column a contender, a number the ratio to plain SGD of the same setting.
The last rows are geometric means, for each contender over the settings that it did, and
for comparison vgrad's over those same settings. `--clock cpu` compares CPU time in the
place of wall time, for what ran with one thread.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from bench import suites
from bench.compiling import COMPILED, STEP, SUM
from bench.contenders import CLIPPED, GRADIENTS
from bench.models import COUNTED, SETTINGS, TIMED

Row = dict[str, Any]
OURS = ("vgrad-auto", "vgrad")
"""What is set beside the means of the others: the first of these that was timed."""

BUILT = "build_seconds"
MEANS = {
    "geometric mean": tuple(SETTINGS),
    "of the twelve": TIMED,
    "of the others": tuple(n for n in COUNTED if n not in TIMED),
}
TIME, TIME_TO_COMPILED = "ratio_to_plain", "ratio_to_compiled"
TABLES = (
    ("clipped sum", TIME, "Time of the clipped sum / time of plain SGD"),
    ("clipped sum", "memory_ratio", "Memory of the clipped sum / memory of plain SGD"),
    ("stored gradients", TIME, "Time of stored gradients / plain SGD"),
    (SUM, TIME, "Time of the clipped sum / eager plain SGD"),
    (SUM, TIME_TO_COMPILED, "Time of the clipped sum / compiled plain SGD"),
    (SUM, "memory_ratio", "Memory of the clipped sum / eager plain SGD"),
    (SUM, BUILT, "Clipped sum: seconds to build, captures, redos"),
    (STEP, TIME, "Time of the private step / eager step of SGD"),
    (STEP, TIME_TO_COMPILED, "Time of the private step / compiled step of SGD"),
    (STEP, "memory_ratio", "Memory of the private step / eager step of SGD"),
    (STEP, BUILT, "Private step: seconds to build, captures, redos"),
)


def markdown(measured: list[Row], clock: str = "wall") -> str:
    """Return the tables of every device, and below them who was refused and why."""
    rows = [row for row in measured if "setting" in row]
    if not rows:
        return ""
    first = rows[0]
    commits = dict.fromkeys(row.get("commit", "not known") for row in rows)
    text = [
        f"{first['date']}, commit {', '.join(commits)}: "
        f"{first['processor']}, {first['threads']} threads, torch {first['torch']}, "
        f"{clock} time. Ratios to plain SGD.",
    ]
    for device in sorted({row["device"] for row in rows}):
        for kind, value, title in TABLES:
            timed = value in (TIME, TIME_TO_COMPILED)
            key = f"cpu_{value}" if timed and clock == "cpu" else value
            chosen = [
                row
                for row in rows
                if row["device"] == device
                and row["group"].startswith(f"{kind},")
                and key in row
            ]
            if chosen:
                text += ["", f"**{title}, {device}**", "", *_table(chosen, key)]
                if value == TIME:
                    text += ["", *_reasons(chosen)]
    return "\n".join(text).rstrip() + "\n"


def _table(rows: list[Row], value: str) -> list[str]:
    by_place = {(row["setting"], row["contender"]): row for row in rows}
    refused = {row["setting"]: row["refused"] for row in rows}
    settings = _ordered(SETTINGS, {row["setting"] for row in rows})
    timed = {row["contender"] for row in rows}
    names = _ordered(
        {**CLIPPED, **GRADIENTS, **COMPILED}, timed.union(*refused.values())
    )
    lines = [_line(["setting", *names]), "|" + " --- |" * (len(names) + 1)]
    for setting in settings:
        cells = []
        for name in names:
            reason = refused[setting].get(name, "")
            row = by_place.get((setting, name))
            cells.append(reason.split(":")[0] if row is None else _cell(row, value))
        lines.append(_line([SETTINGS[setting].title, *cells]))
    if value == BUILT:
        return lines
    ratios = {place: row[value] for place, row in by_place.items()}
    done = {name: [s for s in settings if (s, name) in ratios] for name in names}
    ours = next((name for name in OURS if name in timed), OURS[-1])
    for title, of in MEANS.items():
        means = [_mean([ratios[s, n] for s in done[n] if s in of]) for n in names]
        others = [
            _mean([ratios.get((s, ours)) for s in done[n] if s in of]) for n in names
        ]
        if any(means) and (set(of) >= set(SETTINGS) or set(settings) - set(of)):
            lines.append(_line([f"**{title}**", *means]))
            lines.append(_line([f"**{ours} on the same**", *others]))
    return lines


def _cell(row: Row, value: str) -> str:
    if value != BUILT:
        return f"{row[value]:.2f}"
    built = f"{row[BUILT]:.1f} s"
    return f"{built}, {row['captures']}, {row['redos']}" if "captures" in row else built


def _mean(ratios: list[float | None]) -> str:
    """Geometric mean and how many it is of; empty where one of them is missing."""
    present = [ratio for ratio in ratios if ratio is not None]
    if not present or len(present) < len(ratios):
        return ""
    mean = math.exp(sum(map(math.log, present)) / len(present))
    return f"{mean:.2f} ({len(present)})"


def _reasons(rows: list[Row]) -> list[str]:
    """One line for each contender of a setting that was not timed."""
    refused = {row["setting"]: row["refused"] for row in rows}
    return [
        f"* {SETTINGS[setting].title}, {name}: {reason}"
        for setting in _ordered(SETTINGS, set(refused))
        for name, reason in refused[setting].items()
    ]


def _ordered(order: dict[str, Any], present: set[str]) -> list[str]:
    return [name for name in order if name in present]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.table", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    arguments = parser.parse_args()
    measured: list[Row] = []
    for path in arguments.results:
        measured += suites.rows(json.loads(path.read_text()))
    print(markdown(measured, arguments.clock), end="")
