"""What is measured: models, batches of fixed size and criteria.

A setting is a model, a batch and a criterion. Everything is drawn from a fixed seed.
`Setting.problem` puts it on a device; the scaled-down form has the same architecture
and is what contenders are checked on in float64. At the end stand the names of the
settings that are counted, modelled and timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.models import inputs, small_layers, tokens, vision
from bench.models.inputs import Batch, MakeBatch
from bench.test_per_sample import SimpleCNN


@dataclass(frozen=True)
class Problem:
    """A model and a batch on a device."""

    model: nn.Module
    batch: Batch
    criterion: Callable[..., Tensor]

    @property
    def mean_loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Mean over the batch, which for text is the mean over its tokens too."""
        return partial(_mean_loss, self.criterion)  # holds no model

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss of each sample, [B]."""
        rows = self.criterion(output.flatten(0, -2), target.flatten(), reduction="none")
        return rows.view(len(target), -1).mean(1)


def _mean_loss(
    criterion: Callable[..., Tensor], output: Tensor, target: Tensor
) -> Tensor:
    return criterion(output.flatten(0, -2), target.flatten())


@dataclass(frozen=True)
class Setting:
    """What is measured: `samples` rows of `batch` through `model`.

    `small` is a scaled-down model with its batch, for models too large for float64.
    """

    title: str
    samples: int
    model: Callable[[], nn.Module]
    batch: MakeBatch
    criterion: Callable[..., Tensor] = F.cross_entropy
    small: tuple[Callable[[], nn.Module], MakeBatch] | None = None

    @property
    def parameters(self) -> int:
        """How many numbers the model has; tied ones count once."""
        with torch.device("meta"):
            return sum(param.numel() for param in self.model().parameters())

    def problem(
        self, device: str, dtype: torch.dtype, samples: int, *, small: bool = False
    ) -> Problem:
        """Make the model and `samples` samples, the same ones every time."""
        torch.manual_seed(0)
        scaled = self.small if small else None
        make_model, make_batch = scaled or (self.model, self.batch)
        model = make_model().to(device, dtype)
        x, y = make_batch(samples, torch.Generator().manual_seed(1))
        x = x.to(device, dtype) if x.is_floating_point() else x.to(device)
        return Problem(model, (x, y.to(device)), self.criterion)


SMALL_GPT = (
    partial(tokens.GPT, 211, 32, 48, heads=3, layers=4),
    inputs.text(211, 24),
)
SMALL_VIT = (
    partial(vision.ViT, 16, 4, 24, heads=3, layers=3),
    inputs.images(3, 16),
)

SETTINGS = {
    "mlp": Setting(
        "MLP 784-1024-1024-10",
        256,
        vision.dense(784, 1024, 1024, 10),
        inputs.vectors(784),
    ),
    "simple-cnn": Setting(
        "SimpleCNN, 28x28", 64, SimpleCNN, inputs.images(1, 28), F.nll_loss
    ),
    "cnn-128": Setting("CNN, 128x128", 32, vision.cnn_128, inputs.images(3, 128)),
    "wrn-16-2": Setting(
        "WRN-16-2, GroupNorm, 32x32", 32, vision.WideResNet, inputs.images(3, 32)
    ),
    "transformer": Setting(
        "transformer, 4 x 256, T=64", 32, tokens.Encoder, inputs.sequences
    ),
    "lstm": Setting(
        "LSTM, 2 x 256, T=40", 32, tokens.Recurrent, inputs.padded_sequences
    ),
    "gpt2": Setting(
        "GPT-2, 4 layers, T=128",
        8,
        partial(tokens.GPT, 50257, 1024, 768, heads=12, layers=4),
        inputs.text(50257, 128),
        small=SMALL_GPT,
    ),
    "tiny-32": Setting(
        "MLP 64-64-10, B=32", 32, vision.dense(64, 64, 10), inputs.vectors(64)
    ),
    "tiny-256": Setting(
        "MLP 64-64-10, B=256", 256, vision.dense(64, 64, 10), inputs.vectors(64)
    ),
    "bilstm": Setting(
        "LSTM in both directions, 128, T=40",
        32,
        partial(tokens.Recurrent, 64, 128, layers=1, bidirectional=True),
        inputs.padded_sequences,
        small=(
            partial(tokens.Recurrent, 8, 12, layers=1, bidirectional=True),
            inputs.padded_sequences,
        ),
    ),
    "tied-lm": Setting(
        "tied language model, RMSNorm, T=64",
        16,
        partial(tokens.GPT, 2000, 64, 128, heads=4, layers=2, norm=nn.RMSNorm),
        inputs.text(2000, 64),
        small=(
            partial(tokens.GPT, 211, 32, 48, heads=3, layers=2, norm=nn.RMSNorm),
            inputs.text(211, 24),
        ),
    ),
    "convnext": Setting(
        "ConvNeXt-like, depthwise 7x7, 32x32",
        32,
        vision.ConvNeXt,
        inputs.images(3, 32),
        small=(partial(vision.ConvNeXt, 12), inputs.images(3, 16)),
    ),
    "recommender": Setting(
        "recommender, EmbeddingBag and Bilinear",
        256,
        partial(tokens.Recommender, 1000, 5000, 32),
        inputs.choices(1000, 5000, 20),
        small=(
            partial(tokens.Recommender, 20, 50, 8),
            inputs.choices(20, 50, 6),
        ),
    ),
    "resnet-18": Setting(
        "ResNet-18, GroupNorm, 32x32",
        8,
        vision.ResNet,
        inputs.images(3, 32),
        small=(partial(vision.ResNet, 8), inputs.images(3, 16)),
    ),
    "vit-tiny": Setting(
        "ViT-Tiny, 32x32 in patches of 4",
        8,
        partial(vision.ViT, 32, 4, 192, heads=3, layers=12),
        inputs.images(3, 32),
        small=SMALL_VIT,
    ),
    "mixer": Setting(
        "MLP-mixer, 6 x 64, 32x32",
        32,
        partial(small_layers.Mixer, 32, 4, 64, layers=6),
        inputs.images(3, 32),
        small=(partial(small_layers.Mixer, 16, 4, 12, layers=2), inputs.images(3, 16)),
    ),
    "graph": Setting(
        "graph convolutions, 4 x 64, 24 nodes",
        64,
        partial(small_layers.GraphNet, 16, 64, layers=4),
        inputs.graphs(24, 16),
        small=(partial(small_layers.GraphNet, 6, 12, layers=2), inputs.graphs(8, 6)),
    ),
    "u-net": Setting(
        "U-Net, 8 to 32 channels, 32x32",
        16,
        partial(small_layers.UNet, 8, 4),
        inputs.pixels(3, 32, 4),
        small=(partial(small_layers.UNet, 4, 3), inputs.pixels(3, 16, 3)),
    ),
    "gpt2-small": Setting(
        "GPT-2 small, T=128",
        32,
        partial(tokens.GPT, 50257, 1024, 768, heads=12, layers=12),
        inputs.text(50257, 128),
        small=SMALL_GPT,
    ),
    "vit-b": Setting(
        "ViT-B, 224x224 in patches of 16",
        32,
        partial(vision.ViT, 224, 16, 768, heads=12, layers=12),
        inputs.images(3, 224),
        small=SMALL_VIT,
    ),
    "wrn-16-4": Setting(
        "WRN-16-4, GroupNorm, 32x32",
        256,
        partial(vision.WideResNet, 4),
        inputs.images(3, 32),
        small=(partial(vision.WideResNet, 1), inputs.images(3, 16)),
    ),
}

FULL_SIZE = ("gpt2-small", "vit-b", "wrn-16-4")
"""For a GPU alone."""

SMALL_LAYERS = ("tied-lm", "mixer", "graph", "u-net")
"""The four in which Python weighs most, by the number of their layers."""

COUNTED = tuple(
    name for name in SETTINGS if name not in {*FULL_SIZE, *SMALL_LAYERS[1:]}
)
"""The fifteen whose launches are counted (`bench.launches`)."""

TIMED = (
    "mlp",
    "simple-cnn",
    "cnn-128",
    "wrn-16-2",
    "transformer",
    "lstm",
    "gpt2",
    "tiny-32",
    *SMALL_LAYERS,
)
"""The twelve on which all peers are compared, on CPUs and on a GPU."""

STEP_BY_STEP = ("lstm", "bilstm")
"""Nets of thousands of ops."""

MODELLED = (
    "mlp",
    "simple-cnn",
    "cnn-128",
    "wrn-16-2",
    "transformer",
    "gpt2",
    "tied-lm",
    "convnext",
    "resnet-18",
    "vit-tiny",
)
"""The ten whose arithmetic takes more time on a GPU than their launches might."""
