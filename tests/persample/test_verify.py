"""Gradients are compared with plain autograd on two samples, once per signature."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import oracle
from vgrad import UnsupportedOp, tree

X = torch.linspace(-1, 2, 40).view(8, 5)
PARAMS = {"w": torch.linspace(-1, 1, 10).view(5, 2), "b": torch.ones(2)}


def honest(params, buffers, x):
    return (x @ params["w"] + params["b"]).sin().sum()


def in_transforms() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


def two_faced(params, buffers, x):
    """Compute another loss under transforms than in plain autograd."""
    return honest(params, buffers, x) * (3.0 if in_transforms() else 1.0)


def hidden(share):
    """Make a loss of which transforms do not see a small part."""

    def loss(params, buffers, x):
        own = 0.0 if in_transforms() else share
        return honest(params, buffers, x) + own * params["b"].square().sum()

    return loss


def counting(loss):
    runs = []

    def counted(params, buffers, x):
        runs.append(in_transforms())
        return loss(params, buffers, x)

    return counted, runs


QUANTITIES = {
    "grad": vgrad.per_sample_grad,
    "norm": vgrad.per_sample_norm,
    "clipped": lambda loss, **more: vgrad.clipped_grad(loss, max_norm=1.0, **more),
    "gram": vgrad.per_sample_gram,
    "projection": lambda loss, **more: vgrad.per_sample_projection(
        loss, 16, seed=0, **more
    ),
    "moments": vgrad.gradient_moments,
}


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_wrong_route_gives_way_to_the_loop(name):
    with pytest.warns(vgrad.FallbackWarning, match=r"'[wb]' differs from plain"):
        found = QUANTITIES[name](two_faced)(PARAMS, {}, X)
    expected = QUANTITIES[name](honest, strategy="loop")(PARAMS, {}, X)
    pairs = zip(tree.tensors(found), tree.tensors(expected), strict=True)
    for one, other in pairs:
        assert torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-6)


def test_the_route_is_kept_for_later_calls():
    compute = vgrad.per_sample_grad(two_faced)
    exact = oracle.loss_gradients(honest, PARAMS, {}, (X,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            oracle.assert_exact(compute(PARAMS, {}, X), exact, 1e-6)


@pytest.mark.parametrize("strategy", ["recorded", "vmap"])
def test_a_strategy_of_the_caller_raises_at_every_call(strategy):
    compute = vgrad.per_sample_grad(two_faced, strategy=strategy)
    for _ in range(4):
        with pytest.raises(UnsupportedOp, match=f"other ones by '{strategy}'.*loop"):
            compute(PARAMS, {}, X)
    assert "differs from plain" in vgrad.explain(compute)(PARAMS, {}, X).verified


@pytest.mark.parametrize("share", [1e-4, 1e-2])
def test_small_differences_are_found(share):
    compute = vgrad.per_sample_grad(hidden(share), strategy="recorded")
    with pytest.raises(UnsupportedOp, match="'b' differs"):
        compute(PARAMS, {}, X)


def test_the_caller_may_do_without():
    compute = vgrad.per_sample_norm(two_faced, verify=False)
    expected = 3 * vgrad.per_sample_norm(honest)(PARAMS, {}, X)
    assert torch.allclose(compute(PARAMS, {}, X), expected)
    report = vgrad.explain(compute)(PARAMS, {}, X)
    assert report.verified == "not verified: verify=False"
    with pytest.raises(ValueError, match=r"verify='no'.*True, False"):
        vgrad.per_sample_norm(honest, verify="no")


def test_private_steps_raise_before_anything_is_released():
    plan, key = vgrad.dp.Plan(20, 0.4, 1.0, 1.0, 3, 1e-3), vgrad.dp.secret_key(seed=0)
    tx = vgrad.optim.sgd(0.1)
    step = vgrad.training.private_step(two_faced, tx, plan)
    state = vgrad.training.TrainState.create(tx, PARAMS, {})._replace(key=key)
    for _ in range(3):
        with pytest.raises(UnsupportedOp, match=r"'[wb]' differs.*strategy=\"loop\""):
            step(state, X)


def doubled(saved):
    return torch.where(saved > 1.5, 2 * saved, saved)


def with_hooks(params, buffers, x):
    """Save tensors by hooks that keep all values but large ones."""
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, doubled):
        return honest(params, buffers, x)


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
def test_the_way_of_private_steps_does_not_depend_on_the_samples():
    plan, key = vgrad.dp.Plan(20, 0.4, 1.0, 1.0, 3, 1e-3), vgrad.dp.secret_key(seed=0)
    tx = vgrad.optim.sgd(0.1)
    step = vgrad.training.private_step(with_hooks, tx, plan)
    params = {"w": 0.1 * PARAMS["w"], "b": torch.zeros(2)}
    state = vgrad.training.TrainState.create(tx, params, {})._replace(key=key)
    small = X.clamp(max=1.0)
    state, metrics = step(state, small)
    assert int(metrics["samples"]) == len(X)
    with pytest.raises(UnsupportedOp, match=r"as it did before.*strategy=\"loop\""):
        step(state, X)  # the two samples that are compared have no large values
    resumed = vgrad.training.private_step(with_hooks, tx, plan)
    with pytest.raises(UnsupportedOp, match=r"as it did before.*strategy=\"loop\""):
        resumed(state, X)
    looped, _ = resumed(state._replace(route=torch.tensor(0)), X)
    assert (int(state.route), int(looped.route)) == (1, 3)
    found = vgrad.per_sample_grad(with_hooks)(params, {}, X)  # is not private
    loop = vgrad.per_sample_grad(with_hooks, strategy="loop")(params, {}, X)
    assert all(torch.equal(found[name], loop[name]) for name in loop)


@pytest.mark.parametrize("route", ["recorded", "vmap", "loop"])
def test_a_private_run_that_resumes_takes_the_route_of_its_first_step(route, tmp_path):
    plan, tx = vgrad.dp.Plan(20, 0.4, 1.0, 1.0, 3, 1e-3), vgrad.optim.sgd(0.1)
    step = vgrad.training.private_step(honest, tx, plan, strategy=route, verify=False)
    state = vgrad.training.TrainState.create(tx, PARAMS, {})
    vgrad.training.save(tmp_path / "state", step(state, X)[0])
    state = vgrad.training.load(tmp_path / "state", state)
    places = []

    def loss(params, buffers, x):
        places.append(torch._C._functorch.maybe_current_level())
        return honest(params, buffers, x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after, _ = vgrad.training.private_step(loss, tx, plan, verify=False)(state, X)
    expected, _ = step(state, X)
    assert after.route == expected.route == state.route
    oracle.assert_exact(after.params, expected.params, 0.0)
    # A functional gradient is one level more than the map over samples.
    levels = {"recorded": {1}, "vmap": {1, 2}, "loop": {None}}
    assert {*places} <= levels[route]
    assert route != "vmap" or 2 in places


def test_comparisons_are_made_at_calls_1_2_4_and_8():
    loss, runs = counting(honest)
    compute = vgrad.per_sample_norm(loss)
    counts = []
    for _ in range(9):
        runs.clear()
        compute(PARAMS, {}, X)
        counts.append(sum(not each for each in runs))
    assert [bool(count) for count in counts] == [1, 1, 0, 1, 0, 0, 0, 1, 0]
    assert set(counts) == {0, 3}  # samples 1, 2 and 1 again
    runs.clear()
    compute(PARAMS, {}, X[:3])  # lengths share a signature
    assert all(runs)
    compute({n: p.double() for n, p in PARAMS.items()}, {}, X.double())
    assert not all(runs)


def test_every_sample_has_its_turn():
    seen = []

    def loss(params, buffers, x):
        if not in_transforms():
            seen.append(round(float(x[0]), 4))
        return honest(params, buffers, x)

    compute = vgrad.per_sample_norm(loss)
    for _ in range(8):
        compute(PARAMS, {}, X)
    assert {*seen} == {round(float(x), 4) for x in X[:, 0]}


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("strategy", ["auto", "recorded", "vmap"])
def test_results_and_generators_do_not_depend_on_it(strategy, randomness):
    def loss(params, buffers, x):
        own = random.random() + np.random.rand()
        return F.dropout(honest(params, buffers, x) * x, 0.5).sum() + 0 * own

    outcomes = []
    for verify in (True, False):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        options = {"strategy": strategy, "randomness": randomness, "verify": verify}
        compute = vgrad.clipped_grad(loss, max_norm=0.5, **options)
        for _ in range(3):
            found = compute(PARAMS, {}, X)
        after = torch.rand(1), torch.tensor(random.random() + np.random.rand())
        outcomes.append((*found.grads.values(), found.norms, *after))
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)


def test_a_loss_that_keeps_something_is_refused():
    calls = []

    def loss(params, buffers, x):
        calls.append(0)
        return honest(params, buffers, x) * len(calls)

    for strategy in ("auto", "recorded", "vmap"):
        compute = vgrad.per_sample_grad(loss, strategy=strategy)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="may keep nothing for its next"):
                compute(PARAMS, {}, X)


def test_writes_by_data_are_found():
    buffers = {"count": torch.ones(())}

    def loss(params, buffers, x):
        buffers["count"].detach().numpy()[...] += 1
        return honest(params, buffers, x) * buffers["count"]

    with pytest.raises(RuntimeError, match="may keep nothing"):
        vgrad.per_sample_grad(loss)(PARAMS, buffers, X)


def test_zero_gradients_are_not_yet_verified():
    params = {**PARAMS, "a": torch.zeros(5, 1), "c": torch.ones(1, 2)}

    def loss(params, buffers, x):
        update = x @ params["a"] @ params["c"]
        return (x @ params["w"] + params["b"] + update).sin().sum()

    compute = vgrad.per_sample_norm(loss)
    compute(params, {}, X)
    report = vgrad.explain(compute)(params, {}, X)
    assert report.verified.startswith("verified against plain autograd on 2 samples, 1")
    assert report.verified.endswith("not yet: c")
    params["a"] += 1
    compute(params, {}, X)
    assert "not yet" not in vgrad.explain(compute)(params, {}, X).verified
    assert "2 times; largest difference" in str(vgrad.explain(compute)(params, {}, X))


def test_samples_that_do_not_count_verify_nothing():
    compute = vgrad.per_sample_norm(two_faced, strategy="recorded")
    compute(PARAMS, {}, X[:0])
    compute(PARAMS, {}, X, mask=torch.zeros(8, dtype=torch.bool))
    compute(PARAMS, {}, torch.full((8, 5), torch.nan))
    compute(PARAMS, {}, torch.full((8, 5), torch.inf))
    verified = vgrad.explain(compute)(PARAMS, {}, X).verified
    assert verified == "not verified: gradients are not finite"


def test_a_generator_of_the_loss_is_left_alone():
    generator = torch.Generator().manual_seed(0)

    def loss(params, buffers, x):
        return honest(params, buffers, x * torch.rand(5, generator=generator))

    compute = vgrad.per_sample_norm(loss, randomness="different")
    compute(PARAMS, {}, X)
    verified = vgrad.explain(compute)(PARAMS, {}, X).verified
    assert verified.startswith("not verified: ")


def test_gradients_of_rounding_errors_agree():
    def loss(params, buffers, x):  # the bias in front of a softmax has none
        return F.layer_norm(x @ params["w"] + params["b"].mean(), (2,)).square().sum()

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        params = {name: value.to(dtype) for name, value in PARAMS.items()}
        compute = vgrad.per_sample_norm(loss, strategy="recorded")
        for _ in range(4):
            compute(params, {}, X.to(dtype))
        assert "3 times" in vgrad.explain(compute)(params, {}, X.to(dtype)).verified


def test_arithmetic_inside_of_the_loss_may_be_less_precise():
    def loss(params, buffers, x):
        return (x.float() @ params["w"].float()).softmax(-1)[0].log() + params["b"][0]

    double = {name: value.double() for name, value in PARAMS.items()}
    compute = vgrad.per_sample_norm(loss, strategy="recorded")
    for params in (PARAMS, double):
        for _ in range(4):
            compute(params, {}, X.to(params["w"].dtype))


SEEN_BY_ONE = {
    "a hook, and a write into its tensor": """
h = F.linear(x, p["w"].t(), p["b"])
h.register_hook(lambda g: g.clamp(-5, 5))
value = (F.relu(h, inplace=True).sum() - y).square()""",
    "a write behind ravel": """
h = b["m"] @ x
h.ravel().clamp_(-10, 10)
value = (p["w"].sum(0) * h).sum().square()""",
    "a write behind flatten": """
h = p["w"].t().mul(1.0)[:, i]
h.flatten().clamp_(max=y)
value = (h * x[:3]).sum().square()""",
    "as_strided": """
h = p["w"].t()[:, i]
value = (h.as_strided((2,), (2,)) * x[:2]).sum() if y > 10 else (h * x[:3]).sum()""",
}
"""Losses of which one sample of a batch shows what others do not."""


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@pytest.mark.parametrize("name", SEEN_BY_ONE)
def test_samples_that_are_not_compared_are_right_or_refused(name):
    text = SEEN_BY_ONE[name].strip()

    def loss(p, b, x, y, i):
        scope = globals() | {"p": p, "b": b, "x": x, "y": y, "i": i}
        exec(text, scope)
        return scope["value"]

    params = {key: value.double() for key, value in PARAMS.items()}
    buffers = {"m": torch.linspace(-1, 2, 10).double().view(2, 5)}
    x, y = X.double().abs(), torch.ones(8).double()
    x[5], y[5] = x[5] * 40, 50.0
    batch = x, y, torch.arange(24).view(8, 3) % 5
    exact = oracle.loss_gradients(loss, params, buffers, batch)
    for strategy in ("auto", "recorded", "vmap"):
        compute = vgrad.per_sample_grad(loss, strategy=strategy)
        try:
            found = compute(params, buffers, *batch)
        except UnsupportedOp:
            assert strategy != "auto"
        else:
            oracle.assert_exact(found, exact)


def test_a_route_that_is_left_is_named_once():
    compute = vgrad.per_sample_norm(hidden(0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            compute(PARAMS, {}, X)
    texts = [str(each.message) for each in caught]
    assert len([each for each in texts if "strategy='recorded'" in each]) == 1
    assert len([each for each in texts if "strategy='vmap'" in each]) == 1


def test_a_call_inside_of_the_caller_s_checkpoint_saves_the_same_twice():
    weight = torch.ones(2, requires_grad=True)
    compute = vgrad.per_sample_norm(honest)

    def region(weight):
        return compute(PARAMS, {}, X).detach().sum() * weight.square().sum()

    value = torch.utils.checkpoint.checkpoint(region, weight, use_reentrant=False)
    value.backward()
    assert weight.grad is not None


def test_modes_of_a_model_are_signatures_of_their_own():
    net = nn.Sequential(nn.Linear(5, 2), nn.Dropout(0.0))
    for mode in (True, False):
        fmodel, params, buffers = vgrad.make_functional_with_buffers(net.train(mode))
        loss = vgrad.sample_loss(fmodel, F.cross_entropy)
        assert loss.training is mode
        compute = vgrad.per_sample_norm(loss, randomness="different")
        compute(params, buffers, X, torch.zeros(8, dtype=torch.int64))
        report = vgrad.explain(compute)(params, buffers, X, torch.zeros(8).long())
        assert report.verified.startswith("verified")


# A vmap rule that mixes samples, or has a shape of its own, is found only by samples
# that run together.


class Mixes(torch.autograd.Function):
    """The direction of a vector, for all samples together under vmap."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x):
        return x / x.norm()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        unit = x / x.norm()
        return (g - unit * (unit * g).sum()) / x.norm()

    @staticmethod
    def vmap(info, in_dims, x):
        return Mixes.apply(x), in_dims[0]


class Shaped(Mixes):
    """The same in old words, whose rule runs for as many samples as features."""

    @staticmethod
    def backward(ctx, g):
        return g / ctx.saved_tensors[0].norm()

    @staticmethod
    def vmap(info, in_dims, x):
        return Shaped.apply(x), 0


SQUARE = {"w": torch.linspace(-1, 1, 16).view(4, 4) + torch.eye(4), "b": torch.ones(4)}


def mixing(function, read):
    def loss(params, buffers, x, label):
        scale = 1.0 + label.item() if read == "a label" else 1.0
        x = x[x > 0] * 1.0 if read == "a shape" else x
        x = F.pad(x, (0, 4 - len(x))) if read == "a shape" else x
        return (scale * function.apply(params["w"] @ x + 0.1) * params["b"]).sin().sum()

    return loss


def batches(sizes):
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        x = torch.randn(size, 4, generator=generator)
        yield x, torch.randint(0, 3, (size,), generator=generator)


SIZES = {"of 8": [8] * 9, "of 4": [4] * 5, "single at first": [1, 1, 4, 1, 4, 4]}


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
@pytest.mark.parametrize("strategy", ["auto", "recorded", "vmap"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("read", ["nothing", "a label", "a shape"])
@pytest.mark.parametrize("function", [Mixes, Shaped])
def test_samples_that_run_together_are_right_or_refused(
    function, read, sizes, strategy
):
    loss = mixing(function, read)
    grads = vgrad.per_sample_grad(loss, strategy=strategy)
    for batch in batches(SIZES[sizes]):
        expected = oracle.loss_gradients(loss, SQUARE, {}, batch)
        try:
            found = grads(SQUARE, {}, *batch)
        except RuntimeError:  # UnsupportedOp, or torch's own for a shape
            assert strategy != "auto"
        else:
            oracle.assert_exact(found, expected, 1e-4)


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
def test_the_bound_holds_for_samples_that_read_values():
    loss = mixing(Mixes, "a label")
    x, label = next(batches([12]))
    clipped = vgrad.clipped_grad(loss, max_norm=1.0)
    near = clipped(SQUARE, {}, x[1:], label[1:]).grads
    far = clipped(SQUARE, {}, torch.cat([1e3 * x[:1], x[1:]]), label).grads
    distance = sum((far[n] - near[n]).square().sum() for n in far).sqrt()
    assert distance <= 1 + 1e-5


def test_samples_that_are_not_finite_leave_the_comparison_to_the_next_call():
    grads = vgrad.per_sample_grad(two_faced, strategy="recorded")
    for _ in range(2):
        grads(PARAMS, {}, X * torch.nan)
    with pytest.raises(UnsupportedOp, match="agree with plain autograd"):
        grads(PARAMS, {}, X)


@pytest.mark.filterwarnings("ignore::vgrad.FallbackWarning")
def test_a_strategy_that_runs_for_the_first_time_is_compared_at_once():
    def loss(params, buffers, x):
        weight = params["w"] * 1.0
        value = (x[:5] @ weight + params["b"]).sin().sum()
        if len(x) == 5:
            return value
        weight.mul_(2.0)  # which vmap runs, and no recorded pass
        return value * (3.0 if in_transforms() else 1.0)

    grads, long = vgrad.per_sample_grad(loss), torch.cat([X, X], 1)
    for x in (X, X, long, long, long):  # the third call is none that is compared
        found = grads(PARAMS, {}, x)
        oracle.assert_exact(found, oracle.loss_gradients(loss, PARAMS, {}, (x,)), 1e-5)
