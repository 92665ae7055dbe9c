"""A report of the matrix products of a model whose sizes slow tensor cores down.

All products of torch end in a few ops below autograd and its transforms, where a
dispatch mode counts them, as torch's own `FlopCounterMode` does.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vgrad import checks
from vgrad.functional.model import BufferlessModel
from vgrad.generators import kept_random_state
from vgrad.ops.record import OPS
from vgrad.report import Report, table
from vgrad.torch_private.tensors import memory, op_name
from vgrad.torch_private.tracing import DispatchMode
from vgrad.tree import tensors
from vgrad.typing import Buffers, Params


class Row(NamedTuple):
    """One distinct product `[M, K] @ [K, N]`."""

    names: tuple[str, ...]  # of the parameters and buffers that are operands
    op: str  # of aten, such as `addmm` in a linear layer
    m: int
    n: int
    k: int
    count: int  # calls, times the matrices of a batch, the groups or the time steps
    flops: int  # of all of them, 2 * m * n * k * count
    share: float  # of the flops of all rows
    pad: dict[str, int]  # the size to pad to, by the misaligned of "M", "N" and "K"
    advice: tuple[str, ...]  # the same in words, per parameter if there is one


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
    once and its states step by step. A product under `torch.vmap` has the sizes of all
    samples together.

    N and K should be multiples of `multiple`: 8 for 16-bit floats, 16 for 8-bit types.
    So should M unless it is the batch dimension (it is not in attention). If a
    parameter is the left operand, M and K are its sizes and N is the batch dimension.

    Compiled code, backward passes and `nn.Bilinear`, which is no matrix product, are
    left out.

    Raises:
        TypeError: `fmodel` is a module or takes no buffers.

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
    recorder = _Recorder({**params, **buffers}, multiple)
    seen = tensors((params, buffers, args, kwargs))
    with kept_random_state(seen), torch.no_grad():
        with recorder, _StepByStep(recorder):
            fmodel(params, buffers, *args, **kwargs)
    return AlignmentReport(multiple, tuple(recorder.rows()))


class _Operand(NamedTuple):
    name: str
    shape: torch.Size
    tensor: Tensor  # the parameter itself or a cast of it


class _Gemm(NamedTuple):
    """As many products `[M, K] @ [K, N]` of the same sizes as `count`."""

    m: int
    n: int
    k: int
    count: int = 1
    left: Tensor | None = None  # operands that may be parameters
    right: Tensor | None = None
    batch: str = ""  # the size that is a batch dimension if neither is one
    # Number and name of units in N and K, such as channels, if right is no matrix.
    units: Mapping[str, tuple[int, str]] = {}


class _Recorder(DispatchMode):
    """Records every product, and which tensors are views or casts of a parameter."""

    def __init__(self, tensors: Mapping[str, Tensor], multiple: int) -> None:
        super().__init__()
        self._multiple = multiple
        self._counts: Counter[tuple] = Counter()
        self._operands: dict[int, list[_Operand]] = {}  # by storage
        self.gates: tuple[int, int] | None = None
        for name, tensor in tensors.items():
            operand = _Operand(name, tensor.shape, tensor)
            self._operands.setdefault(memory(tensor) or 0, []).append(operand)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op = op_name(func)
        with self:  # in inference mode composite ops come here, too
            output = func.decompose(*args, **kwargs)
        if output is not NotImplemented:
            return output
        output = func(*args, **kwargs)
        for gemm in _gemms(op, args, output):
            self._count(op, gemm)
        if op in ("_to_copy", "clone"):
            # Copies live until the end, so that no other tensor gets their memory.
            copies = [x._replace(tensor=output) for x in self._operands_of(args[0])]
            if copies:
                self._operands.setdefault(memory(output) or 0, copies)
        return output

    def rows(self) -> Iterator[Row]:
        flops = {key: 2 * math.prod(key[2:5]) * n for key, n in self._counts.items()}
        total = sum(flops.values()) or 1
        for key, count in self._counts.items():
            names, op, m, n, k, pad, advice = key
            share = flops[key] / total
            yield Row(names, op, m, n, k, count, flops[key], share, dict(pad), advice)

    def _operands_of(self, tensor: Tensor | None) -> list[_Operand]:
        if tensor is None or not (storage := memory(tensor)):
            return []
        at = tensor.storage_offset()
        return [
            operand
            for operand in self._operands.get(storage, [])
            if 0 <= at - operand.tensor.storage_offset() < operand.tensor.numel()
        ]

    def _count(self, op: str, gemm: _Gemm) -> None:
        left, right = self._operands_of(gemm.left), self._operands_of(gemm.right)
        batch, units = gemm.batch, {**gemm.units}
        if left or right:  # the batch is on the other side
            batch = "M" if not left else "N" if not right else ""
        if right and self.gates is not None and self.gates[0] == gemm.n:
            rows, gates = self.gates
            units["N"] = rows // gates, f"rows in each of {gates} gates"
        pad: dict[str, int] = {}
        advice: list[str] = []
        for side, size in zip("MNK", gemm[:3], strict=True):
            if side == batch or size % self._multiple == 0:
                continue
            number, word = units.get(side, (size, ""))
            unit = size // number
            step = self._multiple // math.gcd(self._multiple, unit)
            padded = math.ceil(number / step) * step
            pad[side] = unit * padded
            advice += [
                f"pad {operand.name} from {number} to {padded} {sides}"
                for operand in left + right
                for sides in ([word] if word else _sides(operand.shape, size))
            ] or [f"pad {side} of {op} from {size} to {pad[side]}"]
        names = tuple(dict.fromkeys(operand.name for operand in left + right))
        key = (names, op, *gemm[:3], tuple(pad.items()), tuple(advice))
        self._counts[key] += gemm.count


class _StepByStep(TorchFunctionMode):
    """Runs recurrent nets as linear maps, as torch does on packed sequences."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        gates = _GATES.get(getattr(func, "__name__", ""))
        if gates is None:
            return func(*args, **kwargs)
        # The first weight has the rows of all gates; biases have no columns.
        rows = next(len(weight) for weight in tensors(args[2:]) if weight.dim() == 2)
        self._recorder.gates = (rows, gates) if gates > 1 else None
        packed = len(args) > 4 and isinstance(args[3], list | tuple)
        try:
            run: Any = func if packed else OPS[func].mapped
            return run(*args, **kwargs)
        finally:
            self._recorder.gates = None


_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_GATES |= {f"{op}_cell": gates for op, gates in _GATES.items()}


def _sides(shape: torch.Size, size: int) -> Iterator[str]:
    if len(shape) == 2:
        names = zip(("rows", "columns"), shape, strict=True)
        yield from (name for name, length in names if length == size)


_MATRICES = {"mm": 0, "_int_mm": 0, "bmm": 0, "mv": 0}
_MATRICES |= {"addmm": 1, "baddbmm": 1, "addmv": 1}
"""The place of the left operand, which the right one follows."""


def _gemms(op: str, args: tuple, output: Any) -> list[_Gemm]:
    if op in _MATRICES:
        left, right = args[_MATRICES[op] :][:2]
        count, batch = (len(left), "") if left.dim() == 3 else (1, "M")
        n = right.shape[-1] if right.dim() > 1 else 1
        return [_Gemm(left.shape[-2], n, left.shape[-1], count, left, right, batch)]
    if op == "convolution":
        input, weight, *_, transposed, _, groups = args
        channels, k, *kernel = weight.shape
        n, area = channels // groups, math.prod(kernel)
        n, k = (k, n) if transposed else (n, k)
        each = f" in each of {groups} groups" if groups > 1 else ""
        units = {"N": (n, f"output channels{each}"), "K": (k, f"input channels{each}")}
        m = (input if transposed else output).numel() // channels
        n, k = (n * area, k) if transposed else (n, k * area)
        return [_Gemm(m, n, k, groups, None, weight, "M", units)]
    if op.startswith("_scaled_dot_product"):
        query, _, value = args[:3]
        heads = query.shape[:-2].numel()
        (m, e), (s, v) = query.shape[-2:], value.shape[-2:]
        return [_Gemm(m, s, e, heads), _Gemm(m, v, s, heads)]
    return []
