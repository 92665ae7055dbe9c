"""The sizes that batches are filled up to."""

import pytest
import torch

from tests.compiled import problems
from vgrad.compiled import functions
from vgrad.persample.engine import Inputs

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(
    ("dataset_size", "sampling_rate", "sizes"),
    [
        (10_000, 0.01, (91, 105, 120, 140)),  # of mean 100 and deviation 9.95
        (4, 0.5, (1, 3, 4)),  # no more than there are
        (10, 0.05, (1, 2, 4)),  # one at least
    ],
)
def test_sizes_are_deviations_around_the_mean(dataset_size, sampling_rate, sizes):
    plan = problems.plan(dataset_size=dataset_size, sampling_rate=sampling_rate)
    assert functions.sizes_of_plan(plan) == sizes


def test_sizes_are_sorted_and_each_is_there_once():
    assert functions.checked_sizes([6, 1, 6]) == (1, 6)


def test_a_batch_is_filled_up_to_the_next_size_and_split_beyond_the_last():
    sizes = {1: 4, 4: 4, 5: 6, 6: 6, 7: 10, 11: 12, 12: 12, 13: 16, 17: 18}
    assert {size: functions.padded_size(size, (4, 6)) for size in sizes} == sizes


def test_a_batch_is_filled_up_with_the_first_sample():
    x = torch.arange(4.0).reshape(2, 2)
    inputs = Inputs({}, {}, {"x": x, "n": torch.arange(2)}, weights=torch.ones(2))
    found = inputs.padded(2, 4)
    assert torch.equal(found.batch["x"], x[[0, 1, 0, 0]])
    assert found.batch["n"].tolist() == [0, 1, 0, 0]
    assert found.mask.tolist() == [True, True, False, False]
    assert found.weights.shape == (4,)
    masked = inputs._replace(mask=torch.tensor([False, True])).padded(2, 2)
    assert masked.batch["x"] is x
    assert masked.mask.tolist() == [False, True]
    empty = Inputs({}, {}, (x[:0],)).padded(0, 1)
    assert torch.equal(empty.batch[0], torch.zeros(1, 2))
    assert not empty.mask
