"""A run that goes on beyond its end: the same noise, more epsilon, and a history."""

import shutil

import pytest
import torch

from tests.cli.runs import (
    BATCH,
    FIXED,
    PLAIN,
    SIZE,
    THREE,
    Killed,
    contents,
    error,
    interrupted,
    lines,
    reference,
    results,
    resume,
    said,
    stop,
    train,
    watched,
    write_data,
)
from vgrad import dp, files
from vgrad.cli import checkpoint, report

SLOW = pytest.mark.slow
NORM = ["--max-norm", "0.8"]


def extend(out, epochs, *more):
    return resume(out, "--extend", "--epochs", str(epochs), *more)


def spent(out, steps):
    multiplier = said(out)["plan"]["noise_multiplier"]
    rate = BATCH / SIZE
    return dp.epsilon(
        sampling_rate=rate, noise_multiplier=multiplier, steps=steps, delta=1e-5
    )


@pytest.fixture(scope="module")
def ended(images, tmp_path_factory):
    """Two epochs, for reading only."""
    out = tmp_path_factory.mktemp("ended") / "run"
    assert train(images, out, FIXED, *NORM) == 0
    return out


@pytest.fixture
def run(ended, tmp_path):
    """A copy of them."""
    return shutil.copytree(ended, tmp_path / "run")


@pytest.fixture(scope="module")
def longer(ended, tmp_path_factory):
    """The same, extended to four epochs, for reading only."""
    out = shutil.copytree(ended, tmp_path_factory.mktemp("longer") / "run")
    assert extend(out, 4) == 0
    return out


def test_the_longer_run_has_the_noise_of_the_shorter_and_its_figures(ended, longer):
    before, after = said(ended), said(longer)
    assert after["arguments"] == before["arguments"]
    assert after["plan"] == {**before["plan"], "steps": 16}
    assert (before["extended"], after["extended"]) == ([], [4])
    for name in ("metrics.jsonl", "plain.jsonl"):
        first, whole = ((out / name).read_text() for out in (ended, longer))
        assert whole.startswith(first)
        assert [each["step"] for each in lines(longer / name)] == [4, 8, 12, 16]
    epsilons = [each["epsilon"] for each in lines(longer / "metrics.jsonl")]
    assert epsilons == [spent(ended, steps) for steps in (4, 8, 12, 16)]
    assert epsilons[1] <= 3 < epsilons[3]


def test_the_longer_run_is_one_of_plain_torch(images, ended, longer):
    tensors, description = checkpoint.read_state(longer)
    key = tensors[".private.key"].tolist()
    assert checkpoint.read_state(ended)[0][".private.key"].tolist() == key
    expected = reference(images, key, description["plan"], True, steps=16)
    for name, value in expected.items():
        found = tensors[f".private.params['{name}']"]
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)


def test_the_run_without_privacy_is_that_of_more_epochs(images, longer, tmp_path):
    assert train(images, tmp_path / "run", FIXED, *NORM, epochs=4) == 0
    one, other = (results(out) for out in (longer, tmp_path / "run"))
    assert one["plain.jsonl"] == other["plain.jsonl"]
    assert one["metrics.jsonl"] != other["metrics.jsonl"]  # which has more noise


def test_epsilon_is_printed_before_a_step_and_stands_in_the_report(
    images, tmp_path, monkeypatch, capsys
):
    out, shown, pages = tmp_path / "run", [], []
    assert train(images, out) == 0
    old = f"For release: {out}/model.safetensors, with epsilon {spent(out, 8):.3f}"
    assert old in (out / "report.html").read_text()
    capsys.readouterr()

    def seen(*given, **more):
        shown.append(capsys.readouterr().out)
        # The page of the shorter run would claim less than the model has spent.
        pages.append((out / "report.html").exists())

    with monkeypatch.context() as patch:
        watched(patch, dp.Plan, "sample", seen)
        assert extend(out, 4) == 0
    rises = (
        f"Extended from 2 to 4 epochs with noise multiplier "
        f"{said(out)['plan']['noise_multiplier']:.4g} as before: epsilon rises from "
        f"{spent(out, 8):.3f} to {spent(out, 16):.3f} at delta 1e-05."
    )
    assert rises in shown[0]
    assert not any(pages)
    page = " ".join((out / "report.html").read_text().split())
    assert f"<p>{rises}</p>" in page
    assert f"with epsilon {spent(out, 16):.3f} at delta 1e-05. The other" in page
    assert f"mlp, epsilon {spent(out, 16):.3f} at delta 1e-05, seed 0</h1>" in page
    assert old not in page
    *_, model = checkpoint.read_model(out)
    assert (model["epsilon"], model["step"]) == (spent(out, 16), 16)
    assert resume(out) == 0
    assert "is finished; nothing was changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "after"),
    [
        ((checkpoint, "save_state"), 1),
        ((checkpoint, "save_model"), 0),
        ((checkpoint, "save_model"), 2),
        ((checkpoint, "append"), 1),
        ((report, "write_page"), 0),
    ],
)
@pytest.mark.parametrize("again", [[], ["--extend", "--epochs", "4"]])
def test_killed_while_it_is_extended_a_run_goes_on(run, longer, place, after, again):
    owner, name = place
    whole, calls = getattr(owner, name), []

    def killing(*given, **more):
        if len(calls) == after:
            raise Killed
        calls.append(given)
        return whole(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, killing)
        with pytest.raises(Killed):
            extend(run, 4)
    assert said(run)["extended"] == [4]
    assert resume(run, *again) == 0
    assert results(run) == results(longer)
    assert (run / "report.html").read_text().count("Extended from 2 to 4 epochs") == 1


def test_killed_before_its_state_is_saved_a_run_is_what_it_was(run, monkeypatch):
    before = contents(run)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_state", stop)
        with pytest.raises(Killed):
            extend(run, 4)
    assert contents(run) == before


def test_a_run_is_extended_twice(run, longer):
    assert extend(run, 3) == 0
    assert extend(run, 4) == 0
    assert said(run)["extended"] == [3, 4]
    found, expected = results(run), results(longer)
    assert found["state"][1].pop("extended") == [3, 4]
    assert expected["state"][1].pop("extended") == [4]
    assert found == expected
    page = (run / "report.html").read_text()
    for first, last in ((2, 3), (3, 4)):
        prices = f"{spent(run, 4 * first):.3f} to {spent(run, 4 * last):.3f}"
        assert f"from {first} to {last} epochs" in page
        assert f"epsilon rises from {prices}" in page


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_run_that_has_not_ended_is_extended(images, tmp_path, longer, after):
    out = tmp_path / "run"
    where = (checkpoint, "save_model")
    interrupted(images, out, FIXED, *NORM, where=where, after=after)
    assert said(out)["step"] == 4 * after
    assert extend(out, 4) == 0
    assert results(out) == results(longer)


def test_arguments_given_again_are_those_of_the_start(run, longer):
    assert extend(run, 4, *NORM, FIXED, "--lr", "0.5", "--epsilon", "3") == 0
    assert results(run) == results(longer)
    assert resume(run, "--epochs", "2") == 0


MORE = ["--extend", "--epochs"]
REFUSED = {
    "no epochs": (["--extend"], "--extend: expected --resume DIR and --epochs N with"),
    "as many epochs": ([*MORE, "2"], "--extend --epochs 2: expected more than the 2"),
    "fewer epochs": ([*MORE, "1"], "expected more than the 2 epochs that the run has"),
    "no more epochs": ([*MORE, "0"], "--epochs: expected a whole number from 1 to"),
    "too many epochs": ([*MORE, "1000001"], "--epochs: expected a whole number from"),
    "no extending": (["--epochs", "4"], "got 4. To make the run longer, add --extend."),
    "a rate": ([*MORE, "4", "--lr", "0.7"], "expected --lr 0.5, which"),
    "a budget": ([*MORE, "4", "--epsilon", "4"], "expected --epsilon 3.0, which"),
    "members": ([*MORE, "4", *THREE], "expected --members 1, which"),
    "a seed": ([*MORE, "4", "--seed", "1"], "expected --seed 0, which"),
    "a model": ([*MORE, "4", "--model", "cnn"], "expected --model mlp, which"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_option_changes_nothing(run, capsys, name):
    more, message = REFUSED[name]
    before = contents(run)
    assert message in error(capsys, "train", "--resume", run, *more)
    assert contents(run) == before


def test_a_run_that_was_extended_gets_no_shorter(longer, capsys):
    before = contents(longer)
    for epochs in ("2", "3"):
        message = error(capsys, "train", "--resume", longer, *MORE, epochs)
        assert f"--epochs {epochs}: expected more than the 4 epochs that" in message
    assert extend(longer, 4) == 0
    assert "is finished; nothing was changed" in capsys.readouterr().out
    assert contents(longer) == before


def test_other_data_and_another_plan_are_refused(tmp_path, monkeypatch, capsys):
    images, out = write_data(tmp_path / "images.npz"), tmp_path / "run"
    assert train(images, out) == 0
    before = contents(out)
    more = ["train", "--resume", out, *MORE, "4"]

    def noisier(epsilon, **named):
        return dp.Plan(**named, noise_multiplier=9.0)

    with monkeypatch.context() as patch:
        patch.setattr(dp.Plan, "for_epsilon", noisier)
        message = error(capsys, *more)
        assert "expected noise_multiplier in plan to be" in message
    write_data(images, seed=1)
    assert "expected sha256 in data to be" in error(capsys, *more)
    assert contents(out) == before


def test_what_no_epsilon_can_be_given_for_is_refused(images, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(images, out, "--delta", "1e-15", "--batch-size", "48", epochs=1) == 0
    before = contents(out)
    message = error(capsys, "train", "--resume", out, *MORE, "6")
    assert "--extend: expected fewer epochs than 6, for which no epsilon can" in message
    assert contents(out) == before


@pytest.mark.parametrize(
    "more", [pytest.param([FIXED], marks=SLOW), [PLAIN]], ids=["private", "plain"]
)
def test_an_ensemble_is_extended(images, tmp_path, capsys, more):
    out = tmp_path / "run"
    assert train(images, out, *THREE, *more, epochs=1) == 0
    before = contents(out)
    capsys.readouterr()
    assert extend(out, 2) == 0
    shown = capsys.readouterr().out
    assert (out / "plain.jsonl").read_bytes().startswith(before["plain.jsonl"])
    page, told = (out / "report.html").read_text(), said(out, "ensemble.json")
    assert told["step"] == 8
    if more == [PLAIN]:
        assert "Extended from 1 to 2 epochs.\n" in shown
        assert "<p>Extended from 1 to 2 epochs.</p>" in page
        assert "epsilon rises" not in shown
        return
    prices = f"epsilon rises from {spent(out, 12):.3f} to {spent(out, 24):.3f} at delta"
    assert prices in shown
    assert prices in page
    assert said(out)["plan"]["steps"] == 24
    assert lines(out / "metrics.jsonl")[-1]["epsilon"] == spent(out, 24)


def forge(folder, **changed):
    tensors, description = checkpoint.read_state(folder)
    files.write_tensors(
        folder / "state.safetensors", tensors, {**description, **changed}
    )


@pytest.mark.parametrize(
    "value", [[2], [1], [5, 4], [4, 4], [True], [4.0], "4", 4, [10**9], {"4": 4}, [[4]]]
)
def test_a_history_that_cannot_be_is_refused(run, capsys, value):
    forge(run, extended=value)
    before = contents(run)
    message = error(capsys, "train", "--resume", run)
    assert "state.safetensors: expected" in message
    assert contents(run) == before


def test_a_history_that_the_plan_does_not_have_is_refused(run, capsys):
    forge(run, extended=[4])
    message = error(capsys, "train", "--resume", run)
    assert "expected steps in plan to be 8" in message
    message = error(capsys, "train", "--resume", run, *MORE, "6")
    assert "expected steps in plan to be 8" in message


def test_a_state_of_an_earlier_version_has_no_history(run, longer):
    tensors, description = checkpoint.read_state(run)
    del description["extended"]
    files.write_tensors(run / "state.safetensors", tensors, description)
    (run / "report.html").unlink()
    assert resume(run) == 0
    assert extend(run, 4) == 0
    assert results(run) == results(longer)


def test_only_a_run_is_extended(images, tmp_path, capsys):
    message = error(capsys, "train", "--resume", tmp_path, *MORE, "4")
    assert "state of a run, got no file" in message
    message = error(capsys, "train", "--out", tmp_path / "new", *MORE, "4")
    assert "--extend: expected --resume DIR" in message
    assert not (tmp_path / "new").exists()
