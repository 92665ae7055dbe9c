"""Convolutions and transposed convolutions.

B samples, C channels, O outputs, E members
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.devices import is_host
from vgrad.factors.base import Dense, Factor, Outer
from vgrad.factors.conv import Conv
from vgrad.ops.record import Form, Kind, Rule, Transposed, below_members, register
from vgrad.torch_private import kernels, modes

Sizes = tuple[int, ...]


def _as_one_batch(op: Callable) -> Callable:
    """Run a convolution with the samples and the batch of each as one batch."""

    def run(input: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
        batched = input.ndim == weight.ndim + 1
        output = op(input.flatten(0, 1) if batched else input, weight, *rest, **named)
        if not batched:
            return output
        # A view that autograd does not know as one: ops that write into it are legal
        # and cost nothing more.
        sizes = (*input.shape[:2], *output.shape[1:])
        return kernels.unsafe_view(output, sizes)

    return run


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> dict:
    """Cross-correlation of padded inputs with kernels."""
    shape, count = weight.shape, weight.ndim - 2
    stride, dilation = _sizes(stride, count), _sizes(dilation, count)
    pads = _pads(padding, shape[2:], dilation)

    def kernel(g: Tensor) -> Factor:
        return _patches(input, g, shape, stride, pads, dilation, groups)

    return {"weight": kernel, "bias": lambda g: _shift(g, count)}


def _transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> dict:
    """Adjoint of a convolution, with kernels `[C, O / groups, *sizes]`.

    The convolution with these kernels takes the gradient at the output for its input,
    and the input for the gradient at its output.
    """
    shape, count = weight.shape, weight.ndim - 2
    stride, dilation = _sizes(stride, count), _sizes(dilation, count)
    # No input reaches the padding at the end of the output.
    sides = zip(_sizes(padding, count), _sizes(output_padding, count), strict=True)
    pads = _in_order([(side, side - extra) for side, extra in sides])

    def kernel(g: Tensor) -> Factor:
        return _patches(g, input, shape, stride, pads, dilation, groups)

    return {"weight": kernel, "bias": lambda g: _shift(g, count)}


def _back(
    op: Callable, input: Tensor, weight: Tensor, **options: Any
) -> Transposed | None:
    """Return the derivative of a convolution or of its adjoint: the other, `op`."""
    sizes = weight.shape[2:]
    stride, dilation = (_sizes(options[n], len(sizes)) for n in ("stride", "dilation"))
    pads = _pads(options["padding"], sizes, dilation)[::-1]
    space, sides = input.shape[-len(sizes) :], pads[::2]
    rest = {"weight": weight, "groups": options["groups"], "stride": stride}
    rest |= {"padding": sides, "dilation": dilation}
    if "output_padding" in options:
        extra = _sizes(options["output_padding"], len(sizes))
    else:  # numbers at the end that no window reaches
        axes = zip(space, sizes, stride, sides, dilation, strict=True)
        extra = tuple((n + 2 * p - d * (k - 1) - 1) % s for n, k, s, p, d in axes)
        rest["output_padding"] = extra
    fits = sides == pads[1::2] and all(map(operator.lt, extra, stride))
    return (op, rest) if fits else None


def _patches(
    inputs: Tensor,
    outputs: Tensor,
    shape: torch.Size,
    stride: Sizes,
    pads: Sizes,
    dilation: Sizes,
    groups: int,
) -> Factor:
    """Make the factor of a kernel: `Outer` for a single number, else `Conv`."""
    several = inputs.ndim == len(shape) + 1 and inputs.shape[1] > 1
    single = all(size == 1 for size in shape[2:])
    if any(pads) and (several or single):
        inputs, pads = F.pad(inputs, pads), (0,) * len(pads)
    if inputs.ndim == len(shape) + 1:
        inputs, outputs = _side_by_side(inputs, outputs, stride[0])
    if not single:
        return Conv(inputs, outputs, shape, stride, pads, dilation, groups)
    inputs = inputs[(..., *(slice(None, None, step) for step in stride))]
    a = inputs.flatten(2).unflatten(1, (groups, -1)).mT
    b = outputs.flatten(2).unflatten(1, (groups, -1)).mT
    return Outer(a, b, shape)


def _side_by_side(inputs: Tensor, outputs: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Make one image of the images `[B, N, C, *space]` of each sample.

    Patches that lie in two images meet gradients of zero.
    """
    if inputs.shape[1] == 1:
        return inputs[:, 0], outputs[:, 0]
    length, count = inputs.shape[3], outputs.shape[3]
    period = -(-length // step)
    inputs, outputs = _joined(inputs, period * step), _joined(outputs, period)
    inputs = inputs[:, :, : inputs.shape[2] - period * step + length]
    return inputs, outputs[:, :, : outputs.shape[2] - period + count]


def _joined(images: Tensor, length: int) -> Tensor:
    """Join images `[B, N, C, L, ...]`, made longer by zeros. -> [B, C, N * L, ...]"""
    zeros = (0, 0) * (images.ndim - 4) + (0, length - images.shape[3])
    return F.pad(images, zeros).transpose(1, 2).flatten(2, 3)


def _shift(g: Tensor, count: int) -> Dense:
    """Sum the gradient at the output `[B, (N,) O, *space]` over all but channels."""
    channels = g.ndim - count - 1
    return Dense(g.sum([axis for axis in range(1, g.ndim) if axis != channels]))


def _sizes(value: Any, count: int) -> Sizes:
    value = (value,) if isinstance(value, int) else tuple(value)
    return value * count if len(value) == 1 else value


def _pads(padding: Any, kernel: torch.Size, dilation: Sizes) -> Sizes:
    """Return the argument of F.pad for the padding of a convolution."""
    if padding == "same":
        extra = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
        return _in_order([(total // 2, total - total // 2) for total in extra])
    padding = 0 if padding == "valid" else padding
    return _in_order([(side, side) for side in _sizes(padding, len(kernel))])


def _in_order(sides: list[tuple[int, int]]) -> Sizes:
    return tuple(side for pair in reversed(sides) for side in pair)


def _of_members(op: Callable) -> Callable[..., tuple[Form | None, str]]:
    """Run the convolution of one member after another on a CPU.

    torch's vmap makes one grouped convolution of them, which a CPU runs several times
    slower.
    """

    def choose(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kw: Any
    ) -> tuple[Form | None, str]:
        if not modes.is_mapped_here(weight):
            return None, "one convolution of all members' batches"
        if not modes.is_mapped_here(input):
            return None, "one convolution with the channels of all members"
        if not is_host(input.device):
            return None, "grouped"

        def separate(
            members: int, stacked: list[bool], *tensors: Tensor | None
        ) -> Tensor:
            # The backward pass of unbind is one stack; indexing would make a whole
            # tensor of zeros for each member.
            columns = [
                [x] * members if x is None or not is_stacked else x.unbind(0)
                for x, is_stacked in zip(tensors, stacked, strict=True)
            ]
            rows = zip(*columns, strict=True)
            return torch.stack([op(*row, *args, **kw) for row in rows])

        return lambda: below_members(separate, input, weight, bias), "one call a member"

    return choose


for _op, _adjoint in (
    (F.conv1d, F.conv_transpose1d),
    (F.conv2d, F.conv_transpose2d),
    (F.conv3d, F.conv_transpose3d),
):
    _rule = partial(Rule, _convolution, ("weight", "bias"), _as_one_batch(_op))
    register(_op, rule=_rule(partial(_back, _adjoint)), per_member=_of_members(_op))
    register(_op, _adjoint, autocast=Kind.LOW)
    _rule = partial(Rule, _transposed, ("weight", "bias"), _as_one_batch(_adjoint))
    register(_adjoint, rule=_rule(partial(_back, _op)))
