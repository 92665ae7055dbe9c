"""Losses that cannot be recorded, and that calls and errors leave nothing behind."""

import contextlib
import functools
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, wrap_torch_function
from torch.utils import _pytree as pytree

import vgrad
from tests import oracle
from tests.losses import CASES, assert_gradients, build, randn, state_of_torch
from tests.persample.test_record import (
    RECORDED,
    B,
    Rounded,
    W,
    check,
    fixed,
    given,
    out_of,
    written,
)
from vgrad.persample.engine import STRATEGIES
from vgrad.persample.factors import Dense
from vgrad.persample.rules import RULES

# Torch says where it loops over the samples.
pytestmark = pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")


SAVED = {
    "linear": ("F.linear(x, w)", (5, 4)),
    "matmul": ("x @ w", (4, 5)),
    "einsum": ("torch.einsum('ti,io->to', x, w)", (4, 5)),
    "bilinear": ("F.bilinear(x, x, w)", (5, 4, 4)),
    "conv1d": ("F.conv1d(x[None], w)", (2, 3, 2)),
    "conv2d": ("F.conv2d(x[None], w)", (2, 1, 3, 2)),
    "conv_transpose1d": ("F.conv_transpose1d(x[None], w)", (3, 2, 2)),
    "layer_norm": ("F.layer_norm(x, (4,), w)", (4,)),
    "rms_norm": ("F.rms_norm(x, (4,), w)", (4,)),
    "group_norm": ("F.group_norm(x[None], 3, w)", (3,)),
    "instance_norm": ("F.instance_norm(x[None], weight=w)", (3,)),
    "embedding": ("F.embedding(x, w)", (5, 4)),
    "embedding_bag": ("F.embedding_bag(x, w)", (5, 4)),
    "multiplication": ("w * x", (3, 4)),
    "prelu": ("F.prelu(x, w)", (4,)),
    "lstm": (
        "torch.lstm(x[:, None], (fixed(1, 1, 2),) * 2, [w[:, :4], w[:, 4:]], "
        "False, 1, 0.0, False, False, False)[0]",
        (8, 6),
    ),
}
"""Ops that keep their input, of `x` and of a weight of this shape."""
WRITES = {
    "all": lambda a: a.mul_(2),
    "through a view": lambda a: a.view(-1)[:3].add_(1),
    "an entry": lambda a: a.__setitem__(0, 1),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("leads_on", [False, True])
@pytest.mark.parametrize("name", SAVED)
def test_an_input_that_is_changed_in_place_raises(name, leads_on, write):
    text, shape = SAVED[name]

    def loss(params, buffers, x):
        a = x * params["first"] if leads_on else x * 1
        a = a.abs().mul(2).long().clamp(max=4) if "embedding" in name else a.tanh()
        h = written(text)(params, a)
        WRITES[write](a)
        return out_of(h)

    params, batch = given({"w": shape, "first": (4,)})
    ours = f"^{name}: expected an input that stays as it is until the backward pass"
    with pytest.raises(RuntimeError, match=f"{ours}|modified by an inplace operation"):
        vgrad.per_sample_grad(loss, **RECORDED)(params, {}, *batch)


class Product:
    """A function of `g` that is an object, or one of its methods."""

    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x

    def __call__(self, g):
        return Dense(g * self.x)

    def factor(self, g):
        return self(g)


HOLDERS = {
    "a closure": lambda x: lambda g: Dense(g * x),
    "a view": lambda x: lambda g, x=x[:]: Dense(g * x),
    "a partial function": lambda x: functools.partial(lambda x, g: Dense(g * x), x),
    "a partial keyword": lambda x: functools.partial(lambda g, x: Dense(g * x), x=x),
    "an object": Product,
    "a method": lambda x: Product(x).factor,
    "a default": lambda x: lambda g, *, x=x: Dense(g * x),
    "a closure of a closure": lambda x: (lambda inner: lambda g: inner(g))(
        lambda g: Dense(g * x)
    ),
    "containers": lambda x: (lambda held: lambda g: Dense(g * held["x"][0][0]))(
        {"x": [(x,)]}
    ),
}


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_rule_may_hold_its_input_in_any_way(holder, changed, monkeypatch):
    @wrap_torch_function(lambda x, weight: (x, weight))
    def scaled(x, weight):
        return x * weight

    monkeypatch.setitem(RULES, scaled, None)  # and taken out again
    vgrad.rules.rule(scaled, weights=("weight",), replace=True)(
        lambda x, weight: {"weight": HOLDERS[holder](x)}
    )

    def loss(params, buffers, x):
        a = x * 1
        h = scaled(a, params["w"])
        if changed:
            a.mul_(2)
        return h.sum()

    params, batch = {"w": fixed(3)}, (randn(B, 3),)
    compute = vgrad.per_sample_grad(loss, **RECORDED)
    if changed:
        with pytest.raises(RuntimeError, match="^scaled: expected an input that stays"):
            compute(params, {}, *batch)
    else:
        assert torch.equal(compute(params, {}, *batch)["w"], batch[0])


def changes_a_parameter(p, x):
    weight = p["w"] * 1
    weight.mul_(2)
    return F.linear(x, weight)


def penalty(p, x):
    x = x.detach().requires_grad_()
    value = F.linear(x, p["w"]).tanh().sum()
    return torch.autograd.grad(value, x, create_graph=True)[0].square().sum()


def at_weights(text):
    """Make a penalty on the gradient at a parameter."""

    def penalised(p, x):
        value = written(text)(p, x).tanh().sum()
        options = {"create_graph": True, "allow_unused": True}
        return value + torch.autograd.grad(value, p["w"], **options)[0].square().sum()

    return penalised


def fills_grad(backward):
    def filled(p, x):
        value = F.linear(x, p["w"]).tanh().sum()
        backward(value, retain_graph=True)
        return value

    return filled


def by_grad_at_weights(p, x):
    grad = torch.func.grad(lambda w: F.linear(x, w).tanh().sum())(p["w"])
    return F.linear(x, p["w"]).sum() + grad.square().sum()


def by_norms(p, x):
    """A penalty on the norms of the samples of a sample."""
    inner = vgrad.per_sample_norm(
        lambda p, b, row: F.linear(row, p["w"]).tanh().sum(), strategy="vmap"
    )
    return inner({"w": p["w"]}, {}, x)


def renormed(p, x):
    w = p["w"]
    w.data = torch.renorm(w.data, 2, 0, 1.0)
    return F.linear(x, w)


IN_PLACE = '^mul_: .*from w, got one that changes such a tensor in place.*"vmap'
OWN = 'runs no backward pass of its own.*torch.func.grad.*strategy="loop"'
OVER = 'got w in one that it does not, such as a transform of torch.func.*"vmap"'
UNRECORDED = [  # and a strategy that runs such a loss
    (changes_a_parameter, IN_PLACE, "auto"),
    (penalty, OWN, "loop"),
    (at_weights("F.linear(x, w)"), OWN, "auto"),
    (at_weights("x @ w.exp().t()"), OWN, "auto"),
    (at_weights("w[0] * x"), OWN, "auto"),
    (fills_grad(Tensor.backward), OWN, "loop"),
    (fills_grad(torch.autograd.backward), OWN, "loop"),
    (by_grad_at_weights, OVER, "auto"),
    (by_norms, OVER, "auto"),
    *(
        (written(text), OVER, "auto")
        for text in (
            "torch.vmap(torch.func.grad(lambda x, w: total(w)(x)), (0, None))(x, w)",
            "torch.vmap(torch.vmap(torch.mul, (0, None)), (None, 0))(w[0], x[:, 0])",
            "torch.vmap(lambda w: F.linear(x, w[None]).sin())(w)",
        )
    ),
    (renormed, 'strategy="loop"', "loop"),
]


@pytest.mark.parametrize(("run", "message", "strategy"), UNRECORDED)
def test_what_cannot_be_recorded_is_refused_and_runs_otherwise(run, message, strategy):
    params, batch = given(W)
    compute = vgrad.per_sample_grad(lambda p, b, x: out_of(run(p, x)), **RECORDED)
    with pytest.raises(vgrad.UnsupportedOp, match=message):
        compute(params, {}, *batch)
    check(run, params, batch, strategy=strategy)
    assert params["w"].grad is None


def test_hooks_on_parameters_are_refused_and_run_in_a_loop():
    def loss(p, b, x):
        p["w"].register_hook(lambda grad: 2 * grad)
        return (p["w"] @ x).square().sum()

    params, x = {"w": randn(2, 4)}, randn(3, 4)
    with pytest.raises(vgrad.UnsupportedOp, match='strategy="loop"'):
        vgrad.per_sample_grad(loss, **RECORDED)(params, {}, x)
    # Each sample on its own: hooks stay on the tensor.
    rows = [oracle.loss_gradients(loss, params, {}, (row[None],))["w"] for row in x]
    for strategy in ("loop", "auto"):
        expected = {"w": torch.cat(rows)}
        assert_gradients(loss, params, (x,), expected=expected, strategy=strategy)


def test_backward_hooks_of_modules_are_refused_in_transforms_and_run_in_a_loop():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
    model[1].register_full_backward_hook(lambda module, into, out: (10 * into[0],))
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, F.mse_loss)
    batch = randn(3, 4), torch.zeros(3, 1, dtype=torch.float64)
    for strategy in ("recorded", "vmap"):
        with pytest.raises(RuntimeError, match="backward hooks"):
            vgrad.per_sample_norm(loss, strategy=strategy)(params, buffers, *batch)
    with pytest.warns(vgrad.FallbackWarning, match="backward hooks"):
        found = vgrad.per_sample_grad(loss)(params, buffers, *batch)
    model.zero_grad()
    F.mse_loss(model(batch[0][:1]), batch[1][:1]).backward()
    torch.testing.assert_close(found["0.weight"][0], model[0].weight.grad)


@pytest.mark.parametrize("strategy", ["recorded", "loop"])
def test_attention_refuses_what_torch_refuses(strategy):
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    fmodel, params, _ = vgrad.make_functional_with_buffers(model)

    def loss(params, buffers, x):
        return fmodel(params, buffers, *[x[None]] * 3, is_causal=True)[0].sum()

    with pytest.raises(RuntimeError, match="attn_mask"):
        vgrad.per_sample_norm(loss, strategy=strategy)(params, {}, torch.ones(1, 3, 4))


def test_switches_of_precision_are_read_and_autocast_leaves_float64_alone():
    def normed(params, buffers, x):
        return F.layer_norm(x, (4,), params["w"]).sin().sum()

    params = {"w": torch.ones(4, dtype=torch.float64)}
    expected = oracle.loss_gradients(normed, params, {}, (randn(3, 4),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_gradients(normed, params, (randn(3, 4),), expected=expected)

    def linear(params, buffers, x):
        return F.linear(x, params["w"]).square().sum()

    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "bf16"
        params, x = {"w": torch.ones(2, 3)}, torch.ones(4, 5, 3)
        norms = vgrad.per_sample_norm(linear, **RECORDED)(params, {}, x)
    finally:
        matmul.fp32_precision = before
    exact = oracle.norms(oracle.loss_gradients(linear, params, {}, (x,)))
    torch.testing.assert_close(norms.double(), exact, rtol=1e-5, atol=0)


def test_measuring_memory_puts_the_generator_back_after_an_error():
    def loss(params, buffers, x):
        torch.rand(1)
        raise ValueError("on purpose")

    state = torch.get_rng_state()
    compute = vgrad.per_sample_norm(loss, chunk_size="auto")
    with pytest.raises(ValueError, match="on purpose"):
        compute({"w": torch.ones(1)}, {}, torch.ones(2, 1))
    assert torch.equal(state, torch.get_rng_state())


def test_a_call_inside_a_transform_is_refused_where_recording_was_asked_for():
    params, (x,) = given(W)
    compute = vgrad.per_sample_norm(lambda p, b, x: (x @ p["w"].t()).sum(), **RECORDED)
    with pytest.raises(vgrad.UnsupportedOp, match='outside of transforms.*"vmap"'):
        torch.vmap(lambda x: compute(params, {}, x))(x)


RANDOM = {
    "dropout": "F.dropout(F.linear(x, w), 0.5)",
    "dropout in place": "F.dropout(F.linear(x, w), 0.5, inplace=True)",
    "dropout of features": "F.dropout1d(F.linear(x, w)[None], 0.5)",
    "alpha dropout": "F.alpha_dropout(F.linear(x, w), 0.5, True)",
    "dropout of weights": "F.linear(x, F.dropout(w, 0.5))",
    "noise like data": "F.linear(x + torch.randn_like(x), w)",
    "noise": "F.linear(x, w) + torch.randn(3, 5, dtype=x.dtype)",
    "noise on weights": "F.linear(x, w + torch.randn_like(w))",
    "noise in place": "F.linear(torch.empty_like(x).uniform_() * x, w)",
    "bernoulli": "torch.bernoulli(x / x.abs().max() / 4 + 0.5) @ w.t()",
    "gumbel": "F.gumbel_softmax(F.linear(x, w))",
    "attention": "attention(F.linear(x, w[:4])[None], x[None], x[None], dropout_p=0.5)",
    "several": "F.dropout(F.linear(F.dropout(x, 0.3), w).sin(), 0.5) "
    "+ torch.rand((), dtype=x.dtype)",
}
BY_DATA = "expected random numbers that all samples can share"
OF_WEIGHTS = "dropout: expected what is computed from w alone to be the same"


def drawn(name, params, x, **options):
    torch.manual_seed(5)
    compute = vgrad.per_sample_grad(
        lambda p, b, x: out_of(written(RANDOM[name])(p, x)), **options
    )
    return compute(params, {}, x)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("name", RANDOM)
def test_all_strategies_draw_the_same_shared_numbers(name, chunk_size):
    params, (x,) = given(W)
    options = {"randomness": "same", "chunk_size": chunk_size}
    expected = drawn(name, params, x, strategy="loop", **options)
    for strategy in ("recorded", "vmap"):
        if name == "bernoulli":  # torch cannot share what depends on the sample
            with pytest.raises(vgrad.UnsupportedOp, match=BY_DATA):
                drawn(name, params, x, strategy=strategy, **options)
            continue
        oracle.assert_exact(
            drawn(name, params, x, strategy=strategy, **options), expected
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_refused_or_differ_between_equal_samples(name, strategy):
    params, (x,) = given(W)
    x, options = x[:1].expand(B, -1, -1), {"strategy": strategy}
    with pytest.raises(RuntimeError, match='randomness="different"'):
        drawn(name, params, x, randomness="error", **options)
    options["randomness"] = "different"
    if name == "dropout of weights" and strategy == "recorded":
        with pytest.raises(vgrad.UnsupportedOp, match=OF_WEIGHTS):
            drawn(name, params, x, **options)
        return
    found = drawn(name, params, x, **options)["w"]
    assert len(found.flatten(1).unique(dim=0)) == B
    assert torch.equal(found, drawn(name, params, x, **options)["w"])


def test_auto_draws_as_if_it_had_not_tried_to_record():
    """A loss that cannot be recorded runs twice, and draws once."""

    def loss(params, buffers, x):
        return out_of(by_grad_at_weights(params, F.dropout(x, 0.5)))

    params, batch = given(W)
    found = []
    for strategy in ("auto", "vmap"):
        torch.manual_seed(3)
        options = {"strategy": strategy, "randomness": "different"}
        compute = vgrad.per_sample_grad(loss, **options)
        assert vgrad.explain(compute)(params, {}, *batch).strategy == "vmap"
        found.append((compute(params, {}, *batch), torch.get_rng_state()))
    oracle.assert_exact(*found, 0)


def every_kind(p, x):
    """Ops of all kinds of factors, expanded ones and computed values."""
    h = F.linear(x, p["w"], p["b"]).relu_()
    h = h + F.embedding(torch.arange(3), p["table"]) * p["scale"]
    h = F.conv1d(h.mT[None], p["kernel"].view(5, 5, 1))[0].mT
    h = F.layer_norm(h, (5,), p["scale"].exp(), p["b"])
    h = F.linear(h, p["w"].t()) + F.scaled_dot_product_attention(x, x, x)
    states = torch.zeros(1, 3, 1, dtype=x.dtype)
    weights = [p["lstm"][:, :4], p["lstm"][:, 4:]]
    options = (False, 1, 0.0, False, False, False)
    return torch.lstm(h[None], (states, states), weights, *options)[0]


KINDS = {"w": (5, 4), "b": (5,), "table": (3, 5), "scale": (5,)}
KINDS |= {"kernel": (5, 5), "lstm": (4, 5)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_off_outside_are_on_inside(mode, strategy):
    """With parameters and inputs that were made there, and every kind of op."""

    def loss(params, buffers, x):
        return out_of(every_kind(params, x))

    params, batch = given(KINDS)
    expected = oracle.loss_gradients(loss, params, {}, batch)
    with mode():
        params, batch = given(KINDS)
        grads = vgrad.per_sample_grad(loss, strategy=strategy)(params, {}, *batch)
        clipped = vgrad.clipped_grad(loss, max_norm=1.0, strategy=strategy)
        clipped = clipped(params, {}, *batch).grads
    assert not any(grad.requires_grad for grad in grads.values())
    oracle.assert_exact(grads, expected)
    oracle.assert_exact(clipped, oracle.clipped(expected, 1.0))


def test_calling_twice_gives_the_same_bits():
    params, batch = given(KINDS)
    options = {"max_norm": 1.0, "randomness": "different"}
    compute = vgrad.clipped_grad(
        lambda p, b, x: out_of(F.dropout(every_kind(p, x), 0.5)), **options
    )
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(compute(params, {}, *batch).grads)
    oracle.assert_exact(*found, 0)


def test_threads_find_what_one_finds_alone():
    """Each with a loss of its own, at the same time."""

    def problem(seed):
        params = {name: value + seed for name, value in given(KINDS)[0].items()}
        compute = vgrad.clipped_grad(
            lambda p, b, x: out_of(every_kind(p, x) * (1 + seed)),
            max_norm=1.0,
            **RECORDED,
        )
        return lambda: compute(params, {}, randn(B, 3, 4, seed=seed)).grads

    problems = [problem(seed) for seed in (0, 1)] * 5
    alone = [run() for run in problems]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda run: run(), problems))
    oracle.assert_exact(together, alone, 0)


class Fails(Rounded):
    """Raises in the backward pass."""

    applies = True

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


def raises_at_once(p, x):
    raise ZeroDivisionError


def raises_late(p, x):
    return F.linear(x, p["w"].exp()).relu_().sum() + (p["w"] * 2).sum() / (1 // 0)


def raises_inside(p, x):
    return torch.vmap(torch.func.grad(lambda row: raises_late(p, row)))(x)


def raises_backward(p, x):
    return F.linear(Fails.apply(F.linear(x, p["w"])), p["w"].t()).sum()


def raises_under_modes(p, x):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return raises_late(p, x)


def raises_nothing(p, x):
    return F.linear(x, p["w"] * 2)


RAISES = [raises_at_once, raises_late, raises_inside]
RAISES += [raises_backward, raises_under_modes]


def state_of(tensor):
    return (
        tensor._version,
        tensor.requires_grad,
        tensor.grad,
        tensor.is_leaf,
        tensor._backward_hooks,
        dict(tensor.__dict__),
        tensor.tolist(),
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("run", [*RAISES, raises_nothing])
def test_nothing_stays_behind_after_a_call_or_an_error(run, requires_grad, strategy):
    params, batch = given(W)
    tensors = [params["w"].requires_grad_(requires_grad), *batch]
    before = state_of_torch(), [state_of(each) for each in tensors]
    compute = vgrad.clipped_grad(
        lambda p, b, x: out_of(run(p, x)), max_norm=1.0, strategy=strategy
    )
    fails = run in RAISES
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        compute(params, {}, *batch)
    assert (state_of_torch(), [state_of(each) for each in tensors]) == before


class Canary:
    """Something that lives as long as the graph that holds it."""


class Marked(torch.autograd.Function):
    """An identity whose node holds a canary."""

    generate_vmap_rule = True
    alive: list = []  # noqa: RUF012

    @staticmethod
    def forward(x):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.canary = Canary()
        Marked.alive.append(weakref.ref(ctx.canary))
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Noted(TorchFunctionMode):
    """Keeps weak references to all tensors that ops return."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.seen.append(weakref.ref(each))
        return result


def weighted_grad(loss, **options):
    compute = vgrad.weighted_grad(loss, **options)
    return lambda *inputs: compute(torch.ones(B), *inputs)


TRANSFORMS = {
    "grads": vgrad.per_sample_grad,
    "norms": vgrad.per_sample_norm,
    "clipped": functools.partial(vgrad.clipped_grad, max_norm=1.0),
    "weighted": weighted_grad,
    "gram": vgrad.per_sample_gram,
    "measured": functools.partial(vgrad.per_sample_norm, chunk_size="auto"),
    "explain": lambda *args, **kwargs: vgrad.explain(
        vgrad.per_sample_norm(*args, **kwargs)
    ),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_nothing_is_alive_after_a_call(transform, fails, monkeypatch):
    """Neither inputs, nor factors, nor the graph, without help of the collector."""
    monkeypatch.setattr(Marked, "alive", [])
    params, batch = given(KINDS)

    def loss(params, buffers, x):
        h = Marked.apply(every_kind(params, Marked.apply(F.linear(x, params["in"]))))
        return out_of(Fails.apply(h) if fails else h)

    params["in"] = randn(4, 4, seed=9)
    compute = TRANSFORMS[transform](loss, **RECORDED)
    noted, result = Noted(), None
    gc.collect()
    gc.disable()
    try:
        with noted, contextlib.suppress(ZeroDivisionError):
            result = compute(params, {}, *batch)
        results = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        memory = {x.untyped_storage().data_ptr() for x in results}
        alive = [x for each in noted.seen if (x := each()) is not None]
        left = [x for x in alive if x.untyped_storage().data_ptr() not in memory]
        assert len(noted.seen) > 100
        assert len(Marked.alive) >= 2
        assert [tuple(x.shape) for x in left] == []
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in results)
        assert not any(each() for each in Marked.alive)
    finally:
        gc.enable()
    assert fails == (result is None)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].criterion is not None])
def test_no_result_requires_grad(name):
    loss, params, buffers, batch, _ = build(name, B, torch.float32)
    inputs = (params, buffers, *batch)
    for result in (
        vgrad.per_sample_grad(loss)(*inputs),
        vgrad.per_sample_norm(loss, groups="parameter")(*inputs),
        vgrad.clipped_grad(loss, max_norm=0.1)(*inputs),
        vgrad.per_sample_gram(loss)(*inputs),
    ):
        for leaf in pytree.tree_leaves(result):
            assert not getattr(leaf, "requires_grad", False)


CONSTANTS = {name: TRANSFORMS[name] for name in TRANSFORMS if name != "explain"}
CONSTANTS["projection"] = functools.partial(vgrad.per_sample_projection, dim=3, seed=0)
CONSTANTS["moments"] = vgrad.gradient_moments


@pytest.mark.parametrize("which", ["params", "buffers", "batch"])
@pytest.mark.parametrize("transform", CONSTANTS)
def test_results_say_that_they_are_constants_of_whatever_requires_grad(
    transform, which
):
    params, (x,) = given(W)
    buffers = {"scale": fixed(5)}
    wanted = {"params": params["w"], "buffers": buffers["scale"], "batch": x}[which]
    wanted.requires_grad_()
    loss = lambda p, b, x: out_of(F.linear(x, p["w"]) * b["scale"])  # noqa: E731
    compute = CONSTANTS[transform](loss, **RECORDED)
    for value in pytree.tree_leaves(compute(params, buffers, x)):
        if value.is_floating_point():
            with pytest.raises(RuntimeError, match='was recorded.*strategy="vmap"'):
                torch.autograd.grad(value.sum(), wanted)
    assert params["w"].grad is None
    with torch.no_grad():
        results = pytree.tree_leaves(compute(params, buffers, x))
    assert not any(value.requires_grad for value in results)


def test_what_surrounds_the_loss_gets_no_gradient():
    """The caller's graph does not run, and what the loss closes over is a constant."""
    params, (x,) = given(W)
    outer = randn(5, 4, seed=3).requires_grad_()
    root = x.clone().requires_grad_()
    middle = root.exp()
    middle.register_hook(lambda grad: pytest.fail("the caller's graph ran"))

    def run(p, x):
        return F.linear(x, p["w"]) + F.linear(x, outer)

    compute = vgrad.per_sample_grad(lambda p, b, x: out_of(run(p, x)), **RECORDED)
    compute(params, {}, middle)
    check(run, params, (middle.detach(),))
    assert root.grad is None
    assert outer.grad is None
