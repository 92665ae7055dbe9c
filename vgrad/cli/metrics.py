"""The figures of a run, one line of JSON after each epoch.

They are computed from the private data without noise: these files are not for release.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vgrad import files
from vgrad.cli.settings import check, optional, several
from vgrad_command import number, whole

METRICS = "metrics.jsonl"
PLAIN = "plain.jsonl"
FIGURES = (METRICS, PLAIN)
RUNS = ("private SGD", "plain SGD")
"""Files and names of the private run and of the plain one."""


class Record(NamedTuple):
    """The figures after one epoch; None stands for NaN or infinity, and for no figure.

    Attributes:
        step: how many steps have been taken.
        loss: mean over the samples of the epoch's batches.
        test_accuracy: share of the held-out samples that are classified rightly.
        epsilon: privacy spent so far; None for the run without privacy.
        samples_per_second: training alone.
        loss_scale: of the next step; None, and not written, where there is none.
        skipped: steps of the epoch that were left out because a gradient was not
            finite, which private steps never are; written beside a loss scale.
        member_accuracies: of an ensemble. Its loss is the mean over the members, its
            loss scale their smallest; skipped steps and samples are sums.
    """

    step: int
    loss: float | None
    test_accuracy: float
    epsilon: float | None
    samples_per_second: float
    loss_scale: float | None = None
    skipped: int | None = None
    member_accuracies: list[float] | None = None


_KINDS = {
    "step": whole(0),
    "loss": optional(number()),
    "test_accuracy": number(0, 1),
    "epsilon": optional(number(0)),
    "samples_per_second": number(0),
    "loss_scale": optional(number(0)),
    "skipped": optional(whole(0)),
    "member_accuracies": optional(several(number(0, 1))),
}


def names(trainers: Sequence[Any]) -> list[str]:
    """Return the files of a pair of runs; one that is `()` has none."""
    return [name for name, one in zip(FIGURES, trainers, strict=True) if one]


def _open(path: Path, flags: int) -> int:
    """Open a file of the folder, for its owner alone: no link is followed, no pipe."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if flags & (os.O_WRONLY | os.O_RDWR):
        os.fchmod(descriptor, 0o600)
    return descriptor


def append(path: Path, record: Record) -> int:
    """Add a line, wait until it is on the disk, and return the length of the file."""
    entries = {
        name: value
        for name, value in record._asdict().items()
        if value is not None or name not in Record._field_defaults
    }
    descriptor = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with open(descriptor, "a", encoding="ascii") as file:
        file.write(json.dumps(entries, allow_nan=False) + "\n")
        file.flush()
        os.fsync(descriptor)
        return file.tell()


def cut(path: Path, length: int) -> None:
    """Cut off the lines of steps after the saved state."""
    if os.path.lexists(path):
        with open(_open(path, os.O_RDWR), "r+b") as file:
            file.truncate(length)
            os.fsync(file.fileno())


def read(path: Path, length: int) -> list[Record]:
    """Read the first `length` bytes, which are the lines of the saved state.

    Raises:
        OSError: the file cannot be read, or is a link.
        ValueError: it is shorter than that, or holds something else.
    """
    known = b""
    if os.path.lexists(path):
        with open(_open(path, os.O_RDONLY), "rb") as file:
            known = file.read(min(length, os.fstat(file.fileno()).st_size))
    if len(known) < length:
        raise ValueError(
            f"{path}: expected the {length} bytes of the saved state, got "
            f"{len(known)}. The file was changed after it was written."
        )
    records = []
    for i, line in enumerate(known.splitlines(), start=1):
        where = f"{path}, line {i}"
        try:
            found = files.from_json(line)
        except ValueError as error:
            message = f"{where}: expected JSON, got an error: {error}"
            raise ValueError(message) from error
        check(where, found, _KINDS)
        records.append(Record(**{name: found.get(name) for name in Record._fields}))
    return records
