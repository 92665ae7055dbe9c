"""The pictures of a run and its page: what they say, and what they let nobody do."""

import base64
import dataclasses
import io
import re
import shutil
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.cli.runs import FIXED, PLAIN, THREE, WRITE, lines, said, train
from vgrad.cli import metrics, report, settings

OF_RUN = "digits, mlp, seed 0"


def records(count, members=None):
    return [
        metrics.Record(
            4 * i, 2 / i, 0.5 + 0.1 / i, 0.3 * i, 100.0, member_accuracies=members
        )
        for i in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "digits, cnn, epsilon 3 at delta 1e-05, seed 0"),
        (
            {"data": "/a/b/my.npz", "model": "mlp", "epsilon": 0.5, "seed": 7},
            "my.npz, mlp, epsilon 0.5 at delta 1e-05, seed 7",
        ),
        (
            {"members": 3, "without_privacy": True},
            "digits, cnn, 3 members, without privacy, seed 0",
        ),
        ({"reproducible_noise": True}, "digits, cnn, no claim of privacy, seed 0"),
        (
            {"data": "x" * 99 + ".npz"},
            f"{'x' * 30} ... {'x' * 26}.npz, cnn, epsilon 3 at delta 1e-05, seed 0",
        ),
        (
            {"data": "a\n\x1b.npz"},
            r"a\n\x1b.npz, cnn, epsilon 3 at delta 1e-05, seed 0",
        ),
    ],
)
def test_a_title_says_which_run_it_is(given, expected):
    assert report.title(job(**given)) == expected


def overlap(figure):
    """Tell whether a legend covers a part of a panel or of what is written at it."""
    figure.draw_without_rendering()
    (legend,) = (each.get_window_extent() for each in figure.legends)
    return any(legend.overlaps(axes.get_tightbbox()) for axes in figure.axes)


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("members", [None, [0.4, 0.6]])
def test_the_curves_have_a_title_and_nothing_is_covered(private, members):
    plain = records(3, members)
    figure = report.curves(OF_RUN, plain if private else [], plain, delta=1e-5)
    runs = "Private and plain SGD" if private else "Plain SGD"
    assert figure.get_suptitle() == f"{runs}: {OF_RUN}"
    assert not overlap(figure)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    expected = ["private SGD", "plain SGD"] if private else ["plain SGD"]
    assert [name for name in names if "member" not in name] == expected
    assert len(names) == len(expected) * (2 if members else 1)
    above, *below = figure.axes
    shares = [60, 55, 50 + 10 / 3]
    np.testing.assert_allclose(above.lines[0].get_ydata(), shares, rtol=1e-12)
    assert above.get_ylabel() == "held-out accuracy in %"
    assert len(below) == private
    for axes in below:
        np.testing.assert_allclose(axes.lines[0].get_ydata(), [0.3, 0.6, 0.9])
        assert axes.get_ylabel() == "epsilon spent at delta 1e-05"
    colours = {line.get_color() for axes in figure.axes for line in axes.lines}
    assert colours <= set(report.COLOURS)


def test_the_diagram_shows_accuracy_over_confidence():
    sure = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.65, 0.35], [0.35, 0.65]]).log()
    lost = torch.full((1, 2), torch.nan)
    logits = torch.cat([sure, lost]).expand(2, 5, 2)
    labels = torch.tensor([0, 1, 0, 1, 0])
    figure = report.reliability_diagram(OF_RUN, {"plain SGD": logits}, labels)
    above, below = figure.axes
    line = next(one for one in above.lines if one.get_label() == "plain SGD")
    np.testing.assert_allclose(line.get_xdata(), [0.65, 0.95], rtol=1e-6)
    np.testing.assert_allclose(line.get_ydata(), [1.0, 0.5], rtol=1e-6)
    assert list(below.lines[0].get_ydata()) == [2, 2]
    (perfect,) = (one for one in above.lines if one is not line)
    assert perfect.get_label() == "perfectly calibrated"
    assert list(perfect.get_xdata()) == list(perfect.get_ydata()) == [0, 1]
    assert figure.get_suptitle().endswith(OF_RUN)
    assert not overlap(figure)


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_the_most_uncertain_samples_come_first(channels):
    sure = torch.linspace(3, 0, 40)
    logits = torch.stack([sure, torch.zeros(40)], 1).expand(2, 40, 2).clone()
    logits[:, 7] = torch.nan
    images = torch.rand(40, channels, 2, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40) % 2
    figure = report.most_uncertain(OF_RUN, "private SGD", logits, images, labels)
    said = " ".join(figure.get_suptitle().split())
    assert "24 of 40 held-out samples that the ensemble trained by private SGD" in said
    assert said.endswith(f"entropy of the mean prediction {OF_RUN}")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(titles) == 24
    assert "nan" in titles[0]
    assert titles[1] == "guess 0, is 1\n0.69 nats"
    shown = np.asarray(figure.axes[1].images[0].get_array())
    assert shown.shape == ((2, 3, 3) if channels == 3 else (2, 3))
    expected = images[39].permute(1, 2, 0) if channels == 3 else images[39].mean(0)
    scaled = (shown - shown.min()) / (shown.max() - shown.min())
    expected = (expected - expected.min()) / (expected.max() - expected.min())
    np.testing.assert_allclose(scaled, expected, atol=1e-5)


def test_a_picture_is_drawn_whatever_the_data_are_called(tmp_path):
    title = report.title(job(data="$\\frac$ 数 <b>.npz"))
    figure = report.curves(title, [], records(2), delta=1e-5)
    drawn = WRITE(figure, tmp_path / "it.png")
    assert drawn.startswith(b"\x89PNG\r\n")
    assert (tmp_path / "it.png").read_bytes() == drawn


# The page.

VOID = {"meta", "link", "img"}
BROWSER = shutil.which("chromium")


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
        if tag not in VOID:
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

    def of(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def read(folder):
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def check_self_contained(shown):
    """See that a page loads nothing and runs nothing."""
    assert shown.tags[0] == ("html", {"lang": "en"})
    assert not {"script", "iframe", "object", "a"} & {tag for tag, _ in shown.tags}
    for tag, attrs in shown.tags:
        assert not any(name.startswith("on") for name in attrs)
        for name in ("src", "href"):
            assert attrs.get(name, "data:").startswith("data:"), (tag, attrs)


SLOW = pytest.mark.slow
OF_THREE = ["curves", "reliability", "uncertain"]


@pytest.mark.parametrize(
    ("more", "pictures"),
    [
        pytest.param([], ["curves"], id="one"),
        pytest.param([*THREE, PLAIN], OF_THREE, id="three, plain"),
        pytest.param(THREE, OF_THREE, id="three", marks=SLOW),
    ],
)
def test_a_page_shows_the_whole_run(images, tmp_path, monkeypatch, more, pictures):
    monkeypatch.setattr(report, "write_picture", WRITE)
    out = tmp_path / "run"
    assert train(images, out, *more, epochs=1) == 0
    shown = read(out)
    check_self_contained(shown)
    assert "This page is not for release." in shown.text
    held = [
        base64.b64decode(each["src"].removeprefix("data:image/png;base64,"))
        for each in shown.of("img")
    ]
    assert all(each["alt"] for each in shown.of("img"))
    assert held == [(out / f"{name}.png").read_bytes() for name in pictures]
    assert all(each.startswith(b"\x89PNG\r\n") for each in held)
    settings = said(out)["arguments"]
    for name, value in settings.items():
        assert [f"--{name.replace('_', '-')}", str(value)] in shown.cells
    last = lines(out / "plain.jsonl")[-1]
    assert f"{100 * last['test_accuracy']:.1f} %" in shown.text
    assert ("member 2" in shown.text) == bool(more)
    assert ("epsilon spent" in shown.text) == (PLAIN not in more)
    if PLAIN in more:
        assert "Nothing here hides the training data." in shown.text
    else:
        spent = lines(out / "metrics.jsonl")[-1]["epsilon"]
        names = (
            "ensemble.safetensors and ensemble.json" if more else "model.safetensors"
        )
        assert f"For release: {out}/{names}, with epsilon {spent:.3f}" in shown.text
        assert "keep them secret. The key in them reveals the noise." in shown.text
        assert [f"{spent:.3f}"] == [
            cells[2] for cells in shown.cells if cells[:2] == ["1", "4"]
        ]


def test_a_page_of_reproducible_noise_claims_nothing(images, tmp_path):
    assert train(images, tmp_path / "run", FIXED, epochs=1) == 0
    shown = read(tmp_path / "run")
    assert "the epsilon of this run may not be claimed" in shown.text
    assert "For release" not in shown.text


EVIL = '"><script>alert(1)</script>&amp;'


def job(**given):
    return SimpleNamespace(
        settings=settings.Settings(**given),
        data=SimpleNamespace(y_train=[0] * 7, y_test=[0] * 5),
        ends=[4],
        plan=None,
        extended=[],
        description={"machine": {EVIL: EVIL}},
    )


def test_no_name_becomes_a_part_of_the_page(tmp_path):
    out = tmp_path / EVIL.replace("/", "") / "\udcff\x1b"
    out.mkdir(parents=True)
    given = {"data": f"{EVIL}.npz", "model": f"{EVIL}:make"}
    report.write_page(out, job(**given), [], records(2), {report.CURVES: b"drawn"})
    shown = read(out)
    check_self_contained(shown)
    for name, value in given.items():
        assert [f"--{name}", value] in shown.cells
    assert [EVIL, EVIL] in shown.cells
    assert r"\udcff\x1b/ensemble.safetensors" in shown.text


@SLOW
@pytest.mark.skipif(not BROWSER, reason="there is no chromium")
def test_a_browser_reads_the_same_page_and_complains_of_nothing(tmp_path):
    drawn = io.BytesIO()
    report.curves(EVIL, [], records(2), delta=1e-5).savefig(drawn, format="png")
    images = {report.CURVES: drawn.getvalue()}
    report.write_page(tmp_path, job(data=f"{EVIL}.npz"), [], records(2), images)
    own = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command = [BROWSER, *own, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    page = (tmp_path / "report.html").as_uri()
    done = subprocess.run([*command, page], capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in done.stderr
    shown = Page(done.stdout)
    assert shown.text == read(tmp_path).text
    assert shown.cells == read(tmp_path).cells


@pytest.mark.parametrize("count", [1, 99, 100, 101, 1000, 1234])
def test_a_page_of_many_epochs_stays_short_and_has_the_last(tmp_path, count):
    report.write_page(tmp_path, job(), records(count), records(count), {})
    epochs = [
        int(cells[0])
        for cells in read(tmp_path).cells
        if len(cells) == 7 and cells[0] != "epoch"
    ]
    assert epochs[-1] == count
    assert len(epochs) == len(set(epochs)) <= 101
    assert count > 100 or epochs == list(range(1, count + 1))


def test_settings_are_named_as_on_the_command_line(tmp_path):
    report.write_page(tmp_path, job(), [], records(1), {})
    text = (tmp_path / "report.html").read_text()
    names = re.findall(r"<td>--([a-z-]+)</td>", text)
    fields = [each.name for each in dataclasses.fields(settings.Settings)]
    assert [name.replace("-", "_") for name in names] == fields
