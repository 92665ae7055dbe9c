"""The experiments at their smallest: run once, and checks that see wrong results."""

import copy
import json

import pytest

from bench.experiments import ensembles, folds, mobilenet, per_sample, study
from bench.experiments.__main__ import NAMES
from bench.experiments.__main__ import study as named
from bench.experiments.study import Place

pytestmark = pytest.mark.more


def value(new):
    return lambda old: new


def first(new):
    return lambda old: [new, *old[1:]]


def later(losses):
    return [loss + 1 for loss in losses]


def reverse(losses):
    return losses[::-1]


def falling(scales):
    return [min(scales[: at + 1]) for at in range(len(scales))]


def twice(size):
    return 2 * size


CASE = ensembles.title("SimpleMLP 784-128-128-10", "training step", True)
ACTIVATIONS = ("memory", "policies", "mixed_bfloat16", "activations")
NOOP, STATIC = "mixed_bfloat16, NoOp, seed 0", "mixed_float16, Static, seed 0"
DYNAMIC, HALF = "mixed_float16, Dynamic, seed 0", "half, Dynamic, seed 0"
PRIVATE = ("CNN: epsilon 8", "accuracies")
ERRORS = {
    "per-sample": [
        ((per_sample.EQUAL, "functorch"), value(1e-3), "functorch: relative error")
    ],
    "ensembles": [
        ((ensembles.EQUAL, CASE, "vgrad"), value(1e-3), "vgrad, .*: relative error")
    ],
    "jmp": [
        ((NOOP, "losses"), later, "from float32's"),
        ((STATIC, "losses"), later, "from float32's"),
        ((NOOP, "losses"), first(None), "nan from float32's"),
        ((NOOP, "losses"), lambda losses: losses[1:], "inf from float32's"),
        (("float32, NoOp, seed 0", "losses"), reverse, "the loss went|from float32's"),
        ((DYNAMIC, "skipped"), first(0), "no step was skipped first"),
        ((HALF, "scales"), falling, "the scale never rose"),
        ((HALF, "scales"), lambda all: [all[0]] * len(all), "the scale fell otherwise"),
        ((HALF, "losses"), first(None), "1 losses were not finite"),
        (("memory", "policies", "float16", "parameters"), twice, "half parameters"),
        (ACTIVATIONS, twice, "at most 0.75"),
    ],
    "mobilenet": [
        (("mixed_bfloat16, seed 1", "losses"), value([None, None]), "train loss"),
        (ACTIVATIONS, twice, "at most 0.75"),
        (("float32, seed 0", "learns"), value(True), "too wide"),
    ],
    "tensor-cores": [
        (("CNN: time", "rows", 1, "loss"), value(2.5), "loss 2.5"),
        (("resumed", "resumed"), value(False), "differs from one"),
        (("resumed", "losses", 1), reverse, "differs from one"),
        (("resumed", "epochs_after"), value(4), "nothing was interr"),
        (("CNN: folds", "scores", 0), lambda scores: [*scores, 0.1], "in a fold"),
    ],
    "private": [
        (("CNN: epsilon 8", "spent"), value(8.1), "epsilon 8.1, at most 8.0 asked"),
        (PRIVATE, value([0.0, 0.1]), "with the smallest epsilon"),
        (PRIVATE, value([1.0, 1.0]), "without privacy"),
        (("CNN: no privacy", "accuracies"), value([0.1, 0.2]), "where chance is 0.1"),
        (("CNN: time", "error"), value(1e-3), "relative error of 0.001"),
    ],
    "attribution": [
        (("LR", "accuracy"), value(0.3), "LR: accuracy 0.300"),
        (("MLP", "lds", "inner product", "0"), value(0.9), "of 0.900 without curv"),
        (("LR", "models"), value(100), "by GGN at 0.002, 0.951 by dense"),
    ],
}
"""Place in the results, a wrong change, and the message of the check."""

SENTENCES = {
    "private": [
        "no plan spends more than its epsilon",
        "the clipped sum is that of the float64 loop",
    ],
    "tensor-cores": ["ended with all bits of one that was not"],
    "attribution": ["LR: the GGN's LDS is "],
}


QUICK = ("attribution",)


def changed(results, path, by):
    """Return results with one entry changed."""
    results = copy.deepcopy(results)
    *way, last = path
    inner = results
    for key in way:
        inner = inner[key]
    inner[last] = by(inner[last])
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.large) for n in NAMES],
)
def test_an_experiment_runs_once_and_its_check_sees_errors(name, tmp_path, monkeypatch):
    one, place = named(name), Place("tiny", "cpu", tmp_path)
    sentences = study.run(name, one, place)
    for part in SENTENCES.get(name, []):
        assert part in " ".join(sentences)
    results = json.loads((tmp_path / f"{name}.json").read_text())["pieces"]
    assert [*results] == [piece.name for piece in one.pieces(place)]
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / f"{name}.md").read_text()
    assert sentences
    assert all(f"* {sentence}" in text for sentence in sentences)
    assert not [*tmp_path.glob(f"{name}-*")]  # checkpoints
    if name == "per-sample":
        contenders = results["B = 4"]["contenders"]
        assert contenders.keys() == per_sample.MADE.keys()
        assert all(each["seconds"] > 0 for each in contenders.values())
        stored = 4 * 4 * 1_199_882  # bytes of four gradients
        for contender in ("vmap(grad)", "functorch", "vgrad"):
            assert stored <= contenders[contender]["peak_bytes"] < 3 * stored
    if name == "ensembles":
        assert results["MLP, E = 2"]["seconds"][CASE].keys() == set(ensembles.NAMES)
    with monkeypatch.context() as patch:
        patch.setattr(study.Kept, "add", None)
        assert study.run(name, one, place) == sentences
    for path, by, message in ERRORS[name]:
        with pytest.raises(AssertionError, match=message):
            one.check(changed(results, path, by))


# Mixed precision.

LOSSES, ACCURACIES = [0.9, 1.0, 1.1], [0.58, 0.6, 0.62]


def results_of(losses, accuracies):
    """Return the results of two policies, three seeds each, for a check."""
    memory = {"float32": {"activations": 2}, "mixed_bfloat16": {"activations": 1}}
    results = {"memory": {"policies": memory}}
    for policy in memory:
        for seed in range(3):
            results[f"{policy}, seed {seed}"] = {
                "policy": policy,
                "losses": [2.3] * 50 + [losses[policy][seed]] * 50,
                "accuracy": accuracies[policy][seed],
                "chance": 0.1,
                "held_out": 400,
                "learns": True,
            }
    return results


@pytest.mark.parametrize(
    ("losses", "accuracies", "message"),
    [
        ([1.5, 1.6, 1.7], ACCURACIES, "train loss: 1.600 .* the difference is 0.600"),
        ([0.3, 0.4, 0.5], ACCURACIES, "train loss: 0.400 .* the difference is 0.600"),
        (LOSSES, [0.4, 0.42, 0.44], "held-out accuracy: 0.420 .* allows 0.110"),
        ([0.2, 1.0, 1.8], ACCURACIES, "too wide for 1.300 learned"),
    ],
)
def test_policies_that_end_elsewhere_are_seen(losses, accuracies, message):
    def check(losses, accuracies):
        low = {"mixed_bfloat16": losses}, {"mixed_bfloat16": accuracies}
        full = {"float32": LOSSES}, {"float32": ACCURACIES}
        results = results_of(full[0] | low[0], full[1] | low[1])
        return mobilenet.STUDY.check(results)

    assert len(check(LOSSES[::-1], ACCURACIES)) == 4
    with pytest.raises(AssertionError, match=message):
        check(losses, accuracies)


# Tensor cores.


def test_folds_that_go_on_in_another_way_are_seen(tmp_path, monkeypatch):
    real = folds.cross_validate

    def wrong(*given, folder=None, **options):
        return real(*given, folder=folder, seed=int(folder is not None), **options)

    monkeypatch.setattr(folds, "cross_validate", wrong)
    results = folds.resume(Place("tiny", "cpu", tmp_path), lambda share: None)
    assert not results["resumed"]
