"""Two ranks on the device: a process group that hands views of the host to gloo."""

from datetime import timedelta
from functools import cache

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from tests.accelerator import device
from tests.distributed.processes import TIMEOUT


def views(tree):
    if isinstance(tree, torch.Tensor):
        return device.host_view(tree)
    return [views(each) for each in tree]


class HostViews(distributed.ProcessGroup):
    """Collectives of gloo on the memory of the device, which is the host's."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = distributed.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return device.NAME

    @property
    def group_name(self):
        return c10d._world.pg_names[self]

    def allreduce(self, tensors, options=None):
        options = options or c10d.AllreduceOptions()
        return self._gloo.allreduce(views(tensors), options)

    def reduce(self, tensors, options):
        return self._gloo.reduce(views(tensors), options)

    def broadcast(self, tensors, options):
        return self._gloo.broadcast(views(tensors), options)

    def allgather(self, outputs, inputs, options=None):
        options = options or c10d.AllgatherOptions()
        return self._gloo.allgather(views(outputs), views(inputs), options)

    def _allgather_base(self, output, input, options=None):
        return self.allgather([list(output.chunk(self.size()))], [input], options)

    def allgather_into_tensor_coalesced(self, outputs, inputs, options=None):
        pairs = zip(outputs, inputs, strict=True)
        *others, last = [self._allgather_base(*pair) for pair in pairs]
        for work in others:
            work.wait()
        return last

    def barrier(self, options=None):
        return self._gloo.barrier(options or c10d.BarrierOptions())


@cache
def join(path: str) -> None:
    """Leave the group of gloo, register the device, and meet again through it."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    distributed.destroy_process_group()
    device.register()
    distributed.Backend.register_backend(device.NAME, HostViews, devices=[device.NAME])
    distributed.init_process_group(
        device.NAME,
        store=distributed.FileStore(path, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )
