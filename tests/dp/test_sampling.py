import math
import pickle
import re
from itertools import islice, pairwise

import pytest
import torch
from scipy import stats
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset

from tests import streams
from vgrad.dp import PoissonBatchSampler, collate, poisson_sample, secret_key

KEY = secret_key(seed=0)


def sample(size, rate, step=0):
    return poisson_sample(size, rate, key=KEY, step=step)


DRAWS, SIZE, RATE = 4000, 40, 0.3


@pytest.fixture(scope="module")
def table():
    """Which samples were in which batch, [DRAWS, SIZE]."""
    table = torch.zeros(DRAWS, SIZE, dtype=torch.float64)
    for step, row in enumerate(table):
        row[sample(SIZE, RATE, step)] = 1
    return table


def test_every_sample_is_drawn_with_the_rate(table):
    scores = (table.sum(0) - DRAWS * RATE) / (DRAWS * RATE * (1 - RATE)) ** 0.5
    low, high = stats.chi2(SIZE).interval(0.999)
    assert low < float((scores**2).sum()) < high


def test_samples_are_drawn_independently_of_each_other(table):
    pairs = torch.triu_indices(SIZE, SIZE, 1).unbind()
    scores = torch.corrcoef(table.T)[pairs] * DRAWS**0.5
    low, high = stats.chi2(scores.numel()).interval(0.999)
    assert low < float((scores**2).sum()) < high


def test_batch_sizes_are_binomial_and_not_fixed(table):
    sizes, law = table.sum(1).long(), stats.binom(SIZE, RATE)
    edges = [0, 8, 10, 12, 14, 16, SIZE + 1]
    observed = [int(((sizes >= a) & (sizes < b)).sum()) for a, b in pairwise(edges)]
    expected = [DRAWS * (law.cdf(b - 1) - law.cdf(a - 1)) for a, b in pairwise(edges)]
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > 0.001


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_indices_are_distinct_ascending_and_int64(rate):
    drawn = sample(1000, rate)
    assert drawn.dtype == torch.int64
    assert bool((drawn.diff() > 0).all())
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < 1000
    assert rate < 1 or len(drawn) == 1000
    assert sample(1, 1.0).tolist() == [0]


def test_empty_batches_come_as_often_as_they_should():
    size, rate, steps = 10, 0.1, 4000
    batches = list(PoissonBatchSampler(size, rate, steps, key=KEY))
    empty = sum(batch == [] for batch in batches)
    assert stats.binomtest(empty, steps, (1 - rate) ** size).pvalue > 0.001


@pytest.mark.slow
def test_a_rate_far_below_the_steps_of_float32_is_honoured():
    # In float32 the smallest number drawn has probability 2^-24, 60 times this rate,
    # which would give 6 samples here; in float64 it is 0.1.
    drawn = [sample(10**7, 1e-9, step) for step in range(10)]
    assert sum(len(batch) for batch in drawn) <= 1


def test_a_small_rate_gives_its_share_of_samples():
    drawn = sample(10**7, 2e-5)
    assert stats.poisson(200).interval(0.999)[0] < len(drawn)
    assert len(drawn) < stats.poisson(200).interval(0.999)[1]


def test_batches_are_those_of_the_reference():
    size = 70_000  # more than one block
    for step in (0, 3):
        expected = streams.batch(KEY.tolist(), step, size, 0.01)
        assert sample(size, 0.01, step).tolist() == expected


@pytest.mark.parametrize("served", [1, 3])
def test_a_second_pass_is_refused(served):
    # It would draw the same batches again, whose steps have been accounted for.
    sampler = PoissonBatchSampler(100, 0.5, 3, key=KEY)
    assert len(list(islice(sampler, served))) == served
    with pytest.raises(RuntimeError, match=r"expected one pass .*plan\.sampler\(state"):
        next(iter(sampler))


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_run_that_goes_on_gets_the_batches_that_it_would_have_had(start):
    whole = list(PoissonBatchSampler(100, 0.5, 3, key=KEY))
    rest = PoissonBatchSampler(100, 0.5, 3, key=KEY, start=start)
    assert len(rest) == 3 - start
    assert list(rest) == whole[start:]
    assert all(type(index) is int for batch in whole for index in batch)
    with pytest.raises(ValueError, match=r"start=4, steps=3\): expected a start"):
        PoissonBatchSampler(100, 0.5, 3, key=KEY, start=4)


def test_the_same_key_draws_the_same_batches():
    first = list(PoissonBatchSampler(100, 0.5, 3, key=secret_key(seed=1)))
    again = list(PoissonBatchSampler(100, 0.5, 3, key=secret_key(seed=1)))
    other = list(PoissonBatchSampler(100, 0.5, 3, key=secret_key(seed=2)))
    assert first == again
    assert first != other


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_passes_on_empty_and_other_batches(num_workers):
    dataset = TensorDataset(torch.randn(6, 3, 2), torch.arange(6))
    loader = DataLoader(
        dataset,
        batch_sampler=PoissonBatchSampler(6, 0.1, 50, key=KEY),
        collate_fn=collate(dataset),
        num_workers=num_workers,
    )
    expected = list(PoissonBatchSampler(6, 0.1, 50, key=KEY))
    assert any(batch == [] for batch in expected)
    assert any(len(batch) > 1 for batch in expected)
    assert len(loader) == 50
    for indices, (x, y) in zip(expected, loader, strict=True):
        assert torch.equal(x, dataset.tensors[0][indices])
        assert y.tolist() == indices
        assert (x.shape[1:], x.dtype) == ((3, 2), torch.float32)
        assert y.dtype == torch.int64


class Nested(Dataset):
    """Samples that are a dictionary with a pair in it."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        pair = (torch.full((4,), index, dtype=torch.float16), index > 0)
        return {"pair": pair, "label": index}


def test_an_empty_batch_has_the_tree_and_dtypes_of_a_batch_and_memory_of_its_own():
    collated = collate(Nested())
    full, first = collated([Nested()[0], Nested()[1]]), collated([])
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


@pytest.mark.parametrize(
    "collate_fn",
    [
        lambda samples: ["name"] * len(samples),
        lambda samples: torch.tensor(1.0),
        lambda samples: torch.ones(7),
    ],
    ids=["strings", "no batch dimension", "other rows"],
)
def test_collate_refuses_what_cannot_be_made_empty(collate_fn):
    dataset = TensorDataset(torch.ones(4))
    with pytest.raises(TypeError, match="expected tensors with one row for one sample"):
        collate(dataset, collate_fn)


BAD = {
    **{f"rate {rate}": {"sampling_rate": rate} for rate in (0.0, -0.1, 1.1, math.nan)},
    "no samples": {"dataset_size": 0},
    "a size of 2.0": {"dataset_size": 2.0},
    "no steps": {"steps": 0},
    "start": {"start": -1},
    "step": {"step": -1},
    "float key": {"key": torch.zeros(32)},
    "number": {"key": 7},
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_out_of_range_are_refused(name):
    ((argument, value),) = BAD[name].items()
    error, message = ValueError, f"{argument}={value}"
    if argument == "key":
        error, message = TypeError, "key): expected a key"
    given = {"dataset_size": 10, "sampling_rate": 0.5, "key": KEY} | BAD[name]
    if argument not in ("steps", "start"):
        with pytest.raises(error, match=re.escape(f"poisson_sample({message}")):
            poisson_sample(**({"step": 0} | given))
    if argument != "step":
        with pytest.raises(error, match=re.escape(f"PoissonBatchSampler({message}")):
            PoissonBatchSampler(**({"steps": 1} | given))


def of_batches():
    return PoissonBatchSampler(8, 0.5, 4, key=secret_key(seed=0))


class Wrapped(BatchSampler):
    """A sampler of batches that goes over those of another one, as accelerate has."""

    def __init__(self, batches):
        self.batch_sampler = batches

    def __iter__(self):
        yield from self.batch_sampler


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_in_the_place_of_single_indices_are_refused(size, drop_last, workers):
    data = TensorDataset(torch.arange(8.0))
    options = {"batch_size": size, "drop_last": drop_last, "num_workers": workers}
    loader = DataLoader(data, sampler=of_batches(), **options)
    message = (
        r"DataLoader\(sampler\): expected single indices, got a PoissonBatchSampler"
    )
    with pytest.raises(TypeError, match=message):
        next(iter(loader))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
@pytest.mark.parametrize(
    "how",
    [
        lambda data: {"batch_sampler": of_batches(), "collate_fn": collate(data)},
        lambda data: {
            "batch_sampler": Wrapped(of_batches()),
            "collate_fn": collate(data),
        },
        lambda data: {"sampler": of_batches(), "batch_size": None},
    ],
)
def test_batches_are_drawn_where_they_are_batches(how, options):
    data = TensorDataset(torch.arange(8.0))
    loader = DataLoader(data, **how(data), **options)
    assert [x.tolist() for (x,) in loader] == [*of_batches()]


def test_parts_of_batches_are_no_single_indices_either():
    from vgrad import distributed

    with distributed.alone("dp") as mesh:
        parts = distributed.local_batches(of_batches(), mesh)
    data = TensorDataset(torch.arange(8.0))
    with pytest.raises(TypeError, match="expected single indices, got a LocalBatches"):
        next(iter(DataLoader(data, sampler=parts)))
    assert len([*DataLoader(data, batch_sampler=parts, collate_fn=collate(data))]) == 4
