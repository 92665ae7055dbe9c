"""Options that ranks must have in common, and the numbers of probes.

A sum over ranks with other clipping bounds or other losses is meaningless. Ranks agree
on a digest of plain options, on the loss of a sample that is made from a seed, and on
an update of the optimizer for gradients from a seed.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vgrad import batches
from vgrad.devices import is_host
from vgrad.dp.grouped import seeded
from vgrad.optim import GradientTransformation
from vgrad.persample.engine import Transform
from vgrad.ranks import RankError, Ranks, Values
from vgrad.tree import double, map_values, tensors, tree_map
from vgrad.typing import Buffers, Params, Tree

_PLAIN = bool, int, float, complex, str, type(None)


def options_of(**options: Any) -> Values:
    """Return options as text: plain values, and the names of functions and classes.

    Values, shapes and devices of tensors may differ.
    """
    # Where processes are spawned, the main module has another name in them.
    texts = map_values(_text, options).items()
    return Values((n, text.replace("__mp_main__", "__main__")) for n, text in texts)


def of_transform(transform: Transform) -> Values:
    """Return the options of a per-sample transform on which its results depend."""
    options, facts = transform.options, vars(transform.quantity)
    facts = {name: value for name, value in facts.items() if not name.startswith("_")}
    names = "loss", "function", "randomness", "has_aux"
    return options_of(**facts, **{name: getattr(options, name) for name in names})


def _text(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    if isinstance(value, Tensor):
        return f"{name} of {value.dtype}"
    if is_dataclass(value) and not isinstance(value, type):
        names = [x.name for x in fields(value) if not x.name.startswith("_")]
        value = {name: getattr(value, name) for name in names}
    elif isinstance(value, tuple | list):
        value = getattr(value, "_asdict", dict(enumerate(value)).copy)()
    if isinstance(value, Mapping):
        parts = (f"{key}={_text(part)}" for key, part in value.items())
        return f"{name}({', '.join(parts)})"
    return name


def at_powers_of_two() -> Iterator[bool]:
    """Yield for each call whether a probe is due: at the calls 1, 2, 4, 8, ..."""
    return (not call & (call - 1) for call in itertools.count(1))


def check_loss(
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
    values. Sharded parameters are not compared.
    """
    entries = tensors((params, buffers))
    if ranks.size == 1 or any(isinstance(entry, DTensor) for entry in entries):
        return
    read = batches.read(label, batch)
    local_kinds = [(str(x.dtype)[6:], *x.shape[1:]) for x in read.tensors]
    kinds = ranks.exchanged(f"{label}, kinds of a sample", json.dumps(local_kinds))[0]

    def value() -> Tensor:
        pairs = zip(kinds, read.tensors, strict=True)
        items = [_draw(kind, like, rows) for kind, like in pairs]
        result = loss(params, buffers, *read.sample(items))
        while isinstance(result, tuple):
            result = result[0]
        return result

    _check(ranks, f"{label}, loss", value, [*entries, *read.tensors])


def check_optimizer(
    ranks: Ranks, label: str, tx: GradientTransformation, params: Params, step: Tensor
) -> None:
    """Refuse ranks whose optimizers update two numbers of each parameter otherwise."""

    def draw(like: Tensor) -> Tensor:
        sizes = [2] * like.ndim
        return torch.randn(sizes).to(like.device, like.dtype)

    def at_step(slot: Tensor) -> Tensor:
        counts = not slot.ndim and not slot.is_floating_point()
        return torch.full_like(slot, int(step)) if counts else slot

    def value() -> Tensor:
        small, grads = map_values(draw, params), map_values(draw, params)
        updates: Any
        updates, _ = tx.update(grads, tree_map(at_step, tx.init(small)), small)
        sums = [double(x).abs().sum().cpu() for x in updates.values()]
        return torch.stack(sums).sum()

    if ranks.size > 1:
        _check(ranks, f"{label}, optimizer", value, [*params.values()])


def _check(
    ranks: Ranks, label: str, compute: Callable[[], Tensor], used: list[Tensor]
) -> None:
    """Refuse ranks on which a function of a seed has another value, or error."""
    value, digits = "", 0.0
    with seeded(0, used):
        try:
            result = compute()
            value, digits = float(result), torch.finfo(result.dtype).eps ** 0.5
        except Exception as error:
            value = type(error).__name__
    notes = ranks.agree(label, value=value, digits=digits)
    values, digits = [note["value"] for note in notes], max(n["digits"] for n in notes)
    if len({*map(str, values)}) > 1 and not _close(values, digits):
        raise RankError(
            f"{label}: expected the same number on all ranks, got {values} on ranks 0 "
            f"to {ranks.size - 1} for a sample or gradients made from a seed. Make it "
            f"of the same values on every rank."
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
