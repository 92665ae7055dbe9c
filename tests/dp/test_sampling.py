"""Poisson batches: their distribution, their streams, and loaders that take them."""

import pickle
from itertools import pairwise

import pytest
import torch
from scipy import stats
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from tests import streams
from tests.dp.runs import KEY
from vgrad import distributed
from vgrad.dp import PoissonBatchSampler, collate, sampling, secret_key


def sample(size, rate, step=0):
    return sampling.poisson_sample(size, rate, key=KEY, step=step)


DRAWS, SIZE, RATE = 4000, 40, 0.3


@pytest.fixture(scope="module")
def table():
    """Which samples were in which batch, [DRAWS, SIZE]."""
    table = torch.zeros(DRAWS, SIZE, dtype=torch.float64)
    for step, row in enumerate(table):
        row[sample(SIZE, RATE, step)] = 1
    return table


def test_samples_are_drawn_with_the_rate_and_independently(table):
    rates = (table.sum(0) - DRAWS * RATE) / (DRAWS * RATE * (1 - RATE)) ** 0.5
    pairs = torch.triu_indices(SIZE, SIZE, 1).unbind()
    for scores in (rates, torch.corrcoef(table.T)[pairs] * DRAWS**0.5):
        low, high = stats.chi2(scores.numel()).interval(0.999)
        assert low < float((scores**2).sum()) < high


def test_batch_sizes_are_binomial_and_not_fixed(table):
    sizes, law = table.sum(1).long(), stats.binom(SIZE, RATE)
    edges = [0, 8, 10, 12, 14, 16, SIZE + 1]
    observed = [int(((sizes >= a) & (sizes < b)).sum()) for a, b in pairwise(edges)]
    expected = [DRAWS * (law.cdf(b - 1) - law.cdf(a - 1)) for a, b in pairwise(edges)]
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > 0.001
    batches = list(PoissonBatchSampler(10, 0.1, DRAWS, key=KEY))
    empty = sum(batch == [] for batch in batches)
    assert stats.binomtest(empty, DRAWS, 0.9**10).pvalue > 0.001


def test_a_small_rate_gives_its_share_of_samples():
    low, high = stats.poisson(200).interval(0.999)
    assert low < len(sample(10**7, 2e-5)) < high


@pytest.mark.parametrize(
    ("size", "rate", "step"),
    [(70_000, 0.01, 0), (70_000, 0.01, 3), (1000, 0.5, 0), (1000, 1.0, 0), (1, 1.0, 0)],
)
def test_batches_are_those_of_the_reference(size, rate, step):
    drawn = sample(size, rate, step)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == streams.batch(KEY.tolist(), step, size, rate)
    assert rate < 1 or len(drawn) == size


def sampler(steps=3, key=KEY, **options):
    return PoissonBatchSampler(100, 0.5, steps, key=key, **options)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_run_that_goes_on_gets_the_batches_that_it_would_have_had(start):
    whole, rest = list(sampler()), sampler(start=start)
    assert len(rest) == 3 - start
    assert list(rest) == whole[start:]
    with pytest.raises(RuntimeError, match=r"expected one pass .*plan\.sampler\(state"):
        next(iter(rest))
    assert all(type(index) is int for batch in whole for index in batch)
    assert list(sampler(key=secret_key(seed=2))) != whole


def nested(index):
    pair = (torch.full((4,), index, dtype=torch.float16), index > 0)
    return {"pair": pair, "label": index}


def test_an_empty_batch_has_the_tree_and_dtypes_of_a_batch_and_memory_of_its_own():
    collated = collate([nested(index) for index in range(3)])
    full, first = collated([nested(0), nested(1)]), collated([])
    assert full["label"].tolist() == [0, 1]
    first["label"] = None
    first["pair"][0].resize_(2, 4)
    empty = collated([])
    assert empty.keys() == full.keys()
    assert type(empty["pair"]) is type(full["pair"])
    for kept, gone in zip(full["pair"], empty["pair"], strict=True):
        assert (gone.shape, gone.dtype) == ((0, *kept.shape[1:]), kept.dtype)
    assert empty["label"].shape == (0,)


def doubled(samples):
    return {"x": 2 * torch.stack([x for (x,) in samples])}


def test_a_collate_function_of_the_user_is_used_and_can_be_pickled():
    dataset = TensorDataset(torch.arange(4.0))
    collated = pickle.loads(pickle.dumps(collate(dataset, doubled)))
    assert collated([dataset[3], dataset[1]])["x"].tolist() == [6.0, 2.0]
    assert collated([])["x"].shape == (0,)


class Wrapped(BatchSampler):
    """A sampler of batches that goes over those of another one, as accelerate has."""

    def __init__(self, batches):
        self.batch_sampler = batches

    def __iter__(self):
        yield from self.batch_sampler


DATA = TensorDataset(torch.arange(8.0))


def of_eight():
    return PoissonBatchSampler(8, 0.2, 12, key=KEY)


def parts():
    with distributed.single_process_mesh("dp") as mesh:
        return distributed.local_batches(of_eight(), mesh)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_in_the_place_of_single_indices_are_refused(workers):
    options = {"batch_size": 1 + 2 * workers, "num_workers": workers}
    for batches in (of_eight(), parts()):
        message = rf"sampler\): expected single indices, got a {type(batches).__name__}"
        with pytest.raises(TypeError, match=message):
            next(iter(DataLoader(DATA, sampler=batches, **options)))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        lambda: {"batch_sampler": of_eight(), "collate_fn": collate(DATA)},
        lambda: {"batch_sampler": Wrapped(of_eight()), "collate_fn": collate(DATA)},
        lambda: {"batch_sampler": parts(), "collate_fn": collate(DATA)},
        lambda: {"sampler": of_eight(), "batch_size": None},
    ],
)
def test_batches_are_drawn_where_they_are_batches(options, workers):
    loader, expected = DataLoader(DATA, **options(), num_workers=workers), [*of_eight()]
    assert {0, 2} <= {len(batch) for batch in expected}
    assert [x.tolist() for (x,) in loader] == expected
