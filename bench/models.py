"""The seven models on which contenders are compared, and their batches.

A setting is a model, a batch of fixed size and a criterion. Everything is drawn from a
fixed seed. `Setting.problem` puts it on a device; the scaled-down form has the same
architecture and is what contenders are checked on in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.test_per_sample import SimpleCNN

Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


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
    """WRN-16-2 (arXiv 1605.07146) for 32x32 images, with GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        sizes = [(16, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)]
        self.blocks = nn.Sequential(
            *(ResidualBlock(*size) for size in [*sizes, (128, 128, 1)])
        )
        self.norm = nn.GroupNorm(16, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.conv(x))))
        return self.head(x.mean((2, 3)))


class Positions(nn.Module):
    """A learned vector for each position, looked up once for the whole batch.

    With `repeat` it is looked up for each sample: engines that hook into modules need
    a batch dimension at every one of them.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(length, width)
        self.repeat = False

    def forward(self, tokens: Tensor) -> Tensor:
        ids = torch.arange(tokens.shape[1], device=tokens.device)
        return self.table(ids.repeat(len(tokens), 1) if self.repeat else ids)


class Block(nn.Module):
    """Pre-norm transformer block with fused attention."""

    def __init__(self, width: int, heads: int, hidden: int, gpt: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, gpt
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.activation = nn.GELU("tanh" if gpt else "none")

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.activation(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Transformer that classifies sequences of tokens by their mean state."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(1000, 256)
        self.positions = Positions(64, 256)
        self.blocks = nn.Sequential(*(Block(256, 4, 1024, gpt=False) for _ in range(4)))
        self.norm = nn.LayerNorm(256)
        self.head = nn.Linear(256, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.token(tokens) + self.positions(tokens))
        return self.head(self.norm(x).mean(1))


class GPT(nn.Module):
    """GPT-2 with fewer layers; the head is the token embedding."""

    def __init__(
        self, vocabulary: int, length: int, width: int, heads: int, layers: int
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.positions = Positions(length, width)
        self.blocks = nn.Sequential(
            *(Block(width, heads, 4 * width, gpt=True) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for table in (self.token, self.positions.table):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.token(tokens) + self.positions(tokens))
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """LSTM that classifies padded sequences of tokens by its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(5000, 128, padding_idx=0)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 2)
        nn.init.normal_(self.head.weight)  # large enough that gradients are clipped

    def forward(self, tokens: Tensor) -> Tensor:
        output, _ = self.lstm(self.token(tokens))
        return self.head(output[:, -1])


MakeBatch = Callable[[int, torch.Generator], Batch]


def vectors(samples: int, generator: torch.Generator) -> Batch:
    x = torch.randn(samples, 784, generator=generator)
    return x, torch.randint(10, (samples,), generator=generator)


def images(channels: int, side: int) -> MakeBatch:
    def make(samples: int, generator: torch.Generator) -> Batch:
        x = torch.randn(samples, channels, side, side, generator=generator)
        return x, torch.randint(10, (samples,), generator=generator)

    return make


def sequences(samples: int, generator: torch.Generator) -> Batch:
    x = torch.randint(1000, (samples, 64), generator=generator)
    return x, torch.randint(10, (samples,), generator=generator)


def padded_sequences(samples: int, generator: torch.Generator) -> Batch:
    """Make rows of 20 to 40 tokens, filled up with zeros on the right."""
    x = torch.randint(1, 5000, (samples, 40), generator=generator)
    lengths = torch.randint(20, 41, (samples, 1), generator=generator)
    x = x.masked_fill(torch.arange(40) >= lengths, 0)
    return x, torch.randint(2, (samples,), generator=generator)


def text(vocabulary: int, length: int) -> MakeBatch:
    """Make tokens, and as targets the same tokens one position further on."""

    def make(samples: int, generator: torch.Generator) -> Batch:
        x = torch.randint(vocabulary, (samples, length + 1), generator=generator)
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()

    return make


@dataclass(frozen=True)
class Problem:
    """A model and a batch on a device."""

    model: nn.Module
    batch: Batch
    criterion: Callable[..., Tensor]

    def mean_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean over the batch, which for text is the mean over its tokens too."""
        return self.criterion(output.flatten(0, -2), target.flatten())

    def losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss of each sample, [B]."""
        each = self.criterion(output.flatten(0, -2), target.flatten(), reduction="none")
        return each.view(len(target), -1).mean(1)


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
            return sum(each.numel() for each in self.model().parameters())

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


SETTINGS = {
    "mlp": Setting("MLP 784-1024-1024-10", 256, mlp, vectors),
    "simple-cnn": Setting("SimpleCNN, 28x28", 64, SimpleCNN, images(1, 28), F.nll_loss),
    "cnn-128": Setting("CNN, 128x128", 32, cnn_128, images(3, 128)),
    "wrn-16-2": Setting("WRN-16-2, GroupNorm, 32x32", 32, WideResNet, images(3, 32)),
    "transformer": Setting("transformer, 4 x 256, T=64", 32, Encoder, sequences),
    "lstm": Setting("LSTM, 2 x 256, T=40", 32, Recurrent, padded_sequences),
    "gpt2": Setting(
        "GPT-2, 4 layers, T=128",
        8,
        lambda: GPT(50257, 1024, 768, heads=12, layers=4),
        text(50257, 128),
        small=(lambda: GPT(211, 32, 48, heads=3, layers=4), text(211, 24)),
    ),
}
