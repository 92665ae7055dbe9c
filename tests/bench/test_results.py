"""The picture of ensembles, and the operations that `bench.floor` counts."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import floor, growth
from bench.contenders import CLIPPED, plain
from bench.models import SETTINGS

RESULTS = Path(__file__).parents[2] / "bench/results/cpu_2_threads/ensemble.json"


def test_the_clipped_sum_has_the_operations_of_plain_sgd():
    problem = SETTINGS["mlp"].problem("cpu", torch.float32, 8)
    base, clipped = (
        floor.cost(partial(build(problem), *problem.batch)).operations
        for build in (plain, CLIPPED["vgrad"].build)
    )
    assert base <= clipped < 1.01 * base


def test_the_picture_shows_every_way_as_measured():
    rows = json.loads(RESULTS.read_text())
    measured = {(r["group"], r["contender"]): r["ratio_to_plain"] for r in rows}
    figure = growth.draw(rows)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["loop", "vmap", "tensordict", "vgrad"]
    axes = next(a for a in figure.axes if a.get_title() == "SimpleCNN, 28x28, cpu")
    lines = {line.get_label(): line for line in axes.lines}
    group = "ensemble, training step, SimpleCNN, 28x28, {} members, cpu"
    for name in names[1:]:
        points = dict(zip(*lines[name].get_data(), strict=True))
        for members in (1, 10):
            assert points[members] == measured[group.format(members), name]
    assert sorted(lines["vgrad"].get_xdata()) == [1, 2, 4, 8, 10, 16]
    assert set(lines["loop"].get_ydata()) == {1}
    with pytest.raises(ValueError, match="expected results of test_ensemble.py"):
        growth.draw([{"group": "ensemble, forward, a net, 1 members, cpu"}])
