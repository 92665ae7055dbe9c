"""The option `loss_scale` of the per-sample transforms, against the float64 oracle.

That results do not depend on it is part of the contract of quantities.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests import losses, oracle
from tests.compiled import problems
from tests.losses import product
from tests.oracle import assert_exact, error
from tests.persample.test_quantities import expected, parts
from vgrad.precision import StaticLossScale

STRATEGIES = ("auto", *losses.STRATEGIES)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
SIZE, BOUND = 5, 0.7
half_precision = partial(torch.autocast, "cpu", dtype=torch.float16)


@every_strategy
def test_the_empty_batch_aux_and_losses(strategy):
    def loss(params, buffers, x):
        value = product(params, buffers, x)
        return value, {"twice": 2 * value}

    params, x = {"w": torch.ones(2)}, torch.tensor([[3.0, 4.0]])
    options = {"loss_scale": StaticLossScale(2.0**10), "strategy": strategy}
    compute = vgrad.clipped_grad(loss, max_norm=1.0, has_aux=True, **options)
    assert not compute(params, {}, x[:0])[0].grads["w"].any()
    result, aux = compute(params, {}, x)
    assert (result.losses.tolist(), aux["twice"].tolist()) == ([7.0], [14.0])


def test_a_scale_of_each_member_works_under_vmap():
    mlp = losses.build("mlp", SIZE, torch.float32)
    scales = StaticLossScale(torch.tensor([2.0, 2.0**10, 777.0]))

    def member(scale):
        compute = vgrad.clipped_grad(mlp.loss, max_norm=BOUND, loss_scale=scale)
        return compute(*mlp.given).grads

    sums = oracle.clipped(mlp.expected, BOUND)
    sums = {name: grad.expand(3, *grad.shape) for name, grad in sums.items()}
    assert_exact(torch.vmap(member)(scales), sums, 5e-6)


@every_strategy
def test_scaled_gradients_of_low_parameters_are_float32(strategy):
    params, x = {"w": torch.ones(2, dtype=torch.float16)}, torch.tensor([[1.0, 3.0]])
    compute = vgrad.per_sample_grad(
        lambda params, buffers, x: product(params, buffers, x.half()) * 2.0**-20,
        strategy=strategy,
        loss_scale=StaticLossScale(2.0**12),
    )
    assert_exact(compute(params, {}, x)["w"], x * 2.0**-20, 0)


# float16.


def half(factors):
    """Make a problem for which a scale is meant; factors of the losses vary."""
    torch.manual_seed(0)
    model = losses.Net(
        lambda self, x, factor, target: (
            F.cross_entropy(self.net(x), target, reduction="none") * factor
        ).sum(),
        net=nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)),
    )
    factors = torch.as_tensor(factors).expand(SIZE).clone()
    batch = torch.randn(SIZE, 5), factors, torch.randint(3, (SIZE,))
    loss, params, buffers = losses.of_model(model, None, torch.float32)
    grads = oracle.model_gradients(model, lambda m, *sample: m(*sample), batch, SIZE)
    return loss, (params, buffers, *batch), grads


@every_strategy
@pytest.mark.parametrize("name", problems.TRANSFORMS)
def test_gradients_that_are_zero_in_float16_are_right_with_a_scale(name, strategy):
    loss, arguments, grads = half(1e-7)
    make = partial(problems.TRANSFORMS[name], loss, strategy=strategy, chunk_size=2)
    with half_precision():
        lost = problems.call(name, make(), arguments)
        scaled = make(loss_scale=StaticLossScale(2.0**16))
        result = problems.call(name, scaled, arguments)
    exact = expected(name, grads, torch.ones(SIZE, dtype=torch.bool))
    if name == "moments":  # entries near zero of the others have no digits
        exact = {"mean": exact["mean"]}
    assert error(parts(lost, exact), exact) > 0.05
    assert_exact(parts(result, exact), exact, 5e-3)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("clipping", problems.CLIPPED)
@every_strategy
def test_a_sample_that_overflows_adds_exactly_zero_and_is_counted(
    clipping, strategy, chunk_size
):
    factors = torch.tensor([0.01, 0.01, 1000.0, 0.02, 0.01])
    loss, arguments, grads = half(factors)
    exact = expected(clipping, grads, factors < 1000)
    make = problems.TRANSFORMS[clipping]
    compute = make(loss, strategy=strategy, chunk_size=chunk_size)
    large = compute.with_loss_scale(StaticLossScale(2.0**16))
    with half_precision():
        assert int(compute(*arguments).nonfinite) == 0
        result = large(*arguments)
        single = large(*arguments[:2], *(item[2:3] for item in arguments[2:]))
    assert int(result.nonfinite) == int(single.nonfinite) == 1
    assert not result.norms[2].isfinite()
    assert_exact(result.norms[[0, 1, 3, 4]], exact["norms"], 5e-3)
    assert_exact(result.grads, exact["grads"], 5e-3)
    assert not any(grad.any() for grad in single.grads.values())
    assert result.losses.isfinite().all()


# Clipping.


LAYERS = {"net.0.*": 0.1, "net.2.*": 3.0}
CLIPPINGS = [
    {"max_norm": BOUND},
    {"max_norm": BOUND, "clipping": "per_layer"},
    {"max_norm": LAYERS, "clipping": "per_layer"},
    {"max_norm": BOUND, "clipping": "automatic"},
]


@pytest.mark.parametrize("kind", CLIPPINGS)
def test_with_loss_scale_makes_another_function_and_keeps_all_else(kind):
    loss, arguments, _ = half(1.0)
    scale, options = StaticLossScale(2.0**4), {"normalize_by": 3.0, "strategy": "loop"}
    made = vgrad.clipped_grad(loss, **kind, **options, loss_scale=scale)
    plain = vgrad.clipped_grad(loss, **kind, **options)
    scaled = plain.with_loss_scale(scale)
    assert scaled.sensitivity == made.sensitivity == plain.sensitivity
    assert scaled.options.strategy == "loop"
    assert plain.options.loss_scale is None
    grads = made(*arguments).grads
    assert_exact(scaled(*arguments).grads, grads, 0)
    again = scaled.with_loss_scale(None)(*arguments).grads
    assert_exact(again, plain(*arguments).grads, 0)
    if len(kind) > 1:  # clipped in another way than all at once
        bound = made.sensitivity.value * 3.0
        flat = vgrad.clipped_grad(loss, max_norm=bound, **options)(*arguments)
        assert error(flat.grads, grads) > 1e-3


NO_SCALES = [
    (1024.0, r"=1024.0\): expected a loss scale .* got a float"),
    (torch.tensor(2.0), "got a Tensor"),
    (StaticLossScale(torch.tensor([1.0, 2.0])), r"\).*shape \(2,\)"),
]


@pytest.mark.parametrize(("scale", "message"), NO_SCALES)
@pytest.mark.parametrize("name", [*problems.TRANSFORMS][:2])
def test_what_is_no_scale_is_refused(name, scale, message):
    compute = problems.TRANSFORMS[name](product)
    match = rf"^{compute.options.function}\(loss_scale.*{message}"
    with pytest.raises((TypeError, ValueError), match=match):
        problems.TRANSFORMS[name](product, loss_scale=scale)
    with pytest.raises((TypeError, ValueError), match=message):
        compute.with_loss_scale(scale)
