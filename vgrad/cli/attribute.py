"""The command `attribute`: the training samples that made a run's predictions.

Q queries, N training samples, C classes. Nothing that it writes is private.
"""

import base64
import io
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
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
from vgrad.cli.settings import folder_of
from vgrad.ensemble.stacking import member
from vgrad.functional.losses import sample_loss
from vgrad.functional.model import FunctionalModel

SCORES, PAGE = "attribution.safetensors", "attribution.html"

_BATCH, _NUMBERS = 256, 2**26
"""Training samples, and numbers in the gradients of queries, at once."""

_DIRECTIONS = 1024
"""Of the projections of TRAK."""

_EXACT = 32
"""Classes up to which the curvature is exact: it takes a backward pass for each."""

_QUERIES, _SAMPLES, _SUSPECTS, _FEATURES = 24, 8, 40, 6
"""On the page: queries, samples on each side of one, suspects, numbers of a row."""

_SECRET = "They come from the training data without noise, and are as secret as it is."


def attribute(arguments: Namespace) -> None:
    """Score training samples for queries, and show the extreme ones on a page."""
    folder, settings, before = checkpoint.described("attribute", arguments)
    out = folder_of("--out", arguments.out or arguments.folder)
    if before["plan"] and not arguments.not_private:
        raise ValueError(
            f"attribute {folder}: expected a run without privacy, got a private one, "
            f"whose training samples scores and pictures reveal. Add --not-private to "
            f"write them for readers who may see the data."
        )
    fmodel, *entries, _ = checkpoint.read_model(folder, named=arguments.model)
    source = arguments.data or settings.data
    dataset = data.load(source, seed=settings.seed)
    if data.digest(dataset) != before["data"]["sha256"]:
        raise ValueError(
            f"--data {source}: expected the data that the run was trained on, got "
            f"others. Name their file, if it has moved."
        )
    entries = tree.tree_map(Tensor.detach, entries)
    dataset, entries = tree.to_device((dataset, entries), settings.device)
    fmodel, members = models.under(settings.precision, fmodel), [entries]
    if (count := settings.members) > 1:
        members = [[member(each, i) for each in entries] for i in range(count)]
    held_out = _probabilities(fmodel, members, dataset.x_test)
    if not held_out.isfinite().all():
        raise ValueError(
            f"attribute {folder}: expected a model whose scores are finite, got one "
            f"that has diverged. Train it at a lower rate."
        )
    queries = _chosen(arguments.queries, held_out, dataset.y_test)
    about = {name: getattr(arguments, name) for name in ("method", "damping")}
    about |= {name: getattr(settings, name) for name in ("model", "members", "seed")}
    about |= {"data": source, "run": str(folder)}
    report.say(
        f"{len(queries)} of {len(held_out)} held-out samples are queries, for "
        f"{len(dataset.y_train)} training samples; method {arguments.method}"
    )
    scores, own = _scores(arguments, fmodel, members, dataset, queries)
    out.mkdir(parents=True, exist_ok=True)
    (out / PAGE).unlink(missing_ok=True)  # of other scores
    tensors = {"scores": scores, "queries": queries, "self_influence": own}
    description = {"kind": "attribution", **about}
    files.write_tensors(out / SCORES, tensors, description, private=True)
    suspects = own.argsort(descending=True, stable=True)[:_SUSPECTS]
    guesses = _probabilities(fmodel, members, dataset.x_train[suspects]).argmax(1)
    parts = [
        '<p class="warning"><strong>This page is not for release.</strong> Its scores '
        f"and pictures are not private, whatever the run is. {_SECRET}</p>\n",
        *_of_queries(dataset, held_out, queries, scores),
        "<h2>Labels to check first</h2>\n<p>Training samples with the most influence "
        "on themselves: wrong labels and rare samples. Below each: its number, its "
        "label, the model's guess, its score.</p>\n",
        *_samples(dataset, suspects, own, [f"guess {guess}" for guess in guesses]),
        "<h2>Settings</h2>\n",
        report.table(("", "value"), about.items()),
        "<p>Made by <code>python -m vgrad attribute</code>.</p>\n",
    ]
    title = f"{Path(source).name}, {settings.model}, seed {settings.seed}"
    report.save_page(out / PAGE, f"Training samples behind predictions: {title}", parts)
    report.say(f"Saved: {out / SCORES} and {out / PAGE}, not for release. {_SECRET}")


def _probabilities(fmodel: FunctionalModel, members: list, images: Tensor) -> Tensor:
    """Return the mean over members, [N, C]."""
    with torch.no_grad():
        each = [
            torch.cat([fmodel(*entries, x) for x in images.split(ROWS)])
            for entries in members
        ]
    return torch.stack(each).double().softmax(-1).mean(0)


def _chosen(text: str, probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the numbers of the held-out samples that are queries, [Q]."""
    if text == "misclassified":
        wrong = (probabilities.argmax(1) != labels).nonzero().flatten()
        if not len(wrong):
            raise ValueError(
                f"--queries misclassified: expected a wrong guess among {len(labels)} "
                f"held-out samples, got none. Name samples, as in --queries 0:10."
            )
        # The label that is least likely comes first.
        return wrong[probabilities[wrong, labels[wrong]].argsort(stable=True)]
    numbers: dict[int, None] = {}
    for part in text.split(","):
        first, colon, end = part.partition(":")
        some = range(int(first), int(end) if colon else int(first) + 1)
        if not some or some[-1] >= len(labels):
            raise ValueError(
                f"--queries {text}: expected held-out samples from 0 to "
                f"{len(labels) - 1}, and ends of ranges above starts, got {part}."
            )
        numbers |= dict.fromkeys(some)
    return torch.tensor([*numbers], device=labels.device)


def _scores(
    arguments: Namespace,
    fmodel: FunctionalModel,
    members: list,
    dataset: Dataset,
    queries: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return scores [Q, N], and of samples for themselves [N], means over members."""
    x, y = dataset.x_train, dataset.y_train
    batches = list(zip(x.split(_BATCH), y.split(_BATCH), strict=True))
    loss, method = sample_loss(fmodel, F.cross_entropy), arguments.method
    matrix = curvature.ggn(fmodel, "categorical")
    if dataset.classes > _EXACT:
        matrix = curvature.fisher(fmodel, "categorical", seed=0)
    scores, own = [], []
    for params, buffers in members:
        options: dict[str, Any] = {}
        if method in ("ekfac", "kfac"):
            inputs = [(images,) for images in x.split(_BATCH)]
            fit, joint = getattr(curvature, method), {"separate_weight_and_bias": False}
            inverse = fit(matrix, params, buffers, inputs, **joint)
            options = {"curvature": inverse, "damping": arguments.damping}
        influence = partial(attribution.influence, loss, params, buffers, **options)
        size = sum(value.numel() for value in params.values())
        if method != "trak":
            parts = [
                influence((dataset.x_test[some], dataset.y_test[some]), batches)
                for some in queries.split(max(1, _NUMBERS // size))
            ]
            scores.append(torch.cat(parts))
        itself = attribution.self_influence(loss, params, buffers, batches, **options)
        own.append(itself)
    if method == "trak":
        params, buffers = ([*some] for some in zip(*members, strict=True))
        batch = dataset.x_test[queries], dataset.y_test[queries]
        sketch = {"dim": _DIRECTIONS, "seed": 0, "ridge": arguments.damping * len(y)}
        scores = [attribution.trak(fmodel, params, buffers, batch, batches, **sketch)]
    return torch.stack(scores).mean(0), torch.stack(own).mean(0)


# The page.


def _of_queries(
    dataset: Dataset, probabilities: Tensor, queries: Tensor, scores: Tensor
) -> Iterator[str]:
    yield (
        f"<h2>Predictions</h2>\n<p>{min(len(queries), _QUERIES)} of {len(queries)} "
        f"queries, from the held-out samples. More weight on a helpful training sample "
        f"makes the label of the query more likely, and on a harmful one less. Below "
        f"each: its number, its label, its score.</p>\n<table class='samples'>\n<tr>"
        f"<th>query</th><th>most helpful</th><th>most harmful</th></tr>\n"
    )
    for row, place in zip(scores, queries[:_QUERIES].tolist(), strict=False):
        share, guess = probabilities[place].max(0)
        words = f"{place}", f"label {dataset.y_test[place]}", f"guess {guess}"
        words += (report.percent(float(share)),)
        order = row.argsort(descending=True, stable=True)
        yield f"<tr><td>{_sample(dataset.x_test[place], *words)}</td>"
        for some in (order[:_SAMPLES], order.flip(0)[:_SAMPLES]):
            yield f"<td>{''.join(_samples(dataset, some, row))}</td>"
        yield "</tr>\n"
    yield "</table>\n"


def _samples(
    dataset: Dataset, numbers: Tensor, scores: Tensor, more: Sequence[str] = ()
) -> Iterator[str]:
    """Show training samples with their numbers, labels, and scores `[N]`."""
    for i, n in enumerate(numbers.tolist()):
        words = f"{n}", f"label {dataset.y_train[n]}", *more[i : i + 1]
        yield _sample(dataset.x_train[n], *words, f"{scores[n]:+.3g}")


def _sample(image: Tensor, *words: str) -> str:
    """Show an image `[C, H, W]`, or the first numbers of a row, with words below."""
    if image.shape[:2] == (1, 1):
        shown = ", ".join(f"{number:.3g}" for number in image.flatten()[:_FEATURES])
        shown += ", ..." * (image.numel() > _FEATURES)
    else:
        content = io.BytesIO()
        imsave(content, report.pixels(image.cpu()), cmap="gray_r", format="png")
        source = base64.b64encode(content.getvalue()).decode()
        shown = f'<img alt="sample {words[0]}" src="data:image/png;base64,{source}">'
    lines = "".join(f"<div>{word}</div>" for word in words)
    return f'<div class="sample">{shown}{lines}</div>\n'
