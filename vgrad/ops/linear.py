"""Linear layers: products of data with a matrix, by rows or by columns.

Elementwise ops have no records: their parameters are expanded over the samples, which
is as good, since the gradients of every sample are small.

B samples, I inputs, O outputs, E members, N rows of a member
"""

import math
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import wrap_torch_function

from vgrad.factors.base import Dense, Outer, Positions
from vgrad.ops.record import Form, Rule, below_members, register
from vgrad.torch_private import modes


def positions(tensor: Tensor) -> Tensor:
    """View `[B, ..., I]` as `[B, 1, T, I]`."""
    count = math.prod(tensor.shape[1:-1])
    return tensor.reshape(len(tensor), 1, count, tensor.shape[-1])


def over_positions(tensor: Tensor) -> Tensor:
    """Sum `[B, ..., O]` over its positions, -> [B, O]."""
    count = math.prod(tensor.shape[1:-1])
    rows = tensor.reshape(len(tensor), count, tensor.shape[-1])
    return rows[:, 0] if count == 1 else rows.sum(1)


class _Output:
    """The gradient at an op's output, which a weight and a bias have in common."""

    def __init__(self) -> None:
        self._known: tuple[ref[Tensor], ref[Positions]] | None = None

    def at(self, g: Tensor) -> Positions:
        """Return the positions of the gradient `g [B, ..., O]`, made once for each.

        A second backward pass has another gradient; neither is kept for its sake.
        """
        if self._known is not None and self._known[0]() is g:
            if (known := self._known[1]()) is not None:
                return known
        made = Positions(positions(g))
        self._known = ref(g), ref(made)
        return made

    def shift(self, g: Tensor) -> Dense:
        """Return the factor of the bias, whose norms are known if it is the output."""
        single = math.prod(g.shape[1:-1]) == 1 and g.ndim > 1
        return Dense(over_positions(g), self.at(g) if single else None)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict | None:
    """`out = input @ weight.T + bias`; the weight may be a vector."""
    shape, known = weight.shape, _Output()
    if bias is not None and bias.shape != shape[:-1]:
        return None
    if len(shape) == 1:  # each number of the output is a position
        return {
            "weight": lambda g: Outer(positions(input), positions(g[..., None]), shape),
            "bias": lambda g: Dense(g.flatten(1).sum(1)),
        }

    def matrix(g: Tensor) -> Outer:
        shared = known.at(g)
        return Outer(positions(input), shared.tensor, shape, shared)

    return {"weight": matrix, "bias": known.shift}


def _of_members(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Form | None, str]:
    """Multiply the matrices of all members by one kernel, which adds the biases.

    torch's vmap adds them in a separate pass.
    """
    if bias is None or weight.ndim != 2 or bias.ndim != 1:
        return None, "torch"
    if not (modes.is_mapped_here(weight) and modes.is_mapped_here(bias)):
        return None, "torch"
    return lambda: below_members(_products, input, weight, bias), "baddbmm"


def _products(
    members: int, stacked: list[bool], x: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Compute `x @ weight.mT + bias` for `x [E or nothing, ..., I]`."""
    shape = x.shape if stacked[0] else (members, *x.shape)
    rows = x if stacked[0] else x.expand(shape)
    if len(shape) != 3:
        rows = rows.reshape(members, math.prod(shape[1:-1]), shape[-1])
    if (
        weight.requires_grad
        and torch.is_grad_enabled()
        and not modes.inside_transform()
    ):
        out = _Product.apply(rows, weight, bias)
    else:
        out = torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return out if len(shape) == 3 else out.reshape(*shape[:-1], out.shape[-1])


class _Product(torch.autograd.Function):
    """`[E, N, I], [E, O, I], [E, O] -> [E, N, O]`, whose gradients lie like the inputs.

    Autograd transposes the gradient of the right factor of a product; code that needs
    it in the layout of the weight would have to copy it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight.conj()) if to_x else None,
            torch.bmm(grad.mT, x.conj()) if to_weight else None,
            grad.sum(1) if to_bias else None,
        )


def _bilinear(
    input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> dict:
    """`out_o = input1 @ weight_o @ input2 + bias_o`: linear in all pairs of inputs."""
    shape, known = weight.shape, _Output()

    def matrices(g: Tensor) -> Outer:
        pairs = (input1[..., :, None] * input2[..., None, :]).flatten(-2)
        shared = known.at(g)
        return Outer(positions(pairs), shared.tensor, shape, shared)

    return {"weight": matrices, "bias": known.shift}


@wrap_torch_function(lambda input, weight, bias=None: (input, weight))
def product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a matrix on the right, `input @ weight + bias`."""
    return F.linear(input, weight.T, bias)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict:
    """As of `linear`, with inputs and outputs exchanged."""
    shape = weight.shape
    return {
        "weight": lambda g: Outer(positions(g), positions(input), shape),
        "bias": lambda g: Dense(over_positions(g)),
    }


register(
    F.linear,
    rule=Rule(_linear, ("weight", "bias")),
    fused=True,  # vmap adds a bias in a pass of its own
    per_member=_of_members,
)
register(F.bilinear, rule=Rule(_bilinear, ("weight", "bias")))
register(product, rule=Rule(_product, ("weight", "bias")))
