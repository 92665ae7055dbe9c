"""Samples that are padded to the longest one of a batch, with and without a mask."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

from tests.dp import runs
from tests.dp.runs import first


def samples(lengths=(3, 5, 4, 3, 60, 4, 4, 3)):
    source = torch.Generator().manual_seed(2)
    return [(torch.randn(n, 4, generator=source), torch.tensor(n % 3)) for n in lengths]


def together(batch):
    x = pad_sequence([x for x, _ in batch], batch_first=True)
    return x, torch.stack([y for _, y in batch])


def masked(batch):
    lengths = torch.tensor([len(x) for x, _ in batch])
    x, y = together(batch)
    return x, torch.arange(x.shape[1]) < lengths[:, None], y


def named(batch):
    x, mask, y = masked(batch)
    return {"target": y, "x": x, "mask": mask}


def longest_first(batch):
    return masked(sorted(batch, key=lambda each: -len(each[0])))


def fixed(batch):
    x, mask, y = masked(batch)
    more = 64 - x.shape[1]
    return F.pad(x, (0, 0, 0, more)), F.pad(mask, (0, more)), y


def drawing(batch):
    x, mask, y = masked(batch)
    return x * (torch.rand(x.shape[:2]) < 0.9)[..., None], mask, y


class Pool(nn.Module):
    """Averages over positions, with a mask if it gets one."""

    def __init__(self, uses_mask=True, draws=False):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 3)
        self.drop, self.uses_mask, self.draws = nn.Dropout(0.5), uses_mask, draws

    def forward(self, x, mask=None, again=None):
        x = x + torch.rand_like(x) if self.draws else x
        hidden = self.drop(torch.tanh(self.inner(x)))
        if mask is None or not self.uses_mask:
            return self.outer(hidden.mean(1))
        kept = mask[..., None]
        return self.outer((hidden * kept).sum(1) / kept.sum(1))


def made(model, collate_fn, dataset=None, **options):
    dataset = samples() if dataset is None else dataset
    plan = runs.plan(len(dataset), 1.0)
    return runs.private(plan, model, dataset, collate_fn=collate_fn, **options)


REFUSED = "does not depend on the other samples.*check_collate=False skips"


@pytest.mark.parametrize("training", [True, False])
def test_padding_that_the_model_sees_is_refused(training):
    model = Pool().train(training)
    model.drop.train()
    secret = [(torch.full((n, 4), 123456.75), torch.tensor(1)) for n in (3, 9, 3, 3)]
    private = made(model, together, secret)
    batch = first(private)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSED) as error:
            private.backward(*batch)
        assert "123456" not in str(error.value)
        assert "1.2346" not in str(error.value)
    assert private.step == 0
    assert (model.training, model.drop.training) == (training, True)
    assert not runs.grads(model)
    private = made(model, together, check_collate=False)
    private.backward(*first(private))
    assert private.step == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("collate_fn", [masked, longest_first, fixed])
def test_masks_and_fixed_lengths_pass(collate_fn, dtype, recwarn):
    private = made(Pool().to(dtype), collate_fn)
    for x, mask, y in private.loader:
        private.backward(x.to(dtype), mask, y)
    assert private.step == 1
    assert not recwarn.list


@pytest.mark.parametrize("uses_mask", [True, False])
def test_arguments_are_those_that_the_loop_makes_of_a_batch(uses_mask):
    private = made(Pool(uses_mask), named)
    batch = first(private)
    mask = batch["mask"].clone()
    arguments = {"mask": mask, "x": batch["x"]}, {"again": mask}, batch["target"]
    if uses_mask:
        private.backward(*arguments)
        return
    with pytest.raises(RuntimeError, match=REFUSED):
        private.backward(*arguments)


def test_arguments_of_equal_values_are_told_apart_by_their_order():
    def both(batch):
        x, mask, y = masked(batch)
        return x, torch.ones_like(mask), mask, y

    # One sample has the same values in both, two of different lengths have not.
    private = made(Pool(), both, physical_batch_size=1)
    x, ones, mask, y = first(private)
    assert torch.equal(ones, mask)
    private.backward({"x": x, "again": ones, "mask": mask}, y)


@pytest.mark.parametrize("collate_fn", [masked, fixed])
def test_arguments_that_are_not_of_the_batch_are_refused_where_samples_are_padded(
    collate_fn,
):
    private = made(Pool(), collate_fn)
    x, mask, y = first(private)
    if collate_fn is fixed:
        private.backward(2 * x, mask, y)
        return
    with pytest.raises(RuntimeError, match="got others made of them.*check_collate="):
        private.backward(2 * x, mask, y)


class Reading:
    """A data set of one function of the row; rows that were read are listed."""

    def __init__(self, function, size=8):
        self.function, self.size, self.read = function, size, []

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        self.read.append(row)
        return self.function(row)


def test_random_numbers_go_on_as_if_nothing_was_looked_at():
    def augmented(row):
        x, y = samples()[row]
        return x + random.random() + np.random.rand() + torch.rand(()), y

    def seeded():
        for each in (random.seed, np.random.seed, torch.manual_seed):
            each(3)

    def states():
        numpy = np.random.get_state()[1:3]
        return random.getstate(), numpy[1], *numpy[0], *torch.get_rng_state()

    model = Pool()
    seeded()
    augmented(0)  # as the loader, which learns the shape of empty batches from it
    expected = states()
    seeded()
    private = made(model, masked, Reading(augmented))
    assert private._padding
    assert states() == expected
    batch = first(private)
    before = states()
    private.backward(*batch)
    assert states() == before


@pytest.mark.parametrize(
    ("model", "collate_fn"), [(Pool(draws=True), masked), (Pool(), drawing)]
)
def test_random_numbers_that_hide_padding_are_told(model, collate_fn):
    def run():
        private = made(model, collate_fn)
        private.backward(*first(private))

    with pytest.warns(UserWarning, match="draws random numbers.*check_collate=False"):
        run()


def test_samples_are_collated_once_more_as_they_are():
    def popping(batch):
        return together([(each.pop("x"), each.pop("y")) for each in batch])

    dataset = [{"x": x, "y": y} for x, y in samples()]
    # The loader collates the first one.
    private = made(
        Pool(), popping, Reading(lambda n: dataset[n] if n else {**dataset[n]})
    )
    assert all(each.keys() == {"x", "y"} for each in dataset)
    assert private._padding


def test_only_the_first_samples_are_looked_at_and_none_without_a_collate_function():
    dataset = Reading(lambda row: (torch.zeros(3, 4), torch.tensor(0)), 1000)
    made(Pool(), None, dataset)
    assert dataset.read == [0]
    made(Pool(), together, dataset)
    assert dataset.read == [0, 0, *range(64)]
    private = made(Pool(), None, TensorDataset(torch.zeros(4, 3, 4), torch.arange(4)))
    assert not private._padding
