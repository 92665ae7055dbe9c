"""What the steps have in common: the losses that they take, aux and donation."""

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests import oracle
from vgrad import optim
from vgrad.precision import StaticLossScale
from vgrad.training import (
    EnsembleState,
    TrainState,
    ensemble_train_step,
    private_step,
    train_step,
)

E = 3
X = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)


def mean(params, buffers, x):
    return (params["w"] * x * buffers["factor"]).mean()


class Counting:
    """A loss of one's own that changes a buffer."""

    def __call__(self, params, buffers, x):
        return mean(params, buffers, x)

    def with_buffers(self, params, buffers, x):
        return mean(params, buffers, x), {"factor": buffers["factor"] + 1}


class WithAux(Counting):
    """The same with what it found on its way."""

    def with_buffers(self, params, buffers, x):
        value, new = super().with_buffers(params, buffers, x)
        return (value, {"twice": 2 * value, "rows": (params["w"] * x,)}), new


def with_aux(params, buffers, x):
    return WithAux().with_buffers(params, buffers, x)[0]


def entries():
    double = torch.ones(2, dtype=torch.float64)
    return {"w": double}, {"factor": torch.tensor(0.1, dtype=torch.float64)}


def plain(tx, loss, **options):
    return train_step(loss, tx, **options), TrainState.create(tx, *entries())


def together(tx, loss, **options):
    many = [
        {name: torch.stack([value] * E) for name, value in each.items()}
        for each in entries()
    ]
    return ensemble_train_step(loss, tx, **options), EnsembleState.create(tx, *many)


def private(tx, loss, **options):
    fields = {"noise_multiplier": 1.0, "max_norm": 0.5, "steps": 5, "delta": 1e-5}
    plan = vgrad.dp.Plan(dataset_size=100, sampling_rate=0.08, **fields)
    return private_step(loss, tx, plan, **options), TrainState.create(
        tx, *entries(), seed=0
    )


STEPS = {"train_step": plain, "ensemble_train_step": together}
BOTH = pytest.mark.parametrize("name", STEPS)
ALL = pytest.mark.parametrize("make", [plain, together, private])


@BOTH
@pytest.mark.parametrize("policy", [None, "mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("loss", [mean, Counting()])
def test_steps_take_losses_with_and_without_buffers(name, policy, loss):
    """A plain function leaves every bit of the buffers, whatever a policy casts."""
    step, state = STEPS[name](optim.sgd(1.0), loss, policy=policy)
    new, metrics = step(state, X)
    factor = state.buffers["factor"] + (loss is not mean)
    tolerance = 2e-2 if policy else 1e-12
    oracle.assert_exact(new.buffers["factor"], factor, tolerance if policy else 0)
    if loss is mean:
        oracle.assert_exact(new.buffers, state.buffers, 0)
    moved = (state.params["w"] - new.params["w"]).expand(E, 2)
    oracle.assert_exact(moved, (X.mean(0) * 0.05).expand(E, 2), tolerance)
    value = metrics["loss"].expand(E).double()
    oracle.assert_exact(value, (0.1 * X.mean()).expand(E), tolerance)


@BOTH
def test_steps_refuse_what_is_no_loss(name):
    with pytest.raises(TypeError, match=rf"^{name}\(loss='mse'\): expected a function"):
        STEPS[name](optim.sgd(0.1), "mse")


def test_an_ensemble_refuses_losses_of_one_sample():
    with pytest.raises(TypeError, match="expected a loss of a whole batch, got one of"):
        together(optim.sgd(0.1), vgrad.sample_loss(None, F.mse_loss))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("train_step", {}),
        *[("ensemble_grad", {"strategy": each}) for each in ("loop", "vmap", "hybrid")],
    ],
)
def test_what_is_no_scalar_is_refused_when_called(name, options):
    make = plain if name == "train_step" else together
    for loss, more, message in (
        (lambda p, b, x: p["w"] * x[0], {}, r"without .* got torch.float64 \(2,\)\."),
        (
            lambda p, b, x: (p["w"] > x).sum(),
            {},
            r"a real tensor .* torch.int64 \(\)\.",
        ),
        (lambda p, b, x: mean(p, b, x) * 1j, {}, r"a real tensor .* torch.complex"),
        (lambda p, b, x: 1.0, {}, "without dimensions .* got float"),
        (mean, {"has_aux": True}, r"\(scalar, aux\), got a Tensor\."),
        (with_aux, {}, "without dimensions .* got tuple"),
    ):
        step, state = make(optim.sgd(0.1), loss, **options, **more)
        with pytest.raises(ValueError, match=rf"^{name}\(loss.*expected.*{message}"):
            step(state, X)


@BOTH
@pytest.mark.parametrize("loss", [with_aux, WithAux()])
@pytest.mark.parametrize("scale", [None, StaticLossScale(4.0)])
def test_aux_is_in_the_metrics_without_scale_and_graph(name, loss, scale):
    for strategy in ("loop", "vmap", "hybrid") if name != "train_step" else (None,):
        options = {} if strategy is None else {"strategy": strategy}
        make = STEPS[name]
        step, state = make(
            optim.sgd(0.1), loss, has_aux=True, loss_scale=scale, **options
        )
        new, metrics = step(state, X)
        aux, lead = metrics["aux"], () if strategy is None else (E,)
        oracle.assert_exact(aux["twice"], 2 * metrics["loss"], 0)
        oracle.assert_exact(aux["rows"], (X.expand(*lead, 2, 2),), 0)
        assert not aux["rows"][0].requires_grad
        bare, _ = make(optim.sgd(0.1), Counting(), loss_scale=scale, **options)
        oracle.assert_exact(new.params, bare(state, X)[0].params, 0)
    assert "aux" not in bare(state, X)[1]


def test_aux_of_a_private_step_is_that_of_the_samples():
    step, state = private(optim.sgd(0.1), with_aux, has_aux=True)
    _, metrics = step(state, X)
    oracle.assert_exact(metrics["aux"]["rows"], (X,), 0)
    _, metrics = step(state, X[:0])
    assert metrics["aux"] is None


def test_aux_of_ensemble_grad_comes_beside_the_result():
    _, state = together(optim.sgd(0.1), mean)
    given = state.params, state.buffers, X
    expected = vgrad.ensemble_grad(mean)(*given)
    found, aux = vgrad.ensemble_grad(with_aux, has_aux=True)(*given)
    oracle.assert_exact(found, expected, 0)
    oracle.assert_exact(aux["twice"], 2 * expected.losses, 0)


@ALL
@pytest.mark.parametrize("scale", [None, StaticLossScale(4.0)])
def test_a_donated_step_has_the_numbers_of_a_pure_one(make, scale):
    """What is skipped is not written to, and what was given away is empty."""
    tx, ends = optim.adam(0.01), []
    for donate in (False, True):
        step, state = make(tx, mean, donate=donate, loss_scale=scale)
        state = state._replace(params={"w": state.params["w"].clone()})
        for number in range(4):
            place, old = state.params["w"].data_ptr(), state
            before = {"w": state.params["w"].clone()}
            bad = number == 2 and make is not private and (scale or make is together)
            state, _ = step(state, X * torch.inf if bad else X)
            if bad:
                oracle.assert_exact(state.params, before, 0)
            in_place = donate and not bad
            assert (state.params["w"].data_ptr() == place) == in_place
            assert bool(old.params) != in_place
        ends.append((state.params, state.optimizer))
    oracle.assert_exact(*ends, 1e-12)
