"""Options that ranks must have in common, and the loss of one probe.

A sum over ranks with other clipping bounds or other losses is meaningless. Plain values
and names are compared, and of a loss its value on a sample that is made from a seed.
"""

import itertools
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vgrad import batches
from vgrad.contents import portable
from vgrad.devices import is_host
from vgrad.functional.model import FunctionalModel
from vgrad.generators import kept_random_state, set_seed
from vgrad.persample.engine import Transform
from vgrad.ranks import RankError, Ranks, Values
from vgrad.tree import tensors
from vgrad.typing import Buffers, Params, Tree


def options_of(loss: Any = None, **options: Any) -> Values:
    """Return plain values of options, and names of functions and classes, by place."""
    named = loss if hasattr(loss, "__qualname__") else type(loss)
    name = f"{named.__module__}.{named.__qualname__}"
    for key, value in options.items():
        if isinstance(value, FunctionalModel):
            options[key] = dict(value.named_modules())[""]
    texts = {"loss": name.replace("__mp_main__", "__main__")}
    return Values(texts | portable(**options))


def of_transform(transform: Transform) -> Values:
    """Return the options of a per-sample transform on which its results depend."""
    options, facts = transform.options, vars(transform.quantity)
    facts = {name: value for name, value in facts.items() if not name.startswith("_")}
    facts |= {n: getattr(options, n) for n in ("function", "randomness", "has_aux")}
    return options_of(options.loss, **facts)


def at_powers_of_two() -> Iterator[bool]:
    """Yield for each call whether a probe is due: at the calls 1, 2, 4, 8, ..."""
    return (not call & (call - 1) for call in itertools.count(1))


def check_probe(
    ranks: Ranks,
    label: str,
    loss: Any,
    params: Params,
    buffers: Buffers,
    batch: Tree,
    rows: tuple[int, ...] = (),
) -> None:
    """Refuse ranks whose losses have other values on one sample made from a seed.

    It has the dtypes and shapes of the first rank's samples, and nothing of their
    values. A loss that raises has no value, but for the class of its error.
    """
    if ranks.size == 1:
        return
    read = batches.read(label, batch)
    local_kinds = [(str(x.dtype)[6:], *x.shape[1:]) for x in read.tensors]
    kinds = ranks.exchanged(f"{label}, kinds of a sample", json.dumps(local_kinds))[0]
    entries = tensors((params, buffers))
    value, digits = "none", 0.0
    if not any(isinstance(entry, DTensor) for entry in entries):
        states = random.getstate(), np.random.get_state()
        with kept_random_state([*entries, *read.tensors]):
            set_seed(0, [*entries, *read.tensors])
            random.seed(0)
            np.random.seed(0)
            try:
                pairs = zip(kinds, read.tensors, strict=True)
                items = [_draw(kind, like, rows) for kind, like in pairs]
                result = loss(params, buffers, *read.sample(items))
                while isinstance(result, tuple):
                    result = result[0]
                value, digits = float(result), torch.finfo(result.dtype).eps ** 0.5
            except Exception as error:
                value = type(error).__name__
        random.setstate(states[0])
        np.random.set_state(states[1])
    notes = ranks.agree(f"{label}, probe", loss=value, digits=digits)
    values, digits = [note["loss"] for note in notes], max(n["digits"] for n in notes)
    if len({*map(str, values)}) > 1 and not _close(values, digits):
        raise RankError(
            f"{label}: expected the same loss on all ranks, got {values} on ranks 0 to "
            f"{ranks.size - 1} of one sample that was made from a seed. Make it of the "
            f"same values on every rank."
        )


def _draw(kind: list, like: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Draw a part of a sample; whole numbers are valid as indices."""
    dtype, shape = getattr(torch, kind[0]), (*rows, *kind[1:])
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape).to(like.device, dtype)
    # On a device a wrong index would end the process.
    return torch.randint(1 + is_host(like.device), shape).to(like.device, dtype)


def _close(values: list, digits: float) -> bool:
    if not all(isinstance(value, float) and math.isfinite(value) for value in values):
        return False
    return max(values) - min(values) <= digits * max(map(abs, values))
