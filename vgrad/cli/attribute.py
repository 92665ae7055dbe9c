"""The command `attribute`: the training samples that made a run's predictions.

Q queries, N training samples, C classes. Nothing that it writes is private.
"""

import base64
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from matplotlib.image import imsave
from torch import Tensor
from torch.nn import functional as F

from vgrad import attribution, curvature, files, tree
from vgrad.cli import checkpoint, data, models, report
from vgrad.cli.data import Dataset
from vgrad.cli.evaluate import ROWS
from vgrad.cli.settings import Settings, folder_of
from vgrad.ensemble.stacking import member
from vgrad.functional.losses import sample_loss
from vgrad.functional.model import FunctionalModel
from vgrad.typing import Buffers, Params

SCORES, PAGE = "attribution.safetensors", "attribution.html"

_SECRET = "They come from the training data without noise: as secret as it is."

_BATCH, _NUMBERS = 256, 2**26
"""Training samples, and numbers of the queries' gradients, at once."""

_DIRECTIONS = 1024
"""Of the projections of TRAK."""

_EXACT = 32
"""Classes up to which the curvature is exact: it takes a backward pass for each."""

_SHOWN = {"queries": 24, "samples": 8, "suspects": 40}
"""On the page; samples on each side of a query."""

Members = list[tuple[Params, Buffers]]


def attribute(arguments: Namespace) -> None:
    """Score training samples for queries, and show the extreme ones on a page."""
    folder = folder_of("attribute", arguments.folder)
    out = folder_of("--out", arguments.out or arguments.folder)
    _, before = checkpoint.read_state(folder)
    checkpoint.check_entries(before)
    again = Namespace(extend=False)
    if arguments.model is not None:
        again.model = arguments.model
    settings = Settings.recorded(before["arguments"], again, command="attribute")
    if before["plan"] and not arguments.not_private:
        raise ValueError(
            f"attribute {folder}: expected a run without privacy, got a private one. "
            f"Scores and pictures of its training samples are not private. Add "
            f"--not-private to write them, for readers who may see the data."
        )
    fmodel, *entries, _ = checkpoint.read_model(folder, named=arguments.model)
    source = arguments.data or settings.data
    dataset = data.load(source, seed=settings.seed)
    if data.digest(dataset) != before["data"].get("sha256"):
        raise ValueError(
            f"--data {source}: expected the data that the run was trained on, got "
            f"others. Name their file, if it has moved."
        )
    fmodel = models.under(settings.precision, fmodel)
    entries = tree.tree_map(lambda each: each.detach().to(settings.device), entries)
    dataset, members = tree.to_device(dataset, settings.device), [entries]
    if (count := settings.members) > 1:
        members = [[member(each, i) for each in entries] for i in range(count)]
    guesses = _predicted(fmodel, members, dataset.x_test)
    queries = _chosen(arguments.queries, guesses, dataset.y_test)
    about = {
        "run": folder,
        "data": source,
        "model": settings.model,
        "members": settings.members,
        "method": arguments.method,
        "damping": arguments.damping,
    }
    report.say(
        f"{len(queries)} of {len(guesses)} held-out samples, "
        f"{len(dataset.y_train)} training samples, method {arguments.method}"
    )
    scores, own = _scores(arguments, fmodel, members, dataset, queries)
    out.mkdir(parents=True, exist_ok=True)
    tensors = {"scores": scores, "queries": queries, "self_influence": own}
    description = {"kind": "attribution", **about, "run": str(folder)}
    files.write_tensors(out / SCORES, tensors, description, private=True)
    suspects = own.argsort(descending=True, stable=True)[: _SHOWN["suspects"]]
    parts = [
        '<p class="warning"><strong>This page is not for release.</strong> Its scores '
        f"and pictures are not private, whatever the run is. {_SECRET}</p>\n",
        f"<h2>Predictions</h2>\n<p>{min(len(queries), _SHOWN['queries'])} of "
        f"{len(queries)} queries, which are held-out samples. More weight on a helpful "
        f"training sample makes the label of the query more likely, more on a harmful "
        f"one less. Below each: its number, its label and its score.</p>\n<table>\n"
        "<tr><th>query</th><th>most helpful</th><th>most harmful</th></tr>\n",
        *_rows(dataset, guesses, queries, scores),
        "</table>\n<h2>Labels to check first</h2>\n<p>Training samples with the largest "
        "influence on themselves: mislabelled and rare ones. Below each: its number, "
        "its label, the model's guess, and its influence on itself.</p>\n<div>\n",
        *_suspects(dataset, suspects, own, _predicted(fmodel, members, dataset.x_train[suspects])),
        "</div>\n<h2>Settings</h2>\n",
        report.table(("", "value"), about.items()),
        "<p>Made by <code>python -m vgrad attribute</code>.</p>\n",
    ]
    title = f"{Path(source).name}, {settings.model}, seed {settings.seed}"
    report.save_page(out / PAGE, f"Training samples behind predictions: {title}", parts)
    report.say(f"Saved: {out / SCORES} and {out / PAGE}, not for release. {_SECRET}")
