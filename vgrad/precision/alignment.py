"""Which matrix products of a model have sizes that slow tensor cores down.

Tensor cores multiply small blocks: sizes should be multiples of 8 for 16-bit floats and
of 16 for 8-bit types. Every product is seen as a GEMM, `[M, K] @ [K, N]`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode

from vgrad import checks
from vgrad.functional.model import BufferlessModel
from vgrad.generators import RNG_LOCK
from vgrad.precision.gemms import GEMMS, Gemm
from vgrad.torch_private import modes
from vgrad.torch_private.tensors import memory
from vgrad.tree import tree_leaves
from vgrad.typing import Buffers, Params


class Row(NamedTuple):
    """One distinct product `[M, K] @ [K, N]`.

    Attributes:
        names: the parameters and buffers that are operands.
        op: the function that the model calls.
        m, n, k: the sizes; K is summed over.
        count: calls, times the matrices of a batch, the groups or the time steps.
        flops: floating-point operations of all of them, `2 * m * n * k * count`.
        share: these among those of all rows.
        pad: what to pad to, by the misaligned of `"M"`, `"N"` and `"K"`.
        advice: the same in words, by parameter where there is one.
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
class AlignmentReport:
    """What `alignment_report` finds; `str` makes a table of it.

    Attributes:
        multiple: what sizes should be multiples of.
        rows: the products, in the order of the forward pass.
    """

    multiple: int
    rows: tuple[Row, ...]

    @property
    def misaligned(self) -> float:
        """The share of the work that is in products with a misaligned size."""
        return sum(row.share for row in self.rows if row.pad)

    def __str__(self) -> str:
        """Return an aligned table in plain text, and advice."""
        lines = [_HEAD]
        for row in self.rows:
            pad = ", ".join(f"{side}={to}" for side, to in row.pad.items())
            numbers = [f"{number:,}" for number in row[2:7]]
            names = ", ".join(row.names)
            lines.append([names, row.op, *numbers, f"{row.share:.1%}", pad])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        cell = "{:{}{}}".format
        rows = ("  ".join(map(cell, line, "<<>>>>>><", widths)) for line in lines)
        table = [row.rstrip() for row in rows]
        total = sum(row.flops for row in self.rows)
        told = f"{self.misaligned:.1%} of {total:,} floating-point operations are in "
        told += f"products with a size that is no multiple of {self.multiple}"
        advice = dict.fromkeys(text for row in self.rows for text in row.advice)
        return "\n".join([told, "", *table, "", *(advice or ["nothing to pad"])])


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

    `fmodel` is what `make_functional_with_buffers` returns, a policy for it or a batch
    loss. It runs once without autograd; random generators are restored. On the device
    `meta` that costs nothing.

    A layer has M = batch times positions, N = outputs and K = inputs; a convolution has
    those of a group, with K (N, if it is transposed) times the size of the kernel.
    Attention has two products a head. A recurrent net multiplies its inputs for all
    steps at once and its states step by step.

    N and K should be multiples of `multiple`: 8 for 16-bit floats, 16 for 8-bit types.
    So should M unless it is the batch dimension, as in attention; where a parameter is
    the left operand, M and K are its sizes and N is the batch dimension.

    Leaves out compiled or scripted code, backward passes and an `einsum` of more than
    two operands.

    Raises:
        TypeError: `fmodel` is a module or takes no buffers; `params` or `buffers` is no
            dictionary.
        ValueError: `multiple` is no whole number above zero; a product is inside a
            transform of `torch.func`, where sizes may be those of one sample.

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
            f"*args), got a {type(fmodel).__name__}. Pass what "
            f"make_functional_with_buffers returns."
        )
    checks.dictionaries("alignment_report", params=params, buffers=buffers)
    [multiple] = checks.whole("alignment_report", least=1, multiple=multiple)
    leaves = tree_leaves((params, buffers, args, kwargs))
    cuda = {x.device.index for x in leaves if isinstance(x, Tensor) and x.is_cuda}
    watch = _Watch({**params, **buffers}, multiple)
    with RNG_LOCK, torch.random.fork_rng(devices=cuda), torch.no_grad(), watch:
        fmodel(params, buffers, *args, **kwargs)
    return AlignmentReport(multiple, tuple(watch.rows()))


class _Known(NamedTuple):
    """A parameter's name and shape, and the parameter itself or a cast of it."""

    name: str
    shape: torch.Size
    tensor: Tensor


class _Watch(TorchFunctionMode):
    """Records every product, and which tensors are views or casts of a parameter."""

    def __init__(self, tensors: Mapping[str, Tensor], multiple: int) -> None:
        """Note where the parameters lie."""
        super().__init__()
        self._multiple = multiple
        self._counts: Counter[tuple] = Counter()
        self._known: dict[int, list[_Known]] = {}  # by storage
        for name, tensor in tensors.items():
            known = _Known(name, tensor.shape, tensor)
            self._known.setdefault(_storage(tensor), []).append(known)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run a call, and note the products in it."""
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
                    f"those of one sample. Report on the model itself, with a batch."
                )
            for gemm in GEMMS[op](output, args, kwargs):
                self._note(op, gemm)
        elif op in _COPIES and args and isinstance(output, Tensor):
            # Copies live until the end, so that no other tensor gets their memory.
            copies = [each._replace(tensor=output) for each in self._among(args[0])]
            if copies:
                self._known.setdefault(_storage(output), copies)
        return output

    def rows(self) -> Iterator[Row]:
        """Yield what was found."""
        flops = {key: 2 * math.prod(key[2:5]) * n for key, n in self._counts.items()}
        total = sum(flops.values()) or 1
        for key, count in self._counts.items():
            names, op, m, n, k, pad, advice = key
            own = flops[key]
            yield Row(names, op, m, n, k, count, own, own / total, dict(pad), advice)

    def _among(self, tensor: Tensor | None) -> list[_Known]:
        """Return the parameters of which a tensor is a view or a cast."""
        if tensor is None or not (storage := _storage(tensor)):
            return []
        at = tensor.storage_offset()
        return [
            each
            for each in self._known.get(storage, [])
            if 0 <= at - each.tensor.storage_offset() < each.tensor.numel()
        ]

    def _note(self, op: str, gemm: Gemm) -> None:
        """Count a product."""
        left, right = self._among(gemm.left), self._among(gemm.right)
        batch = gemm.batch
        if left or right:  # the batch is on the other side
            batch = "M" if not left else "N" if not right else ""
        pad: dict[str, int] = {}
        advice: list[str] = []
        for side, size in zip("MNK", gemm[:3], strict=True):
            if side == batch or size % self._multiple == 0:
                continue
            number, word = gemm.parts.get(side, (size, ""))
            unit = size // number
            step = self._multiple // math.gcd(self._multiple, unit)
            to = math.ceil(number / step) * step
            pad[side] = unit * to
            advice += [
                f"pad {each.name} from {number} to {to} {what}"
                for each in left + right
                for what in ([word] if word else _sides(each.shape, size))
            ] or [f"pad {side} of {op} from {size} to {unit * to}"]
        names = tuple(dict.fromkeys(each.name for each in left + right))
        key = (names, op, *gemm[:3], tuple(pad.items()), tuple(advice))
        self._counts[key] += gemm.count


_COPIES = {"to", "type", "type_as", "half", "bfloat16", "float", "double", "cuda"}
_COPIES |= {"clone", "contiguous"}


def _is_wrapped(func: Callable) -> bool:
    """Tell whether a function comes from `wrap_torch_function`, under any name."""
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
