"""Recurrent nets: in steps, by torch's kernels, and on packed sequences.

torch has no batching rules for its recurrent kernels: under `torch.vmap(grad)` an LSTM
loops over the samples, a GRU and the plain nets raise. In `steps` a time step is two
linear maps and elementwise ops, which every transform can run.

In recorded passes torch's kernels run forward. The gradient of a sample's weights is a
sum over time steps of outer products: the gradients before the gates times the inputs
and states. The kernels add them up over all samples; here the backward pass reports
both sides instead. It keeps nothing but inputs and outputs, computes all gates again at
once, and then goes through time with one GEMM and a few elementwise ops a step.

`pack_padded_sequence` orders rows by lengths, which samples must share to run together.
With known ones, packing and padding take rows by index, and a net runs once for all
sequences of one length.

T time steps, N sequences, I inputs, H features of a state, P of a projected one, G
gates (4 of an LSTM, 3 of a GRU, else 1), L layers, D directions, R rows of a packed
sequence, B samples
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from vgrad.factors.base import Dense, Outer, Positions
from vgrad.ops.record import Form, Recording, Samples, register
from vgrad.torch_private import kernels, modes
from vgrad.tree import no_autocast

State = tuple[Tensor, ...]
"""The state of one layer in one direction: `(h,)`, of an LSTM `(h, c)`."""


class Net(NamedTuple):
    """A call of `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu`.

    Attributes:
        mode: the name of the function.
        x: `[T, N, I]`, or `[N, T, I]` with `batch_first`.
        hidden: `(h0,)`, of an LSTM `(h0, c0)`, each `[L * D, N, H]`.
        weights: torch's flat list, for each layer and direction `w_ih, w_hh`, then
            `b_ih, b_hh` or neither, then `w_hr [P, H]` in an LSTM with projections.
    """

    mode: str
    x: Tensor
    hidden: State
    weights: Sequence[Tensor]
    num_layers: int = 1
    dropout: float = 0.0
    train: bool = True
    bidirectional: bool = False
    batch_first: bool = False

    @classmethod
    def of(
        cls, mode: str, input: Tensor, hx: Any, params: Any, has_biases: bool, *options
    ) -> "Net":
        """Read the arguments of torch's function; the biases follow from `params`."""
        hidden = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        return cls(mode, input, hidden, params, *options)

    @property
    def places(self) -> int:
        """The number of layers times directions."""
        return self.num_layers * (2 if self.bidirectional else 1)

    def split(self) -> list[tuple[Any, ...]]:
        """Return w_ih, w_hh, b_ih, b_hh and w_hr of each layer and direction."""
        each, rest = divmod(len(self.weights), self.places)
        if rest or each not in ((2, 3, 4, 5) if self.mode == "lstm" else (2, 4)):
            raise RuntimeError(
                f"{self.mode}({len(self.weights)} weights): expected {self.places} "
                f"times w_ih, w_hh, then b_ih and b_hh or neither, then w_hr in an "
                f"LSTM with projections."
            )
        starts = range(0, len(self.weights), each)
        groups = [self.weights[first : first + each] for first in starts]
        return [
            (
                *own[:2],
                *(own[2:4] if each > 3 else (None, None)),
                own[-1] if each % 2 else None,
            )
            for own in groups
        ]


Layer = Callable[[int, Tensor, State, Sequence[Any], bool], tuple[Tensor, State]]
"""From (place of the first weight, x, state, w_ih to w_hr, reverse) to all outputs."""


def steps(net: Net) -> tuple[Tensor, ...]:
    """Run a net step by step: `(output, h_n)` or `(output, h_n, c_n)`, as torch.

    Cost: one GEMM for the inputs of a layer, and one and about ten small ops per step.
    """

    def layer(
        first: int, x: Tensor, state: State, own: Sequence[Any], reverse: bool
    ) -> tuple[Tensor, State]:
        w_ih, w_hh, b_ih, b_hh, w_hr = own
        inner = F.linear(x, w_ih, b_ih).unbind(0)
        outputs = []
        for at_input in reversed(inner) if reverse else inner:
            state = _NEXT[net.mode](at_input, F.linear(state[0], w_hh, b_hh), *state)
            if w_hr is not None:
                state = (F.linear(state[0], w_hr), *state[1:])
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if reverse else outputs), state

    return _over_layers(net, layer)


def _over_layers(net: Net, layer: Layer) -> tuple[Tensor, ...]:
    """Run `layer` for each layer and direction, in torch's order, dropout between."""
    own = net.split()
    directions = 2 if net.bidirectional else 1
    x = net.x.transpose(0, 1) if net.batch_first else net.x
    if x.dim() != 3 or len(x) == 0:
        raise RuntimeError(
            f"{net.mode}(x {tuple(net.x.shape)}): expected [T, N, I] with one time "
            f"step at least, or [N, T, I] with batch_first."
        )
    _check_state(net.mode, net.hidden, (net.places, x.shape[1]), own[0][1])
    states = list(zip(*(each.unbind(0) for each in net.hidden), strict=True))
    finals = []
    for number in range(net.num_layers):
        outputs = []
        for place in range(number * directions, (number + 1) * directions):
            first = place * (len(net.weights) // net.places)
            reverse = place % directions == 1
            output, final = layer(first, x, states[place], own[place], reverse)
            outputs.append(output)
            finals.append(final)
        x = torch.cat(outputs, -1) if net.bidirectional else outputs[0]
        if net.train and net.dropout and number + 1 < net.num_layers:
            x = F.dropout(x.contiguous(), net.dropout)  # it draws in order of memory
    output = x.transpose(0, 1) if net.batch_first else x
    return output, *(torch.stack(each) for each in zip(*finals, strict=True))


def cell(
    mode: str,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Make one step of a net, as `torch.lstm_cell` and its like do."""
    state = tuple(hx) if mode == "lstm" else (hx,)
    _check_state(f"{mode}_cell", state, input.shape[:-1], w_hh)
    at_input, at_state = F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh)
    state = _NEXT[mode](at_input, at_state, *state)
    return state if mode == "lstm" else state[0]


def _check_state(
    function: str, state: Sequence[Tensor], lead: Sequence[int], w_hh: Tensor
) -> None:
    """Check the sizes of a state, which would broadcast without a word."""
    sizes = (w_hh.shape[1], w_hh.shape[0] // 4)[: 2 if "lstm" in function else 1]
    expected = [(*lead, size) for size in sizes]
    got = [tuple(each.shape) for each in state]
    if got != expected:
        raise RuntimeError(
            f"{function}(a state of shapes {got}): expected {expected}, from the input "
            f"and w_hh {tuple(w_hh.shape)}."
        )


def _next_lstm(at_input: Tensor, at_state: Tensor, h: Tensor, c: Tensor) -> State:
    i, f, g, o = (at_input + at_state).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _next_gru(at_input: Tensor, at_state: Tensor, h: Tensor) -> State:
    input_r, input_z, input_n = at_input.chunk(3, -1)
    state_r, state_z, state_n = at_state.chunk(3, -1)
    n = (input_n + (input_r + state_r).sigmoid() * state_n).tanh()
    return (n + (input_z + state_z).sigmoid() * (h - n),)


def _next_tanh(at_input: Tensor, at_state: Tensor, h: Tensor) -> State:
    return ((at_input + at_state).tanh(),)


def _next_relu(at_input: Tensor, at_state: Tensor, h: Tensor) -> State:
    return ((at_input + at_state).relu(),)


_NEXT = {
    "lstm": _next_lstm,
    "gru": _next_gru,
    "rnn_tanh": _next_tanh,
    "rnn_relu": _next_relu,
}
"""The next state of each mode."""


# By torch's kernels.


Report = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""Takes the place of a layer's `w_ih`, `d_ih, d_hh [T, N, G * H]`, `x`, `h_prev`."""


def reporting(net: Net, report: Report, anchor: Tensor) -> tuple[Tensor, ...]:
    """Run a net without projections by torch's kernels, with the results of `steps`.

    The backward pass calls `report(first, d_ih, d_hh, x, h_prev)` once for each layer
    and direction: the place of `w_ih` among the weights, the gradients before the gates
    at inputs and states, the inputs, and the states before every step, all in the order
    of time of `x`. The gradients of the weights are the sums over t of

        w_ih: d_ih[t, n] x x[t, n]        b_ih: d_ih[t, n]
        w_hh: d_hh[t, n] x h_prev[t, n]   b_hh: d_hh[t, n]

    `d_ih` and `d_hh` are one tensor except for a GRU, in the widest dtype of inputs,
    states and weights, float32 at least. `anchor` is a scalar leaf that requires grad,
    which puts the net into the graph where nothing else does.
    """

    def layer(
        first: int, x: Tensor, state: State, own: Sequence[Any], reverse: bool
    ) -> tuple[Tensor, State]:
        padded = state if net.mode == "lstm" else (*state, None)
        tensors = (anchor, x, *padded, *own[:4])
        results = _Layer.apply(net.mode, partial(report, first), reverse, *tensors)
        return results[0], tuple(results[1 : 1 + len(state)])

    return _over_layers(net, layer)


class _Layer(Function):
    """The kernel, or steps, which also return tensors for the backward pass."""

    @staticmethod
    def forward(
        mode: str,
        report: Callable,
        reverse: bool,
        anchor: Tensor,
        x: Tensor,
        h: Tensor,
        c: Tensor | None,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        if c is not None and _by_steps(x, h, c, *weights):
            return _lstm_forwards(reverse, x, h, c, *weights)
        state = [each[None].contiguous() for each in (h, c) if each is not None]
        flat = [each for each in weights if each is not None]
        x = x.flip(0) if reverse else x
        output, *final = kernels.recurrent_layer(mode, x, state, flat)
        output = output.flip(0) if reverse else output
        return output, *(each.squeeze(0) for each in final)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.mode, ctx.report, ctx.reverse, _, *tensors = inputs
        kept = (*output[3:], None, None)[:2]
        ctx.mark_non_differentiable(*(each for each in kept if each is not None))
        ctx.save_for_backward(*kept, output[0], *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        d_output, d_h, d_c = (*grads, None)[:3]
        # Unpacked once, as a checkpoint wants it.
        gates, cells, output, x, h, c, *weights = ctx.saved_tensors
        dtype = torch.float32
        for each in (output, x, h, weights[0]):
            dtype = torch.promote_types(dtype, each.dtype)
        before = _shifted(h, output, ctx.reverse)
        steps = x if gates is not None else x.contiguous()  # as the gates will be
        zero = output.new_zeros(()).expand(output.shape)
        tensors = (
            zero if d_output is None else d_output,
            zero[0] if d_h is None else d_h,
            zero[0] if d_c is None else d_c,
            *(gates, cells, steps, before, output, c, *weights),
        )
        with no_autocast(x.device):
            wide: Any = (None if each is None else each.to(dtype) for each in tensors)
            run = _Run(ctx.reverse, *wide)
            d_ih, d_hh, *d_state = _BACKWARD[ctx.mode](run)
            ctx.report(d_ih, d_hh, steps.detach(), before)  # not the graph
            d_x = _linear(d_ih, run.w_ih.T) if ctx.needs_input_grad[4] else None
        pairs = zip((d_x, *d_state, None), (x, h, c), strict=False)
        to_inputs = (
            None if d is None or each is None else d.to(each.dtype) for d, each in pairs
        )
        return None, None, None, output.new_zeros(()), *to_inputs, *[None] * 4


def _by_steps(*tensors: Tensor | None) -> bool:
    """Return whether an LSTM in steps is as fast as the kernel and has its dtypes.

    On a CPU a step is one GEMM either way, and the kernel keeps its gates to itself.
    """
    kinds = {(each.device.type, each.dtype) for each in tensors if each is not None}
    plain = kinds in ({("cpu", torch.float32)}, {("cpu", torch.float64)})
    return plain and not torch.is_autocast_enabled("cpu")


class _Run(NamedTuple):
    """The tensors of the backward pass of a layer, in one dtype.

    `gates [T, N, 4, H]` and `cells [T, N, H]` are of an LSTM, None if not kept.
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
        """Return the sum of inputs and states in one gate, [T, N, H]."""
        w_ih, w_hh, b_ih, b_hh = self.weights(place)
        sums = F.linear(self.x, w_ih, None if b_ih is None else b_ih + b_hh)
        sums.flatten(0, 1).addmm_(self.before.flatten(0, 1), w_hh.T)
        return sums

    def forwards(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the time steps in the order in which the layer made them."""
        rows = tensor.unbind(0)
        return rows[::-1] if self.reverse else rows

    def backwards(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the time steps in the opposite order."""
        rows = tensor.unbind(0)
        return rows if self.reverse else rows[::-1]

    def arriving(self) -> Sequence[Tensor]:
        """Return the gradients of the states before each step as outputs, backwards."""
        return *self.backwards(self.d_output)[1:], torch.zeros_like(self.d_h)

    def last(self) -> Tensor:
        """Return the gradient at the state after the last step."""
        return self.backwards(self.d_output)[0] + self.d_h


def _lstm_forwards(
    reverse: bool, x: Tensor, h: Tensor, c: Tensor, *weights: Any
) -> tuple[Tensor, ...]:
    """Run one layer, keeping what its backward pass needs.

    `x [T, N, I]` with `h` and `c [N, H]` gives `output [T, N, H]`, `h_n` and `c_n`, the
    gates `[T, N, 4, H]` and the states `c` after each step `[T, N, H]`.
    """
    w_ih, w_hh, b_ih, b_hh = weights
    size = w_hh.shape[1]
    sums = _linear(x, w_ih, None if b_ih is None else b_ih + b_hh)
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


def _lstm(run: _Run) -> tuple[Tensor, ...]:
    """Return gradients at c and h from gates and cells, backwards through time."""
    if run.gates is None:
        i, f, g, o, cells = _again(run)
        d = g.new_empty((*g.shape[:2], 4, g.shape[2]))
    else:
        (i, f, g, o), cells = run.gates.unbind(2), run.cells
        d = torch.empty_like(run.gates)
    squashed = cells.tanh()

    # The gradient of a gate is one of these times the gradient at c, or at h for o.
    _through_sigmoid(g, i, grad_input=d[:, :, 0])
    _through_sigmoid(_shifted(run.c, cells, run.reverse), f, grad_input=d[:, :, 1])
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


def _again(run: _Run) -> tuple[Tensor, ...]:
    """Compute gates and cells of an LSTM from its inputs and outputs."""
    i, f, g, o = (run.gate(place) for place in range(4))
    for gate in (i, f, o):
        gate.sigmoid_()
    g.tanh_()
    cells, state = i * g, run.c
    for cell, forget in zip(run.forwards(cells), run.forwards(f), strict=True):
        state = cell.addcmul_(forget, state)
    return i, f, g, o, cells


def _gru(run: _Run) -> tuple[Tensor, ...]:
    """Compute the gates again; every gradient is linear in the gradient at h."""
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


def _plain(derivative: Callable[[Tensor], Tensor], run: _Run) -> tuple[Tensor, ...]:
    """Start from the derivative of the activation, a function of the output."""
    d = derivative(run.output)
    d_h = run.last()
    steps = zip(run.backwards(d), run.arriving(), strict=True)
    for at_sum, arriving in steps:
        at_sum.mul_(d_h)
        torch.addmm(arriving, at_sum, run.w_hh, out=d_h)
    return d, d, d_h


_BACKWARD: dict[str, Callable[[_Run], tuple[Tensor, ...]]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": partial(_plain, lambda output: 1 - output.square()),
    "rnn_relu": partial(_plain, lambda output: (output > 0).to(output.dtype)),
}
"""Gradients before the gates, at the input's and the state's side, and at the state."""

_through_sigmoid = kernels.sigmoid_backward
_through_tanh = kernels.tanh_backward


def _shifted(first: Tensor, states: Tensor, reverse: bool) -> Tensor:
    """Return the state before each step, from the first one and the later ones."""
    time = _time(states)
    states, first = states.transpose(0, time), first.unsqueeze(time)
    kept = states.narrow(time, 1 if reverse else 0, states.shape[time] - 1)
    before = torch.cat([kept, first] if reverse else [first, kept], time)
    return before.transpose(0, time)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear map to `x [T, N, I]`; the result lies in memory as `x` does.

    Any other order would make torch compute many small products.
    """
    time = _time(x)
    return F.linear(x.transpose(0, time), weight, bias).transpose(0, time)


def _time(x: Tensor) -> int:
    """Return which axis of `[T, N, ...]` is time in the order of memory."""
    return int(x.stride(0) < x.stride(1))


# In recorded passes.


def _recorded(
    mode: str, record: Recording, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Fold the samples into the batch `n`, which is one for a single sequence."""
    net = Net.of(mode, *args, **kwargs)
    drops = net.dropout > 0 and net.train and net.num_layers > 1
    projected = len(net.weights) // net.places % 2 == 1
    own = any(record.is_batched(each) or each.is_complex() for each in net.weights)
    drops &= record.randomness != "different"
    if projected or own or drops or record.twice:
        with record.watching():
            return steps(net)
    weights = [record.plain(weight) for weight in net.weights]
    report = _reported(record, net)
    x, *hidden = (record.copies(tensor) for tensor in (net.x, *net.hidden))
    with record.below(), record.drawing(1):
        time = 2 if net.batch_first else 1
        x = x.movedim(time, 0)  # [T, B, n, I]
        sizes = x.shape[1:3]
        folded = net._replace(
            x=x.flatten(1, 2),
            hidden=tuple(each.transpose(0, 1).flatten(1, 2) for each in hidden),
            weights=weights,
            batch_first=False,
        )
        output, *final = reporting(folded, report, record.anchor(x.new_zeros(())))
        output = output.unflatten(1, sizes).movedim(0, time)
        final = [each.unflatten(1, sizes).transpose(0, 1) for each in final]
        return tuple(record.logical(tensor) for tensor in (output, *final))


def _reported(record: Recording, net: Net) -> Report:
    """Expect the uses of the weights, and return the function that gives factors."""
    uses = [record.use(weight) for weight in net.weights]
    shapes, size = [weight.shape for weight in net.weights], record.size
    has_biases = len(shapes) > 2 * net.places

    def report(first: int, d_ih: Tensor, d_hh: Tensor, x: Tensor, h: Tensor) -> None:
        for inputs, gates, place in ((x, d_ih, first), (h, d_hh, first + 1)):
            if place == first or d_hh is not d_ih:  # only a GRU has two
                outputs = Positions(_of_samples(gates, size))
                sums = outputs.tensor.sum((1, 2)) if has_biases else None
            if (use := uses[place]) is not None:
                a = _of_samples(inputs, size)
                use(Outer(a, outputs.tensor, shapes[place], outputs))
            if sums is not None and (use := uses[place + 2]) is not None:
                use(Dense(sums.clone()))  # each parameter gets its own

    return report


def _of_samples(tensor: Tensor, size: int) -> Tensor:
    """View `[T, B * n, K]` as `[B, 1, n * T, K]`."""
    parts = tensor.unflatten(1, (size, -1)).permute(1, 2, 0, 3)
    return parts.flatten(1, 2)[:, None]


# On packed sequences.


def _pack(
    samples: Samples, input: Tensor, lengths: Tensor, batch_first: bool = False
) -> Form | None:
    """Take the rows of all sequences at one time after another: `-> [R, ...], [T]`."""
    known = samples.agreed(lengths, Tensor.tolist)
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
    samples: Samples,
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


def _packed(
    func: Callable, samples: Samples, data: Tensor, sizes: Any, hx: Any, *rest: Any
) -> Form | None:
    """Run a net for all sequences of one length at once."""
    if not isinstance(rest[0], tuple | list) or modes.is_batched(sizes):
        return None  # here is `has_biases` where nothing is packed
    rows, lengths = _rows(sizes.tolist()), _lengths(sizes.tolist())
    states = (hx,) if isinstance(hx, Tensor) else hx

    def run() -> tuple[Tensor, ...]:
        order: list[int] = []
        found: list[tuple[Tensor, ...]] = []
        for length, same in groupby(enumerate(lengths), key=lambda pair: pair[1]):
            first, *others = [number for number, _ in same]
            stop = first + 1 + len(others)
            own = [row for step in rows[:length] for row in step[first:stop]]
            order += own
            all_of_them = len(own) == len(data)
            x = data if all_of_them else data[torch.tensor(own, device=data.device)]
            x = x.unflatten(0, (length, stop - first))
            state = tuple(each[:, first:stop] for each in states)
            state = state[0] if isinstance(hx, Tensor) else state
            with samples.drawing(None):  # in another order than one sample
                output, *final = func(x, state, *rest, False)
            found.append((output.flatten(0, 1), *final))
        if len(found) == 1:
            return found[0]
        back = torch.tensor(order, device=data.device).argsort()
        output, *final = zip(*found, strict=True)
        return torch.cat(output)[back], *(torch.cat(each, 1) for each in final)

    return run


def _rows(sizes: list[int]) -> list[range]:
    """Return the rows of each time step."""
    starts = [sum(sizes[:step]) for step in range(len(sizes))]
    return [
        range(start, start + size) for start, size in zip(starts, sizes, strict=True)
    ]


def _lengths(sizes: list[int]) -> list[int]:
    """Return the length of each sequence."""
    return [sum(size > number for size in sizes) for number in range(sizes[0])]


def _steps_of(mode: str, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return steps(Net.of(mode, *args, **kwargs))


def _recorded_cell(mode: str, record: Recording, *args: Any, **kwargs: Any) -> Any:
    with record.watching():
        return cell(mode, *args, **kwargs)


for _mode in _NEXT:
    _net, _cell = getattr(torch, _mode), getattr(torch, f"{_mode}_cell")
    register(
        _net,
        recorded=partial(_recorded, _mode),
        mapped=partial(_steps_of, _mode),
        selected=partial(_packed, _net),
    )
    register(
        _cell, recorded=partial(_recorded_cell, _mode), mapped=partial(cell, _mode)
    )
register(kernels.pack_padded_sequence, selected=_pack)
register(kernels.pad_packed_sequence, selected=_pad)
