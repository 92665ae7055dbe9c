"""Compiled clipped sums and compiled private steps, against plain SGD on every model.

`test_clipped_sum`: forward, backward, norms and the sum of clipped gradients, as a
ratio to the forward and backward pass of plain SGD. `test_private_step`: clipped sum,
noise and optimizer on 50 Poisson draws, padding included, as a ratio to a step of plain
SGD with its optimizer on a batch of the mean size. Both are also given as a ratio to
plain SGD that is compiled. All three run in every round.

The rest stands beside it: `build_seconds` (what the first calls took longer than later
ones), peak memory in a process of its own, captures and redos. The cache of compiled
code starts empty, but "auto" comes after "inductor", whose code it finds there.

Contenders are checked as in `test_clipped.py`; steps are compared with three steps of a
loop in float64. vgrad's compiled ones are checked on the timed batches: sums with a
loop over the whole batch, steps with as many eager ones. With `--benchmark-disable`
they are built for a small model, and Inductor is left out, as it always is for nets
with thousands of ops, which it needs five minutes for.
"""

import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import pytest
import torch

from bench import memory, steps
from bench.case import CHECKED_SAMPLES, Case, memory_of, timed
from bench.compiling import COMPILED, INDUCTOR, ON_GPU, PLAIN, STEP, SUM, captures
from bench.contenders import Grads
from bench.measure import DEVICES, interleaved
from bench.models import FULL_SIZE, SETTINGS, STEP_BY_STEP
from bench.steps import DRAWS, STEPS, Task

# Peers hook into modules whose inputs need no gradient, vmap falls back to loops.
pytestmark = pytest.mark.filterwarnings("ignore")

CHECKED_STEPS = 3


class Both(Case):
    """A case with compiled plain SGD, built once for all other contenders.

    It is nothing where torch cannot compile it.
    """

    memory_after = None

    @cached_property
    def beside(self) -> dict[str, Callable[[], Any]]:
        run = COMPILED[PLAIN].build(self.problem)
        return _if_it_runs(partial(run, *self.problem.batch))

    @cached_property
    def step_beside(self) -> dict[str, Callable[[], Any]]:
        return _if_it_runs(partial(STEPS[PLAIN](self.task).step, *self.task.fixed))

    @cached_property
    def task(self) -> Task:
        """What is timed."""
        samples = self.setting.samples
        return Task.of(self.setting, self.device, torch.float32, samples)

    @cached_property
    def moved(self) -> Grads:
        """How far eager steps move the parameters over all draws."""
        stepper = STEPS["vgrad"](self.task)
        for batch in self.task.draws:
            stepper.step(*batch)
        return steps.moved(self.task, stepper.params())

    @cached_property
    def plain_step_peak(self) -> int:
        return memory.in_fresh_process(steps.peak, self.name, "plain", self.device)

    def small_task(self, name: str, dtype: torch.dtype) -> Task:
        """Make a task of few samples; whose noise is not vgrad's goes without."""
        return Task.of(
            self.setting,
            self.device,
            dtype,
            CHECKED_SAMPLES,
            small=True,
            noise_multiplier=float(name.startswith("vgrad")),
        )

    def small_steps(self, name: str, dtype: torch.dtype) -> Grads:
        """Return how far a contender moves in a few steps."""
        task = self.small_task(name, dtype)
        stepper = STEPS[name](task)
        for batch in task.batches(name)[:CHECKED_STEPS]:
            stepper.step(*batch)
        return steps.moved(task, stepper.params())

    def expected_steps(self, name: str) -> Grads:
        """Return how far it should."""
        task = self.small_task(name, torch.float64)
        if name == PLAIN:
            stepper = steps.sgd(task)
            for batch in task.batches(name)[:CHECKED_STEPS]:
                stepper.step(*batch)
            return steps.moved(task, stepper.params())
        return steps.expected(task, CHECKED_STEPS, COMPILED[name].epsilon)


def _if_it_runs(run: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    try:
        run()
    except Exception:  # the contender itself says why
        return {}
    return {"compiled": run}


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile everything again, whatever an earlier run has compiled."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("inductor")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=SETTINGS)
def case(request: pytest.FixtureRequest, device: str) -> Both:
    if request.param in FULL_SIZE and device == "cpu":
        pytest.skip("models of full size are for a GPU")
    torch.compiler.reset()
    return Both(request.param, device)


def skip_some(benchmark: Any, case: Both, kind: str, name: str) -> None:
    if name in ON_GPU and case.device == "cpu":
        pytest.skip("records what a GPU runs")
    if benchmark.disabled and name in INDUCTOR:
        pytest.skip("takes minutes to compile, and is checked before it is timed")
    if case.name in STEP_BY_STEP and name in INDUCTOR:
        case.refuse(kind, name, "not run: thousands of ops, minutes to compile")


def small_check(benchmark: Any, name: str) -> bool:
    """Whether a contender runs on a small model first, and so may be built twice."""
    return benchmark.disabled or not name.startswith("vgrad-")


@pytest.mark.parametrize("name", COMPILED)
def test_clipped_sum(benchmark: Any, case: Both, name: str) -> None:
    benchmark.group = f"{SUM}, {case.name}, {case.device}"
    skip_some(benchmark, case, SUM, name)
    contender = COMPILED[name]
    checked = None
    if small_check(benchmark, name):
        run = partial(case.run_small, contender.build)
        checked = case.check(SUM, name, run, case.expected(contender))
    if benchmark.disabled:
        return
    single = name == PLAIN or case.name in STEP_BY_STEP
    beside = {} if single else case.beside
    timed(benchmark, case, SUM, name, contender, checked, beside)
    if memory.measurable(case.device):
        benchmark.extra_info.update(memory_of(case.peak(name), case.plain_peak))


@pytest.mark.parametrize("name", STEPS)
def test_private_step(benchmark: Any, case: Both, name: str) -> None:
    benchmark.group = f"{STEP}, {case.name}, {case.device}"
    skip_some(benchmark, case, STEP, name)
    checked = None
    if small_check(benchmark, name):
        run, expected = partial(case.small_steps, name), case.expected_steps(name)
        checked = case.check(STEP, name, run, expected)
    if benchmark.disabled:
        return
    task = case.task
    stepper, plain, batches = STEPS[name](task), steps.sgd(task), task.batches(name)
    plain.step(*task.fixed)
    start = time.perf_counter()
    for batch in batches:
        stepper.step(*batch)
    first = time.perf_counter() - start
    difference = None
    if name.startswith("vgrad"):
        result = steps.moved(task, stepper.params())
        difference = case.check_batch(STEP, name, result, case.moved)
    checked = checked or {"error": difference, "checked_in": "float32"}
    draws = iter(batches)
    single = name == PLAIN or case.name in STEP_BY_STEP
    interleaved(
        benchmark,
        lambda: stepper.step(*next(draws)),
        partial(plain.step, *task.fixed),
        device=case.device,
        samples=case.setting.samples,
        error=checked["error"],
        rounds=DRAWS,
        beside={} if single else case.step_beside,
    )
    benchmark.extra_info.update(
        **case.described(STEP, checked),
        float32_difference=difference,
        **captures(stepper.step),
    )
    if COMPILED[name].per_shape:
        later = benchmark.stats.stats.total
        benchmark.extra_info["build_seconds"] = max(0.0, first - later)
    if memory.measurable(case.device):
        needed = memory.in_fresh_process(steps.peak, case.name, name, case.device)
        benchmark.extra_info.update(memory_of(needed, case.plain_step_peak))
