"""The data sets of the main job, read or refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from tests import oracle
from vgrad.cli import data


def arrays(**changed):
    rng = np.random.default_rng(0)
    values = {
        "x_train": rng.random((6, 4, 5), dtype=np.float32),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": rng.random((3, 4, 5), dtype=np.float32),
        "y_test": np.array([0, 1, 2]),
        **changed,
    }
    return {key: value for key, value in values.items() if value is not None}


@pytest.fixture
def written(tmp_path):
    def write(**changed):
        np.savez(tmp_path / "images.npz", **arrays(**changed))
        return str(tmp_path / "images.npz")

    return write


@pytest.fixture
def read(written):
    return lambda **changed: data.load(written(**changed), seed=0)


def test_the_digits_are_scikit_learns_divided_by_sixteen_and_split_by_the_seed():
    first, bunch = data.load("digits", seed=3), load_digits()
    x = torch.cat([first.x_train, first.x_test]).flatten(1).numpy()
    y = torch.cat([first.y_train, first.y_test]).numpy()
    both = np.c_[x, y], np.c_[(bunch.images / 16).reshape(-1, 64), bunch.target]
    one, other = (rows[np.lexsort(rows.T)] for rows in both)
    assert np.array_equal(one, other)
    assert (len(first.x_train), len(first.x_test), first.classes) == (1438, 359, 10)
    assert first.y_train.dtype == torch.int64
    torch.manual_seed(2)
    oracle.assert_exact(data.load("digits", seed=3), first, 0)
    assert not torch.equal(first.x_test, data.load("digits", seed=1).x_test)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((6, 4, 5), (1, 4, 5)), ((6, 3, 4, 5), (3, 4, 5)), ((6, 7), (1, 1, 7))],
)
def test_images_become_four_dimensional_without_moving_a_pixel(read, shape, expected):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    dataset = read(x_train=x, x_test=x[:3])
    assert dataset.shape == (*expected, 3)
    assert np.array_equal(dataset.x_train.numpy().ravel(), x.ravel())


def test_bytes_are_divided_by_255_and_floats_left_alone(read):
    x = np.array([[[0, 51], [102, 255]]] * 6, dtype=np.uint8)
    expected = torch.tensor([[0.0, 0.2], [0.4, 1.0]])
    torch.testing.assert_close(read(x_train=x, x_test=x[:3]).x_train[0, 0], expected)
    # One sample does not change how another is preprocessed.
    wide = np.array([[[-1000.0, 0.5], [0.25, 1e6]]] + [[[0.0, 0.1], [0.2, 0.3]]] * 5)
    x = read(x_train=wide, x_test=wide[:3]).x_train[:, 0]
    assert np.array_equal(x.numpy(), wide.astype(np.float32))


@pytest.mark.parametrize(
    ("changed", "classes"),
    [
        ({}, 3),
        ({"y_test": np.array([0, 5, 1])}, 6),
        ({"classes": np.array(9)}, 9),
        ({"classes": np.array(2**16)}, 2**16),
        ({"y_train": np.array([0, 1] * 3), "y_test": np.zeros(3, int)}, 2),
    ],
)
def test_the_classes_are_the_files_or_else_the_largest_label(read, changed, classes):
    assert read(**changed).classes == classes


def nan_at(place):
    return np.where(np.arange(60) == place, np.nan, 1.0).reshape(3, 4, 5)


EMPTY = {"x_train": np.zeros((0, 4, 5)), "y_train": np.zeros(0, int)}
ONE_CLASS = {"y_train": np.zeros(6, int), "y_test": np.zeros(3, int)}
LARGE = {"y_train": np.array([0, 1, 2, 0, 1, 2**31 - 5])}
WRONG = [
    ({"x_test": None}, "got none of x_test"),
    ({"y_train": np.zeros(5, int)}, "got 5 in y_train and 6"),
    ({"x_train": np.zeros(6)}, r"in x_train, got shape \(6,\)"),
    ({"x_test": np.zeros((3, 1, 1, 1, 1))}, "in x_test, got shape"),
    (EMPTY, "no size of zero, in x_train"),
    ({"x_test": np.zeros((3, 4, 4))}, "expected images of one size"),
    ({"x_train": np.full((6, 4, 5), np.nan)}, "expected finite .* in x_train"),
    ({"x_test": nan_at(7)}, "expected finite .* in x_test"),
    ({"x_test": np.full((3, 4, 5), 1e39)}, "finite .* in x_test"),
    ({"x_train": np.zeros((6, 4, 5), int)}, "uint8.* got int64"),
    ({"x_train": np.full((6, 4, 5), "a")}, "uint8.* in x_train, got <U1"),
    ({"y_test": np.array(list("abc"))}, "whole numbers .* y_test"),
    ({"y_test": np.zeros(3)}, "whole numbers .* y_test, got float64"),
    ({"y_test": np.eye(3, dtype=int)}, "whole numbers .* y_test"),
    ({"y_train": np.array([0, 1, 2, 0, 1, -1])}, "in y_train, got -1 to 2"),
    ({"classes": np.array(2)}, "got the label 2 and 2 classes"),
    ({"y_test": np.array([0, 1, 2**40])}, "from 0 on in y_test"),
    (ONE_CLASS, "at least two classes"),
    (LARGE, "at most 65536, got the label 2147483643"),
    ({"classes": np.array(2**62)}, "got the label 2 and 46116860184"),
    ({"classes": np.array(-3)}, "and -3 classes"),
    ({"classes": np.array([3, 3])}, "one whole number in classes"),
    ({"classes": np.array(2.5)}, "one whole number in classes"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_a_file_with_wrong_contents_is_refused(read, changed, message):
    with pytest.raises(ValueError, match=message):
        read(**changed)


def test_a_missing_file_an_unknown_name_and_one_array_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.npz: expected a file"):
        data.load(str(tmp_path / "none.npz"), seed=0)
    with pytest.raises(ValueError, match="expected digits, mnist, cifar10 or a file"):
        data.load("imagenet", seed=0)
    np.save(tmp_path / "x.npy", np.zeros(3))
    (tmp_path / "x.npy").rename(tmp_path / "x.npz")
    with pytest.raises(ValueError, match=r"as numpy\.savez writes them"):
        data.load(str(tmp_path / "x.npz"), seed=0)


class Trap:
    """An object that leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(read, tmp_path):
    trap = np.array([Trap(tmp_path / "sprung")] * 6, dtype=object)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        read(y_train=trap)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_without_torchvision_the_error_says_how_to_get_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchvision"):
        data.load(name, seed=0)
