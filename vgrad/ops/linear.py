"""Linear layers; einsum, matmul, addmm and their like as linear layers of their own.

Elementwise ops have no records: their parameters are expanded over the samples, which
is as good, since the gradients of every sample are small.

B samples, I inputs, O outputs, E members, N rows of a member
"""

import math
import string
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import wrap_torch_function

from vgrad.factors.base import Dense, Factor, Outer, Positions
from vgrad.ops.record import (
    Form,
    Kind,
    Recording,
    Rule,
    Transposed,
    below_members,
    in_place,
    register,
)
from vgrad.torch_private import modes


def positions(tensor: Tensor) -> Tensor:
    """View `[B, ..., I]` as `[B, 1, T, I]`."""
    size, *sizes, width = tensor.shape
    if len(sizes) < 2:  # a view of any layout, by one op
        return tensor.view(size, 1, *sizes or (1,), width)
    return tensor.reshape(size, 1, math.prod(sizes), width)


def over_positions(tensor: Tensor) -> Tensor:
    """Sum `[B, ..., O]` over its positions, -> [B, O]."""
    count = math.prod(tensor.shape[1:-1])
    rows = tensor.reshape(tensor.shape[0], count, tensor.shape[-1])
    return rows[:, 0] if count == 1 else rows.sum(1)


class _Output:
    """The gradient at an op's output, which a weight and a bias have in common."""

    def __init__(self) -> None:
        self._cache: tuple[ref[Tensor], ref[Positions]] | None = None

    def at(self, g: Tensor) -> Positions:
        """Return the positions of the gradient `g [B, ..., O]`, made once for each.

        A second backward pass has another gradient; neither is kept for its sake.
        """
        if self._cache is not None and self._cache[0]() is g:
            if (shared := self._cache[1]()) is not None:
                return shared
        shared = Positions(positions(g))
        self._cache = ref(g), ref(shared)
        return shared

    def shift(self, g: Tensor) -> Dense:
        """Return the factor of the bias, whose norms are known if it is the output."""
        if g.ndim == 1 or math.prod(g.shape[1:-1]) != 1:
            return Dense(over_positions(g))
        return Dense(g.view(g.shape[0], g.shape[-1]), self.at(g))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict | None:
    """`out = input @ weight.T + bias`; the weight may be a vector."""
    shape, output = weight.shape, _Output()
    if bias is not None and bias.shape != shape[:-1]:
        return None
    if len(shape) == 1:  # each number of the output is a position
        return {
            "weight": lambda g: Outer(positions(input), positions(g[..., None]), shape),
            "bias": lambda g: Dense(g.flatten(1).sum(1)),
        }

    def matrix(g: Tensor) -> Outer:
        shared = output.at(g)
        return Outer(positions(input), shared.tensor, shape, shared)

    return {"weight": matrix, "bias": output.shift}


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
    shape, output = weight.shape, _Output()

    def matrices(g: Tensor) -> Outer:
        pairs = (input1[..., :, None] * input2[..., None, :]).flatten(-2)
        shared = output.at(g)
        return Outer(positions(pairs), shared.tensor, shape, shared)

    return {"weight": matrices, "bias": output.shift}


@wrap_torch_function(lambda input, weight, bias=None: (input, weight))
def product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by a matrix on the right, `input @ weight + bias`."""
    return F.linear(input, weight.T, bias)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict:
    """`out = input @ weight + bias`: `linear` with inputs and outputs exchanged."""
    shape = weight.shape
    return {
        "weight": lambda g: Outer(positions(g), positions(input), shape),
        "bias": lambda g: Dense(over_positions(g)),
    }


def _back_by(op: Callable) -> Callable:
    """Return the derivative of a product with a matrix, which is one by `op`."""

    def back(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Transposed:
        if weight.ndim == 1:
            axes = string.ascii_lowercase[: input.ndim - 2]
            return _back_by_contraction(input, weight, f"{axes}I", "I", axes)
        return op, {"weight": weight}

    return back


# Contractions.


@wrap_torch_function(lambda data, weight, x, w, out: (data, weight))
def contraction(data: Tensor, weight: Tensor, x: str, w: str, out: str) -> Tensor:
    """Contract data of axes `x` with a weight of axes `w`, as `torch.einsum` does.

    More axes may lead in the data, and lead in the output then.
    """
    return torch.einsum(f"...{x},{w}->...{out}", data, weight)


def _back_by_contraction(
    data: Tensor, weight: Tensor, x: str, w: str, out: str
) -> Transposed:
    return contraction, {"weight": weight, "x": out, "w": w, "out": x}


def _contraction(data: Tensor, weight: Tensor, x: str, w: str, out: str) -> dict | None:
    """Axes of the weight are groups, inputs or outputs; other axes are positions.

    Sums within one operand, and broadcasting, have no such form.
    """
    shape, sizes = weight.shape, dict(zip(w, weight.shape, strict=True))
    if any(sizes.get(axis, n) != n for axis, n in zip(x, data.shape[1:], strict=True)):
        return None
    groups = [axis for axis in w if axis in x and axis in out]
    inputs = [axis for axis in w if axis in x and axis not in out]
    outputs = [axis for axis in w if axis not in x and axis in out]
    rest = [axis for axis in x if axis not in w]
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
        factor = Outer(a, b, torch.Size([sizes[axis] for axis in order]))
        if order == [*w] and not one_side:
            return factor
        return Dense(factor.grad().permute(0, *(1 + order.index(axis) for axis in w)))

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


def _tensordot(
    record: Recording, a: Tensor, b: Tensor, dims: Any = 2, out: Any = None
) -> Tensor | None:
    """Contract axes of one operand with axes of the other, as an einsum."""
    if isinstance(dims, Tensor):
        dims = dims.tolist() if dims.numel() > 1 else int(dims)
    if isinstance(dims, int):
        dims = range(-dims, 0), range(dims)
    pairs = [*zip(*dims, strict=True)]
    left = [*string.ascii_lowercase[: a.ndim]]
    right = [*string.ascii_uppercase[: b.ndim]]
    for i, j in pairs:
        right[j] = left[i]
    free = [axis for axis in left + right if (axis in left) != (axis in right)]
    once = len({*right}) == b.ndim and len(free) + 2 * len(pairs) == a.ndim + b.ndim
    if out is not None or not once:  # torch refuses an axis that comes twice
        return None
    return _einsum(record, f"{''.join(left)},{''.join(right)}->{''.join(free)}", a, b)


def _stacked(data: Tensor, weight: Tensor, *, swapped: bool = False) -> Tensor:
    """Multiply by a stack of matrices; `swapped` says that it is on the left."""
    vector = data.ndim == 1
    rows = data[None] if vector else data.mT if swapped else data
    sizes = torch.broadcast_shapes(rows.shape[:-2], weight.shape[:-2])
    rows = rows.expand(*sizes, *rows.shape[-2:])
    stack = string.ascii_lowercase[: len(sizes)]
    axes = stack[len(sizes) - weight.ndim + 2 :] + ("OI" if swapped else "IO")
    output = contraction(rows, weight, f"{stack}TI", axes, f"{stack}TO")
    if vector:
        return output.squeeze(-2)
    return output.mT if swapped else output


def _in_blocks(tensor: Tensor, axes: str, *blocks: list[str]) -> Tensor:
    """Bring the axes of `[B, *axes]` into blocks, and make each block one axis."""
    order = [1 + axes.index(axis) for block in blocks for axis in block]
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
    free = [letter for letter in string.ascii_letters if letter not in inputs]
    free = "".join(free[: max(0, *hidden)])
    for place, count in enumerate(hidden):
        if count < 0 or (count and "..." not in terms[place]):
            return None
        terms[place] = terms[place].replace("...", free[len(free) - count :])
    if not arrow:
        once = [letter for letter in sorted(inputs) if inputs.count(letter) == 1]
        out = "..." + "".join(letter for letter in once if letter.isalpha())
    return terms[0], terms[1], out.replace("...", free)


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
    """Compute distances of rows; torch's rule differentiates shared rows wrongly."""
    if not x1.shape[-1] or any(map(_is_mapped, (x1, x2))):
        return torch.cdist(x1, x2, p, *args, **kwargs)
    return _distances(x1, x2, p)


def _cdist_of_columns(
    record: Recording, x1: Tensor, x2: Tensor, p: float = 2.0, *_: Any, **__: Any
) -> Tensor | None:
    """Compute distances; torch's rule is wrong where only gradients are mapped."""
    if not record.columns or not x1.shape[-1]:
        return None
    with record.watching():
        return _distances(x1, x2, p)


def _distances(x1: Tensor, x2: Tensor, p: float) -> Tensor:
    gaps = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).abs()
    if p < math.inf:
        return torch.linalg.vector_norm(gaps, p, -1)
    largest = gaps.detach().amax(-1, keepdim=True)  # whose gradient all gaps of it have
    reached = (gaps == largest) & largest.isfinite()
    return largest[..., 0] + torch.where(reached, gaps - gaps.detach(), 0).sum(-1)


def _solved(solve: Callable[..., Any]) -> Callable[..., Any]:
    """Solve systems; torch's rule is wrong where one side has more axes of batches."""

    def form(A: Tensor, B: Tensor, *args: Any, **options: Any) -> Any:
        if B.ndim > 1 and B.shape != A.shape[:-1]:  # matrices, not vectors
            batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
            A, B = (matrix.expand(*batch, *matrix.shape[-2:]) for matrix in (A, B))
        return solve(A, B, *args, **options)

    return form


def _unbatched(solve: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse systems with axes of batches, for which torch's rules are wrong."""

    def form(*args: Any, **options: Any) -> Any:
        tensors = [
            tensor
            for tensor in (*args, *options.values())
            if isinstance(tensor, Tensor)
        ]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if any(len(shape) > 2 for shape in shapes) and any(map(_is_mapped, tensors)):
            raise NotImplementedError(
                f"{modes.op_name(solve)}({shapes}): "
                f"expected matrices without axes of batches, since torch.vmap is wrong "
                f'for others. Use torch.linalg.solve, or strategy="loop".'
            )
        return solve(*args, **options)

    return form


def _is_mapped(tensor: Tensor) -> bool:
    """Return whether any vmap maps over a tensor."""
    while modes.is_wrapped(tensor) and not modes.is_batched(tensor):
        tensor = modes.unwrapped(tensor)
    return modes.is_batched(tensor)


register(
    F.linear,
    rule=Rule(_linear, ("weight", "bias"), transposed=_back_by(product)),
    fused=True,  # vmap adds a bias in a pass of its own
    per_member=_of_members,
    autocast=Kind.LOW,
)
register(
    F.bilinear,
    rule=Rule(_bilinear, ("weight", "bias")),
    autocast=(Kind.INSIDE, Kind.WIDEST),
)
_rule = Rule(_product, ("weight", "bias"), transposed=_back_by(F.linear))
register(product, rule=_rule)
_rule = Rule(_contraction, ("weight",), transposed=_back_by_contraction)
register(contraction, rule=_rule)
for _op in (torch.linalg.solve, torch.linalg.solve_ex):
    register(_op, mapped=_solved(_op))
for _op in (torch.linalg.lstsq, torch.linalg.lu_solve, torch.lu_solve, Tensor.lu_solve):
    register(_op, mapped=_unbatched(_op))
_solvers = torch.linalg.solve, torch.linalg.lstsq, torch.lu_solve, Tensor.lu_solve
register(*_solvers, autocast=(Kind.FLOAT32, None))
register(torch.cdist, mapped=_cdist, recorded=_cdist_of_columns, autocast=Kind.FLOAT32)
# Torch enlarges the tensor that it writes into, under vmap without its axis of samples.
register(Tensor.addbmm_, mapped=in_place(torch.addbmm))
register(torch.einsum, recorded=_einsum, autocast=(Kind.INSIDE, Kind.LOW))
for _name in ("matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addmv"):
    register(
        *(getattr(torch, _name), getattr(Tensor, _name)),
        recorded=_addmm if "add" in _name else _matmul,
        autocast=(None if "mv" in _name else Kind.LOW, Kind.LOW),
    )
register(torch.tensordot, recorded=_tensordot, autocast=(Kind.PRODUCT, Kind.WIDEST))
register(torch.linalg.matmul, recorded=_matmul, autocast=Kind.LOW)
_swapped = lambda record, right, left: _matmul(record, left, right)  # noqa: E731
register(Tensor.__rmatmul__, recorded=_swapped, autocast=Kind.LOW)
