"""The picture of ensembles: every way to run the members, as it was measured."""

import json
from pathlib import Path

import pytest

from bench import growth

RESULTS = Path(__file__).parents[2] / "bench/results/cpu_2_threads/ensemble.json"


def test_it_shows_every_way_as_measured():
    rows = json.loads(RESULTS.read_text())
    figure = growth.draw(rows)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["loop", "vmap", "tensordict", "vgrad"]
    axes = next(a for a in figure.axes if a.get_title() == "SimpleCNN, 28x28, cpu")
    shown = {line.get_label(): line for line in axes.lines}
    group = "ensemble, training step, SimpleCNN, 28x28, {} members, cpu"
    for name in names[1:]:
        points = dict(zip(*shown[name].get_data(), strict=True))
        for members in (1, 10):
            (row,) = (
                row
                for row in rows
                if row["group"] == group.format(members) and row["contender"] == name
            )
            assert points[members] == row["ratio_to_plain"]
    assert sorted(shown["vgrad"].get_xdata()) == [1, 2, 4, 8, 10, 16]
    assert set(shown["loop"].get_ydata()) == {1}


def test_results_without_training_steps_are_refused():
    with pytest.raises(ValueError, match="expected results of test_ensemble.py"):
        growth.draw([{"group": "ensemble, forward, a net, 1 members, cpu"}])
