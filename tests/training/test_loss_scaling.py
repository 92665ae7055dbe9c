"""The option `loss_scale` of the per-sample transforms, against the float64 oracle."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import vgrad
from tests import losses, oracle
from tests.examples import examples
from tests.oracle import assert_exact, error
from vgrad.precision import DynamicLossScale, NoOpLossScale, StaticLossScale

STRATEGIES = ("auto", "recorded", "vmap", "loop")
SCALES = [NoOpLossScale(), DynamicLossScale(2.0**12)]
SCALES += [StaticLossScale(value) for value in (2.0**-6, 2.0**16, 1234.567)]
WEIGHTS = torch.tensor([0.5, -1.0, 0.0, 2.0, 1.5])
SIZE, BOUND = 5, 0.6


# What each transform computes, and the same from gradients in float64.


def apart(grads, groups):
    """Pick the gradients of every group of parameters."""
    return {
        group: {name: grads[name] for name in names} for group, names in groups.items()
    }


def layers(grads):
    groups = {}
    for name in grads:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return groups


def flat(grads):
    return torch.cat([g.reshape(len(g), -1) for g in grads.values()], dim=1)


def moments(grads):
    mean = {name: g.mean(0) for name, g in grads.items()}
    variance = {name: g.var(0) for name, g in grads.items()}
    second = {name: g.square().mean(0) for name, g in grads.items()}
    return {"mean": mean, "variance": variance, "second_moment": second}


def picked_moments(loss, options, given):
    found = vgrad.gradient_moments(loss, **options)(*given)._asdict()
    return {name: found[name] for name in ("mean", "variance", "second_moment")}


def clipped(kind):
    def compute(loss, options, given):
        each = vgrad.clipped_grad(loss, max_norm=BOUND, clipping=kind, **options)
        result = each(*given)
        return {"grads": result.grads, "norms": result.norms}

    return compute


def clipped_by_hand(grads):
    return {"grads": oracle.clipped(grads, BOUND), "norms": oracle.norms(grads)}


def clipped_per_layer(grads):
    parts = apart(grads, layers(grads))
    bound = BOUND / math.sqrt(len(parts))
    total = {}
    for part in parts.values():
        total.update(oracle.clipped(part, bound))
    return {"grads": total, "norms": oracle.norms(grads)}


def clipped_automatically(grads):
    weights = BOUND / (oracle.norms(grads) + 0.01)
    return {"grads": oracle.weighted(grads, weights), "norms": oracle.norms(grads)}


def projected(grads):
    """Project by the transform itself, of a loss whose gradients these are."""
    params = {name: torch.zeros_like(g[0]) for name, g in grads.items()}

    def loss(params, buffers, sample):
        return sum((params[name] * sample[name]).sum() for name in params)

    return vgrad.per_sample_projection(loss, 16, seed=3)(params, {}, grads)


TRANSFORMS = {
    "grad": (lambda f, o, g: vgrad.per_sample_grad(f, **o)(*g), lambda grads: grads),
    "norm": (lambda f, o, g: vgrad.per_sample_norm(f, **o)(*g), oracle.norms),
    "groups": (
        lambda f, o, g: vgrad.per_sample_norm(f, groups="layer", **o)(*g),
        lambda grads: {
            group: oracle.norms(part)
            for group, part in apart(grads, layers(grads)).items()
        },
    ),
    "weighted": (
        lambda f, o, g: vgrad.weighted_grad(f, **o)(WEIGHTS, *g),
        lambda grads: oracle.weighted(grads, WEIGHTS),
    ),
    "flat": (clipped("flat"), clipped_by_hand),
    "per_layer": (clipped("per_layer"), clipped_per_layer),
    "automatic": (clipped("automatic"), clipped_automatically),
    "gram": (
        lambda f, o, g: vgrad.per_sample_gram(f, **o)(*g),
        lambda grads: flat(grads) @ flat(grads).T,
    ),
    "cross": (
        lambda f, o, g: vgrad.per_sample_gram(f, **o)(
            *g, cross=tuple(item[:3] for item in g[2:])
        ),
        lambda grads: flat(grads) @ flat(grads)[:3].T,
    ),
    "projection": (
        lambda f, o, g: vgrad.per_sample_projection(f, 16, seed=3, **o)(*g),
        projected,
    ),
    "moments": (picked_moments, moments),
}


def build(name, dtype=torch.float32):
    torch.manual_seed(0)
    case = losses.CASES[name]
    model = case.model().to(dtype)
    x, y = case.batch(SIZE)
    x = x.to(dtype) if x.is_floating_point() else x
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, case.criterion)
    expected = oracle.model_gradients(model, case.run, (x, y), SIZE)
    return loss, (params, buffers, x, y), expected


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *(("mlp", strategy) for strategy in STRATEGIES),
        *((n, "auto") for n in ("cnn", "tied", "bare_and_frozen", "padding_idx")),
    ],
)
def test_results_do_not_depend_on_the_scale(transform, name, strategy):
    compute, from_grads = TRANSFORMS[transform]
    loss, given_values, grads = build(name)
    expected, tolerance = from_grads(grads), 5e-6
    scales, chunk_sizes = SCALES, (None, 2)
    if name != "mlp":
        scales, chunk_sizes, tolerance = SCALES[-2:], (None,), 2e-5
    for scale in scales:
        for chunk_size in chunk_sizes:
            options = {"strategy": strategy, "chunk_size": chunk_size}
            found = compute(loss, {**options, "loss_scale": scale}, given_values)
            assert_exact(found, expected, tolerance)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_float64_keeps_its_digits(transform):
    compute, from_grads = TRANSFORMS[transform]
    loss, given_values, grads = build("mlp", torch.float64)
    options = {"loss_scale": StaticLossScale(1234.567)}
    found = compute(loss, options, given_values)
    tolerance = 1e-12 if transform != "projection" else 1e-7
    assert_exact(found, from_grads(grads), tolerance)
    leaves = pytree.tree_leaves(found)
    assert {leaf.dtype for leaf in leaves} == {torch.float64}


def test_the_empty_batch_and_losses_that_use_nothing():
    def loss(params, buffers, x):
        return (params["w"] * x).sum()

    params = {"w": torch.ones(2), "unused": torch.ones(3)}
    scale = StaticLossScale(2.0**8)
    x = torch.tensor([[3.0, 4.0]])
    for strategy in STRATEGIES:
        options = {"loss_scale": scale, "strategy": strategy}
        empty = vgrad.clipped_grad(loss, max_norm=1.0, **options)(params, {}, x[:0])
        assert not any(grad.any() for grad in empty.grads.values())
        grads = vgrad.per_sample_grad(loss, **options)(params, {}, x)
        assert torch.equal(grads["w"], x)
        assert torch.equal(grads["unused"], torch.zeros(1, 3))
        gram = vgrad.per_sample_gram(loss, **options)(params, {}, x)
        assert torch.equal(gram, torch.tensor([[25.0]]))


def test_aux_and_losses_are_not_scaled():
    def loss(params, buffers, x):
        value = (params["w"] * x).sum()
        return value, {"twice": 2 * value}

    params, x = {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    for strategy in STRATEGIES:
        compute = vgrad.clipped_grad(
            loss,
            max_norm=1.0,
            has_aux=True,
            strategy=strategy,
            loss_scale=StaticLossScale(2.0**10),
        )
        result, aux = compute(params, {}, x)
        assert torch.equal(result.losses, torch.tensor([7.0, 1.0]))
        assert torch.equal(aux["twice"], torch.tensor([14.0, 2.0]))


def test_a_scale_of_each_member_works_under_vmap():
    loss, (params, buffers, x, y), grads = build("mlp")
    scales = StaticLossScale(torch.tensor([2.0, 2.0**10, 777.0]))
    params = {name: value.detach() for name, value in params.items()}

    def member(scale):
        compute = vgrad.clipped_grad(loss, max_norm=BOUND, loss_scale=scale)
        return compute(params, buffers, x, y).grads

    found = torch.vmap(member)(scales)
    for row in range(3):
        each = {name: value[row] for name, value in found.items()}
        assert_exact(each, oracle.clipped(grads, BOUND), 5e-6)


def test_scaled_gradients_of_low_parameters_are_float32():
    def loss(params, buffers, x):
        return (params["w"] * x.half()).sum() * 2.0**-20

    params, x = {"w": torch.ones(2, dtype=torch.float16)}, torch.tensor([[1.0, 3.0]])
    for strategy in STRATEGIES:
        options = {"strategy": strategy, "loss_scale": StaticLossScale(2.0**12)}
        found = vgrad.per_sample_grad(loss, **options)(params, {}, x)["w"]
        assert torch.equal(found, x * 2.0**-20)


# float16.


class Weighted(nn.Module):
    """A small net whose loss is multiplied by a number that comes with the sample."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x, factor, target):
        return (F.cross_entropy(self.net(x), target, reduction="none") * factor).sum()


def half(factors):
    """Make the problem for which a scale is meant; factors of the losses vary."""
    torch.manual_seed(0)
    model = Weighted()
    batch = (
        torch.randn(SIZE, 5),
        torch.as_tensor(factors).expand(SIZE).clone(),
        torch.randint(3, (SIZE,)),
    )
    fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
    loss = vgrad.sample_loss(fmodel, None)
    grads = oracle.model_gradients(model, lambda m, *sample: m(*sample), batch, SIZE)
    return loss, (params, buffers, *batch), grads


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_are_zero_in_float16_are_right_with_a_scale(strategy):
    loss, given_values, grads = half(1e-7)
    options = {"strategy": strategy, "chunk_size": 2}
    scaled = {**options, "loss_scale": StaticLossScale(2.0**16)}
    for transform, (compute, from_grads) in TRANSFORMS.items():
        expected = from_grads(grads)
        with torch.autocast("cpu", dtype=torch.float16):
            lost = compute(loss, options, given_values)
            found = compute(loss, scaled, given_values)
        if transform != "moments":  # entries near zero have no digits
            assert_exact(found, expected, 5e-3)
        else:
            assert_exact(found["mean"], expected["mean"], 5e-3)
        assert error(lost, expected) > 0.05


def test_float16_finds_losses_of_every_size_with_a_scale_that_fits():
    for power in (-10, -20, -30, -40):
        loss, given_values, grads = half(2.0**power)
        scale = StaticLossScale(2.0**-power)
        with torch.autocast("cpu", dtype=torch.float16):
            found = vgrad.per_sample_norm(loss, loss_scale=scale)(*given_values)
        assert_exact(found, oracle.norms(grads), 5e-3)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sample_that_overflows_adds_exactly_zero_and_is_counted(clipping, strategy):
    factors = torch.tensor([0.01, 0.01, 1000.0, 0.02, 0.01])
    loss, given_values, grads = half(factors)
    rest = {name: torch.cat([g[:2], g[3:]]) for name, g in grads.items()}
    expected = TRANSFORMS[clipping][1](rest)
    options = {"max_norm": BOUND, "clipping": clipping, "strategy": strategy}
    compute = vgrad.clipped_grad(loss, **options)
    for chunk_size in (None, 2):
        large = vgrad.clipped_grad(
            loss,
            **options,
            chunk_size=chunk_size,
            loss_scale=StaticLossScale(2.0**16),
        )
        with torch.autocast("cpu", dtype=torch.float16):
            assert int(compute(*given_values).nonfinite) == 0
            result = large(*given_values)
            params, buffers, *batch = given_values
            alone = large(params, buffers, *(item[2:3] for item in batch))
        assert int(result.nonfinite) == int(alone.nonfinite) == 1
        assert not result.norms[2].isfinite()
        others = torch.tensor([0, 1, 3, 4])
        assert_exact(result.norms[others], expected["norms"], 5e-3)
        assert_exact(result.grads, expected["grads"], 5e-3)
        assert not any(grad.any() for grad in alone.grads.values())
        assert result.losses.isfinite().all()


# Clipping.


@examples(15)
@given(
    st.floats(2.0**-10, 2.0**20),
    st.sampled_from(["flat", "per_layer", "automatic"]),
    st.floats(1e-3, 1e3),
)
def test_no_sample_exceeds_the_bound_at_any_scale(scale, clipping, bound):
    loss, (params, buffers, *batch), _ = half(1.0)
    compute = vgrad.clipped_grad(
        loss, max_norm=bound, clipping=clipping, loss_scale=StaticLossScale(scale)
    )
    assert (
        compute.sensitivity.value
        == vgrad.clipped_grad(loss, max_norm=bound, clipping=clipping).sensitivity.value
    )
    for dtype in (torch.float16, torch.bfloat16, None):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            result = compute(params, buffers, *(item[:1] for item in batch))
        norms = [grad.detach().double().norm() for grad in result.grads.values()]
        assert float(torch.stack(norms).norm()) <= bound * (1 + 1e-6)


def test_the_sensitivity_does_not_know_the_scale():
    loss, *_ = half(1.0)
    for kind in ({"max_norm": 2.0}, {"max_norm": 2.0, "clipping": "per_layer"}):
        compute = vgrad.clipped_grad(loss, normalize_by=4.0, **kind)
        for scale in SCALES:
            scaled = compute.with_loss_scale(scale)
            assert scaled.sensitivity == compute.sensitivity
            assert scaled.sensitivity.value == 0.5


def test_with_loss_scale_makes_another_function_and_keeps_all_else():
    loss, given_values, grads = half(1e-7)
    plain = vgrad.clipped_grad(
        loss, max_norm=1e-8, clipping="flat", normalize_by=2.0, chunk_size=2
    )
    scale = StaticLossScale(2.0**16)
    scaled = plain.with_loss_scale(scale)
    assert plain.options.loss_scale is None
    assert scaled.options.loss_scale is scale
    assert scaled.options.chunk_size == 2
    assert scaled.with_loss_scale(None).options.loss_scale is None
    expected = {name: each / 2 for name, each in oracle.clipped(grads, 1e-8).items()}
    with torch.autocast("cpu", dtype=torch.float16):
        assert_exact(scaled(*given_values).grads, expected, 5e-3)
        lost = scaled.with_loss_scale(None)(*given_values).grads
        assert all(map(torch.equal, lost.values(), plain(*given_values).grads.values()))
        assert error(lost, expected) > 0.05


@pytest.mark.parametrize(
    "kind",
    [
        {"max_norm": BOUND, "clipping": "per_layer"},
        {"max_norm": {"net.0.*": 0.1, "net.2.*": 3.0}, "clipping": "per_layer"},
        {"max_norm": BOUND, "clipping": "automatic"},
    ],
)
def test_with_loss_scale_clips_as_before(kind):
    loss, given_values, _ = half(1.0)
    scale = StaticLossScale(2.0**4)
    options = {"normalize_by": 3.0, "strategy": "loop", "loss_scale": scale}
    expected = vgrad.clipped_grad(loss, **kind, **options)
    changed = vgrad.clipped_grad(loss, **kind, **{**options, "loss_scale": None})
    changed = changed.with_loss_scale(scale)
    assert changed.sensitivity == expected.sensitivity
    assert changed.options.strategy == "loop"
    found, wanted = changed(*given_values).grads, expected(*given_values).grads
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    flat_bound = expected.sensitivity.value * 3.0
    plain = vgrad.clipped_grad(loss, max_norm=flat_bound, **options)(*given_values)
    assert error(plain.grads, wanted) > 1e-3


# Errors.


MAKERS = {
    "per_sample_grad": vgrad.per_sample_grad,
    "per_sample_norm": vgrad.per_sample_norm,
    "weighted_grad": vgrad.weighted_grad,
    "clipped_grad": lambda loss, **o: vgrad.clipped_grad(loss, max_norm=1.0, **o),
    "per_sample_gram": vgrad.per_sample_gram,
    "per_sample_projection": lambda loss, **o: vgrad.per_sample_projection(
        loss, 4, seed=0, **o
    ),
    "gradient_moments": vgrad.gradient_moments,
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_no_scale_is_refused(name):
    def loss(params, buffers, x):
        return (params["w"] * x).sum()

    pattern = rf"^{name}\(loss_scale=1024.0\): expected a loss scale .* got a float"
    with pytest.raises(TypeError, match=pattern):
        MAKERS[name](loss, loss_scale=1024.0)
    with pytest.raises(TypeError, match="got a Tensor"):
        MAKERS[name](loss, loss_scale=torch.tensor(2.0))
    scales = StaticLossScale(torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match=rf"{name}\(loss_scale\).*shape \(2,\)"):
        MAKERS[name](loss, loss_scale=scales)


def test_with_loss_scale_refuses_what_is_no_scale():
    clipped = vgrad.clipped_grad(lambda params, buffers: params["w"], max_norm=1.0)
    with pytest.raises(TypeError, match="expected a loss scale .* got a int"):
        clipped.with_loss_scale(3)
