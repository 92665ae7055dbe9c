"""A mesh of one rank, for code that is written for many."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextmanager
def alone(*axes: str, device: str | torch.device = "cpu") -> Iterator[DeviceMesh]:
    """Make a mesh of this process alone, whose process group ends with the block.

    What runs over ranks runs here too, in a notebook or under a debugger, and gives
    what it gives on many.

    Raises:
        ValueError: this process is in a process group already.

    Example:
        >>> with alone("dp", "members") as mesh:
        ...     mesh.size()
        1
    """
    device = torch.device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        sizes = (1,) * len(axes)
        yield init_device_mesh(device.type, sizes, mesh_dim_names=axes)
    finally:
        distributed.destroy_process_group()
