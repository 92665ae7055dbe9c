"""What an experiment is, and how its pieces run: one after another, each kept at once.

The results lie in `NAME.json` of a folder. A run that was interrupted goes on after the
last piece that the file has; a run of other settings needs another folder.
"""

import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vgrad import files

Size = Literal["tiny", "small", "full"]
"""For tests, for minutes on a CPU, and as in the articles."""

Show = Callable[[float], None]
"""Takes the share of a piece that is done, from 0 to 1."""

Result = dict[str, Any]
Results = Mapping[str, Result]
"""What each piece found, by its name, in the order of the pieces."""


@dataclass(frozen=True)
class Place:
    """The machine and the data of an experiment.

    Attributes:
        data: the source of images; each experiment has its own if there is none.
        folder: where results lie, and checkpoints.
    """

    size: Size
    device: str
    folder: Path
    data: str | None = None

    def pick(self, *, tiny: Any, small: Any, full: Any) -> Any:
        """Choose by the size."""
        return {"tiny": tiny, "small": small, "full": full}[self.size]

    @property
    def machine(self) -> dict[str, Any]:
        """What numbers depend on."""
        on_cuda = self.device.startswith("cuda")
        return {
            "device": torch.cuda.get_device_name(self.device) if on_cuda else "CPU",
            "processor": _processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }


@dataclass(frozen=True)
class Piece:
    """A part of an experiment, some seconds or minutes of work."""

    name: str
    run: Callable[[Show], Result]


@dataclass(frozen=True)
class Study:
    """An experiment.

    Attributes:
        title: its subject, in a line.
        pieces: its pieces at a place, the most telling first.
        check: raises an AssertionError where results are not as they must be, and
            returns its observations, a sentence each.
        table: the results in Markdown.
        draw: fills a figure. Its title goes below the study's.
        figsize: of the figure, in inches.
    """

    title: str
    pieces: Callable[[Place], list[Piece]]
    check: Callable[[Results], list[str]]
    table: Callable[[Results], str]
    draw: Callable[[Results, Figure], None]
    figsize: tuple[float, float] = (10, 4)


@dataclass
class Kept:
    """Results in a file, which is replaced whenever one is added."""

    path: Path
    settings: dict[str, Any]
    pieces: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path, settings: dict[str, Any]) -> "Kept":
        """Go on with a file, or start one.

        Raises:
            ValueError: it has results of other settings, or is damaged.
        """
        if not path.exists():
            return cls(path, settings)
        try:
            content = files.from_json(path.read_bytes())
            before, pieces = content["settings"], dict(content["pieces"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}: expected the results of an experiment, got a damaged file "
                f"({error}). Name another folder with --out."
            ) from error
        different = [key for key in settings if before.get(key) != settings[key]]
        if different:
            key = different[0]
            raise ValueError(
                f"{path}: expected results with {key} {settings[key]!r}, got "
                f"{before.get(key)!r}. Name another folder with --out."
            )
        return cls(path, settings, pieces)

    def add(self, name: str, result: Result) -> None:
        """Keep what a piece found."""
        self.pieces[name] = result
        content = {"settings": self.settings, "pieces": self.pieces}
        text = json.dumps(content, indent=1, allow_nan=False)
        files.replace(self.path, text.encode() + b"\n")


def run(name: str, study: Study, place: Place) -> list[str]:
    """Run the rest of an experiment, check it, draw it; return the checked facts.

    Raises:
        AssertionError: a result is not as it must be. Results are kept.
        ValueError: the folder has results of other settings.
    """
    settings = {"size": place.size, "data": place.data, **place.machine}
    place.folder.mkdir(parents=True, exist_ok=True)
    record = Kept.at(place.folder / f"{name}.json", settings)
    pieces = study.pieces(place)
    with _progress(name, len(pieces)) as begin:
        for piece in pieces:
            show = begin(piece.name)
            if piece.name not in record.pieces:
                record.add(piece.name, piece.run(show))
    results = {piece.name: record.pieces[piece.name] for piece in pieces}
    machine = place.machine
    threads = (
        "one thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    )
    device = f"{machine['processor']}, {threads}"
    if place.device != "cpu":
        device = machine["device"]
    figure = Figure(figsize=study.figsize, layout="constrained")
    study.draw(results, figure)
    title = "\n".join(
        filter(None, [f"{study.title} ({device})", figure.get_suptitle()])
    )
    figure.suptitle(title, fontsize="medium")
    figure.savefig(place.folder / f"{name}.png", dpi=110)
    text = [f"# {study.title}", ""]
    text += [f"{device}, torch {machine['torch']}, size {place.size!r}.", ""]
    text += [study.table(results), "", f"![{study.title}]({name}.png)", ""]
    path = place.folder / f"{name}.md"
    files.replace(path, "\n".join(text).encode())
    seen = study.check(results)
    files.replace(path, "\n".join([*text, "Checked:", "", *_list(seen), ""]).encode())
    return seen


def number(value: Any) -> float | None:
    """Return a number as JSON has it: None where it is not finite."""
    value = float(value)
    return value if math.isfinite(value) else None


def _list(lines: list[str]) -> list[str]:
    return [f"* {line}" for line in lines]


@contextmanager
def _progress(name: str, count: int) -> Iterator[Callable[[str], Show]]:
    """Show a bar over pieces and one for the piece that runs."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns) as shown:
        all_of_it, one = shown.add_task(name, total=count), shown.add_task("", total=1)
        done = -1

        def begin(piece: str) -> Show:
            nonlocal done
            done += 1
            shown.update(all_of_it, completed=done)
            shown.reset(one, description=f"  {piece}")
            return lambda share: shown.update(one, completed=share)

        yield begin
        shown.update(all_of_it, completed=count)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = next(line for line in lines if line.startswith("model name"))
        return named.partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor()
