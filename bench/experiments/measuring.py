"""Time and memory of functions that run side by side.

On a CPU memory is counted in bytes of live tensors, as torch's allocator counts them on
CUDA: what kernels allocate for themselves is not seen, so the growth of the resident
memory stands beside it.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.measure import Clock, sync
from bench.memory import above_base, measurable
from vgrad import tree


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that ops make in this block while they live.

    Attributes:
        peak: the most at any moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in inputs or key in self._live:
                continue
            self._live.add(key)
            self.now += (size := storage.nbytes())
            weakref.finalize(storage, self._freed, key, size)
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.now -= size


def peak_bytes(run: Callable[[], Any], device: str) -> dict[str, int]:
    """Measure what a function needs above what was there: tensors, resident memory.

    On CUDA both are what torch's allocator has handed out.
    """
    if device.startswith("cuda"):
        sync("cuda")
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        run()
        sync("cuda")
        return {"peak_bytes": torch.cuda.max_memory_allocated() - base}
    with LiveBytes() as live:
        run()
    needs = {"peak_bytes": live.peak}
    if measurable(device):
        needs["resident_bytes"] = int(above_base(run, device)["peak_bytes"])
    return needs


def tree_bytes(tensors: Any) -> int:
    """Sum the bytes of tensors, such as parameters or an optimizer's state."""
    return sum(
        tensor.numel() * tensor.element_size() for tensor in tree.tensors(tensors)
    )


def side_by_side(
    contenders: Mapping[str, Callable[[], Any]],
    device: str,
    *,
    rounds: int,
    warmup: int = 1,
) -> dict[str, dict[str, float]]:
    """Run all contenders in each round; return the median seconds of each."""
    kind = device.partition(":")[0]
    clocks = {name: Clock(run, kind) for name, run in contenders.items()}
    for _ in range(warmup + rounds):
        for clock in clocks.values():
            clock()
    results = {}
    for name, clock in clocks.items():
        wall, cpu = clock.medians(warmup)
        results[name] = {"seconds": wall, "cpu_seconds": cpu}
    return results


def _tensors(values: Any) -> list[Tensor]:
    return [tensor for tensor in tree.tensors(values) if tensor.layout == torch.strided]
