"""Private gradients on the module itself: what is read late, and what stays as it was.

The reference is a loop of plain autograd over the module, sample by sample.
"""

import collections
import copy
import functools
import linecache
import sys
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from tests import oracle
from tests.dp import runs
from tests.dp.runs import KEY, first, grads
from tests.functional.held import EXCHANGED, HELD, Holder
from tests.losses import Net
from tests.test_threads import together
from vgrad import make_functional_with_buffers

PLAN = runs.plan(24, 0.3, 0.5, steps=8)
X, Y = (DATA := runs.data(24, 4)).tensors
STRATEGIES = ["recorded", "vmap", "loop"]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
with_fallbacks = pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")


def linear(inputs=4, outputs=3):
    return nn.Linear(inputs, outputs).double()


def expected(model, step):
    """Return what a loop over samples gives on the module as it is."""
    rows = PLAN.sample(key=KEY, step=step)
    found = oracle.module_gradients(model, runs.loss, DATA[rows], len(rows))
    model.zero_grad()
    return runs.mean(found, PLAN)


def private(model, **options):
    return runs.private(PLAN, model, DATA, **options)


def check_steps(model, change=lambda: None, **options):
    """Compare two steps, with a change before the second."""
    run = private(model, **options)
    for step, batch in zip(range(2), run.loader, strict=False):
        if step:
            change()
        right = expected(model, step)
        run.backward(*batch)
        oracle.assert_exact(grads(model), right)
        model.zero_grad()


class Factor:
    """An object that is called, with a state."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, value):
        return value * self.factor

    def times(self, value):
        return value * self.factor


def ema(module):
    with torch.no_grad():
        module.weight.mul_(5)


def teacher():
    return linear().requires_grad_(False)


def closure():
    factor = 1.0

    def scaled(value):
        return value * factor

    def change(to):
        nonlocal factor
        factor = to

    scaled.change = change
    return scaled


def marked(value, name):
    setattr(value, name, 1.0)
    return value


def attribute(held):
    held.factor = 5.0


def threes():
    return torch.ones(3).double()


namespace, partial = types.SimpleNamespace, functools.partial
LATE = {
    "method":
        (lambda: Factor().times, lambda c, h, x: c(h), lambda c: attribute(c.__self__)),
    "nested": (lambda: {"a": [(namespace(b=Factor()),)]},
               lambda c, h, x: c["a"][0][0].b(h), lambda c: attribute(c["a"][0][0].b)),
    "array":
        (lambda: np.ones(1), lambda c, h, x: h * float(c[0]), lambda c: c.fill(6.0)),
    "closure": (closure, lambda c, h, x: c(h), lambda c: c.change(4.0)),
    "tensor by data": (threes, lambda c, h, x: h * c, lambda c: c.data.mul_(5)),
    "tensor in a set": (lambda: {threes()}, lambda c, h, x: h * next(iter(c)),
                        lambda c: next(iter(c)).data.mul_(5)),
    "attribute of a tensor": (lambda: marked(threes(), "factor"),
                              lambda c, h, x: h * c * c.factor, attribute),
    "teacher in an object": (lambda: namespace(net=teacher()),
                             lambda c, h, x: h + c.net(x), lambda c: ema(c.net)),
}  # fmt: skip
"""Objects that a module holds, their use in its forward pass, and a later change."""


@pytest.mark.parametrize("name", LATE)
def test_values_are_read_when_they_are_used(name):
    make, read, change = LATE[name]
    held = make()
    model = Net(lambda self, x: read(self.held, self.layer(x), x), layer=linear())
    model.held = held
    check_steps(model, lambda: change(held))


def test_the_state_of_a_hook_is_read_when_the_hook_runs():
    hook, before = Factor(), Factor()
    model = nn.Sequential(linear())
    model[0].register_forward_hook(lambda module, args, out: hook(out))
    model[0].register_forward_pre_hook(lambda module, args: (before(args[0]),))
    check_steps(model, lambda: (attribute(hook), setattr(before, "factor", 0.5)))


def test_marks_on_parameters_are_seen():
    model = Net(
        lambda self, x: self.layer(x) * getattr(self.layer.weight, "factor", 1.0),
        layer=linear(),
    )
    marked(model.layer.weight, "factor")
    check_steps(model, lambda: attribute(model.layer.weight))
    assert vars(model.layer.weight) == {"factor": 5.0}


class Writing(nn.Module):
    """Writes into whatever it holds, as caches, counters and statistics do."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = linear(), linear(3)
        self.register_buffer("mean", torch.zeros(3).double())
        self.register_buffer("table", None, persistent=False)
        self.calls, self.deep = 0, {"a": [[0]]}
        self.list, self.full, self.dict, self.set = [], [1], {}, set()
        self.deque = collections.deque([0], maxlen=2)
        self.running, self.pair = torch.zeros(3).double(), (1, [])
        self.teacher = [teacher()]

    def forward(self, x):
        out = self.other(torch.tanh(self.layer(x)))
        self.calls += 1
        self.deep["a"][0][0] += 1
        self.new = out
        self.list.append(out)
        self.full[0] = out
        self.dict["last"] = out
        self.set.add(out)
        self.deque.append(out)
        self.layer.weight.last = out
        self.pair[1].append(out)
        self.training = not self.training
        self.running += 1
        self.table = torch.arange(3).double() if self.table is None else self.table
        self.mean.add_(1)
        self.teacher[0].weight.data.add_(1)
        self.layer.register_forward_hook(lambda *_: None)
        self.other = nn.Identity()
        counts = self.calls + self.deep["a"][0][0] + len(self.list)
        return out + self.table + self.running + counts


def snapshot(value, seen=None):
    """Return all that an object holds, as nested lists of identities and numbers."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        numbers = value.detach().clone().tolist()
        return id(value), numbers, id(value.grad), [*vars(value)]
    if isinstance(value, str | int | float | None):
        return value
    if id(value) in seen:
        return id(value)
    seen[id(value)] = value
    if isinstance(value, dict):
        return id(value), [(key, snapshot(each, seen)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | collections.deque):
        return id(value), [snapshot(each, seen) for each in value]
    return id(value), snapshot(vars(value), seen)


def expected_of_copies(model, step):
    """Return the gradients of a loop that begins each sample with the same module."""

    def forward(self, x):
        memo = {id(p): p for p in model.parameters()}
        return copy.deepcopy(model, memo)(x)

    found = expected(Net(forward, model=model), step)
    for parameter in model.parameters():
        vars(parameter).clear()
    return {name.removeprefix("model."): each for name, each in found.items()}


@with_fallbacks
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_all_that_a_forward_pass_writes_is_put_back(strategy, chunk_size):
    model = Writing()
    run = private(model, strategy=strategy, chunk_size=chunk_size)
    for step, batch in zip(range(2), run.loader, strict=False):
        right = expected_of_copies(model, step)
        before = snapshot(model)
        run.backward(*batch)
        oracle.assert_exact(grads(model), right)
        model.zero_grad()
        # A buffer that all samples write alike goes on once a step.
        assert torch.equal(model.mean, torch.full((3,), step + 1.0).double())
        model.mean.sub_(1)
        assert snapshot(model) == before
        model.mean.add_(1)


@pytest.mark.parametrize("strategy", ["auto", "recorded", "loop"])
def test_checkpoints_run_again_on_the_module(strategy):
    def part(x):
        return torch.tanh(model.inner(x) * model.held.factor)

    def forward(self, x):
        return self.outer(checkpoint(part, x, use_reentrant=False))

    model = Net(forward, inner=linear(4, 4), outer=linear(), held=Factor())
    check_steps(model, lambda: attribute(model.held), strategy=strategy)


class Again(torch.autograd.Function):
    """Runs a layer again in its backward pass, and reads what the forward pass wrote.

    Reversible layers do the first.
    """

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return module.layer(x) * module.scale

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module.layer(x) * ctx.module.scale
        out.backward(grad)
        return x.grad, None


@with_fallbacks
@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_a_backward_pass_finds_the_module_as_the_forward_pass_left_it(strategy):
    def forward(self, x):
        self.scale = float(x.detach().abs().max())
        return Again.apply(self.first(x), self)

    model = Net(forward, first=linear(4, 4), layer=linear())
    right = expected(model, 0)
    model.scale = 1.0
    run = private(model, strategy=strategy)
    run.backward(*first(run))
    oracle.assert_exact(grads(model), right)
    assert model.scale == 1.0


@with_fallbacks
def test_backward_hooks_fire_as_in_a_call_of_the_module():
    model, factor = nn.Sequential(linear(4, 4), nn.Tanh(), linear()), Factor(2.0)
    model[1].register_full_backward_hook(lambda module, ins, outs: (factor(ins[0]),))
    check_steps(model, lambda: attribute(factor))
    run = private(model, strategy="vmap")
    with pytest.raises(RuntimeError, match="without backward hooks"):
        run.backward(*first(run))


def test_hooks_that_come_later_are_seen():
    model = nn.Sequential(linear())
    run = private(model)
    batches = iter(run.loader)
    run.backward(*next(batches))
    model.zero_grad()
    handle = model[0].weight.register_hook(lambda grad: 2 * grad)
    batch = next(batches)
    with pytest.raises(TypeError, match=r"without hooks.*'0.weight'"):
        run.backward(*batch)
    handle.remove()
    model[0].register_forward_hook(lambda module, args, out: 2 * out)
    right = expected(model, 1)
    run.backward(*batch)
    oracle.assert_exact(grads(model), right)


PARAMETRIZED = {
    "old weight norm": nn.utils.weight_norm,
    "old spectral norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral norm": parametrizations.spectral_norm,
}


def parametrized(name):
    model = nn.Sequential(linear(4, 4), linear())
    PARAMETRIZED[name](model[0])
    return model.eval()


@with_fallbacks
@pytest.mark.filterwarnings("ignore::FutureWarning")
@every_strategy
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_modules(name, strategy):
    check_steps(parametrized(name), strategy=strategy)


def test_cached_parametrizations_are_refused():
    model = parametrized("weight norm")
    run = private(model)
    batch = first(run)
    with parametrize.cached():
        model(X)
        with pytest.raises(RuntimeError, match=r"outside of .*parametrize.cached\(\)"):
            run.backward(*batch)
    run.backward(*batch)


IN_CELLS = ["module in a cell", "keys of weak references"]


@every_strategy
@pytest.mark.parametrize("name", [*EXCHANGED, *IN_CELLS])
def test_parameters_are_exchanged_in_modules_and_plain_containers(name, strategy):
    model = Holder(*HELD[name])
    check_steps(model, strategy=strategy)


ELSEWHERE = {
    "frozenset": lambda layer: frozenset([layer.weight]),
    "partial": lambda layer: partial(torch.mul, layer.weight),
    "method": lambda layer: layer.weight.exp,
    "operator": lambda layer: layer.weight.__mul__,
    "weak reference": lambda layer: weakref.ref(layer.weight),
    "objects": lambda layer: np.frompyfunc(lambda _: layer.weight, 1, 1)(np.ones(1)),
}
USES = {
    "frozenset": lambda held: next(iter(held)),
    "partial": lambda held: held(2),
    "operator": lambda held: held(2),
    "objects": lambda held: held[0],
}
ELSEWHERE = {
    n: (each, USES.get(n, lambda held: held())) for n, each in ELSEWHERE.items()
}
ELSEWHERE |= {n: HELD[n] for n in HELD if n not in (*EXCHANGED, *IN_CELLS)}


@every_strategy
@pytest.mark.parametrize("name", ELSEWHERE)
def test_parameters_that_are_held_elsewhere_are_refused_where_they_are_used(
    name, strategy
):
    model = Holder(*ELSEWHERE[name])
    run = private(model, strategy=strategy)
    with pytest.raises(RuntimeError, match="held where it cannot be exchanged"):
        run.backward(*first(run))
    assert type(model.layer.weight) is nn.Parameter


@pytest.mark.parametrize("hold", [torch.exp, torch.detach, lambda w: w[0]])
def test_results_and_views_of_parameters_are_refused_where_they_are_used(hold):
    model = Holder(lambda layer: hold(layer.weight), lambda held: held)
    run = private(model)
    with pytest.raises(RuntimeError, match="a view or a result of parameters"):
        run.backward(*first(run))
    model.read = lambda held: torch.ones(1)
    check_steps(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules_run_as_they_are_written():
    model = nn.Sequential(linear(4, 4), linear())
    right, ran = expected(model, 0), []
    for each in (model, model[0]):  # as Module.compile does
        each._compiled_call_impl = lambda *args: ran.append(args)
    run = private(model)
    run.backward(*first(run))
    oracle.assert_exact(grads(model), right)
    model(X)
    assert len(ran) == 1
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        with pytest.raises(TypeError, match="expected a plain torch.nn.Module"):
            private(wrapped)


def test_batch_norm_in_evaluation_mode_and_lazy_layers_that_were_run():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 3))
    model.double()
    with pytest.raises(TypeError, match="expected initialised tensors, got lazy"):
        private(model)
    model(X)
    check_steps(model.eval())


class Special(nn.Parameter):
    """A class of parameters of the user's own."""


HIDDEN: list = [None]


class OfItsClass(nn.Linear):
    """Uses its weight by a global name, or by one of its class."""

    kept = None

    def forward(self, x):
        weight = HIDDEN[0] if self.kept is None else self.kept[0]
        return super().forward(x) * weight.sum()


@pytest.mark.parametrize("by_class", [True, False])
@every_strategy
def test_parameters_used_by_other_names_are_refused(monkeypatch, strategy, by_class):
    model = OfItsClass(4, 3).double()
    if strategy == "loop":
        model.weight = Special(model.weight.detach())
    kind = type(model.weight)
    run = private(model, strategy=strategy)
    batch = first(run)
    if by_class:
        monkeypatch.setattr(OfItsClass, "kept", [model.weight])
    HIDDEN[0] = model.weight
    with pytest.raises(RuntimeError, match="held where it cannot be exchanged"):
        run.backward(*batch)
    assert type(model.weight) is kind


def test_runs_that_share_a_module_take_turns_in_threads():
    def counted(self, x):
        self.calls += 1  # each call is the first
        return self.layer(x) * self.calls

    trunk = Net(lambda self, x: self.layer(x), layer=linear(), calls=0)
    trunk.requires_grad_(False)
    models = [nn.Sequential(trunk, linear(3)) for _ in range(2)]
    rights = [expected(model, 0) for model in models]
    values, trunk.function = trunk(X), counted
    private_runs = [private(model, strategy="loop") for model in models]
    drawn = [first(each) for each in private_runs]

    def step(number):
        run, model = private_runs[number], models[number]
        for _ in range(5):
            state, pending = run.state_dict(), run.loader.pending
            run.backward(*drawn[number])
            oracle.assert_exact(grads(model), rights[number])
            model.zero_grad()
            run.load_state_dict(state)
            run.loader.pending = pending

    def split():
        for _ in range(5):
            fmodel, params, buffers = make_functional_with_buffers(trunk)
            torch.testing.assert_close(fmodel(params, buffers, X), values)

    together(partial(step, 0), partial(step, 1), split)
    assert trunk.calls == 0


FILES = ("functional/live.py", "functional/slots.py", "functional/model.py")
FILES += ("dp/private_gradients.py",)


@pytest.mark.parametrize("part", range(4))
def test_an_interrupt_leaves_everything_as_it_was(part):
    """Interrupts a call at every line in turn, or nearly so."""
    model = Writing()
    most = len(PLAN.sample(key=KEY, step=0)) - 1  # of two parts the last is interrupted
    run = private(model, strategy="recorded", physical_batch_size=most)
    batches = iter(run.loader)
    run.backward(*next(batches))
    batch = next(batches)
    left, place = 0, ""

    def trace(frame, event, arg):
        nonlocal left, place
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        # At the end of a block its `with` is traced again, where no signal can arrive.
        ends = line.startswith("with ")
        if frame.f_code.co_filename.endswith(FILES) and event == "line" and not ends:
            left -= 1
            if left == 0:
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    model.dict["new"] = 1  # is seen
    before, step, number = snapshot(model), run.step, 20 * part + 1
    while True:
        left, outer = number, sys.gettrace()
        sys.settrace(trace)
        try:
            run.backward(*batch)
            break
        except KeyboardInterrupt:
            if run.step > step:  # what follows is released
                break
            assert snapshot(model) == before, place
            assert (run.step, run.ready) == (step, False)
        finally:
            sys.settrace(outer)
        number += 80
    assert run.step == step + 1
    assert number > 1000
