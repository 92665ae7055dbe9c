"""Contractions: einsum, and matmul, addmm and their like as linear layers of their own.

B samples
"""

import math
import string
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import wrap_torch_function

from vgrad.factors.base import Dense, Factor, Outer
from vgrad.ops.linear import product
from vgrad.ops.record import Recording, Rule, register
from vgrad.torch_private import modes


@wrap_torch_function(lambda data, weight, x, w, out: (data, weight))
def contraction(data: Tensor, weight: Tensor, x: str, w: str, out: str) -> Tensor:
    """Contract data of axes `x` with a weight of axes `w`, as `torch.einsum` does.

    More axes may lead in the data, and lead in the output then.
    """
    return torch.einsum(f"...{x},{w}->...{out}", data, weight)


def _factors(data: Tensor, weight: Tensor, x: str, w: str, out: str) -> dict | None:
    """Axes of the weight are groups, inputs or outputs; other axes are positions.

    Sums within one operand, and broadcasting, have no such form.
    """
    shape, sizes = weight.shape, dict(zip(w, weight.shape, strict=True))
    if any(sizes.get(each, n) != n for each, n in zip(x, data.shape[1:], strict=True)):
        return None
    groups = [each for each in w if each in x and each in out]
    inputs = [each for each in w if each in x and each not in out]
    outputs = [each for each in w if each not in x and each in out]
    rest = [each for each in x if each not in w]
    once = all(len({*axes}) == len(axes) for axes in (x, w, out))
    fits = len(groups + inputs + outputs) == len(w) and {*rest} <= {*out}
    if not once or not fits or not inputs + outputs:
        return None

    def blocks(g: Tensor) -> Factor:
        a = _in_blocks(data, x, groups, rest, inputs)
        b = _in_blocks(g, out, groups, rest, outputs)
        # To transpose the factor of a matrix, its two sides are taken for the axes.
        one_side = len(shape) == 2 and 2 in (len(inputs), len(outputs))
        if groups + inputs + outputs == [*w] and not one_side:
            return Outer(b, a, shape)
        order = groups + outputs + inputs
        factor = Outer(a, b, torch.Size([sizes[each] for each in order]))
        if order == [*w] and not one_side:
            return factor
        return Dense(factor.grad().permute(0, *(1 + order.index(each) for each in w)))

    return {"weight": blocks}


def _matmul(record: Recording, *operands: Tensor, **named: Any) -> Tensor | None:
    """Multiply by a vector, a matrix or a stack of them, on either side."""
    if named or len(operands) != 2:  # the ops differ in their keywords
        return None
    left, right = operands
    if not (left.ndim and right.ndim):  # which torch refuses
        return None
    if record.is_parameter(right):
        op = {1: F.linear, 2: product}.get(right.ndim, _stacked)
        with record.watching():
            return op(left, right)
    if not record.is_parameter(left):
        return None
    if left.ndim > 2:
        with record.watching():
            return _stacked(right, left, swapped=True)
    vector = right.ndim == 1
    data = right if vector else right.mT
    with record.watching():
        output = F.linear(data, left)
    return output if vector or left.ndim == 1 else output.mT


def _rmatmul(record: Recording, right: Tensor, left: Tensor) -> Tensor | None:
    """Multiply by an operand on the left."""
    return _matmul(record, left, right)


def _addmm(
    record: Recording, *operands: Tensor, beta: Any = 1, alpha: Any = 1, **named: Any
) -> Tensor | None:
    """`out = beta * shift + alpha * left @ right`."""
    if named or len(operands) != 3 or not any(map(record.is_parameter, operands)):
        return None
    shift, left, right = operands
    added = right.ndim == 2 and shift.shape == right.shape[1:] and beta == alpha == 1
    if added and not (record.is_batched(right) or record.is_batched(shift)):
        with record.watching():
            return product(left, right, shift)
    with record.watching():
        output = torch.matmul(left, right)
        output = output if alpha == 1 else alpha * output
        if beta == 0 and not record.is_parameter(shift):
            return output
        if beta == 0:  # whatever the shift holds, its gradient is zero
            shift = shift.masked_fill(torch.ones_like(shift, dtype=torch.bool), 0)
        return output + (shift if beta in (0, 1) else beta * shift)


def _einsum(record: Recording, equation: Any, *operands: Any) -> Tensor | None:
    """Contract a parameter with data."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if len(operands) != 2 or not any(map(record.is_parameter, operands)):
        return None
    data, weight = operands
    axes = _axes(equation, data.ndim, weight.ndim)
    if axes is None:
        return None
    x, w, out = axes
    if record.is_parameter(data):
        data, weight, x, w = weight, data, w, x
    with record.watching():
        return contraction(data, weight, x, w, out)


def _stacked(data: Tensor, weight: Tensor, *, swapped: bool = False) -> Tensor:
    """Multiply by a stack of matrices; `swapped` says that it is on the left."""
    vector = data.ndim == 1
    rows = data[None] if vector else data.mT if swapped else data
    sizes = torch.broadcast_shapes(rows.shape[:-2], weight.shape[:-2])
    rows = rows.expand(*sizes, *rows.shape[-2:])
    stack = string.ascii_lowercase[: len(sizes)]
    own = stack[len(sizes) - weight.ndim + 2 :] + ("OI" if swapped else "IO")
    output = contraction(rows, weight, f"{stack}TI", own, f"{stack}TO")
    if vector:
        return output.squeeze(-2)
    return output.mT if swapped else output


def _in_blocks(tensor: Tensor, axes: str, *blocks: list[str]) -> Tensor:
    """Bring the axes of `[B, *axes]` into blocks, and make each block one axis."""
    order = [1 + axes.index(each) for block in blocks for each in block]
    sizes = [math.prod(tensor.shape[1 + axes.index(e)] for e in b) for b in blocks]
    return tensor.permute(0, *order).reshape(len(tensor), *sizes)


def _axes(equation: str, *dims: int) -> tuple[str, str, str] | None:
    """Write the equation of two operands out, without an ellipsis; None if it is wrong.

    An ellipsis stands for axes that are counted from the last, and lead in an output
    that is not written.
    """
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(dims):
        return None
    hidden = [n - len(t.replace("...", "")) for t, n in zip(terms, dims, strict=True)]
    free = [each for each in string.ascii_letters if each not in inputs]
    free = "".join(free[: max(0, *hidden)])
    for place, count in enumerate(hidden):
        if count < 0 or (count and "..." not in terms[place]):
            return None
        terms[place] = terms[place].replace("...", free[len(free) - count :])
    if not arrow:
        once = [each for each in sorted(inputs) if inputs.count(each) == 1]
        out = "..." + "".join(each for each in once if each.isalpha())
    return terms[0], terms[1], out.replace("...", free)


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
    """Compute distances of rows; torch's rule differentiates shared rows wrongly."""
    shared = modes.is_wrapped(x1) or modes.is_wrapped(x2)
    if not shared or not x1.shape[-1] or any(map(_is_mapped, (x1, x2))):
        return torch.cdist(x1, x2, p, *args, **kwargs)
    gaps = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).abs()
    if p < math.inf:
        return torch.linalg.vector_norm(gaps, p, -1)
    most = gaps.detach().amax(-1, keepdim=True)  # whose gradient all gaps of it have
    return most[..., 0] + torch.where(gaps == most, gaps - gaps.detach(), 0).sum(-1)


def _is_mapped(tensor: Tensor) -> bool:
    """Return whether any vmap maps over a tensor."""
    while modes.is_wrapped(tensor) and not modes.is_batched(tensor):
        tensor = modes.unwrapped(tensor)
    return modes.is_batched(tensor)


register(contraction, rule=Rule(_factors, ("weight",)))
register(torch.cdist, mapped=_cdist)
register(torch.einsum, recorded=_einsum)
register(torch.matmul, torch.linalg.matmul, torch.mm, torch.mv, recorded=_matmul)
register(torch.bmm, Tensor.matmul, Tensor.mm, Tensor.mv, Tensor.bmm, recorded=_matmul)
register(Tensor.__rmatmul__, recorded=_rmatmul)
register(torch.addmm, torch.addmv, torch.baddbmm, recorded=_addmm)
register(Tensor.addmm, Tensor.addmv, Tensor.baddbmm, recorded=_addmm)
