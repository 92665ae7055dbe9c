"""The sizes that batches are filled up to."""

import pytest
import torch

import vgrad
from vgrad.compiled import buckets

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
    plan = vgrad.dp.Plan(
        dataset_size=dataset_size,
        sampling_rate=sampling_rate,
        noise_multiplier=1.0,
        max_norm=1.0,
        steps=1,
        delta=1e-5,
    )
    assert buckets.of_plan(plan) == sizes


def test_sizes_are_sorted_and_each_is_there_once():
    assert buckets.check([6, 1, 6]) == (1, 6)


def test_a_batch_is_filled_up_to_the_next_size_and_split_beyond_the_last():
    sizes = {1: 4, 4: 4, 5: 6, 6: 6, 7: 10, 11: 12, 12: 12, 13: 16, 17: 18}
    assert {size: buckets.padded_size(size, (4, 6)) for size in sizes} == sizes


def test_what_is_filled_in_is_the_first_sample_and_is_not_counted():
    x = torch.arange(4.0).reshape(2, 2)
    found = buckets.filled({"x": x, "n": torch.arange(2)}, 2, 4)
    assert torch.equal(found["x"], x[[0, 1, 0, 0]])
    assert found["n"].tolist() == [0, 1, 0, 0]
    assert buckets.filled((x,), 2, 2)[0] is x
    assert buckets.counted(2, 4, x.device).tolist() == [True, True, False, False]
