"""Per-sample quantities of members are those of each model by itself."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests.oracle import assert_exact
from vgrad.ensemble import ensemble_clipped_grad, ensemble_per_sample_grad

E, B = 3, 5


def problem():
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        for _ in range(E)
    ]
    fmodel, params, buffers = vgrad.stack(models)
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    x = torch.randn(E, B, 4, dtype=torch.float64)
    return loss, params, buffers, x, torch.randint(3, (B,))


def member(params, number):
    return {name: value[number] for name, value in params.items()}


@pytest.mark.parametrize("in_dims", [None, (0, None)])
def test_gradients_are_those_of_each_member(in_dims):
    loss, params, buffers, x, y = problem()
    given = x if in_dims else x[0]
    grads = ensemble_per_sample_grad(loss, in_dims=in_dims)(params, buffers, given, y)
    for number in range(E):
        own = x[number] if in_dims else x[0]
        alone = vgrad.per_sample_grad(loss, strategy="loop")
        expected = alone(member(params, number), {}, own, y)
        assert_exact(member(grads, number), expected)


@pytest.mark.parametrize("max_norm", [0.3, [0.1, 0.5, 2.0], torch.tensor([0.1, 1, 2])])
def test_each_member_has_its_own_clip_norm(max_norm):
    loss, params, buffers, x, y = problem()
    compute = ensemble_clipped_grad(loss, max_norm=max_norm, in_dims=(0, None))
    found = compute(params, buffers, x, y)
    bounds = torch.as_tensor(max_norm, dtype=torch.float64).expand(E).tolist()
    for number, bound in enumerate(bounds):
        alone = vgrad.clipped_grad(loss, max_norm=bound, strategy="loop")
        expected = alone(member(params, number), {}, x[number], y)
        assert_exact(member(found.grads, number), expected.grads)
        assert found.clipped[number] == expected.clipped
    values = [each.value for each in compute.sensitivities]
    assert values == bounds[: len(values)]
    assert len(values) == (1 if isinstance(max_norm, float) else E)


def test_shared_parameters_have_a_gradient_for_every_member():
    loss, params, buffers, x, y = problem()
    params, buffers = vgrad.ensemble.share(params, buffers, ["0.*"])
    compute = ensemble_per_sample_grad(loss, shared=["0.*"])
    assert compute(params, buffers, x[0], y)["0.weight"].shape == (E, B, 6, 4)


def test_noise_is_that_of_the_key_and_of_each_member():
    loss, params, *_ = problem()
    compute = ensemble_clipped_grad(loss, max_norm=[0.1, 1.0, 10.0])
    grads = {n: torch.zeros_like(p) for n, p in params.items()}

    key = vgrad.dp.secret_key(seed=0)

    def noisy(multiplier):
        return compute.add_noise(grads, noise_multiplier=multiplier, key=key, step=5)

    one = noisy(1.0)
    for name, value in noisy([1.0, 3.0, 1.0]).items():
        assert float(value[1].abs().mean()) > 1.5 * float(one[name][1].abs().mean())
        assert torch.equal(value[2], one[name][2])
    weight = one["0.weight"].flatten(1).std(1)
    assert weight[0] < 0.3 < weight[1] < 3 < weight[2]
    for member, bound in enumerate((0.1, 1.0, 10.0)):
        alone = vgrad.dp.add_gaussian_noise(
            {name: value[member] for name, value in grads.items()},
            vgrad.Sensitivity(bound),
            noise_multiplier=1.0,
            key=key,
            step=5,
            member=member,
        )
        assert_exact({name: value[member] for name, value in one.items()}, alone, 0)


def test_no_two_members_share_noise():
    compute = ensemble_clipped_grad(lambda params, buffers, x: x, max_norm=1.0)
    sums = {"w": torch.zeros(4, 20_000)}
    key = vgrad.dp.secret_key(seed=0)
    noise = compute.add_noise(sums, noise_multiplier=1.0, key=key, step=0)["w"]
    off = torch.corrcoef(noise) - torch.eye(4)
    assert float(off.abs().max()) < 5 / 20_000**0.5


def test_numbers_of_members_have_to_agree():
    loss, params, buffers, x, y = problem()
    with pytest.raises(ValueError, match="one for each of the 3 members"):
        ensemble_clipped_grad(loss, max_norm=[1.0, 2.0])(params, buffers, x[0], y)
    compute = ensemble_clipped_grad(loss, max_norm=1.0)
    key = vgrad.dp.secret_key()
    with pytest.raises(ValueError, match="expected as many members in every entry"):
        compute.add_noise(params, noise_multiplier=[1.0, 1.0], key=key, step=0)
    uneven = {"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)}
    with pytest.raises(ValueError, match=r"got \[2, 3\]"):
        compute.add_noise(uneven, noise_multiplier=1.0, key=key, step=0)


def test_bounds_by_which_a_result_would_be_differentiated_are_refused():
    loss, params, buffers, x, y = problem()
    bounds = torch.tensor([0.1, 1.0, 10.0], requires_grad=True)
    with pytest.raises(ValueError, match="tensor that requires grad.*detach"):
        ensemble_clipped_grad(loss, max_norm=bounds)
    compute = ensemble_clipped_grad(loss, max_norm=bounds.detach())
    assert len(compute(params, buffers, x[0], y).clipped) == E


def test_bounds_by_layer_may_be_those_of_all_members_or_of_each():
    loss, params, buffers, x, y = problem()
    bounds = {"0.*": 0.1, "2.*": 0.5}
    options = {"clipping": "per_layer", "in_dims": (0, None)}
    one = ensemble_clipped_grad(loss, max_norm=bounds, **options)
    each = ensemble_clipped_grad(loss, max_norm=[bounds] * E, **options)
    found, same = one(params, buffers, x, y), each(params, buffers, x, y)
    assert_exact(found.grads, same.grads, 0)
