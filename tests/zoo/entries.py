"""What an entry of the zoo is: a model in use, and what comes of it today."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.losses import Net

SIZE = 3
"""Samples of a batch: enough for answers that differ."""

D = 6
"""Width of nets by hand."""

SAME = {"randomness": "same"}
"""Options under which all samples draw the same, as the reference does."""

DIFFERENT = {"randomness": "different"}


class Use(NamedTuple):
    """A model with what it is called with, built anew at each call of a builder.

    The last item of a batch is the target of the criterion; without one the model
    returns its own loss. `values` replaces the model's parameters, if it has none yet.
    """

    model: nn.Module
    batch: tuple
    criterion: Callable[[Any, Any], Tensor] | None = F.cross_entropy
    values: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Exact:
    """As plain autograd, to the tolerance."""

    strategy: str = "recorded"  # under `auto`
    why: str = ""  # a part of the text of `explain`, where it is another one
    op: str = ""  # the beginning of this text
    loops: tuple[str, ...] = ()  # ops that run sample by sample, with one warning
    splits: bool = False  # samples take different branches: recorded in parts


@dataclass(frozen=True)
class Refused:
    """A clear error, of which `why` is a part; a strategy that it advises is exact."""

    why: str


@dataclass(frozen=True)
class Impossible:
    """Plain autograd raises an error as well, of which `why` is a part."""

    why: str


def looks(op: str) -> Exact:
    return Exact("loop", "looks at values or has shapes that depend on them", op)


def loops(op: str) -> Exact:
    return Exact(loops=(op,))


def alone(function: str) -> Exact:
    return loops(f"{function}.apply")


SPLITS = Exact(splits=True)


@dataclass(frozen=True)
class Entry:
    """One row of the table."""

    name: str  # what it is, for readers
    build: Callable[[], Use]  # after the generator is seeded
    today: Exact | Refused | Impossible = Exact()
    tolerance: float = 1e-9  # of gradients, norms and clipped sums, each relative
    single: bool = False  # the package runs in float32
    plainly: Callable[[Any], Any] = lambda model: None  # so that float64 runs as well
    options: Mapping[str, Any] = field(default_factory=dict)  # of the transforms
    through: Callable[[Any], Any] = lambda transform: transform  # before its call
    # Plain autograd runs two copies of each sample, for the mean of their losses: with
    # one, torch 2.13's evaluated batch norm has a backward pass that is wrong where the
    # gradient comes transposed.
    twice: bool = False
    slow: bool = False  # takes more than two seconds


def entry(name: str, build: Callable[..., Use], *arguments: Any, **more: Any) -> Entry:
    """Make an entry, whose builder gets the arguments that are not of the entry."""
    own = {key: more.pop(key) for key in [*more] if key in Entry.__annotations__}
    return Entry(name, functools.partial(build, *arguments, **more), **own)


class Entries(list[Entry]):
    """The entries of a section of the table."""

    def row(self, name: str, *arguments: Any, **more: Any) -> Callable:
        """Add an entry whose builder is the function below."""

        def add(build: Callable[..., Use]) -> Callable[..., Use]:
            self.append(entry(name, build, *arguments, **more))
            return build

        return add


def total(output: Tensor, target: Tensor) -> Tensor:
    """A criterion for outputs of any shape: the target weighs them."""
    return (output * target).sum()


def classes(number: int = 3) -> Tensor:
    return torch.randint(number, (SIZE,))


def ragged(length: int, *, at_least: int = 2) -> Tensor:
    """Return a mask [SIZE, length]: the first sample is whole, others are shorter."""
    lengths = length - torch.arange(SIZE) * (length - at_least) // (SIZE - 1)
    return torch.arange(length) < lengths[:, None]


def noise(*shape: int) -> Tensor:
    return torch.randn(SIZE, *shape)


def net(function, *shape: int, output: tuple[int, ...] = (3,), **parts) -> Use:
    """A net on normal numbers, whose outputs are weighed at random."""
    return Use(Net(function, **parts), (noise(*shape), noise(*output)), total)


def two_layers(function) -> Net:
    return Net(function, layer=nn.Linear(D, D), head=nn.Linear(D, 3))


def mlp(output: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, output))
