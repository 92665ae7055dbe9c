"""The experiments of the article on functorch, at their smallest size."""

import pytest

from bench.experiments import ensembles, per_sample
from tests.bench.runs import run_twice

pytestmark = pytest.mark.slow


def test_per_sample_gradients_are_equal_and_timed(tmp_path, monkeypatch):
    results = run_twice("per-sample", tmp_path, monkeypatch)
    found = results["B = 4"]["contenders"]
    assert found.keys() == per_sample.MADE.keys()
    assert all(each["seconds"] > 0 for each in found.values())
    stored = 4 * 4 * 1_199_882  # bytes of four gradients
    for name in ("vmap(grad)", "functorch", "vgrad"):
        assert stored <= found[name]["peak_bytes"] < 3 * stored
    results[per_sample.EQUAL]["functorch"] = 1e-3
    with pytest.raises(AssertionError, match="functorch: relative error 0.001"):
        per_sample.check(results)


def test_ensembles_are_those_of_the_loop(tmp_path, monkeypatch):
    results = run_twice("ensembles", tmp_path, monkeypatch)
    case = ensembles.title("SimpleMLP 784-128-128-10", "training step", True)
    assert results["MLP, E = 2"]["seconds"][case].keys() == set(ensembles.NAMES)
    results[ensembles.EQUAL][case]["vgrad"] = 1e-3
    with pytest.raises(AssertionError, match=f"vgrad, {case}: relative error 0.001"):
        ensembles.check(results)
