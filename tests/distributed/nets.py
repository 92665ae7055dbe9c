"""Small models, each with a loss of one sample and a batch."""

import torch
from torch import nn
from torch.nn import functional as F

from tests import losses
from tests.compiled.problems import Reader


class Language(nn.Module):
    """A language model of one block, whose head is its table of tokens."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(13, 8)
        self.places = nn.Embedding(6, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.dropout(self.outer(F.gelu(self.inner(x))))
        return self.head(x)[:, -1]


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
    model.inner, model.outer = LoRA(model.inner), LoRA(model.outer)
    return model


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


def problem(name, dtype=torch.float32, samples=7):
    """Return loss, params, buffers and batch, the same on every rank."""
    torch.manual_seed(3)
    make, batch = MODELS[name]
    loss, params, buffers = losses.of_model(make(), F.cross_entropy, dtype)
    x, y = batch(samples)
    return loss, params, buffers, (x.to(dtype) if x.is_floating_point() else x, y)
