"""What a clipped step must cost at least: `python -m bench.floor [RESULTS.json]`.

Floating-point operations (torch's own counter) and bytes (the inputs and outputs of
every op that computes) of plain SGD's forward and backward pass and of vgrad's clipped
step are counted on the very batches that are timed. With the rates of the machine, each
taken as the best of some runs of one large product and of one large copy, they say how
long both would take if nothing else took any time. The quotient is the floor of the
ratio; the rest of the measured ratio is the gap: Python, allocation, products of shapes
that run below the best rate.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bench import suites
from bench.contenders import CLIPPED, plain
from bench.models import SETTINGS, TIMED
from vgrad.torch_private import modes


class Cost(NamedTuple):
    """What one run needs."""

    operations: float
    bytes: float

    def seconds(self, operations: float, bytes: float) -> float:
        """Time at these rates a second, one after the other."""
        return self.operations / operations + self.bytes / bytes


def _backward_of_convolution(out: Any, x: Any, w: Any, *rest: Any, **_: Any) -> int:
    """Each of the two gradients takes what the forward pass took.

    Torch's own formula takes the groups of a grouped convolution for channels.
    """
    transposed, mask = rest[4], rest[7]
    positions = math.prod((x if transposed else out)[2:])
    return 2 * (mask[0] + mask[1]) * x[0] * positions * math.prod(w)


def _lstm(x: Any, w_ih: Any, w_hh: Any, *_: Any, **__: Any) -> int:
    return 2 * x[0] * x[1] * (math.prod(w_ih) + math.prod(w_hh))


def _added(a: Any, *factors: Any, **_: Any) -> int:
    return 2 * math.prod(factors[0]) * factors[1][-1]


aten = torch.ops.aten
FORMULAS = {
    aten.convolution_backward: _backward_of_convolution,
    aten.mkldnn_rnn_layer: _lstm,
    aten.mkldnn_rnn_layer_backward: lambda *a, **k: 2 * _lstm(*a, **k),
    aten.addmm_: _added,
    aten.baddbmm_: _added,
}
"""What torch's counter does not know, or gets wrong."""


class Bytes(TorchDispatchMode):
    """Adds up launches and the sizes of operands and results; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.launches = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.launches += 1
            seen = {}
            for leaf in pytree.tree_leaves((args, kwargs, output)):
                if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                    # An expansion is read once.
                    used = zip(leaf.shape, leaf.stride(), strict=True)
                    numbers = 1
                    for size, step in used:
                        numbers *= size if step else 1
                    key = (leaf.data_ptr(), numbers)
                    seen[key] = numbers * leaf.element_size()
            self.total += sum(seen.values())
        return output


def cost(run: Callable[[], Any]) -> Cost:
    """Count one run."""
    run()
    with modes.flop_counter(FORMULAS) as operations:
        run()
    with Bytes() as moved:
        run()
    return Cost(operations.get_total_flops(), moved.total)


def rates() -> tuple[float, float]:
    """Operations and bytes a second, the best of some runs."""
    a, block = torch.randn(1024, 1024), torch.randn(2**26)
    target = torch.empty_like(block)
    product = best(lambda: torch.mm(a, a))
    copy = best(lambda: target.copy_(block))
    return 2 * 1024**3 / product, 2 * block.numel() * 4 / copy


def best(run: Callable[[], Any], times: int = 15) -> float:
    """Shortest time of a run in seconds."""
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        spent.append(time.perf_counter() - start)
    return min(spent)


def table(measured: dict[str, float]) -> str:
    """Return the table, with the measured ratio and the gap where there is one."""
    per_second = rates()
    lines = [
        f"{per_second[0] / 1e9:.0f} GFLOP/s, {per_second[1] / 1e9:.1f} GB/s, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}",
        "",
        "| setting | GFLOP plain | clipped / plain | GB plain | clipped / plain | "
        "floor | measured | gap |",
        "|" + " --- |" * 8,
    ]
    for name in TIMED:
        setting = SETTINGS[name]
        problem = setting.problem("cpu", torch.float32, setting.samples)
        base = cost(partial(plain(problem), *problem.batch))
        clipped = cost(partial(CLIPPED["vgrad"].build(problem), *problem.batch))
        floor = clipped.seconds(*per_second) / base.seconds(*per_second)
        ratio = measured.get(name)
        cells = [
            setting.title,
            f"{base.operations / 1e9:.2f}",
            f"{clipped.operations / base.operations:.2f}",
            f"{base.bytes / 1e9:.2f}",
            f"{clipped.bytes / base.bytes:.2f}",
            f"{floor:.2f}",
            "" if ratio is None else f"{ratio:.2f}",
            "" if ratio is None else f"{ratio - floor:+.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.floor", description=__doc__)
    parser.add_argument("results", type=Path, nargs="?")
    path = parser.parse_args().results
    rows: list[dict[str, Any]] = []
    if path is not None:
        rows = suites.rows(json.loads(path.read_text()))
    print(
        table(
            {
                row["setting"]: row["ratio_to_plain"]
                for row in rows
                if row["contender"] == "vgrad"
                and row["group"].startswith("clipped sum,")
            }
        )
    )
