"""The architectures of the articles, from configurations, without weights."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

EFFICIENT = {
    "EfficientNet-B0": (1.0, 1.0, 224, 0.2, 1280),
    "EfficientNet-B1": (1.0, 1.1, 240, 0.2, 1280),
    "EfficientNet-B2": (1.1, 1.2, 260, 0.3, 1408),
    "EfficientNet-B3": (1.2, 1.4, 300, 0.3, 1536),
    "EfficientNet-B4": (1.4, 1.8, 380, 0.4, 1792),
    "EfficientNet-B5": (1.6, 2.2, 456, 0.4, 2048),
}
"""Width, depth, side of images, dropout and features of each.

Reference: Tan and Le, EfficientNet, arXiv 1905.11946.
"""


class Logits(nn.Module):
    """A classifier of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).logits


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a net from a seed, and leave torch's generator as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().train()


def _of_transformers(kind: str, classes: int, **options: Any) -> nn.Module:
    library = importlib.import_module("transformers")
    config = getattr(library, f"{kind}Config")(num_labels=classes, **options)
    return Logits(getattr(library, f"{kind}ForImageClassification")(config))


def efficient(name: str, classes: int) -> nn.Module:
    """Build one of the `EFFICIENT`."""
    width, depth, side, dropout, features = EFFICIENT[name]
    return _of_transformers(
        "EfficientNet",
        classes,
        width_coefficient=width,
        depth_coefficient=depth,
        image_size=side,
        dropout_rate=dropout,
        hidden_dim=features,
        # As a share of a batch it keeps, which for the library's 0.99 is too few.
        batch_norm_momentum=0.1,
    )


def mobile(version: int, classes: int, *, width: float = 1.0) -> nn.Module:
    """Build MobileNet V1 or V2, of which `width` is a share.

    Reference: Howard et al., arXiv 1704.04861; Sandler et al., arXiv 1801.04381.
    """
    model = _of_transformers(
        f"MobileNetV{version}",
        classes,
        depth_multiplier=width,
        tf_padding=False,
        classifier_dropout_prob=0.2,
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.2  # the library's 0.997 keeps the last batch alone
    return model


def resnet_50(classes: int) -> nn.Module:
    """Build ResNet-50. Reference: He et al., arXiv 1512.03385."""
    return _of_transformers("ResNet", classes)


def vgg_16(classes: int, *, hidden: int = 4096) -> nn.Module:
    """Build VGG16. Reference: Simonyan and Zisserman, arXiv 1409.1556."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for inputs in (512 * 49, hidden):
        layers += [nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(hidden, classes))


def cnn(classes: int, *, channels: int = 3, width: int = 16) -> nn.Module:
    """Build a small CNN with batch norm, for images of any side."""
    layers: list[nn.Module] = []
    for step in range(3):
        inputs = channels if step == 0 else width * 2 ** (step - 1)
        outputs = width * 2**step
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width * 4, classes)]
    return nn.Sequential(*layers)


ARCHITECTURES: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "VGG16": (vgg_16, 224),
    "MobileNet V1": (partial(mobile, 1), 224),
    "MobileNet V2": (partial(mobile, 2), 224),
    "ResNet-50": (resnet_50, 224),
    **{name: (partial(efficient, name), EFFICIENT[name][2]) for name in EFFICIENT},
}
"""What builds each for a number of classes, and the side of its images."""
