"""Samples that are padded to the longest one of a batch, with and without a mask."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from vgrad.dp import Plan, PrivateGradients, secret_key

SECRET = 123456.75


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

    def __init__(self, uses_mask=True):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 3)
        self.drop, self.uses_mask = nn.Dropout(0.5), uses_mask

    def forward(self, x, mask=None, again=None):
        hidden = self.drop(torch.tanh(self.inner(x)))
        if mask is None or not self.uses_mask:
            return self.outer(hidden.mean(1))
        kept = mask[..., None]
        return self.outer((hidden * kept).sum(1) / kept.sum(1))


def made(model, collate_fn, dataset=None, **options):
    dataset = samples() if dataset is None else dataset
    plan = Plan(
        dataset_size=len(dataset),
        sampling_rate=1.0,
        noise_multiplier=0.0,
        max_norm=1.0,
        steps=4,
        delta=1e-3,
    )
    options = {"criterion": F.cross_entropy, "key": secret_key(seed=0)} | options
    return PrivateGradients(
        model, dataset=dataset, plan=plan, collate_fn=collate_fn, **options
    )


REFUSED = "does not depend on the other samples.*check_collate=False skips"


@pytest.mark.parametrize("training", [True, False])
def test_padding_that_the_model_sees_is_refused(training):
    model = Pool().train(training)
    model.drop.train()
    private = made(model, together)
    batch = next(iter(private.loader))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSED):
            private.backward(*batch)
    assert private.step == 0
    assert (model.training, model.drop.training) == (training, True)
    assert all(each.grad is None for each in model.parameters())
    private = made(model, together, check_collate=False)
    private.backward(*next(iter(private.loader)))
    assert private.step == 1


def test_a_mask_that_the_model_does_not_use_is_refused():
    private = made(Pool(uses_mask=False), masked)
    with pytest.raises(RuntimeError, match=REFUSED):
        private.backward(*next(iter(private.loader)))


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
    for batch in private.loader:
        mask = batch["mask"].clone()
        given = {"mask": mask, "x": batch["x"]}, {"again": mask}, batch["target"]
        if uses_mask:
            private.backward(*given)
        else:
            with pytest.raises(RuntimeError, match=REFUSED):
                private.backward(*given)
            break
    assert private.step == uses_mask


def test_arguments_that_are_not_of_the_batch_are_refused_where_samples_are_padded():
    private = made(Pool(), masked)
    x, mask, y = next(iter(private.loader))
    with pytest.raises(RuntimeError, match="got others made of them.*check_collate="):
        private.backward(2 * x, mask, y)
    private = made(Pool(), fixed)
    x, mask, y = next(iter(private.loader))
    private.backward(2 * x, mask, y)


def test_no_value_of_the_data_is_shown():
    dataset = [(torch.full((n, 4), SECRET), torch.tensor(1)) for n in (3, 9, 3, 3)]
    private = made(Pool(), together, dataset)
    with pytest.raises(RuntimeError) as error:
        private.backward(*next(iter(private.loader)))
    assert "123456" not in str(error.value)
    assert "1.2346" not in str(error.value)


def test_random_numbers_go_on_as_if_nothing_was_looked_at():
    class Augmented(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, row):
            shift = random.random() + np.random.rand() + torch.rand(())
            x, y = samples()[row]
            return x + shift, y

    def states():
        numpy = np.random.get_state()[1:3]
        return random.getstate(), numpy[1], *numpy[0], *torch.get_rng_state()

    model = Pool()
    for each in (random.seed, np.random.seed, torch.manual_seed):
        each(3)
    Augmented()[0]  # as the loader, which learns the shape of empty batches from it
    expected = states()
    for each in (random.seed, np.random.seed, torch.manual_seed):
        each(3)
    private = made(model, masked, Augmented())
    assert private.loader.keeps_yielded
    assert states() == expected
    batch = next(iter(private.loader))
    before = states()
    private.backward(*batch)
    assert states() == before


@pytest.mark.parametrize("where", ["collate_fn", "loss"])
def test_random_numbers_that_hide_padding_are_told(where):
    class Drawing(Pool):
        def forward(self, x, mask):
            return super().forward(x + torch.rand_like(x), mask)

    def run():
        given = (Drawing(), masked) if where == "loss" else (Pool(), drawing)
        private = made(*given)
        private.backward(*next(iter(private.loader)))
        assert private.step == 1

    with pytest.warns(UserWarning, match="draws random numbers.*check_collate=False"):
        run()


def test_samples_are_collated_once_more_as_they_are():
    def popping(batch):
        return together([(each.pop("x"), each.pop("y")) for each in batch])

    dataset = [{"x": x, "y": y} for x, y in samples()]
    dataset[0] = {**dataset[0]}

    class Named(Dataset):
        def __len__(self):
            return len(dataset)

        def __getitem__(self, row):
            return dataset[row] if row else {**dataset[row]}

    private = made(Pool(), popping, Named())
    assert all(each.keys() == {"x", "y"} for each in dataset)
    assert private.loader.keeps_yielded


def test_only_the_first_samples_are_looked_at_and_none_without_a_collate_function():
    read = []

    class Long(Dataset):
        def __len__(self):
            return 1000

        def __getitem__(self, row):
            read.append(row)
            return torch.zeros(3, 4), torch.tensor(0)

    made(Pool(), None, Long())
    assert read == [0]
    made(Pool(), together, Long())
    assert read == [0, 0, *range(64)]
    private = made(Pool(), None, TensorDataset(torch.zeros(4, 3, 4), torch.arange(4)))
    assert not private.loader.keeps_yielded
