"""Backward passes that write into the gradient they are given, or into what was saved.

Each function has the derivative of what it computes, and writes on the way there, as
fused kernels do. Plain autograd is right wherever nothing else comes to the tensor
after the write; factors of vgrad wait for the end of the backward pass.
"""

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint  # noqa: F401, in texts

import vgrad
from tests import losses, oracle
from tests.losses import length, new_function, old_function, randn
from tests.persample.test_quantities import clipped_sum

pytestmark = pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")


def writes(ctx, grad):
    return grad.mul_(-50)


def writes_unseen(ctx, grad):
    grad.data.mul_(-50)  # moves no version
    return grad


def writes_by_numpy(ctx, grad):
    grad.numpy()[...] *= -50  # as kernels of other libraries do
    return grad


def calls_another(ctx, grad):
    return Old.apply(writes(ctx, grad))


def identity(ctx, x):
    return x.view_as(x)


Old = old_function(identity, writes)


Ruled = new_function("Ruled", torch.clone, writes, generate_vmap_rule=True)
Mapped = new_function(
    "Mapped",
    torch.clone,
    writes,
    vmap=lambda info, axes, x: (Mapped.apply(x), axes[0]),
)


def saving(write, *, output=False):
    def forward(ctx, x):
        y = torch.exp(x)
        ctx.save_for_backward(y if output else x)
        return y

    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        found = grad * (saved if output else saved.exp())
        write(saved)
        return found

    return old_function(forward, backward).apply


ROOM: dict = {}


def in_one_room(ctx, grad):
    return ROOM.setdefault(grad.shape, torch.zeros_like(grad)).copy_(grad * 3)


Workspace = old_function(lambda ctx, x: x.sin(), in_one_room)


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
    "once": old_function(identity, once_differentiable(writes)).apply,
    "nested": old_function(lambda ctx, x: Old.apply(x) * 2, calls_another).apply,
    "unseen": old_function(identity, writes_unseen).apply,
    "numpy": old_function(identity, writes_by_numpy).apply,
    "saved": saving(lambda saved: saved.detach().mul_(50)),
    "saved, unseen": saving(lambda saved: saved.data.mul_(50)),
    "output": saving(lambda saved: saved.detach().mul_(50), output=True),
    "output, unseen": saving(lambda saved: saved.data.mul_(50), output=True),
    "workspace": lambda x: Workspace.apply(Workspace.apply(x)),
    "library": triple,
    "raw": scaled,
}


NETS = {
    # The gradient of a sum is shared, and the input of a layer.
    "residual": """
h = torch.tanh(F.linear(x, a_w)) + x
value = F.linear(f(h) + F.linear(h, b_w, b_c), o_w).square().sum()""",
    # The output of the function is shared with the layer behind it.
    "of_output": """
h = f(torch.tanh(F.linear(x, a_w)))
value = F.linear(F.linear(h, b_w, b_c), o_w).tanh().sum()""",
    # The gradient goes to a parameter without a rule, and to a scaled one.
    "expanded": """
h = torch.tanh(F.linear(x, a_w))
h = F.linear(f(h * 1) + h * s_w + b_c, b_w)
value = F.layer_norm(F.linear(h, o_w), (3,), t_w).square().sum()""",
    # A checkpoint, beside a layer that shares its input.
    "regions": """
h = torch.tanh(F.linear(x, a_w, b_c))
h = h + checkpoint(lambda h, w: f(h * 1) + F.linear(h, w), h, b_w, use_reentrant=False)
value = F.linear(h, o_w).square().sum()""",
    # Tensors of one parameter and of two.
    "of_parameters": """
w = f(a_w * b_w)
h = torch.tanh(F.linear(x, w * 0.5, b_c) + F.linear(x, w.t()))
value = F.linear(f(h * 1) + h, f(o_w * 1)).square().sum()""",
    # Rows that are looked up, and a convolution.
    "looked_up": """
h = F.embedding((x.abs() * 3).long() % 3, o_w)  # [8, 8]
h = f(h) + F.linear(h, a_w)
value = torch.tanh(f(h[None] * 1) + F.conv1d(h[None], b_w[:, :, None], b_c))
value = value.square().sum()""",
}


def of(name, f):
    return losses.written(NETS[name], globals() | {"f": f})


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
    rows = []
    for row in x:
        leaves = {n: p.clone().requires_grad_() for n, p in PARAMS.items()}
        loss(leaves, {}, row.clone()).backward()
        rows.append(
            [torch.zeros_like(p) if p.grad is None else p.grad for p in leaves.values()]
        )
    return dict(zip(PARAMS, map(torch.stack, zip(*rows, strict=True)), strict=True))


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
    ROOM.clear()


def params():
    return {name: value.clone() for name, value in PARAMS.items()}


@pytest.mark.parametrize("strategy", ["recorded", "vmap", "loop"])
@pytest.mark.parametrize(("net", "name"), PAIRS)
def test_gradients_are_those_of_plain_autograd(net, name, strategy):
    loss = of(net, FUNCTIONS[name])
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
    loss = of(net, FUNCTIONS[name])
    grads, options = reference(loss), OPTIONS[options]
    clip = vgrad.clipped_grad(loss, max_norm=0.5, **options)
    found = clip(params(), {}, X)
    expected, _ = clipped_sum(grads, options.get("clipping", "flat"), 0.5)
    oracle.assert_exact(found.norms, oracle.norms(grads), 1e-6)
    oracle.assert_exact(found.grads, expected, 1e-6)
    assert length(clip(params(), {}, X[:1]).grads) <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("passes", [1, 2])
def test_captured_sums_keep_their_bound(passes):
    def loss(p, b, x):  # "residual", as a function that compile can read
        h = torch.tanh(F.linear(x, p["a.w"])) + x
        h = Ruled.apply(h) + F.linear(h, p["b.w"], p["b.c"])
        return F.linear(h, p["o.w"]).square().sum()

    clip = vgrad.clipped_grad(loss, max_norm=0.5, passes=passes)
    compute, expected = vgrad.compile(clip), oracle.clipped(reference(loss), 0.5)
    for _ in range(3):
        found = compute(params(), {}, X)
        oracle.assert_exact(found.grads, expected, 1e-6)
    (report,) = compute.reports()
    assert report.backend != "eager", report
    assert not report.redos, report


def test_explanations_count_the_copies():
    def explained(f):
        compute = vgrad.clipped_grad(of("residual", f), max_norm=1.0)
        return vgrad.explain(compute)(params(), {}, X)

    plain, copied = explained(torch.sin), explained(Old.apply)
    assert (plain.foreign, plain.copied) == ((), 0)
    assert "copies" not in str(plain)
    assert copied.foreign == ("WritesBackward",)
    sides = [(8, 8), (8, 8), (0, 8), (8, 3)]  # inputs and outputs of a, b, c and o
    assert copied.copied == 3 * 8 * sum(map(sum, sides))
    assert f"copies, {copied.copied:,} bytes" in str(copied)
    assert "WritesBackward" in str(copied)
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


# What runs again in the backward pass may write, too, with ops of torch alone.
REPEATED = """
h = F.linear(x, a_w)
def inner(x):
    h.detach().mul_(3)
    return x.sin()
y = checkpoint(inner, x * s_w, use_reentrant=False)
value = (F.linear(h, b_w) + y).square().sum()"""
HOOKED = """
h = torch.tanh(F.linear(x, a_w)) + x
y = h * 1
y.register_hook(lambda grad: grad.mul_(-50))
value = F.linear(y + F.linear(h, b_w), o_w).square().sum()"""


@pytest.mark.parametrize(
    ("text", "message"),
    [(REPEATED, "linear: expected an input that stays"), (HOOKED, "writes in place")],
)
def test_writes_of_repetitions_and_hooks_are_refused_or_run_one_by_one(text, message):
    loss = losses.written(text, globals())
    with pytest.raises(RuntimeError, match=message):
        vgrad.clipped_grad(loss, max_norm=0.5, strategy="recorded")(params(), {}, X)
    found = losses.clipped(loss, 0.5, params(), X).grads
    oracle.assert_exact(found, oracle.clipped(reference(loss), 0.5), 1e-6)
    assert length(losses.clipped(loss, 0.5, params(), X[:1]).grads) <= 0.5 * (1 + 2e-6)


def weighs(ctx, x, weight):
    ctx.save_for_backward(weight)
    return x * weight


def writes_a_weight(ctx, grad):  # which all samples may share
    (weight,) = ctx.saved_tensors
    return grad * weight.data.mul_(3), None


Weighing = old_function(weighs, writes_a_weight)
OUTPUT = torch.zeros(8, dtype=torch.float64)  # one memory for outputs of all calls
Filling = old_function(lambda ctx, x: OUTPUT.copy_(x * 2), lambda ctx, grad: grad * 2)


@pytest.mark.parametrize("strategy", ["recorded", "auto", "loop"])
def test_no_call_for_one_sample_reaches_that_for_another(strategy):
    def loss(p, b, x):
        h = Weighing.apply(Filling.apply(F.linear(x, p["a.w"])), b["scale"] * 2)
        return F.linear(
            h.tanh(), p["o.w"] * Weighing.apply(b["row"], b["row"] * 2)
        ).sum()

    buffers = {"scale": randn(8, seed=20), "row": randn(8, seed=21)}
    together = vgrad.per_sample_grad(loss, strategy=strategy)(params(), buffers, X)
    loop = vgrad.per_sample_grad(loss, strategy="loop")
    for row in range(3):
        alone = loop(params(), buffers, X[row : row + 1])
        own = {name: each[row : row + 1] for name, each in together.items()}
        oracle.assert_exact(own, alone)
