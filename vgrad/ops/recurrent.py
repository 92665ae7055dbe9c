"""Recurrent nets: in steps, by torch's kernels, and on packed sequences.

torch has no batching rules for its recurrent kernels: under `torch.vmap(grad)` an LSTM
loops over the samples, a GRU and the plain nets raise. In `steps` a time step is two
linear maps and elementwise ops, which every transform can run.

In recorded passes the gradient of a sample's weights is a sum over time steps of outer
products: the gradients before the gates times the inputs and states. Torch's kernels
add them up over all samples; here the backward pass reports both sides instead. It goes
through time with one GEMM and a few elementwise ops a step, for both directions of a
layer at once. On a CPU, LSTMs and GRUs run forward in such steps too, which keep their
gates. Anywhere else torch's kernels do, and all gates are computed again by one product
of the inputs and one of the states.

`pack_padded_sequence` orders rows by lengths, which samples must share to run together.
With known ones, packing and padding take rows by index, and a net runs once for all
sequences of one length.

T time steps, N sequences, I inputs, H features of a state, P of a projected one, G
gates (4 of an LSTM, 3 of a GRU, else 1), L layers, D directions, R rows of a packed
sequence, B samples
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from vgrad.conditions import literal, static_values
from vgrad.factors.base import Dense, Outer, Positions
from vgrad.ops.record import Form, Kind, Recording, Samples, register
from vgrad.torch_private import kernels, modes
from vgrad.tree import map_tensors, no_autocast

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
        count, rest = divmod(len(self.weights), self.places)
        if rest or count not in ((2, 3, 4, 5) if self.mode == "lstm" else (2, 4)):
            raise RuntimeError(
                f"{self.mode}({len(self.weights)} weights): expected {self.places} "
                f"times w_ih, w_hh, then b_ih and b_hh or neither, then w_hr in an "
                f"LSTM with projections."
            )
        starts = range(0, len(self.weights), count)
        groups = [self.weights[first : first + count] for first in starts]
        return [
            (
                *group[:2],
                *(group[2:4] if count > 3 else (None, None)),
                group[-1] if count % 2 else None,
            )
            for group in groups
        ]


Layer = Callable[[int, Tensor, State, Sequence[Any]], tuple[Tensor, ...]]
"""From (place of the first weight, x, states `[D, N, H]`, w_ih to w_hr of each
direction) to all outputs `[T, N, D * H]` and the last states."""


def steps(net: Net) -> tuple[Tensor, ...]:
    """Run a net step by step: `(output, h_n)` or `(output, h_n, c_n)`, as torch.

    Cost: one GEMM for the inputs of a layer, and one and about ten small ops per step.
    """

    def layer(
        first: int, x: Tensor, states: State, directions: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        results = []
        for number, (w_ih, w_hh, b_ih, b_hh, w_hr) in enumerate(directions):
            state, order = tuple(tensor[number] for tensor in states), 1 - 2 * number
            outputs = []
            for at_input in F.linear(x, w_ih, b_ih).unbind(0)[::order]:
                at_state = F.linear(state[0], w_hh, b_hh)
                state = _NEXT[net.mode](at_input, at_state, *state)
                if w_hr is not None:
                    state = (F.linear(state[0], w_hr), *state[1:])
                outputs.append(state[0])
            results.append((torch.stack(outputs[::order]), *state))
        output, *final = zip(*results, strict=True)
        return torch.cat(output, -1), *map(torch.stack, final)

    return _over_layers(net, layer)


def _over_layers(net: Net, layer: Layer) -> tuple[Tensor, ...]:
    """Run `layer` for each layer, dropout between."""
    weights = net.split()
    directions = 2 if net.bidirectional else 1
    x = net.x.transpose(0, 1) if net.batch_first else net.x
    if x.dim() != 3 or len(x) == 0:
        raise RuntimeError(
            f"{net.mode}(x {tuple(net.x.shape)}): expected [T, N, I] with one time "
            f"step at least, or [N, T, I] with batch_first."
        )
    _check_state(net.mode, net.hidden, (net.places, x.shape[1]), weights[0][1])
    finals = []
    for number in range(net.num_layers):
        places = slice(number * directions, (number + 1) * directions)
        first = places.start * (len(net.weights) // net.places)
        states = tuple(tensor[places] for tensor in net.hidden)
        x, *final = layer(first, x, states, weights[places])
        finals.append(final)
        if net.train and net.dropout and number + 1 < net.num_layers:
            x = F.dropout(x.contiguous(), net.dropout)  # it draws in order of memory
    output = x.transpose(0, 1) if net.batch_first else x
    return output, *(torch.cat(parts) for parts in zip(*finals, strict=True))


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
    got = [tuple(tensor.shape) for tensor in state]
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


_NEXT = {
    "lstm": _next_lstm,
    "gru": _next_gru,
    "rnn_tanh": lambda at_input, at_state, h: ((at_input + at_state).tanh(),),
    "rnn_relu": lambda at_input, at_state, h: ((at_input + at_state).relu(),),
}
"""The next state of each mode."""


# By torch's kernels, or in steps that keep their gates.


Report = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""Takes the place of a layer's `w_ih`, `d_ih, d_hh [T, N, G * H]`, `x`, `h_prev`."""


def run_recorded(net: Net, report: Report, anchor: Tensor) -> tuple[Tensor, ...]:
    """Run a net without projections by torch's kernels, with the results of `steps`.

    The backward pass calls `report(first, d_ih, d_hh, x, h_prev)` once for each layer
    and direction: the place of `w_ih` among the weights, the gradients before the gates
    at inputs and states, the inputs, and the states before every step, all in the order
    of the steps. The gradients of the weights are the sums over t of

        w_ih: d_ih[t, n] x x[t, n]        b_ih: d_ih[t, n]
        w_hh: d_hh[t, n] x h_prev[t, n]   b_hh: d_hh[t, n]

    `d_ih` and `d_hh` are one tensor except for a GRU, in the widest dtype of inputs,
    states and weights, float32 at least. `anchor` is a scalar leaf that requires grad,
    which puts the net into the graph where nothing else does.
    """

    def layer(
        first: int, x: Tensor, states: State, directions: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        padded, count = (*states, None)[:2], len(net.weights) // net.places
        if len(directions) == 1:
            padded = (None if tensor is None else tensor[0] for tensor in padded)
            tensors = (anchor, x, *padded, *directions[0][:4])
            output, *rest = _Layer.apply(net.mode, partial(report, first), *tensors)
            return output, *(state[None] for state in rest[: len(states)])

        def both(d_ih: Tensor, d_hh: Tensor, x: Tensor, before: Tensor) -> None:
            for number in range(2):
                d = d_ih[:, number]
                d_state = d if d_hh is d_ih else d_hh[:, number]
                place = first + number * count
                report(place, d, d_state, x[:, number], before[:, number])

        weights = (
            None if pair[0] is None else torch.stack(pair)
            for pair in list(zip(*directions, strict=True))[:4]
        )
        x = torch.stack([x, x.flip(0)]).transpose(0, 1)
        output, *rest = _Layer.apply(net.mode, both, anchor, x, *padded, *weights)
        ahead, back = output.unbind(1)
        return torch.cat([ahead, back.flip(0)], -1), *rest[: len(states)]

    return _over_layers(net, layer)


class _Layer(Function):
    """A layer in one direction, `x [T, N, I]`, or in both at once, `[T, 2, N, I]`.

    Time is in the order of the steps. Results of steps for the backward pass come last.
    """

    @staticmethod
    def forward(
        mode: str, report: Callable, anchor: Tensor, x: Tensor, *tensors: Any
    ) -> tuple[Tensor, ...]:
        if mode in _STEPS and _by_steps(x, *tensors):
            return _STEPS[mode](x, *tensors)
        if tensors[0].dim() == 3:  # the kernel for one direction after the other
            pairs = ((None, None) if pair is None else pair for pair in tensors)
            sides = zip(x.unbind(1), *pairs, strict=True)
            results = (_Layer.forward(mode, report, anchor, *side) for side in sides)
            output, *final = zip(*results, strict=True)
            return torch.stack(output, 1), *map(torch.stack, final)
        state = [part[None].contiguous() for part in tensors[:2] if part is not None]
        weights = [weight for weight in tensors[2:] if weight is not None]
        output, *final = kernels.recurrent_layer(mode, x, state, weights)
        return output, *(part.squeeze(0) for part in final)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.mode, ctx.report, _, *tensors = inputs
        saved = output[2 if tensors[2] is None else 3 :]
        ctx.mark_non_differentiable(*saved)
        ctx.save_for_backward(output[0], *tensors, *saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        d_output, d_h, d_c = (*grads, None)[:3]
        # Unpacked once, as a checkpoint wants it.
        output, x, h, c, *tensors = ctx.saved_tensors
        dtype = torch.float32
        for tensor in (output, x, h, tensors[0]):
            dtype = torch.promote_types(dtype, tensor.dtype)
        before = _shifted(h, output)
        x = x if tensors[4:] else x.contiguous()  # as outputs of kernels are
        zero = output.new_zeros(()).expand(output.shape)
        tensors = (
            zero if d_output is None else d_output,
            zero[0] if d_h is None else d_h,
            zero[0] if d_c is None else d_c,
            *(x, before, output, c, *tensors),
        )
        with no_autocast(x.device):
            wide: Any = [None if part is None else part.to(dtype) for part in tensors]
            run = _Run(*wide[:11], saved=wide[11:])
            d_ih, d_hh, *d_state = _with_columns(_BACKWARD[ctx.mode], run)
            ctx.report(d_ih, d_hh, x.detach(), before)  # not the graph
            d_x = _affine(d_ih, run.w_ih.mT) if ctx.needs_input_grad[3] else None
        pairs = zip((d_x, *d_state, None), (x, h, c), strict=False)
        to_inputs = (
            None if d is None or like is None else d.to(like.dtype) for d, like in pairs
        )
        return None, None, output.new_zeros(()), *to_inputs, *[None] * 4


def _with_columns(
    back: Callable[["_Run"], tuple[Tensor, ...]], run: "_Run"
) -> tuple[Tensor, ...]:
    """Run a backward pass; under a vmap with its columns joined to the N samples."""
    # Steps write in place, which a vmap refuses for tensors that it does not map over.
    mapped = [tensor for tensor in run[:3] if modes.is_batched(tensor)]
    if not mapped:
        return back(run)
    level = modes.level_of(mapped[0])
    count = modes.unwrapped(mapped[0]).shape[modes.batch_axis(mapped[0])]

    def joined(tensor: Tensor) -> Tensor:  # [..., N, H] -> [..., N * K, H]
        columns = modes.in_front(tensor, level)
        columns = tensor.expand(count, *tensor.shape) if columns is None else columns
        return columns.movedim(0, -2).flatten(-3, -2)

    def apart(tensor: Tensor) -> Tensor:
        columns = tensor.unflatten(-2, (-1, count)).movedim(-2, 0)
        return modes.add_batch_axis(columns, 0, level)

    with modes.without_innermost():
        tensors: Any = map_tensors(joined, (*run[:7], run.saved))
        every: Any = *tensors[:7], *run[7:11], tensors[7]
        grads = back(_Run(*every))
        parts = {id(grad): apart(grad) for grad in grads}  # two may be one, and stay so
    return tuple(parts[id(grad)] for grad in grads)


def _by_steps(*tensors: Tensor | None) -> bool:
    """Return whether a net in steps is as fast as the kernel and has its dtypes.

    On a CPU a step is one GEMM either way, and the kernel keeps its gates to itself.
    """
    kinds = {(part.device.type, part.dtype) for part in tensors if part is not None}
    plain = kinds in ({("cpu", torch.float32)}, {("cpu", torch.float64)})
    return plain and not torch.is_autocast_enabled("cpu")


class _Run(NamedTuple):
    """The tensors of the backward pass of a layer, in one dtype."""

    d_output: Tensor
    d_h: Tensor
    d_c: Tensor
    x: Tensor
    before: Tensor
    output: Tensor
    c: Any
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Any
    b_hh: Any
    saved: Sequence[Tensor]  # of steps: all results after the states

    def backwards(self, *tensors: Tensor) -> Iterator[Sequence[Tensor]]:
        """Return time steps from the last, behind each what the one before it gets."""
        arriving = *self.d_output.unbind(0)[-2::-1], torch.zeros_like(self.d_h)
        return zip(*(part.unbind(0)[::-1] for part in tensors), arriving, strict=True)

    def last(self) -> Tensor:
        """Return the gradient at the state after the last step."""
        return self.d_output[-1] + self.d_h


def _lstm_steps(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any
) -> tuple[Tensor, ...]:
    """Return `output`, `h_n` and `c_n`, and what `_lstm` needs.

    The gates `[T, ..., N, 4 * H]`; cells after each step, and their tanh, as `output`.
    """
    gates = _affine(x, w_ih, None if b_ih is None else b_ih + b_hh)
    i, f, g, o = gates.chunk(4, -1)
    cells, squashed, output = (torch.empty_like(i) for _ in range(3))
    every = (gates, gates[..., : 2 * h.shape[-1]], o, i, f, g, cells, squashed, output)
    product, recurrent = _product(h), w_hh.mT.contiguous()
    for sums, i_f, o, i, f, g, cell, at_tanh, state in _steps_of_all(*every):
        product(sums, h, recurrent, out=sums)
        i_f.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        c = torch.mul(f, c, out=cell).addcmul_(i, g)
        h = torch.mul(torch.tanh(c, out=at_tanh), o, out=state)
    return output, h.clone(), c.clone(), gates, cells, squashed


def _lstm_again(run: _Run) -> tuple[Tensor, ...]:
    """Compute the gates, the cells and their tanh from inputs and outputs."""
    gates = _affine(run.x, run.w_ih, None if run.b_ih is None else run.b_ih + run.b_hh)
    gates += _affine(run.before, run.w_hh)
    i, f, g, o = gates.chunk(4, -1)
    for gate in (i, f, o):
        gate.sigmoid_()
    g.tanh_()
    cells, state = i * g, run.c
    for cell, forget in _steps_of_all(cells, f):
        state = cell.addcmul_(forget, state)
    return gates, cells, cells.tanh()


def _lstm(run: _Run) -> tuple[Tensor, ...]:
    """Return gradients at c and h from gates and cells, backwards through time."""
    gates, cells, squashed = run.saved or _lstm_again(run)
    i, f, g, o = gates.chunk(4, -1)
    d_gates = torch.empty_like(gates)
    d = d_gates.unflatten(-1, (4, -1))

    # The gradient of a gate is one of these times the gradient at c, or at h for o.
    _through_sigmoid(g, i, grad_input=d[..., 0, :])
    _through_sigmoid(run.c, f[0], grad_input=d[0, ..., 1, :])
    _through_sigmoid(cells[:-1], f[1:], grad_input=d[1:, ..., 1, :])
    _through_tanh(i, g, grad_input=d[..., 2, :])
    _through_sigmoid(squashed, o, grad_input=d[..., 3, :])
    outwards = _through_tanh(o, squashed)

    d_h, d_c = run.last(), run.d_c.clone()
    d_c_each, product = d_c.unsqueeze(-2), _product(d_h)
    rows = (d_gates, d[..., :3, :], d[..., 3, :], outwards, f)
    for at_gates, at_ifg, at_o, outward, forget, arriving in run.backwards(*rows):
        d_c.addcmul_(d_h, outward)
        at_ifg.mul_(d_c_each)
        at_o.mul_(d_h)
        d_c.mul_(forget)
        product(arriving, at_gates, run.w_hh, out=d_h)
    return d_gates, d_gates, d_h, d_c


def _gru_steps(
    x: Tensor, h: Tensor, c: None, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any
) -> tuple[Tensor, ...]:
    """Return `output` and `h_n`, and what `_gru` needs.

    The gates `[T, ..., N, 3 * H]`; the sums of states in the last one, as `output`.
    """
    gates, size = _affine(x, w_ih, b_ih), h.shape[-1]
    r, z, n = gates.chunk(3, -1)
    inner, output = torch.empty_like(r), torch.empty_like(r)
    bias = h.new_zeros(()) if b_hh is None else b_hh.unsqueeze(-2)
    sums = torch.empty_like(gates[0])
    sums_r_z, sums_n = sums.split((2 * size, size), -1)
    every = (gates[..., : 2 * size], r, z, n, inner, output)
    product, recurrent = _product(h), w_hh.mT.contiguous()
    for r_z, r, z, n, at_n, state in _steps_of_all(*every):
        product(bias, h, recurrent, out=sums)
        r_z.add_(sums_r_z).sigmoid_()
        n.addcmul_(r, at_n.copy_(sums_n)).tanh_()
        h = torch.sub(h, n, out=state).mul_(z).add_(n)
    return output, h.clone(), gates, inner


def _gru_again(run: _Run) -> tuple[Tensor, ...]:
    gates = _affine(run.x, run.w_ih, run.b_ih)
    r, z, n = gates.chunk(3, -1)
    of_r, of_z, inner = _affine(run.before, run.w_hh, run.b_hh).chunk(3, -1)
    r.add_(of_r).sigmoid_()
    z.add_(of_z).sigmoid_()
    n.addcmul_(r, inner).tanh_()
    return gates, inner


def _gru(run: _Run) -> tuple[Tensor, ...]:
    """Go back from the gates; every gradient is linear in the gradient at h."""
    gates, inner = run.saved or _gru_again(run)
    r, z, n = gates.chunk(3, -1)
    d_n = _through_tanh(1 - z, n)
    d_hh, d_ih = torch.empty_like(gates), torch.empty_like(gates)
    parts = d_hh.unflatten(-1, (3, -1))
    _through_sigmoid(d_n * inner, r, grad_input=parts[..., 0, :])
    _through_sigmoid(run.before - n, z, grad_input=parts[..., 1, :])
    torch.mul(d_n, r, out=parts[..., 2, :])

    d_h, r_z = run.last(), slice(0, 2 * r.shape[-1])
    d_h_each, product = d_h.unsqueeze(-2), _product(d_h)
    rows = (d_n, d_ih[..., r_z.stop :], parts, d_hh, z)
    for at_n, to_n, at_gates, flat, stays, arriving in run.backwards(*rows):
        torch.mul(at_n, d_h, out=to_n)
        at_gates.mul_(d_h_each)
        torch.addcmul(arriving, d_h, stays, out=d_h)
        product(d_h, flat, run.w_hh, out=d_h)
    d_ih[..., r_z] = d_hh[..., r_z]
    return d_ih, d_hh, d_h


def _plain(derivative: Callable[[Tensor], Tensor], run: _Run) -> tuple[Tensor, ...]:
    """Start from the derivative of the activation, a function of the output."""
    d, d_h = derivative(run.output), run.last()
    product = _product(d_h)
    for at_sum, arriving in run.backwards(d):
        at_sum.mul_(d_h)
        product(arriving, at_sum, run.w_hh, out=d_h)
    return d, d, d_h


_STEPS = {"lstm": _lstm_steps, "gru": _gru_steps}
"""Forward passes that keep their gates."""

_BACKWARD: dict[str, Callable[[_Run], tuple[Tensor, ...]]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": partial(_plain, lambda output: 1 - output.square()),
    "rnn_relu": partial(_plain, lambda output: (output > 0).to(output.dtype)),
}
"""Gradients before the gates, at the input's and the state's side, and at the state."""

_through_sigmoid = kernels.sigmoid_backward
_through_tanh = kernels.tanh_backward


def _steps_of_all(*tensors: Tensor) -> Iterator[Sequence[Tensor]]:
    return zip(*(tensor.unbind(0) for tensor in tensors), strict=True)


def _product(state: Tensor) -> Callable[..., Tensor]:
    """Return the function that adds a product to a tensor, in one direction or both."""
    return torch.addmm if state.dim() == 2 else torch.baddbmm


def _shifted(first: Tensor, states: Tensor) -> Tensor:
    """Return the state before each step, in memory as the later ones."""
    before = torch.empty_like(states)
    before[0], before[1:] = first, states[:-1]
    return before


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear map to `x [T, ..., N, I]`; the result lies in memory as `x` does.

    Any other order would make torch compute many small products.
    """
    if weight.dim() == 2:
        time = int(x.stride(0) < x.stride(1))  # the axis of time in order of memory
        return F.linear(x.transpose(0, time), weight, bias).transpose(0, time)
    rows = x.transpose(0, 1).flatten(1, 2)
    sums = rows @ weight.mT
    if bias is not None:
        sums += bias.unsqueeze(1)
    return sums.unflatten(1, x.shape[::2][:2]).transpose(0, 1)


# In recorded passes.


def _recorded(
    mode: str, record: Recording, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Fold the samples into the batch `n`, which is one for a single sequence."""
    net = Net.of(mode, *args, **kwargs)
    drops = net.dropout > 0 and net.train and net.num_layers > 1
    projected = len(net.weights) // net.places % 2 == 1
    unsupported = any(record.is_batched(w) or w.is_complex() for w in net.weights)
    drops &= record.randomness != "different"
    if projected or unsupported or drops or record.twice:
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
            hidden=tuple(state.transpose(0, 1).flatten(1, 2) for state in hidden),
            weights=weights,
            batch_first=False,
        )
        output, *final = run_recorded(folded, report, record.anchor(x.new_zeros(())))
        output = output.unflatten(1, sizes).movedim(0, time)
        final = [state.unflatten(1, sizes).transpose(0, 1) for state in final]
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
    values = samples.agreed(lengths, Tensor.tolist)
    if max(values, default=0) > input.shape[1 if batch_first else 0]:
        return None  # torch refuses these in the backward pass
    with samples.outside(), static_values():
        counts = torch.tensor(values, dtype=torch.int64)
        places = torch.arange(input.shape[0] * input.shape[1]).view(input.shape[:2])
        packed = kernels.pack_padded_sequence(places, counts, batch_first)
    index, sizes = map(literal, packed)
    return lambda: (input.flatten(0, 1)[index.to(input.device)], sizes)


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
    index, lengths = _places(samples, data, batch_sizes, batch_first, total_length)

    def pad() -> tuple[Tensor, Tensor]:
        padding = torch.full(
            (1, *data.shape[1:]), padding_value, dtype=data.dtype, device=data.device
        )
        return torch.cat([data, padding])[index.to(data.device)], lengths

    return pad


def _places(
    samples: Samples, data: Tensor, sizes: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """Return the row of each time step and sequence, one more for padding; lengths."""
    batch_first, total_length = options or (False, 0)
    values = samples.agreed(sizes, Tensor.tolist)
    with samples.outside(), static_values():
        rows, counts = torch.arange(len(data)), torch.tensor(values, dtype=torch.int64)
        index, lengths = kernels.pad_packed_sequence(
            rows, counts, batch_first, len(data), total_length
        )
    return literal(index), literal(lengths)


def _packed(
    func: Callable, samples: Samples, data: Tensor, sizes: Any, hx: Any, *rest: Any
) -> Form | None:
    """Run a net for all sequences of one length at once."""
    if not isinstance(rest[0], tuple | list) or modes.is_batched(sizes):
        return None  # here is `has_biases` where nothing is packed
    places, ends = _places(samples, data, sizes)
    with static_values():
        lengths = ends.tolist()
    states = (hx,) if isinstance(hx, Tensor) else hx

    def run() -> tuple[Tensor, ...]:
        order: list[Tensor] = []
        results: list[tuple[Tensor, ...]] = []
        first = 0
        for length, same in groupby(lengths):
            stop = first + len([*same])
            rows = places[:length, first:stop]
            order.append(rows.flatten())
            x = data if rows.numel() == len(data) else data[order[-1].to(data.device)]
            state = tuple(tensor[:, first:stop] for tensor in states)
            state = state[0] if isinstance(hx, Tensor) else state
            with samples.drawing(None):  # in another order than one sample
                output, *final = func(x.unflatten(0, rows.shape), state, *rest, False)
            results.append((output.flatten(0, 1), *final))
            first = stop
        if len(results) == 1:
            return results[0]
        back = torch.cat(order).argsort().to(data.device)
        output, *final = zip(*results, strict=True)
        return torch.cat(output)[back], *(torch.cat(parts, 1) for parts in final)

    return run


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
    register(_net, _cell, autocast=(Kind.STEPS, Kind.LOW))
register(kernels.pack_padded_sequence, selected=_pack)
register(kernels.pad_packed_sequence, selected=_pad)
