"""Training with and without low precision across architectures, and in folds.

B samples a step. An architecture is timed on a batch that is a multiple of 8, on the
same batch with weights and images in channels-last order, and on one sample less.
"""

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vgrad
from bench.experiments import data, folds, mixed, nets
from bench.experiments.measuring import side_by_side
from bench.experiments.reports import tensor_cores as report
from bench.experiments.reports.tensor_cores import FLOAT32, LAST, ODD, PLAIN
from bench.experiments.study import Piece, Place, Result, Show, Study
from bench.measure import has_instructions
from vgrad.training import TrainState, train_step

TF32 = "TF32"
POLICIES = {
    FLOAT32: None,
    TF32: None,
    "float16": "mixed_float16",
    "bfloat16": "mixed_bfloat16",
}
CLASSES = data.CLASSES


class Timed(NamedTuple):
    """A net whose training steps are timed."""

    name: str
    build: Callable[[int], nn.Module]
    side: int
    batch: int


def timed(place: Place) -> list[Timed]:
    """Return the architectures, the most telling first."""
    if place.size == "tiny":
        tiny = partial(nets.mobile, 1, width=0.25)
        return [
            Timed("CNN", partial(nets.cnn, width=4), 8, 8),
            Timed("MobileNet V1, width 0.25", tiny, 32, 8),
        ]
    if place.size == "small":
        chosen = {n: 32 if n.startswith(("Eff", "VGG")) else 64 for n in SMALL}
        builds = {name: nets.ARCHITECTURES[name][0] for name in chosen}
        builds["VGG16"] = partial(nets.vgg_16, hidden=512)
        return [Timed(name, builds[name], side, 8) for name, side in chosen.items()]
    return [
        Timed(name, build, side, 64 if side <= 260 else 32)
        for name, (build, side) in sorted(
            nets.ARCHITECTURES.items(), key=lambda item: ORDER.index(item[0])
        )
    ]


SMALL = ("MobileNet V2", "ResNet-50", "EfficientNet-B0", "VGG16", "MobileNet V1")
SMALL += ("EfficientNet-B3",)
ORDER = (*SMALL, *(name for name in nets.ARCHITECTURES if name not in SMALL))


def pieces(place: Place) -> list[Piece]:
    """Return times, the gain of padding, folds that were interrupted, and folds."""
    if place.device.startswith("cuda"):  # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    steps = [
        Piece(f"{net.name}: time", partial(measure, place, net)) for net in timed(place)
    ]
    validations = [
        Piece(f"{net.name}: folds", partial(folds.validate, place, net))
        for net in folds.folded(place)
    ]
    padding = Piece("padding", partial(pad, place))
    resumed = Piece("resumed", partial(folds.resume, place))
    return [*steps, padding, resumed, *validations]


def precisions(device: str) -> list[str]:
    """Return the precisions to time on a device.

    A CPU may have instructions for float16, but torch has no fast convolutions for the
    backward pass there: a step takes 17 times as long as in float32.
    """
    if device.startswith("cuda"):
        return [*POLICIES]
    return [FLOAT32, *(["bfloat16"] if has_instructions("cpu", "bfloat16") else [])]


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
        tx = vgrad.optim.sgd(0.01, momentum=0.9)
        self._state = TrainState.create(tx, copied, buffers, seed=0)
        loss = vgrad.batch_loss(fmodel, F.cross_entropy)
        self._step = train_step(loss, tx, policy=POLICIES[precision], donate=True)
        self._tf32 = precision == TF32
        self._batch = x, y
        self.loss = float(self()["loss"])

    def __call__(self) -> dict[str, Tensor]:
        with mixed.tf32(self._tf32):
            self._state, metrics = self._step(self._state, *self._batch)
        return metrics


def measure(place: Place, net: Timed, show: Show) -> Result:
    """Time the training steps of a net in each precision, side by side."""
    images = data.make_images(net.batch, net.side)
    x, y = images.x.to(place.device), images.y.to(place.device)
    module = nets.seeded(partial(net.build, CLASSES)).to(place.device)
    last = copy.deepcopy(module).to(memory_format=torch.channels_last)
    x_last = x.contiguous(memory_format=torch.channels_last)
    variants = {
        PLAIN: (module, x, y),
        LAST: (last, x_last, y),
        ODD: (module, x[:-1].contiguous(), y[:-1]),
    }
    contenders = {
        (precision, variant): Contender(place, *arguments, precision)
        for precision in precisions(place.device)
        for variant, arguments in variants.items()
    }
    report.compare({key: contender.loss for key, contender in contenders.items()})
    show(0.3)
    return {
        "net": net.name,
        "side": net.side,
        "batch": net.batch,
        "parameters": sum(param.numel() for param in module.parameters()),
        "rows": _times(place, contenders, net.batch),
        "alignment": _alignment(module, x),
    }


def _times(
    place: Place, contenders: dict[tuple[str, Any], Contender], batch: int
) -> list[Result]:
    """Return a row for each contender."""
    warmup, rounds = place.pick(tiny=(0, 1), small=(1, 5), full=(1, 8))
    runs = {str(key): run for key, run in contenders.items()}  # have run once
    times = side_by_side(runs, place.device, rounds=rounds, warmup=warmup)
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
    params, buffers = (
        {n: t.to("meta") for n, t in tensors.items()} for tensors in entries
    )
    result = vgrad.precision.alignment_report(fmodel, params, buffers, x.to("meta"))
    rows = sorted(result.rows, key=lambda row: -row.share)
    advice = [
        f"pad {row.operand} from {row.size[1:]} to {row.padded[1:]}"
        for row in rows
        if row.padded != row.size
    ]
    return {"misaligned": result.misaligned, "advice": advice}


def pad(place: Place, show: Show) -> Result:
    """Time a CNN of odd widths beside one that is padded as the report says."""
    misfit, padded = place.pick(tiny=(3, 8), small=(29, 32), full=(61, 64))
    side, batch = place.pick(tiny=(8, 8), small=(32, 16), full=(64, 256))
    images = data.make_images(batch, side)
    x, y = images.x.to(place.device), images.y.to(place.device)
    modules = {
        width: nets.seeded(partial(nets.cnn, classes, width=width)).to(place.device)
        for width, classes in ((misfit, CLASSES), (padded, 16))
    }
    contenders = {
        (precision, width): Contender(place, module, x, y, precision)
        for precision in precisions(place.device)
        for width, module in modules.items()
    }
    show(0.3)
    return {
        "padding": True,
        "side": side,
        "batch": batch,
        "widths": [misfit, padded],
        "rows": _times(place, contenders, batch),
        "alignment": {str(w): _alignment(module, x) for w, module in modules.items()},
    }


STUDY = Study(
    "Training with and without low precision, made images",
    pieces,
    report.check,
    report.table,
    report.draw,
    figsize=(14, 9),
)
