"""The command `evaluate`."""

from argparse import Namespace
from collections.abc import Callable

import torch
from torch import Tensor

from vgrad import tree
from vgrad.cli import checkpoint, data, models
from vgrad.cli.models import Shape
from vgrad.cli.settings import device, folder_of
from vgrad.ensemble.prediction import EnsemblePrediction, ensemble_forward

ROWS = 1024
"""Images at a time, so that memory does not grow with the data."""


def judge(
    score: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor
) -> tuple[float, list[float] | None]:
    """Return the share of images `[N, C, H, W]` whose class is their label `[N]`.

    Scores are logits `[N, C]`, or `[E, N, C]` of an ensemble; then members have shares.
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
    share, *of_members = (count / len(labels) for count in counts)
    return share, of_members or None


def evaluate(arguments: Namespace) -> None:
    """Print the accuracy of a run's model, or ensemble, on held-out data."""
    where = device(arguments.device)
    path = folder_of("evaluate", arguments.folder)
    fmodel, params, buffers, description = checkpoint.read_model(
        path, named=arguments.model
    )
    epsilon, plan = description["epsilon"], description["plan"]
    if plan is None:
        privacy = "trained without privacy"
    elif epsilon is None:
        privacy = "no claim of privacy: the noise is reproducible"
    else:
        privacy = f"epsilon {epsilon:.3f} at delta {plan['delta']:g}"
        privacy += f", {plan['neighbours']}"
    dataset = data.load(arguments.data, seed=description["seed"])
    expected, shape = Shape(**description["shape"]), dataset.shape
    # A file may happen to lack the last classes.
    if shape[:3] != expected[:3] or shape.classes > expected.classes:
        raise ValueError(
            f"--data {arguments.data}: expected {_words(expected)}, as the model was "
            f"made for, got {_words(shape)}."
        )
    params, buffers, dataset = tree.to_device((params, buffers, dataset), where)
    run = models.under(description["precision"], fmodel)
    if description["members"] > 1:
        run = ensemble_forward(run, strategy="loop")
    share, of_members = judge(
        lambda x: run(params, buffers, x), dataset.x_test, dataset.y_test
    )
    print(
        f"accuracy {100 * share:.2f} % on {len(dataset.y_test)} held-out samples "
        f"({privacy})"
    )
    for i, share in enumerate(of_members or []):
        print(f"member {i}: accuracy {100 * share:.2f} %")


def _words(shape: Shape) -> str:
    size = f"{shape.channels} x {shape.height} x {shape.width}"
    return f"images of {size} in {shape.classes} classes"
