"""The picture of a run."""

from types import SimpleNamespace

import numpy as np
import pytest

from vgrad.cli import checkpoint, report, settings

TITLE = "digits, mlp, seed 0"


def records(count, members=None):
    steps = range(1, count + 1)
    rows = [(4 * i, 2 / i, 0.5 + 0.1 / i, 0.3 * i, 100.0, None, None) for i in steps]
    return [checkpoint.Record(*row, members) for row in rows]


def job(**options):
    return SimpleNamespace(settings=settings.Settings(**options))


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
