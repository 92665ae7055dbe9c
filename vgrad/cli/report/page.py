"""`report.html`, a page that shows a whole run in a browser and needs no other file.

Its pictures lie in it, and it has no script. Whatever the user has named is escaped.
"""

import base64
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from vgrad import files
from vgrad.cli import checkpoint
from vgrad.cli.metrics import FIGURES, RUNS, Record
from vgrad.cli.report import console, pictures
from vgrad.cli.setup import Job
from vgrad_command import printable, spelled

PAGE = "report.html"

NO_CLAIM = (
    "The noise can be reproduced from the seed: the epsilon of this run may not be "
    "claimed."
)

_MOST_LINES = 100
"""Epochs in the table of a page; of more some are left out."""

_SHOWS = {
    pictures.CURVES: (
        "Accuracy and privacy over the steps",
        "How often each run is right on the held-out samples and, with privacy, how "
        "much of epsilon has been spent.",
    ),
    pictures.RELIABILITY: (
        "Confidence",
        "On the dotted line the ensemble is right as often as it is confident; below "
        "it the ensemble is overconfident.",
    ),
    pictures.UNCERTAIN: (
        "The most uncertain samples",
        "Held-out samples as they are in the data, those of the largest entropy first.",
    ),
}
"""Heading and caption of each picture."""

_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; line-height: 1.5; color: #1a1a1a;
  background: #fff; max-width: 52rem; margin: 2rem auto; padding: 0 1rem;
  overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }}
th {{ overflow-wrap: normal; }}
th:first-child, td:first-child {{ text-align: left; }}
img {{ max-width: 100%; height: auto; }}
.warning {{ border-left: .4rem solid #D55E00; padding: .4rem 1rem;
  background: #fdf1e9; }}
</style>
</head>
<body>
"""


def release(job: Job, folder: Path) -> str:
    """Say what of a finished run may be released."""
    if job.settings.reproducible_noise:
        return NO_CLAIM
    if not job.plan:
        return (
            f"Saved: {folder / checkpoint.ENSEMBLE}, trained without privacy. Nothing "
            f"here hides the training data."
        )
    names = checkpoint.MODEL
    if job.settings.members > 1:
        names = f"{checkpoint.ENSEMBLE} and {checkpoint.ENSEMBLE_TEXT}"
    return (
        f"For release: {folder / names}, with epsilon {job.plan.epsilon():.3f} at "
        f"delta {job.plan.delta:g}. The other files tell more about the training data."
    )


def extensions(job: Job) -> list[str]:
    """Return a line for each extension of a run, with the rise of epsilon."""
    lines = []
    for before, after in itertools.pairwise([job.settings.epochs, *job.extended]):
        line = f"Extended from {before} to {after} epochs"
        if job.plan:
            spent = [
                job.trainers.private.epsilon(job.ends[n - 1]) for n in (before, after)
            ]
            line += (
                f" with noise multiplier {job.plan.noise_multiplier:.4g} as before: "
                f"epsilon rises from {spent[0]:.3f} to {spent[1]:.3f} at delta "
                f"{job.plan.delta:g}"
            )
        lines.append(f"{line}.")
    return lines


def write_page(
    folder: Path,
    job: Job,
    private: Sequence[Record],
    plain: Sequence[Record],
    images: Mapping[str, bytes],
) -> None:
    """Write the page of a finished run; `images` are its pictures by file name."""
    title = _text(pictures.title(job))
    parts = [
        _HEAD.format(title=title),
        f"<h1>{title}</h1>\n",
        '<p class="warning"><strong>This page is not for release.</strong> Its figures '
        "and pictures come from the private data without noise.</p>\n",
        f"<h2>What may be released</h2>\n<p>{_text(release(job, folder))}</p>\n",
        *(f"<p>{_text(line)}</p>\n" for line in extensions(job)),
        _withheld(images) if job.plan else "",
        "<h2>At the end</h2>\n",
        _table(("", *console.COLUMNS), console.last_figures(private, plain)),
        *(_picture(name, image) for name, image in images.items()),
        "<h2>Epsilon and accuracy, epoch by epoch</h2>\n",
        _epochs(private, plain),
        "<h2>Settings</h2>\n",
        _table(("", "value"), _settings(job)),
        "<p>Made by <code>python -m vgrad train</code>.</p>\n</body>\n</html>\n",
    ]
    files.replace(folder / PAGE, "".join(parts).encode(), private=True)


def _text(value: object) -> str:
    """Write anything as text of a page."""
    return escape(printable(str(value)))


def _withheld(images: Iterable[str]) -> str:
    """List what may not be released, and why."""
    secret, figures = (
        ", ".join(f"<code>{name}</code>" for name in names)
        for names in (checkpoint.STATES, (*FIGURES, *images, PAGE))
    )
    return (
        f"<ul>\n<li>{secret}: keep them secret. The key in them reveals the noise.</li>"
        f"\n<li>{figures}: not for release. They were computed from the private data "
        f"without noise.</li>\n</ul>\n"
    )


def _picture(name: str, image: bytes) -> str:
    """Show a picture that lies in the page."""
    heading, caption = _SHOWS[name]
    data = base64.b64encode(image).decode()
    return (
        f"<h2>{heading}</h2>\n<figure>\n"
        f'<img alt="{heading}" src="data:image/png;base64,{data}">\n'
        f"<figcaption>{caption}</figcaption>\n</figure>\n"
    )


def _epochs(private: Sequence[Record], plain: Sequence[Record]) -> str:
    """Show the figures after each epoch, or after some of many."""
    count = len(plain)
    every = -(-count // _MOST_LINES)
    # The last one always, whichever are left out.
    shown = [*range(every - 1, count - 1, every), count - 1]
    head, runs = ["epoch", "step"], []
    if private:
        head.append("epsilon spent")
    for name, records in zip(RUNS, (private, plain), strict=True):
        if records:
            head += [f"accuracy, {name}", f"loss, {name}"]
            runs.append(records)
    lines = []
    for i in shown:
        line: list[object] = [i + 1, plain[i].step]
        if private:
            line.append(console.decimals(private[i].epsilon))
        for records in runs:
            one = records[i]
            line += [console.percent(one.test_accuracy), console.decimals(one.loss)]
        lines.append(line)
    return _table(head, lines)


def _settings(job: Job) -> list[tuple[object, ...]]:
    """List the arguments of a run and what follows from them."""
    found: dict[str, object] = {
        spelled(name): value for name, value in dataclasses.asdict(job.settings).items()
    }
    found["training samples"] = len(job.data.y_train)
    found["held-out samples"] = len(job.data.y_test)
    found["steps of each model"] = job.ends[-1]
    if job.plan:
        found["sampling rate"] = f"{job.plan.sampling_rate:.4g}"
        found["noise multiplier"] = f"{job.plan.noise_multiplier:.4g}"
    found |= job.description["machine"]
    return list(found.items())


def _table(head: Iterable[object], lines: Iterable[Iterable[object]]) -> str:
    """Write a table, whose entries are escaped."""
    rows = [_row("th", head), *(_row("td", line) for line in lines)]
    return f"<table>\n{''.join(rows)}</table>\n"


def _row(kind: str, cells: Iterable[object]) -> str:
    inner = "".join(f"<{kind}>{_text(cell)}</{kind}>" for cell in cells)
    return f"<tr>{inner}</tr>\n"
