"""Training with and without low precision across architectures, and in folds.

B samples a step. An architecture is timed on a batch that is a multiple of 8, on the
same batch with weights and images in channels-last order, and on one sample less.
"""

import os
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
from bench.experiments.measuring import side_by_side
from bench.experiments.reports import tensor_cores as report
from bench.experiments.reports.tensor_cores import FLOAT32, LAST, ODD, PLAIN
from bench.experiments.study import Piece, Place, Result, Study, Tell
from bench.measure import has_instructions
from vgrad.training import TrainState, cross_validate, train_step

TF32 = "TF32"
POLICIES = {
    FLOAT32: None,
    TF32: None,
    "float16": "mixed_float16",
    "bfloat16": "mixed_bfloat16",
}
CLASSES = data.CLASSES
RATE, MOMENTUM = 0.05, 0.9


class Timed(NamedTuple):
    """A net whose training steps are timed."""

    name: str
    build: Callable[[int], nn.Module]
    side: int
    batch: int


class Folded(NamedTuple):
    """A net that is cross-validated.

    Attributes:
        at_once: how many folds are members of one ensemble.
    """

    name: str
    build: Callable[[int], nn.Module]
    at_once: int


def timed(place: Place) -> list[Timed]:
    """Return the architectures, the most telling first."""
    if place.size == "tiny":
        tiny = partial(nets.mobile, 1, width=0.25)
        return [
            Timed("CNN", partial(nets.cnn, width=4), 8, 8),
            Timed("MobileNet V1, width 0.25", tiny, 32, 8),
        ]
    if place.size == "small":
        chosen = {**dict.fromkeys(SMALL, 64), "VGG16": 32}
        builds = {name: nets.ARCHITECTURES[name][0] for name in chosen}
        builds["VGG16"] = partial(nets.vgg_16, hidden=512)
        return [Timed(name, builds[name], side, 16) for name, side in chosen.items()]
    return [
        Timed(name, build, side, 64 if side <= 260 else 32)
        for name, (build, side) in sorted(
            nets.ARCHITECTURES.items(), key=lambda item: ORDER.index(item[0])
        )
    ]


SMALL = ("MobileNet V2", "ResNet-50", "EfficientNet-B0", "VGG16", "MobileNet V1")
SMALL += ("EfficientNet-B3",)
ORDER = (*SMALL, *(name for name in nets.ARCHITECTURES if name not in SMALL))


def folded(place: Place) -> list[Folded]:
    """Return what is cross-validated: small nets at once, others one by one."""
    folds = _folds(place)
    if place.size == "tiny":
        return [Folded("CNN", partial(nets.cnn, width=4), folds)]
    cnn = Folded("CNN", partial(nets.cnn, width=16), folds)
    if place.size == "small":
        one, two = (partial(nets.mobile, version, width=0.5) for version in (1, 2))
        return [
            cnn,
            Folded("MobileNet V1, width 0.5", one, 1),
            Folded("MobileNet V2, width 0.5", two, 1),
        ]
    others = "MobileNet V2", "ResNet-50", "EfficientNet-B0"
    return [cnn, *(Folded(name, nets.ARCHITECTURES[name][0], 1) for name in others)]


def pieces(place: Place) -> list[Piece]:
    """Return times, the gain of padding, folds that were interrupted, and folds."""
    if place.device.startswith("cuda"):  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    steps = [
        Piece(f"{each.name}: time", partial(measure, place, each))
        for each in timed(place)
    ]
    folds = [
        Piece(f"{each.name}: folds", partial(validate, place, each))
        for each in folded(place)
    ]
    padding = Piece("padding", partial(pad, place))
    return [*steps, padding, Piece("resumed", partial(resume, place)), *folds]


def precisions(device: str) -> list[str]:
    """Return what the device computes in by itself."""
    kind = device.partition(":")[0]
    low = [each for each in ("float16", "bfloat16") if has_instructions(kind, each)]
    return [FLOAT32, *([TF32] if kind == "cuda" else []), *low]


@contextmanager
def multiplying(device: str, precision: str) -> Iterator[None]:
    """Multiply float32 in TF32 or not, in this block; let cuDNN choose by time."""
    if not device.startswith("cuda"):
        yield
        return
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark
    torch.set_float32_matmul_precision("high" if precision == TF32 else "highest")
    cudnn.allow_tf32, cudnn.benchmark = precision == TF32, True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32, cudnn.benchmark = before[1:]


class Contender:
    """A net in training, on one batch, from a state that goes on.

    Attributes:
        loss: of the first step.
    """

    def __init__(
        self, place: Place, module: nn.Module, x: Tensor, y: Tensor, precision: str
    ) -> None:
        fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
        copied = {name: value.detach().clone() for name, value in params.items()}
        tx = vgrad.optim.sgd(RATE, momentum=MOMENTUM)
        self._state = TrainState.create(tx, copied, buffers, seed=0)
        loss = vgrad.batch_loss(fmodel, F.cross_entropy)
        self._step = train_step(loss, tx, policy=POLICIES[precision], donate=True)
        self._inside = partial(multiplying, place.device, precision)
        self._batch = x, y
        self.loss = float(self()["loss"])

    def __call__(self) -> dict[str, Tensor]:
        with self._inside():
            self._state, metrics = self._step(self._state, *self._batch)
        return metrics


def measure(place: Place, net: Timed, tell: Tell) -> Result:
    """Time the training steps of a net in each precision, side by side."""
    images = data.made(net.batch, net.side)
    x, y = images.x.to(place.device), images.y.to(place.device)
    module = _seeded(net.build, CLASSES).to(place.device)
    last = _seeded(net.build, CLASSES).to(place.device)
    last = last.to(memory_format=torch.channels_last)
    x_last = x.contiguous(memory_format=torch.channels_last)
    given = {
        PLAIN: (module, x, y),
        LAST: (last, x_last, y),
        ODD: (module, x[:-1].contiguous(), y[:-1]),
    }
    found = {
        (precision, variant): Contender(place, *each, precision)
        for precision in precisions(place.device)
        for variant, each in given.items()
    }
    report.compare({key: contender.loss for key, contender in found.items()})
    tell(0.3)
    return {
        "net": net.name,
        "side": net.side,
        "batch": net.batch,
        "device": place.machine["device"],
        "parameters": sum(each.numel() for each in module.parameters()),
        "rows": _times(place, found, net.batch),
        "alignment": _alignment(module, x),
    }


def _times(
    place: Place, contenders: dict[tuple[str, Any], Contender], batch: int
) -> list[Result]:
    """Return a row for each contender."""
    rounds = place.pick(tiny=2, small=3, full=8)
    runs = {str(key): run for key, run in contenders.items()}
    times = side_by_side(runs, place.device, rounds=rounds)
    return [
        {
            "precision": precision,
            "variant": variant,
            "batch": batch - (variant == ODD),
            "loss": contender.loss,
            **times[str((precision, variant))],
        }
        for (precision, variant), contender in contenders.items()
    ]


def _alignment(module: nn.Module, x: Tensor) -> Result:
    """Return what vgrad says of the sizes of a net's products."""
    fmodel, *entries = vgrad.make_functional_with_buffers(module)
    params, buffers = ({n: t.to("meta") for n, t in each.items()} for each in entries)
    found = vgrad.precision.alignment_report(fmodel, params, buffers, x.to("meta"))
    rows = sorted(found.rows, key=lambda row: -row.share)
    advice = dict.fromkeys(text for row in rows for text in row.advice)
    return {"misaligned": found.misaligned, "advice": list(advice)}


def pad(place: Place, tell: Tell) -> Result:
    """Time a CNN of odd widths beside one that is padded as the report says."""
    odd, padded = place.pick(tiny=(3, 8), small=(29, 32), full=(61, 64))
    side, batch = place.pick(tiny=(8, 8), small=(32, 16), full=(64, 256))
    images = data.made(batch, side)
    x, y = images.x.to(place.device), images.y.to(place.device)
    modules = {
        width: _seeded(partial(nets.cnn, width=width), classes).to(place.device)
        for width, classes in ((odd, CLASSES), (padded, 16))
    }
    found = {
        (precision, width): Contender(place, module, x, y, precision)
        for precision in precisions(place.device)
        for width, module in modules.items()
    }
    tell(0.3)
    return {
        "padding": True,
        "side": side,
        "batch": batch,
        "device": place.machine["device"],
        "widths": [odd, padded],
        "rows": _times(place, found, batch),
        "alignment": {str(w): _alignment(each, x) for w, each in modules.items()},
    }


def _seeded(build: Callable[[int], nn.Module], classes: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(classes).train()


def _folds(place: Place) -> int:
    return place.pick(tiny=2, small=3, full=5)


class Interrupted(Exception):
    """Stands for the end of a process."""


def resume(place: Place, tell: Tell) -> Result:
    """Interrupt a cross-validation in a fold, go on, and compare with a whole one."""
    folds, epochs = _folds(place), 2
    images = _images(place)
    folder = place.folder / "tensor-cores" / "resumed"
    shutil.rmtree(folder, ignore_errors=True)

    def stop(epoch: Any) -> None:
        if epoch.folds.start == 1 and epoch.epoch == 0:
            raise Interrupted

    def run(**options: Any) -> Any:
        net = Folded("CNN", partial(nets.cnn, width=8), 1)
        return _cross_validated(place, net, images, epochs, **options)

    with _deterministic(place.device):
        whole = run()
        tell(0.4)
        try:
            run(folder=folder, tell=stop)
            raise AssertionError("expected an interruption, got none")
        except Interrupted:
            tell(0.6)
        told: list[Any] = []
        resumed = run(folder=folder, tell=told.append)
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
    folds, epochs = _folds(place), place.pick(tiny=6, small=5, full=4)
    images = _images(place)
    folder = place.folder / "tensor-cores" / net.name.replace(" ", "-")

    def so_far(epoch: Any) -> None:
        done = epoch.folds.start * epochs + (epoch.epoch + 1) * len(epoch.folds)
        tell(done / (folds * epochs))

    start = time.perf_counter()
    found = _cross_validated(place, net, images, epochs, folder=folder, tell=so_far)
    seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    assert found.scores is not None
    return {
        "net": net.name,
        "data": images.title,
        "device": place.machine["device"],
        "classes": images.classes,
        "samples": len(images.y),
        "seconds": seconds,
        "losses": found.losses.tolist(),
        "scores": found.scores.tolist(),
    }


def _images(place: Place) -> data.Images:
    """Return what is cross-validated on."""
    count = place.pick(tiny=240, small=600, full=5_000)
    source = place.data or place.pick(tiny="digits", small="digits", full=None)
    return data.images(source, count, place.pick(tiny=8, small=32, full=32))


def _cross_validated(
    place: Place, net: Folded, images: data.Images, epochs: int, **options: Any
) -> Any:
    return cross_validate(
        lambda _: net.build(images.classes).to(place.device),
        F.cross_entropy,
        vgrad.optim.sgd(RATE, momentum=MOMENTUM),
        images.x,
        images.y,
        folds=_folds(place),
        epochs=epochs,
        batch_size=place.pick(tiny=16, small=16, full=64),
        seed=0,
        at_once=net.at_once,
        metric=accuracy,
        policy="mixed_float16" if place.device.startswith("cuda") else None,
        **options,
    )


def accuracy(scores: Tensor, y: Tensor) -> Tensor:
    """Return the share of samples whose highest score is that of their class."""
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


STUDY = Study(
    "Training with and without tensor cores",
    pieces,
    report.check,
    report.table,
    report.draw,
    figsize=(14, 9),
)
