"""The commands `evaluate`, `bench` and `experiment`."""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import vgrad
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
    epsilon, privacy = description.get("epsilon"), "trained without privacy"
    if description.get("plan") is not None:
        privacy = "no claim of privacy: the noise is reproducible"
        if epsilon is not None:
            privacy = f"epsilon {epsilon:.3f} at delta {description['delta']:g}"
            if relation := description["plan"].get("neighbours"):
                privacy += f", {relation}"
    dataset = data.load(arguments.data, seed=description["seed"])
    expected, shape = Shape(**description["shape"]), dataset.shape
    # A file may happen to lack the last classes.
    if shape[:3] != expected[:3] or shape.classes > expected.classes:
        raise ValueError(
            f"--data {arguments.data}: expected {_words(expected)}, as the model was "
            f"made for, got {_words(shape)}."
        )
    params, buffers, dataset = tree.to_device((params, buffers, dataset), where)
    # Models of earlier versions lack a precision, and were trained in float32.
    run = models.under(description.get("precision", "float32"), fmodel)
    if "members" in description:
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


def bench(arguments: Namespace) -> None:
    """Run suites of `bench/` beside the package, or all of them; print their tables."""
    root = _checkout("bench")
    words = ["bench.suites", *arguments.suites]
    if arguments.out:
        out = Path(arguments.out)
        if out.is_dir() or not out.parent.is_dir():
            raise FileNotFoundError(
                f"--out {out}: expected the name of a file in an existing folder."
            )
        words += ["--out", str(out.absolute())]
    suites = {p.stem.removeprefix("test_") for p in root.glob("bench/test_*.py")}
    if unknown := set(arguments.suites) - suites:
        raise ValueError(
            f"bench: no suite {', '.join(sorted(unknown))}; there are "
            f"{', '.join(sorted(suites))}."
        )
    _run(root, words)


def experiment(arguments: Namespace) -> None:
    """Run experiments of `bench/experiments/`, and leave their files in a folder."""
    root = _checkout("experiment")
    out = folder_of("--out", arguments.out).absolute()
    words = ["bench.experiments", *arguments.names]
    words += ["--out", str(out), "--device", str(device(arguments.device))]
    if arguments.full:
        words += ["--size", "full"]
    if arguments.data is not None:
        path = Path(arguments.data)
        words += ["--data", str(path.absolute()) if path.exists() else arguments.data]
    _run(root, words)


def _checkout(command: str) -> Path:
    root = Path(vgrad.__file__).parent.parent
    if not (root / "bench" / "measure.py").exists():
        raise FileNotFoundError(
            f"{command}: expected a checkout of vgrad with its folder bench, got a "
            f"package in {root}. Clone the repository and run it there."
        )
    return root


def _run(root: Path, words: list[str]) -> None:
    try:
        status = subprocess.run([sys.executable, "-m", *words], cwd=root).returncode
    except KeyboardInterrupt:  # which the other process has reported
        status = 130
    if status != 0:
        sys.exit(status)
