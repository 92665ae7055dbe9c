"""K-fold cross-validation for the experiment on tensor cores; resuming a run."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vgrad
from bench.experiments import data, nets
from bench.experiments.study import Place, Result, Show
from vgrad.ensemble import fold_indices, member_seed
from vgrad.training import EnsembleState, ensemble_train_step, load, save


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


class FoldEpoch(NamedTuple):
    """An epoch that some folds have ended; they are trained at once."""

    folds: range
    epoch: int


class Folds(NamedTuple):
    """K models, and their figures on the folds that they did not see, `[K, epochs]`."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: Tensor
    scores: Tensor


class Interrupted(Exception):
    """Stands for the end of a process."""


def resume(place: Place, show: Show) -> Result:
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
        return cross_validate(place, net, images, epochs, **options)

    with _deterministic(place.device):
        uninterrupted = run()
        show(0.4)
        try:
            run(folder=folder, callback=stop)
            raise AssertionError("expected an interruption, got none")
        except Interrupted:
            show(0.6)
        epochs_run: list[FoldEpoch] = []
        resumed = run(folder=folder, callback=epochs_run.append)
    shutil.rmtree(folder)
    pairs = zip(
        vgrad.tree.tensors(uninterrupted), vgrad.tree.tensors(resumed), strict=True
    )
    return {
        "resumed": all(torch.equal(*pair) for pair in pairs),
        "epochs": epochs * folds,
        "epochs_after": len(epochs_run),
        "losses": uninterrupted.losses.tolist(),
        "resumed_losses": resumed.losses.tolist(),
    }


def validate(place: Place, net: Folded, show: Show) -> Result:
    """Cross-validate a net; a file of the folds is kept until it has ended."""
    folds, epochs = _folds(place), place.pick(tiny=6, small=6, full=4)
    images = _images(place)
    name = net.name.replace(" ", "-")
    folder = place.folder / f"tensor-cores-{name}"

    def so_far(epoch: FoldEpoch) -> None:
        done = epoch.folds.start * epochs + (epoch.epoch + 1) * len(epoch.folds)
        show(done / (folds * epochs))

    start = time.perf_counter()
    result = cross_validate(place, net, images, epochs, folder=folder, callback=so_far)
    seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    return {
        "net": net.name,
        "data": images.title,
        "classes": images.classes,
        "samples": len(images.y),
        "seconds": seconds,
        "losses": result.losses.tolist(),
        "scores": result.scores.tolist(),
    }


def _images(place: Place) -> data.Images:
    """Return the images of the cross-validation."""
    count = place.pick(tiny=240, small=480, full=5_000)
    source = place.data or place.pick(tiny="digits", small="digits", full=None)
    return data.images(source, count, place.pick(tiny=8, small=32, full=32))


def cross_validate(
    place: Place,
    net: Folded,
    images: data.Images,
    epochs: int,
    *,
    seed: int = 0,
    folder: Path | None = None,
    callback: Callable[[FoldEpoch], None] = lambda epoch: None,
) -> Folds:
    """Train K models, each on all but its fold, and evaluate it on that every epoch.

    The folds are members of an ensemble, `at_once` of them at a time. A `folder` keeps
    what they have reached: the same call goes on from there.
    """
    folds, size = _folds(place), place.pick(tiny=16, small=16, full=50)
    trained, held_out = fold_indices(folds, len(images.y), seed=seed)
    half = place.device.startswith("cuda")
    policy = "mixed_float16" if half else None
    scale = vgrad.precision.DynamicLossScale() if half else None
    tx = vgrad.optim.adam(2e-3)

    def batches(rows: Tensor) -> Iterator[list[Tensor]]:
        for part in rows.split(size, 1):  # [E, B]
            yield [tensor[part].to(place.device) for tensor in (images.x, images.y)]

    ended = []
    for first in range(0, folds, net.at_once):
        which = range(folds)[first : first + net.at_once]
        fmodel, params, buffers = vgrad.stack(
            lambda: net.build(images.classes).to(place.device),
            seeds=[member_seed(seed, fold) for fold in which],
        )
        state = EnsembleState.create(tx, params, buffers, seed=first, loss_scale=scale)
        loss = vgrad.batch_loss(fmodel, F.cross_entropy)
        options = {"policy": policy, "loss_scale": scale, "randomness": "different"}
        step = ensemble_train_step(loss, tx, in_dims=0, donate=True, **options)
        forward = vgrad.ensemble_forward(fmodel.eval(), in_dims=0)
        figures = torch.full((2, len(which), epochs), torch.nan, dtype=torch.float64)
        done = torch.tensor(0)
        reached = None if folder is None else folder / f"folds-{first}"
        if reached is not None and reached.exists():
            state, figures, done = load(reached, (state, figures, done))
        for epoch in range(int(done), epochs):
            orders = []
            for fold in which:
                drawn = member_seed(seed + 1 + epoch, fold)
                source = torch.Generator().manual_seed(drawn)
                orders.append(torch.randperm(trained.shape[1], generator=source))
            rows = trained[which.start : which.stop].gather(1, torch.stack(orders))
            for x, y in batches(rows):
                state, _ = step(state, x, y)
            outcomes = []
            with torch.no_grad():
                for x, y in batches(held_out[which.start : which.stop]):
                    logits = forward(state.params, state.buffers, x).movedim(2, 1)
                    losses = F.cross_entropy(logits, y, reduction="none")
                    outcomes.append(torch.stack([losses, logits.argmax(1) == y]))
            figures[:, :, epoch] = torch.cat(outcomes, 2).double().mean(2).cpu()
            if reached is not None:
                reached.parent.mkdir(parents=True, exist_ok=True)
                save(reached, (state, figures, torch.tensor(epoch + 1)))
            callback(FoldEpoch(which, epoch))
        ended.append(vgrad.to_device((state.params, state.buffers, *figures), "cpu"))
    return Folds(*vgrad.tree.tree_map(lambda *parts: torch.cat(parts), *ended))


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
