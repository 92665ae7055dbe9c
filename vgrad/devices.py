"""Capabilities of devices, which stand in the place of their names.

The host is the device whose kernels run where Python does. Any other device with memory
is an accelerator: cuda, xpu, mps and the backends of others take one way.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HOST = torch.device("cpu")


def is_host(device: torch.device) -> bool:
    """Return whether a device is the host."""
    return device.type == "cpu"


def accelerators(tensors: Iterable[Tensor]) -> set[torch.device]:
    """Return the accelerators that tensors are on."""
    return {x.device for x in tensors if x.device.type not in ("cpu", "meta")}


def all_accelerators() -> list[torch.device]:
    """Return every accelerator that this process could use."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    return [torch.device(kind.type, n) for n in range(torch.accelerator.device_count())]


def kinds() -> tuple[str, ...]:
    """Return the types of devices on which this process could compute."""
    kind = torch.accelerator.current_accelerator()
    return ("cpu",) if kind is None else ("cpu", kind.type)


def current(kind: str) -> torch.device:
    """Return the device of a type that this process uses, with its number."""
    if is_host(torch.device(kind)):
        return HOST
    return torch.device(kind, torch.get_device_module(kind).current_device())


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free where tensors of a device lie."""
    module: Any = None if is_host(device) else torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        free, _ = module.mem_get_info(device)
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return free + unused
    # Other devices share the memory of the host.
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 2**31  # no portable way to ask: assume two gibibytes
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
