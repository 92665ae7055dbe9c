"""The recorder, on losses as users write them; the reference is `oracle`'s loop."""

import math

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.losses import STRATEGIES, every_strategy, randn
from vgrad.persample import EXPANDED

B = 4
RECORDED = {"strategy": "recorded"}
# Torch says where it loops over the samples.
pytestmark = pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")


def fixed(*shape):
    count = math.prod(shape)
    return torch.linspace(-1, 2, count, dtype=torch.float64).exp().cos().view(shape)


def given(shapes, sample=(3, 4)):
    named = enumerate(shapes.items(), 1)
    return {name: randn(*shape, seed=n) for n, (name, shape) in named}, (
        randn(B, *sample, seed=20),
    )


def written(text):
    """Make a function of parameters and a sample from an expression or statements."""
    loss = losses.written(text, globals())
    return lambda p, x: loss(p, {}, x)


def out_of(value):
    return value.sin().sum()


def check(run, params, batch, *, buffers=None, strategy="recorded"):
    """Compare every quantity of `out_of(run(params, *sample))` with the oracle."""

    def loss(params, buffers, *sample):
        return out_of(run({**params, **buffers}, *sample))

    losses.assert_quantities(loss, params, batch, buffers=buffers, strategy=strategy)


def rows_of(run, params, batch):
    compute = vgrad.per_sample_norm(lambda p, b, x: out_of(run(p, x)), **RECORDED)
    return vgrad.explain(compute)(params, {}, *batch).rows


MOVED = {
    (40,): "w.reshape(10, 4)",
    (20,): "w.unflatten(0, (5, 4))",
    (4,): "w.unsqueeze(0)",
    (2, 2): "w.flatten()",
    (4, 4): "w.t()",
    (4, 5): "w.t(); w.T; w.mT; w.transpose(0, -1); w.transpose(dim0=1, dim1=0); "
    "torch.swapaxes(w, 0, 1); w.movedim(0, 1); w.permute(1, 0); w[:, 1:4].t(); "
    "w.t()[1:4]; w.t().contiguous()",
    (5, 4): "w.t().t(); w.permute(0, 1); w[1:3]; w[::2]; w[2:2]; w[None][0]; w[1]; "
    "w[-1]; w.narrow(0, 1, 3); w.double(); w.type_as(fixed(1)); w.clone()",
    (3, 6): "w[:, 1:5]; w[..., 2:]",
    (3, 8): "w.chunk(2, dim=1)[1]",
    (6, 4): "w.chunk(3)[1]; w.split([1, 3, 2])[1]; torch.split(w, 4)[1]",
    (7, 4): "w.tensor_split(3)[0]",
    (5, 8): "w.view(10, 4)",
    (8, 5): "w.t().reshape(10, 4); w.t().contiguous().view(10, 4); "
    "w.permute(1, 0).contiguous().view(-1, 4); w[:, ::2].contiguous().view(6, 4)",
    (1, 5, 4): "w.squeeze(0)",
    (2, 5, 4): "w.unbind()[1]; [*w][1]; w.view(-1, 4); w.view_as(fixed(10, 4)); "
    "w.reshape_as(fixed(10, 4)); w.flatten(0, 1)",
    (4, 2, 3): "w.permute(2, 1, 0).reshape(6, 4)",
    (5, 3, 4): "w.select(1, 2)",
    (1, 5, 1, 4): "w.squeeze()",
}
"""Views and copies of a parameter `w` of a shape, which inputs are multiplied by."""
DERIVED = {
    (4,): "w.expand_as(fixed(5, 4)); w.repeat(3, 1); torch.broadcast_to(w, (3, 4)); "
    "torch.diag_embed(w); torch.stack([w, w, 2 * w])",
    (9,): "w.as_strided((6, 4), (1, 1)); w.unfold(0, 4, 1)",
    (1, 4): "w.expand(5, 4)",
    (4, 4): "w.tril(); torch.matrix_exp(w - w.T)",
    (5, 2): "F.pad(w, (1, 1))",
    (5, 4): "w[[0, 2, 2]]; w[torch.tensor([[0, 2], [2, 4]])[0]]; "
    "w[torch.arange(5) != 1]; w.flip(0); w.index_select(0, torch.tensor([1, 1, 3])); "
    "torch.cat([w, w]); w.sort(0).values; w.topk(2, dim=0)[0]; "
    "torch.linalg.svd(w, full_matrices=False).S[None]; torch.where(w > 0, w, 0.1 * w); "
    "(w - w.mean()) / w.std(1, keepdim=True); w / w.abs().max(); "
    "w * w.sum().item(); w if w.sum() > 0 else 2 * w",
    (8, 5): "w.t().contiguous().view_as(w.reshape(10, 4))",
    (4, 4, 3): "w.diagonal()",
}
"""What is computed from a parameter in other ways."""


@pytest.mark.parametrize(
    ("shape", "text", "moved"),
    [
        (shape, text, table is MOVED)
        for table in (MOVED, DERIVED)
        for shape, texts in table.items()
        for text in texts.split("; ")
    ],
)
def test_a_function_of_a_parameter_is_exact_and_keeps_its_factor(shape, text, moved):
    batched = []

    def run(p, x):
        value = written(text)(p, x)
        batched.append(torch._C._functorch.is_batchedtensor(value))
        return F.linear(x, value)

    params, batch = given({"w": shape})
    check(run, params, batch)
    row, *rest = rows_of(run, params, batch)
    assert not any(batched)  # computed once, for no sample
    assert (row.names, row.op, row.factor) == (("w",), "linear", "Outer")
    assert EXPANDED not in row.why
    if moved:
        assert not rest


TO = {
    "to": lambda w, dtype: w.to(dtype),
    "type": lambda w, dtype: w.type(dtype),
    "to like": lambda w, dtype: w.to(torch.zeros((), dtype=dtype)),
    "method": lambda w, dtype: getattr(w, NAMES[dtype])(),
}
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "half", torch.float64: "double"}


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("how", TO)
def test_a_parameter_in_another_dtype_keeps_its_factor(how, dtype):
    def run(p, x):
        return F.linear(x.to(dtype), TO[how](p["w"], dtype)).float()

    def reference(params, x):
        return oracle.loss_gradients(
            lambda p, b, x: out_of(F.linear(x, p["w"])), params, {}, (x,)
        )

    params, x = {"w": randn(5, 4).float()}, randn(B, 4).float()
    (row,) = rows_of(run, params, (x,))
    assert (row.op, row.factor, row.form) == ("linear", "Outer", "both sides")
    tolerance = max(1e-6, 2 * oracle.rounding(reference, params, x, dtype=dtype))
    options = {"expected": reference(params, x), "tolerance": tolerance}
    losses.assert_quantities(
        lambda p, b, x: out_of(run(p, x)), params, (x,), **options, **RECORDED
    )


def spectral_norm(w):
    with torch.no_grad():
        left, right = fixed(5), fixed(4)
        for _ in range(3):
            right = F.normalize(w.t() @ left, dim=0)
            left = F.normalize(w @ right, dim=0)
    return w / torch.dot(left, w @ right)


def in_two_stages(x, w, v, half):
    return F.linear(x, half) + F.linear(x.cos(), half + v) + (half * v).sum()


W, WV, SQUARE = {"w": (5, 4)}, {"w": (5, 4), "v": (5, 4)}, {"w": (4, 4)}
WB, WG, TOKEN = W | {"b": (5,)}, W | {"g": (5, 1)}, W | {"token": (1, 4)}
LOW_RANK = {"down": (2, 4), "up": (5, 2)}
KEEP_A_FACTOR = {
    "F.linear(x, g * w / w.norm(dim=1, keepdim=True))": WG,
    "F.linear(x, torch._weight_norm(w, g, 0))": WG,
    "F.linear(x, spectral_norm(w))": W,
    "F.linear(x, w + 0.5 * up @ down, b)": WB | LOW_RANK,
    "F.linear(x, w * s.exp(), b * s.exp())": WB | {"s": ()},
    "F.linear(x, torch.einsum('k,koi->oi', k.softmax(0), bank))": {
        "k": (3,),
        "bank": (3, 5, 4),
    },
    "F.linear(x, torch.cat([w, v]), torch.cat([b, c]))": WV | {"b": (5,), "c": (5,)},
    "F.linear(input=x, weight=torch.cat(tensors=(w, v), dim=0))": WV,
    "F.linear(x, sum([w, v]))": WV,
    "F.linear(torch.cat([x, x], 1), torch.block_diag(w, v))": WV,
    "F.linear(x, w.exp()[1:3].t().t())": W,
}


@pytest.mark.parametrize("text", KEEP_A_FACTOR)
def test_what_is_computed_from_parameters_is_exact_and_keeps_a_factor(text):
    run, (params, batch) = written(text), given(KEEP_A_FACTOR[text])
    check(run, params, batch)
    rows = rows_of(run, params, batch)
    assert not any(EXPANDED in row.why for row in rows)
    assert "Outer" in [row.factor for row in rows if row.op == "linear"]


USES = {
    "F.linear(x, w + v) + F.linear(x.cos(), w)": WV,
    "in_two_stages(x, w, v, w * g)": WV | WG,
    "F.linear(x, w, b) + x @ down.t() @ up.t()": WB | LOW_RANK,
    "torch.stack([w, v]) @ x.mT": WV,
    "torch.cat([x, token, x]) @ w.t()": TOKEN,
    "torch.stack([token[0], x[0]]) @ w.t()": TOKEN,
    "torch.linalg.multi_dot([x, down.t(), up.t()])": LOW_RANK,
    "sum(n * F.linear(x, a) for n, a in enumerate(w.chunk(3)))": {"w": (6, 4)},
    "F.linear(x, w[:3]) * F.linear(x.cos(), w[:3])": W,
    "F.linear(x[:, :2], w[:, :2]).sum() * F.linear(x, w[1:3])": W,
    "F.linear(F.linear(x, w).sin(), w.t())": SQUARE,
    "F.linear(x, w) * w.sum() + (x * w[0]).sum()": W,
    "F.conv1d(x.mT[None], w.view(2, 4, 3))": {"w": (2, 12)},
    "F.conv1d(x.mT[None], w.transpose(0, 1))": {"w": (4, 2, 2)},
    "F.conv1d(x.mT[None], w[1:3])": {"w": (4, 4, 2)},
    "F.layer_norm(x, (4,), w[0], w[1])": {"w": (2, 4)},
    "F.layer_norm(x, (4,), *w.unbind(1))": {"w": (4, 2)},
    "F.linear(x, w, b[2:7])": W | {"b": (8,)},
    "F.embedding(x.abs().mul(3).long().clamp(max=6), w.t())": {"w": (4, 7)},
    "F.linear(F.embedding(x.abs().long().clamp(max=2), w[1:5]), w)": {"w": (7, 4)},
    "F.linear(w, v) * x.sum()": WV,
    "w.square()": W,
    "torch.addmm(b, x, w, beta=0)": {"w": (4, 5), "b": (5,)},
    "F.linear(x, w) + b.square()": WB,
    # What is the same for all samples: constants, positions, buffers.
    "F.linear(fixed(3, 4), w) + x.sum()": W,
    "F.linear(F.linear(fixed(3, 4), w).sin() * x, v)": SQUARE | {"v": (5, 4)},
    "(F.linear(fixed(3, 4), w).exp() * v).sin() * x": SQUARE | {"v": (3, 4)},
    "F.linear(F.linear(fixed(3, 4), w).sin(), v)": W | {"v": (2, 5)},
    "F.linear(F.embedding(torch.arange(3), w) + x, v)": {"w": (7, 4), "v": (5, 4)},
    "F.conv1d(fixed(1, 3, 6), w) * x.sum()": {"w": (2, 3, 3)},
    "F.layer_norm(fixed(3, 4), (4,), w, v) * x": {"w": (4,), "v": (4,)},
    "F.linear(buffer, w) * x.sum()": W,
    "F.linear(fixed(3, 4), w)": W,
    "attention(x[None], F.linear(fixed(1, 6, 4), w), fixed(1, 6, 4))": SQUARE,
}
attention = F.scaled_dot_product_attention


@pytest.mark.parametrize("text", USES)
def test_uses_of_parameters_and_of_their_parts_add_up(text):
    params, batch = given(USES[text])
    check(written(text), params, batch, buffers={"buffer": fixed(3, 4)})


IN_PLACE = """
    F.relu(h, inplace=True); F.leaky_relu_(h, 0.1); h.sigmoid_(); h.add_(1);
    h.__imul__(x.sum(-1, keepdim=True)); (h.mT[1:3].tanh_(), h)[1];
    h.__setitem__((..., 0), 0.5) or h; h.__setitem__(1, x.sum()) or h;
    (h.narrow(-1, 0, 2).sin_(), h[1:].exp_(), h)[2]; h.clamp_(-0.5, 0.5);
    h.masked_fill_(torch.arange(5) > 2, 0.0); h.neg_().add_(x.mean()).mul_(0.5).exp_();
    h.addcmul_(h.detach().clone(), h.detach().clone())
"""
BEFORE = {
    "F.linear(x, w, b)": WB,
    "x @ w": {"w": (4, 5)},
    "x @ w[:, 5:]": {"w": (4, 10)},
    "F.linear(x, w.tanh())": W,
    "F.conv1d(x.mT[None], w, b)[0].mT": {"w": (5, 4, 1), "b": (5,)},
    "F.layer_norm(F.pad(x, (0, 1)), (5,), w, b)": {"w": (5,), "b": (5,)},
    "F.embedding((x[:, 0] > 0).long(), w)": {"w": (3, 5)},
    "w * F.pad(x, (0, 1))": {"w": (3, 5)},
    "torch.einsum('ti,io->to', x, w)": {"w": (4, 5)},
}


@pytest.mark.parametrize("change", [each.strip() for each in IN_PLACE.split(";")])
@pytest.mark.parametrize("before", BEFORE)
def test_outputs_may_be_changed_in_place(before, change):
    def changed(p, x):
        x = x.tanh()
        h = written(before)(p, x)
        return F.linear(written(change)({"h": h}, x), p["last"])

    params, batch = given({**BEFORE[before], "last": (2, 5)})
    check(changed, params, batch)


def without_grad(function, *args):
    with torch.no_grad():
        return function(*args)


DETACHED = [
    """
with torch.no_grad(): e, part, gram = w.exp(), w[:2], w @ w.t()
h = F.linear(x, e) @ gram + F.linear(x, part).sum()
value = h + F.linear(x, v.t()).sum()""",
    """
with torch.set_grad_enabled(False):
    h = F.linear(x, w)
    with torch.enable_grad(): k = F.linear(x, w)
value = h * k""",
    "h = F.linear(x, w); value = F.linear(h, v).sum() * h.detach()",
    "F.linear(without_grad(F.linear, x, w), v)",
    "without_grad(torch.mul, w[0], x.sum()) + F.linear(x, w).sum()",
    "F.linear(x, w) + F.linear(x.cos(), w.detach() * 2)",
    "F.linear(x, w.detach().t().t()) + x.sum() * s",
    "F.linear(x, w.data) + x.sum() * s",
    "x @ w.data.exp().t() + x.sum() * s",
    "F.linear(x, w).detach() @ v.t()",
    "F.linear(x, w + (w.round() - w).detach())",  # straight through
    "F.linear(F.linear(x, w), v.detach())",
]


@pytest.mark.parametrize("text", DETACHED)
def test_what_is_detached_or_without_autograd_is_a_constant(text):
    check(written(text), *given({"w": (5, 4), "v": (4, 5), "s": ()}))


def test_parameters_without_a_gradient_have_zeros():
    def run(p, x):
        h = F.linear(x, p["used"])
        F.linear(h, p["dead"])
        return h + (F.linear(x, p["flat"]) * 0).sum() + (x @ p["rounded"]).round().sum()

    shapes = {"used": (5, 4), "dead": (5, 5), "flat": (5, 4), "rounded": (4, 5)}
    shapes |= {"unused": (2, 3, 4), "scalar": ()}
    params, batch = given(shapes)
    check(run, params, batch)
    compute = vgrad.per_sample_grad(lambda p, b, x: out_of(run(p, x)), **RECORDED)
    for name, grad in compute(params, {}, *batch).items():
        assert (grad == 0).all() == (name != "used")
        assert (grad.shape, grad.dtype) == ((B, *shapes[name]), torch.float64)


@every_strategy
def test_a_loss_without_any_parameter_has_zeros(strategy):
    compute = vgrad.clipped_grad(
        lambda p, b, x: x.sum(), max_norm=1.0, strategy=strategy
    )
    params, batch = given(W)
    found = compute(params, {}, *batch)
    assert torch.equal(found.grads["w"], torch.zeros(5, 4, dtype=torch.float64))
    assert not found.norms.any()


class Scaled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, grad * x


class Rounded(torch.autograd.Function):
    applies = False

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 3

    @classmethod
    def vmap(cls, info, in_dims, x):
        return (cls.apply(x) if cls.applies else x.round()), in_dims[0]


class Unlinked(Rounded):
    @classmethod
    def vmap(cls, info, in_dims, x):
        return x.detach().round(), in_dims[0]


class Applied(Rounded):
    applies = True


CUSTOM = {
    "an activation": lambda f: lambda p, b, x: f(F.linear(x, p["w"])).square().sum(),
    "both": lambda f: lambda p, b, x: f(x * f(p["w"][:3])).square().sum(),
    "a parameter": lambda f: lambda p, b, x: F.linear(x, f(p["w"])).square().sum(),
    "mapped": lambda f: lambda p, b, x: torch.vmap(f)(x * p["w"][:3]).square().sum(),
}


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
@pytest.mark.parametrize(
    ("where", "function"),
    [
        *((where, function) for where in CUSTOM for function in (Rounded, Applied)),
        *((where, Unlinked) for where in ("an activation", "both")),
    ],
)
def test_functions_with_a_vmap_of_their_own_have_their_own_gradients(
    where, function, strategy
):
    loss, (params, batch) = CUSTOM[where](function.apply), given(W)
    options = {"tolerance": 1e-12, "strategy": strategy}
    losses.assert_gradients(loss, params, batch, **options)


def layer(w):
    return lambda x: F.linear(x, w).tanh()


def total(w):
    return lambda x: F.linear(x, w).tanh().sum()


def by_vjp(x, w):
    value, pull = torch.func.vjp(layer(w), x)
    return pull(value)[0]


def slope_of_sines(w):
    return torch.autograd.grad(w.sin().sum(), w, create_graph=True)[0]


INSIDE = [
    "F.linear(x, w).sum() + torch.func.grad(total(w))(x).square().sum()",
    "torch.func.grad(total(w.t().t()))(x).square().sum() + F.linear(x, w[:2]).sum()",
    "by_vjp(x, w)",
    "torch.func.jvp(layer(w), (x,), (x.cos(),))[1]",
    "torch.func.hessian(total(w))(x[0])",
    "torch.func.jacrev(layer(w))(x[0])",
    "torch.vmap(lambda row: F.linear(row, w).sin())(x)",
    "torch.vmap(torch.matmul, (0, None))(x, w.t())",
    "F.linear(x, slope_of_sines(w))",
    "Scaled.apply(F.linear(x, w), fixed(3, 5))",
    "Scaled.apply(x, w[:3])",
    "F.linear(x, Scaled.apply(w, fixed(5, 4)))",
    "Scaled.apply(x, w.exp()[:3]) + F.linear(x, w)[:, :4]",
]


@pytest.mark.parametrize("text", INSIDE)
def test_transforms_and_functions_inside_the_loss_are_exact(text):
    check(written(text), *given(W))


def complexified(x):
    return torch.complex(x, x.cos())


COMPLEX = [
    "F.linear(complexified(x), w, b).abs().square()",
    "(complexified(x) @ w.t()[:, 1:3]).real.sin()",
    "F.linear(complexified(x), w.conj() * b[:, None]).abs()",
    "F.linear(x, torch.view_as_real(w)[..., 1])",
    "F.linear(complexified(x), real.to(torch.complex128)).abs()",
    "(real[:3] * complexified(x)).abs()",
]


@pytest.mark.parametrize("text", COMPLEX)
def test_complex_parameters_have_the_gradients_of_their_parts(text):
    parts, (x,) = given({"w": (5, 4, 2), "b": (5, 2), "real": (5, 4)})

    def composed(p):
        return {n: v if n == "real" else torch.view_as_complex(v) for n, v in p.items()}

    def apart(p):
        whole = {n: v.resolve_conj() for n, v in p.items()}
        return {
            n: torch.view_as_real(v) if n != "real" else v for n, v in whole.items()
        }

    def loss(params, buffers, x):
        return out_of(written(text)(params, x))

    expected = oracle.loss_gradients(
        lambda p, b, x: loss(composed(p), b, x), parts, {}, (x,)
    )
    bound = 0.9 * float(oracle.norms(expected).mean())
    grads = vgrad.per_sample_grad(loss, **RECORDED)(composed(parts), {}, x)
    found = losses.clipped(loss, bound, composed(parts), x, **RECORDED)
    oracle.assert_exact(apart(grads), expected)
    oracle.assert_exact(found.norms, oracle.norms(expected))
    oracle.assert_exact(apart(found.grads), oracle.clipped(expected, bound))


def kernel():
    return randn(4, 3, 2, 2).to(memory_format=torch.channels_last)


STRIDES = {
    "of stride zero": lambda: torch.full((1, 1), 0.3).double().expand(4, 4),
    "of equal strides": lambda: randn(7).as_strided((4, 4), (1, 1)),
    "of swapped strides": lambda: randn(8, 5)[:4, :4].t(),
}
ORDERS = [
    "w.permute(0, 1)",
    "w.transpose(0, 0)",
    "w.swapaxes(0, 1).swapaxes(-1, -2)",
    "w.t()",
    "torch.permute(w, dims=(-1, 0))",
]


@pytest.mark.parametrize(
    ("make", "order", "width"),
    [
        *((make, order, 4) for make in STRIDES.values() for order in ORDERS),
        (kernel, "w.permute(0, 2, 3, 1).view(4, -1)", 12),
    ],
)
def test_a_parameter_of_any_strides_is_reordered_where_the_loss_says_so(
    make, order, width
):
    check(written(f"F.linear(x, {order})"), {"w": make()}, (randn(3, width),))


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_the_op_below_an_embedding_pads_in_every_sample(strategy):
    def loss(params, buffers, indices):
        return torch.embedding(params["w"], indices, 0).square().sum()

    indices = torch.tensor([[0, 1], [0, 2]])
    expected = torch.zeros(2, 3, 2)
    expected[0, 1] = expected[1, 2] = 2
    options = {"expected": {"w": expected}, "strategy": strategy}
    losses.assert_gradients(loss, {"w": torch.ones(3, 2)}, (indices,), **options)
