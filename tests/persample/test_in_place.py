"""Backward passes that write into the gradient they are given, or into what was saved.

Each function has the derivative of what it computes, and writes on the way there, as
fused kernels do. Plain autograd is right wherever nothing else comes to the tensor
after the write; factors of vgrad wait for the end of the backward pass.
"""

import math
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vgrad
from tests import losses, oracle
from tests.losses import randn
from vgrad import dp
from vgrad.persample.engine import proxies, saved_bytes

pytestmark = pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")


class Old(Function):
    """In the old style; returns the very gradient that it was given."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(-50)


class Ruled(Function):
    """With a generated vmap rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(-50)


class Mapped(Ruled):
    """With a vmap rule of its own."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return Mapped.apply(x), in_dims[0]


class Once(Old):
    """Not to be differentiated twice."""

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.mul_(-50)


class Nested(Old):
    """Calls another function forward and backward."""

    @staticmethod
    def forward(ctx, x):
        return Old.apply(x) * 2

    @staticmethod
    def backward(ctx, grad):
        grad.mul_(-50)
        return Old.apply(grad)


class Unseen(Old):
    """Moves no version."""

    @staticmethod
    def backward(ctx, grad):
        grad.data.mul_(-50)
        return grad


class ByNumpy(Old):
    """Writes as kernels of other libraries do."""

    @staticmethod
    def backward(ctx, grad):
        grad.numpy()[...] *= -50
        return grad


def saving(write, *, output=False):
    """Make a function that writes into its saved input or output."""

    class Saving(Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.exp(x)
            ctx.save_for_backward(y if output else x)
            return y

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            found = grad * (saved if output else saved.exp())
            write(saved)
            return found

    return Saving.apply


class Workspace(Function):
    """Returns the same memory at each call."""

    room: ClassVar[dict] = {}

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        room = Workspace.room.setdefault(grad.shape, torch.zeros_like(grad))
        return room.copy_(grad * 3)


@torch.library.custom_op("vgrad_in_place::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@torch.library.custom_op("vgrad_in_place::spoil", mutates_args=())
def spoil(x: torch.Tensor) -> torch.Tensor:
    x.numpy()[...] *= -50  # which its schema leaves out
    return x.clone()


@torch.library.custom_op("vgrad_in_place::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * -50


triple.register_autograd(lambda ctx, grad: grad.mul_(3))
scaled.register_autograd(lambda ctx, grad: spoil(grad))
for each in (triple, spoil, scaled):
    each.register_vmap(lambda info, in_dims, x, op=each: (op(x), in_dims[0]))

FUNCTIONS = {
    "old": Old.apply,
    "ruled": Ruled.apply,
    "mapped": Mapped.apply,
    "once": Once.apply,
    "nested": Nested.apply,
    "unseen": Unseen.apply,
    "numpy": ByNumpy.apply,
    "saved": saving(lambda saved: saved.detach().mul_(50)),
    "saved, unseen": saving(lambda saved: saved.data.mul_(50)),
    "output": saving(lambda saved: saved.detach().mul_(50), output=True),
    "output, unseen": saving(lambda saved: saved.data.mul_(50), output=True),
    "workspace": lambda x: Workspace.apply(Workspace.apply(x)),
    "library": triple,
    "raw": scaled,
}


def residual(f):
    """Share the gradient of a sum, and the input of a layer."""

    def loss(p, b, x):
        h = torch.tanh(F.linear(x, p["a.w"])) + x
        return F.linear(f(h) + F.linear(h, p["b.w"], p["b.c"]), p["o.w"]).square().sum()

    return loss


def of_output(f):
    """Share the output of the function with the layer behind it."""

    def loss(p, b, x):
        h = f(torch.tanh(F.linear(x, p["a.w"])))
        return F.linear(F.linear(h, p["b.w"], p["b.c"]), p["o.w"]).tanh().sum()

    return loss


def expanded(f):
    """Give the gradient to a parameter without a rule, and to a scaled one."""

    def loss(p, b, x):
        h = torch.tanh(F.linear(x, p["a.w"]))
        h = F.linear(f(h * 1) + h * p["s.w"] + p["b.c"], p["b.w"])
        return F.layer_norm(F.linear(h, p["o.w"]), (3,), p["t.w"]).square().sum()

    return loss


def regions(f):
    """Run the function in a checkpoint, beside a layer that shares its input."""

    def inner(h, weight):
        return f(h * 1) + F.linear(h, weight)

    def loss(p, b, x):
        h = torch.tanh(F.linear(x, p["a.w"], p["b.c"]))
        h = h + checkpoint(inner, h, p["b.w"], use_reentrant=False)
        return F.linear(h, p["o.w"]).square().sum()

    return loss


def of_parameters(f):
    """Compute two tensors from parameters alone, one of both."""

    def loss(p, b, x):
        weight = f(p["a.w"] * p["b.w"])
        h = torch.tanh(F.linear(x, weight * 0.5, p["b.c"]) + F.linear(x, weight.t()))
        return F.linear(f(h * 1) + h, f(p["o.w"] * 1)).square().sum()

    return loss


def looked_up(f):
    """Look rows up, and convolve."""

    def loss(p, b, x):
        h = F.embedding((x.abs() * 3).long() % 3, p["o.w"])  # [8, 8]
        h = f(h) + F.linear(h, p["a.w"])
        h = f(h[None] * 1) + F.conv1d(h[None], p["b.w"][:, :, None], p["b.c"])
        return torch.tanh(h).square().sum()

    return loss


NETS = {
    each.__name__: each
    for each in (residual, of_output, expanded, regions, of_parameters, looked_up)
}
SIZES = {
    "a.w": (8, 8),
    "b.w": (8, 8),
    "b.c": (8,),
    "o.w": (3, 8),
    "s.w": (8,),
    "t.w": (3,),
}
PARAMS = {n: randn(*size, seed=k) * 0.3 for k, (n, size) in enumerate(SIZES.items())}
X = randn(3, 8, seed=9)


def reference(loss, x=X):
    """Return what plain autograd adds to the `.grad` of leaves."""
    found = {name: [] for name in PARAMS}
    for row in x:
        leaves = {n: p.clone().requires_grad_() for n, p in PARAMS.items()}
        loss(leaves, {}, row.clone()).backward()
        for name, leaf in leaves.items():
            found[name].append(
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            )
    return {name: torch.stack(each) for name, each in found.items()}


REFUSED = {
    ("residual", "saved"): "modified inplace",
    ("expanded", "saved"): "modified inplace",
    ("looked_up", "saved"): "modified inplace",
    ("of_parameters", "saved"): "modified inplace",
    ("of_parameters", "nested"): "vmap can run",
    ("of_parameters", "unseen"): "vmap can run",
    ("of_parameters", "numpy"): "vmap can run",
}
"""Where a recorded pass stops, and "auto" takes another strategy."""

WRONG = {("of_output", "saved"), ("of_parameters", "workspace")}
"""Where plain autograd refuses, or a tensor of vmap stays in the workspace."""

PAIRS = [(net, name) for net in NETS for name in FUNCTIONS if (net, name) not in WRONG]


@pytest.fixture(autouse=True)
def room():
    """Leave no tensor in the workspace, as one of vmap that has ended."""
    Workspace.room.clear()


def params():
    return {name: value.clone() for name, value in PARAMS.items()}


def length(grads):
    return math.sqrt(sum(float(each.square().sum()) for each in grads.values()))


@pytest.mark.parametrize("strategy", ["recorded", "vmap", "loop"])
@pytest.mark.parametrize(("net", "name"), PAIRS)
def test_gradients_are_those_of_plain_autograd(net, name, strategy):
    loss = NETS[net](FUNCTIONS[name])
    compute = vgrad.per_sample_grad(loss, strategy=strategy)
    refused = REFUSED.get((net, name)) if strategy == "recorded" else None
    if refused:
        with pytest.raises(RuntimeError, match=refused):
            compute(params(), {}, X)
        return
    try:
        found = compute(params(), {}, X)
    except RuntimeError:
        assert strategy == "vmap"  # torch's own, which runs fewer of them
        return
    oracle.assert_exact(found, reference(loss))


OPTIONS = {
    "flat": {},
    "per_layer": {"clipping": "per_layer"},
    "automatic": {"clipping": "automatic"},
    "chunks": {"chunk_size": 2},
    "passes": {"passes": 2},
}
SUMS = [
    (net, name, options)
    for net, name in PAIRS
    for options in OPTIONS
    if options == "flat" or net == "residual" or (net, options) == ("regions", "passes")
]


@pytest.mark.parametrize(("net", "name", "options"), SUMS)
def test_clipped_sums_keep_their_bound(net, name, options):
    loss = NETS[net](FUNCTIONS[name])
    grads = reference(loss)
    clip = vgrad.clipped_grad(loss, max_norm=0.5, **OPTIONS[options])
    found = clip(params(), {}, X)
    if options == "per_layer":
        layers = {name.partition(".")[0] for name in grads}
        each = [{n: g for n, g in grads.items() if n[0] == layer} for layer in layers]
        bound = 0.5 / math.sqrt(len(layers))
        expected = {}
        for layer in each:
            expected |= oracle.clipped(layer, bound)
    elif options == "automatic":
        expected = oracle.weighted(grads, 0.5 / (oracle.norms(grads) + 0.01))
    else:
        expected = oracle.clipped(grads, 0.5)
    oracle.assert_exact(found.norms, oracle.norms(grads), 1e-6)
    oracle.assert_exact(found.grads, expected, 1e-6)
    assert length(clip(params(), {}, X[:1]).grads) <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("net", ["residual", "regions"])
def test_other_quantities_follow_from_the_same_gradients(net, name):
    loss, options = NETS[net](FUNCTIONS[name]), {"chunk_size": 2}
    grads, given = reference(loss), (params(), {}, X)
    flat = torch.cat([each.flatten(1) for each in grads.values()], 1)
    weights = torch.arange(3.0)
    sums = vgrad.weighted_grad(loss, **options)(weights, *given)
    oracle.assert_exact(sums, oracle.weighted(grads, weights), 1e-9)
    gram = vgrad.per_sample_gram(loss, **options)(*given)
    oracle.assert_exact(gram, flat @ flat.T, 1e-9)
    moments = vgrad.gradient_moments(loss, **options)(*given)
    oracle.assert_exact(moments.mean, {n: g.mean(0) for n, g in grads.items()}, 1e-9)
    projected = [
        vgrad.per_sample_projection(loss, dim=3, seed=0, strategy=strategy)(*given)
        for strategy in ("auto", "loop")
    ]
    oracle.assert_exact(*projected, 1e-9)


@pytest.mark.parametrize("passes", [1, 2])
def test_captured_sums_keep_their_bound(passes):
    loss = residual(Ruled.apply)
    clip = vgrad.clipped_grad(loss, max_norm=0.5, passes=passes)
    compute, expected = vgrad.compile(clip), oracle.clipped(reference(loss), 0.5)
    for _ in range(3):
        found = compute(params(), {}, X)
        oracle.assert_exact(found.grads, expected, 1e-6)
    (report,) = compute.reports()
    assert report.backend != "eager", report
    assert not report.redos, report


def test_members_keep_their_bound():
    loss = residual(Ruled.apply)
    clip = vgrad.ensemble.ensemble_clipped_grad(loss, max_norm=[0.5, 0.1])
    stacked = {name: torch.stack([each, each]) for name, each in PARAMS.items()}
    found, grads = clip(stacked, {}, X).grads, reference(loss)
    for member, bound in enumerate((0.5, 0.1)):
        own = {name: each[member] for name, each in found.items()}
        oracle.assert_exact(own, oracle.clipped(grads, bound), 1e-6)


def test_private_gradients_keep_their_bound():
    def forward(self, x):
        h = torch.tanh(self.a(x)) + x
        return self.o(Old.apply(h) + self.b(h))

    layers = dict(a=nn.Linear(8, 8), b=nn.Linear(8, 8), o=nn.Linear(8, 3))
    model, x, y = losses.Net(forward, **layers), X[:1].float(), torch.tensor([1])
    plan = dp.Plan(
        dataset_size=1,
        sampling_rate=1.0,
        noise_multiplier=0.0,
        max_norm=0.5,
        steps=2,
        delta=0.5,
    )
    data = torch.utils.data.TensorDataset(x, y)
    expected = oracle.model_gradients(
        model, lambda model, x, y: F.cross_entropy(model(x), y), (x, y), 1
    )
    private = dp.PrivateGradients(model, F.cross_entropy, data, plan=plan)
    for batch in private.loader:
        private.backward(*batch)
        break
    found = {name: each.grad for name, each in model.named_parameters()}
    oracle.assert_exact(found, oracle.clipped(expected, 0.5), 1e-5)


def test_explanations_count_the_copies():
    def explained(f):
        compute = vgrad.clipped_grad(residual(f), max_norm=1.0)
        return vgrad.explain(compute)(params(), {}, X)

    plain, copied = explained(torch.sin), explained(Old.apply)
    assert (plain.foreign, plain.copied) == ((), 0)
    assert "copies" not in str(plain)
    assert copied.foreign == ("OldBackward",)
    sides = [(8, 8), (8, 8), (0, 8), (8, 3)]  # inputs and outputs of a, b, c and o
    assert copied.copied == 3 * 8 * sum(map(sum, sides))
    assert f"copies, {copied.copied:,} bytes" in str(copied)
    assert "OldBackward" in str(copied)
    assert [row.bytes for row in plain.rows] == [row.bytes for row in copied.rows]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "attention"])
def test_layers_of_torch_need_no_copies(kind):
    if kind == "attention":
        model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    else:
        layer = getattr(nn, kind)(8, 8, batch_first=True)
        model = nn.Sequential(layer, losses.Pick(lambda outputs: outputs[0]))
    fmodel, values, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, lambda output, _: output.square().sum())
    compute = vgrad.clipped_grad(loss, max_norm=1.0)
    batch = torch.randn(3, 5, 8), torch.zeros(3)
    found = vgrad.explain(compute)(values, buffers, *batch)
    assert (found.strategy, found.foreign, found.copied) == ("recorded", (), 0)


def test_chunks_that_fit_leave_room_for_the_copies():
    sizes = []
    for f in (lambda h: h * -50.0, Old.apply):
        problem = vgrad.clipped_grad(residual(f), max_norm=1.0).options
        sizes.append(saved_bytes(problem.on(params(), {}, (X,))))
    assert sizes[1] >= 1.5 * sizes[0]


def test_graphs_of_torch_alone_hold_no_copies(monkeypatch):
    def refuse(*_):
        raise AssertionError("copied")

    monkeypatch.setattr(proxies, "owned", refuse)
    for net in NETS.values():
        vgrad.clipped_grad(net(torch.sin), max_norm=1.0, strategy="recorded")(
            params(), {}, X
        )
    loss = residual(Old.apply)
    clip = vgrad.clipped_grad(loss, max_norm=1.0, strategy="recorded")
    with pytest.raises(AssertionError, match="copied"):
        clip(params(), {}, X)


@pytest.mark.parametrize("strategy", ["recorded", "auto"])
def test_versions_count_when_a_factor_is_used(strategy):
    """What runs again in the backward pass may write, too, with ops of torch alone."""

    def loss(p, b, x):
        h = F.linear(x, p["a.w"])

        def inner(x):
            h.detach().mul_(3)
            return x.sin()

        y = checkpoint(inner, x * p["s.w"], use_reentrant=False)
        return (F.linear(h, p["b.w"]) + y).square().sum()

    compute = vgrad.clipped_grad(loss, max_norm=0.5, strategy=strategy)
    if strategy == "recorded":
        with pytest.raises(RuntimeError, match="linear: expected an input that stays"):
            compute(params(), {}, X)
        return
    found = compute(params(), {}, X)
    assert length(compute(params(), {}, X[:1]).grads) <= 0.5 * (1 + 2e-6)
    oracle.assert_exact(found.grads, oracle.clipped(reference(loss), 0.5), 1e-6)


@pytest.mark.parametrize("strategy", ["recorded", "auto"])
def test_hooks_that_write_are_refused_or_run_sample_by_sample(strategy):
    def loss(p, b, x):
        h = torch.tanh(F.linear(x, p["a.w"])) + x
        y = h * 1
        y.register_hook(lambda grad: grad.mul_(-50))
        return F.linear(y + F.linear(h, p["b.w"]), p["o.w"]).square().sum()

    compute = vgrad.clipped_grad(loss, max_norm=0.5, strategy=strategy)
    if strategy == "recorded":
        with pytest.raises(vgrad.UnsupportedOp, match="register_hook"):
            compute(params(), {}, X)
        return
    found = compute(params(), {}, X)
    oracle.assert_exact(found.grads, oracle.clipped(reference(loss), 0.5), 1e-6)


class Weighing(Function):
    """Writes into its second argument, which all samples may share."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad * weight.data.mul_(3), None


class Filling(Function):
    """Returns one memory for the outputs of all calls."""

    room = torch.zeros(8, dtype=torch.float64)

    @staticmethod
    def forward(ctx, x):
        return Filling.room.copy_(x * 2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("strategy", ["recorded", "vmap", "loop"])
def test_no_call_for_one_sample_reaches_that_for_another(strategy):
    """Else a sum moves by more than its bound, with one sample more."""

    def loss(p, b, x):
        h = Weighing.apply(Filling.apply(F.linear(x, p["a.w"])), b["scale"] * 2)
        return F.linear(
            h.tanh(), p["o.w"] * Weighing.apply(b["row"], b["row"] * 2)
        ).sum()

    buffers = {"scale": randn(8, seed=20), "row": randn(8, seed=21)}
    together = vgrad.per_sample_grad(loss, strategy=strategy)(params(), buffers, X)
    for row in range(3):
        alone = vgrad.per_sample_grad(loss, strategy="loop")(
            params(), buffers, X[row : row + 1]
        )
        own = {name: each[row : row + 1] for name, each in together.items()}
        oracle.assert_exact(own, alone)
