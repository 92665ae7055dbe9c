import copy
import json

import pytest

from bench.experiments import private, study
from bench.experiments.study import Place


@pytest.mark.slow
def test_the_price_of_privacy(tmp_path, monkeypatch):
    place = Place("tiny", "cpu", tmp_path)
    seen = study.run("private", private.STUDY, place)
    assert "no plan spends more than its epsilon" in seen[0]
    assert "the clipped sum is that of the float64 loop" in seen[1]
    results = json.loads((tmp_path / "private.json").read_text())["pieces"]
    assert [*results] == [piece.name for piece in private.pieces(place)]
    assert (tmp_path / "private.png").stat().st_size > 10_000
    assert "Checked:" in (tmp_path / "private.md").read_text()

    for name in ("train", "measure"):
        monkeypatch.setattr(private, name, lambda *_: pytest.fail("it runs again"))
    assert study.run("private", private.STUDY, place) == seen

    for name, key, value, told in TAMPERED:
        wrong = copy.deepcopy(results)
        wrong[name][key] = value
        with pytest.raises(AssertionError, match=told):
            private.STUDY.check(wrong)


TAMPERED = [
    ("CNN: epsilon 8", "spent", 8.1, "epsilon 8.1, at most 8.0 asked"),
    ("CNN: epsilon 8", "accuracies", [0.0, 0.1], "with the smallest epsilon"),
    ("CNN: epsilon 8", "accuracies", [1.0, 1.0], "without privacy"),
    ("CNN: no privacy", "accuracies", [0.1, 0.2], "where chance is 0.1"),
    ("CNN: time", "error", 1e-3, "relative error of 0.001"),
]
"""Piece, key and value that are wrong, and what the check says."""
