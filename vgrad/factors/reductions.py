"""Norms and sums of per-sample gradients, exact where plain code is not.

B samples, P numbers in one sample's gradient of one parameter, T positions. Everything
runs in float32 or wider, with autocast off, whatever the dtype of the gradients.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vgrad.conditions import checks_collected, rare
from vgrad.torch_private import modes
from vgrad.tree import double, wide
from vgrad.typing import Params

_BLOCK = 256
"""Numbers whose squares are summed in float32 before float64 takes over.

A single float32 norm loses up to 2e-3 over 3e7 numbers on a CPU; blocks of this length
lose 1e-7 and cost the same.
"""

_SMALL = 2**16
"""Numbers whose squares are summed in float64 at once, which takes one op."""

_AT_ONCE = 2**24
"""Numbers of gradients formed at once where norms from products are in doubt."""

_LOW, _HIGH = 1e-10, 1e15
"""Between these no square that matters has left float32's range."""

_DOUBTFUL = 1e-4
"""Cancellation below which a norm from products is computed again, from gradients."""


class Norm(NamedTuple):
    """Norms of B gradients in float64, and upper bounds that hold despite rounding.

    `reach` is no less than any number that is multiplied for a weighted sum.
    """

    value: Tensor
    upper: Tensor
    reach: Tensor

    @classmethod
    def exactly(cls, value: Tensor, reach: Tensor | None = None) -> "Norm":
        """Make the norms that are right up to a rounding of float32."""
        return cls(value, value, value if reach is None else reach)

    @classmethod
    def joint(cls, norms: Sequence["Norm"]) -> "Norm":
        """Return the norms over several parameters."""
        values = torch.stack([norm.value for norm in norms], dim=1)
        reach = torch.stack([norm.reach for norm in norms], dim=1).amax(1)
        if all(norm.value is norm.upper for norm in norms):
            return cls.exactly(together(values), reach)
        uppers = torch.stack([norm.upper for norm in norms], dim=1)
        return cls(together(values), together(uppers), reach)


def norm_dtype(params: Params) -> torch.dtype:
    """Return the dtype of norms over all parameters: real, float32 or wider."""
    dtype = torch.float32
    for value in params.values():
        dtype = torch.promote_types(dtype, value.dtype)
    return dtype.to_real()


def no_norms(params: Params, dtype: torch.dtype) -> Tensor:
    """Return the norms of an empty batch, [0]."""
    return next(iter(params.values())).new_zeros(0, dtype=dtype)


def together(norms: Tensor) -> Tensor:
    """Root of the sum of squares of float64 norms, [B, K] -> [B].

    It neither overflows nor underflows. The root has no slope at zero; zero is taken,
    as torch does for its norms.
    """
    if norms.shape[1] == 1:
        return norms[:, 0]
    largest = norms.detach().amax(1) if norms.shape[1] else norms.new_zeros(len(norms))
    scale = torch.where(largest > 0, largest, 1.0)
    return scale * _root((norms / scale[:, None]).square().sum(1))


def row_norms(grad: Tensor) -> Tensor:
    """L2 norm over all but the first dimension, [B, ...] -> [B] in float64."""
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    if not real.is_contiguous():
        real = real.permute(memory_order(real))
    flat = real.reshape(len(real), math.prod(real.shape[1:]))
    exact = flat.dtype == torch.float64 or flat.requires_grad
    if exact or modes.inside_transform():
        return _scaled_norms(flat)
    if flat.device.type != "cpu" or flat.numel() <= _SMALL:
        # Squares of float32 have room in float64; on a CPU this is slow.
        return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    norms = _block_norms(flat.float())
    doubtful = ~((norms > _LOW) & (norms < _HIGH))
    if checks_collected():
        # Zeros are sure if there is nothing but zeros; small norms are not.
        doubtful &= _largest(flat) != 0
    if rare(doubtful):
        norms[doubtful] = torch.linalg.vector_norm(flat[doubtful].double(), dim=1)
    return norms


def products(*factors: Tensor) -> list[Tensor]:
    """Bring the factors of a matrix product to the dtype in which it is exact.

    That is float32 or wider; float64 where torch may round float32 factors to TF32 or
    bfloat16, which would break the bound on clipped gradients.
    """
    dtype = torch.float32
    for factor in factors:
        dtype = torch.promote_types(dtype, factor.dtype)
    if dtype in (torch.float32, torch.complex64) and rounded(
        factors[0].device, "matmul"
    ):
        dtype = torch.promote_types(dtype, torch.float64)
    return [factor.to(dtype) for factor in factors]


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of rows, [B, ...] and [C, ...] -> [B, C]."""
    dtype = wide(torch.promote_types(a.dtype, b.dtype))
    a, b = products(*(x.reshape(len(x), math.prod(x.shape[1:])) for x in (a, b)))
    return (a @ b.mH).to(dtype)


def self_products(rows: Tensor) -> Tensor:
    """Inner products of the positions of each sample, [N, T, I] -> [N, T, T]."""
    (rows,) = products(rows)
    return torch.bmm(rows, rows.transpose(1, 2))


def gram_norm(
    a: Tensor,
    b: Tensor,
    size: int,
    length: int,
    direct: Callable[[Tensor], Tensor],
    nothing: Callable[[], Tensor],
) -> Norm:
    """Norms of `sum_t b_t x a_t` from products a, b [B * G, T, T] of the positions.

    These are sums of up to `length` products of numbers of B = `size` samples;
    `nothing()` marks the samples with only zeros in one of the factors, [B].

    The square of a norm is `<a, b>`. Where its terms cancel, rounding is large against
    it: such samples are computed from their gradients, `direct(rows)`, and for the
    others the upper bound allows for the loss.
    """
    squares = torch.linalg.vecdot(a.reshape(size, -1), b.reshape(size, -1)).double()
    a_sizes, b_sizes = (each.diagonal(0, 1, 2).double() for each in (a, b))
    terms = (a_sizes * b_sizes).sqrt_().sum(1)
    largest = _over_groups(terms.square_(), size)
    eps, positions = torch.finfo(a.dtype).eps, max(1, a.shape[1])
    # Twice the worst that was measured, over kinds of inputs of all sizes and dtypes;
    # where positions are equal, so are their errors, and do not average out.
    slack = eps * max(4.0, 20 / positions) * largest
    sizes = _over_groups((a_sizes + b_sizes).sum(1), size)
    # A square that may include products on the edge of zero is not used:
    # where denormal numbers are flushed, all of a sum may be gone.
    edge = torch.finfo(a.dtype).tiny * length * positions * sizes
    squares = torch.where(edge < eps * squares, squares, 0.0)
    lost = eps * largest.sqrt()
    return _checked(squares, slack, largest, lost, sizes.sqrt(), direct, nothing)


def summed_norm(
    a: Norm,
    b: Norm,
    cross: Tensor,
    dtype: torch.dtype,
    direct: Callable[[Tensor], Tensor],
) -> Norm:
    """Norms of the sum of two gradients, from their norms and inner products.

    Their weighted sums are formed in `dtype`.
    """
    squares = a.value.square() + 2 * cross + b.value.square()
    largest = (a.upper + b.upper).square()
    known = a.upper.square() - a.value.square() + b.upper.square() - b.value.square()
    slack = known + 4 * torch.finfo(torch.float64).eps * largest
    lost = a.upper - a.value + b.upper - b.value
    lost = lost + torch.finfo(dtype).eps * largest.sqrt()
    reach = torch.maximum(a.reach, b.reach)
    # Nothing is less than what both norms are sure of.
    nothing = partial(torch.ones_like, largest, dtype=torch.bool)
    return _checked(squares, slack, largest, lost, reach, direct, nothing)


def _checked(
    squares: Tensor,
    slack: Tensor,
    largest: Tensor,
    lost: Tensor,
    reach: Tensor,
    direct: Callable[[Tensor], Tensor],
    nothing: Callable[[], Tensor],
) -> Norm:
    """Take roots of squares, and gradients where the squares are mostly rounding.

    `slack` is how much too small a square may be, `largest` the square of the sum of
    its terms, and `lost` what a weighted sum of the terms loses. `direct`
    forms gradients in float64, where nothing leaves the range. `nothing` marks squares
    that are zero without any rounding, if their terms are.
    """
    fine = squares > _DOUBTFUL * largest
    fine &= (largest > _LOW**2) & (largest < _HIGH**2)
    norms = squares.clamp(min=0).sqrt()
    upper = (squares + slack).clamp(min=0).sqrt()
    if collected := checks_collected():
        fine |= (largest == 0) & nothing()
    if not rare(~fine):
        return Norm(norms, upper, reach)
    if not collected:
        fine |= (largest == 0) & nothing()
    doubtful = (~fine).nonzero().flatten()
    step = 1  # the first one shows how many gradients are not too many
    while len(doubtful):
        rows, doubtful = doubtful[:step], doubtful[step:]
        grads = direct(rows)
        step = max(1, _AT_ONCE * len(rows) // max(1, grads.numel()))
        exact = row_norms(grads)
        norms[rows] = exact
        # If it is not finite, gradients will be summed in float64.
        upper[rows] = exact + torch.where(lost[rows].isfinite(), lost[rows], 0)
    return Norm(norms, upper, reach)


def _over_groups(found: Tensor, size: int) -> Tensor:
    """Sum over the groups of each sample, [B * G] -> [B]."""
    return found if len(found) == size else found.view(size, -1).sum(1)


def zeros(numbers: Tensor) -> Tensor:
    """Mark the samples with nothing but zeros, [B, ...] -> [B]."""
    if not numbers.numel():
        return torch.ones(len(numbers), dtype=torch.bool, device=numbers.device)
    return _largest(numbers) == 0


def _largest(numbers: Tensor) -> Tensor:
    """Largest size among the numbers of each sample, [B, ...] -> [B]."""
    axes = [*range(1, numbers.ndim)]
    if numbers.is_complex():
        return numbers.abs().amax(axes)
    # Two readings, where sizes would be written first, as large as the numbers.
    return torch.maximum(numbers.amax(axes), -numbers.amin(axes))


def rounded(device: torch.device, op: Literal["conv", "matmul"]) -> bool:
    """Return whether torch may round the float32 factors of an op."""
    backends: Any = torch.backends
    on_cuda = {"conv": backends.cudnn, "matmul": backends.cuda}
    backend = on_cuda[op] if device.type == "cuda" else backends.mkldnn
    return getattr(backend, op).fp32_precision not in _UNROUNDED


_UNROUNDED = {"none", "ieee"}
"""Values of torch's switches, old and new, where float32 stays float32."""


def _block_norms(flat: Tensor) -> Tensor:
    """Norms [B, P] -> [B] in float64, by blocks in float32."""
    whole = flat.shape[1] // _BLOCK * _BLOCK
    if whole == flat.shape[1] == _BLOCK or whole == 0:
        return torch.linalg.vector_norm(flat, dim=1).double()
    blocks = torch.linalg.vector_norm(
        flat[:, :whole].unflatten(1, (-1, _BLOCK)), dim=2
    ).double()
    squares = blocks.square_().sum(1)
    if whole < flat.shape[1]:
        rest = torch.linalg.vector_norm(flat[:, whole:], dim=1).double()
        squares += rest.square_()
    return squares.sqrt_()


def _scaled_norms(flat: Tensor) -> Tensor:
    """Norms [B] in float64; a sample is divided by its largest entry, then squared."""
    if flat.shape[1] == 0:
        return flat.sum(1, dtype=torch.float64)
    largest = flat.detach().abs().amax(1).double()
    scale = torch.where(largest > 0, largest, 1.0)
    return scale * _root((flat.double() / scale[:, None]).square().sum(1))


def memory_order(grad: Tensor) -> list[int]:
    """Return the axes as they lie in memory, so that flattening copies nothing."""
    strides = grad.stride()
    return [0, *sorted(range(1, grad.ndim), key=lambda axis: -strides[axis])]


def _root(squares: Tensor) -> Tensor:
    """Square root whose slope at zero is zero."""
    zero = squares == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt())


ROWS_AT_ONCE = 65536
"""Rows of one matrix product in float32; sums over more are kept in float64."""

_SAMPLES = 32
"""Samples that are summed in float32 before float64 takes over."""

_LARGE = 1e15
"""Size up to which numbers and their products stay far from the ends of float32."""


class Sums:
    """Sums over samples for each parameter, added up chunk by chunk.

    One chunk is left as it is; more are added in float64 and rounded once at the end,
    so that the sum does not drift as the batch grows.

    Attributes:
        totals: the sums so far.
    """

    def __init__(self) -> None:
        self.totals: Params = {}

    def add(self, part: Params) -> None:
        """Add the sums of one chunk."""
        if not self.totals:
            self.totals = part
            return
        for name, value in part.items():
            self.totals[name] = double(self.totals[name]) + value

    def divide(self, by: float) -> None:
        """Divide the sums by a number."""
        if by != 1:
            self.totals = {name: each / by for name, each in self.totals.items()}

    def rounded(self, params: Params) -> Params:
        """Return sums in `promote_types(dtype, float32)`, zeros if there are none."""
        return {
            name: self.totals[name].to(wide(value.dtype))
            if self.totals
            else torch.zeros_like(value, dtype=wide(value.dtype), requires_grad=False)
            for name, value in params.items()
        }


def total(parts: Sequence[Tensor]) -> Tensor:
    """Add parts of a sum in float64, and round once."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack([double(part) for part in parts]).sum(0).to(parts[0].dtype)


def reach(tensors: Sequence[Tensor]) -> Tensor:
    """Return [B], no less than any number of a sample, infinite where that is large."""
    sizes = [
        torch.linalg.vector_norm(
            each, dim=[*range(1, each.ndim)], dtype=wide(each.dtype)
        )
        for each in tensors
    ]
    return torch.stack(sizes).sum(0)


def ordinary(reach: Tensor, weights: Tensor) -> Tensor:
    """Mark samples whose weighted sums of products stay far from float32's ends.

    Numbers are at most `reach` [B]. For others a weight may take one side of a product
    past the end, or to where there are few digits, before it meets the other side.
    """
    sizes = weights.double().abs()
    fine = (reach <= _LARGE) & (sizes * reach.square() <= _LARGE**2)
    return fine & ((sizes >= 1 / _LARGE**2) | (sizes == 0))


def rounded_down(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Round positive numbers to a dtype so that none becomes larger."""
    found = numbers.to(dtype)
    fixed = found.detach()  # nextafter has a derivative from torch 2.13 on
    step = fixed - torch.nextafter(fixed, torch.zeros_like(fixed))
    return torch.where(found > numbers, found - step, found)


def weighted_rows(grad: Tensor, weights: Tensor) -> Tensor:
    """Sum rows with weights, [B, ...] and [B] -> [...] in float32 or wider."""
    axes = list(range(grad.ndim)) if grad.is_contiguous() else memory_order(grad)
    grad = grad.permute(axes)
    flat = grad.reshape(len(grad), math.prod(grad.shape[1:]))
    rows, row = products(flat, weights[None])
    whole = len(rows) // _SAMPLES * _SAMPLES
    if len(rows) <= _SAMPLES:
        found = row @ rows
    else:
        left = row[:, :whole].reshape(-1, 1, _SAMPLES)
        parts = torch.bmm(left, rows[:whole].unflatten(0, (-1, _SAMPLES)))
        found = double(parts).sum(0) + double(row[:, whole:] @ rows[whole:])
    found = found.to(wide(grad.dtype)).reshape(grad.shape[1:])
    return found.permute([axes.index(axis) - 1 for axis in range(1, len(axes))])
