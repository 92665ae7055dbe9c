"""Batches of random inputs and targets, drawn from a generator."""

from collections.abc import Callable

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
MakeBatch = Callable[[int, torch.Generator], Batch]


def vectors(width: int) -> MakeBatch:
    def make(samples: int, generator: torch.Generator) -> Batch:
        x = torch.randn(samples, width, generator=generator)
        return x, torch.randint(10, (samples,), generator=generator)

    return make


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


def graphs(nodes: int, features: int) -> MakeBatch:
    """Make a normalised adjacency and features beside it, `[B, N, N + I]`."""

    def make(samples: int, generator: torch.Generator) -> Batch:
        edges = torch.rand(samples, nodes, nodes, generator=generator) < 0.2
        edges = (edges | edges.mT | torch.eye(nodes, dtype=torch.bool)).float()
        x = torch.randn(samples, nodes, features, generator=generator)
        target = torch.randint(10, (samples,), generator=generator)
        return torch.cat([edges / edges.sum(2, keepdim=True), x], 2), target

    return make


def pixels(channels: int, side: int, classes: int) -> MakeBatch:
    """Make images, and a class for each pixel."""

    def make(samples: int, generator: torch.Generator) -> Batch:
        x = torch.randn(samples, channels, side, side, generator=generator)
        return x, torch.randint(classes, (samples, side * side), generator=generator)

    return make


def choices(users: int, items: int, length: int) -> MakeBatch:
    """Make a user and `length` items in each row, and as target a rating."""

    def make(samples: int, generator: torch.Generator) -> Batch:
        user = torch.randint(users, (samples, 1), generator=generator)
        bag = torch.randint(items, (samples, length), generator=generator)
        rating = torch.randint(5, (samples,), generator=generator)
        return torch.cat([user, bag], dim=1), rating

    return make
