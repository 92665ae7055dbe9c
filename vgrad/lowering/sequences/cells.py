"""Recurrent nets as linear steps, which every transform of `torch.func` can run.

torch has no batching rules for its recurrent kernels: under `torch.vmap(grad)` an LSTM
loops over the samples, a GRU and the plain nets raise. Here a step is two linear maps
and elementwise ops. It costs more than torch's kernels, but works under `torch.vmap`,
for second derivatives and with weights that differ from sample to sample.

T time steps, N sequences, I inputs, H features of a state, P of a projected one, G
gates (4 of an LSTM, 3 of a GRU, else 1), L layers, D directions
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vgrad import checks

State = tuple[Tensor, ...]
"""The state of one layer in one direction: `(h,)`, of an LSTM `(h, c)`."""

Layer = Callable[[int, Tensor, State, Sequence[Any], bool], tuple[Tensor, State]]
"""From (place of the first weight, x, state, w_ih to w_hr, reverse) to all outputs."""


class Layout(NamedTuple):
    """The options of a net: of how many layers it consists, and how it reads them."""

    num_layers: int
    bidirectional: bool
    dropout: float
    training: bool
    batch_first: bool


def cell(
    mode: str,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Make one step of a net, as `torch.lstm_cell` and its like do.

    `input [N, I]` and `hx [N, H]`, of an LSTM `(h, c)`, with `w_ih [G * H, I]` and
    `w_hh [G * H, H]` give the next state. With `a = input @ w_ih.T + b_ih` and
    `b = h @ w_hh.T + b_hh`, whose parts belong to the gates,

        rnn_tanh   h' = tanh(a + b)
        rnn_relu   h' = relu(a + b)
        gru        h' = n + sigmoid(a_z + b_z) * (h - n)
                   n  = tanh(a_n + sigmoid(a_r + b_r) * b_n)
        lstm       c' = sigmoid(f) * c + sigmoid(i) * tanh(g)
                   h' = sigmoid(o) * tanh(c')    of the parts i, f, g, o of a + b

    Raises:
        RuntimeError: a state of another size than the input and the weights need.

    Example:
        >>> w_ih, w_hh, h = torch.ones(8, 3), torch.ones(8, 2), torch.zeros(5, 2)
        >>> h, c = cell("lstm", torch.ones(5, 3), (h, h), w_ih, w_hh)
        >>> h.shape, c.shape
        (torch.Size([5, 2]), torch.Size([5, 2]))
    """
    state = tuple(hx) if mode == "lstm" else (hx,)
    _check_state(f"{mode}_cell", mode, state, input.shape[:-1], w_hh)
    at_input, at_state = F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh)
    state = _NEXT[mode](at_input, at_state, *state)
    return state if mode == "lstm" else state[0]


lstm_cell = partial(cell, "lstm")
gru_cell = partial(cell, "gru")
rnn_tanh_cell = partial(cell, "rnn_tanh")
rnn_relu_cell = partial(cell, "rnn_relu")


def steps(
    mode: str,
    x: Tensor,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    num_layers: int,
    bidirectional: bool,
    dropout: float,
    training: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Run `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu` step by step.

    `x [T, N, I]` (`[N, T, I]` if `batch_first`) and `hidden = (h0,)` or `(h0, c0)`,
    each `[L * D, N, H]`, give `(output, h_n)` or `(output, h_n, c_n)` with the shapes
    and the values of torch. `weights` is torch's flat list, for each layer and
    direction `w_ih, w_hh, [b_ih, b_hh], [w_hr]`: whether there are biases and, for an
    LSTM, projections `w_hr [P, H]` follows from their number. Dropout between the
    layers draws from torch's global generator, or as the `randomness` of a vmap says.

    Cost: the operations of torch, one GEMM for the inputs of a layer and one per time
    step, and about ten small ops per time step. The dtype follows from the ops.

    Raises:
        ValueError: an unknown mode.
        RuntimeError: torch would refuse: no time step, sizes that do not match.

    Example:
        >>> weights = [torch.ones(8, 3), torch.ones(8, 2)]
        >>> h = torch.zeros(1, 5, 2)
        >>> output, h_n, c_n = steps("lstm", torch.ones(7, 5, 3), (h, h), weights,
        ...     num_layers=1, bidirectional=False, dropout=0.0, training=True,
        ...     batch_first=False)
        >>> output.shape, h_n.shape
        (torch.Size([7, 5, 2]), torch.Size([1, 5, 2]))
    """

    def layer(
        first: int, x: Tensor, state: State, own: Sequence[Any], reverse: bool
    ) -> tuple[Tensor, State]:
        w_ih, w_hh, b_ih, b_hh, w_hr = own
        inner = F.linear(x, w_ih, b_ih).unbind(0)
        outputs = []
        for at_input in reversed(inner) if reverse else inner:
            state = _NEXT[mode](at_input, F.linear(state[0], w_hh, b_hh), *state)
            if w_hr is not None:
                state = (F.linear(state[0], w_hr), *state[1:])
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if reverse else outputs), state

    layout = Layout(num_layers, bidirectional, dropout, training, batch_first)
    return over_layers("steps", layer, mode, x, hidden, weights, layout)


def over_layers(
    function: str,
    layer: Layer,
    mode: str,
    x: Tensor,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    layout: Layout,
) -> tuple[Tensor, ...]:
    """Run `layer` for each layer and direction, in torch's order, dropout between.

    `layer` gets the place of its first weight in the list, `x [T, N, I]`, its state,
    its five weights, None for those that it lacks, and whether to go from the last time
    step to the first. The rest is as in `steps`; errors name `function`.
    """
    checks.choice(function, _NEXT, mode=mode)
    num_layers, bidirectional, dropout, training, batch_first = layout
    directions = 2 if bidirectional else 1
    places = num_layers * directions
    own = _split(function, mode, weights, places)
    steps_first = x.transpose(0, 1) if batch_first else x
    if x.dim() != 3 or len(steps_first) == 0:
        raise RuntimeError(
            f"{function}(x {tuple(x.shape)}): expected [T, N, I] with one time step at "
            f"least, or [N, T, I] with batch_first."
        )
    lead = (places, steps_first.shape[1])
    _check_state(function, mode, hidden, lead, own[0][1])
    states = list(zip(*(each.unbind(0) for each in hidden), strict=True))
    x, finals = steps_first, []
    for number in range(num_layers):
        outputs = []
        for place in range(number * directions, (number + 1) * directions):
            first = place * (len(weights) // places)
            reverse = place % directions == 1
            output, final = layer(first, x, states[place], own[place], reverse)
            outputs.append(output)
            finals.append(final)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if training and dropout and number + 1 < num_layers:
            x = F.dropout(x.contiguous(), dropout)  # which draws in order of memory
    output = x.transpose(0, 1) if batch_first else x
    return output, *(torch.stack(each) for each in zip(*finals, strict=True))


def _lstm(at_input: Tensor, at_state: Tensor, h: Tensor, c: Tensor) -> State:
    i, f, g, o = (at_input + at_state).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(at_input: Tensor, at_state: Tensor, h: Tensor) -> State:
    input_r, input_z, input_n = at_input.chunk(3, -1)
    state_r, state_z, state_n = at_state.chunk(3, -1)
    n = (input_n + (input_r + state_r).sigmoid() * state_n).tanh()
    return (n + (input_z + state_z).sigmoid() * (h - n),)


def _rnn_tanh(at_input: Tensor, at_state: Tensor, h: Tensor) -> State:
    return ((at_input + at_state).tanh(),)


def _rnn_relu(at_input: Tensor, at_state: Tensor, h: Tensor) -> State:
    return ((at_input + at_state).relu(),)


_NEXT = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn_tanh, "rnn_relu": _rnn_relu}
"""The next state of each mode."""


def _split(
    function: str, mode: str, weights: Sequence[Tensor], places: int
) -> list[tuple[Any, ...]]:
    """Return w_ih, w_hh, b_ih, b_hh and w_hr of each layer and direction."""
    each, rest = divmod(len(weights), places)
    allowed = (2, 3, 4, 5) if mode == "lstm" else (2, 4)
    if rest or each not in allowed:
        raise RuntimeError(
            f"{function}({len(weights)} weights): expected {places} times w_ih, w_hh, "
            f"then b_ih and b_hh or neither, then w_hr in an LSTM with projections."
        )
    groups = [weights[first : first + each] for first in range(0, len(weights), each)]
    return [
        (
            *own[:2],
            *(own[2:4] if each > 3 else (None, None)),
            own[-1] if each % 2 else None,
        )
        for own in groups
    ]


def _check_state(
    function: str,
    mode: str,
    state: Sequence[Tensor],
    lead: Sequence[int],
    w_hh: Tensor,
) -> None:
    """Check the sizes of a state, which would broadcast without a word."""
    sizes = (w_hh.shape[1], w_hh.shape[0] // 4)[: 2 if mode == "lstm" else 1]
    expected = [(*lead, size) for size in sizes]
    got = [tuple(each.shape) for each in state]
    if got != expected:
        raise RuntimeError(
            f"{function}(a state of shapes {got}): expected {expected}, from the input "
            f"and w_hh {tuple(w_hh.shape)}."
        )
