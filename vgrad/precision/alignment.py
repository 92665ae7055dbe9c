"""A report of the matrix products of a model whose sizes slow tensor cores down.

Tensor cores multiply small blocks: sizes should be multiples of 8 for 16-bit floats and
of 16 for 8-bit types. Every product is described as a GEMM, `[M, K] @ [K, N]`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode

from vgrad import checks
from vgrad.functional.model import BufferlessModel
from vgrad.generators import RNG_LOCK
from vgrad.report import Report, table
from vgrad.torch_private import modes
from vgrad.torch_private.tensors import memory
from vgrad.tree import tree_leaves
from vgrad.typing import Buffers, Params


class Row(NamedTuple):
    """One distinct product `[M, K] @ [K, N]`.

    Attributes:
        names: the parameters and buffers that are operands.
        op: the function that the model calls.
        count: calls, times the matrices of a batch, the groups or the time steps.
        flops: floating-point operations of all of them, `2 * m * n * k * count`.
        share: `flops` over the sum of all rows.
        pad: the size to pad to, by the misaligned of `"M"`, `"N"` and `"K"`.
        advice: the same in words, per parameter if there is one.
    """

    names: tuple[str, ...]
    op: str
    m: int
    n: int
    k: int
    count: int
    flops: int
    share: float
    pad: dict[str, int]
    advice: tuple[str, ...]


_HEAD = ["parameter", "op", "M", "N", "K", "count", "flops", "share", "pad to"]


@dataclass(frozen=True)
class AlignmentReport(Report):
    """The result of `alignment_report`.

    Attributes:
        multiple: sizes should be multiples of it.
        rows: the products, in the order of the forward pass.
    """

    multiple: int
    rows: tuple[Row, ...]

    @property
    def misaligned(self) -> float:
        """The share of the flops in products with a misaligned size."""
        return sum(row.share for row in self.rows if row.pad)

    def __str__(self) -> str:
        lines: list[list[str | int]] = [[*_HEAD]]
        for row in self.rows:
            pad = ", ".join(f"{side}={to}" for side, to in row.pad.items())
            names = ", ".join(row.names)
            lines.append([names, row.op, *row[2:7], f"{row.share:.1%}", pad])
        text = table(lines, right={*range(2, 8)})
        total = f"{sum(row.flops for row in self.rows):,} floating-point operations"
        summary = f"{self.misaligned:.1%} of {total} are in products with a size that "
        summary += f"is no multiple of {self.multiple}"
        advice = dict.fromkeys(text for row in self.rows for text in row.advice)
        return "\n".join([summary, "", text, "", *(advice or ["nothing to pad"])])


def alignment_report(
    fmodel: Callable[..., Any],
    params: Params,
    buffers: Buffers,
    /,
    *args: Any,
    multiple: int = 8,
    **kwargs: Any,
) -> AlignmentReport:
    """List the matrix products of `fmodel(params, buffers, *args, **kwargs)`.

    `fmodel` comes from `make_functional_with_buffers` or `policy_for`, or is a batch
    loss. It runs once without autograd; on the device `meta` that costs nothing.

    A layer has M = batch times positions, N = outputs and K = inputs. A convolution has
    one product per group, with K (N, if it is transposed) times the size of the kernel;
    attention has two per head. A recurrent net multiplies its inputs for all steps at
    once and its states step by step.

    N and K should be multiples of `multiple`: 8 for 16-bit floats, 16 for 8-bit types.
    So should M unless it is the batch dimension (it is not in attention). If a
    parameter is the left operand, M and K are its sizes and N is the batch dimension.

    Compiled or scripted code, backward passes and an `einsum` of more than two operands
    are left out.

    Raises:
        TypeError: `fmodel` is a module or takes no buffers.
        ValueError: a product is inside a transform of `torch.func`.

    Reference: PyTorch, Performance Tuning Guide, "set sizes to multiples of 8".

    Example:
        >>> import vgrad
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
        >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        >>> report = alignment_report(fmodel, params, buffers, torch.ones(16, 64))
        >>> round(report.misaligned, 3), report.rows[1].pad
        (0.135, {'N': 16})
        >>> print(str(report).splitlines()[-1])
        pad 1.weight from 10 to 16 rows
    """
    if isinstance(fmodel, nn.Module | BufferlessModel) or not callable(fmodel):
        raise TypeError(
            f"alignment_report(fmodel): expected a function of (params, buffers, "
            f"*args), got a {type(fmodel).__name__}. Make it with "
            f"make_functional_with_buffers."
        )
    checks.dictionaries("alignment_report", params=params, buffers=buffers)
    [multiple] = checks.whole("alignment_report", least=1, multiple=multiple)
    leaves = tree_leaves((params, buffers, args, kwargs))
    cuda = {x.device.index for x in leaves if isinstance(x, Tensor) and x.is_cuda}
    recorder = _Recorder({**params, **buffers}, multiple)
    with RNG_LOCK, torch.random.fork_rng(devices=cuda), torch.no_grad(), recorder:
        fmodel(params, buffers, *args, **kwargs)
    return AlignmentReport(multiple, tuple(recorder.rows()))


class _Operand(NamedTuple):
    """A parameter's name and shape, and the parameter itself or a cast of it."""

    name: str
    shape: torch.Size
    tensor: Tensor


class _Recorder(TorchFunctionMode):
    """Records every product, and which tensors are views or casts of a parameter."""

    def __init__(self, tensors: Mapping[str, Tensor], multiple: int) -> None:
        super().__init__()
        self._multiple = multiple
        self._counts: Counter[tuple] = Counter()
        self._operands: dict[int, list[_Operand]] = {}  # by storage
        for name, tensor in tensors.items():
            operand = _Operand(name, tensor.shape, tensor)
            self._operands.setdefault(_storage(tensor), []).append(operand)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = modes.op_name(func).removesuffix("_")
        if _is_wrapped(func) or (op not in GEMMS and modes.is_python(func)):
            with self:
                return modes.opened(func)(*args, **kwargs)
        output = func(*args, **kwargs)
        if op in GEMMS:
            if modes.inside_transform():
                raise ValueError(
                    f"alignment_report(fmodel): expected a forward pass outside of the "
                    f"transforms of torch.func, got {op} inside, where sizes may be "
                    f"per sample. Report on the model itself, with a batch."
                )
            describe, names = GEMMS[op]
            bound = {**dict(zip(names.split(), args, strict=False)), **kwargs}
            for gemm in describe(output, *map(bound.get, names.split())):
                self._count(op, gemm)
        elif op in _COPIES and args and isinstance(output, Tensor):
            # Copies live until the end, so that no other tensor gets their memory.
            copies = [x._replace(tensor=output) for x in self._operands_of(args[0])]
            if copies:
                self._operands.setdefault(_storage(output), copies)
        return output

    def rows(self) -> Iterator[Row]:
        flops = {key: 2 * math.prod(key[2:5]) * n for key, n in self._counts.items()}
        total = sum(flops.values()) or 1
        for key, count in self._counts.items():
            names, op, m, n, k, pad, advice = key
            share = flops[key] / total
            yield Row(names, op, m, n, k, count, flops[key], share, dict(pad), advice)

    def _operands_of(self, tensor: Tensor | None) -> list[_Operand]:
        """Return the parameters that a tensor is a view or a cast of."""
        if tensor is None or not (storage := _storage(tensor)):
            return []
        at = tensor.storage_offset()
        return [
            operand
            for operand in self._operands.get(storage, [])
            if 0 <= at - operand.tensor.storage_offset() < operand.tensor.numel()
        ]

    def _count(self, op: str, gemm: "Gemm") -> None:
        left, right = self._operands_of(gemm.left), self._operands_of(gemm.right)
        batch = gemm.batch
        if left or right:  # the batch is on the other side
            batch = "M" if not left else "N" if not right else ""
        pad: dict[str, int] = {}
        advice: list[str] = []
        for side, size in zip("MNK", gemm[:3], strict=True):
            if side == batch or size % self._multiple == 0:
                continue
            number, word = gemm.units.get(side, (size, ""))
            unit = size // number
            step = self._multiple // math.gcd(self._multiple, unit)
            padded = math.ceil(number / step) * step
            pad[side] = unit * padded
            advice += [
                f"pad {operand.name} from {number} to {padded} {units}"
                for operand in left + right
                for units in ([word] if word else _sides(operand.shape, size))
            ] or [f"pad {side} of {op} from {size} to {pad[side]}"]
        names = tuple(dict.fromkeys(operand.name for operand in left + right))
        key = (names, op, *gemm[:3], tuple(pad.items()), tuple(advice))
        self._counts[key] += gemm.count


_COPIES = {"to", "type", "type_as", "half", "bfloat16", "float", "double", "cuda"}
_COPIES |= {"clone", "contiguous"}


def _is_wrapped(func: Callable) -> bool:
    """Return whether a function comes from `wrap_torch_function`, under any name."""
    return isinstance(func, FunctionType) and func.__globals__ is vars(overrides)


def _storage(tensor: Tensor) -> int:
    """Identify the memory of a tensor and its views; 0 if it has none."""
    if tensor.layout != torch.strided or modes.is_wrapped(tensor):
        return 0
    return memory(tensor) or 0


def _sides(shape: torch.Size, size: int) -> Iterator[str]:
    """Yield the sides of a matrix that have this size, transposed or not."""
    if len(shape) == 2:
        names = zip(("rows", "columns"), shape, strict=True)
        yield from (name for name, length in names if length == size)


class Gemm(NamedTuple):
    """As many products `[M, K] @ [K, N]` of the same sizes as `count`.

    Attributes:
        left, right: the operands that may be parameters.
        batch: the size that is a batch dimension if neither is one, or `""`.
        units: for N and K, the number and the name of the units in them (such as
            channels), if the right operand is no matrix.
    """

    m: int
    n: int
    k: int
    count: int
    left: Tensor | None
    right: Tensor | None
    batch: str = "M"
    units: Mapping[str, tuple[int, str]] = {}


def _contracted(
    left: Tensor, rows: str, right: Tensor, columns: str, kept: str
) -> Iterator[Gemm]:
    """Describe a sum over axes that two tensors share, if it multiplies a matrix."""
    a, b = _axes(rows, left), _axes(columns, right)
    output = {axis for axis in a | b if axis in kept or (axis < "." and "..." in kept)}
    common = a.keys() & b.keys()
    m = [a[axis] for axis in output - b.keys()]
    n = [b[axis] for axis in output - a.keys()]
    k = [min(a[axis], b[axis]) for axis in common - output]
    if k and (m or n):
        count = math.prod(max(a[axis], b[axis]) for axis in common & output)
        batch = "" if common & output else "N" if len(n) > len(m) else "M"
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
        kept = "..." + "".join(axis for axis in inputs if inputs.count(axis) == 1)
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


def _linear(output: Tensor, input: Tensor, weight: Tensor) -> Iterator[Gemm]:
    *n, k = weight.shape
    yield Gemm(input.shape[:-1].numel(), math.prod(n), k, 1, None, weight)


def _bilinear(
    output: Tensor, input1: Tensor, input2: Tensor, weight: Tensor
) -> Iterator[Gemm]:
    n, i, j = weight.shape
    units = {"N": (n, "outputs"), "K": (j, "features of the second input")}
    yield Gemm(output.numel() // n, n, i * j, 1, None, weight, units=units)


def _conv(
    transposed: bool, output: Tensor, input: Tensor, weight: Tensor, *options: Any
) -> Iterator[Gemm]:
    groups = options[-2 if transposed else -1] or 1
    channels, k, *kernel = weight.shape
    n, area = channels // groups, math.prod(kernel)
    n, k = (k, n) if transposed else (n, k)
    each = f" in each of {groups} groups" if groups > 1 else ""
    units = {"N": (n, f"output channels{each}"), "K": (k, f"input channels{each}")}
    m = (input if transposed else output).numel() // channels
    n, k = (n * area, k) if transposed else (n, k * area)
    yield Gemm(m, n, k, groups, None, weight, units=units)


def _attention(
    output: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> Iterator[Gemm]:
    heads = output.shape[:-2].numel()
    (m, e), (s, v) = query.shape[-2:], value.shape[-2:]
    yield Gemm(m, s, e, heads, None, None, "")
    yield Gemm(m, v, s, heads, None, None, "")


def _recurrent(
    gates: int, output: Any, input: Tensor, hx: Any, *rest: Any
) -> Iterator[Gemm]:
    """Describe the steps of a net or a cell, layer by layer.

    A packed batch has its batch sizes before hx; the weights of a cell come one by one.
    """
    if len(rest) == 2:
        sizes, weights = [input.shape[:-1].numel()], rest
    elif isinstance(rest[1], bool):
        weights, batch_first = rest[0], rest[-1]
        n, t = input.shape[:2] if batch_first else input.shape[1::-1]
        sizes = [n] * t
    else:
        sizes, weights = hx.tolist(), rest[1]
    matrices = [x for x in weights if x.dim() == 2]
    of_inputs = False
    for weight in matrices:
        n, k = weight.shape
        gated = n == len(matrices[0])  # not the projection of a state
        of_inputs = gated and not of_inputs
        units = {"N": (n // gates, f"rows in each of {gates} gates")}
        for m, count in ({sum(sizes): 1} if of_inputs else Counter(sizes)).items():
            options = units if gated and gates > 1 else {}
            yield Gemm(m, n, k, count, None, weight, units=options)


_NET = "input hx params has_biases num_layers dropout train bidirectional batch_first"
_CELL = "input hx w_ih w_hh"
_CONV = "input weight bias stride padding dilation groups"
_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"

_PRODUCTS = {
    "linear": (_linear, "input weight"),
    "bilinear": (_bilinear, "input1 input2 weight"),
    "matmul linalg_matmul": (_pair, "input other"),
    "mm _int_mm bmm": (_pair, "input mat2"),
    "mv": (_pair, "input vec"),
    "addmm": (_pair, "input mat1 mat2"),
    "addmv": (_pair, "input mat vec"),
    "baddbmm": (_pair, "input batch1 batch2"),
    "einsum": (_einsum, "equation left right"),
    "tensordot": (_tensordot, "a b dims"),
    "scaled_dot_product_attention": (_attention, "query key value"),
    "conv1d conv2d conv3d": (partial(_conv, False), _CONV),
    "conv_transpose1d conv_transpose2d conv_transpose3d":
        (partial(_conv, True), _TRANSPOSED),
    "lstm": (partial(_recurrent, 4), _NET),
    "gru": (partial(_recurrent, 3), _NET),
    "rnn_tanh rnn_relu": (partial(_recurrent, 1), _NET),
    "lstm_cell": (partial(_recurrent, 4), _CELL),
    "gru_cell": (partial(_recurrent, 3), _CELL),
    "rnn_tanh_cell rnn_relu_cell": (partial(_recurrent, 1), _CELL),
}  # fmt: skip

GEMMS = {op: row for ops, row in _PRODUCTS.items() for op in ops.split()}
"""By the function that a model calls, a description and its arguments by name."""
