"""The device itself: its memory, generators and kernels, and the counts of its work."""

import pytest
import torch
from torch.nn import functional as F

from tests.accelerator import device

HERE = device.NAME


def ones(*shape, **options):
    return torch.ones(*shape, device=HERE, **options)


MIXED = {
    "sum": lambda: ones(3) + torch.ones(3),
    "list": lambda: torch.cat([torch.ones(3), ones(3)]),
    "product": lambda: ones(3, 3) @ torch.ones(3, 3),
    "write": lambda: torch.ones(3).add_(ones(())),
    "write a number": lambda: torch.ones(()).add_(ones(())),
    "index": lambda: torch.ones(3)[ones(1, dtype=torch.long)],
    "convolution": lambda: F.conv1d(ones(1, 1, 3), torch.ones(1, 1, 2)),
    "foreach": lambda: torch._foreach_add_([ones(3)], [torch.ones(3)]),
    "generator": lambda: torch.randn(3, device=HERE, generator=torch.Generator()),
}


@pytest.mark.parametrize("name", MIXED)
def test_an_op_that_mixes_devices_is_refused(name):
    with pytest.raises(RuntimeError, match="device"):
        MIXED[name]()


KINDS = {
    "launch": lambda x: x + 1,
    "launch in place": lambda x: x.mul_(2),
    "launch on lists": lambda x: torch._foreach_mul_([x, x], 2.0),
    "launch of one kernel": lambda x: F.layer_norm(x, (4,)),
    "launch of a convolution": lambda x: F.conv1d(x[None], x[None, :3, :1]),
    "launch of fills": lambda x: torch.zeros(2, device=HERE),
    "launch of a copy": lambda x: x.clone(),
    "wait": lambda x: x.sum().item(),
    "wait of a bool": lambda x: bool(x.sum() > 0),
    "wait for places": lambda x: x.nonzero(),
    "wait for a mask": lambda x: x[x > 0],
    "wait for a mask to write": lambda x: x.__setitem__(x > 0, x[0, 0]),
    "wait for counts": lambda x: x.unique(),
    "wait for sameness": lambda x: torch.equal(x, x),
    "wait for the stream": lambda x: torch.accelerator.synchronize(),
    "to_host": lambda x: x.cpu(),
    "to_host of a list": lambda x: x.tolist(),
    "to_device": lambda x: torch.ones(3).to(HERE),
    "to_device of a number": lambda x: torch.tensor(3.0, device=HERE),
    "to_device of indices": lambda x: x[torch.tensor([0, 2])],
    "nothing for views": lambda x: x.t()[1:].unsqueeze(0).expand(5, -1, -1).detach(),
    "nothing for memory": lambda x: torch.empty_like(x),
    "nothing for no entries": lambda x: x[:0] + 1,
}


@pytest.mark.parametrize("name", KINDS)
def test_events_are_of_their_kinds(name):
    if name == "wait for the stream" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 synchronizes no device of another library")
    x = torch.arange(12.0, device=HERE).view(3, 4)
    with device.counted() as counts:
        KINDS[name](x)
    kind = name.split()[0]
    assert counts.of(kind) == (kind != "nothing"), counts.events
    assert kind != "nothing" or not counts.events
    assert kind != "launch" or len(counts.events) == 1, counts.events


def test_backward_passes_are_counted_at_the_line_that_starts_them():
    weight = ones(4, 2, requires_grad=True)
    with device.counted(within=__file__) as counts:
        (ones(3, 4) @ weight).sum().backward()
    ops = {op for line, ops in counts.lines().items() for op in ops}
    assert ops == {"mm", "sum", "fill_"}
    assert all(__name__.split(".")[-1] not in line for line in counts.lines())
    assert [line.split()[-1] for line in counts.lines()] == [
        "test_backward_passes_are_counted_at_the_line_that_starts_them",
        "ones",
    ]


def test_memory_has_an_end_and_comes_back():
    free, total = torch.accelerator.get_memory_info()
    held = torch.zeros(1000, device=HERE)
    results = held + 1
    assert torch.accelerator.get_memory_info() == (free - 8000, total)
    del held, results
    assert torch.accelerator.get_memory_info() == (free, total)
    with (
        device.capacity(2**16),
        pytest.raises(torch.OutOfMemoryError, match="pretend: out of memory"),
    ):
        torch.zeros(2**16, device=HERE)
