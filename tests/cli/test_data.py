"""The data sets of the main job: what is read, and what is refused."""

import io
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from tests import oracle
from tests.examples import examples
from vgrad.cli import data


def arrays(**changed):
    rng = np.random.default_rng(0)
    found = {
        "x_train": rng.random((6, 4, 5), dtype=np.float32),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": rng.random((3, 4, 5), dtype=np.float32),
        "y_test": np.array([0, 1, 2]),
        **changed,
    }
    return {key: value for key, value in found.items() if value is not None}


@pytest.fixture
def written(tmp_path):
    def write(**changed):
        path = tmp_path / "images.npz"
        np.savez(path, **arrays(**changed))
        return str(path)

    return write


def test_the_digits_are_scikit_learns_divided_by_sixteen():
    found, bunch = data.load("digits", seed=3), load_digits()
    x = np.concatenate([found.x_train.numpy(), found.x_test.numpy()])[:, 0]
    y = np.concatenate([found.y_train.numpy(), found.y_test.numpy()])
    expected = (bunch.images / 16).astype(np.float32)
    assert pairs(x, y) == pairs(expected, bunch.target)
    assert (len(found.x_train), len(found.x_test), found.classes) == (1438, 359, 10)
    assert found.y_train.dtype == torch.int64


def pairs(images, labels):
    return sorted(
        (image.tobytes(), int(y)) for image, y in zip(images, labels, strict=True)
    )


def test_the_seed_alone_fixes_the_split():
    torch.manual_seed(1)
    first = data.load("digits", seed=0)
    torch.manual_seed(2)
    oracle.assert_exact(data.load("digits", seed=0), first, 0)
    assert not torch.equal(first.x_test, data.load("digits", seed=1).x_test)


@pytest.mark.parametrize(
    ("given", "expected"),
    [((6, 4, 5), (1, 4, 5)), ((6, 3, 4, 5), (3, 4, 5)), ((6, 7), (1, 1, 7))],
)
def test_images_become_four_dimensional_without_moving_a_pixel(
    written, given, expected
):
    x = np.arange(np.prod(given), dtype=np.float32).reshape(given)
    found = data.load(written(x_train=x, x_test=x[:3]), seed=0)
    assert found.x_train.shape == (6, *expected)
    assert found.shape == (*expected, 3)
    assert np.array_equal(found.x_train.numpy().ravel(), x.ravel())


def test_bytes_are_divided_by_255_and_floats_left_alone(written):
    x = np.array([[[0, 51], [102, 255]]] * 6, dtype=np.uint8)
    found = data.load(written(x_train=x, x_test=x[:3]), seed=0)
    expected = torch.tensor([[0.0, 0.2], [0.4, 1.0]])
    torch.testing.assert_close(found.x_train[0, 0], expected)
    wide = np.array([[[-1000.0, 0.5], [0.25, 1e6]]] * 6)
    found = data.load(written(x_train=wide, x_test=wide[:3]), seed=0)
    assert found.x_train[0, 0].tolist() == [[-1000.0, 0.5], [0.25, 1e6]]


def test_one_sample_does_not_change_how_another_is_preprocessed(written):
    changed = arrays()["x_train"]
    before = data.load(written(), seed=0).x_train
    changed[0] = 1e6
    after = data.load(written(x_train=changed), seed=0).x_train
    oracle.assert_exact(after[1:], before[1:], 0)


def test_the_classes_are_those_that_the_file_states_or_else_the_largest_label(written):
    assert data.load(written(), seed=0).classes == 3
    assert data.load(written(y_test=np.array([0, 5, 1])), seed=0).classes == 6
    assert data.load(written(classes=np.array(9)), seed=0).classes == 9
    assert data.load(written(classes=np.array(2**16)), seed=0).classes == 2**16
    two = {"y_train": np.array([0, 1] * 3), "y_test": np.zeros(3, int)}
    assert data.load(written(**two), seed=0).classes == 2


WRONG = {
    "no x_test": ({"x_test": None}, "x_test is missing"),
    "one label short": ({"y_train": np.zeros(5, int)}, "got 5 in y_train and 6"),
    "one dimension": ({"x_train": np.zeros(6)}, r"in x_train, got shape \(6,\)"),
    "five dimensions": ({"x_test": np.zeros((3, 1, 1, 1, 1))}, "in x_test, got shape"),
    "no training samples": (
        {"x_train": np.zeros((0, 4, 5)), "y_train": np.zeros(0, int)},
        "no size of zero, in x_train",
    ),
    "two sizes": ({"x_test": np.zeros((3, 4, 4))}, "expected images of one size"),
    "NaN": ({"x_train": np.full((6, 4, 5), np.nan)}, "expected finite .* in x_train"),
    "one NaN": (
        {"x_test": np.where(np.arange(60) == 7, np.nan, 1.0).reshape(3, 4, 5)},
        "expected finite .* in x_test",
    ),
    "beyond float32": ({"x_test": np.full((3, 4, 5), 1e39)}, "finite .* in x_test"),
    "whole numbers": ({"x_train": np.zeros((6, 4, 5), int)}, "uint8.* got int64"),
    "text": ({"x_train": np.full((6, 4, 5), "a")}, "uint8.* in x_train, got <U1"),
    "labels of text": ({"y_test": np.array(list("abc"))}, "whole numbers .* y_test"),
    "fractions": ({"y_test": np.zeros(3)}, "whole numbers .* y_test, got float64"),
    "one-hot": ({"y_test": np.eye(3, dtype=int)}, "whole numbers .* y_test"),
    "negative": ({"y_train": np.array([0, 1, 2, 0, 1, -1])}, "in y_train, got -1 to 2"),
    "out of range": ({"classes": np.array(2)}, "got the label 2 and 2 classes"),
    "huge": ({"y_test": np.array([0, 1, 2**40])}, "from 0 on in y_test"),
    "one class": (
        {"y_train": np.zeros(6, int), "y_test": np.zeros(3, int)},
        "at least two classes",
    ),
    "a large label": (
        {"y_train": np.array([0, 1, 2, 0, 1, 2**31 - 5])},
        "at most 65536, got the label 2147483643",
    ),
    "many classes": ({"classes": np.array(2**62)}, "got the label 2 and 46116860184"),
    "negative classes": ({"classes": np.array(-3)}, "and -3 classes"),
    "two counts": ({"classes": np.array([3, 3])}, "one whole number in classes"),
    "half a count": ({"classes": np.array(2.5)}, "one whole number in classes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_with_wrong_contents_is_refused(written, name):
    changed, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        data.load(written(**changed), seed=0)


def test_a_missing_file_and_an_unknown_name_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.npz: expected a file"):
        data.load(str(tmp_path / "none.npz"), seed=0)
    with pytest.raises(ValueError, match="expected digits, mnist, cifar10 or a file"):
        data.load("imagenet", seed=0)


def test_one_array_is_no_archive(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(3))
    (tmp_path / "x.npy").rename(tmp_path / "x.npz")
    with pytest.raises(ValueError, match=r"as numpy\.savez writes them"):
        data.load(str(tmp_path / "x.npz"), seed=0)


def test_a_header_that_claims_more_than_there_is_memory_for_is_refused(
    written, tmp_path
):
    header = io.BytesIO()
    huge = {"descr": "<f4", "fortran_order": False, "shape": (2**30, 2**20)}
    np.lib.format.write_array_header_1_0(header, huge)
    with zipfile.ZipFile(written(x_test=None), "a") as archive:
        archive.writestr("x_test.npy", header.getvalue())
    with pytest.raises(ValueError, match="MemoryError"):
        data.load(str(tmp_path / "images.npz"), seed=0)


class Trap:
    """An object that leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(written, tmp_path):
    trap = np.array([Trap(tmp_path / "sprung")] * 6, dtype=object)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        data.load(written(y_train=trap), seed=0)
    assert not (tmp_path / "sprung").exists()


@examples(80)
@given(
    place=st.floats(0, 1, exclude_max=True),
    byte=st.integers(1, 255),
    cut=st.booleans(),
    compressed=st.booleans(),
)
def test_a_damaged_file_is_refused_or_read_but_never_crashes(
    tmp_path_factory, place, byte, cut, compressed
):
    path = tmp_path_factory.mktemp("damaged") / "x.npz"
    (np.savez_compressed if compressed else np.savez)(path, **arrays())
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    if cut:
        del content[at:]
    else:
        content[at] ^= byte
    path.write_bytes(content)
    try:
        found = data.load(str(path), seed=0)
    except ValueError:
        return
    assert found.x_train.isfinite().all()


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_without_torchvision_the_error_says_how_to_get_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchvision"):
        data.load(name, seed=0)


def test_torchvisions_arrays_come_out_as_bytes_over_255_with_colours_first(monkeypatch):
    images = np.arange(4 * 2 * 3 * 3, dtype=np.uint8).reshape(4, 2, 3, 3)

    def dataset(folder, *, train, download):
        few = slice(None) if train else slice(2)
        return types.SimpleNamespace(data=images[few], targets=[0, 1, 2, 3][few])

    module = types.ModuleType("torchvision.datasets")
    module.CIFAR10 = dataset
    monkeypatch.setitem(sys.modules, "torchvision.datasets", module)
    found = data.load("cifar10", seed=0)
    assert found.x_train.shape == (4, 3, 2, 3)
    assert found.classes == 10
    assert found.y_test.tolist() == [0, 1]
    torch.testing.assert_close(found.x_train[1, 2, 1, 0], torch.tensor(29 / 255))


def test_the_digest_sees_every_pixel_label_and_size(written):
    base = data.load(written(), seed=0)
    assert data.digest(base) == data.digest(data.load(written(), seed=0))
    pixel = base.x_test.clone()
    pixel[2, 0, 3, 4] += 1e-6
    others = [
        base._replace(x_test=pixel),
        base._replace(y_train=base.y_train.flip(0)),
        base._replace(classes=4),
        base._replace(x_train=base.x_train.reshape(6, 1, 5, 4)),
        base._replace(x_train=base.x_test, x_test=base.x_train),
    ]
    assert len({data.digest(each) for each in (base, *others)}) == 6
