"""The pieces of an experiment: how they run, their data, nets and measures."""

import json

import numpy as np
import pytest
import torch

from bench.experiments import data, measuring, nets, study
from bench.experiments.study import Piece, Place, Study


def one_of(*runs):
    """Make an experiment of pieces named 0, 1, ..., whose results are drawn as text."""

    def check(results):
        total = sum(each["value"] for each in results.values())
        assert total < 10, f"a sum of {total}"
        return [f"a sum of {total}"]

    def draw(results, figure):
        figure.subplots().plot([each["value"] for each in results.values()])

    pieces = [Piece(str(i), run) for i, run in enumerate(runs)]
    return Study("A title", lambda _: pieces, check, lambda _: "| a table |", draw)


def gives(value):
    return lambda tell: {"value": value}


def raises(tell):
    raise KeyboardInterrupt


@pytest.fixture
def place(tmp_path):
    return Place("tiny", "cpu", tmp_path / "out")


def kept(place):
    return json.loads((place.folder / "it.json").read_text())["pieces"]


def test_an_interrupted_run_goes_on_to_results_a_table_and_a_figure(place):
    with pytest.raises(KeyboardInterrupt):
        study.run("it", one_of(gives(1), raises), place)
    assert study.run("it", one_of(raises, gives(2)), place) == ["a sum of 3"]
    assert kept(place) == {"0": {"value": 1}, "1": {"value": 2}}
    text = (place.folder / "it.md").read_text()
    for part in ("# A title", "| a table |", "(it.png)", "* a sum of 3", " thread"):
        assert part in text
    assert (place.folder / "it.png").exists()
    other = Place("small", "cpu", place.folder)
    with pytest.raises(ValueError, match=r"size 'small', got 'tiny'.*--out"):
        study.run("it", one_of(gives(1)), other)


def test_a_check_that_fails_keeps_the_results(place):
    with pytest.raises(AssertionError, match="a sum of 20"):
        study.run("it", one_of(gives(20)), place)
    assert kept(place) == {"0": {"value": 20}}
    assert "Checked" not in (place.folder / "it.md").read_text()


@pytest.mark.parametrize("content", ["{", "[]", '{"settings": {}}', "null"])
def test_a_damaged_file_is_refused_and_kept(place, content):
    place.folder.mkdir()
    path = place.folder / "it.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="got a damaged file"):
        study.run("it", one_of(gives(1)), place)
    assert path.read_text() == content


def test_live_bytes_are_those_of_tensors_that_live():
    with measuring.LiveBytes() as live:
        first = torch.zeros(1000)
        view = first[1:]  # no memory of its own
        second = first + 1
        del first, view
        third = second.view(10, 100).mul(2)
        assert live.now == 8000
        del second, third
    assert (live.now, live.peak) == (0, 8000)


def test_a_loop_over_samples_keeps_less_than_a_batch():
    weights = [torch.zeros(100, 100, requires_grad=True) for _ in range(4)]

    def peak(rows):
        def run():
            for x in torch.zeros(640, 100).split(rows):
                for weight in weights:
                    x = (x @ weight).tanh()
                torch.autograd.grad(x.sum(), weights)

        return measuring.peak_bytes(run, "cpu")["peak_bytes"]

    assert peak(640) > 4 * peak(10)
    assert measuring.tree_bytes(weights) == 4 * 4 * 100 * 100


def test_made_images_can_be_learned_and_are_the_same_each_time():
    images = data.make_images(400, 16)
    assert images.x.shape == (400, 3, 16, 16)
    assert torch.equal(images.x, data.images(None, 400, 16).x)
    assert images.y.bincount().tolist() == [40] * 10
    train, held = images.split(100)
    assert (len(train.x), len(held.y)) == (300, 100)

    # No single pixel tells the class: class means are noise, spectra are not.
    def spectra(x):
        return torch.fft.rfft2(x.mean(1)).abs()[:, :6, :6].flatten(1)

    distances = torch.cdist(spectra(held.x), spectra(train.x))
    voted = train.y[distances.topk(9, largest=False).indices].mode(1).values
    assert (voted == held.y).double().mean() > 0.3


def test_a_source_with_too_few_images_is_refused(tmp_path):
    path = tmp_path / "few.npz"
    x, y = np.zeros((4, 1, 8, 8), np.float32), np.arange(4)
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    assert len(data.images(str(path), 8, 8).x) == 8
    with pytest.raises(ValueError, match="expected 9 images, got 8"):
        data.images(str(path), 9, 8)
    with pytest.raises(FileNotFoundError, match="--data missing.npz"):
        data.images("missing.npz", 4, 8)


PARAMETERS = {"VGG16": 138.4, "MobileNet V1": 4.2, "MobileNet V2": 3.5}
PARAMETERS |= {"ResNet-50": 25.6, "EfficientNet-B0": 5.3, "EfficientNet-B3": 12.2}
PARAMETERS |= {"EfficientNet-B5": 30.4}


@pytest.mark.parametrize("name", PARAMETERS)
def test_an_architecture_has_as_many_parameters_as_its_paper_says(name):
    build, _ = nets.ARCHITECTURES[name]
    with torch.device("meta"):
        count = sum(each.numel() for each in build(1000).parameters()) / 1e6
    assert count == pytest.approx(PARAMETERS[name], rel=0.02)
