"""Signatures that `help` shows, and what functions, steps and runs print as."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from tests.dp import runs
from vgrad import attribution, curvature, ensemble, training

FMODEL, _, _ = vgrad.make_functional_with_buffers(nn.Linear(4, 3))
LOSS = vgrad.sample_loss(FMODEL, F.cross_entropy)
OF_BATCH = vgrad.batch_loss(FMODEL, nn.CrossEntropyLoss())

TRANSFORMS = [
    *(vgrad.per_sample_grad, vgrad.per_sample_norm, vgrad.per_sample_gram),
    *(vgrad.clipped_grad, vgrad.clipped_sum, vgrad.weighted_grad),
    *(vgrad.per_sample_projection, vgrad.gradient_moments),
    *(ensemble.ensemble_per_sample_grad, ensemble.ensemble_clipped_grad),
    *(curvature.kfac, curvature.ekfac, curvature.full, curvature.diagonal),
    *(curvature.trace, curvature.laplace, curvature.per_sample_jacobian),
    *(attribution.influence, attribution.self_influence, attribution.trak),
]


@pytest.mark.parametrize("function", TRANSFORMS, ids=lambda each: each.__name__)
def test_help_lists_the_options_of_a_transform(function):
    options = inspect.signature(function).parameters
    shown = {
        name: options[name].default for name in vgrad.persample.Options.__annotations__
    }
    assert shown == {
        "strategy": "auto",
        "chunk_size": None,
        "randomness": "error",
        "loss_scale": None,
        "verify": True,
    }
    assert not any(each.kind is each.VAR_KEYWORD for each in options.values())


@pytest.mark.parametrize(
    "function",
    [vgrad.ensemble_grad, vgrad.ensemble_forward, training.ensemble_train_step],
)
def test_help_lists_the_options_of_an_ensemble(function):
    options = inspect.signature(function).parameters
    assert options["strategy"].default == "auto"
    assert options["verify"].default is True
    assert not any(each.kind is each.VAR_KEYWORD for each in options.values())


MODEL = "FunctionalModel(Linear, 2 tensors)"
OF = f"sample_loss({MODEL}, cross_entropy)"


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (LOSS, OF),
        (OF_BATCH, f"batch_loss({MODEL}, CrossEntropyLoss())"),
        (vgrad.per_sample_grad(LOSS), f"<per_sample_grad({OF})>"),
        (
            vgrad.clipped_grad(LOSS, max_norm=1.0, chunk_size=8),
            f"<clipped_grad({OF}, max_norm=1.0, chunk_size=8)>",
        ),
        (
            vgrad.clipped_grad(LOSS, max_norm=1.0, clipping="automatic"),
            f"<clipped_grad({OF}, max_norm=1.0, clipping='automatic')>",
        ),
        (
            vgrad.compile(vgrad.per_sample_norm(LOSS)),
            f"<per_sample_norm({OF}), captured>",
        ),
        (
            vgrad.ensemble_grad(OF_BATCH),
            f"<ensemble_grad(batch_loss({MODEL}, CrossEntropyLoss()))>",
        ),
        (
            training.train_step(OF_BATCH, vgrad.optim.sgd(0.1)),
            "<train_step(loss, tx)>",
        ),
    ],
)
def test_what_is_made_prints_what_it_is(made, text):
    assert repr(made) == text


def test_private_steps_and_runs_print_their_plan():
    plan = runs.plan(30, 0.2)
    step = training.private_step(LOSS, vgrad.optim.sgd(0.1), plan)
    assert repr(step) == f"<private_step(loss, tx, {plan!r})>"
    data = torch.utils.data.TensorDataset(torch.ones(30, 4), torch.arange(30) % 3)
    private = vgrad.dp.PrivateGradients(
        nn.Linear(4, 3), F.cross_entropy, data, plan=plan
    )
    assert repr(private) == (
        f"<PrivateGradients(Linear), step 0 of {plan.steps}, {plan!r}>"
    )
    assert str(private.key.tolist()[0]) not in repr(private).split("step")[0]
