"""One layer of a recurrent net through time, forwards and backwards.

The backward pass computes again what the forward pass did not keep. A time step is then
one GEMM and a few elementwise ops; everything else is done for all steps at once.

T time steps, N sequences, I inputs, H features of a state, G gates.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.torch_private import kernels


class Run(NamedTuple):
    """What the backward pass of a layer starts from, in one dtype.

    `gates [T, N, 4, H]` and `cells [T, N, H]` are those of an LSTM, None if not kept.
    """

    reverse: bool
    d_output: Tensor
    d_h: Tensor
    d_c: Tensor
    gates: Any
    cells: Any
    x: Tensor
    before: Tensor
    output: Tensor
    c: Any
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Any
    b_hh: Any

    def weights(self, place: int) -> tuple[Any, ...]:
        """Return the weights of one gate."""
        size = self.w_hh.shape[1]
        rows = slice(place * size, (place + 1) * size)
        every = (self.w_ih, self.w_hh, self.b_ih, self.b_hh)
        return tuple(None if each is None else each[rows] for each in every)

    def gate(self, place: int) -> Tensor:
        """Return what one gate adds up from inputs and states, [T, N, H]."""
        w_ih, w_hh, b_ih, b_hh = self.weights(place)
        found = F.linear(self.x, w_ih, None if b_ih is None else b_ih + b_hh)
        found.flatten(0, 1).addmm_(self.before.flatten(0, 1), w_hh.T)
        return found

    def forwards(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the time steps in the order in which the layer made them."""
        rows = tensor.unbind(0)
        return rows[::-1] if self.reverse else rows

    def backwards(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the time steps in the opposite order."""
        rows = tensor.unbind(0)
        return rows if self.reverse else rows[::-1]

    def arriving(self) -> Sequence[Tensor]:
        """Return what the state before each step gets as an output, backwards."""
        return *self.backwards(self.d_output)[1:], torch.zeros_like(self.d_h)

    def last(self) -> Tensor:
        """Return the gradient at the state after the last step."""
        return self.backwards(self.d_output)[0] + self.d_h


def lstm_forwards(
    reverse: bool, x: Tensor, h: Tensor, c: Tensor, *weights: Any
) -> tuple[Tensor, ...]:
    """Run one layer, keeping what its backward pass needs.

    `x [T, N, I]` with `h` and `c [N, H]` gives `output [T, N, H]`, `h_n` and `c_n`, the
    gates `[T, N, 4, H]` and the states `c` after each step `[T, N, H]`.
    """
    w_ih, w_hh, b_ih, b_hh = weights
    size = w_hh.shape[1]
    sums = linear(x, w_ih, None if b_ih is None else b_ih + b_hh)
    gates = sums.unflatten(2, (4, size))
    output, cells = (torch.empty_like(gates[:, :, 0]) for _ in range(2))
    recurrent = w_hh.T.contiguous()  # one copy for all steps
    every = (sums, gates[:, :, :2], gates[:, :, 3], *gates.unbind(2)[:3], cells, output)
    steps = list(zip(*(each.unbind(0) for each in every), strict=True))
    for at_gates, i_f, o, i, f, g, cell, state in steps[:: -1 if reverse else 1]:
        at_gates.addmm_(h, recurrent)
        i_f.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        c = torch.mul(f, c, out=cell).addcmul_(i, g)
        h = torch.tanh(c, out=state).mul_(o)
    return output, h.clone(), c.clone(), gates, cells


def _lstm(run: Run) -> tuple[Tensor, ...]:
    """From gates and cells, the gradients at c and h, backwards through time."""
    if run.gates is None:
        i, f, g, o, cells = _again(run)
        d = g.new_empty((*g.shape[:2], 4, g.shape[2]))
    else:
        (i, f, g, o), cells = run.gates.unbind(2), run.cells
        d = torch.empty_like(run.gates)
    squashed = cells.tanh()

    # Each gate's gradient is that of c, or of h for the last gate, times one of these.
    _through_sigmoid(g, i, grad_input=d[:, :, 0])
    _through_sigmoid(shifted(run.c, cells, run.reverse), f, grad_input=d[:, :, 1])
    _through_tanh(i, g, grad_input=d[:, :, 2])
    _through_sigmoid(squashed, o, grad_input=d[:, :, 3])
    outwards = _through_tanh(o, squashed, grad_input=squashed)

    d_h, d_c = run.last(), run.d_c.clone()
    d_c_each = d_c.unsqueeze(1)
    whole = d.view(*d.shape[:2], len(run.w_hh))
    rows = (whole, d[:, :, :3], d[:, :, 3], outwards, f)
    steps = zip(*(run.backwards(each) for each in rows), run.arriving(), strict=True)
    for at_gates, at_ifg, at_o, outward, forget, arriving in steps:
        d_c.addcmul_(d_h, outward)
        at_ifg.mul_(d_c_each)
        at_o.mul_(d_h)
        d_c.mul_(forget)
        torch.addmm(arriving, at_gates, run.w_hh, out=d_h)
    return whole, whole, d_h, d_c


def _again(run: Run) -> tuple[Tensor, ...]:
    """Compute gates and cells of an LSTM from its inputs and outputs."""
    i, f, g, o = (run.gate(place) for place in range(4))
    for gate in (i, f, o):
        gate.sigmoid_()
    g.tanh_()
    cells, state = i * g, run.c
    for cell, forget in zip(run.forwards(cells), run.forwards(f), strict=True):
        state = cell.addcmul_(forget, state)
    return i, f, g, o, cells


def _gru(run: Run) -> tuple[Tensor, ...]:
    """Gates again; every gradient is that of h times what is known beforehand."""
    r, z = run.gate(0).sigmoid_(), run.gate(1).sigmoid_()
    w_ih, w_hh, b_ih, b_hh = run.weights(2)
    inner = F.linear(run.before, w_hh, b_hh)
    n = F.linear(run.x, w_ih, b_ih).addcmul_(r, inner).tanh_()

    d_n = _through_tanh(1 - z, n)
    d_hh = n.new_empty((*n.shape[:2], 3, n.shape[2]))
    _through_sigmoid(d_n * inner, r, grad_input=d_hh[:, :, 0])
    _through_sigmoid(run.before - n, z, grad_input=d_hh[:, :, 1])
    torch.mul(d_n, r, out=d_hh[:, :, 2])

    d_h = run.last()
    d_states = torch.empty_like(d_n)
    rows = (d_states, d_hh.flatten(2), d_hh, z)
    steps = zip(*(run.backwards(each) for each in rows), run.arriving(), strict=True)
    for kept, flat, at_gates, stays, arriving in steps:
        kept.copy_(d_h)
        at_gates.mul_(d_h.unsqueeze(1))
        torch.addcmul(arriving, d_h, stays, out=d_h)
        d_h.addmm_(flat, run.w_hh)
    d_ih = d_hh.clone()
    torch.mul(d_n, d_states, out=d_ih[:, :, 2])
    return d_ih.flatten(2), d_hh.flatten(2), d_h


def _plain(run: Run, d: Tensor) -> tuple[Tensor, ...]:
    """From the derivative of the activation, which the output tells."""
    d_h = run.last()
    steps = zip(run.backwards(d), run.arriving(), strict=True)
    for at_sum, arriving in steps:
        at_sum.mul_(d_h)
        torch.addmm(arriving, at_sum, run.w_hh, out=d_h)
    return d, d, d_h


def _tanh(run: Run) -> tuple[Tensor, ...]:
    return _plain(run, 1 - run.output.square())


def _relu(run: Run) -> tuple[Tensor, ...]:
    return _plain(run, (run.output > 0).to(run.output.dtype))


BACKWARD: dict[str, Callable[[Run], tuple[Tensor, ...]]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _tanh,
    "rnn_relu": _relu,
}
"""Gradients before the gates, at the input's and the state's side, and at the state."""

_through_sigmoid = kernels.sigmoid_backward
_through_tanh = kernels.tanh_backward


def shifted(first: Tensor, states: Tensor, reverse: bool) -> Tensor:
    """Return the state before each step, from the first one and those after it."""
    time = _time(states)
    states, first = states.transpose(0, time), first.unsqueeze(time)
    kept = states.narrow(time, 1 if reverse else 0, states.shape[time] - 1)
    found = torch.cat([kept, first] if reverse else [first, kept], time)
    return found.transpose(0, time)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear map to `x [T, N, I]`; the result lies in memory as `x` does.

    In another order than that of memory torch would make it of many small products.
    """
    time = _time(x)
    return F.linear(x.transpose(0, time), weight, bias).transpose(0, time)


def _time(x: Tensor) -> int:
    """Return which axis of `[T, N, ...]` is time in the order of memory."""
    return int(x.stride(0) < x.stride(1))
