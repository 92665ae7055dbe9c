import contextlib
import copy
import itertools
import linecache
import pickle
import random
import sys
import types  # noqa: F401, in a text below
import weakref  # noqa: F401, in a text below
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgrad
from tests import losses, oracle
from tests.functional.held import EXCHANGED, HELD, SHARED, Holder
from tests.oracle import assert_exact

split = vgrad.make_functional_with_buffers


def bits(tensors):
    return {name: value.clone() for name, value in tensors.items()}


def unchanged(tensors, before):
    return all(torch.equal(tensors[name], before[name]) for name in before)


class Counter(nn.Module):
    """Buffers changed in place, bound anew, and objects that count calls."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("added", torch.zeros(2))
        self.register_buffer("bound", torch.zeros(2))
        self.register_buffer("cache", torch.tensor([3.0, 4.0]), persistent=False)
        self.calls, self.held = 0, ([0], deque([0]))
        self.history, self.seen, self.total = [], {}, torch.zeros(())

    def forward(self, x):
        self.calls += 1
        self.history.append(x)
        self.seen[len(self.history)] = x
        self.total += 1
        if not hasattr(self, "late"):
            self.late = nn.Linear(2, 2)
        self.held[0][0] += 1
        self.held[1].append(self.held[1][-1] + 1)
        self.added += 1
        self.bound = self.bound + 2
        counts = self.calls, len(self.held[1]) - 1, len(self.history), self.total
        return x * self.weight + self.cache + sum(counts) / 4


class Shared(nn.Module):
    """A weight under three names, once in a list and once in a dictionary."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.third = nn.Linear(3, 3, bias=False)
        self.third.weight = self.first.weight
        self.held = [self.first.weight]
        self.named = {"deep": [self.first.weight]}

    def forward(self, x):
        x = self.third(self.second(self.first(x)))
        return x @ self.held[0] + x @ self.named["deep"][0]


@pytest.mark.parametrize("name", losses.CASES)
def test_the_function_equals_the_module(name):
    case = losses.CASES[name]
    model, batch = case.model(), case.batch(4)
    fmodel, params, buffers = split(model)
    inputs = batch if case.criterion is None else batch[:-1]
    args = [item for item in inputs if not isinstance(item, dict)]
    kwargs = dict(
        pair for item in inputs if isinstance(item, dict) for pair in item.items()
    )
    expected = model(*args, **kwargs)
    assert torch.equal(fmodel(params, buffers, *args, **kwargs), expected)


def test_params_share_nothing_with_the_model_and_require_grad():
    model = nn.BatchNorm1d(3)
    before = bits(model.state_dict())
    _, params, buffers = split(model)
    assert list(params) == ["weight", "bias"]
    assert all(value.requires_grad and value.is_leaf for value in params.values())
    with torch.no_grad():
        for value in (*params.values(), *buffers.values()):
            value.fill_(7)
    assert unchanged(model.state_dict(), before)
    model.bias.requires_grad_(False)
    fmodel, params, buffers = split(model, disable_autograd_tracking=True)
    assert list(params) == ["weight"]
    assert not params["weight"].requires_grad
    module = fmodel.to_module(params, buffers)
    assert [each.requires_grad for each in module.parameters()] == [True, False]


def test_make_functional_takes_no_buffers():
    model = nn.Linear(2, 3)
    fmodel, params = vgrad.make_functional(model)
    x = torch.randn(4, 2)
    assert torch.equal(fmodel(params, x), model(x))
    with pytest.raises(ValueError, match="running_mean"):
        vgrad.make_functional(nn.BatchNorm1d(2))


def test_tied_tensors_appear_once_and_drive_every_alias():
    model = Shared()
    fmodel, params, buffers = split(model)
    assert list(params) == ["first.weight"]
    weight = torch.randn(3, 3)
    x = torch.randn(2, 3)
    cube = x @ weight.T @ weight.T @ weight.T
    torch.testing.assert_close(
        fmodel({"first.weight": weight}, buffers, x), 2 * cube @ weight
    )
    rebuilt = fmodel.to_module({"first.weight": weight}, buffers)
    assert rebuilt.second.weight is rebuilt.first.weight is rebuilt.held[0]
    fmodel.copy_to_(model, {"first.weight": torch.eye(3)}, buffers)
    assert model.third.weight is model.first.weight
    assert torch.equal(model.held[0], torch.eye(3))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(3)), torch.randn(4, 3)),
        (nn.Embedding(4, 3, max_norm=0.5), torch.arange(4)),
    ],
)
def test_a_call_changes_nothing_it_is_given(model, x):
    fmodel, params, buffers = split(model)
    given = {**params, **buffers, "x": x}
    saved, versions = bits(given), {n: value._version for n, value in given.items()}
    assert torch.equal(fmodel(params, buffers, x), model(x.clone()))
    assert unchanged(given, saved)
    assert {n: value._version for n, value in given.items()} == versions


def test_an_input_is_copied_only_for_modules_that_might_write_into_it():
    distance = lambda a, b: a.add_(1).norm(dim=-1)  # noqa: E731
    x = torch.zeros(3)
    for model, inputs, same in (
        (nn.Sequential(nn.Identity()), 1, True),
        (nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), 1, False),
        (losses.Pick(lambda x: x.add_(1)), 1, False),
        (nn.TripletMarginWithDistanceLoss(distance_function=distance), 3, False),
    ):
        fmodel, params, buffers = split(model)
        assert (fmodel(params, buffers, *[x] * inputs) is x) == same
        assert not x.any()


def test_call_and_update_returns_buffers_changed_in_place_and_bound_anew():
    fmodel, params, buffers = split(Counter())
    for _ in range(2):
        output, new = fmodel.call_and_update(params, buffers, torch.zeros(2))
        assert torch.equal(output, torch.tensor([4.0, 5.0]))
        assert new.keys() == buffers.keys()
        assert new["added"].tolist() == [1, 1]
        assert new["bound"].tolist() == [2, 2]
        assert buffers["added"].tolist() == buffers["bound"].tolist() == [0, 0]


class Fails(Counter):
    def forward(self, x):
        super().forward(x)
        self.extra = nn.Parameter(x)
        raise RuntimeError("halfway")


def test_a_failing_call_leaves_nothing_behind():
    fmodel, params, buffers = split(Fails())
    before = bits(buffers)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="halfway"):
            fmodel(params, buffers, torch.zeros(2))
    assert unchanged(buffers, before)
    module = next(iter(fmodel.named_modules()))[1]
    assert (module.calls, module.history) == (0, [])
    assert not hasattr(module, "extra")
    assert all(value.is_meta for value in module.state_dict().values())


class Kept(nn.Linear):
    """Counts and appends, and has a region that runs again."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.history = 0, []

    def region(self, x):
        return nn.Linear.forward(self, x) * self.calls * len(self.history) + self.seen

    def forward(self, x):
        self.calls += 1
        self.history.append(x)
        self.seen += 1
        return checkpoint(self.region, x, use_reentrant=False)


@pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="Python traces the end of a block at other lines, where no signal arrives",
)
@pytest.mark.parametrize("shown", [False, True])
def test_a_model_is_usable_after_an_interrupt_at_any_line(shown):
    fmodel, params, buffers = split(Kept())
    fmodel.named_modules() if shown else None
    x, weight = torch.ones(3, 2), params["weight"]
    weight.mark = "own"
    given, loss = params, vgrad.sample_loss(fmodel, lambda output, _: output.sum())
    calls = {
        "plain": lambda: torch.autograd.grad(fmodel(given, buffers, x).sum(), weight),
        "per sample": lambda: vgrad.per_sample_grad(loss)(given, buffers, x, x),
    }
    expected = {name: call() for name, call in calls.items()}
    left, raised = 0, 0

    def trace(frame, event, arg):
        nonlocal left
        file = frame.f_code.co_filename
        line = linecache.getline(file, frame.f_lineno).lstrip()
        # At the end of a block its `with` is traced again, where no signal can arrive.
        ends = line.startswith("with ")
        if "vgrad/functional/" in file and event == "line" and not ends:
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    outer = sys.gettrace()
    for name, call in calls.items():
        for number in itertools.count(1, 7 if name == "plain" else 41):
            left = number
            sys.settrace(trace)
            try:
                call()
                break
            except KeyboardInterrupt:
                raised += 1
            finally:
                sys.settrace(outer)
            oracle.assert_exact(call(), expected[name], 0)
            copied = pickle.loads(pickle.dumps(fmodel))
            assert torch.equal(copied(given, buffers, x), fmodel(given, buffers, x))
        assert vars(weight) == {"mark": "own"}
    assert raised > 60


class Remembers(nn.Linear):
    """Keeps numbers of a sample in every way that no other sample may see."""

    def __init__(self):
        super().__init__(3, 2, dtype=torch.float64)
        self.register_buffer("ema", torch.ones(2, dtype=torch.float64))
        self.baseline, self.log, self.cache = 1.0, [1.0], {"n": [torch.ones(())]}

    def forward(self, x):
        scale = self.ema.mean() * self.baseline * self.log[-1] * self.cache["n"][0]
        seen = x.detach().mean()
        self.baseline = 5 * seen
        self.log.append(3 * seen)
        self.cache["n"][0] += 2
        self.ema.data.mul_(float(seen))
        return super().forward(x).sin() * scale


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("strategy", ["auto", "loop"])
def test_no_state_passes_from_sample_to_sample(strategy, chunk_size):
    model, x, y = Remembers(), losses.randn(5, 3), losses.randn(5, 2)

    def run(_, x, y):
        memo = {id(each): each for each in model.parameters()}
        return F.mse_loss(copy.deepcopy(model, memo)(x), y)

    expected = oracle.module_gradients(model, run, (x, y), 5)
    loss, params, buffers = losses.of_model(model, F.mse_loss)
    options = {"strategy": strategy, "chunk_size": chunk_size}
    for _ in range(2):
        found = vgrad.per_sample_grad(loss, **options)(params, buffers, x, y)
        oracle.assert_exact(found, expected)
        clip = vgrad.clipped_grad(loss, max_norm=0.1, **options)
        whole = clip(params, buffers, x, y).grads
        rest = clip(params, buffers, x[1:], y[1:]).grads
        gaps = [(whole[name] - rest[name]).square().sum() for name in whole]
        assert float(sum(gaps)) ** 0.5 <= 0.1 * (1 + 1e-9)


def clamps_weights(model, args):
    with torch.no_grad():
        model.weight.clamp_(-0.1, 0.1)


def hooked():
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(clamps_weights)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("self.bias = nn.Parameter(2 * self.bias)", "alone, but it changed 'bias'"),
        ("del self.bias; self.bias = None", "to be left in 'bias' .*, got NoneType"),
    ],
)
def test_a_forward_pass_that_binds_another_parameter_is_refused(change, message):
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda self, args, out: exec(change))
    fmodel, params, buffers = split(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            fmodel(params, buffers, torch.zeros(1, 2))


@torch.library.custom_op("vgrad_tests::halve", mutates_args=("x",))
def halve(x: torch.Tensor) -> None:
    x.mul_(0.5)


ZERO = torch.tensor([0])
WRITES = [
    "w.clamp_(-0.1, 0.1)",
    "w.t()[1:].zero_()",
    "w.detach().fill_(1)",
    "w.__setitem__(0, 1.0)",
    "w.__imul__(2)",
    "torch.exp(w, out=w)",
    "torch._foreach_mul_([torch.ones(1), w], 2.0)",
    "F.relu(w, inplace=True)",
    "F.dropout(w, 0.5, True, True)",
    "F.relu(w, True)",
    "F.hardtanh(input=w, inplace=True)",
    "nn.init.normal_(w)",
    "torch.ops.aten.clamp_.default(w, -0.1, 0.1)",
    "torch.ops.aten.clamp_(w, -0.1, 0.1)",
    "halve(w)",
    "torch.ops.vgrad_tests.halve(w)",
    "F.embedding(ZERO, w, max_norm=0.01)",
    "F.embedding(ZERO, weight=w, max_norm=0.01)",
    "F.instance_norm(torch.ones(1, 2, 3), w[0], w[1])",
]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, None])
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_forward_pass_that_writes_into_a_parameter_is_refused(write, tracked, mode):
    class Writes(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                eval(write, globals() | {"w": self.weight})
            return super().forward(x)

    fmodel, params, buffers = split(Writes(2, 2), disable_autograd_tracking=not tracked)
    refused = "alone, but it changed 'weight'|vmap: called random|Batching rule not"
    if torch.__version__ < (2, 12):  # where jacrev makes tensors of inference mode
        refused += "|Cannot set version_counter for inference tensor"
    x, stacked = torch.ones(1, 2), {n: torch.stack([p]) for n, p in params.items()}
    for call in (
        lambda: fmodel(params, buffers, x),
        lambda: torch.vmap(fmodel, (0, None, None))(stacked, buffers, x),
        lambda: torch.func.jacrev(lambda p: fmodel(p, buffers, x))(params),
    ):
        with contextlib.ExitStack() as stack:
            if mode is not None:
                stack.enter_context(mode())
            stack.enter_context(pytest.raises(RuntimeError, match=refused))
            call()


def test_a_forward_pass_may_write_into_what_is_its_own():
    def forward(self, x):
        own = self.weight.clone()
        own.clamp_(0, 1).detach().requires_grad_()
        with torch.no_grad():
            x.add_(self.weight[0])
            torch.add(x, self.bias, out=x)
            x.addmm_(x, self.weight)
            F.batch_norm(x, *self.weight, training=False)
        self.calls.add_(1)
        return F.linear(x, own, self.bias)

    parts = {"weight": torch.randn(2, 2), "bias": torch.randn(2)}
    model = losses.Net(forward, **parts)
    model.register_buffer("calls", torch.zeros(()))
    fmodel, params, buffers = split(model)
    x = torch.randn(3, 2)
    assert torch.equal(fmodel(params, buffers, x), model(x.clone()))


WRITTEN = "it changed 'weight'|writes in place into a tensor that all samples share"


def test_a_write_into_another_model_inside_of_a_loss_is_refused():
    """A teacher, whose parameters the transform was not given."""
    teacher, given, rest = split(hooked())

    def loss(params, buffers, x):
        return (params["w"] @ teacher(given, rest, x)).sum()

    for options in EXACT:
        compute = vgrad.per_sample_norm(loss, **options)
        with torch.no_grad(), pytest.raises(RuntimeError, match=WRITTEN):
            compute({"w": torch.ones(2, 2)}, {}, torch.ones(3, 2))


@pytest.mark.parametrize("make", [hooked, lambda: nn.Sequential(hooked())])
def test_modules_of_torch_that_write_by_hooks_are_refused(make):
    fmodel, params, buffers = split(make())
    with torch.no_grad(), pytest.raises(RuntimeError, match="it changed '.*weight'"):
        fmodel(params, buffers, torch.ones(1, 2))


def test_names_may_move_between_the_dictionaries():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    fmodel, params, buffers = split(model)
    trained, constant = vgrad.freeze(params, buffers, ["0.*"])
    assert list(trained) == ["1.weight", "1.bias"]
    assert not any(value.requires_grad for value in constant.values())
    x = torch.randn(4, 3)
    assert torch.equal(fmodel(trained, constant, x), model(x))
    with pytest.raises(ValueError, match=r"freeze\('encoder.*'0.bias'"):
        vgrad.freeze(params, buffers, ["encoder.*"])
    with pytest.raises(TypeError, match=r"^freeze\(patterns='0.\*'\): .* got a str"):
        vgrad.freeze(params, buffers, "0.*")


def test_modes_are_functions_of_their_own():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    fmodel, params, buffers = split(model)
    evaluated = fmodel.eval()
    x = torch.randn(4, 3)
    assert fmodel.training
    assert not evaluated.training
    assert torch.equal(evaluated(params, buffers, x), copy.deepcopy(model).eval()(x))
    assert not torch.equal(fmodel(params, buffers, x), evaluated(params, buffers, x))
    assert evaluated.train().training


def test_changes_of_the_modules_of_a_function_hold():
    fmodel, params, buffers = split(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3)))
    model = dict(fmodel.named_modules())
    x = torch.randn(4, 3)
    expected = fmodel.eval()(params, buffers, x)
    fmodel(params, buffers, x)
    model["0"].p = 0.0
    for _ in range(2):
        assert torch.equal(fmodel(params, buffers, x), expected)
    handle = model["1"].register_forward_hook(lambda module, args, out: 2 * out)
    for _ in range(2):
        assert torch.equal(fmodel(params, buffers, x), 2 * expected)
    handle.remove()
    assert torch.equal(fmodel(params, buffers, x), expected)
    model["1"].register_buffer("more", torch.ones(1))
    with pytest.raises(ValueError, match="missing: '1.more'"):
        fmodel(params, buffers, x)


X3 = torch.zeros(2, 3)


SHAPE = r"shape \(3,\) in 'bias', got \(4,\)"


@pytest.mark.parametrize(
    ("change", "more", "error", "message"),
    [
        ({"bias": None}, {}, ValueError, "missing: 'bias'"),
        ({"extra": X3}, {}, ValueError, "unexpected: 'extra'"),
        ({}, {"weight": X3}, ValueError, "'weight' in both"),
        ({"bias": torch.zeros(4)}, {}, ValueError, SHAPE),
        ({"bias": 1.0}, {}, TypeError, "tensor in 'bias', got a float"),
    ],
)
def test_missing_unexpected_and_wrongly_shaped_entries_are_named(
    change, more, error, message
):
    fmodel, params, buffers = split(nn.BatchNorm1d(3))
    given = {n: v for n, v in {**params, **change}.items() if v is not None}
    with pytest.raises(error, match=message):
        fmodel(given, {**buffers, **more}, X3)
    with pytest.raises(TypeError, match="params.*expected a dictionary.*a tuple"):
        fmodel(tuple(params.values()), {}, X3)


def test_a_state_dict_may_stand_in(tmp_path):
    model = losses.TiedLanguageModel()
    fmodel, _, _ = split(model)
    x = torch.randint(11, (2, 5))
    expected = model(x)
    cloned = bits(model.state_dict())
    save_file(cloned, tmp_path / "model.safetensors")
    read = load_file(tmp_path / "model.safetensors")
    one_name = {n: v for n, v in cloned.items() if n != "embed.weight"}
    for state in (model.state_dict(), cloned, read, one_name):
        assert torch.equal(fmodel(state, {}, x), expected)
    cloned["head.weight"] += 1
    with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight', got two"):
        fmodel(cloned, {}, x)
    # In a transform, no one looks at values.
    stacked = {name: torch.stack([value] * 2) for name, value in cloned.items()}
    outputs = torch.vmap(lambda each: fmodel(each, {}, x))(stacked)
    torch.testing.assert_close(outputs[0], expected)


def test_a_state_dict_leaves_out_non_persistent_buffers_only():
    model = Counter()
    fmodel, _, _ = split(model)
    state = model.state_dict()
    assert "cache" not in state
    output, new = fmodel.call_and_update(state, {}, torch.zeros(2))
    assert output.tolist() == [4, 5]
    assert new.keys() == {"added", "bound", "cache"}
    del state["added"]
    with pytest.raises(ValueError, match="missing: 'added'"):
        fmodel(state, {}, torch.zeros(2))


def test_to_module_returns_an_independent_module_with_new_values():
    model = nn.Sequential(
        nn.LSTM(3, 4), losses.Pick(lambda out: out[0]), nn.Linear(4, 2)
    )
    fmodel, params, buffers = split(model)
    doubled = {name: (2 * value).detach() for name, value in params.items()}
    rebuilt = fmodel.to_module(doubled, buffers)
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(rebuilt(x), fmodel(doubled, buffers, x))
    assert all(parameter.requires_grad for parameter in rebuilt.parameters())
    with torch.no_grad():
        rebuilt[2].weight.zero_()
    assert bool(doubled["2.weight"].any())


def replacing(name, value):
    def change(model):
        setattr(model, name, value(model))

    return change


MEMORY = "memory of their own, got one in 'bias'"
TARGETS = [
    (replacing("bias", lambda m: None), "copy_to_.*unexpected: 'bias'"),
    (replacing("bias", lambda m: nn.Parameter(torch.zeros(1).expand(2))), MEMORY),
    (replacing("bias", lambda m: nn.Parameter(m.bias.to("meta"))), MEMORY),
    (replacing("other", lambda m: m.weight), "one value for 'other'"),
]


@pytest.mark.parametrize(("change", "message"), TARGETS)
def test_copy_to_writes_all_or_nothing(change, message):
    model = nn.Linear(2, 2)
    model.other = nn.Parameter(torch.ones(2, 2))
    fmodel, params, buffers = split(model)
    new = {n: torch.rand_like(value) for n, value in params.items()}
    fmodel.copy_to_(model, new, buffers)
    assert unchanged(dict(model.named_parameters()), new)
    change(model)
    with pytest.raises(ValueError, match=message):
        fmodel.copy_to_(model, params, buffers)
    assert torch.equal(model.weight, new["weight"])


def test_write_grads_copies_forgets_old_ones_and_names_strangers():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[1].weight = model[0].bias = nn.Parameter(torch.ones(2, 2))
    model[1].bias.grad = torch.ones(2)
    grads = {"0.weight": torch.ones(2, 3, dtype=torch.float64)}
    vgrad.write_grads_(model, grads)
    assert model[1].bias.grad is None
    assert torch.equal(model[0].weight.grad.mul_(2), torch.full((2, 3), 2.0))
    assert torch.equal(grads["0.weight"], torch.ones(2, 3).double())
    tied = dict.fromkeys(("0.bias", "1.weight"), torch.ones(2, 2))
    for wrong, message in (
        ({"other": torch.ones(2, 3)}, "'other'"),
        ({"0.weight": torch.ones(3)}, r"\(2, 3\) in '0.weight', got \(3,\)"),
        (tied, "one gradient for each parameter"),
    ):
        with pytest.raises(ValueError, match=message):
            vgrad.write_grads_(model, wrong)


@pytest.mark.parametrize(
    ("wanted", "found"), [(torch.float32, torch.float32), (None, torch.float64)]
)
def test_write_grads_keeps_the_dtype_that_a_parameter_wants(wanted, found):
    model = nn.Linear(3, 2, bias=False).bfloat16()
    model.weight.grad_dtype = wanted
    exact = torch.tensor(1 / 3).double().expand(2, 3)
    vgrad.write_grads_(model, {"weight": exact})
    assert model.weight.grad.dtype == found
    assert torch.equal(model.weight.grad, exact.to(found))


def test_a_functional_model_can_be_copied_and_pickled():
    model = Counter()
    fmodel, params, buffers = split(model)
    x = torch.zeros(2)
    for again in (copy.deepcopy(fmodel), pickle.loads(pickle.dumps(fmodel))):
        assert torch.equal(again(params, buffers, x), fmodel(params, buffers, x))
        assert again(model.state_dict(), {}, x).shape == (2,)


def test_threads_can_share_a_functional_model():
    fmodel, params, buffers = split(nn.Linear(20, 20))
    x = torch.randn(8, 20)

    def work(factor):
        scaled = {name: (factor * value).detach() for name, value in params.items()}
        expected = F.linear(x, scaled["weight"], scaled["bias"])
        return all(torch.equal(fmodel(scaled, buffers, x), expected) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 5)))


@pytest.mark.parametrize("name", ["mlp", "cnn", "tied", "weight_norm"])
@pytest.mark.filterwarnings("ignore:We've integrated functorch:FutureWarning")
def test_parity_with_the_functorch_that_torch_carries(name):
    import functorch

    case = losses.CASES[name]
    model, (inputs, *_) = case.model(), case.batch(3)
    theirs, *their_state = functorch.make_functional_with_buffers(model)
    ours, params, buffers = split(model)
    assert (tuple(params), tuple(buffers)) == (theirs.param_names, theirs.buffer_names)
    assert_exact(tuple(params.values()), their_state[0], 0)
    for mine, other in zip(params.values(), their_state[0], strict=True):
        assert mine.requires_grad == other.requires_grad
    mine, other = ours(params, buffers, inputs), theirs(*their_state, inputs)
    assert torch.equal(mine, other)
    grads = torch.autograd.grad(mine.sum(), list(params.values()))
    assert_exact(grads, torch.autograd.grad(other.sum(), their_state[0]), 0)


def test_the_transforms_of_torch_func_are_here():
    for name in ("grad", "vmap", "grad_and_value", "functional_call"):
        assert getattr(vgrad, name) is getattr(torch.func, name)


def test_to_device_moves_any_tree_and_keeps_leaves():
    tree = {"a": [torch.ones(2, requires_grad=True), 3], "b": None}
    moved = vgrad.to_device(tree, "cpu")
    assert moved["a"][0].is_leaf
    assert moved["a"][0].requires_grad
    assert moved["a"][1] == 3
    assert moved["b"] is None
    assert vgrad.to_device(tree, "meta")["a"][0].device.type == "meta"


@pytest.mark.parametrize("name", EXCHANGED)
def test_parameters_are_exchanged_in_plain_containers(name):
    model, other = Holder(*HELD[name]), Holder(*HELD[name])
    fmodel, params, buffers = split(model)
    x = torch.randn(3, 4).double()
    for each in (fmodel, copy.deepcopy(fmodel)):
        assert torch.equal(each(params, buffers, x), model(x))
        assert torch.equal(each(other.state_dict(), buffers, x), other(x))
    assert torch.equal(fmodel.to_module(other.state_dict(), {})(x), other(x))


HIDDEN = {name: HELD[name] for name in HELD if name not in (*EXCHANGED, *SHARED)}
HIDDEN |= {
    "frozenset":
        (lambda layer: frozenset([layer.weight]), lambda held: next(iter(held)).exp()),
    "partial": (lambda layer: partial(torch.mul, layer.weight), lambda held: held(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_placeholders_raise_instead_of_computing(name):
    fmodel, params, buffers = split(Holder(*HIDDEN[name]))
    with pytest.raises(RuntimeError, match="held where it cannot be exchanged"):
        fmodel(params, buffers, torch.ones(1, 4).double())


@pytest.mark.parametrize(
    "hook",
    [
        lambda found: lambda module, args, out: found.append(out),
        lambda found: lambda module, args, out: out + module.weight.sum(),
        lambda found: lambda module, args, out: setattr(module, "last", out),
    ],
)
def test_hooks_may_collect_keep_and_use_what_they_are_given(hook):
    model, found, x = nn.Linear(2, 2), [], torch.ones(1, 2)
    model.register_forward_hook(hook(found))
    expected = model(x)
    before = len(found)
    fmodel, params, buffers = split(model)
    torch.testing.assert_close(fmodel(params, buffers, x), expected)
    assert len(found) == 2 * before


def test_a_call_from_inside_of_a_call_is_refused():
    model = nn.Linear(2, 2)
    fmodel, params, buffers = split(model)

    def inner(module, args):
        return fmodel(params, buffers, *args)

    fmodel._skeleton.register_forward_pre_hook(inner)
    with pytest.raises(RuntimeError, match="from inside of its own forward pass"):
        fmodel(params, buffers, torch.ones(1, 2))


def test_one_tensor_given_twice_stays_one():
    model = nn.Module()
    model.forward = lambda a, b: a.sum() + (a is b)
    fmodel, _, _ = split(model)
    x = torch.zeros(2)
    assert float(fmodel({}, {}, x, x)) == 1
    assert float(fmodel({}, {}, x, x.clone())) == 0


def test_parameters_of_two_kinds_stay_trainable():
    model = nn.Linear(2, 2)
    model.register_buffer("alias", model.weight)
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    fmodel, params, buffers = split(model)
    assert list(params) == ["weight", "bias", "phase"]
    module = fmodel.to_module(params, buffers)
    assert module.alias is module.weight
    assert all(each.requires_grad for each in module.parameters())


def keeping(keep, use="held", anew="self.held"):
    """Make a model that multiplies by an object beside its weight, in three texts."""

    def forward(self, x):
        self.held = eval(anew, {"self": self})
        held = eval(use, globals() | {"held": self.held})
        return x @ held + (x @ self.w + self.b[0]).sin()

    model = losses.Net(forward, w=torch.randn(4, 4))
    model.register_buffer("b", torch.randn(4, 4))
    model.held = eval(keep, globals() | {"m": model})
    return model


def unregistered(weight):
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


KEPT = [  # and how it is used
    ("m.w.t()", "held"),
    ("m.w.t()", "held.T"),
    ("m.w.t()", "held.data"),
    ("[m.w[:3], m.w[3:]]", "torch.cat(held)"),
    ("{'t': m.w.t()}", "held['t']"),
    ("[[{'t': [m.w.t()]}]]", "held[0][0]['t'][0]"),
    ("(m.w[:3], m.w[3:])", "torch.cat(held)"),
    ("types.SimpleNamespace(part=m.w.t())", "held.part"),
    ("m.w.detach()[:, :4]", "held"),
    ("(m.w.data.t(),)", "held[0]"),
    ("m.b.t()", "held"),
    ("m.w * 2", "held"),
    ("torch.stack([(m.w * 2).exp()] * 4)[0]", "held"),
    ("[unregistered(m.w[:4])]", "held[0].weight.clone()"),
    ("[unregistered(m.w)]", "held[0].weight"),
]
EXACT = {"strategy": "loop"}, {"strategy": "vmap"}, {"strategy": "recorded"}


@pytest.mark.parametrize(("keep", "use"), KEPT)
def test_what_would_not_follow_a_parameter_cannot_be_used(keep, use):
    model = keeping(keep, use)
    fmodel, params, buffers = split(model)
    x = torch.randn(3, 4)
    for each in (fmodel, copy.deepcopy(fmodel), fmodel.eval()):
        with pytest.raises(RuntimeError, match="that the module keeps in an attribute"):
            each(params, buffers, x)
    loss = vgrad.sample_loss(fmodel, lambda output, target: output.sum())
    for options in EXACT:
        with pytest.raises(RuntimeError, match="Compute it in the forward pass"):
            vgrad.per_sample_grad(loss, **options)(params, buffers, x, x)
    fmodel, params, buffers = vgrad.stack([model, model])
    for strategy in ("loop", "vmap", "hybrid"):
        with pytest.raises(RuntimeError, match="Compute it in the forward pass"):
            vgrad.ensemble_forward(fmodel, strategy=strategy)(params, buffers, x)


@pytest.mark.parametrize("keep", ["m.w.t()", "m.w.detach().t()", "(m.w * 2,)", "None"])
def test_what_each_forward_pass_computes_anew_follows(keep):
    model, x = keeping(keep, "held[0]", "[self.w.t()]"), torch.randn(3, 4)
    model(x)
    fmodel, params, buffers = split(model)
    doubled = {"w": (2 * params["w"]).detach()}
    expected = x @ doubled["w"].t() + (x @ doubled["w"] + buffers["b"][0]).sin()
    torch.testing.assert_close(fmodel(doubled, buffers, x), expected)
    torch.testing.assert_close(fmodel.to_module(doubled, buffers)(x), expected)


def test_what_cannot_be_used_cannot_be_used_after_pickling_either():
    model = nn.Linear(4, 4)
    model.held = [model.weight.t()]
    fmodel, params, buffers = split(model)
    skeleton = pickle.loads(pickle.dumps(fmodel))._skeleton
    for value in (skeleton.weight, skeleton.held[0]):
        assert value.shape == (4, 4)
        assert torch.equal(fmodel(params, buffers, torch.zeros(4)), params["bias"])
        for compute in (lambda x: x @ x, lambda x: x.T + 1, lambda x: x.detach().exp()):
            with pytest.raises(RuntimeError, match="expected a tensor that"):
                compute(value)


OTHER = torch.ones(4, 4, requires_grad=True)


@pytest.mark.parametrize(
    ("keep", "use"), [("m.w.detach().clone()", "held"), ("(OTHER * 2,)", "held[0]")]
)
def test_constants_stay_constants(keep, use):
    model, x = keeping(keep, use), torch.randn(3, 4)
    fmodel, params, buffers = split(model)
    output, expected = fmodel(params, buffers, x), model(x)
    torch.testing.assert_close(output, expected)
    output.sum().backward(retain_graph=True)
    expected.sum().backward()
    torch.testing.assert_close(params["w"].grad, model.w.grad)


def test_whether_views_overlap_is_counted_without_memory():
    """On the device meta, where the columns of a matrix take terabytes."""
    whole = torch.empty(10**6, 10**6, device="meta")
    model = nn.Module()
    model.even, model.odd = nn.Parameter(whole[:, ::2]), nn.Parameter(whole[:, 1::2])
    model.row, model.tied = nn.Parameter(torch.ones(3).expand(2, 3)), model.even
    model.none = nn.Parameter(whole[:0])
    assert list(split(model)[1]) == ["even", "odd", "row", "none"]
    model.third = nn.Parameter(whole[10:, 3::3])
    with pytest.raises(TypeError, match="memory of their own"):
        split(model)


def numbers(view):
    """Return where in memory the numbers of a view are."""
    steps = [
        range(0, n * s, s) if s else [0]
        for n, s in zip(view.shape, view.stride(), strict=True)
    ]
    return {view.storage_offset() + sum(each) for each in itertools.product(*steps)}


def test_views_overlap_where_brute_force_says_so():
    draw, base, seen = random.Random(0), torch.empty(200), set()
    for _ in range(500):
        model, sets = nn.Module(), []
        for number in range(draw.choice([2, 2, 3])):
            dims = draw.randint(0, 3)
            shape = [draw.randint(1, 4) for _ in range(dims)]
            steps = [draw.randint(0, 13) for _ in range(dims)]
            view = base.as_strided(shape, steps, draw.randint(0, 30))
            setattr(model, f"p{number}", nn.Parameter(view))
            sets.append(numbers(view))
        apart = sum(map(len, sets)) == len(set().union(*sets))
        seen.add(apart)
        refusal = pytest.raises(TypeError, match="memory of their own")
        with contextlib.nullcontext() if apart else refusal:
            split(model)
    assert seen == {False, True}


@pytest.mark.parametrize("options", EXACT)
def test_a_parametrization_does_what_a_hook_did(options):
    """It masks the gradient."""
    model, x, mask = nn.Linear(4, 4).double(), losses.randn(3, 4), torch.eye(4).double()
    hooked = copy.deepcopy(model)
    hooked.weight.register_hook(lambda grad: grad * mask)
    hooked(x).sin().sum().backward()
    masked = losses.Pick(lambda w: w * mask + (w - w * mask).detach())
    nn.utils.parametrize.register_parametrization(model, "weight", masked)
    loss, *values = losses.of_model(model, lambda output, target: output.sin().sum())
    found = vgrad.per_sample_grad(loss, **options)(*values, x, x)
    found = found["parametrizations.weight.original"].sum(0)
    torch.testing.assert_close(found, hooked.weight.grad)


class Frozen(OrderedDict):
    """A dictionary that does not change, as far as its methods go."""

    def update(self, *given, **named):
        raise TypeError("frozen")

    clear = pop = update


def test_dictionaries_that_cannot_change_stay_as_they_are():
    model = nn.Linear(2, 2)
    model.config = Frozen(width=2, more=[1])
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    x = torch.randn(3, 2)
    assert all(torch.equal(fmodel(params, buffers, x), model(x)) for _ in range(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_compiled_code_of_a_module_is_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model.compile()
    model[0].compile()
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    x = torch.randn(3, 2)
    assert torch.equal(fmodel(params, buffers, x), model.forward(x))


SCRIPT = "can be exchanged, got modules of torch.jit in '0'. Use them as they"
MODELS = [
    ("'text'", "plain"),
    ("nn.LazyLinear(3)", "lazy ones in 'bias', 'weight'"),
    ("nn.DataParallel(nn.Linear(2, 2))", "wrapped"),
    ("torch.compile(nn.Linear(2, 2))", "before it was scripted, compiled or"),
    ("nn.Sequential(torch.jit.script(nn.Linear(2, 2)))", SCRIPT),
    ("nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))", SCRIPT),
]
MEMORY = "memory of their own.*'weight', '"
HOOKS = r"hooks.* on 'weight'.*handle.remove\(\)"
CHANGES = [  # of a layer `m`
    ("setattr(m, 'held', m.weight.exp)", "one in 'held' that holds a part"),
    ("setattr(m, 'held', weakref.ref(m.weight))", "one in 'held' that holds a part"),
    ("m.register_buffer('a', torch.eye(2).to_sparse())", "got sparse ones in 'a'. Reg"),
    ("setattr(m, 'other', nn.Parameter(m.weight))", MEMORY),
    ("m.register_buffer('a', m.weight.detach()[:, ::2])", MEMORY),
    ("m.weight.register_hook(torch.neg)", HOOKS),
    ("m.weight.register_post_accumulate_grad_hook(torch.neg)", HOOKS),
    (
        "(lambda f: setattr(m, 'forward', lambda x: f(x) * 2))(m.forward)",
        "'forward' whose closure holds a part",
    ),
    (
        "(lambda w: setattr(w, 'total', lambda: w.sum()))(m.weight)",
        r"'weight\.total' whose closure holds",
    ),
    *[
        (
            f"m.register_forward_hook((lambda part: {hook})({part}))",
            "'_forward_hooks' whose closure holds a part",
        )
        for part in ("m.weight", "m.weight[:]", "m.weight.data.t()", "m")
        for hook in (
            "lambda module, args, out: out @ part",
            "lambda module, args, out, held=[part]: out @ held[0]",
            "lambda module, args, out, *, held=(part,): out @ held[0]",
            "(lambda held: lambda module, args, out: out @ held['w'])({'w': part})",
        )
    ],
]
MAKE = [split, vgrad.make_functional, lambda model: vgrad.stack([model, model])]
MAKE += [vgrad.replace_batch_norm]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(("text", "message"), MODELS + CHANGES)
def test_models_that_cannot_be_split_are_refused(text, message):
    layer = nn.Linear(2, 2)
    made = eval(text, globals() | {"m": layer})
    model = made if (text, message) in MODELS else layer
    for function in MAKE if message in (MEMORY, HOOKS) else MAKE[:1]:
        with pytest.raises(TypeError, match=message):
            function(model)
    if "register_hook" in text:
        made.remove()
        for function in MAKE:
            function(model)
