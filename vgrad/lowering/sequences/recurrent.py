"""Recurrent nets by torch's kernels, with a backward pass that tells what it finds.

The gradient of a sample's weights is a sum over time steps of outer products: the
gradients before the gates times what entered there. The kernels add that up over all
samples; here the backward pass hands on both sides instead. It keeps nothing but inputs
and outputs, computes all gates again at once, and then goes through time with one GEMM
and a few elementwise ops a step; everything else is done for all steps at once.

T time steps, N sequences, I inputs, H features of a state, G gates (4 of an LSTM, 3 of
a GRU, else 1), L layers, D directions
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from vgrad import checks
from vgrad.lowering.sequences.cells import Layout, State, over_layers
from vgrad.lowering.sequences.through_time import (
    BACKWARD,
    Run,
    linear,
    lstm_forwards,
    shifted,
)
from vgrad.tree import no_autocast

Report = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Takes `d_ih, d_hh [T, N, G * H]`, `x [T, N, I]` and `h_prev [T, N, H]`."""


def recurrent_net(
    mode: str,
    x: Tensor,
    hidden: Sequence[Tensor],
    weights: Sequence[Tensor],
    report: Callable[[int, Tensor, Tensor, Tensor, Tensor], None],
    *,
    anchor: Tensor,
    num_layers: int,
    bidirectional: bool,
    dropout: float,
    training: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Run `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu`, reporting.

    Takes and returns what `cells.steps` does, in the dtypes of torch. The backward pass
    calls `report(first, d_ih, d_hh, x, h_prev)` for each layer and direction: `first`
    is the place of its `w_ih` in the list, the rest is as in `recurrent_layer`. Dropout
    between the layers draws from torch's global generator, as torch does.

    Raises:
        ValueError: an unknown mode, an anchor or weights with the wrong
            `requires_grad`.
        NotImplementedError: projections, and a second derivative.
        RuntimeError: torch would refuse: no time step, sizes that do not match.

    Example:
        >>> weights = [torch.ones(2, 3), torch.ones(2, 2)]
        >>> anchor = torch.zeros((), requires_grad=True)
        >>> output, h_n = recurrent_net("rnn_tanh", torch.ones(7, 5, 3),
        ...     (torch.zeros(1, 5, 2),), weights,
        ...     lambda first, *found: print(first, [tuple(x.shape) for x in found]),
        ...     anchor=anchor, num_layers=1, bidirectional=False, dropout=0.0,
        ...     training=True, batch_first=False)
        >>> output.sum().backward()
        0 [(7, 5, 2), (7, 5, 2), (7, 5, 3), (7, 5, 2)]
    """

    def layer(
        first: int, x: Tensor, state: State, own: Sequence[Any], reverse: bool
    ) -> tuple[Tensor, State]:
        *own, w_hr = own
        if w_hr is not None:
            raise NotImplementedError(
                "recurrent_net(w_hr): expected an LSTM without projections, got one "
                "with them. Use steps."
            )
        options = {"anchor": anchor, "reverse": reverse}
        return recurrent_layer(mode, x, state, own, partial(report, first), **options)

    layout = Layout(num_layers, bidirectional, dropout, training, batch_first)
    return over_layers("recurrent_net", layer, mode, x, hidden, weights, layout)


def recurrent_layer(
    mode: str,
    x: Tensor,
    hidden: State,
    weights: Sequence[Any],
    report: Report,
    *,
    anchor: Tensor,
    reverse: bool = False,
) -> tuple[Tensor, State]:
    """Run one layer in one direction, reporting both sides of the weights' gradients.

    `x [T, N, I]` and `hidden = (h0,)` or `(h0, c0)`, each `[N, H]`, with `weights =
    (w_ih [G * H, I], w_hh [G * H, H], b_ih, b_hh)`, detached, the biases possibly None,
    give `output [T, N, H]` and `(h_n,)` or `(h_n, c_n)`.

    The backward pass calls `report(d_ih, d_hh, x, h_prev)` once, without autograd and
    autocast: the gradients at what the gates add up from inputs and states, each
    `[T, N, G * H]`, the inputs and the states that every step began with, all in the
    order of time of `x`. With sums over t and n, or over t alone for each sample,

        w_ih: d_ih[t, n] x x[t, n]        b_ih: d_ih[t, n]
        w_hh: d_hh[t, n] x h_prev[t, n]   b_hh: d_hh[t, n]

    are the gradients of the weights. `d_ih` and `d_hh` are one tensor except for a GRU;
    they may be kept and must not be changed in place. `anchor` is a scalar leaf on the
    device of `x` that puts the layer into the graph where nothing else requires grad;
    its own gradient is zero.

    Cost: the forward pass of torch, under the surrounding autocast; backwards two
    thirds of the operations of torch's backward pass for the gradients of inputs and
    states, the rest for the gates, and for that time memory for about `2 G` numbers per
    output. The backward pass runs in the widest dtype of inputs, states and weights,
    float32 at least; gradients other than `d_ih` and `d_hh` are cast back.

    Raises:
        ValueError: an unknown mode, an anchor that does not require grad, or weights
            that do.
        NotImplementedError: a second derivative.

    Example:
        >>> weights, found = (torch.ones(2, 3), torch.ones(2, 2), None, None), []
        >>> output, (h_n,) = recurrent_layer("rnn_tanh", torch.ones(7, 5, 3),
        ...     (torch.zeros(5, 2),), weights, lambda *each: found.extend(each),
        ...     anchor=torch.zeros((), requires_grad=True))
        >>> h_n.sum().backward()
        >>> d_ih, d_hh, x, h_prev = found
        >>> torch.einsum("tno,tni->noi", d_ih, x).shape  # one gradient per sample
        torch.Size([5, 2, 3])
    """
    checks.choice("recurrent_layer", BACKWARD, mode=mode)
    if not anchor.requires_grad:
        raise ValueError(
            "recurrent_layer(anchor): expected a scalar that requires grad, got one "
            "that does not. Nothing would be reported."
        )
    if any(each is not None and each.requires_grad for each in weights):
        raise ValueError(
            "recurrent_layer(weights): expected weights without gradients of their "
            "own, got some that require grad. Detach them: the report has their "
            "gradients."
        )
    padded = hidden if mode == "lstm" else (*hidden, None)
    found = _Layer.apply(mode, report, reverse, anchor, x, *padded, *weights)
    return found[0], tuple(found[1 : 1 + len(hidden)])


class _Layer(Function):
    """The kernel, or steps, which also return what the backward pass needs."""

    @staticmethod
    def forward(
        mode: str,
        report: Report,
        reverse: bool,
        anchor: Tensor,
        x: Tensor,
        h: Tensor,
        c: Tensor | None,
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        if c is not None and _by_steps(x, h, c, *weights):
            return lstm_forwards(reverse, x, h, c, *weights)
        hidden = h.unsqueeze(0) if c is None else (h.unsqueeze(0), c.unsqueeze(0))
        flat = [each for each in weights if each is not None]
        options = (len(flat) == 4, 1, 0.0, False, False, False)
        kernel = getattr(torch, mode)
        output, *final = kernel(x.flip(0) if reverse else x, hidden, flat, *options)
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
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        options = (ctx.mode, ctx.report, ctx.reverse, ctx.needs_input_grad[4])
        d_output, d_h, d_c = (*grads, None)[:3]
        saved = ctx.saved_tensors  # asked for once, as a checkpoint wants it
        found = _Gradient.apply(*options, d_output, d_h, d_c, *saved)
        anchor = saved[2].new_zeros(())
        return None, None, None, anchor, *found, None, None, None, None


class _Gradient(Function):
    """The backward pass, a function of its own so that a second one raises."""

    @staticmethod
    def forward(
        mode: str,
        report: Report,
        reverse: bool,
        needs_x: bool,
        d_output: Tensor | None,
        d_h: Tensor | None,
        d_c: Tensor | None,
        gates: Tensor | None,
        cells: Tensor | None,
        output: Tensor,
        x: Tensor,
        h: Tensor,
        c: Tensor | None,
        *weights: Any,
    ) -> tuple[Tensor | None, ...]:
        dtype = torch.float32
        for each in (output, x, h, weights[0]):
            dtype = torch.promote_types(dtype, each.dtype)
        before = shifted(h, output, reverse)
        x = x if gates is not None else x.contiguous()  # as the gates will be
        zero = output.new_zeros(()).expand(output.shape)
        given = (
            zero if d_output is None else d_output,
            zero[0] if d_h is None else d_h,
            zero[0] if d_c is None else d_c,
            *(gates, cells, x, before, output, c, *weights),
        )
        with no_autocast(x.device):
            wide: Any = (None if each is None else each.to(dtype) for each in given)
            run = Run(reverse, *wide)
            d_ih, d_hh, *d_state = BACKWARD[mode](run)
            report(d_ih, d_hh, x.detach(), before)  # which may be kept, not the graph
            d_x = linear(d_ih, run.w_ih.T) if needs_x else None
        own = zip((d_x, *d_state, None), (x, h, c), strict=False)
        return tuple(None if d is None or e is None else d.to(e.dtype) for d, e in own)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "recurrent_layer: expected one derivative, got a second one. Use steps."
        )


def _by_steps(*tensors: Tensor | None) -> bool:
    """Whether an LSTM in steps is as fast as the kernel and has its dtypes.

    On a CPU a step is one GEMM either way, and the kernel keeps its gates to itself.
    """
    given = [each for each in tensors if each is not None]
    same = {(each.device.type, each.dtype) for each in given}
    plain = same in ({("cpu", torch.float32)}, {("cpu", torch.float64)})
    return plain and not torch.is_autocast_enabled("cpu")
