"""Bootstrap draws and folds: samples in them, seeds and bad numbers."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vgrad.ensemble import bootstrap_indices, fold_indices

SEEDS = st.integers(0, 2**32)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 50), SEEDS)
def test_bootstrap_indices_have_the_size_asked_for(members, n, size, seed):
    indices = bootstrap_indices(members, n, size=size, seed=seed)
    assert indices.dtype == torch.int64
    assert indices.shape == (members, size)
    assert set(indices.flatten().tolist()) <= set(range(n))
    assert bootstrap_indices(members, n, seed=seed).shape == (members, n)


def test_bootstrap_draws_with_replacement_and_evenly():
    indices = bootstrap_indices(200, 100, seed=0)
    seen = [len(set(row.tolist())) / 100 for row in indices]
    # 1 - (1 - 1/100)^100 = 0.634 of the samples; the mean has an error of 0.002.
    assert sum(seen) / 200 == pytest.approx(0.634, abs=0.012)
    assert len({tuple(row.tolist()) for row in indices}) == 200
    counts = torch.bincount(indices.flatten(), minlength=100).double()
    statistic = ((counts - 200).square() / 200).sum()
    assert statistic < 150  # chi-squared of 99 degrees: once in 1500 draws above


@given(st.integers(2, 9), st.integers(0, 40), SEEDS)
def test_every_sample_is_in_a_fold_once_but_for_the_remainder(folds, more, seed):
    n = folds + more
    train, validation = fold_indices(folds, n, seed=seed)
    assert train.dtype == validation.dtype == torch.int64
    assert validation.shape == (folds, n // folds)
    assert train.shape == (folds, n - n // folds)
    for one, other in zip(train.tolist(), validation.tolist(), strict=True):
        assert sorted(one + other) == list(range(n))
    validated = Counter(validation.flatten().tolist())
    assert set(validated.values()) == {1}
    left = set(range(n)) - set(validated)
    assert len(left) == n % folds
    assert all(left <= set(row) for row in train.tolist())


@pytest.mark.parametrize(
    "draw",
    [
        lambda s: bootstrap_indices(4, 40, seed=s),
        lambda s: fold_indices(4, 40, seed=s)[1],
    ],
)
def test_the_seed_alone_fixes_the_indices(draw):
    torch.manual_seed(1)
    indices = draw(3)
    assert sorted(indices[0].tolist()) != list(range(len(indices[0])))
    torch.manual_seed(2)
    assert torch.equal(indices, draw(3))
    assert not torch.equal(indices, draw(4))
