"""Per-sample quantities of members equal those of each model."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests.ensemble.test_contract import CASES, batch_of, build
from tests.oracle import assert_exact
from vgrad.ensemble import (
    ensemble_clipped_grad,
    ensemble_per_sample_grad,
    member,
    share,
)

E, B = 3, 5
_, FMODEL, PARAMS, _ = build(CASES["mlp"], E)
LOSS = vgrad.sample_loss(FMODEL, F.cross_entropy)
_, Y = batch_of(CASES["mlp"], B)
X = torch.stack([batch_of(CASES["mlp"], B, seed=member)[0] for member in range(E)])
KEY = vgrad.dp.secret_key(seed=0)
SUMS = {"w": torch.zeros(3, 20_000)}


@pytest.mark.parametrize("in_dims", [None, (0, None)])
def test_gradients_are_those_of_each_member(in_dims):
    compute = ensemble_per_sample_grad(LOSS, in_dims=in_dims)
    grads = compute(PARAMS, {}, X if in_dims else X[0], Y)
    alone = vgrad.per_sample_grad(LOSS, strategy="loop")
    for number in range(E):
        expected = alone(member(PARAMS, number), {}, X[number if in_dims else 0], Y)
        assert_exact(member(grads, number), expected)
    params, _ = share(PARAMS, {}, ["0.*"])
    grads = ensemble_per_sample_grad(LOSS, shared=["0.*"])(params, {}, X[0], Y)
    assert grads["0.weight"].shape == (E, B, 8, 5)


LAYERS = {"0.*": 0.1, "2.*": 0.5}


@pytest.mark.parametrize(
    ("max_norm", "bounds", "clipping"),
    [
        (0.3, [0.3] * E, "flat"),
        ([0.1, 0.5, 2.0], [0.1, 0.5, 2.0], "flat"),
        (torch.tensor([0.5, 1, 2]), [0.5, 1.0, 2.0], "flat"),
        (LAYERS, [LAYERS] * E, "per_layer"),
        ([LAYERS] * E, [LAYERS] * E, "per_layer"),
    ],
)
def test_each_member_has_its_own_clip_norm(max_norm, bounds, clipping):
    options = {"clipping": clipping}
    compute = ensemble_clipped_grad(
        LOSS, max_norm=max_norm, in_dims=(0, None), **options
    )
    found = compute(PARAMS, {}, X, Y)
    sensitivities = compute.sensitivities
    assert len(sensitivities) == (1 if isinstance(max_norm, float | dict) else E)
    for number, bound in enumerate(bounds):
        alone = vgrad.clipped_grad(LOSS, max_norm=bound, strategy="loop", **options)
        expected = alone(member(PARAMS, number), {}, X[number], Y)
        assert_exact(member(found.grads, number), expected.grads)
        assert found.clipped[number] == expected.clipped
        own = sensitivities[number if len(sensitivities) > 1 else 0]
        assert own.value == alone.sensitivity.value


def test_noise_follows_from_the_key_and_the_member():
    compute = ensemble_clipped_grad(LOSS, max_norm=[0.1, 1.0, 10.0])
    multipliers, bounds = [1.0, 3.0, 1.0], [0.1, 1.0, 10.0]
    noise = compute.add_noise(SUMS, noise_multiplier=multipliers, key=KEY, step=5)["w"]
    for number, multiplier in enumerate(multipliers):
        alone = vgrad.dp.add_gaussian_noise(
            {"w": SUMS["w"][number]},
            vgrad.Sensitivity(bounds[number]),
            noise_multiplier=multiplier,
            key=KEY,
            step=5,
            member=number,
        )["w"]
        assert_exact(noise[number], alone, 0)
    assert float((torch.corrcoef(noise) - torch.eye(3)).abs().max()) < 0.035
    last = ensemble_clipped_grad(LOSS, max_norm=10.0)
    options = {"noise_multiplier": np.float32(1), "key": KEY, "step": 5, "first": 2}
    again = last.add_noise({"w": SUMS["w"][:1]}, **options)["w"]
    assert_exact(again[0], noise[2], 0)
