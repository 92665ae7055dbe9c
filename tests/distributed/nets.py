"""Small models, each with a loss of one sample and a batch."""

import torch
from torch import nn
from torch.nn import functional as F

import vgrad


class Tagger(nn.Module):
    """An LSTM that reads tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


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


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


MODELS = {
    "mlp": mlp,
    "cnn": cnn,
    "lstm": Tagger,
    "language": Language,
    "lora": lora,
}

SIZES = {"mlp": (4,), "cnn": (1, 6, 6)}


def problem(name, dtype=torch.float32, samples=7):
    """Return loss, params, buffers and batch, the same on every rank."""
    torch.manual_seed(3)
    model = MODELS[name]().to(dtype)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    params = {name: value.detach() for name, value in params.items()}
    if name in SIZES:
        x = torch.randn(samples, *SIZES[name], dtype=dtype)
    else:
        x = torch.randint(11, (samples, 5))
    y = torch.randint(3, (samples,))
    return vgrad.sample_loss(fmodel, F.cross_entropy), params, buffers, (x, y)
