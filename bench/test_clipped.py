"""Clipped sums of per-sample gradients on twelve models, against every peer there is.

`clipped`: forward, backward, norms and the sum of clipped gradients, as a ratio to the
forward and backward pass of plain SGD; the memory of both beside it, each taken in a
process of its own. `per_sample_grad`: the gradients themselves, where they fit.

Every contender is first compared with a float64 loop of plain autograd on a few
samples, and then in float32 on the whole batch with a loop. A peer that raises or is
wrong is not timed: the test is skipped with the reason, which the table shows too. With
`--benchmark-disable` only the first comparison is made. Peers are used where they are
installed.
"""

from functools import partial
from typing import Any

import pytest

from bench import memory
from bench.case import CLIPPED_SUM, STORED, Case, memory_of, timed
from bench.contenders import CLIPPED, GRADIENTS, Contender
from bench.measure import DEVICES
from bench.models import TIMED

# Peers hook into modules whose inputs need no gradient, vmap falls back to loops.
pytestmark = pytest.mark.filterwarnings("ignore")

LARGEST = 2**31
"""Bytes of stored gradients up to which they are computed."""


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=TIMED)
def case(request: pytest.FixtureRequest, device: str) -> Case:
    return Case(request.param, device)


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped(benchmark: Any, case: Case, name: str) -> None:
    benchmark.group = f"{CLIPPED_SUM}, {case.name}, {case.device}"
    contender = CLIPPED[name]
    run = partial(case.run_small, contender.build)
    checked = case.check(CLIPPED_SUM, name, run, case.expected(contender))
    if benchmark.disabled:
        return
    timed(benchmark, case, CLIPPED_SUM, name, contender, checked)
    if memory.measurable(case.device):
        benchmark.extra_info.update(memory_of(case.peak(name), case.plain_peak))


@pytest.mark.parametrize("name", GRADIENTS)
def test_per_sample_grad(benchmark: Any, case: Case, name: str) -> None:
    benchmark.group = f"{STORED}, {case.name}, {case.device}"
    if 4 * case.setting.samples * case.setting.parameters >= LARGEST:
        pytest.skip("the gradients take more than 2 GiB")
    build = GRADIENTS[name]
    checked = case.check(STORED, name, partial(case.run_small, build), case.exact)
    if benchmark.disabled:
        return
    timed(benchmark, case, STORED, name, Contender(build), checked)
