"""Buffers that a loss writes from parameters alone advance once a step, however cut."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import TensorDataset

import vgrad
from tests import oracle
from vgrad import dp, optim
from vgrad.distributed import data_parallel, single_process_mesh
from vgrad.training import TrainState, private_step, saved, train_step

BOUND, LR, DTYPE = 0.5, 0.3, torch.float64
STRATEGIES = ["auto", "recorded", "vmap", "loop"]


class Scaled(nn.Module):
    """A parametrization with state: an average of the weight's norm, and a count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("size", torch.ones((), dtype=DTYPE))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, w):
        if self.training:
            self.size = 0.5 * self.size + 0.5 * w.detach().norm()
            self.calls += 1
        return w / self.size


class ByHand(nn.Linear):
    """A layer that iterates in its forward pass, as GANs did before torch had it."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("u", F.normalize(torch.ones(1, sizes[1]), dim=1))

    def forward(self, x):
        with torch.no_grad():
            v = F.normalize(self.u @ self.weight, dim=1)
            u = F.normalize(v @ self.weight.t(), dim=1)
            if self.training:
                self.u[:] = u
        return F.linear(x, self.weight / (u @ self.weight @ v.t()).squeeze(), self.bias)


def scaled(layer):
    parametrize.register_parametrization(layer, "weight", Scaled())
    return layer


NETS = {
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(4, 6)),
    "old spectral": lambda: nn.utils.spectral_norm(nn.Linear(4, 6)),
    "two iterations": lambda: parametrizations.spectral_norm(
        nn.Linear(4, 6), n_power_iterations=2
    ),
    "own state": lambda: scaled(nn.Linear(4, 6)),
    "by hand": lambda: ByHand(4, 6),
}
every_net = pytest.mark.parametrize("name", NETS)


def net(name):
    torch.manual_seed(0)
    return nn.Sequential(NETS[name](), nn.Tanh(), nn.Linear(6, 3)).to(DTYPE)


def batches(*sizes):
    torch.manual_seed(1)
    return [(torch.randn(n, 4, dtype=DTYPE), torch.randint(3, (n,))) for n in sizes]


def copied(name, model):
    other = net(name)  # results of the old spectral norm cannot be copied
    other.load_state_dict(model.state_dict())
    return other


def trained(name, some, divisor=None, bound=BOUND):
    """Train in plain torch: each sample of a step meets the module as it was before."""
    model = net(name)
    for x, y in some:
        after, total = copied(name, model), {}
        after(torch.zeros(1, 4, dtype=DTYPE))  # runs once a step
        for i in range(len(x)):
            one = copied(name, model)
            F.cross_entropy(one(x[i : i + 1]), y[i : i + 1]).backward()
            grads = {n: p.grad for n, p in one.named_parameters()}
            norm = torch.stack([g.norm() for g in grads.values()]).norm()
            for n, g in grads.items():
                total[n] = total.get(n, 0) + g * min(1, bound / norm)
        with torch.no_grad():
            for n, p in after.named_parameters():
                p -= LR * torch.as_tensor(total.get(n, 0)) / (divisor or len(x))
        model = after
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def plan(**options):
    return dp.Plan(100, 0.05, 0.0, BOUND, 20, 1e-3, **options)


def begun(name):
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net(name))
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    return loss, TrainState.create(optim.sgd(LR), params, buffers)


def run(step, state, some):
    for batch in some:
        state, _ = step(state, *batch)
    return {**state.params, **state.buffers}


WAYS = {
    **{each: {"strategy": each} for each in STRATEGIES},
    "chunks": {"chunk_size": 2},
    "two passes": {"passes": 2},
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@every_net
@pytest.mark.parametrize("way", WAYS)
def test_private_steps(name, way):
    loss, state = begun(name)
    some = batches(5, 0, 3, 1)  # an empty batch advances them too
    step = private_step(loss, optim.sgd(LR), plan(), **WAYS[way])
    right = trained(name, some, 5)
    oracle.assert_exact(run(step, state, some), right)
    # The same, when the first batch is empty.
    some = batches(0, 4)
    oracle.assert_exact(run(step, state, some), trained(name, some, 5))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@every_net
@pytest.mark.parametrize("backend", [None, "replay"])
def test_plain_steps_of_samples(name, backend):
    loss, state = begun(name)
    step = train_step(loss, optim.sgd(LR))
    some = batches(5, 5, 3, 3)
    if backend is not None:
        step = vgrad.compile(step, backend=backend)
    right = trained(name, some, bound=torch.inf)
    oracle.assert_exact(run(step, state, some), right)


@every_net
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_compiled_private_steps_of_ranks(name):
    loss, state = begun(name)
    some = batches(5, 5, 0, 5)
    step = private_step(loss, optim.sgd(LR), plan())
    right = trained(name, some, 5)
    compiled = vgrad.compile(step, backend="replay")
    oracle.assert_exact(run(compiled, state, some), right)
    with single_process_mesh("dp") as mesh:
        for each in (step, compiled):
            found = run(data_parallel(each, mesh), state, some)
            oracle.assert_exact(found, right)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@every_net
@pytest.mark.parametrize("size", [None, 2, 1])
def test_private_gradients(name, size):
    x, y = torch.cat([x for x, _ in batches(30)]), torch.arange(30) % 3
    model, rule = net(name), dp.Plan(30, 0.07, 0.0, BOUND, 12, 1e-3)
    options = {"plan": rule, "key": dp.secret_key(seed=0)}
    data = TensorDataset(x, y)
    private = dp.PrivateGradients(
        model, F.cross_entropy, data, physical_batch_size=size, **options
    )
    optimizer = private.watch(torch.optim.SGD(model.parameters(), LR))
    some, parts = [], []
    while private.step < 12:
        for batch in private.loader:
            before = {n: x.clone() for n, x in model.named_buffers()}
            private.backward(*batch)
            parts.append(batch)
            if private.ready:
                optimizer.step()
                some.append([*map(torch.cat, zip(*parts, strict=True))])
                parts = []
            else:
                oracle.assert_exact(dict(model.named_buffers()), before, tolerance=0)
    assert {0, 1, 4} <= {len(x) for x, _ in some}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    oracle.assert_exact(found, trained(name, some, 2.1))


def test_the_same_under_other_names_policies_and_units():
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net("spectral"))
    rest = {f"d.{n}": x for n, x in buffers.items()}
    some = batches(4, 0, 3)

    def loss(params, buffers, x, y):
        own = {n[2:]: x for n, x in buffers.items()}
        return F.cross_entropy(fmodel(params, own, x[None])[0], y)

    state = TrainState.create(optim.sgd(LR), params, rest)
    found = run(private_step(loss, optim.sgd(LR), plan()), state, some)
    right = trained("spectral", some, 5)
    assert rest.keys() < found.keys()
    oracle.assert_exact({n.removeprefix("d."): x for n, x in found.items()}, right)

    own = vgrad.sample_loss(fmodel, F.cross_entropy)
    state = TrainState.create(optim.sgd(LR), params, buffers)
    step = private_step(
        own,
        optim.sgd(LR),
        plan(),
        policy="params=float64,compute=float64,output=float64",
    )
    oracle.assert_exact(run(step, state, some), right)
    for each in (own, lambda *arguments: own(*arguments)):
        step = private_step(each, optim.sgd(LR), plan(samples_per_unit=1))
        units = [
            (x[:, None], y[:, None], torch.ones(len(x), 1).bool()) for x, y in some
        ]
        oracle.assert_exact(run(step, state, units), right)


def test_a_resumed_run_repeats_its_buffers(tmp_path):
    loss, state = begun("spectral")
    some, step = batches(4, 0, 3, 2), private_step(loss, optim.sgd(LR), plan())
    right = run(step, state, some)
    for batch in some[:2]:
        state, _ = step(state, *batch)
    saved.save(tmp_path / "state", state)
    resumed = saved.load(tmp_path / "state", begun("spectral")[1])
    again = private_step(begun("spectral")[0], optim.sgd(LR), plan())
    found = run(again, resumed, some[2:])
    assert all(torch.equal(found[n], x) for n, x in right.items())


def test_modules_that_write_nothing_run_no_more_often():
    runs = []

    class Counted(nn.Linear):
        def forward(self, x):
            runs.append(len(x))
            return super().forward(x) + self.shift

    module = Counted(4, 3)
    module.register_buffer("shift", torch.ones(3))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(module)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    state = TrainState.create(optim.sgd(LR), params, buffers)
    step = private_step(loss, optim.sgd(LR), plan(), verify=False)
    (x, y), before = batches(5)[0], state.buffers["shift"]
    for _ in range(3):
        state, _ = step(state, x.float(), y)
    assert len(runs) == 3
    assert state.buffers["shift"] is before


class Average(nn.Module):
    """Keeps a number of its inputs, written in one of several ways."""

    def __init__(self, write):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=DTYPE))
        self.write = write

    def forward(self, x):
        self.write(self, x.detach())
        return x


WRITES = {
    "bound": lambda m, x: setattr(m, "seen", m.seen + x.mean()),
    "in place": lambda m, x: m.seen.add_(x.mean()),
    "copied": lambda m, x: m.seen.copy_(x.mean()),
    "so far": lambda m, x: m.seen.copy_(1.0 * (x == 0).all()),
    "by value": lambda m, x: m.seen.fill_(float(x.mean())),
    "branch": lambda m, x: m.seen.add_(1 if x.abs().sum() > 0 else 0),
    "random": lambda m, x: m.seen.copy_(torch.rand(())),
}


@pytest.mark.filterwarnings("ignore::vgrad.persample.engine.FallbackWarning")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_writes_of_samples_are_refused(write, strategy):
    model = nn.Sequential(Average(WRITES[write]), nn.Linear(4, 3)).to(DTYPE)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    state = TrainState.create(optim.sgd(LR), params, buffers)
    options = {"strategy": strategy, "randomness": "different"}
    step = private_step(loss, optim.sgd(LR), plan(), **options)
    batch = batches(3)[0]
    with pytest.raises((RuntimeError, ValueError)) as raised:
        step(state, *batch)
    if strategy in ("auto", "loop"):
        assert "another write into '0.seen'" in str(raised.value)


def test_buffers_outside_of_the_state_are_refused():
    fmodel, params, buffers = vgrad.make_functional_with_buffers(net("spectral"))

    def loss(params, _, x, y):
        return F.cross_entropy(fmodel(params, buffers, x[None])[0], y)

    state = TrainState.create(optim.sgd(LR), params, {})
    step = private_step(loss, optim.sgd(LR), plan())
    with pytest.raises(RuntimeError, match="another write into '0.*'"):
        step(state, *batches(3)[0])


class Refusing(nn.Module):
    """A layer that iterates, of samples that are not zero alone."""

    def __init__(self):
        super().__init__()
        self.layer = parametrizations.spectral_norm(nn.Linear(4, 3))

    def forward(self, x):
        if bool((x == 0).all()):
            raise ValueError("a sample of zeros")
        return self.layer(x)


class Constant(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.parametrize("make", [Refusing, Constant])
@pytest.mark.parametrize("size", [0, 3])
def test_losses_that_take_no_zeros(make, size):
    def criterion(output, y):
        if bool((y == 0).all()):
            raise ValueError("no class")
        return F.cross_entropy(output, y)

    model = make().to(DTYPE)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, criterion)
    state = TrainState.create(optim.sgd(LR), params, buffers)
    x, _ = batches(size)[0]
    state, _ = private_step(loss, optim.sgd(LR), plan())(
        state, x, torch.ones(size).long()
    )
    model(torch.ones(1, 4, dtype=DTYPE))  # advances once
    oracle.assert_exact(state.buffers, dict(model.named_buffers()))


class Averaged(nn.Module):
    """Keeps a mean of its weight, written by an op without a rule, and two counts."""

    def __init__(self, steps=10):
        super().__init__()
        self.layer, self.steps = nn.Linear(4, 3), steps
        self.register_buffer("mean", torch.zeros(3, 4))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("first", torch.tensor(0.0))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(self.layer.weight, alpha=0.1)
            self.calls += 1
            if self.calls <= 2:
                self.first += 1
        return self.layer(x)


@pytest.mark.parametrize("way", WAYS)
def test_means_of_parameters_and_writes_of_the_first_steps(way):
    model = Averaged().to(DTYPE)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    state = TrainState.create(optim.sgd(LR), params, buffers)
    step = private_step(loss, optim.sgd(LR), plan(), **WAYS[way])
    mean = torch.zeros(3, 4, dtype=DTYPE)
    for batch in batches(3, 0, 4, 2):
        mean = 0.9 * mean + 0.1 * state.params["layer.weight"]
        state, _ = step(state, *batch)
    expected = {"mean": mean, "calls": torch.tensor(4), "first": torch.tensor(2.0)}
    oracle.assert_exact(
        state.buffers, {n: x.to(state.buffers[n]) for n, x in expected.items()}
    )


@pytest.mark.filterwarnings("ignore::vgrad.persample.engine.FallbackWarning")
@pytest.mark.parametrize(
    "options", [{"strategy": "loop"}, {"chunk_size": 1}, {"chunk_size": 2}]
)
def test_a_write_of_one_sample_among_others_is_refused(options):
    class Marked(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.register_buffer("mark", torch.zeros(()))

        def forward(self, x):
            with torch.no_grad():
                self.mark.fill_(1.0 if x.sum() > 90 else 0.0)
            return super().forward(x)

    fmodel, params, buffers = vgrad.make_functional_with_buffers(Marked().to(DTYPE))
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    state = TrainState.create(optim.sgd(LR), params, buffers)
    x, y = batches(5)[0]
    x[2] = 100.0  # the last sample writes what zeros write
    step = private_step(loss, optim.sgd(LR), plan(), **options)
    with pytest.raises(RuntimeError, match="another write into 'mark'"):
        step(state, x, y)
