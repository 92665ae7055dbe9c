"""Run suites of benchmarks: `python -m bench.suites [--out FILE] [SUITE ...]`.

A suite is `bench/test_SUITE.py`; without a name all of them run. Their figures are
printed as tables, and written to a JSON file and a Markdown file of the same name.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BENCH = Path(__file__).parent
COLUMNS = ("contender", "median", "plain step", "ratio to plain", "samples/s", "error")
MEMORY = "peak memory"
MEBIBYTE = 1 << 20

Row = dict[str, Any]


def rows(report: dict[str, Any] | list[Row]) -> list[Row]:
    """Return figures from pytest-benchmark's report, without the host, or as they are.

    A list holds the figures already, as `main` wrote them.
    """
    if isinstance(report, list):
        return report
    source = report["commit_info"]
    commit = f"{source['id'][:12]}{'+' * source['dirty']}"  # with changes since
    processor = report["machine_info"].get("cpu", {}).get("brand_raw", "unknown")
    return [
        {
            "group": run["group"],
            "contender": str(run["params"]["name"]),
            "median_seconds": run["stats"]["median"],
            "iqr_seconds": run["stats"]["iqr"],
            "rounds": run["stats"]["rounds"],
            **run["extra_info"],
            "processor": processor,
            "date": report["datetime"][:10],
            "commit": commit,
        }
        for run in report["benchmarks"]
    ]


def markdown(measured: list[Row]) -> str:
    """Return the tables, with the machine and the versions they were made on."""
    first = measured[0]
    text = [
        f"Made by `python -m bench.suites --out FILE` on {first['date']}, of commit "
        f"{first['commit']}: {first['processor']}, {first['threads']} threads, torch "
        f"{first['torch']}.",
    ]
    for group, columns, lines in _tables(measured):
        text += ["", f"**{group}**", "", f"| {' | '.join(columns)} |"]
        text += ["|" + " --- |" * len(columns)]
        text += [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join(text) + "\n"


def show(measured: list[Row]) -> None:
    """Print the tables."""
    for group, columns, lines in _tables(measured):
        table = Table(title=group)
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left")
        for cells in lines:
            table.add_row(*cells)
        Console().print(table)


def _tables(
    measured: list[Row],
) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Yield the name of each group, its columns and its lines."""
    for group in sorted({row["group"] for row in measured}):
        chosen = [row for row in measured if row["group"] == group]
        with_memory = any("peak_bytes" in row for row in chosen)
        columns = [*COLUMNS, MEMORY] if with_memory else COLUMNS
        yield group, columns, [_cells(row)[: len(columns)] for row in chosen]


def _cells(row: Row) -> list[str]:
    peak = row.get("peak_bytes")
    return [
        row["contender"],
        f"{1e3 * row['median_seconds']:.1f} ms",
        f"{1e3 * row['plain_seconds']:.1f} ms",
        f"{row['ratio_to_plain']:.2f}",
        f"{row['samples_per_second']:.0f}",
        f"{row['oracle_error']:.0e}",
        "" if peak is None else f"{peak / MEBIBYTE:.0f} MiB",
    ]


def main() -> None:
    """Read the arguments, run the suites and show what they measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.suites")
    parser.add_argument("--out", type=Path)
    parser.add_argument("suites", nargs="*")
    arguments = parser.parse_args()
    paths = [BENCH / f"test_{name}.py" for name in arguments.suites]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "--benchmark-only"]
        command += [str(path) for path in paths or sorted(BENCH.glob("test_*.py"))]
        command += [f"--benchmark-json={report}", "--quiet", "--benchmark-quiet"]
        done = subprocess.run(command, cwd=BENCH.parent, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"bench: a benchmark failed.\n{done.stdout[-4000:]}")
        measured = rows(json.loads(report.read_text()))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(measured, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(markdown(measured))
    show(measured)


if __name__ == "__main__":
    main()
