"""Packed sequences, for samples that run as one.

`pack_padded_sequence` orders rows by lengths, which samples must share to run together.
With known ones, packing and padding take rows by index, and a recurrent net runs once
for all sequences of one length, in the form that it has without packing.

T time steps, N sequences of a sample, R rows of all of them
"""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from vgrad.lowering.recurrent import NETS
from vgrad.lowering.value_reads import NONE, read_value
from vgrad.lowering.vmap import Form, FormOf
from vgrad.torch_private import kernels, modes


def _pack(
    level: int, input: Tensor, lengths: Tensor, batch_first: bool = False
) -> Form | None:
    """Take the rows of all sequences at one time after another: `-> [R, ...], [T]`."""
    if (known := read_value(Tensor.tolist, (lengths,), {}, level)) is NONE:
        known = lengths.tolist()
    steps, count = input.shape[1 if batch_first else 0], input.shape[not batch_first]
    if len(known) != count or known != sorted(known, reverse=True):
        return None  # torch refuses these
    if not count or known[0] > steps or known[-1] <= 0:
        return None
    sizes = [sum(length > step for length in known) for step in range(known[0])]
    rows = [(step, n) for step, size in enumerate(sizes) for n in range(size)]

    def pack() -> tuple[Tensor, Tensor]:
        time, number = torch.tensor(rows, device=input.device).unbind(1)
        index = (number, time) if batch_first else (time, number)
        return input[index], torch.tensor(sizes)

    return pack


def _pad(
    level: int,
    data: Tensor,
    batch_sizes: Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> Form | None:
    """Put the rows back: `-> [T, N, ...]` or `[N, T, ...]`, and the lengths `[N]`."""
    if modes.is_batched(batch_sizes):
        return None
    sizes = batch_sizes.tolist()
    steps = max(total_length, len(sizes))
    last = sum(sizes)  # one row more, which is padding
    places = [[last] * sizes[0] for _ in range(steps)]
    for step, own in enumerate(_rows(sizes)):
        places[step][: len(own)] = own

    def pad() -> tuple[Tensor, Tensor]:
        index = torch.tensor(places, device=data.device)
        padding = torch.full(
            (1, *data.shape[1:]), padding_value, dtype=data.dtype, device=data.device
        )
        rows = torch.cat([data, padding])[index.t() if batch_first else index]
        return rows, torch.tensor(_lengths(sizes))

    return pad


def _net(func: Callable) -> FormOf:
    """Make the form of a recurrent net on packed sequences."""

    def form(level: int, data: Tensor, sizes: Any, hx: Any, *rest: Any) -> Form | None:
        if not isinstance(rest[0], tuple | list) or modes.is_batched(sizes):
            return None  # here is `has_biases` where nothing is packed
        sizes = sizes.tolist()
        return lambda: _by_lengths(func, data, sizes, hx, *rest)

    return form


def _by_lengths(
    func: Callable, data: Tensor, sizes: list[int], hx: Any, *rest: Any
) -> tuple[Tensor, ...]:
    """Run a net for all sequences of one length at once."""
    rows, order = _rows(sizes), []
    found: list[tuple[Tensor, ...]] = []
    for length, same in groupby(enumerate(_lengths(sizes)), key=lambda pair: pair[1]):
        first, *others = [number for number, _ in same]
        stop = first + 1 + len(others)
        own = [row for step in rows[:length] for row in step[first:stop]]
        order += own
        alone = len(own) == sum(sizes)
        x = data if alone else data[torch.tensor(own, device=data.device)]
        states = [x[:, first:stop] for x in ([hx] if isinstance(hx, Tensor) else hx)]
        state = states[0] if isinstance(hx, Tensor) else tuple(states)
        x = x.unflatten(0, (length, stop - first))
        output, *final = func(x, state, *rest, False)
        found.append((output.flatten(0, 1), *final))
    if len(found) == 1:
        return found[0]
    back = torch.tensor(order, device=data.device).argsort()
    output, *final = zip(*found, strict=True)
    return torch.cat(output)[back], *(torch.cat(each, 1) for each in final)


def _rows(sizes: list[int]) -> list[range]:
    """Return the rows of each time step."""
    starts = [sum(sizes[:step]) for step in range(len(sizes))]
    return [
        range(start, start + size) for start, size in zip(starts, sizes, strict=True)
    ]


def _lengths(sizes: list[int]) -> list[int]:
    """Return the length of each sequence."""
    return [sum(size > number for size in sizes) for number in range(sizes[0])]


PACKED: dict[Callable, FormOf] = {
    kernels.pack_padded_sequence: _pack,
    kernels.pad_packed_sequence: _pad,
    **{func: _net(func) for func in NETS},
}
"""Calls on packed sequences."""
