"""Modules that hold a parameter in more places than their registries."""

import weakref
from collections import deque
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn


class Slotted:
    """An object without a dictionary, one of whose slots is private and not set."""

    __slots__ = ("__private", "factor")

    def __init__(self, factor=1.0):
        self.factor = factor


class Holder(nn.Module):
    """Uses its weight by another way than its layer."""

    def __init__(self, hold, read):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.held, self.read = hold(self.layer), read

    def forward(self, x):
        return self.layer(x) * self.read(self.held).sum()


def in_a_cell(layer):
    weight = layer.weight
    return lambda: weight.exp()


def tied(layer):
    other = nn.Linear(4, 3, bias=False)
    other.weight = layer.weight
    return other


HELD = {
    "module": (lambda layer: [tied(layer)], lambda held: held[0].weight),
    "tuple": (lambda layer: (layer.weight, 1), lambda held: held[0]),
    "list": (lambda layer: [(layer.weight,)], lambda held: held[0][0]),
    "set": (lambda layer: {layer.weight}, lambda held: next(iter(held))),
    "deque": (lambda layer: deque([layer.weight]), lambda held: held[0]),
    "key": (lambda layer: {layer.weight: 1}, lambda held: next(iter(held))),
    "namespace": (lambda layer: SimpleNamespace(w=layer.weight), lambda held: held.w),
    "slots": (lambda layer: Slotted(layer.weight), lambda held: held.factor),
    "keyword": (lambda layer: partial(torch.mul, other=layer.weight),
                lambda held: held(2 * torch.ones(()))),
    "distribution": (lambda layer: torch.distributions.Normal(layer.weight, 1.0),
                     lambda held: held.log_prob(torch.ones(3, 4).double())),
    "default": (lambda layer: lambda w=layer.weight: w.exp(), lambda held: held()),
    "cell": (in_a_cell, lambda held: held()),
    "module in a cell": (lambda layer: lambda: layer.weight, lambda held: held()),
    "keys of weak references":
        (lambda layer: weakref.WeakKeyDictionary({layer: 1}),
         lambda held: next(iter(held)).weight),
}  # fmt: skip
"""Holders of a weight, and how it is used."""

EXCHANGED = ["module", "tuple", "list", "set", "deque"]
"""The holders in which a call exchanges the weight."""

SHARED = [*HELD][-4:]
"""The holders that a copy would share."""
