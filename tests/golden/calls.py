"""The one place that names functions of vgrad for the golden numbers.

A change of public names changes these adapters, and never a number.
"""

from functools import partial
from itertools import product

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vgrad
from tests.distributed.processes import Processes, mesh_of
from tests.optim import optimizers
from vgrad.training import (
    EnsembleState,
    TrainState,
    ensemble_train_step,
    private_step,
    train_step,
)

SAMPLES, STEPS = 6, 20


class Net(nn.Module):
    """A convolution, an embedding, a recurrent layer, attention and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.patches = nn.Linear(3, 6)
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)

    def forward(self, image):
        tokens = (image.flatten(1)[:, :5].abs() * 3).long() % 11
        patches = self.patches(torch.relu(self.conv(image)).flatten(2).mT)
        words, _ = self.lstm(self.embedding(tokens))
        output, _ = self.attention(self.norm(words), patches, patches)
        return self.head(self.dropout(output).mean(1))


def net(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def data(samples=SAMPLES):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 1, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(3, (samples,), generator=generator)


def functional():
    return vgrad.make_functional_with_buffers(net(), disable_autograd_tracking=True)


def of_sample(fmodel):
    return vgrad.sample_loss(fmodel, F.cross_entropy)


def of_batch(fmodel):
    return vgrad.batch_loss(fmodel, F.cross_entropy)


CLIP = dict(max_norm=0.5, normalize_by=3.0)
WEIGHTS = torch.linspace(-1, 1, SAMPLES, dtype=torch.float64)
MASK = torch.tensor([True, False, True, True, True, False])

QUANTITIES = {
    "grads": vgrad.per_sample_grad,
    "norms": vgrad.per_sample_norm,
    "norms of layers": partial(vgrad.per_sample_norm, groups="layer"),
    "clipped": partial(vgrad.clipped_grad, **CLIP),
    "clipped per layer": partial(vgrad.clipped_grad, clipping="per_layer", **CLIP),
    "clipped, automatic": partial(vgrad.clipped_grad, clipping="automatic", **CLIP),
    "clipped, two passes": partial(vgrad.clipped_grad, passes=2, **CLIP),
    "weighted": vgrad.weighted_grad,
    "gram": vgrad.per_sample_gram,
    "projection": partial(vgrad.per_sample_projection, dim=4, seed=5),
    "moments": vgrad.gradient_moments,
}
STRATEGIES = ("recorded", "vmap", "loop")
VARIANTS = ("plain", "mask", "chunks", "keys", "compiled", "two ranks")


def possible(quantity, strategy, variant):
    """Return whether there is such a call: loops are not captured, for example."""
    if variant == "compiled" and strategy == "loop":
        return False
    if quantity == "clipped, two passes" and strategy != "recorded":
        return False
    return not (quantity == "gram" and variant in ("mask", "two ranks"))


def call(quantity, strategy, variant, mesh=None):
    """Return the result of one call, as a tree of tensors."""
    fmodel, params, buffers = functional()
    options = dict(strategy=strategy, randomness="different")
    if variant == "chunks":
        options["chunk_size"] = 4
    transform = QUANTITIES[quantity](of_sample(fmodel), **options)
    batch, given = data(), {}
    weights = WEIGHTS
    if variant == "mask":
        given["mask"] = MASK
    elif variant == "keys":
        transform = transform.keyed(torch.arange(SAMPLES))
    elif variant == "compiled":
        transform = vgrad.compile(transform, fallback="error")
    elif variant == "two ranks":
        from vgrad import distributed

        transform = distributed.data_parallel(transform, mesh)
        own = slice(0, 2) if mesh.get_local_rank("dp") == 0 else slice(2, SAMPLES)
        batch, weights = tuple(part[own] for part in batch), weights[own]
    arguments = (params, buffers, *batch)
    if quantity == "weighted":
        arguments = (weights, *arguments)
    if variant == "compiled":  # the first call makes the capture
        torch.manual_seed(2)
        transform(*arguments, **given)
    torch.manual_seed(2)
    result = transform(*arguments, **given)
    if quantity == "moments":  # biases of keys: a ratio of rounding errors
        result = result._replace(signal_to_noise={})
    return result


CALLS = [case for case in product(QUANTITIES, STRATEGIES, VARIANTS) if possible(*case)]
OF_RANKS = [case for case in CALLS if case[2] == "two ranks"]


def rank_calls():
    """Return the results of calls on the ranks of this process group."""
    mesh, _ = mesh_of(2)
    return [call(*case, mesh) for case in OF_RANKS]


def on_two_ranks():
    """Return by name what calls on two ranks return on each."""
    processes = Processes(2)
    try:
        results = zip(*processes.run(rank_calls), strict=True)
    finally:
        processes.stop()
    return dict(zip(map("|".join, OF_RANKS), map(list, results), strict=True))


RENAMED = {"set_to_zero": "keep"}
OPTIMIZERS = {RENAMED.get(n, n): case for n, case in optimizers.OPTIMIZERS.items()}


def optimizer(name):
    """Return the parameters after some steps along gradients of plain autograd."""
    case = OPTIMIZERS[name]
    tx, (params, loss) = case.tx(), case.problem()
    state = tx.init(params)
    for _ in range(STEPS):
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        values = torch.autograd.grad(loss(leaves), list(leaves.values()))
        grads = dict(zip(leaves, values, strict=True))
        params, state = vgrad.optim.step(tx, grads, state, params)
    return case.outcome(params, state)


KEY = torch.arange(32, dtype=torch.uint8)
SIZE = 24
PLAN = dict(dataset_size=SIZE, sampling_rate=0.25, noise_multiplier=0.7, max_norm=0.5)
PLAN |= dict(steps=STEPS, delta=1e-3)


def begun(
    kind,
    tx,
    place=lambda tree: tree,
    *,
    dtype=torch.float64,
    evaluated=False,
    **options,
):
    """Return a step of a kind and its first state, whose tensors are placed."""
    models = [net(seed) for seed in range(3 if kind == "members" else 1)]
    models = [each.to(dtype).train(not evaluated) for each in models]
    if kind == "members":
        fmodel, *entries = vgrad.stack(models, disable_autograd_tracking=True)
        step = ensemble_train_step(of_batch(fmodel), tx, **options)
        return step, EnsembleState.create(tx, *place(entries), seed=7)
    fmodel, *entries = vgrad.make_functional_with_buffers(
        *models, disable_autograd_tracking=True
    )
    if kind == "private":
        plan = vgrad.dp.Plan(**PLAN)
        options = {"randomness": "different"} | options
        step = private_step(of_sample(fmodel), tx, plan, **options)
    else:
        loss = {"batches": of_batch, "samples": of_sample}[kind](fmodel)
        step = train_step(loss, tx, **options)
    return step, TrainState.create(tx, *place(entries), seed=7)


def private(*, compiled=False, **options):
    step, state = begun("private", vgrad.optim.adamw(1e-2), **options)
    step = vgrad.compile(step, batch_sizes=(8, 16, SIZE)) if compiled else step
    everything = data(SIZE)
    for rows in vgrad.dp.Plan(**PLAN).sampler(state):
        state, _ = step(state, *(part[rows] for part in everything))
    return state.params


def plain(kind, tx=None, *, compiled=False, **options):
    step, state = begun(kind, tx or vgrad.optim.sgd(0.1, momentum=0.9), **options)
    step = vgrad.compile(step) if compiled else step
    for _ in range(STEPS):
        state, _ = step(state, *data())
    return state.params


members = partial(plain, "members", vgrad.optim.adam(1e-2))


def gradients_of_a_module():
    model = net()
    run = vgrad.dp.PrivateGradients(
        model,
        F.cross_entropy,
        TensorDataset(*data(SIZE)),
        plan=vgrad.dp.Plan(**PLAN),
        key=KEY,
    )
    optimizer = run.watch(torch.optim.Adam(model.parameters(), 1e-2))
    while run.step < STEPS:
        for batch in run.loader:
            run.backward(*batch)
            optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


KINDS = {
    "train, batch loss": partial(plain, "batches"),
    "train, sample loss": partial(plain, "samples"),
    "train, donated": partial(plain, "batches", donate=True),
    "train, compiled": partial(plain, "batches", compiled=True),
    "private": private,
    "private, chunks": partial(private, chunk_size=4),
    "private, two passes": partial(private, passes=2),
    "private, donated": partial(private, donate=True),
    "private, compiled": partial(private, compiled=True),
    "ensemble": members,
    "ensemble, donated": partial(members, donate=True),
    "gradients of a module": gradients_of_a_module,
}

CASES = {"|".join(case): partial(call, *case) for case in CALLS if case not in OF_RANKS}
CASES |= {f"optimizer|{name}": partial(optimizer, name) for name in OPTIMIZERS}
CASES |= {f"step|{name}": run for name, run in KINDS.items()}
"""All that one process computes, by name."""
