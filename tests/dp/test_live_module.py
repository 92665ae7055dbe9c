"""Private gradients on the module itself: what is read late, and what stays as it was.

The reference is a loop of plain autograd over the module, sample by sample.
"""

import collections
import copy
import functools
import sys
import threading
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from tests import oracle
from vgrad import FallbackWarning, make_functional_with_buffers
from vgrad.dp import Plan, PrivateGradients, secret_key

KEY = secret_key(seed=0)
PLAN = Plan(
    dataset_size=24,
    sampling_rate=0.3,
    noise_multiplier=0.0,
    max_norm=0.5,
    steps=8,
    delta=1e-3,
)
SOURCE = torch.Generator().manual_seed(1)
X = 2 * torch.randn(24, 4, dtype=torch.float64, generator=SOURCE)
Y = torch.randint(3, (24,), generator=SOURCE)
STRATEGIES = ["recorded", "vmap", "loop"]


def expected(model, step, criterion=F.cross_entropy):
    """Return what a loop over samples gives on the module as it is."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    for row in PLAN.sample(key=KEY, step=step).tolist():
        loss = criterion(model(X[row : row + 1]), Y[row : row + 1])
        grads = torch.autograd.grad(loss, [*params.values()], materialize_grads=True)
        norm = sum(each.square().sum() for each in grads).sqrt()
        for name, grad in zip(params, grads, strict=True):
            total[name] += grad * min(1.0, PLAN.max_norm / float(norm))
    return {name: each / PLAN.expected_batch_size for name, each in total.items()}


def bridge(model, criterion=F.cross_entropy, **options):
    dataset = TensorDataset(X, Y)
    given = {"plan": PLAN, "key": KEY} | options
    return PrivateGradients(model, criterion, dataset, **given)


def grads(model):
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def check_steps(model, change=lambda: None, steps=2, **options):
    """Compare steps, with a change before each but the first."""
    private = bridge(model, **options)
    for step, batch in zip(range(steps), private.loader, strict=False):
        if step:
            change()
        right = expected(model, step)
        private.backward(*batch)
        oracle.assert_exact(grads(model), right)
        model.zero_grad()


class Scaled(nn.Module):
    """A layer, and a function of its output and of what the module holds."""

    def __init__(self, held, read):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.held, self.read = held, read

    def forward(self, x):
        return self.read(self.held, self.layer(x), x)


class Factor:
    """An object that is called, with a state."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, value):
        return value * self.factor

    def times(self, value):
        return value * self.factor


class Slotted:
    __slots__ = ("__private", "factor")

    def __init__(self, factor=1.0):
        self.factor = factor


def ema(modules):
    with torch.no_grad():
        modules[0].weight.mul_(5)


def teacher():
    return nn.Linear(4, 3).double().requires_grad_(False)


def closure():
    factor = 1.0

    def scaled(value):
        return value * factor

    def change(to):
        nonlocal factor
        factor = to

    scaled.change = change
    return scaled


def attribute(held):
    held.factor = 5.0


LATE = {
    "namespace": (
        lambda: types.SimpleNamespace(factor=1.0),
        lambda c, h, x: h * c.factor,
        attribute,
    ),
    "callable": (Factor, lambda c, h, x: c(h), attribute),
    "method": (
        lambda: Factor().times,
        lambda c, h, x: c(h),
        lambda c: attribute(c.__self__),
    ),
    "partial": (
        lambda: functools.partial(Factor.times, Factor()),
        lambda c, h, x: c(h),
        lambda c: attribute(c.args[0]),
    ),
    "slots": (Slotted, lambda c, h, x: h * c.factor, attribute),
    "nested": (
        lambda: {"a": [(types.SimpleNamespace(b=Factor()),)]},
        lambda c, h, x: c["a"][0][0].b(h),
        lambda c: attribute(c["a"][0][0].b),
    ),
    "set": (lambda: {1}, lambda c, h, x: h * len(c), lambda c: c.update({2, 3})),
    "array": (
        lambda: np.ones(1),
        lambda c, h, x: h * float(c[0]),
        lambda c: c.fill(6.0),
    ),
    "bytes": (
        lambda: bytearray(b"\1"),
        lambda c, h, x: h * c[0],
        lambda c: c.extend(b"") or c.__setitem__(0, 3),
    ),
    "deque": (
        lambda: collections.deque([1.0], maxlen=1),
        lambda c, h, x: h * c[0],
        lambda c: c.append(4.0),
    ),
    "closure": (closure, lambda c, h, x: c(h), lambda c: c.change(4.0)),
    "attribute of a function": (
        lambda: setattr(f := lambda h: h, "factor", 1.0) or f,
        lambda c, h, x: h * c.factor,
        attribute,
    ),
    "tensor by data": (
        lambda: torch.ones(3).double(),
        lambda c, h, x: h * c,
        lambda c: c.data.mul_(5),
    ),
    "tensor in a set": (
        lambda: {torch.ones(3).double()},
        lambda c, h, x: h * next(iter(c)),
        lambda c: next(iter(c)).data.mul_(5),
    ),
    "tensor in a tuple": (
        lambda: (torch.ones(3).double(),),
        lambda c, h, x: h * c[0],
        lambda c: c[0].mul_(5),
    ),
    "attribute of a tensor": (
        lambda: setattr(t := torch.ones(3).double(), "tau", 1.0) or t,
        lambda c, h, x: h * c * c.tau,
        lambda c: setattr(c, "tau", 5.0),
    ),
    "teacher": (lambda: [teacher()], lambda c, h, x: h + c[0](x), ema),
    "teacher in an object": (
        lambda: types.SimpleNamespace(net=teacher()),
        lambda c, h, x: h + c.net(x),
        lambda c: ema([c.net]),
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_values_are_read_when_they_are_used(name):
    make, read, change = LATE[name]
    model = Scaled(make(), read)
    check_steps(model, lambda: change(model.held))


def test_the_state_of_a_hook_is_read_when_the_hook_runs():
    hook, before = Factor(), Factor()
    model = nn.Sequential(nn.Linear(4, 3)).double()
    model[0].register_forward_hook(lambda module, args, out: hook(out))
    model[0].register_forward_pre_hook(lambda module, args: (before(args[0]),))

    def change():
        hook.factor, before.factor = 4.0, 0.5

    check_steps(model, change)


def test_marks_on_parameters_are_seen():
    class Marked(nn.Linear):
        def forward(self, x):
            return super().forward(x) * getattr(self.weight, "tau", 1.0)

    model = Marked(4, 3).double()
    model.weight.tau = 2.0
    check_steps(model, lambda: setattr(model.weight, "tau", 5.0))
    assert vars(model.weight) == {"tau": 5.0}


class Writing(nn.Module):
    """Writes into whatever it holds, as caches, counters and statistics do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.other = nn.Linear(3, 3).double()
        self.register_buffer("mean", torch.zeros(3).double())
        self.register_buffer("table", None, persistent=False)
        self.calls, self.box = 0, types.SimpleNamespace(calls=0)
        self.list, self.full, self.dict, self.set = [], [1], {}, set()
        self.deque = collections.deque([0], maxlen=2)
        self.array, self.bytes = np.zeros(2), bytearray(2)
        self.slotted, self.running = Slotted(), torch.zeros(3).double()
        self.function = lambda: None
        self.counter = closure()
        self.pair = (types.SimpleNamespace(last=None), [])
        self.teacher = [teacher()]

    def forward(self, x):
        out = self.other(torch.tanh(self.layer(x)))
        self.calls += 1
        self.box.calls += 1
        self.box.last = self.new = self.slotted.factor = out
        self.list.append(out)
        self.full[0] = out
        self.dict["last"] = out
        self.set.add(out)
        self.deque.append(out)
        self.array += 1
        self.bytes[0] += 1
        self.function.last = out
        self.counter.change(out)
        self.pair[0].last = out
        self.pair[1].append(out)
        self.layer.weight.last = out
        self.training = not self.training
        self.running += 1
        self.table = torch.arange(3).double() if self.table is None else self.table
        self.mean.add_(1)
        self.teacher[0].weight.data.add_(1)
        self.layer.register_forward_hook(lambda *_: None)
        self.other = nn.Identity()
        return out + self.table + self.running + self.calls


def snapshot(value, seen):
    """Return all that an object holds, as nested lists of identities and numbers."""
    if isinstance(value, torch.Tensor):
        return (
            id(value),
            value.detach().clone().tolist(),
            id(value.grad),
            [*vars(value)],
        )
    if isinstance(value, str | int | float | None):
        return value
    if id(value) in seen:
        return id(value)
    seen[id(value)] = value
    if isinstance(value, np.ndarray | bytearray):
        return [*value]
    if isinstance(value, dict):
        return id(value), [(key, snapshot(each, seen)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | collections.deque):
        return id(value), [snapshot(each, seen) for each in value]
    parts = [vars(value)] if hasattr(value, "__dict__") else [value.factor]
    cells = getattr(value, "__closure__", None) or ()
    return (
        id(value),
        [snapshot(x, seen) for x in parts],
        [snapshot(cell.cell_contents, seen) for cell in cells],
    )


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_all_that_a_forward_pass_writes_is_put_back(strategy, chunk_size):
    model = Writing()
    private = bridge(model, strategy=strategy, chunk_size=chunk_size)
    for step, batch in zip(range(2), private.loader, strict=False):
        right = expected_of_copies(model, step)
        before = snapshot(model, {})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            private.backward(*batch)
        found = grads(model)
        oracle.assert_exact(found, right)
        model.zero_grad()
        assert snapshot(model, {}) == before


def expected_of_copies(model, step):
    """Return the gradients of a loop that begins each sample with the same module."""

    class Fresh(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            memo = {id(p): p for p in model.parameters()}
            return copy.deepcopy(model, memo)(x)

    # A closure is shared by copies.
    found = expected(Fresh(), step)
    model.counter.change(1.0)
    for parameter in model.parameters():
        vars(parameter).clear()
    vars(model.function).clear()
    return {name.removeprefix("model."): each for name, each in found.items()}


class Checkpointed(nn.Module):
    """Runs a part again in the backward pass, with what an object holds."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
        self.held = types.SimpleNamespace(factor=1.0)

    def part(self, x):
        return torch.tanh(self.inner(x) * self.held.factor)

    def forward(self, x):
        return self.outer(checkpoint(self.part, x, use_reentrant=False))


@pytest.mark.parametrize("strategy", ["auto", "recorded", "loop"])
def test_checkpoints_run_again_on_the_module(strategy):
    model = Checkpointed()
    check_steps(model, lambda: attribute(model.held), strategy=strategy)


class Reads(torch.autograd.Function):
    """Reads in its backward pass from the module, as its forward pass left it."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x * module.scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.module.scale, None


class Again(torch.autograd.Function):
    """Runs a layer again in its backward pass, as reversible layers do."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.layer(x)
        out.backward(grad)
        return x.grad, None


class InBackward(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
        self.function, self.scale = function, 1.0

    def forward(self, x):
        self.scale = float(x.detach().abs().max())
        if self.function is Reads:
            return Reads.apply(self.layer(self.first(x)), self)
        return Again.apply(self.first(x), self.layer)


@pytest.mark.parametrize("function", [Reads, Again])
@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
def test_a_backward_pass_finds_the_module_as_the_forward_pass_left_it(
    function, strategy
):
    model = InBackward(function)
    params = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    for row in PLAN.sample(key=KEY, step=0).tolist():
        model.zero_grad()
        F.cross_entropy(model(X[row : row + 1]), Y[row : row + 1]).backward()
        found = grads(model)
        norm = float(sum(each.square().sum() for each in found.values()).sqrt())
        for name, grad in found.items():
            total[name] += grad * min(1.0, PLAN.max_norm / norm) / 7.2
    model.zero_grad()
    model.scale = 1.0
    private = bridge(model, strategy=strategy)
    private.backward(*next(iter(private.loader)))
    oracle.assert_exact(grads(model), total)
    assert model.scale == 1.0


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
def test_backward_hooks_fire_as_in_a_call_of_the_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    factor = Factor(2.0)
    model[1].register_full_backward_hook(lambda module, ins, outs: (factor(ins[0]),))
    check_steps(model, lambda: attribute(factor))
    for strategy in ("recorded", "vmap"):
        private = bridge(model, strategy=strategy)
        with pytest.raises(RuntimeError, match="without backward hooks"):
            private.backward(*next(iter(private.loader)))


def test_hooks_that_come_later_are_seen():
    model = nn.Sequential(nn.Linear(4, 3)).double()
    private = bridge(model)
    batches = iter(private.loader)
    private.backward(*next(batches))
    model.zero_grad()
    handle = model[0].weight.register_hook(lambda grad: 2 * grad)
    batch = next(batches)
    with pytest.raises(TypeError, match=r"without hooks.*'0.weight'"):
        private.backward(*batch)
    handle.remove()
    model[0].register_forward_hook(lambda module, args, out: 2 * out)
    right = expected(model, 1)
    private.backward(*batch)
    oracle.assert_exact(grads(model), right)


def parametrized(name):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    if name == "old weight norm":
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(model[0])
    elif name == "old spectral norm":
        nn.utils.spectral_norm(model[0])
    elif name == "pruned":
        prune.l1_unstructured(model[0], "weight", 0.5)
    else:
        getattr(parametrizations, name)(model[0])
    return model.eval()


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "name",
    [
        "weight_norm",
        "orthogonal",
        "spectral_norm",
        "old weight norm",
        "old spectral norm",
        "pruned",
    ],
)
def test_parametrized_modules(name, strategy):
    check_steps(parametrized(name), strategy=strategy)


def test_cached_parametrizations_are_refused():
    model = parametrized("weight_norm")
    private = bridge(model)
    batch = next(iter(private.loader))
    with parametrize.cached():
        model(X)
        with pytest.raises(RuntimeError, match=r"outside of .*parametrize.cached\(\)"):
            private.backward(*batch)
    private.backward(*batch)


class Holder(nn.Module):
    """Uses its weight by another way than its layer."""

    def __init__(self, hold, read):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.held, self.read = hold(self.layer), read

    def forward(self, x):
        return self.layer(x) * self.read(self.held).sum()


def in_a_cell(layer):
    weight = layer.weight
    return lambda: weight.exp()


HELD = {
    "tuple": (lambda layer: (layer.weight, 1), lambda held: held[0]),
    "list": (lambda layer: [(layer.weight,)], lambda held: held[0][0]),
    "set": (lambda layer: {layer.weight}, lambda held: next(iter(held))),
    "deque": (lambda layer: collections.deque([layer.weight]), lambda held: held[0]),
    "key": (lambda layer: {layer.weight: 1}, lambda held: next(iter(held))),
    "namespace": (
        lambda layer: types.SimpleNamespace(w=layer.weight),
        lambda held: held.w,
    ),
    "slots": (lambda layer: Slotted(layer.weight), lambda held: held.factor),
    "default": (lambda layer: lambda w=layer.weight: w.exp(), lambda held: held()),
    "cell": (in_a_cell, lambda held: held()),
    "module in a cell": (lambda layer: lambda: layer.weight, lambda held: held()),
    "keyword": (
        lambda layer: functools.partial(torch.mul, other=layer.weight),
        lambda held: held(2 * torch.ones(())),
    ),
    "distribution": (
        lambda layer: torch.distributions.Normal(layer.weight, 1.0),
        lambda held: held.log_prob(torch.ones(3, 4).double()),
    ),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", HELD)
def test_parameters_are_exchanged_wherever_they_are_held(name, strategy):
    model = Holder(*HELD[name])
    before = snapshot(model, {})
    check_steps(model, strategy=strategy)
    assert snapshot(model, {}) == before


FIXED = {
    "frozenset": lambda layer: frozenset([layer.weight]),
    "partial": lambda layer: functools.partial(torch.mul, layer.weight),
    "method": lambda layer: layer.weight.exp,
    "operator": lambda layer: layer.weight.__mul__,
    "weak reference": lambda layer: weakref.ref(layer.weight),
    "keys of weak references": lambda layer: weakref.WeakKeyDictionary({layer: 1}),
    "objects": lambda layer: np.frompyfunc(lambda _: layer.bias, 1, 1)(np.ones(1)),
    "result": lambda layer: functools.partial(torch.mul, layer.weight.exp()),
}


@pytest.mark.parametrize("name", FIXED)
def test_parameters_that_cannot_be_exchanged_are_refused(name):
    if name == "keys of weak references":
        check_steps(Holder(FIXED[name], lambda held: next(iter(held)).weight))
        return
    with pytest.raises(TypeError, match=r"PrivateGradients\(Holder\).*in 'held'"):
        bridge(Holder(FIXED[name], lambda held: held))


@pytest.mark.parametrize("hold", [torch.exp, torch.detach, lambda w: w[0]])
def test_results_and_views_of_parameters_are_refused_where_they_are_used(hold):
    model = Holder(lambda layer: hold(layer.weight), lambda held: held)
    private = bridge(model)
    with pytest.raises(RuntimeError, match="a view or a result of parameters"):
        private.backward(*next(iter(private.loader)))
    model.read = lambda held: torch.ones(1)
    check_steps(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules_run_as_they_are_written():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    reference = copy.deepcopy(model)
    ran = []
    for each in (model, model[0]):  # as Module.compile does
        each._compiled_call_impl = lambda *args: ran.append(args)
    private = bridge(model)
    private.backward(*next(iter(private.loader)))
    oracle.assert_exact(grads(model), expected(reference, 0))
    model(X)
    assert len(ran) == 1
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        with pytest.raises(TypeError, match="expected a plain torch.nn.Module"):
            bridge(wrapped)


def test_batch_norm_in_evaluation_mode_and_lazy_layers_that_were_run():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 3))
    model.double()
    with pytest.raises(TypeError, match="expected initialised tensors, got lazy"):
        bridge(model)
    model(X)
    check_steps(model.eval())


class Special(nn.Parameter):
    """A class of parameters of the user's own."""


HIDDEN: list = [None]


class OfItsClass(nn.Linear):
    """Uses its weight by a global name."""

    kept = None

    def forward(self, x):
        return super().forward(x) * HIDDEN[0].sum()


@pytest.mark.parametrize("by_class", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_used_by_other_names_are_refused(monkeypatch, strategy, by_class):
    model = OfItsClass(4, 3).double()
    if strategy == "loop":
        model.weight = Special(model.weight.detach())
    kind = type(model.weight)
    private = bridge(model, strategy=strategy)
    batch = next(iter(private.loader))
    if by_class:
        monkeypatch.setattr(OfItsClass, "kept", [model.weight])
        monkeypatch.setattr(OfItsClass, "forward", of_its_class)
    HIDDEN[0] = model.weight
    with pytest.raises(RuntimeError, match="held where it cannot be exchanged"):
        private.backward(*batch)
    assert type(model.weight) is kind


def of_its_class(model, x):
    return nn.Linear.forward(model, x) * model.kept[0].sum()


def test_runs_that_share_a_module_take_turns_in_threads():
    trunk = Scaled(types.SimpleNamespace(calls=0), lambda held, hidden, x: hidden)
    trunk.requires_grad_(False)
    models = [nn.Sequential(trunk, nn.Linear(3, 3)).double() for _ in range(2)]
    rights = [expected(model, 0) for model in models]
    values, failures = trunk(X), []
    trunk.read = counted  # is as good as that where each call is the first
    private = [bridge(model, strategy="loop") for model in models]
    given = [next(iter(each.loader)) for each in private]
    begin = threading.Barrier(3)

    def run(work):
        try:
            begin.wait()
            for _ in range(5):
                work()
        except BaseException as error:
            failures.append(error)

    def step(number):
        state = private[number].state_dict()
        pieces = private[number].loader.pending
        private[number].backward(*given[number])
        oracle.assert_exact(grads(models[number]), rights[number])
        models[number].zero_grad()
        private[number].load_state_dict(state)
        private[number].loader.pending = pieces

    def split():
        fmodel, params, buffers = make_functional_with_buffers(trunk)
        torch.testing.assert_close(fmodel(params, buffers, X), values)

    works = [functools.partial(step, 0), functools.partial(step, 1), split]
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert trunk.held.calls == 0


def counted(held, hidden, x):
    held.calls += 1
    return hidden * held.calls


FILES = ("functional/live.py", "functional/slots.py", "functional/model.py")
FILES += ("dp/private_gradients.py",)


@pytest.mark.parametrize("part", range(4))
def test_an_interrupt_leaves_everything_as_it_was(part):
    """Interrupts a call at every line in turn, or nearly so."""
    model = Writing()
    private = bridge(model, strategy="recorded")
    batches = iter(private.loader)
    private.backward(*next(batches))
    batch = next(batches)
    left, place = 0, ""

    def trace(frame, event, arg):
        nonlocal left, place
        if frame.f_code.co_filename.endswith(FILES) and event == "line":
            left -= 1
            if left == 0:
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before, step, number = snapshot(model, {}), private.step, 20 * part + 1
    model.box.new = 1  # is seen
    before = snapshot(model, {})
    while True:
        left = number
        outer = sys.gettrace()
        sys.settrace(trace)
        try:
            private.backward(*batch)
            break
        except KeyboardInterrupt:
            assert snapshot(model, {}) == before, place
            assert private.step == step
        finally:
            sys.settrace(outer)
        number += 80
    assert private.step == step + 1
    assert number > 1000
