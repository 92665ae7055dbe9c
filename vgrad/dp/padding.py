"""A look at collate functions that pad: does a sample's loss depend on its batch?

Clipping bounds the part of one sample. Where the longest sample of a batch sets the
length of all, and the model sees the padding, one sample changes the gradients of the
others, which no bound on its own gradient hides.
"""

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vgrad import batches
from vgrad.dp.live import LiveModule
from vgrad.functional.losses import Criterion, sample_loss
from vgrad.generators import drawn_since, kept_random_state, random_state
from vgrad.tree import tree_flatten, tree_leaves, tree_unflatten
from vgrad.typing import Tree

_SAMPLES = 64
"""How many of the first samples are looked at."""


class Padded(NamedTuple):
    """Two samples collated alone, and together, which changes the first one's shape."""

    short: Tree
    long: Tree
    pair: Tree


def padded(dataset: Any, collate_fn: Callable[[list[Any]], Tree]) -> Padded | None:
    """Collate a short sample with a long one; None where no shape changes by that.

    Warns where that draws random numbers, since nothing can be compared then.
    """

    def collated(*samples: Any) -> Tree:
        return collate_fn([copy.deepcopy(each) for each in samples])

    with _kept() as drawn:
        samples = [dataset[row] for row in range(min(_SAMPLES, len(dataset)))]
        drawn()  # data sets may augment
        alone = [collated(each) for each in samples]
        shapes = [_shapes(each) for each in alone]
        sizes = [sum(map(torch.Size.numel, each)) for each in shapes]
        long = sizes.index(max(sizes))
        others = [row for row, each in enumerate(shapes) if each != shapes[long]]
        if not others:
            return None
        short = min(others, key=sizes.__getitem__)
        pair = collated(samples[short], samples[long])
        if _shapes(pair) == shapes[short]:
            return None
        if drawn():
            _warn("collate_fn draws random numbers")
            return None
    return Padded(alone[short], alone[long], pair)


def check_padded(
    model: nn.Module, criterion: Criterion, found: Padded, given: Tree, batch: Tree
) -> None:
    """Refuse a loss of a sample that padding changes.

    `given` is the batch of the loader, and `batch` are the arguments made of it.

    Raises:
        RuntimeError: the loss differs, or the arguments are not tensors of the batch.
    """
    short, long, pair = (_arguments(each, given, batch) for each in found)
    modules = [(each, each.training) for each in model.modules()]
    try:
        for each, _ in modules:
            each.training = False
        live = LiveModule(model)
        loss = sample_loss(live.function, criterion)
        tensors = live.values()

        def losses(batch: Tree) -> list[Tensor]:
            read = batches.read("PrivateGradients(collate_fn)", batch)
            rows = (read.sample(read.one(row)) for row in range(read.size))
            return [live.run(loss, *tensors, *row) for row in rows]

        with torch.no_grad(), _kept(*tensors[0].values()) as drawn:
            alone = torch.stack(losses(short) + losses(long))
            paired = torch.stack(losses(pair))
            if drawn():
                _warn("the loss draws random numbers in evaluation mode")
                return
    finally:
        for each, training in modules:
            each.training = training
    dtypes = [alone.dtype, *(each.dtype for each in tensors[0].values())]
    if torch.is_autocast_enabled(alone.device.type):
        dtypes.append(torch.get_autocast_dtype(alone.device.type))
    rounding = max(torch.finfo(each).eps for each in dtypes) ** 0.5
    options = {"rtol": rounding, "atol": rounding, "equal_nan": True}
    # In order of size: a collate function may sort its samples.
    if not torch.allclose(alone.sort().values, paired.sort().values, **options):
        raise RuntimeError(
            "PrivateGradients(collate_fn): expected a loss of each sample that does "
            "not depend on the other samples, got one that changes when a longer "
            "sample is in the batch, to whose length collate_fn pads. No clipping "
            "bounds that. Pad to a fixed length, or return a mask of the padding and "
            "use it in the model. check_collate=False skips this comparison."
        )


def _arguments(collated: Tree, given: Tree, batch: Tree) -> Tree:
    """Make of a collated batch the arguments that were made of the loader's batch."""
    leaves, spec = tree_flatten(batch)
    shown, own = tree_leaves(given), tree_leaves(collated)
    left, places = [*range(len(shown))], range(len(shown))
    arguments = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            arguments.append(leaf)
            continue
        place = next((n for n in (*left, *places) if _is_moved(leaf, shown[n])), None)
        if place is None or len(own) != len(shown):
            raise RuntimeError(
                "PrivateGradients.backward(*batch): expected the tensors of the "
                "loader's batch, got others made of them, for which nobody can look "
                "whether padding to the longest sample of a batch changes losses. If "
                "the model uses a mask of the padding, pass check_collate=False."
            )
        left = [each for each in left if each != place]  # one may stand twice
        arguments.append(own[place].to(leaf))
    return tree_unflatten(arguments, spec)


def _is_moved(tensor: Tensor, other: Any) -> bool:
    """Return whether a tensor is another one, on some device and in some dtype."""
    if tensor is other:
        return True
    same = isinstance(other, Tensor) and tensor.shape == other.shape
    return same and torch.equal(tensor, other.to(tensor))


def _shapes(batch: Tree) -> list[torch.Size]:
    """Return the shapes of the samples of a batch."""
    return [each.shape[1:] for each in tree_leaves(batch)]


@contextmanager
def _kept(*tensors: Tensor) -> Iterator[Callable[[], bool]]:
    """Put all generators back after a block, which gets a function.

    It returns whether numbers were drawn since its last call.
    """

    def states() -> tuple[Any, ...]:
        name, words, *rest = np.random.get_state(legacy=True)
        numpy = [name, *map(int, words), *rest]
        return random.getstate(), numpy, random_state(tensors)

    def drawn() -> bool:
        nonlocal before
        old, before = before, states()
        return old[:2] != before[:2] or drawn_since(old[2], tensors)

    with kept_random_state(tensors):
        of_python, of_numpy = random.getstate(), np.random.get_state()
        before = states()
        try:
            yield drawn
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _warn(reason: str) -> None:
    warnings.warn(
        f"PrivateGradients(collate_fn): it pads to the longest sample of a batch, and "
        f"whether losses depend on that could not be looked at, since {reason}. Use "
        f"masks of the padding, and check_collate=False says that the model does.",
        stacklevel=4,
    )
