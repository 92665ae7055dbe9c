"""The commands `evaluate`, `bench` and `experiment`."""

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vgrad
from vgrad import tree
from vgrad.cli import checkpoint, data, models
from vgrad.cli.models import Shape
from vgrad.cli.settings import TABLE, check, device, folder_of, optional, shape_of
from vgrad.ensemble.prediction import EnsemblePrediction, ensemble_forward
from vgrad.files import Description
from vgrad_command import KINDS, PRECISIONS, number, one_of

ROWS = 1024
"""Images at a time, so that memory does not grow with the data."""

_SAID = {
    "seed": KINDS["seed"],
    # Models of earlier versions do not say, and were trained in float32.
    "precision": optional(one_of(PRECISIONS)),
    "plan": optional(TABLE),
    "epsilon": optional(number(0)),
}
"""Entries of a saved model about its training."""


def judge(
    score: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor
) -> tuple[float, list[float] | None]:
    """Return the share of images [N, C, H, W] that are classified as labels [N] say.

    Scores are logits `[N, C]`, or `[E, N, C]` of an ensemble, which takes the class of
    the largest mean probability. The second result holds the shares of its members.
    """
    right: list[Tensor] = []
    with torch.no_grad():
        for x, y in zip(images.split(ROWS), labels.split(ROWS), strict=True):
            scores = score(x)
            guesses = scores.argmax(-1)
            if scores.ndim == 3:
                mean = EnsemblePrediction.from_logits(scores).mean
                guesses = torch.cat([mean.argmax(1)[None], guesses])
            right.append((guesses == y).sum(-1))
    counts: list[int] = torch.stack(right).sum(0).reshape(-1).tolist()
    share, *each = (count / len(labels) for count in counts)
    return share, each or None


def evaluate(given: Namespace) -> None:
    """Print the accuracy of a run's model, or ensemble, on held-out data.

    The digits are split as they were when the model was trained, and the model runs in
    the precision in which it was trained.
    """
    where = device(given.device)
    path = folder_of("evaluate", given.folder)
    fmodel, params, buffers, description = checkpoint.read_model(
        path, named=given.model
    )
    check(str(path), description, _SAID)
    if description.get("plan") is not None:
        check(str(path), description, {"delta": number(0, 1)})
    held = data.load(given.data, seed=description["seed"]).to(where)
    expected = shape_of(str(path), description["shape"])
    # A file may happen to lack the last classes.
    if held.shape._replace(classes=0) != expected._replace(classes=0) or (
        held.classes > expected.classes
    ):
        raise ValueError(
            f"--data {given.data}: expected {_words(expected)}, as the model was "
            f"made for, got {_words(held.shape)}."
        )
    params, buffers = tree.to_device((params, buffers), where)
    run = models.under(description.get("precision") or "float32", fmodel)
    if checkpoint.holds_ensemble(path):
        run = ensemble_forward(run, strategy="loop")
    share, each = judge(lambda x: run(params, buffers, x), held.x_test, held.y_test)
    print(
        f"accuracy {100 * share:.2f} % on {len(held.y_test)} held-out samples "
        f"({_privacy(description)})"
    )
    for i, one in enumerate(each or []):
        print(f"member {i}: accuracy {100 * one:.2f} %")


def _privacy(description: Description) -> str:
    if description.get("plan") is None:
        return "trained without privacy"
    epsilon = description.get("epsilon")
    if epsilon is None:
        return "no claim of privacy: the noise is reproducible"
    return f"epsilon {epsilon:.3f} at delta {description['delta']:g}"


def _words(shape: Shape) -> str:
    size = f"{shape.channels} x {shape.height} x {shape.width}"
    return f"images of {size} in {shape.classes} classes"


# Benchmarks and experiments of a checkout.

COLUMNS = ("contender", "median", "plain step", "ratio to plain", "samples/s", "error")
MEMORY = "peak memory"
MEBIBYTE = 1 << 20


def bench(out: Path | None, suites: Sequence[str] = ()) -> None:
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
    out = folder_of("--out", given.out).absolute()
    command = [sys.executable, "-m", "bench.experiments", *given.names]
    command += ["--out", str(out), "--device", str(device(given.device))]
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
    """Return a table's figures from pytest-benchmark's report, without the host."""
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
    # Imported here, so that without a checkout the error is about the checkout.
    from rich.console import Console
    from rich.table import Table

    for group, columns, lines in _tables(measured):
        table = Table(title=group)
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left")
        for cells in lines:
            table.add_row(*cells)
        Console().print(table)
