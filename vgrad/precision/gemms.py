"""The matrix products in calls of torch, each as a GEMM `[M, K] @ [K, N]`."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

Describe = Callable[[Any, tuple, Mapping[str, Any]], Iterator["Gemm"]]
"""From a call's output, arguments and keyword arguments to the products in it."""


class Gemm(NamedTuple):
    """Products `[M, K] @ [K, N]` of the same sizes.

    Attributes:
        m, n, k: the sizes.
        count: how many there are.
        left, right: the operands that may be parameters.
        batch: the size that is a batch dimension if neither is one, or `""`.
        parts: for N and K, how many parts of what name they have, if the right operand
            is more than a matrix.
    """

    m: int
    n: int
    k: int
    count: int
    left: Tensor | None
    right: Tensor | None
    batch: str = "M"
    parts: Mapping[str, tuple[int, str]] = {}


def _contracted(
    left: Tensor, rows: str, right: Tensor, columns: str, kept: str
) -> Iterator[Gemm]:
    """Describe a sum over axes that two tensors share, if it multiplies a matrix."""
    a, b = _axes(rows, left), _axes(columns, right)
    stays = {axis for axis in a | b if axis in kept or (axis < "." and "..." in kept)}
    common = a.keys() & b.keys()
    m = [a[axis] for axis in stays - b.keys()]
    n = [b[axis] for axis in stays - a.keys()]
    k = [min(a[axis], b[axis]) for axis in common - stays]
    if k and (m or n):
        count = math.prod(max(a[axis], b[axis]) for axis in common & stays)
        batch = "" if common & stays else "N" if len(n) > len(m) else "M"
        sizes = math.prod(m), math.prod(n), math.prod(k)
        yield Gemm(*sizes, count, left, right, batch)


def _axes(letters: str, tensor: Tensor) -> dict[str, int]:
    """Return sizes by letter; the axes of an ellipsis are numbered from the end."""
    front, dots, back = letters.partition("...")
    hidden = range(tensor.dim() - len(front + back), 0, -1) if dots else ()
    names = [*front, *(f"-{place}" for place in hidden), *back]
    return dict(zip(names, tensor.shape, strict=True))


def _pair(output: Tensor, *tensors: Tensor) -> Iterator[Gemm]:
    """Describe an op that multiplies the last two of its tensors."""
    *_, left, right = tensors
    rows = "...mk" if left.dim() > 1 else "k"
    columns = "...kn" if right.dim() > 1 else "k"
    return _contracted(left, rows, right, columns, "...mn")


def _einsum(output: Tensor, equation: str, *operands: Any) -> Iterator[Gemm]:
    inputs, arrow, kept = equation.replace(" ", "").partition("->")
    if not arrow:
        kept = "..." + "".join(each for each in inputs if inputs.count(each) == 1)
    if inputs.count(",") == 1:
        left, right = operands if isinstance(operands[0], Tensor) else operands[0]
        rows, columns = inputs.split(",")
        yield from _contracted(left, rows, right, columns, kept)


def _tensordot(output: Tensor, a: Tensor, b: Tensor, dims: Any) -> Iterator[Gemm]:
    if isinstance(dims, Tensor):
        dims = dims.item() if dims.numel() == 1 else dims.tolist()
    pairs = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
    rows = [chr(ord("a") + place) for place in range(a.dim())]
    columns = [chr(ord("A") + place) for place in range(b.dim())]
    for place, other in zip(*pairs, strict=True):
        columns[other] = rows[place]
    kept = "".join({*rows} ^ {*columns})
    return _contracted(a, "".join(rows), b, "".join(columns), kept)


def _linear(output: Tensor, input: Tensor, weight: Tensor, _: Any) -> Iterator[Gemm]:
    *n, k = weight.shape
    yield Gemm(input.shape[:-1].numel(), math.prod(n), k, 1, None, weight)


def _bilinear(
    output: Tensor, input1: Tensor, input2: Tensor, weight: Tensor, _: Any
) -> Iterator[Gemm]:
    n, i, j = weight.shape
    parts = {"N": (n, "outputs"), "K": (j, "features of the second input")}
    yield Gemm(output.numel() // n, n, i * j, 1, None, weight, parts=parts)


def _conv(
    transposed: bool, output: Tensor, input: Tensor, weight: Tensor, *options: Any
) -> Iterator[Gemm]:
    groups = options[-2 if transposed else -1] or 1
    channels, k, *kernel = weight.shape
    n, area = channels // groups, math.prod(kernel)
    if transposed:
        n, k = k, n
    each = f" in each of {groups} groups" if groups > 1 else ""
    parts = {"N": (n, f"output channels{each}"), "K": (k, f"input channels{each}")}
    if transposed:
        m, n = input.numel() // channels, n * area
    else:
        m, k = output.numel() // channels, k * area
    yield Gemm(m, n, k, groups, None, weight, parts=parts)


def _attention(
    output: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> Iterator[Gemm]:
    heads = output.shape[:-2].numel()
    (m, e), (s, v) = query.shape[-2:], value.shape[-2:]
    yield Gemm(m, s, e, heads, None, None, "")
    yield Gemm(m, v, s, heads, None, None, "")


def _recurrent(
    gates: int, output: Any, input: Tensor, hx: Any, *given: Any
) -> Iterator[Gemm]:
    """Describe a padded batch, or a packed one, whose batch sizes come before hx."""
    if isinstance(given[1], bool):
        weights, batch_first = given[0], given[-1]
        n, t = input.shape[:2] if batch_first else input.shape[1::-1]
        return _steps(gates, [n] * t, weights)
    return _steps(gates, hx.tolist(), given[1])


def _cell(
    gates: int, output: Any, input: Tensor, hx: Any, *weights: Tensor | None
) -> Iterator[Gemm]:
    return _steps(gates, [input.shape[:-1].numel()], weights)


def _steps(
    gates: int, sizes: Sequence[int], weights: Sequence[Tensor | None]
) -> Iterator[Gemm]:
    """Describe the steps with these batches, layer by layer."""
    matrices = [each for each in weights if each is not None and each.dim() == 2]
    of_inputs = False
    for weight in matrices:
        n, k = weight.shape
        gated = n == len(matrices[0])  # not the projection of a state
        of_inputs = gated and not of_inputs
        parts = {"N": (n // gates, f"rows in each of {gates} gates")}
        for m, count in ({sum(sizes): 1} if of_inputs else Counter(sizes)).items():
            options = parts if gated and gates > 1 else {}
            yield Gemm(m, n, k, count, None, weight, parts=options)


def _op(names: str, describe: Callable[..., Iterator[Gemm]]) -> Describe:
    """Bind the arguments of an op by the names that torch gives them."""

    def bound(output: Any, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[Gemm]:
        given = {**dict(zip(names.split(), args, strict=False)), **kwargs}
        return describe(output, *map(given.get, names.split()))

    return bound


_NET = "input hx params has_biases num_layers dropout train bidirectional batch_first"
_CELL = "input hx w_ih w_hh"
_CONV = "input weight bias stride padding dilation groups"
_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

GEMMS: dict[str, Describe] = {
    "linear": _op("input weight bias", _linear),
    "bilinear": _op("input1 input2 weight bias", _bilinear),
    **dict.fromkeys(("matmul", "linalg_matmul"), _op("input other", _pair)),
    **dict.fromkeys(("mm", "_int_mm", "bmm"), _op("input mat2", _pair)),
    "mv": _op("input vec", _pair),
    "addmm": _op("input mat1 mat2", _pair),
    "addmv": _op("input mat vec", _pair),
    "baddbmm": _op("input batch1 batch2", _pair),
    "einsum": _op("equation left right", _einsum),
    "tensordot": _op("a b dims", _tensordot),
    "scaled_dot_product_attention": _op("query key value", _attention),
    **{f"conv{d}d": _op(_CONV, partial(_conv, False)) for d in (1, 2, 3)},
    **{
        f"conv_transpose{d}d": _op(_TRANSPOSED, partial(_conv, True)) for d in (1, 2, 3)
    },
    **{name: _op(_NET, partial(_recurrent, each)) for name, each in _GATES.items()},
    **{f"{name}_cell": _op(_CELL, partial(_cell, g)) for name, g in _GATES.items()},
}
"""By the name of the function that a model calls."""
