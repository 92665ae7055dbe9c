"""Results on the device are those of the host, to the last places.

A case is a function of `place`, which moves a tree of tensors; it runs on the host and
on the device. Every tensor of a result lies on the device, unless the case says so.
"""

import copy
from contextlib import contextmanager
from functools import partial
from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

import vgrad
from tests import losses, oracle
from tests.accelerator import device
from tests.golden import calls
from tests.optim import optimizers
from vgrad import ensemble, training
from vgrad.factors import products
from vgrad.precision import DynamicLossScale, StaticLossScale
from vgrad.torch_private import kernels
from vgrad.training import TrainState

pytestmark = pytest.mark.more
HERE = device.NAME


def moved(where, tree):
    return pytree.tree_map_only(torch.Tensor, lambda each: each.to(where), tree)


def equal(run, tolerance=1e-9, on_host=()):
    """Run a case in both places, and compare."""
    torch.manual_seed(0)
    try:
        expected = run(partial(moved, "cpu"))
    except vgrad.UnsupportedOp:
        with pytest.raises(vgrad.UnsupportedOp):
            run(partial(moved, HERE))
        return
    torch.manual_seed(0)
    found = run(partial(moved, HERE))
    leaves, _ = pytree.tree_flatten_with_path(found)
    strays = {
        pytree.keystr(path): leaf.shape
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.device.type != HERE
    }
    assert {name.lstrip(".") for name in strays} <= {*on_host}, strays
    oracle.assert_exact(moved("cpu", found), expected, tolerance)


def quantity(name, loss, **options):
    """Return a quantity without ratios of rounding errors."""
    transform = calls.QUANTITIES[name](loss, **options)

    def run(place, params, buffers, *batch, **more):
        given = (params, buffers, *batch)
        if name == "weighted":
            given = torch.linspace(-1, 2, len(batch[0]), dtype=torch.float64), *given
        result = transform(*place(given), **place(more))
        return result._replace(signal_to_noise={}) if name == "moments" else result

    return run


def table(strategies=losses.STRATEGIES):
    for name in calls.QUANTITIES:
        for strategy in strategies:
            if name != "clipped, two passes" or strategy == "recorded":
                yield name, strategy


# Quantities.


def recurrent(kind, **options):
    def forward(self, x):
        return self.head(self.layer(x)[0]).mean(1)

    def model():
        layer = getattr(nn, kind)(4, 5, batch_first=True, **options)
        width = 10 if options.get("bidirectional") else 5
        return losses.Net(forward, layer=layer, head=nn.Linear(width, 3))

    return losses.Case(
        model, lambda size: (torch.randn(size, 3, 4), torch.randint(3, (size,)))
    )


def packed(lengths):
    """Sequences of lengths that samples share, or have for themselves."""

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), True, False)
        output, _ = pad_packed_sequence(self.layer(packed)[0], True)
        return self.head(output).mean(1)

    return losses.Case(
        lambda: losses.Net(
            forward, layer=nn.LSTM(4, 5, bidirectional=True), head=nn.Linear(10, 3)
        ),
        lambda size: (
            torch.randn(size, 3, 4),
            torch.tensor(lengths * size)[:size],
            torch.randint(3, (size,)),
        ),
    )


def of_cells(self, x):
    state = None
    for step in x.unbind(1):
        state = self.layer(step, state)
    return self.head(state[0] if isinstance(state, tuple) else state)


RECURRENT = {
    "LSTM": recurrent("LSTM", num_layers=2),
    "LSTM, both ways": recurrent("LSTM", bidirectional=True),
    "GRU": recurrent("GRU", bias=False),
    "GRU, both ways": recurrent("GRU", bidirectional=True, num_layers=2),
    "RNN": recurrent("RNN"),
    **{
        kind: losses.Case(
            lambda kind=kind: losses.Net(
                of_cells, layer=getattr(nn, kind)(4, 5), head=nn.Linear(5, 3)
            ),
            lambda size: (torch.randn(size, 3, 4), torch.randint(3, (size,))),
        )
        for kind in ("LSTMCell", "GRUCell")
    },
}
"""An accelerator runs them by other kernels than the host."""
PACKED = {"packed": packed([2, 3, 3]), "packed, one length": packed([2])}
"""Their lengths are read on the host."""
CASES = losses.CASES | losses.HARD | RECURRENT | PACKED


def built(name, dtype=torch.float64, size=5):
    torch.manual_seed(0)
    model = CASES[name].model().to(dtype)
    batch = pytree.tree_map_only(
        torch.Tensor,
        lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf,
        CASES[name].batch(size),
    )
    return *losses.of_model(model, CASES[name].criterion, dtype), batch


@pytest.mark.parametrize("name", CASES)
def test_quantities(name):
    loss, params, buffers, batch = built(name)
    for kind, strategy in table():
        run = quantity(kind, loss, strategy=strategy)
        equal(lambda place, run=run: run(place, params, buffers, *batch))


VARIANTS = {
    "mask": (dict(), dict(mask=calls.MASK)),
    "chunks": (dict(chunk_size=4), dict()),
    "automatic chunks": (dict(chunk_size="auto"), dict()),
    "one mask for all": (dict(randomness="same"), dict()),
    "automatic chunks, recomputed": (dict(chunk_size="auto", passes=2), dict()),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_quantities_of_a_net_with_dropout(variant):
    options, more = VARIANTS[variant]
    fmodel, params, buffers = calls.functional()
    loss = calls.of_sample(fmodel)
    for kind, strategy in table():
        if kind == "gram" and more:
            continue
        if "passes" in options and kind != "clipped":
            continue
        settings = dict(strategy=strategy, randomness="different") | options
        run = quantity(kind, loss, **settings)
        equal(lambda p, run=run: run(p, params, buffers, *calls.data(), **more))


@pytest.mark.parametrize("kind", ["clipped", "gram", "moments", "weighted"])
def test_compiled_and_keyed_quantities(kind):
    fmodel, params, buffers = calls.functional()
    options = dict(randomness="different")

    def run(place, change):
        transform = change(calls.QUANTITIES[kind](calls.of_sample(fmodel), **options))
        given = (params, buffers, *calls.data())
        given = (calls.WEIGHTS, *given) if kind == "weighted" else given
        results = [transform(*place(given)) for _ in range(3)]  # a capture, two replays
        if kind == "moments":
            results = [each._replace(signal_to_noise={}) for each in results]
        return results

    replay = dict(backend="replay", fallback="error")
    equal(lambda place: run(place, lambda each: vgrad.compile(each, **replay)))
    keys = torch.arange(calls.SAMPLES)
    equal(lambda place: run(place, lambda each: each.keyed(keys)))


WAYS = [(True, False, 2**28), (True, True, 2**28), (True, True, 0), (False, True, 0)]
"""Whether a device multiplies halves into float32, whether it rounds float32 to TF32,
and how many products are worth a sum in terms."""


@contextmanager
def multiplying(halves, tf32, few):
    bits = {"conv": "tf32", "matmul": "tf32" if tf32 else "none", "rnn": "tf32"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "fp32_precision", lambda _, op: bits[op])
        patch.setattr(kernels, "multiplies_halves", lambda _: halves)
        patch.setattr(products, "_FEW", few)
        yield


@pytest.mark.parametrize(
    ("name", "low"),
    [(name, torch.bfloat16) for name in (*losses.CASES, *RECURRENT, *PACKED)]
    + [(name, torch.float16) for name in ("mlp", "cnn", "tied", "LSTM", "packed")],
)
def test_autocast(name, low):
    loss, params, buffers, batch = built(name, torch.float32)
    exact = oracle.in_double((params, buffers, *batch))
    given = moved(HERE, (params, buffers, *batch))
    expected = {
        kind: quantity(kind, loss)(partial(moved, "cpu"), *exact)
        for kind in calls.QUANTITIES
    }
    for kind, strategy in table():
        run = quantity(kind, loss, strategy=strategy)
        limit = torch.finfo(low).eps * (24 if kind == "moments" else 8)  # of squares
        for halves, tf32, few in WAYS if strategy == "recorded" else WAYS[:1]:
            with multiplying(halves, tf32, few), torch.autocast(HERE, low):
                found = run(partial(moved, HERE), *given)
            case = kind, strategy, halves, tf32, few
            assert oracle.distance(found, expected[kind]) <= limit, case


# Steps.


ADAMW = vgrad.optim.adamw(1e-2)


def steps_of(kind, place, tx=ADAMW, *, count=3, compiled=False, **options):
    evaluated = kind == "members"
    step, state = calls.begun(kind, tx, place, evaluated=evaluated, **options)
    batches, sizes = [calls.data()] * count, {}
    if kind == "private":
        everything, sizes = calls.data(calls.SIZE), {"batch_sizes": (calls.SIZE,)}
        drawn = vgrad.dp.Plan(**calls.PLAN).sampler(state)
        batches = [[part[rows] for part in everything] for rows in islice(drawn, 4)]
    step = vgrad.compile(step, backend="replay", **sizes) if compiled else step
    for batch in batches:
        state, metrics = step(state, *place(batch))
    return state.params, state.buffers, state.optimizer, metrics


KINDS = ["batches", "private", "members"]
plain, private, members = (partial(steps_of, kind) for kind in KINDS)
SCALED = dict(loss_scale=StaticLossScale(2.0**10))
STEPS = {
    "train": plain,
    "train, sample loss": partial(steps_of, "samples"),
    "train, donated": partial(plain, donate=True),
    "train, replayed": partial(plain, compiled=True, count=4),
    "train, scaled": partial(plain, **SCALED),
    "private": private,
    "private, chunks": partial(private, chunk_size=4),
    "private, automatic chunks": partial(private, chunk_size="auto"),
    "private, two passes": partial(private, passes=2),
    "private, donated": partial(private, donate=True),
    "private, by vmap": partial(private, strategy="vmap"),
    "private, replayed": partial(private, compiled=True),
    "private, scaled": partial(private, **SCALED),
    "members": members,
    "members, donated": partial(members, donate=True),
    "members, one by one": partial(members, strategy="loop"),
    "members, by vmap": partial(members, strategy="vmap"),
    "members, scaled": partial(members, **SCALED),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    equal(STEPS[name], on_host=["[3]['samples']"])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("run", [plain, private, members], ids=KINDS)
def test_policies(run, policy):
    """What autocast casts differs; the steps are those of float32, nearly."""

    def in_float32(where, tree):
        def narrow(leaf):
            return leaf.float() if leaf.is_floating_point() else leaf

        return moved(where, pytree.tree_map_only(torch.Tensor, narrow, tree))

    tx = vgrad.optim.sgd(0.1)  # Adam makes whole steps of gradients near zero
    exact = run(partial(in_float32, "cpu"), tx=tx)[0]
    found = run(partial(in_float32, HERE), tx=tx, policy=policy)[0]
    for name, value in exact.items():
        gap = (moved("cpu", found[name]) - value).norm()
        assert gap <= 0.01 * value.norm() + 1e-3, name


def test_a_dynamic_loss_scale_skips_what_overflows():
    def run(place):
        model = nn.Linear(3, 2).double()
        fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        loss, tx = vgrad.batch_loss(fmodel, F.mse_loss), vgrad.optim.sgd(0.1)
        step = training.train_step(loss, tx)
        scale = DynamicLossScale(2.0**5, period=2)
        state = TrainState.create(tx, *place((params, buffers)), loss_scale=scale)
        for factor in (1.0, torch.inf, 1.0, 1.0, 1.0):
            x = torch.full((4, 3), factor, dtype=torch.float64)
            state, _ = step(state, *place((x, torch.ones(4, 2, dtype=torch.float64))))
        return state.params, state.loss_scale.loss_scale

    equal(run)


def test_gradients_of_a_module():
    def run(place):
        (probe,) = place([torch.ones(1)])
        model, plan = calls.net().to(probe.device), vgrad.dp.Plan(**calls.PLAN)
        data = TensorDataset(*place(calls.data(calls.SIZE)))
        private = vgrad.dp.PrivateGradients(
            model, F.cross_entropy, data, plan=plan, key=calls.KEY
        )
        optimizer = private.watch(torch.optim.Adam(model.parameters(), 1e-2))
        while private.step < 3:
            for batch in private.loader:
                private.backward(*batch)
                optimizer.step()
        return {name: value.detach() for name, value in model.named_parameters()}

    equal(run)


# Optimizers.


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_optimizers(name, donate):
    case = optimizers.OPTIMIZERS[name]

    def run(place):
        tx, (params, loss) = case.tx(), case.problem()
        params = {name: value.clone() for name, value in place(params).items()}
        state = tx.init(params)
        for _ in range(3):
            leaves = moved("cpu", params)
            leaves = {n: p.detach().requires_grad_() for n, p in leaves.items()}
            values = torch.autograd.grad(loss(leaves), list(leaves.values()))
            grads = place(dict(zip(leaves, values, strict=True)))
            params, state = vgrad.optim.step(tx, grads, state, params, donate=donate)
        return case.outcome(params, state)

    equal(run)


# Ensembles.


def stacked():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    )
    models = []
    for _ in range(3):
        model = copy.deepcopy(model)
        for layer in model:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        models.append(model.append(nn.Linear(64, 3)).double())
        model = nn.Sequential(*model[:-1])
    return vgrad.stack(models, disable_autograd_tracking=True)


def of_members(function, **options):
    def run(place):
        fmodel, params, buffers = stacked()
        batch = place(calls.data())
        loss = vgrad.batch_loss(fmodel, F.cross_entropy)
        return function(loss, **options)(*place((params, buffers)), *batch)

    return run


def of_samples(function, **options):
    def run(place):
        models = [nn.Linear(36, 3).double() for _ in range(3)]
        fmodel, params, buffers = vgrad.stack(models, disable_autograd_tracking=True)
        x, y = calls.data()
        loss = vgrad.sample_loss(fmodel, F.cross_entropy)
        given = place((params, buffers, x.flatten(1), y))
        return function(loss, **options)(*given)

    return run


def forward(place, **options):
    fmodel, params, buffers = stacked()
    x, _ = calls.data()
    return vgrad.ensemble_forward(fmodel, **options)(*place((params, buffers, x)))


def predicted(place):
    models = [nn.Linear(36, 3).double() for _ in range(3)]
    fmodel, params, buffers = vgrad.stack(models)
    x, _ = place(calls.data())
    params, buffers = place((params, buffers))
    return ensemble.predict(fmodel, params, buffers, x.flatten(1))


ENSEMBLES = {
    f"grads, {strategy}": of_members(vgrad.ensemble_grad, strategy=strategy)
    for strategy in ("auto", "vmap", "loop", "hybrid")
}
ENSEMBLES |= {
    "samples": of_samples(ensemble.ensemble_per_sample_grad),
    "clipped": of_samples(ensemble.ensemble_clipped_grad, max_norm=0.1),
    "forward": forward,
    "predicted": predicted,
}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_ensembles(name):
    equal(ENSEMBLES[name], tolerance=1e-8)


# Memory.


def test_chunks_are_sized_by_the_memory_of_the_device():
    loss, params, buffers, batch = built("cnn", size=12)
    given = moved(HERE, (params, buffers, *batch))
    whole = vgrad.clipped_grad(loss, max_norm=0.5)(*given)
    sizes = []
    for room in (2**31, 2**17):
        options = {"chunk_size": "auto", "verify": False}
        seen = vgrad.clipped_grad(loss, max_norm=0.5, **options)
        used = torch.accelerator.get_memory_info()
        with device.capacity(used[1] - used[0] + room), device.counted() as counts:
            found = seen(*given)
        sizes.append(counts.launches)
        oracle.assert_exact(found.grads, whole.grads, 1e-10)
    assert sizes[1] > 1.5 * sizes[0]
