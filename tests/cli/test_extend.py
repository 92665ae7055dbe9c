"""A run that goes on beyond its end: the same noise, more epsilon, and a history."""

import shutil

import pytest
import torch

from tests.cli import runs
from tests.cli.runs import FIXED, contents, error, killed, lines, results, resume, said
from vgrad import dp
from vgrad.cli import checkpoint, report

NORM = ["--max-norm", "0.8"]
MORE = ["--extend", "--epochs"]


def extend(out, epochs, *more):
    return resume(out, *MORE, str(epochs), *more)


@pytest.fixture(scope="module")
def ended(finished):
    """Two epochs, for reading only."""
    return finished("fixed")[0]


@pytest.fixture
def run(copied):
    return copied("fixed")


@pytest.fixture(scope="module")
def longer(ended, tmp_path_factory):
    """The same, extended to four epochs, for reading only."""
    out = shutil.copytree(ended, tmp_path_factory.mktemp("longer") / "run")
    assert extend(out, 4) == 0
    return out


def test_the_longer_run_has_the_noise_of_the_shorter_and_its_figures(
    images, ended, longer, tmp_path
):
    before, after = said(ended), said(longer)
    assert after["arguments"] == before["arguments"]
    assert after["plan"] == {**before["plan"], "steps": 16}
    assert (before["extended"], after["extended"]) == ([], [4])
    for name in ("metrics.jsonl", "plain.jsonl"):
        first, whole = ((out / name).read_text() for out in (ended, longer))
        assert whole.startswith(first)
        assert [each["step"] for each in lines(longer / name)] == [4, 8, 12, 16]
    epsilons = [each["epsilon"] for each in lines(longer / "metrics.jsonl")]
    assert epsilons == [runs.spent(ended, steps) for steps in (4, 8, 12, 16)]
    assert epsilons[1] <= 3 < epsilons[3]
    # Private SGD is the one of plain torch, plain SGD that of a run of four epochs.
    tensors, description = checkpoint.read_state(longer)
    key = tensors[".private.key"].tolist()
    assert checkpoint.read_state(ended)[0][".private.key"].tolist() == key
    expected = runs.reference(images, key, description["plan"], True, steps=16)
    for name, value in expected.items():
        param = tensors[f".private.params['{name}']"]
        torch.testing.assert_close(param, value, rtol=1e-4, atol=1e-5)
    assert runs.train(images, tmp_path / "run", FIXED, *NORM, epochs=4) == 0
    one, other = (results(out) for out in (longer, tmp_path / "run"))
    assert one["plain.jsonl"] == other["plain.jsonl"]
    assert one["metrics.jsonl"] != other["metrics.jsonl"]  # which has more noise


def test_epsilon_is_printed_before_a_step_and_stands_in_the_report(
    images, tmp_path, monkeypatch, capsys
):
    out, shown, pages = tmp_path / "run", [], []
    assert runs.train(images, out) == 0
    old = f"For release: {out}/model.safetensors, with epsilon {runs.spent(out, 8):.3f}"
    assert old in (out / "report.html").read_text()
    capsys.readouterr()

    def seen(*given, **more):
        shown.append(capsys.readouterr().out)
        # The page of the shorter run would claim less than the model has spent.
        pages.append((out / "report.html").exists())

    with monkeypatch.context() as patch:
        runs.watched(patch, dp.Plan, "sample", seen)
        assert extend(out, 4) == 0
    rises = (
        f"Extended from 2 to 4 epochs with noise multiplier "
        f"{said(out)['plan']['noise_multiplier']:.4g} as before: epsilon rises from "
        f"{runs.spent(out, 8):.3f} to {runs.spent(out, 16):.3f} at delta 1e-05."
    )
    assert rises in shown[0]
    assert not any(pages)
    page = " ".join((out / "report.html").read_text().split())
    assert f"<p>{rises}</p>" in page
    assert f"with epsilon {runs.spent(out, 16):.3f} at delta 1e-05 (add" in page
    assert f"mlp, epsilon {runs.spent(out, 16):.3f} at delta 1e-05, seed 0</h1>" in page
    assert old not in page
    *_, model = checkpoint.read_model(out)
    assert (model["epsilon"], model["step"]) == (runs.spent(out, 16), 16)


SAME = [*MORE, "4"]
PLACES = [
    ((checkpoint, "save_state", 1), []),
    ((checkpoint, "save_model", 0), SAME),
    ((checkpoint, "save_model", 2), []),
    ((checkpoint, "append", 1), SAME),
    ((report, "write_page", 0), []),
    ((report, "write_page", 0), SAME),
]
"""Where a run is killed, and how it is started again."""


@pytest.mark.parametrize(("place", "again"), PLACES)
def test_killed_while_it_is_extended_a_run_goes_on(run, longer, place, again):
    with killed(*place):
        extend(run, 4)
    assert said(run)["extended"] == [4]
    assert resume(run, *again) == 0
    assert results(run) == results(longer)
    assert (run / "report.html").read_text().count("Extended from 2 to 4 epochs") == 1


def test_killed_before_its_state_is_saved_a_run_stays_as_it_was(run):
    before = contents(run)
    with killed(checkpoint, "save_state"):
        extend(run, 4)
    assert contents(run) == before


def test_a_run_is_extended_twice(run, longer):
    # Arguments given again are those of the start.
    assert extend(run, 3, *NORM, FIXED, "--lr", "0.5", "--epsilon", "3") == 0
    assert extend(run, 4) == 0
    assert resume(run, "--epochs", "2") == 0
    first, second = results(run), results(longer)
    assert first["state"][1].pop("extended") == [3, 4]
    assert second["state"][1].pop("extended") == [4]
    assert first == second
    page = (run / "report.html").read_text()
    for start, end in ((2, 3), (3, 4)):
        prices = f"{runs.spent(run, 4 * start):.3f} to {runs.spent(run, 4 * end):.3f}"
        assert f"from {start} to {end} epochs" in page
        assert f"epsilon rises from {prices}" in page


@pytest.mark.parametrize("after", [0, 1])
def test_a_run_that_has_not_ended_is_extended(images, tmp_path, longer, after):
    out = tmp_path / "run"
    with killed(checkpoint, "save_model", after):
        runs.train(images, out, FIXED, *NORM)
    assert said(out)["step"] == 4 * after
    assert extend(out, 4) == 0
    assert results(out) == results(longer)


REFUSED = [
    (["--extend"], "--extend: expected --resume DIR and --epochs N with"),
    ([*MORE, "2"], "--extend --epochs 2: expected more than the 2"),
    ([*MORE, "1"], "expected more than the 2 epochs that the run has"),
    ([*MORE, "0"], "--epochs: expected a whole number from 1 to"),
    ([*MORE, "1000001"], "--epochs: expected a whole number from"),
    (["--epochs", "4"], "got 4. To make the run longer, add --extend."),
    ([*MORE, "4", "--lr", "0.7"], "expected --lr 0.5, which the run was started with"),
    ([*MORE, "4", "--epsilon", "4"], "expected --epsilon 3.0, which"),
    ([*MORE, "4", "--model", "cnn"], "expected --model mlp, which"),
    (runs.THREE, "expected --members 1, which"),
    (["--seed", "1"], "expected --seed 0, which"),
    ([runs.PLAIN], "--without-privacy False, which"),
    (["--precision", "float16"], "float32, which the run was started with, got fl"),
]
"""Arguments given again with another value, or a run that gets no longer."""


@pytest.mark.parametrize(("more", "message"), REFUSED)
def test_a_refused_option_changes_nothing(ended, capsys, more, message):
    runs.refuse(capsys, ended, message, *more)


def test_a_run_that_was_extended_gets_no_shorter(longer, capsys):
    before = contents(longer)
    for epochs in ("2", "3"):
        message = f"--epochs {epochs}: expected more than the 4 epochs that"
        runs.refuse(capsys, longer, message, *MORE, epochs)
    assert extend(longer, 4) == 0
    assert "is finished; nothing was changed" in capsys.readouterr().out
    assert contents(longer) == before


def test_another_plan_is_refused(images, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    more = "--delta", "1e-15", "--batch-size", "48"
    assert runs.train(images, out, *more, epochs=1) == 0
    fewer = "--extend: expected fewer epochs than 6, for which no epsilon can"
    runs.refuse(capsys, out, fewer, *MORE, "6")

    def noisier(epsilon, **named):
        return dp.Plan(**named, noise_multiplier=9.0)

    monkeypatch.setattr(dp.Plan, "for_epsilon", noisier)
    runs.refuse(capsys, out, "expected noise_multiplier in plan to be")


def test_correlated_noise_is_not_extended(images, tmp_path, capsys):
    out = tmp_path / "run"
    assert runs.train(images, out, "--noise", "blt:2", epochs=1) == 0
    runs.refuse(capsys, out, "--extend: expected --noise independent", *MORE, "2")


def test_an_ensemble_is_extended(images, tmp_path, capsys):
    out = tmp_path / "run"
    assert runs.train(images, out, *runs.THREE, runs.PLAIN, epochs=1) == 0
    before = (out / "plain.jsonl").read_bytes()
    capsys.readouterr()
    assert extend(out, 2) == 0
    shown, page = capsys.readouterr().out, (out / "report.html").read_text()
    assert (out / "plain.jsonl").read_bytes().startswith(before)
    assert said(out, "ensemble.json")["step"] == 8
    assert "Extended from 1 to 2 epochs" in page
    assert "epsilon rises" not in shown + page


def test_only_a_run_is_extended(tmp_path, capsys):
    for option, name, message in (
        ("--resume", ".", "state of a run, got no file"),
        ("--resume", "none", "expected the folder of a run, got none there"),
        ("--out", "new", "--extend: expected --resume DIR"),
    ):
        command = ["train", option, tmp_path / name, *MORE, "4"]
        assert message in error(capsys, *command)
    assert not (tmp_path / "new").exists()
