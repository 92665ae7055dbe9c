"""Small models, each with a loss of one sample and a batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import losses
from tests.compiled.problems import Reader


class Language(nn.Module):
    """In the proportions of GPT-2: the table of tokens, its head too, is large."""

    def __init__(self, vocabulary=13, width=8, depth=1, length=6, heads=2, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        sizes = {"d_model": width, "nhead": heads, "dim_feedforward": 4 * width}
        options = {"dropout": dropout, "activation": "gelu", "norm_first": True}
        layers = [
            nn.TransformerEncoderLayer(**sizes, **options, batch_first=True)
            for _ in range(depth)
        ]
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class LoRA(nn.Module):
    """A linear layer that stays as it is, and a product of low rank that learns."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def lora():
    """Adapt a language model, whose own parameters are constant."""
    model = Language().requires_grad_(False)
    (block,) = model.blocks
    block.linear1, block.linear2 = LoRA(block.linear1), LoRA(block.linear2)
    return model


def last_token(logits, y):
    return F.cross_entropy(logits[:, -1] if logits.ndim == 3 else logits, y)


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


WORDS = losses.tokens(11, 5)
MODELS = {
    "mlp": (mlp, losses.vectors(4)),
    "cnn": (losses.CASES["cnn"].model, losses.CASES["cnn"].batch),
    "lstm": (Reader, losses.tokens(9, 5)),
    "language": (Language, WORDS),
    "lora": (lora, WORDS),
}

NETS = [
    pytest.param(name, marks=[pytest.mark.more] if name in ("cnn", "lstm") else [])
    for name in MODELS
]
"""Their names, of which `make test` leaves some to `make more`."""


def problem(name, dtype=torch.float32, samples=7):
    """Return loss, params, buffers and batch, the same on every rank."""
    torch.manual_seed(3)
    make, batch = MODELS[name]
    loss, params, buffers = losses.of_model(make(), last_token, dtype)
    x, y = batch(samples)
    return loss, params, buffers, (x.to(dtype) if x.is_floating_point() else x, y)
