"""The experiments on mixed precision, at their smallest."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.experiments import jmp, mixed, mobilenet, study
from bench.experiments.study import Place

STUDIES = {"jmp": jmp.STUDY, "mobilenet": mobilenet.STUDY}


@pytest.fixture(scope="module", params=STUDIES)
def done(request, tmp_path_factory):
    """Run an experiment; return its name, its place and what its check saw."""
    place = Place("tiny", "cpu", tmp_path_factory.mktemp(request.param))
    return request.param, place, study.run(request.param, STUDIES[request.param], place)


def results(name, place):
    return json.loads((place.folder / f"{name}.json").read_text())["pieces"]


@pytest.mark.slow
def test_it_leaves_results_table_and_picture_and_never_runs_twice(done, monkeypatch):
    name, place, seen = done
    assert all(sentence.endswith(".") for sentence in seen)
    text = (place.folder / f"{name}.md").read_text()
    assert all(sentence in text for sentence in seen)
    assert (place.folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    chosen = STUDIES[name]
    pieces = chosen.pieces(place)
    assert list(results(name, place)) == [piece.name for piece in pieces]

    def again(tell):
        pytest.fail("a piece that has its result ran again")

    idle = [replace(piece, run=again) for piece in pieces]
    assert study.run(name, replace(chosen, pieces=lambda _: idle), place) == seen


def change(found, path, by):
    """Return results with one entry changed."""
    found = copy.deepcopy(found)
    *way, last = path
    inner = found
    for key in way:
        inner = inner[key]
    inner[last] = by(inner[last])
    return found


def late(losses):
    return [each + 1 for each in losses]


ERRORS = {
    "jmp": [
        (("mixed_bfloat16, NoOp, seed 0", "losses"), late, "from float32's"),
        (("mixed_float16, Static, seed 0", "losses"), late, "from float32's"),
        (
            ("mixed_bfloat16, NoOp, seed 0", "losses"),
            lambda losses: [None, *losses[1:]],
            "nan from float32's",
        ),
        (
            ("mixed_bfloat16, NoOp, seed 0", "losses"),
            lambda losses: losses[1:],
            "inf from float32's",
        ),
        (
            ("float32, NoOp, seed 0", "losses"),
            lambda losses: losses[::-1],
            "the loss went|from float32's",
        ),
        (
            ("mixed_float16, Dynamic, seed 0", "skipped"),
            lambda skipped: [0, *skipped[1:]],
            "no step was skipped first",
        ),
        (
            ("half, Dynamic, seed 0", "scales"),
            lambda scales: [min(scales[: at + 1]) for at in range(len(scales))],
            "the scale never rose",
        ),
        (
            ("half, Dynamic, seed 0", "scales"),
            lambda scales: [scales[0]] * len(scales),
            "the scale fell otherwise",
        ),
        (
            ("half, Dynamic, seed 0", "losses"),
            lambda losses: [None, *losses[1:]],
            "1 losses were not finite",
        ),
        (
            ("memory", "policies", "float16", "parameters"),
            lambda size: 2 * size,
            "half parameters",
        ),
        (
            ("memory", "policies", "mixed_bfloat16", "activations"),
            lambda size: 2 * size,
            "at most 0.75",
        ),
    ],
    "mobilenet": [
        (("mixed_bfloat16, seed 1", "losses"), lambda _: [None, None], "train loss"),
        (
            ("memory", "policies", "mixed_bfloat16", "activations"),
            lambda size: 2 * size,
            "at most 0.75",
        ),
        (("float32, seed 0", "learns"), lambda _: True, "too wide"),
    ],
}


@pytest.mark.slow
def test_the_check_sees_a_result_that_is_not_as_it_must_be(done):
    name, place, _ = done
    found = results(name, place)
    STUDIES[name].check(found)
    for path, by, message in ERRORS[name]:
        with pytest.raises(AssertionError, match=message):
            STUDIES[name].check(change(found, path, by))


def runs(losses, accuracies):
    """Return the results of two policies, three seeds each, for a check."""
    memory = {"float32": {"activations": 2}, "mixed_bfloat16": {"activations": 1}}
    found = {"memory": {"policies": memory}}
    for policy in memory:
        for seed in range(3):
            found[f"{policy}, seed {seed}"] = {
                "policy": policy,
                "losses": [2.3] * 50 + [losses[policy][seed]] * 50,
                "accuracy": accuracies[policy][seed],
                "chance": 0.1,
                "held_out": 400,
                "learns": True,
            }
    return found


LOSSES, ACCURACIES = [0.9, 1.0, 1.1], [0.58, 0.6, 0.62]


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
    def given(losses, accuracies):
        return runs(
            {"float32": LOSSES, "mixed_bfloat16": losses},
            {"float32": ACCURACIES, "mixed_bfloat16": accuracies},
        )

    assert len(mobilenet.STUDY.check(given(LOSSES[::-1], ACCURACIES))) == 4
    with pytest.raises(AssertionError, match=message):
        mobilenet.STUDY.check(given(losses, accuracies))


def test_nets_that_learn_nothing_are_seen():
    low = {"float32": [0.19, 0.2, 0.21], "mixed_bfloat16": [0.19, 0.2, 0.21]}
    with pytest.raises(AssertionError, match="too wide|by chance 0.1"):
        mobilenet.STUDY.check(runs({each: LOSSES for each in low}, low))


def test_means_of_seeds_may_differ_by_what_chance_does_in_one_of_a_hundred():
    first, second = np.array([1.0, 2.0, 3.0]), np.array([1.5, 2.5, 3.5])
    bound = mixed.allowed(first, second, 0.1)
    assert bound == pytest.approx(0.1 + 4.604 * (2 / 3) ** 0.5)


def test_tf32_is_as_it_was_afterwards():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    for allowed in (True, False):
        with mixed.tf32(allowed):
            assert torch.backends.cudnn.allow_tf32 is allowed
            assert torch.backends.cuda.matmul.allow_tf32 is allowed
    after = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    assert after == before
