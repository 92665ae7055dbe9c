"""Models of many small layers, where Python weighs most beside the arithmetic."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MixerBlock(nn.Module):
    """Block that mixes T positions, and then C channels, each by two layers."""

    def __init__(self, positions: int, channels: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.across = nn.Sequential(
            nn.Linear(positions, hidden), nn.GELU(), nn.Linear(hidden, positions)
        )
        self.within = nn.Sequential(
            nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).mT).mT
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    """MLP-mixer of images, cut into patches."""

    def __init__(self, side: int, patch: int, channels: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, channels, patch, patch)
        count = (side // patch) ** 2
        self.blocks = nn.Sequential(
            *(MixerBlock(count, channels, 2 * channels) for _ in range(layers))
        )
        # No norm before the head, which would leave biases over positions unused.
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        return self.head(self.blocks(x).mean(1))


class GraphNet(nn.Module):
    """Graph convolutions over a dense adjacency, which stands beside the features.

    A sample is `[N, N + I]`: a row of the adjacency and the features of each node.
    """

    def __init__(self, features: int, width: int, layers: int) -> None:
        super().__init__()
        sizes = [features, *[width] * layers]
        self.features = features
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        edges, nodes = x[..., : -self.features], x[..., -self.features :]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            nodes = F.relu(norm(edges @ layer(nodes)))
        return self.head(nodes.mean(1))


class UNet(nn.Module):
    """U-Net of two steps down and up, with a class for each pixel, [B, H * W, K]."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        wide, widest = 2 * width, 4 * width
        self.down1, self.down2 = _twice(3, width), _twice(width, wide)
        self.middle = _twice(wide, widest)
        self.open2 = nn.ConvTranspose2d(widest, wide, 2, stride=2)
        self.up2 = _twice(2 * wide, wide)
        self.open1 = nn.ConvTranspose2d(wide, width, 2, stride=2)
        self.up1 = _twice(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.open2(self.middle(F.max_pool2d(second, 2)))
        x = self.open1(self.up2(torch.cat([x, second], 1)))
        x = self.up1(torch.cat([x, first], 1))
        return self.head(x).flatten(2).mT


def _twice(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
    )
