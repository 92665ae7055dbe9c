"""A report of the matrix products of a model whose sizes slow tensor cores down.

All products of torch end in a few ops below autograd and its transforms, where a
dispatch mode counts them, as torch's own `FlopCounterMode` does.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vgrad import checks
from vgrad.functional.model import BufferlessModel
from vgrad.generators import kept_random_state
from vgrad.report import Report, table
from vgrad.torch_private.tensors import memory, op_name
from vgrad.torch_private.tracing import DispatchMode
from vgrad.tree import tensors
from vgrad.typing import Buffers, Params


class Row(NamedTuple):
    """All products `[M, K] @ [K, N]` of one op, operand and size."""

    op: str  # of aten, such as `addmm` in a linear layer
    operand: str  # the parameter or buffer among the factors, or "" for none
    size: tuple[int, int, int]  # M, N and K
    padded: tuple[int, int, int]
    share: float = 0.0  # of the operations of all rows


@dataclass(frozen=True)
class AlignmentReport(Report):
    """The result of `alignment_report`: rows in the order of the forward pass."""

    rows: tuple[Row, ...]

    @property
    def misaligned(self) -> float:
        """The share of the products of which a size has to be padded."""
        return sum(row.share for row in self.rows if row.size != row.padded)

    def __str__(self) -> str:
        lines = [["op", "operand", "M, N, K", "padded to", "share"]]
        lines += [[*map(str, row[:4]), f"{row.share:.1%}"] for row in self.rows]
        return f"{self.misaligned:.1%} of the work is misaligned\n\n{table(lines)}"


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

    A layer has M = batch times positions, N = outputs and K = inputs, a convolution K =
    channels times kernel. N and K should be multiples of `multiple`: 8 for 16-bit
    floats, 16 for 8-bit types. So should M, unless it is a batch. The function runs
    once, which costs nothing on the device `meta`; compiled code and backward passes
    are left out. Recurrent nets have to be on `meta`, where they are linear maps.

    Raises:
        TypeError: `fmodel` is a module or takes no buffers.
        RuntimeError: a recurrent net runs as one kernel of its device.

    Reference: PyTorch, Performance Tuning Guide, "set sizes to multiples of 8".

    Example:
        >>> import vgrad
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
        >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        >>> report = alignment_report(fmodel, params, buffers, torch.ones(16, 64))
        >>> report.rows[1][:4]
        ('addmm', '1.weight', (16, 10, 32), (16, 16, 32))
    """
    if isinstance(fmodel, nn.Module | BufferlessModel) or not callable(fmodel):
        raise TypeError(
            f"alignment_report(fmodel): expected a function of (params, buffers, "
            f"*args), got a {type(fmodel).__name__}. Make it with "
            f"make_functional_with_buffers."
        )
    checks.dictionaries("alignment_report", params=params, buffers=buffers)
    [multiple] = checks.integers("alignment_report", minimum=1, multiple=multiple)
    recorder = _Recorder({**params, **buffers}, multiple)
    seen = tensors((params, buffers, args, kwargs))
    with kept_random_state(seen), torch.no_grad(), recorder:
        fmodel(params, buffers, *args, **kwargs)
    work = {row: math.prod(row.size) * n for row, n in recorder.counts.items()}
    total = sum(work.values()) or 1
    rows = (row._replace(share=part / total) for row, part in work.items())
    return AlignmentReport(tuple(rows))


class _Recorder(DispatchMode):
    """Counts products by op, operands (views or casts of parameters) and sizes."""

    def __init__(self, named: dict[str, Tensor], multiple: int) -> None:
        super().__init__()
        self.counts: Counter[Row] = Counter()
        self._multiple = multiple
        self._named = [(name, tensor) for name, tensor in named.items()]  # and copies

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with self:  # in inference mode composite ops come here, too
            output = func.decompose(*args, **(kwargs or {}))
        if output is NotImplemented:
            output, op = func(*args, **(kwargs or {})), op_name(func)
            if "rnn" in op:
                raise RuntimeError(
                    f"alignment_report(fmodel): expected a recurrent net on the device "
                    f"meta, got {op}, whose products are in one kernel. Pass tensors "
                    f'moved by .to("meta").'
                )
            for size, units, factors, batch, count in _products(op, args, output):
                left, right = (self._names(factor) for factor in factors)
                if left or right:  # the batch is on the other side
                    batch = 0 if not left else 1 if not right else None
                operand = ", ".join(dict.fromkeys(left + right))
                padded = [*size]
                for side, (n, unit) in enumerate(zip(size, units, strict=True)):
                    if side != batch and n:
                        # Units of one kind, such as channels, are padded.
                        step = math.lcm(self._multiple, n // unit)
                        padded[side] = -(-n // step) * step
                self.counts[Row(op, operand, size, (*padded,))] += count
            if op in ("_to_copy", "clone"):  # which live until the end
                self._named += [(name, output) for name in self._names(args[0])]
        return output

    def _names(self, tensor: Tensor | None) -> list[str]:
        if tensor is None or not (storage := memory(tensor)):
            return []
        at = tensor.storage_offset()
        return [
            name
            for name, parameter in self._named
            if memory(parameter) == storage
            and 0 <= at - parameter.storage_offset() < parameter.numel()
        ]


_MATRICES = {"mm": 0, "_int_mm": 0, "bmm": 0, "mv": 0}
_MATRICES |= {"addmm": 1, "baddbmm": 1, "addmv": 1}
"""The place of the left operand, which the right one follows."""


def _products(op: str, args: tuple, output: Any) -> Iterator[tuple]:
    """Yield size, numbers to be padded in it, factors, the batch's place, how often."""
    if op in _MATRICES:
        left, right = args[_MATRICES[op] :][:2]
        n = right.shape[-1] if right.dim() > 1 else 1
        size, flat = (left.shape[-2], n, left.shape[-1]), left.dim() < 3
        yield size, size, (left, right), 0 if flat else None, 1 if flat else len(left)
    elif op == "convolution":
        input, weight, *_, transposed, _, groups = args
        channels, k, *kernel = weight.shape
        n, area = channels // groups, math.prod(kernel)
        m = (input if transposed else output).numel() // channels
        units = (m, k, n) if transposed else (m, n, k)
        size = (m, k * area, n) if transposed else (m, n, k * area)
        yield size, units, (None, weight), 0, groups
    elif op.startswith("_scaled_dot_product"):
        query, _, value = args[:3]
        (m, e), (s, v) = query.shape[-2:], value.shape[-2:]
        for size in ((m, s, e), (m, v, s)):
            yield size, size, (None, None), None, query.shape[:-2].numel()
