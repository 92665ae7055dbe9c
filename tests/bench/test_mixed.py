"""The experiments on mixed precision, at their smallest."""

import copy
import json
from dataclasses import replace

import pytest

from bench.experiments import jmp, mixed, mobilenet, study
from bench.experiments.study import Place
from vgrad import files

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
            "at most 0.95",
        ),
    ],
    "mobilenet": [
        (("mixed_bfloat16, seed 0", "losses"), lambda _: [9.0, 9.0], "train loss"),
        (("mixed_bfloat16, seed 1", "losses"), lambda _: [None, None], "train loss"),
        (
            ("memory", "policies", "mixed_bfloat16", "activations"),
            lambda size: 2 * size,
            "at most 1.0",
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


def test_means_of_seeds_may_differ_by_what_chance_does_in_one_of_a_hundred():
    import numpy as np

    first, second = np.array([1.0, 2.0, 3.0]), np.array([1.5, 2.5, 3.5])
    bound = mixed.allowed(first, second, 0.1)
    assert bound == pytest.approx(0.1 + 4.604 * (2 / 3) ** 0.5)


def test_tf32_is_as_it_was_afterwards():
    import torch

    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    for allowed in (True, False):
        with mixed.tf32(allowed):
            assert torch.backends.cudnn.allow_tf32 is allowed
            assert torch.backends.cuda.matmul.allow_tf32 is allowed
    after = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    assert after == before
