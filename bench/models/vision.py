"""Models of vectors and images."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.models.tokens import Block


def dense(*sizes: int) -> Callable[[], nn.Module]:
    """Make an MLP with ReLU between its layers."""

    def make() -> nn.Module:
        pairs = pairwise(sizes)
        layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return make


def cnn_128() -> nn.Module:
    """Make the CNN that DP tutorials of other frameworks train, for 128x128 images."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 29 * 29, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


class ResidualBlock(nn.Module):
    """Pre-activation block of a wide residual network, normalised in 16 groups."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(16, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(16, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = (
            None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        residual = x if self.shortcut is None else self.shortcut(active)
        return residual + self.conv2(F.relu(self.norm2(self.conv1(active))))


class WideResNet(nn.Module):
    """WRN-16-k (arXiv 1605.07146) for 32x32 images, with GroupNorm."""

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        blocks, inputs = [], 16
        for width, stride in ((16 * factor, 1), (32 * factor, 2), (64 * factor, 2)):
            blocks += [ResidualBlock(inputs, width, stride)]
            blocks += [ResidualBlock(width, width, 1)]
            inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(16, inputs)
        self.head = nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.conv(x))))
        return self.head(x.mean((2, 3)))


class BasicBlock(nn.Module):
    """Block of ResNet-18, normalised in 32 groups, or one a channel."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(min(32, outputs), outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(min(32, outputs), outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = (
            None
            if same
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.GroupNorm(min(32, outputs), outputs),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.shortcut is None else self.shortcut(x)
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(residual + self.norm2(self.conv2(x)))


class ResNet(nn.Module):
    """ResNet-18 (arXiv 1512.03385) with a first layer for 32x32 images."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(min(32, width), width)
        blocks, inputs = [], width
        for stage in range(4):
            outputs = width * 2**stage
            blocks += [BasicBlock(inputs, outputs, 1 if stage == 0 else 2)]
            blocks += [BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        return self.head(x.mean((2, 3)))


class DepthwiseBlock(nn.Module):
    """Block of a ConvNeXt (arXiv 2201.03545): depthwise 7x7, then a scaled MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.conv(x).permute(0, 2, 3, 1))
        inner = self.scale * self.down(F.gelu(self.up(inner)))
        return x + inner.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Two stages of two depthwise blocks each."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, stride=2)
        self.first = nn.Sequential(DepthwiseBlock(width), DepthwiseBlock(width))
        self.halve = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.second = nn.Sequential(
            DepthwiseBlock(2 * width), DepthwiseBlock(2 * width)
        )
        self.norm = nn.LayerNorm(2 * width)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.halve(self.first(self.stem(x))))
        return self.head(self.norm(x.mean((2, 3))))


class ViT(nn.Module):
    """Vision transformer (arXiv 2010.11929), which reads the class token."""

    def __init__(
        self, side: int, patch: int, width: int, heads: int, layers: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1 + (side // patch) ** 2, width))
        self.blocks = nn.Sequential(
            *(Block(width, heads, 4 * width) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])
