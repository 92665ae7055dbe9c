"""Models of numbered tokens: text, and what users chose."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Callable[[int], nn.Module]


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

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        gpt: bool = False,
        norm: Norm = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, gpt
        self.norm1, self.norm2 = norm(width), norm(width)
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
        self.blocks = nn.Sequential(*(Block(256, 4, 1024) for _ in range(4)))
        self.norm = nn.LayerNorm(256)
        self.head = nn.Linear(256, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.token(tokens) + self.positions(tokens))
        return self.head(self.norm(x).mean(1))


class GPT(nn.Module):
    """GPT-2 with fewer layers; the head is the token embedding."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        heads: int,
        layers: int,
        norm: Norm = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.positions = Positions(length, width)
        self.blocks = nn.Sequential(
            *(Block(width, heads, 4 * width, True, norm) for _ in range(layers))
        )
        self.norm = norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for table in (self.token, self.positions.table):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.token(tokens) + self.positions(tokens))
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """LSTM that classifies padded sequences of tokens.

    In one direction it reads the last state, in two the mean of all, and then padding
    is a token like any other, as Opacus has it.
    """

    def __init__(
        self,
        width: int = 128,
        hidden: int = 256,
        layers: int = 2,
        bidirectional: bool = False,
    ) -> None:
        super().__init__()
        padding = None if bidirectional else 0
        self.token = nn.Embedding(5000, width, padding_idx=padding)
        self.lstm = nn.LSTM(
            width,
            hidden,
            num_layers=layers,
            batch_first=True,
            bidirectional=bidirectional,
        )
        self.head = nn.Linear(hidden * (2 if bidirectional else 1), 2)
        nn.init.normal_(self.head.weight)  # large enough that gradients are clipped

    def forward(self, tokens: Tensor) -> Tensor:
        output, _ = self.lstm(self.token(tokens))
        both = self.lstm.bidirectional
        return self.head(output.mean(1) if both else output[:, -1])


class Recommender(nn.Module):
    """Rates what a user would choose after a bag of earlier choices.

    A row of the input is the user and then the bag.
    """

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.user = nn.Embedding(users, width)
        self.bag = nn.EmbeddingBag(items, width, mode="mean")
        self.pair = nn.Bilinear(width, width, 2 * width)
        self.head = nn.Linear(2 * width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        paired = self.pair(self.user(ids[:, 0]), self.bag(ids[:, 1:]))
        return self.head(F.relu(paired))
