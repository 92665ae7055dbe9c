"""The command `attribute`: scores of training samples, and a page that shows them."""

import base64
import re

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.nn import functional as F

import vgrad.cli
from tests.cli.runs import (
    SIZE,
    THREE,
    contents,
    error,
    private,
    train,
    write_data,
)
from tests.cli.test_report import Page
from vgrad import attribution
from vgrad.__main__ import main
from vgrad.cli import attribute as command

NAMES = {"attribution.safetensors", "attribution.html"}


def attribute(folder, *more):
    """Attribute a run, and return the tensors of its file."""
    assert main(["attribute", str(folder), *map(str, more)]) == 0
    return safetensors.torch.load_file(folder / "attribution.safetensors")


def page(folder):
    return Page((folder / "attribution.html").read_text(encoding="utf-8"))


def modules(folder):
    return [vgrad.cli.load(folder, member=i).double() for i in range(3)]


def gradients(model, x, y):
    """Return the gradients of the losses of samples by plain autograd, [B, P]."""
    rows = []
    for i in range(len(y)):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


def samples(images, split):
    held = np.load(images)
    x = torch.from_numpy(held[f"x_{split}"]).float().double()[:, None, None]
    return x, torch.from_numpy(held[f"y_{split}"])


def test_scores_are_means_over_members_of_products_of_gradients(images, copied):
    folder = copied("plain")
    found = attribute(folder, "--method", "grad-dot", "--queries", "0:3,7,2")
    assert found["queries"].tolist() == [0, 1, 2, 7]
    (x, y), (q, r) = samples(images, "train"), samples(images, "test")
    rows = found["queries"]
    scores, own = torch.zeros(4, SIZE).double(), torch.zeros(SIZE).double()
    for model in modules(folder):
        train, test = gradients(model, x, y), gradients(model, q[rows], r[rows])
        scores += test @ train.mT / 3
        own += train.square().sum(1) / 3
    torch.testing.assert_close(found["scores"].double(), scores, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["self_influence"].double(), own, rtol=1e-4, atol=0)


@pytest.mark.parametrize("method", ["ekfac", "kfac"])
def test_a_large_damping_makes_products_of_gradients(method, copied):
    folder = copied("plain")
    few = "--queries", "0:3"
    plain = attribute(folder, *few, "--method", "grad-dot")
    damped = attribute(folder, *few, "--method", method, "--damping", "1e5")
    for name in ("scores", "self_influence"):
        torch.testing.assert_close(
            damped[name] * 1e5, plain[name], rtol=1e-3, atol=1e-5
        )
    usual = attribute(folder, *few, "--method", method)
    assert not torch.allclose(usual["scores"] * 1e-3, plain["scores"], rtol=0.1)


def test_trak_has_the_members_for_checkpoints_and_a_mean_ridge(images, copied):
    folder = copied("plain")
    more = "--method", "trak", "--queries", "5", "--damping", "0.01"
    found = attribute(folder, *more)["scores"]
    (x, y), (q, r) = samples(images, "train"), samples(images, "test")
    fmodel, params, buffers = vgrad.cli.load(folder)
    params = [{n: v[i].detach() for n, v in params.items()} for i in range(3)]
    batches = (q[5:6].float(), r[5:6]), [(x.float(), y)]
    options = {"dim": 1024, "seed": 0, "ridge": 0.01 * SIZE}
    expected = attribution.trak(fmodel, params, buffers, *batches, **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_misclassified_come_first_and_the_page_shows_the_extremes(images, copied):
    folder = copied("plain")
    found = attribute(folder)
    x, y = samples(images, "test")
    mean = torch.stack([model(x).softmax(1) for model in modules(folder)]).mean(0)
    likely = mean[range(len(y)), y].detach()
    wrong = {i for i in range(len(y)) if mean[i].argmax() != y[i]}
    assert set(found["queries"].tolist()) == wrong
    assert torch.equal(
        found["queries"], found["queries"][likely[found["queries"]].argsort()]
    )

    shown = page(folder)
    assert "This page is not for release." in shown.text
    assert "not private, whatever the run is" in shown.text
    first, scores = int(found["queries"][0]), found["scores"][0]
    guess = int(mean[first].argmax())
    share = f"{100 * mean[first, guess].item():.1f} %"
    assert f" {first} label {y[first]} guess {guess} {share} " in shown.text
    assert "img" not in {tag for tag, _ in shown.tags}
    z, labels = samples(images, "train")
    score = r"[-+][\d.]+(?:e[-+]\d+)?"
    listed = re.findall(rf"(\d+) label (\d) ({score}) ", shown.text)[:16]
    order = scores.argsort(descending=True).tolist()
    expected = [*order[:8], *order[:-9:-1]]
    assert listed == [
        (str(n), str(int(labels[n])), f"{scores[n]:+.3g}") for n in expected
    ]
    mean = torch.stack([model(z).softmax(1) for model in modules(folder)]).mean(0)
    own = found["self_influence"]
    suspects = re.findall(rf"(\d+) label (\d) guess (\d) ({score}) ", shown.text)
    assert suspects == [
        (str(n), str(int(labels[n])), str(int(mean[n].argmax())), f"{own[n]:+.3g}")
        for n in own.argsort(descending=True)[:40].tolist()
    ]
    assert NAMES <= private(folder)


def test_a_private_run_is_refused_unless_it_is_said(copied, capsys):
    folder = copied("one")
    before = contents(folder)
    assert "expected a run without privacy" in error(capsys, "attribute", folder)
    assert contents(folder) == before
    attribute(folder, "--not-private", "--queries", "3")
    assert "not private, whatever the run is" in page(folder).text
    after = contents(folder)
    assert {name: after[name] for name in before} == before


BATCH_NORM = """
def make(*, channels, height, width, classes):
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, 4, 3, padding=1), torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(), torch.nn.Linear(4 * height * width, classes),
    )
"""


def test_images_are_pictures_and_statistics_those_of_evaluation(tmp_path, module):
    rng = np.random.default_rng(0)
    parts = {"train": SIZE, "test": 30}
    arrays = {
        f"x_{part}": rng.random((n, 3, 4, 5), np.float32) for part, n in parts.items()
    }
    data, folder = write_data(tmp_path / "images.npz", **arrays), tmp_path / "run"
    model = "--model", module("factory_of_attribute", BATCH_NORM)
    more = [*THREE, "--without-privacy", *model]
    assert train(data, folder, *more, epochs=1) == 0
    moved = data.rename(tmp_path / "moved.npz")
    out = tmp_path / "new" / "scores"
    few = ["--queries", "4", "--method", "grad-dot", "--data", str(moved), *model]
    assert main(["attribute", str(folder), "--out", str(out), *few]) == 0
    found = safetensors.torch.load_file(out / "attribution.safetensors")
    x, y = torch.from_numpy(arrays["x_train"]).double(), np.load(moved)["y_train"]
    expected = torch.zeros(SIZE).double()
    for i in range(3):
        one = vgrad.cli.load(folder, member=i, model=model[1]).double()
        expected += gradients(one, x, torch.from_numpy(y)).square().sum(1) / 3
    own = found["self_influence"].double()
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=0)
    pictures = [attrs for tag, attrs in page(out).tags if tag == "img"]
    assert len(pictures) == 1 + 8 + 8 + 40
    for attrs in pictures:
        kind, _, content = attrs["src"].partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content).startswith(b"\x89PNG\r\n")
    assert pictures[0]["alt"] == "sample 4"


WRONG = {
    "--queries 30": "from 0 to 29, and ends of ranges above starts, got 30",
    "--queries 2,5:5": "got 5:5",
    "--queries 7:3": "got 7:3",
    "--queries=-1": "expected misclassified, or indices of held-out samples",
    "--queries first": "expected misclassified, or indices of held-out samples",
    "--queries 1,": "expected misclassified, or indices of held-out samples",
    "--method lissa": "expected one of ekfac, kfac, trak, grad-dot, got 'lissa'",
    "--damping 0": "--damping: expected a finite number above 0",
    "--data digits": "--data digits: expected the data that the run was trained on",
}


@pytest.mark.parametrize("more", WRONG)
def test_a_bad_option_changes_nothing(more, finished, capsys):
    folder = finished("plain")[0]
    before = contents(folder)
    assert WRONG[more] in error(capsys, "attribute", folder, *more.split())
    assert contents(folder) == before


def test_a_missing_or_damaged_run_is_refused(copied, tmp_path, capsys):
    assert "got no file" in error(capsys, "attribute", tmp_path / "none")
    folder = copied("plain")
    path, text = folder / "ensemble.safetensors", folder / "ensemble.json"
    whole = text.read_bytes()
    text.write_bytes(b"")
    message = error(capsys, "attribute", folder)
    assert f"{text}: expected the description of an ensemble, got Expecting" in message
    text.write_bytes(whole)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert "its checksum does not match" in error(capsys, "attribute", folder)
    path.unlink()
    assert "got no file" in error(capsys, "attribute", folder)
    assert not NAMES & {each.name for each in folder.iterdir()}


def test_a_model_without_wrong_guesses_or_that_has_diverged(
    images, finished, monkeypatch, capsys
):
    folder, right = finished("plain")[0], F.one_hot(samples(images, "test")[1]).double()
    monkeypatch.setattr(command, "_probabilities", lambda *given: right)
    message = error(capsys, "attribute", folder)
    assert "expected a wrong guess among 30 held-out samples" in message
    assert "--queries 0:10" in message
    monkeypatch.setattr(command, "_probabilities", lambda *given: right * torch.nan)
    assert "got one that has diverged" in error(capsys, "attribute", folder)
