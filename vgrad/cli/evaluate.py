"""How often a classifier is right on held-out data."""

from argparse import Namespace
from collections.abc import Callable

import torch
from torch import Tensor

from vgrad import tree
from vgrad.cli import checkpoint, data, models
from vgrad.cli.descriptions import TABLE, check, optional, shape_of
from vgrad.cli.models import Shape
from vgrad.cli.settings import device, folder_of
from vgrad.ensemble.forward import ensemble_forward
from vgrad.ensemble.prediction import class_prediction
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
"""What a model says about how it was trained."""


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
                mean = class_prediction(scores).mean
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
    """Say what a model claims."""
    if description.get("plan") is None:
        return "trained without privacy"
    epsilon = description.get("epsilon")
    if epsilon is None:
        return "no claim of privacy: the noise is reproducible"
    return f"epsilon {epsilon:.3f} at delta {description['delta']:g}"


def _words(shape: Shape) -> str:
    size = f"{shape.channels} x {shape.height} x {shape.width}"
    return f"images of {size} in {shape.classes} classes"
