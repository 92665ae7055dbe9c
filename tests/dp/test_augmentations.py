"""Augmented copies of a sample, whose mean loss is clipped, against plain autograd."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import vgrad
from tests import oracle, streams
from tests.dp import runs
from tests.dp.runs import KEY, data, first, grads, net
from tests.losses import every_strategy
from vgrad import clipped_grad, per_sample_grad

SIZE, COPIES = 4, 3


class Words(nn.Module):
    """An embedding, attention and a recurrent net."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.run, self.head = nn.GRU(8, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        x = x + self.attend(x, x, x, key_padding_mask=mask)[0]
        return self.head(self.run(x)[0][:, -1])


def convolutions():
    layers = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


MODELS = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
        (6,),
    ),
    "convolution": (lambda: nn.Sequential(convolutions(), nn.Linear(4, 3)), (2, 8, 8)),
    "words": (Words, (5,)),
}


def case(name):
    """Return a module, copies `[B, K, ...]` and labels `[B]`."""
    build, shape = MODELS[name]
    x = torch.randn(SIZE, COPIES, *shape, dtype=torch.float64)
    if name == "words":
        x = torch.randint(11, x.shape)
    return build().double(), x, torch.randint(3, (SIZE,))


def of_a_loop(model, x, y, criterion=F.cross_entropy):
    """Differentiate the mean over copies, one forward pass for each."""

    def run(net, copies, label):
        losses = [criterion(net(each), label) for each in copies.transpose(0, 1)]
        return sum(losses) / len(losses)

    return oracle.model_gradients(model, run, (x, y), len(x))


functional = partial(runs.functional, augmentations=COPIES)


@every_strategy
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
def test_gradients_are_of_the_mean_over_copies(name, strategy):
    model, x, y = case(name)
    loss, params, buffers = functional(model)
    found = per_sample_grad(loss, strategy=strategy)(params, buffers, x, y)
    oracle.assert_exact(found, of_a_loop(model, x, y))
    # Labels may be copied, too.
    repeated = y.unsqueeze(1).expand(-1, COPIES)
    again = per_sample_grad(loss, strategy=strategy)(params, buffers, x, repeated)
    oracle.assert_exact(again, found)


CRITERIA = {
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "none": lambda out, y: F.cross_entropy(out, y, reduction="none"),
    "weighted": nn.CrossEntropyLoss(
        torch.tensor([1.0, 2, 3]).double(), reduction="sum"
    ),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_copies_are_averaged_however_the_criterion_reduces(name):
    model, x, y = case("linear")
    loss, params, buffers = functional(model, CRITERIA[name])
    found = per_sample_grad(loss)(params, buffers, x, y)
    oracle.assert_exact(found, of_a_loop(model, x, y, CRITERIA[name]))


class OwnLoss(nn.Module):
    """Returns its own loss, a mean over tokens that are not padding."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x=None, labels=None):
        out = self.layer(x).flatten(0, 1)
        return {"loss": F.cross_entropy(out, labels.flatten(), ignore_index=-1)}


def test_a_models_own_loss_is_that_of_one_copy():
    model = OwnLoss().double()
    x = torch.randn(SIZE, COPIES, 5, 4, dtype=torch.float64)
    y = torch.randint(3, (SIZE, COPIES, 5))
    y[:, 0, 1:] = -1  # so that a mean over all tokens is another one
    loss, params, buffers = functional(model, None)
    found = per_sample_grad(loss)(params, buffers, {"x": x, "labels": y})

    def run(net, x, y):
        pairs = zip(x.transpose(0, 1), y.transpose(0, 1), strict=True)
        return sum(net(*pair)["loss"] for pair in pairs) / COPIES

    expected = oracle.model_gradients(model, run, (x, y), SIZE)
    oracle.assert_exact(found, expected)


def test_a_sample_is_clipped_once_and_the_sensitivity_stays():
    model, x, y = case("linear")
    loss, params, buffers = functional(model)
    clipped = clipped_grad(loss, max_norm=0.3, normalize_by=8.0)
    result = clipped(params, buffers, x, y)
    mean = of_a_loop(model, x, y)
    expected = {n: g / 8 for n, g in oracle.clipped(mean, 0.3).items()}
    oracle.assert_exact(result.grads, expected)
    assert clipped.sensitivity.value == 0.3 / 8
    assert clipped(params, buffers, x[:0], y[:0]).losses.shape == (0,)


def test_one_copy_is_the_sample_itself():
    model, x, y = case("linear")
    found = per_sample_grad(functional(model, augmentations=1)[0])
    loss, *tensors = functional(model, augmentations=None)
    expected = per_sample_grad(loss)(*tensors, x[:, 0], y)
    oracle.assert_exact(found(*tensors, x[:, :1], y), expected)


def test_copies_of_a_captured_step_need_no_other_route():
    model, x, y = case("convolution")
    loss, params, buffers = functional(model)
    clipped = vgrad.compile(clipped_grad(loss, max_norm=0.3), backend="replay")
    expected = clipped_grad(loss, max_norm=0.3)(params, buffers, x, y)
    for _ in range(3):
        found = clipped(params, buffers, x, y)
    oracle.assert_exact(found.grads, expected.grads)
    [report] = clipped.reports()
    assert (report.backend, report.redos) == ("replay", 0)


def test_batch_normalisation_is_refused():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    _, x, y = case("linear")
    loss, params, buffers = functional(model)
    with pytest.raises(ValueError, match="batch normalisation with batch statistics"):
        clipped_grad(loss, max_norm=1.0)(params, buffers, x, y)


def test_other_numbers_of_copies_are_refused():
    model, x, y = case("linear")
    loss, params, buffers = functional(model)
    with pytest.raises(
        ValueError, match=r"tensors of 3 copies, or a number, got.*2, 6"
    ):
        per_sample_grad(loss)(params, buffers, x[:, :2], y)
    with pytest.raises(ValueError, match=r"augmentations=0.*whole number >= 1"):
        functional(model, augmentations=0)
    with pytest.raises(ValueError, match="augmentations=0"):
        runs.private(PLAN, net(), data(), **options(augmentations=0))
    flat = vgrad.sample_loss(
        lambda params, buffers, x: x.mean(0, keepdim=True) @ params["w"].t(),
        F.cross_entropy,
        augmentations=COPIES,
    )
    weights = {"w": torch.randn(3, 6, dtype=torch.float64)}
    with pytest.raises(
        ValueError, match=r"one row for each of 3 inputs.*Let the model"
    ):
        per_sample_grad(flat)(weights, {}, x, y)


# In a loop of torch.

PLAN = runs.plan(20, 0.3, 0.5, steps=6)


def jitter(item):
    """Draw from all generators."""
    x, y = item
    scale = 1 + random.random() + np.random.rand()
    return x + scale * torch.randn(6, dtype=torch.float64), y


def batch_of(step, rows):
    """Return copies as the loader has to make them, by seeds of its own."""
    copies = []
    for row in rows:
        seed = int.from_bytes(
            bytes(streams.digest(KEY.tolist(), ("augment", step, row), 16))[:8],
            "little",
        )
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        copies.append(torch.stack([jitter(data()[row])[0] for _ in range(COPIES)]))
    return torch.stack(copies)


def options(**others):
    return {"augment": jitter, "augmentations": COPIES} | others


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_makes_copies_that_follow_from_key_step_and_sample(workers):
    model = net()
    private = runs.private(PLAN, model, data(), **options(num_workers=workers))
    random.seed(5)
    np.random.seed(5)

    def states():
        return (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state(),
        )

    before = states()
    for step, (x, y) in enumerate(private.loader):
        now = states()
        assert now[:2] == before[:2]  # a loader draws a seed for its workers from torch
        assert step == 0 or torch.equal(now[2], before[2])
        private.backward(x, y)
        rows = PLAN.sample(key=KEY, step=step).tolist()
        with torch.random.fork_rng():
            assert torch.equal(x, batch_of(step, rows))
        labels = data().tensors[1][rows]
        oracle.assert_exact(grads(model), runs.mean(of_a_loop(model, x, labels), PLAN))
        before = states()


def test_a_resumed_run_makes_the_same_copies_at_any_size():
    private = runs.private(PLAN, net(), data(), **options())
    taken = [private.backward(*batch) and batch for batch in private.loader]
    other = runs.private(PLAN, net(), data(), **options(physical_batch_size=2))
    other.load_state_dict(other.state_dict() | {"step": 1})
    parts = []
    for x, y in other.loader:
        parts.append(x)
        other.backward(x, y)
        if other.ready:
            break
    assert torch.equal(torch.cat(parts), taken[1][0])


def test_copies_of_the_data_set_itself_need_no_function():
    x, y = data().tensors
    dataset = TensorDataset(torch.stack([x, 2 * x, 3 * x], 1), y)
    model = net()
    private = runs.private(PLAN, model, dataset, augmentations=COPIES)
    batch = first(private)
    private.backward(*batch)
    oracle.assert_exact(grads(model), runs.mean(of_a_loop(model, *batch), PLAN))


class Texts(Dataset):
    """Lists of unlike length, which only an augmented item turns into tensors."""

    def __len__(self):
        return 20

    def __getitem__(self, row):
        return [1 + row % 10] * (2 + row % 3)


def cut(tokens):
    start = random.randrange(len(tokens))
    return torch.tensor(tokens[start:]), len(tokens) % 3


def padded(samples):
    tokens, labels = zip(*samples, strict=True)
    tokens = nn.utils.rnn.pad_sequence(list(tokens), batch_first=True)
    return tokens, torch.tensor(labels)


def test_padding_to_other_samples_is_still_found():

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)

        def forward(self, tokens):
            return self.head(self.embed(tokens).mean(1))

    model = Mean()
    how = {"augment": cut, "augmentations": 2, "collate_fn": padded}
    private = runs.private(PLAN, model, Texts(), **how)
    with pytest.raises(RuntimeError, match="padding to a longer sample"):
        private.backward(*first(private))
    private = runs.private(PLAN, model, Texts(), **how, check_collate=False)
    x, y = first(private)
    assert (x.shape[1], y.shape[1]) == (2, 2)
    private.backward(x, y)
