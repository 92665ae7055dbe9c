"""Launches and waits of sums and steps are not more than those that were counted."""

import json
import warnings

import pytest
import torch

from bench import floor, modelled
from bench.contenders import plain
from bench.launches import EAGER, FILE, REPLAY, STEP, count, count_kernels
from bench.models import SETTINGS
from tests.accelerator import device

NETS = ("tiny-32", "mlp", "simple-cnn", "recommender", "tied-lm", "transformer")
PRECISIONS = ("float32", "bfloat16, TF32")


def grown(found, recorded):
    """Return the counts that are larger than the recorded ones, in words."""
    return [
        f"{net}, {precision}, {name}: {row[what]} {what}, and {FILE.name} has "
        f"{recorded[net][precision][name][what]}"
        for net, kinds in found.items()
        for precision, rows in kinds.items()
        for name, row in rows.items()
        for what in ("launches", "waits", "to_host", "to_device")
        if row[what] > recorded[net][precision][name][what]
    ]


def kept():
    whole = json.loads(FILE.read_text())
    if torch.__version__.partition("+")[0] != whole["about"]["torch"]:
        pytest.skip(f"counted under torch {whole['about']['torch']}")
    return whole


def compare(net, precisions, names):
    whole = kept()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {net: count(net, precisions, names)}
    if more := grown(found, whole["counts"]):
        raise AssertionError(
            "\n".join([*more, f"If it has to be: python -m bench.launches {net}"])
        )


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("net", NETS)
def test_a_sum_launches_no_more_than_counted(net, precision):
    compare(net, [precision], [EAGER])


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
def test_a_private_step_launches_no_more_than_counted(net):
    compare(net, PRECISIONS[:1], [STEP])


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("net", NETS[:2])
def test_a_replay_launches_no_more_than_counted(net):
    compare(net, PRECISIONS[:1], [REPLAY])


@pytest.mark.more
@pytest.mark.parametrize(
    "net",
    [*("tiny-32", "tied-lm"), pytest.param("convnext", marks=pytest.mark.slow)],
)
def test_a_replay_launches_no_more_than_eager_mode(net):
    found = count(net, ("float32", "bfloat16"), (EAGER, REPLAY))
    for rows in found.values():
        assert rows[REPLAY]["launches"] <= rows[EAGER]["launches"]
        assert rows[REPLAY]["waits"] <= 1


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("net", NETS[:2])
def test_a_compiled_sum_has_no_more_kernels_than_counted(net):
    before = kept()["kernels"][net]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        found = count_kernels(net)
    for precision, rows in found.items():
        assert rows[EAGER]["kernels"] <= before[precision][EAGER]["kernels"]


@pytest.mark.parametrize("net", ["mlp", "simple-cnn", "convnext"])
def test_flops_are_those_of_torch(net):
    def run(place):
        problem = SETTINGS[net].problem(place, torch.float32, 4, small=True)
        build = plain(problem)
        return lambda: build(*problem.batch)

    counts = device.count(run(device.NAME))
    launches = [each for each in counts.events if each.kind == "launch"]
    expected = floor.cost(run("cpu")).operations
    found = modelled.modelled(launches, tf32=False)["flops"]
    assert sum(found.values()) == expected
    assert ("tf32" in found) == (net != "mlp")
