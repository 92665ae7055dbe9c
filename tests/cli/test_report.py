"""The pictures and the page of a run."""

import base64
import dataclasses
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.cli.runs import FIXED, PLAIN, THREE, WRITE, lines, said, train
from vgrad.cli import checkpoint, report, settings

TITLE, EVIL = "digits, mlp, seed 0", '"><script>alert(1)</script>&amp;'


def records(count, members=None):
    steps = range(1, count + 1)
    rows = [(4 * i, 2 / i, 0.5 + 0.1 / i, 0.3 * i, 100.0, None, None) for i in steps]
    return [checkpoint.Record(*row, members) for row in rows]


def job(**options):
    return SimpleNamespace(
        settings=settings.Settings(**options),
        data=SimpleNamespace(y_train=[0] * 7, y_test=[0] * 5),
        ends=[4],
        plan=None,
        description={"machine": {EVIL: EVIL}},
    )


MEMBERS = {"members": 3, "without_privacy": True}
OF_NAME = "{}, cnn, epsilon 3 at delta 1e-05, seed 0"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, OF_NAME.format("digits")),
        ({"seed": 7, "delta": 0.1}, "digits, cnn, epsilon 3 at delta 0.1, seed 7"),
        (MEMBERS, "digits, cnn, 3 members, without privacy, seed 0"),
        ({"reproducible_noise": True}, "digits, cnn, no claim of privacy, seed 0"),
        ({"data": "/a/b/my.npz"}, OF_NAME.format("my.npz")),
        ({"data": 99 * "x" + ".npz"}, OF_NAME.format(f"{30 * 'x'} ... {26 * 'x'}.npz")),
        ({"data": "a\n\x1b.npz"}, OF_NAME.format(r"a\n\x1b.npz")),
    ],
)
def test_a_title_names_the_run(options, expected):
    assert report.title(job(**options)) == expected


def legend_overlaps(figure):
    figure.draw_without_rendering()
    (legend,) = (each.get_window_extent() for each in figure.legends)
    return any(legend.overlaps(axes.get_tightbbox()) for axes in figure.axes)


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("members", [None, [0.4, 0.6]])
def test_curves(private, members):
    figures = {"plain": records(3, members)}
    figures = {"private": records(3, members), **figures} if private else figures
    figure = report.curves(TITLE, figures, delta=1e-5)
    runs = "Private and plain SGD" if private else "Plain SGD"
    assert figure.get_suptitle() == f"{runs}: {TITLE}"
    assert not legend_overlaps(figure)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    expected = ["private SGD", "plain SGD"] if private else ["plain SGD"]
    assert [name for name in names if "member" not in name] == expected
    assert len(names) == len(expected) * (2 if members else 1)
    drawn = [[60, 55, 50 + 10 / 3], [0.3, 0.6, 0.9]]
    for axes, values in zip(figure.axes, drawn[: 1 + private], strict=True):
        np.testing.assert_allclose(axes.lines[0].get_ydata(), values, rtol=1e-12)
    labels = ["held-out accuracy in %", "epsilon spent at delta 1e-05"]
    assert [axes.get_ylabel() for axes in figure.axes] == labels[: 1 + private]


def test_a_reliability_diagram():
    sure = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.65, 0.35], [0.35, 0.65]]).log()
    logits = torch.cat([sure, torch.full((1, 2), torch.nan)]).expand(2, 5, 2)
    labels = torch.tensor([0, 1, 0, 1, 0])
    figure = report.reliability_diagram(TITLE, logits, labels)
    above, below = figure.axes
    curve = {line.get_label(): line.get_data() for line in above.lines}
    np.testing.assert_allclose(curve["plain SGD"], [[0.65, 0.95], [1, 0.5]], rtol=1e-6)
    np.testing.assert_array_equal(curve["perfectly calibrated"], [[0, 1], [0, 1]])
    assert list(below.lines[0].get_ydata()) == [2, 2]
    assert figure.get_suptitle().endswith(TITLE)
    assert not legend_overlaps(figure)


class Page(HTMLParser):
    """A page as a browser reads it; a tag that is left open or unknown raises."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.cells = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1].append(data)


def read(folder):
    """Read a page, which loads nothing and runs nothing."""
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert page.tags[0] == ("html", {"lang": "en"})
    assert not {"script", "iframe", "object", "a"} & {tag for tag, _ in page.tags}
    for _, attrs in page.tags:
        assert not any(name.startswith("on") for name in attrs)
        for name in ("src", "href"):
            assert attrs.get(name, "data:").startswith("data:")
    return page


OF_THREE = ["curves", "reliability", "uncertain"]


@pytest.mark.parametrize(
    ("more", "pictures"),
    [
        pytest.param([], ["curves"], id="one"),
        pytest.param([FIXED], ["curves"], id="fixed"),
        pytest.param([*THREE, PLAIN], OF_THREE, id="three, plain"),
    ],
)
def test_a_page_shows_the_whole_run(images, tmp_path, monkeypatch, more, pictures):
    monkeypatch.setattr(report, "write_picture", WRITE)
    out = tmp_path / "run"
    assert train(images, out, *more, epochs=1) == 0
    page = read(out)
    assert "This page is not for release." in page.text
    shown = [attrs for tag, attrs in page.tags if tag == "img"]
    assert all(attrs["alt"] for attrs in shown)
    prefix = "data:image/png;base64,"
    held = [base64.b64decode(attrs["src"].removeprefix(prefix)) for attrs in shown]
    assert held == [(out / f"{name}.png").read_bytes() for name in pictures]
    assert all(image.startswith(b"\x89PNG\r\n") for image in held)
    for name, value in said(out)["arguments"].items():
        assert [f"--{name.replace('_', '-')}", str(value)] in page.cells
    last = lines(out / "plain.jsonl")[-1]
    assert f"{100 * last['test_accuracy']:.1f} %" in page.text
    assert ("member 2" in page.text) == ("--members" in more)
    assert ("epsilon spent" in page.text) == (PLAIN not in more)
    if PLAIN in more:
        assert "Nothing here hides the training data." in page.text
    elif FIXED in more:
        assert "the epsilon of this run may not be claimed" in page.text
        assert "For release" not in page.text
    else:
        spent = f"{lines(out / 'metrics.jsonl')[-1]['epsilon']:.3f}"
        released = f"For release: {out}/model.safetensors, with epsilon {spent}"
        assert released in page.text
        assert "keep them secret. The key in them reveals the noise." in page.text
        assert [cells[2] for cells in page.cells if cells[:2] == ["1", "4"]] == [spent]


def test_no_name_becomes_a_part_of_the_page(tmp_path):
    out = tmp_path / EVIL.replace("/", "") / "\udcff\x1b"
    out.mkdir(parents=True)
    names = {"data": f"{EVIL}.npz", "model": f"{EVIL}:make"}
    pictures = {report.CURVES: b"drawn"}
    report.write_page(out, job(**names), {"plain": records(2)}, pictures)
    page = read(out)
    for name, value in [*names.items(), (EVIL, EVIL)]:
        assert [name if name == EVIL else f"--{name}", value] in page.cells
    assert r"\udcff\x1b/ensemble.safetensors" in page.text
    settings_ = re.findall(r"<td>--([a-z-]+)</td>", (out / "report.html").read_text())
    fields = [field.name for field in dataclasses.fields(settings.Settings)]
    assert [name.replace("-", "_") for name in settings_] == fields


@pytest.mark.parametrize("count", [1, 99, 100, 101, 1000, 1234])
def test_a_page_of_many_epochs_stays_short_and_has_the_last(tmp_path, count):
    figures = {"private": records(count), "plain": records(count)}
    report.write_page(tmp_path, job(), figures, {})
    rows = [row for row in read(tmp_path).cells if len(row) == 7 and row[0] != "epoch"]
    epochs = [int(row[0]) for row in rows]
    assert epochs[-1] == count
    assert len(epochs) == len(set(epochs)) <= 101
    assert count > 100 or epochs == list(range(1, count + 1))
