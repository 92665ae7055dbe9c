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


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS[:2])
def test_a_replay_launches_no_more_than_counted(net):
    compare(net, PRECISIONS[:1], [REPLAY])


@pytest.mark.parametrize(
    "net",
    [*("tiny-32", "tied-lm"), pytest.param("convnext", marks=pytest.mark.slow)],
)
def test_a_replay_launches_no_more_than_eager_mode(net):
    found = count(net, ("float32", "bfloat16"), (EAGER, REPLAY))
    for rows in found.values():
        assert rows[REPLAY]["launches"] <= rows[EAGER]["launches"]
        assert rows[REPLAY]["waits"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS[:2])
def test_a_compiled_sum_has_no_more_kernels_than_counted(net):
    before = kept()["kernels"][net]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        found = count_kernels(net)
    for precision, rows in found.items():
        assert rows[EAGER]["kernels"] <= before[precision][EAGER]["kernels"]


def test_a_count_that_grew_is_named():
    before = {"launches": 5, "waits": 1, "to_host": 0, "to_device": 0}
    recorded = {"a": {"float32": {EAGER: before}}}
    assert not grown(recorded, recorded)
    assert not grown({"a": {"float32": {EAGER: {**before, "launches": 4}}}}, recorded)
    more = {"a": {"float32": {EAGER: {**before, "waits": 2}}}}
    assert grown(more, recorded) == [
        "a, float32, vgrad: 2 waits, and launches.json has 1"
    ]


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


def test_a_kernel_takes_the_longer_of_flops_and_bytes():
    def operand(*shape, dtype="Float", size=4):
        numbers = torch.Size(shape).numel()
        return device.Operand(shape, dtype, numbers * size)

    def event(op, inputs, outputs):
        return device.Event("launch", op, "", inputs, outputs)

    def seconds(one, tf32=False):
        return modelled.modelled([one], tf32)["seconds"]["H100"]

    square = operand(8192, 8192)
    product = event("mm", [square, square], [square])
    assert seconds(product) == pytest.approx(2 * 8192**3 / 67e12 / 0.7)
    assert seconds(product, tf32=True) == pytest.approx(2 * 8192**3 / 495e12 / 0.7)
    half = operand(8192, 8192, dtype="BFloat16", size=2)
    product = event("mm", [half, half], [square])
    assert seconds(product) == pytest.approx(2 * 8192**3 / 990e12 / 0.7)
    added = event("add", [square, square], [square])
    assert seconds(added) == pytest.approx(3 * 4 * 8192**2 / 3.35e12 / 0.7)
    table, places = operand(50_000, 768), operand(64, dtype="Long", size=8)
    looked_up = event("embedding", [table, places], [operand(64, 768)])
    assert modelled.moved(looked_up) == 64 * 8 + 2 * 64 * 768 * 4
