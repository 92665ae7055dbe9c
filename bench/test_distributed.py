"""A private step on several ranks, against one process that has as many threads.

Both take the whole step: clipped sum, reduction, noise and optimizer, on batches of the
mean size. `two` are two ranks with one thread each, beside one process with two
threads: `throughput` is the remaining share of its samples per second. `one` and
`four` are such ranks for the cost model of `bench.planning`, beside the same process.

`sent_bytes` are the bytes that a rank has written to the loopback device in a step, by
the count of the operating system, and `ring_bytes` the bytes of a reduction along a
ring for the sums alone, `2 (W - 1) / W` times theirs. The parameters after three steps
are compared with the ones of one process before anything is timed.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import vgrad
from bench.contenders import STRATEGY, functional
from bench.measure import interleaved
from bench.models import SETTINGS
from bench.steps import MOMENTUM, RATE, Task
from tests.distributed.processes import Processes
from vgrad.distributed import Ranks, data_parallel
from vgrad.training import TrainState, private_step

NAMES = ("transformer", "wrn-16-2")
SIZES = {"one": 1, "two": 2, "four": 4}
CHECKED = 3
SECONDS = 12

_DEVICE = Path("/proc/net/dev")
_KEPT: dict[str, Any] = {}
"""In a rank, the objects of its steps."""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def single_process() -> Iterator[Processes]:
    """One process with two threads."""
    process = Processes(1, threads=2)
    yield process
    process.stop()


def prepare(name: str, size: int, *, small: bool) -> dict[str, torch.Tensor]:
    """Build a model on this rank, take steps, and return the parameters."""
    setting = SETTINGS[name]
    samples = 8 if small else setting.samples
    dtype = torch.float64 if small else torch.float32
    task = Task.of(setting, "cpu", dtype, samples, small=small)
    loss, params, buffers = functional(task.problem)
    tx = vgrad.optim.sgd(RATE, momentum=MOMENTUM)
    step = private_step(
        loss, tx, task.plan, strategy=STRATEGY, donate=True, verify=False
    )
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    params = {name: param.detach().clone() for name, param in params.items()}
    state = TrainState.create(tx, params, buffers, seed=task.seed)
    rank, count = mesh.get_local_rank("dp"), len(task.fixed[1])
    rows = slice(count * rank // size, count * (rank + 1) // size)
    _KEPT.update(
        step=data_parallel(step, mesh),
        state=state,
        batch=[x[rows] for x in task.fixed],
        mesh=mesh,
    )
    for _ in range(CHECKED):
        take_step()
    return {name: param.clone() for name, param in _KEPT["state"].params.items()}


def take_step() -> None:
    """Take a step on this rank."""
    _KEPT["state"], _ = _KEPT["step"](_KEPT["state"], *_KEPT["batch"])


def parts() -> dict[str, float]:
    """Return the seconds of a step on this rank, of its noise and of its reduction."""
    plan = _KEPT["step"].plan
    bound = vgrad.Sensitivity(plan.max_norm / plan.expected_batch_size)
    ranks = Ranks.of("bench", _KEPT["mesh"], "dp")
    works = {
        "step": take_step,
        "noise": lambda: plan.add_noise(
            _KEPT["state"].params, bound, key=_KEPT["state"].key, step=0
        ),
        "reduction": lambda: ranks.summed("bench", _KEPT["state"].params),
    }
    spent: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(7):
        for name, work in works.items():
            ranks.agree(name)  # start together
            started = time.perf_counter()
            work()
            spent[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in spent.items()}


def written() -> int:
    """Return the bytes that processes of this machine have sent to each other."""
    (line,) = [x for x in _DEVICE.read_text().splitlines() if x.strip()[:3] == "lo:"]
    return int(line.split(":")[1].split()[8])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", SIZES)
def test_private_step(
    benchmark: Any, single_process: Processes, name: str, ranks: str
) -> None:
    benchmark.group = f"private step on ranks, {name}"
    size = SIZES[ranks]
    processes = Processes(size)
    try:
        (expected,) = single_process.run(_small, name, 1)
        difference = max(
            ((result[n] - expected[n]).norm() / expected[n].norm()).item()
            for result in processes.run(_small, name, size)
            for n in expected
        )
        assert difference < 1e-10
        if benchmark.disabled:
            return
        single_process.run(_large, name, 1)
        params = processes.run(_large, name, size)[0]
        before, steps = written(), 5
        for _ in range(steps):
            processes.run(take_step)
        sent = (written() - before) / steps / size
        interleaved(
            benchmark,
            lambda: processes.run(take_step),
            lambda: single_process.run(take_step),
            device="cpu",
            samples=SETTINGS[name].samples,
            error=difference,
            seconds=SECONDS,
        )
        count = sum(param.numel() * param.element_size() for param in params.values())
        benchmark.extra_info.update(
            setting=name,
            contender=f"{size} ranks of one thread",
            ranks=size,
            parameter_bytes=count,
            throughput=1 / benchmark.extra_info["ratio_to_plain"],
            sent_bytes=sent,
            ring_bytes=2 * (size - 1) / size * count,
            seconds_of_parts=processes.run(parts)[0],
        )
    finally:
        processes.stop()


def _small(name: str, size: int) -> dict[str, torch.Tensor]:
    return prepare(name, size, small=True)


def _large(name: str, size: int) -> dict[str, torch.Tensor]:
    return prepare(name, size, small=False)
