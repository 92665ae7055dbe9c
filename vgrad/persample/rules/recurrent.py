"""Recurrent nets: torch's kernels forward, and one factor for each weight backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vgrad.lowering.sequences import cells, recurrent
from vgrad.persample.factors.base import Dense, Positions
from vgrad.persample.factors.outer import Outer
from vgrad.persample.rules.table import Recording, lowered

Output = tuple[Tensor, ...]


@lowered(torch.lstm)
def lstm(record: Recording, input: Tensor, hx: Any, *rest: Any) -> Output | None:
    """Run all layers by the kernel of LSTMs."""
    return _run(record, "lstm", input, hx, *rest)


@lowered(torch.gru)
def gru(record: Recording, input: Tensor, hx: Any, *rest: Any) -> Output | None:
    """Run all layers by the kernel of GRUs."""
    return _run(record, "gru", input, hx, *rest)


@lowered(torch.rnn_tanh)
def rnn_tanh(record: Recording, input: Tensor, hx: Any, *rest: Any) -> Output | None:
    """Run all layers by the kernel of plain nets with tanh."""
    return _run(record, "rnn_tanh", input, hx, *rest)


@lowered(torch.rnn_relu)
def rnn_relu(record: Recording, input: Tensor, hx: Any, *rest: Any) -> Output | None:
    """Run all layers by the kernel of plain nets with relu."""
    return _run(record, "rnn_relu", input, hx, *rest)


def _run(
    record: Recording,
    mode: str,
    input: Tensor,
    hx: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Output | None:
    """Fold the samples into the batch `n`, which is one for a single sequence."""
    hidden = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    layout = cells.Layout(num_layers, bidirectional, dropout, train, batch_first)
    drops = dropout > 0 and train and num_layers > 1
    each = (4 if has_biases else 2) * num_layers * (2 if bidirectional else 1)
    projected = len(params) != each
    own = any(record.is_batched(weight) or weight.is_complex() for weight in params)
    if projected or own or (drops and record.randomness != "different"):
        with record.watching():
            return cells.steps(mode, input, hidden, params, **layout._asdict())
    weights = [record.plain(weight) for weight in params]
    report = _reported(record, params, has_biases)
    x, *hidden = (record.copies(tensor) for tensor in (input, *hidden))
    with record.below(), record.drawing(1):
        time = 2 if batch_first else 1
        x = x.movedim(time, 0)  # [T, B, n, I]
        sizes = x.shape[1:3]
        output, *final = recurrent.recurrent_net(
            mode,
            x.flatten(1, 2),
            tuple(each.transpose(0, 1).flatten(1, 2) for each in hidden),
            weights,
            report,
            anchor=record.anchor(x.new_zeros(())),
            **layout._replace(batch_first=False)._asdict(),
        )
        output = output.unflatten(1, sizes).movedim(0, time)
        final = [each.unflatten(1, sizes).transpose(0, 1) for each in final]
        return tuple(record.logical(tensor) for tensor in (output, *final))


def _reported(record: Recording, params: Any, has_biases: bool) -> Callable:
    """Expect the uses of the weights, and return what gives them their factors.

    It is called for each layer, with the place of its first weight, the gradients at
    the gates to which inputs and states lead, and the inputs and states themselves,
    `[T, B * n, K]` each.
    """
    uses = [record.use(weight) for weight in params]
    shapes, size = [weight.shape for weight in params], record.size

    def report(first: int, d_ih: Tensor, d_hh: Tensor, x: Tensor, h: Tensor) -> None:
        for inputs, gates, place in ((x, d_ih, first), (h, d_hh, first + 1)):
            if place == first or d_hh is not d_ih:  # only a GRU has two
                outputs = Positions(_positions(gates, size))
                sums = outputs.tensor.sum((1, 2)) if has_biases else None
            if (use := uses[place]) is not None:
                a = _positions(inputs, size)
                use(Outer(a, outputs.tensor, shapes[place], outputs))
            if sums is not None and (use := uses[place + 2]) is not None:
                use(Dense(sums.clone()))  # each parameter gets its own

    return report


def _positions(tensor: Tensor, size: int) -> Tensor:
    """View `[T, B * n, K]` as `[B, 1, n * T, K]`."""
    parts = tensor.unflatten(1, (size, -1)).permute(1, 2, 0, 3)
    return parts.flatten(1, 2)[:, None]


def _in_steps(cell: Callable) -> Callable:
    """Make a lowering that runs a cell's steps, each by its own rule."""

    def run(record: Recording, *args: Any, **kwargs: Any) -> Any:
        with record.watching():
            return cell(*args, **kwargs)

    return run


for _op, _cell in (
    (torch.lstm_cell, cells.lstm_cell),
    (torch.gru_cell, cells.gru_cell),
    (torch.rnn_tanh_cell, cells.rnn_tanh_cell),
    (torch.rnn_relu_cell, cells.rnn_relu_cell),
):
    lowered(_op)(_in_steps(_cell))
