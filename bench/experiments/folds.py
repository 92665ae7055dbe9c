"""K-fold cross-validation for the experiment on tensor cores; resuming a run."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vgrad
from bench.experiments import data, nets
from bench.experiments.study import Place, Result, Tell
from vgrad.training import FoldEpoch, cross_validate


class Folded(NamedTuple):
    """A net that is cross-validated.

    Attributes:
        at_once: how many folds are members of one ensemble.
    """

    name: str
    build: Callable[[int], nn.Module]
    at_once: int


def folded(place: Place) -> list[Folded]:
    """Return the nets to cross-validate: small ones at once, others one by one."""
    folds = _folds(place)
    if place.size == "tiny":
        return [Folded("CNN", partial(nets.cnn, width=4), folds)]
    cnn = Folded("CNN", partial(nets.cnn, width=16), folds)
    if place.size == "small":
        half = partial(nets.mobile, 1, width=0.5)
        return [cnn, Folded("MobileNet V1, width 0.5", half, 1)]
    others = "MobileNet V2", "ResNet-50", "EfficientNet-B0"
    return [cnn, *(Folded(name, nets.ARCHITECTURES[name][0], 1) for name in others)]


def _folds(place: Place) -> int:
    return place.pick(tiny=2, small=3, full=5)


class Interrupted(Exception):
    """Stands for the end of a process."""


def resume(place: Place, tell: Tell) -> Result:
    """Interrupt a cross-validation in a fold, go on, and compare with a whole one."""
    folds, epochs = _folds(place), 2
    images = _images(place)
    folder = place.folder / "tensor-cores-resumed"
    shutil.rmtree(folder, ignore_errors=True)

    def stop(epoch: FoldEpoch) -> None:
        if epoch.folds.start == 1 and epoch.epoch == 0:
            raise Interrupted

    def run(**options: Any) -> Any:
        net = Folded("CNN", partial(nets.cnn, width=8), 1)
        return _cross_validated(place, net, images, epochs, **options)

    with _deterministic(place.device):
        whole = run()
        tell(0.4)
        try:
            run(folder=folder, callback=stop)
            raise AssertionError("expected an interruption, got none")
        except Interrupted:
            tell(0.6)
        told: list[FoldEpoch] = []
        resumed = run(folder=folder, callback=told.append)
    shutil.rmtree(folder)
    pairs = zip(vgrad.tree.tensors(whole), vgrad.tree.tensors(resumed), strict=True)
    return {
        "resumed": all(torch.equal(*pair) for pair in pairs),
        "epochs": epochs * folds,
        "epochs_after": len(told),
        "losses": whole.losses.tolist(),
        "resumed_losses": resumed.losses.tolist(),
    }


def validate(place: Place, net: Folded, tell: Tell) -> Result:
    """Cross-validate a net; a file of the folds is kept until it has ended."""
    folds, epochs = _folds(place), place.pick(tiny=6, small=6, full=4)
    images = _images(place)
    name = net.name.replace(" ", "-")
    folder = place.folder / f"tensor-cores-{name}"

    def so_far(epoch: FoldEpoch) -> None:
        done = epoch.folds.start * epochs + (epoch.epoch + 1) * len(epoch.folds)
        tell(done / (folds * epochs))

    start = time.perf_counter()
    found = _cross_validated(place, net, images, epochs, folder=folder, callback=so_far)
    seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    assert found.scores is not None
    return {
        "net": net.name,
        "data": images.title,
        "classes": images.classes,
        "samples": len(images.y),
        "seconds": seconds,
        "losses": found.losses.tolist(),
        "scores": found.scores.tolist(),
    }


def _images(place: Place) -> data.Images:
    """Return the images of the cross-validation."""
    count = place.pick(tiny=240, small=480, full=5_000)
    source = place.data or place.pick(tiny="digits", small="digits", full=None)
    return data.images(source, count, place.pick(tiny=8, small=32, full=32))


def _cross_validated(
    place: Place, net: Folded, images: data.Images, epochs: int, **options: Any
) -> Any:
    return cross_validate(
        lambda _: net.build(images.classes).to(place.device),
        F.cross_entropy,
        vgrad.optim.adam(2e-3),
        images.x,
        images.y,
        folds=_folds(place),
        epochs=epochs,
        batch_size=place.pick(tiny=16, small=16, full=50),
        seed=0,
        at_once=net.at_once,
        metric=accuracy,
        policy="mixed_float16" if place.device.startswith("cuda") else None,
        **options,
    )


def accuracy(scores: Tensor, y: Tensor) -> Tensor:
    """Return the share of samples whose class has the highest score."""
    return (scores.argmax(1) == y).double().mean()


@contextmanager
def _deterministic(device: str) -> Iterator[None]:
    """Use deterministic kernels in this block, where others are the default."""
    if not device.startswith("cuda"):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
