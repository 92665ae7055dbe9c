"""Errors of steps, states and members, whose messages name argument and value."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

import vgrad
from tests.oracle import assert_exact
from tests.training.test_steps import SGD, begun, mean, of_loss, plan, targets
from vgrad import optim
from vgrad.ensemble import for_members, share
from vgrad.precision import StaticLossScale
from vgrad.training import (
    EarlyStopping,
    EnsembleState,
    TrainState,
    ensemble_train_step,
    private_step,
    train_step,
)

SAMPLE = vgrad.sample_loss(None, F.mse_loss)
PARAMS, BUFFERS = {"a": torch.ones(3, 2), "b": torch.ones(3, 2)}, {}
SHARED = share(PARAMS, BUFFERS, ["a"])
STEP = partial(ensemble_train_step, mean)
CREATE, STOPPING = EnsembleState.create, partial(EarlyStopping.create, 3, patience=1)
OTHERS = for_members(SGD, shared=["b"])
SCALE, STRING = "expected a loss scale such as .* got a float", r"shared='a'.*a string"


def stepped(kind, times=1, state=None, **options):
    """Take steps, the last of which is refused."""
    _, step, start, (x, *_) = begun(kind, **options)
    state = start if state is None else state(start)
    for _ in range(times):
        state, _ = step(state, x, targets(x))


def given_away(kind):
    _, step, state, (x, *_) = begun(kind, donate=True)
    for _ in range(2):
        step(state, x, targets(x))


def init(tx, shape=(3, 2)):
    return tx.init({"w": torch.ones(shape)})


def continued(members):
    """Go on with the state of so many members."""
    tx = for_members(optim.adam(0.1))
    tx.update({"w": torch.ones(3, 2)}, init(tx, (members, 2)))


def counted_in_python():
    """Update by an optimizer that returns a number of Python."""
    tx = optim.GradientTransformation(lambda params: (), lambda grads, *_: (grads, 1))
    for_members(tx).update({"w": torch.ones(3, 2)}, for_members(tx).init({}))


NESTED = optim.chain(for_members(optim.clip_by_global_norm(1.0)), SGD)
MINUS_ONE = torch.tensor(-1)
REFUSED = [
    (lambda: train_step("mse", SGD), r"^train_step\(loss='mse'\): expected a function"),
    (lambda: ensemble_train_step("mse", SGD), r"^ensemble_train_step\(loss='mse'\): "),
    (lambda: ensemble_train_step(SAMPLE, SGD), "a loss of a whole batch, got one of"),
    (lambda: train_step(SAMPLE, SGD, has_aux=True), "sample_loss, which has no aux"),
    (lambda: stepped("samples", state=lambda s: torch.ones(2)), "got a Tensor. A step"),
    (lambda: begun("samples")[1](begun("samples")[2], *[torch.ones(0, 5)] * 2),
     r"train_step\(loss\)\(state, \*batch\): expected a sample at least, got a batch"),
    (lambda: stepped("private", 3, chosen=plan(steps=2)), "fewer than the 2 steps"),
    (lambda: stepped("private", state=lambda s: s._replace(step=MINUS_ONE)),
     r"fewer than the 12 steps .* got -1"),
    (lambda: TrainState.create(SGD, {}, {}), "at least one parameter"),
    (lambda: given_away("train"), "expected at least one parameter, got none"),
    (lambda: given_away("ensemble"), "expected at least one parameter, got none"),
    # Scales and policies.
    (lambda: train_step(mean, SGD, loss_scale=8.0), rf"^train_step\(.*=8.0\): {SCALE}"),
    (lambda: private_step(SAMPLE, SGD, plan(), loss_scale=8.0),
     rf"^private_step\(loss_scale=8.0\): {SCALE}"),
    (lambda: STEP(SGD, loss_scale=8.0), rf"ensemble_train_step.loss_sc.*{SCALE}"),
    (lambda: TrainState.create(SGD, PARAMS, {}, loss_scale=8.0),
     rf"^TrainState.create\(loss_.*{SCALE}"),
    (lambda: CREATE(SGD, PARAMS, {}, loss_scale=8.0), "TrainState.create.loss_scale=8"),
    (lambda: train_step(mean, SGD, policy=torch.half), "expected a string, got a dtyp"),
    (lambda: private_step(SAMPLE, SGD, plan(), policy="mixed_float8"), "dtypes among"),
    (lambda: stepped("ensemble", shared=["0.*"], loss_scale=StaticLossScale(2.0),
                     state=lambda s: s._replace(params={
                         n: p[0] if n[0] == "0" else p for n, p in s.params.items()})),
     "expected one of the two, got both"),
    # Members.
    (lambda: STEP(SGD, strategy="fast"), "strategy='fast'.*expected one of"),
    (lambda: STEP(SGD, shared="a"), STRING),
    (lambda: STEP(for_members(SGD), shared=["a"]), "expected the patterns of for_mem"),
    (lambda: STEP(OTHERS, shared=["a"]), r"got others: \['b'\] there"),
    (lambda: CREATE(OTHERS, *SHARED, shared=["a"]), r"got others: \['b'\] there"),
    (lambda: CREATE(SGD, PARAMS, BUFFERS, shared=["typo"]),
     r"create\('typo'\): .* matches a parameter or buffer, got none"),
    (lambda: for_members(SGD, lr=torch.ones(3)), "for_members.transformation, lr=.*is"),
    (lambda: for_members(optim.sgd, lr=torch.ones(3), shared=["a"]),
     "expected shared_tx, the transformation"),
    (lambda: init(for_members(optim.sgd, lr=-1.0)), "lr=-1.0"),
    (lambda: init(for_members(SGD), ()), "members on the first axis of 'w', got shape"),
    (lambda: init(for_members(NESTED), (3, 3, 2)), "a single member.*Wrap the whole"),
    (lambda: continued(1), r"3 members as in 'w'.*state 1', got shape \(1,\)"),
    (counted_in_python, "expected tensors in .* and state, got a int"),
    # Early stopping.
    (lambda: STOPPING(patience=0), "patience=0.*whole number >= 1"),
    (lambda: EarlyStopping.create(0, patience=1), "members=0.*whole number >= 1"),
    (lambda: STOPPING(min_delta=-1), "min_delta=-1.*>= 0"),
    (lambda: STOPPING().update(torch.ones(2)), r"shape \(2,\).*one value a member"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        call()


def with_aux(params, buffers, x):
    return mean(params, buffers, x), {}


NO_SCALARS = [
    (lambda p, b, x: p["w"] * x[0], {}, r"without .* got torch.float32 \(2,\)\."),
    (lambda p, b, x: (p["w"] > x).sum(), {}, r"a real tensor .* torch.int64 \(\)\."),
    (lambda p, b, x: mean(p, b, x) * 1j, {}, r"a real tensor .* torch.complex"),
    (lambda p, b, x: 1.0, {}, "without dimensions .* got float"),
    (mean, {"has_aux": True}, r"\(scalar, aux\), got a Tensor\."),
    (with_aux, {}, "without dimensions .* got tuple"),
]


@pytest.mark.parametrize(("loss", "options", "message"), NO_SCALARS)
@pytest.mark.parametrize("strategy", [None, "loop", "vmap", "hybrid"])
def test_a_loss_that_is_no_scalar_is_refused_when_called(
    strategy, loss, options, message
):
    if strategy is None:
        name, (step, state) = "train", of_loss("train", loss, **options)
    else:
        step, state = of_loss("ensemble", loss, strategy=strategy, **options)
        name = "ensemble_grad"
    with pytest.raises(ValueError, match=rf"^{name}.*\(loss.*expected.*{message}"):
        step(state, torch.ones(2, 2))


def test_a_refused_step_changes_nothing():
    _, step, state, (x, *_) = begun("ensemble")
    before = vgrad.tree.map_tensors(torch.clone, state)
    with pytest.raises((RuntimeError, ValueError), match="size|batch"):
        step(state, x, targets(x)[:, :2])
    assert_exact(state, before, 0)
