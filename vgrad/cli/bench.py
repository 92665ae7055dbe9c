"""Run the benchmarks and the experiments of a checkout."""

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import vgrad
from vgrad.cli import settings

COLUMNS = ("contender", "median", "plain step", "ratio to plain", "samples/s", "error")
MEMORY = "peak memory"
MEBIBYTE = 1 << 20


def run(out: Path | None, suites: Sequence[str] = ()) -> None:
    """Run the `suites` of `bench/` beside the package, or all; print their tables.

    `out` names a JSON file for the figures; a Markdown file of the same name gets the
    tables.

    Raises:
        FileNotFoundError: the package does not lie in a checkout.
        ValueError: there is no such suite.
        SystemExit: a benchmark failed; the status is 1.
    """
    root = checkout("bench")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise FileNotFoundError(
            f"--out {out}: expected the name of a file in an existing folder."
        )
    known = {p.stem.removeprefix("test_"): p for p in root.glob("bench/test_*.py")}
    if unknown := set(suites) - set(known):
        raise ValueError(
            f"bench: no suite {', '.join(sorted(unknown))}; there are "
            f"{', '.join(sorted(known))}."
        )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "--benchmark-only"]
        command += [str(known[name]) for name in suites or sorted(known)]
        command += [f"--benchmark-json={report}", "--quiet", "--benchmark-quiet"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"bench: a benchmark failed.\n{done.stdout[-4000:]}")
        measured = rows(json.loads(report.read_text()))
    if out is not None:
        out.write_text(json.dumps(measured, indent=1) + "\n")
        out.with_suffix(".md").write_text(markdown(measured))
    _print(measured)


def experiment(given: Namespace) -> None:
    """Run experiments of `bench/experiments/`, and leave their files in a folder.

    Raises:
        OSError: the package does not lie in a checkout, or no folder can be made.
        SystemExit: one failed, or there is none of such a name.
    """
    root = checkout("experiment")
    out = settings.folder_of("--out", given.out).absolute()
    command = [sys.executable, "-m", "bench.experiments", *given.names]
    command += ["--out", str(out), "--device", str(settings.device(given.device))]
    if given.full:
        command += ["--size", "full"]
    if given.data is not None:
        here = Path(given.data)
        command += ["--data", str(here.absolute()) if here.exists() else given.data]
    try:
        status = subprocess.run(command, cwd=root).returncode
    except KeyboardInterrupt:  # which the other process has told of
        status = 130
    if status != 0:
        sys.exit(status)


def checkout(command: str) -> Path:
    """Return the folder in which the package lies beside `bench/`.

    Raises:
        FileNotFoundError: there is no such folder there.
    """
    root = Path(vgrad.__file__).parent.parent
    if not (root / "bench" / "measure.py").exists():
        raise FileNotFoundError(
            f"{command}: expected a checkout of vgrad with its folder bench, got a "
            f"package in {root}. Clone the repository and run it there."
        )
    return root


def rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Keep of pytest-benchmark's report what a table needs, and nothing of the host."""
    source = report["commit_info"]
    commit = f"{source['id'][:12]}{'+' * source['dirty']}"  # with changes since
    processor = report["machine_info"].get("cpu", {}).get("brand_raw", "unknown")
    return [
        {
            "group": each["group"],
            "contender": str(each["params"]["name"]),
            "median_seconds": each["stats"]["median"],
            "iqr_seconds": each["stats"]["iqr"],
            "rounds": each["stats"]["rounds"],
            **each["extra_info"],
            "processor": processor,
            "date": report["datetime"][:10],
            "commit": commit,
        }
        for each in report["benchmarks"]
    ]


def markdown(measured: list[dict[str, Any]]) -> str:
    """Return the tables, with the machine and the versions they were made on."""
    first = measured[0]
    text = [
        f"Made by `python -m vgrad bench --out FILE` on {first['date']}, of commit "
        f"{first['commit']}: {first['processor']}, {first['threads']} threads, torch "
        f"{first['torch']}.",
    ]
    for group, columns, lines in _tables(measured):
        text += ["", f"**{group}**", "", f"| {' | '.join(columns)} |"]
        text += ["|" + " --- |" * len(columns)]
        text += [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join(text) + "\n"


def _tables(
    measured: list[dict[str, Any]],
) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    """Yield the name of each group, its columns and its lines."""
    for group in sorted({row["group"] for row in measured}):
        chosen = [row for row in measured if row["group"] == group]
        with_memory = any("peak_bytes" in row for row in chosen)
        columns = [*COLUMNS, MEMORY] if with_memory else COLUMNS
        lines = [_cells(row)[: len(columns)] for row in chosen]
        yield group, columns, lines


def _cells(row: dict[str, Any]) -> list[str]:
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


def _print(measured: list[dict[str, Any]]) -> None:
    """Print a table for each group."""
    # Imported here, so that without a checkout the error is about the checkout.
    from rich.console import Console
    from rich.table import Table

    for group, columns, lines in _tables(measured):
        table = Table(title=group)
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left")
        for cells in lines:
            table.add_row(*cells)
        Console().print(table)
