"""Columns of scores are samples: loaders that shuffle would permute them."""

import tempfile

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import data

import vgrad
from vgrad import attribution, dp
from vgrad.dp import secret_key

N = 7
DATA = data.TensorDataset(torch.randn(N, 3), torch.arange(N) % 3)
FMODEL, *GIVEN = vgrad.make_functional_with_buffers(nn.Linear(3, 3))
LOSS = vgrad.sample_loss(FMODEL, F.cross_entropy)
QUERIES = DATA[:2]


def stored(batches):
    project = vgrad.per_sample_projection(LOSS, 4, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        store = attribution.Store.write(folder, project, *GIVEN, batches)
        return torch.cat([each[""].clone() for each in store])


def trak(batches, given=GIVEN):
    options = {"dim": 2, "seed": 0, "ridge": 1.0}
    return attribution.trak(FMODEL, *given, QUERIES, batches, **options)


READERS = {
    "influence": lambda x: attribution.influence(LOSS, *GIVEN, QUERIES, x),
    "self_influence": lambda x: attribution.self_influence(LOSS, *GIVEN, x),
    "trak": trak,
    "Store.write": stored,
}


class Own(data.Sampler):
    """Draws another order in each pass, or keeps the one that it has."""

    def __init__(self, order=None):
        self.order = order

    def __iter__(self):
        order = torch.randperm(N) if self.order is None else self.order
        return iter(order)

    def __len__(self):
        return N


class Stream(data.IterableDataset):
    def __iter__(self):
        return (DATA[i] for i in range(N))


def loader(*args, **options):
    return data.DataLoader(DATA, *args, **options)


SHUFFLED = {
    "shuffle": lambda: loader(2, shuffle=True),
    "subset": lambda: loader(2, sampler=data.SubsetRandomSampler(range(N))),
    "batches": lambda: loader(
        batch_sampler=data.BatchSampler(data.RandomSampler(DATA), 2, drop_last=False)
    ),
    "own": lambda: loader(2, sampler=Own()),
    "workers": lambda: loader(2, in_order=False),
    "Poisson": lambda: loader(
        batch_sampler=dp.PoissonBatchSampler(N, 0.5, 3, key=secret_key(seed=0))
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", SHUFFLED)
def test_loaders_that_shuffle_are_refused(name, reader):
    text = rf"{reader}\(batches\): .* one order.*Loader that shuffles.*Pass DataLoader"
    with pytest.raises(ValueError, match=text):
        READERS[reader](SHUFFLED[name]())


ORDER = [3, 1, 0, 6, 2, 5, 4]
ORDERED = {
    "plain": (lambda: loader(2), range(N)),
    "workers": (lambda: loader(2, num_workers=2), range(N)),
    "own": (lambda: loader(2, sampler=Own(ORDER)), ORDER),
    "stream": (lambda: data.DataLoader(Stream(), 2), range(N)),
}


@pytest.mark.parametrize("reader", ["influence", "self_influence", "trak"])
@pytest.mark.parametrize("name", ORDERED)
def test_loaders_in_order_have_their_columns(name, reader):
    make, order = ORDERED[name]
    expected = READERS[reader]([DATA[[*order]]])
    torch.testing.assert_close(READERS[reader](make()), expected)


class Changing:
    """Batches in another order each time, with no sampler that shows it."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return iter([DATA[:4], DATA[4:]][:: 1 if self.passes == 1 else -1])


def test_each_checkpoint_sees_the_samples_in_one_order():
    params, buffers = GIVEN
    twice = [params, {n: each + 1 for n, each in params.items()}], buffers
    assert trak([DATA[:4], DATA[4:]], twice).shape == (2, N)
    with pytest.raises(ValueError, match=r"trak\(batches\): .* same samples in each"):
        trak(Changing(), twice)
