"""Threads share torch's own generators: what draws from them takes turns."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import vgrad
from tests import losses, oracle
from vgrad import optim
from vgrad.training import EnsembleState, TrainState, private_step, train_step

THREADS = 4
X, Y = torch.randn(6, 4), torch.randn(6, 3)


class Slow(nn.Module):
    """Draws, lets the other threads go on, and draws again."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = F.dropout(self.first(x))
        time.sleep(0.002)
        return F.dropout(self.second(x))


def plain(seed):
    fmodel, params, buffers = vgrad.make_functional_with_buffers(Slow())
    tx = optim.sgd(0.1)
    step = train_step(vgrad.batch_loss(fmodel, F.mse_loss), tx)
    return step, TrainState.create(tx, params, buffers, seed=seed)


def private(strategy, seed):
    fmodel, params, buffers = vgrad.make_functional_with_buffers(Slow())
    tx, loss = optim.sgd(0.1), vgrad.sample_loss(fmodel, F.mse_loss)
    options = dict(strategy=strategy, randomness="different", chunk_size=2)
    step = private_step(loss, tx, losses.plan(), **options)
    return step, TrainState.create(tx, params, buffers, seed=seed)


def ensemble(strategy, seed):
    fmodel, params, buffers = vgrad.stack([Slow() for _ in range(2)])
    tx = vgrad.for_members(optim.sgd(0.1))
    loss = vgrad.batch_loss(fmodel, F.mse_loss)
    step = vgrad.training.ensemble_train_step(loss, tx, strategy=strategy)
    return step, EnsembleState.create(tx, params, buffers, seed=seed)


STEPS = {
    "plain": plain,
    "private, recorded": partial(private, "recorded"),
    "private, loop": partial(private, "loop"),
    "ensemble, hybrid": partial(ensemble, "hybrid"),
    "ensemble, loop": partial(ensemble, "loop"),
}


def together(*works):
    """Run functions at once, each in a thread of its own."""
    pool = ThreadPoolExecutor(len(works))
    try:
        # Who waits for himself, or in a circle, does so without end.
        running = [pool.submit(work) for work in works]
        return [each.result(timeout=100) for each in running]
    finally:
        pool.shutdown(wait=False)


def stepping(make=plain, seed=0, count=10):
    step, state = make(seed)

    def run():
        now = state
        for _ in range(count):
            now, _ = step(now, X, Y)
        return now

    return run


def assert_apart(*works):
    """Works return in threads what they return one by one, with as many draws."""
    torch.manual_seed(0)
    expected, after = [work() for work in works], torch.get_rng_state()
    torch.manual_seed(0)
    oracle.assert_exact(together(*works), expected, 0)
    assert torch.equal(torch.get_rng_state(), after)
    return after


@pytest.mark.parametrize("name", STEPS)
def test_steps_in_several_threads_are_what_they_are_one_by_one(name):
    works = [stepping(STEPS[name], seed, 3) for seed in range(THREADS)]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert torch.equal(assert_apart(*works), before)


def of_samples(strategy, randomness, dropout=True):
    fmodel, params, buffers = vgrad.make_functional_with_buffers(Slow().double())
    loss = vgrad.sample_loss(fmodel if dropout else watched, F.mse_loss)
    options = {"strategy": strategy, "randomness": randomness, "chunk_size": 2}
    compute = vgrad.per_sample_norm(loss, **options)
    return lambda: compute(params, buffers, X.double(), Y.double())


def watched(params, buffers, x):
    """A model that reads a value, draws nothing, and takes its time."""
    float(x.sum())
    time.sleep(0.002)
    return F.linear(F.linear(x, params["first.weight"]), params["second.weight"])


@pytest.mark.parametrize("strategy", ["recorded", "vmap", "loop"])
def test_samples_share_their_numbers_whatever_other_threads_do(strategy):
    assert_apart(of_samples(strategy, "same"), stepping())


def aside(loss, drop=0.0):
    """A loss beside a thread that draws from torch's generator without a lock."""

    def run(params, buffers, *batch):
        together(partial(torch.rand, 1))
        return F.dropout(loss(params, buffers, *batch), drop)

    return run


def looped_samples(drop):
    _, params, buffers = vgrad.make_functional_with_buffers(Slow())
    loss = aside(vgrad.sample_loss(watched, F.mse_loss), drop)
    return vgrad.per_sample_grad(loss, strategy="loop")(params, buffers, X, Y)


def looped_members(drop):
    """With a shared layer, to whose gradients each member adds once."""
    linear = nn.Linear(4, 3)
    fmodel, *entries = vgrad.stack([linear, linear])
    params, buffers = vgrad.ensemble.share(*entries, ["weight"])
    loss = aside(vgrad.batch_loss(fmodel, F.mse_loss), drop)
    options = {"strategy": "loop", "shared": ["weight"], "randomness": "error"}
    compute = vgrad.ensemble_grad(loss, **options)
    weight = compute(params, buffers, X, Y).grads["weight"]
    leaves = [p.detach().requires_grad_() for p in linear.parameters()]
    F.mse_loss(F.linear(X, *leaves), Y).backward()
    oracle.assert_exact(weight, 2 * leaves[0].grad, 1e-5)


@pytest.mark.parametrize("compute", [looped_samples, looped_members])
def test_numbers_that_another_thread_draws_are_not_the_losses(compute):
    compute(0.0)
    with pytest.raises(RuntimeError, match="expected a loss without random numbers"):
        compute(0.5)


INSIDE, FORKED = threading.Event(), threading.Event()
"""A thread is in a forward pass; it may go on."""


class Waiting(nn.Linear):
    """Tells that it runs, and takes its time in the thread that is to be forked."""

    def forward(self, x):
        if threading.current_thread() is not threading.main_thread():
            INSIDE.set()
            FORKED.wait(0.2)
        return super().forward(x)


def of_waiting(make=vgrad.per_sample_norm, policy=None, **options):
    fmodel, *parts = vgrad.make_functional_with_buffers(Waiting(4, 3))
    if policy is not None:
        fmodel = vgrad.precision.policy_for(fmodel, policy)
    run = make(vgrad.sample_loss(fmodel, F.mse_loss), **options)
    return lambda: run(*parts, X[0], Y[0]) if make is one else run(*parts, X, Y)


def one(loss):
    """Call a loss, and so its model, as it is."""
    return loss


def captured(loss):
    return vgrad.compile(vgrad.per_sample_norm(loss), backend="replay")


FORKS = {
    "numbers that samples share": partial(
        of_waiting, strategy="loop", randomness="same"
    ),
    "a model": partial(of_waiting, one),
    "a model with a policy": partial(of_waiting, one, policy="mixed_bfloat16"),
    "a capture": partial(of_waiting, captured),
}


class OfWork(Dataset):
    def __init__(self, work):
        self.work = work

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.work().detach()


@pytest.mark.parametrize("name", FORKS)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_fork_may_happen_while_another_thread_computes(name):
    work, options = FORKS[name](), {"multiprocessing_context": "fork"}
    INSIDE.clear(), FORKED.clear()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(work)
        assert INSIDE.wait(20)
        loader = DataLoader(OfWork(work), 2, num_workers=1, timeout=20, **options)
        [found] = loader
        FORKED.set()
        expected = other.result()
    oracle.assert_exact(found, torch.stack([expected.detach()] * 2), 1e-6)
