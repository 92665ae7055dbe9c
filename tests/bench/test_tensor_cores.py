import copy
import json

import pytest

from bench.experiments import folds, study, tensor_cores
from bench.experiments.study import Place


@pytest.mark.slow
def test_tensor_cores(tmp_path, monkeypatch):
    place = Place("tiny", "cpu", tmp_path)
    seen = study.run("tensor-cores", tensor_cores.STUDY, place)
    assert "ended with all bits of one that was not" in seen[1]
    results = json.loads((tmp_path / "tensor-cores.json").read_text())["pieces"]
    assert [*results] == [piece.name for piece in tensor_cores.pieces(place)]
    assert (tmp_path / "tensor-cores.png").stat().st_size > 10_000
    assert "Checked:" in (tmp_path / "tensor-cores.md").read_text()
    assert not [*tmp_path.glob("tensor-cores-*")]  # checkpoints

    for room, name in PIECES:
        monkeypatch.setattr(room, name, lambda *_: pytest.fail("it runs again"))
    assert study.run("tensor-cores", tensor_cores.STUDY, place) == seen

    for name, change, told in TAMPERED:
        wrong = copy.deepcopy(results)
        change(wrong[name])
        with pytest.raises(AssertionError, match=told):
            tensor_cores.STUDY.check(wrong)


PIECES = [
    (tensor_cores, "measure"),
    (tensor_cores, "pad"),
    (folds, "resume"),
    (folds, "validate"),
]
TAMPERED = [
    ("CNN: time", lambda found: found["rows"][1].update(loss=2.5), "loss 2.5"),
    ("resumed", lambda found: found.update(resumed=False), "differs from one"),
    ("resumed", lambda found: found["losses"][1].reverse(), "differs from one"),
    ("resumed", lambda found: found.update(epochs_after=4), "nothing was interr"),
    ("CNN: folds", lambda found: found["scores"][0].append(0.1), "in a fold"),
]
"""Piece, what is done to its result, and what the check says."""


def test_folds_that_go_on_in_another_way_are_seen(tmp_path, monkeypatch):
    real = folds.cross_validate

    def wrong(*given, folder=None, **options):
        seed = options.pop("seed") + (folder is not None)
        return real(*given, folder=folder, seed=seed, **options)

    monkeypatch.setattr(folds, "cross_validate", wrong)
    found = folds.resume(Place("tiny", "cpu", tmp_path), lambda share: None)
    assert not found["resumed"]


def test_losses_are_compared_before_anything_is_timed(tmp_path, monkeypatch):
    real = tensor_cores.train_step

    def wrong(loss, tx, *, policy, **options):
        def scaled(*given):
            return 1.1 * loss(*given)

        return real(scaled if policy else loss, tx, policy=policy, **options)

    monkeypatch.setattr(tensor_cores, "train_step", wrong)
    place = Place("tiny", "cpu", tmp_path)
    with pytest.raises(AssertionError, match="in float32"):
        tensor_cores.measure(place, tensor_cores.timed(place)[0], lambda share: None)
