"""What is easily mistaken for a loss, an optimizer or a plan is refused at once."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad import distributed, dp, ensemble, optim, training
from vgrad.precision import autocasting

MODEL = nn.Linear(2, 1)
FMODEL, PARAMS, BUFFERS = vgrad.make_functional_with_buffers(MODEL)
LOSS = vgrad.sample_loss(FMODEL, F.mse_loss)
BATCH_LOSS = vgrad.batch_loss(FMODEL, F.mse_loss)
TX = optim.sgd(0.1)
PLAN = dp.Plan(10, 0.5, 1.0, 1.0, 10, 1e-5)
SENSITIVITY = vgrad.Sensitivity(0.2)
SGD = torch.optim.SGD(MODEL.parameters())

OF_A_SAMPLE = {
    "per_sample_grad": vgrad.per_sample_grad,
    "per_sample_norm": vgrad.per_sample_norm,
    "per_sample_gram": vgrad.per_sample_gram,
    "per_sample_projection": partial(vgrad.per_sample_projection, dim=2, seed=0),
    "weighted_grad": vgrad.weighted_grad,
    "clipped_grad": partial(vgrad.clipped_grad, max_norm=1.0),
    "gradient_moments": vgrad.gradient_moments,
    "ensemble_per_sample_grad": ensemble.ensemble_per_sample_grad,
    "ensemble_clipped_grad": partial(ensemble.ensemble_clipped_grad, max_norm=1.0),
    "private_step": lambda loss: training.private_step(loss, TX, PLAN, policy="f32"),
}
OF_A_BATCH = {
    "train_step": lambda loss: training.train_step(loss, TX, policy="f32"),
    "ensemble_train_step": lambda loss: training.ensemble_train_step(loss, TX),
    "ensemble_grad": vgrad.ensemble_grad,
}


@pytest.mark.parametrize("function", [*OF_A_SAMPLE, *OF_A_BATCH])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (MODEL, "got a module, Linear. Split the model by fmodel, params, buffers = "),
        (nn.MSELoss(), "got a module, MSELoss"),
        (FMODEL, r"got a functional model, whose output is no loss. Pass \w+_loss\("),
        (
            1.0,
            r"=1.0\): expected a function loss\(params, buffers, \*(sample|batch)\), ",
        ),
        ("other", r"got one of .*. Make it with \w+_loss"),
    ],
)
def test_what_is_no_loss_of_this_kind_is_refused(function, loss, message):
    if loss == "other":
        if function == "train_step":
            return  # which takes both
        loss = BATCH_LOSS if function in OF_A_SAMPLE else LOSS
    message = rf"^{function}\(loss.*{message}"
    with pytest.raises(TypeError, match=message):
        (OF_A_SAMPLE | OF_A_BATCH)[function](loss)


@pytest.mark.parametrize("make", [vgrad.sample_loss, vgrad.batch_loss])
def test_a_loss_takes_a_model_that_has_been_split(make):
    message = r"_loss\(fmodel\): expected a functional model, got"
    with pytest.raises(TypeError, match=message):
        make(MODEL, F.mse_loss)


TAKE_TX = {
    "train_step": partial(training.train_step, BATCH_LOSS),
    "private_step": lambda tx: training.private_step(LOSS, tx, PLAN),
    "ensemble_train_step": partial(training.ensemble_train_step, BATCH_LOSS),
    "TrainState.create": lambda tx: training.TrainState.create(tx, PARAMS, BUFFERS),
    "EnsembleState.create": lambda tx: training.EnsembleState.create(tx, PARAMS, {}),
    "step": lambda tx: optim.step(tx, PARAMS, {}, PARAMS),
    "as_torch": lambda tx: optim.as_torch(tx, PARAMS),
    "chain": lambda tx: optim.chain(optim.zero_nans(), tx),
}


@pytest.mark.parametrize("function", TAKE_TX)
@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            SGD,
            r"got an optimizer of torch, SGD. Pass, for example, vgrad.optim.sgd",
        ),
        (optim.sgd, r"got a function. Call it: sgd\(lr"),
        (None, r"got a NoneType. Pass, for example, vgrad.optim.sgd\(0.1\)"),
    ],
)
def test_what_is_no_transformation_is_refused(function, tx, message):
    message = rf"^{function}\(tx\): expected a transformation of vgrad.optim, {message}"
    with pytest.raises(TypeError, match=message):
        TAKE_TX[function](tx)


SUMS = r"add_gaussian_noise\(sums\): expected a dictionary of tensors by name"
STATE = r"Plan.sampler\(state\): expected a state with a key and a step"
KEY = dp.secret_key()
RUN = {"noise_multiplier": 1.0, "key": KEY, "step": 0}
REFUSED = [
    (
        lambda: vgrad.for_members(SGD),
        r"for_members\(tx\): .* got an optimizer of torch",
    ),
    (
        lambda: training.private_step(LOSS, TX, None),
        r"private_step\(plan\): expected a dp.Plan, got a NoneType. Make one with",
    ),
    (lambda: PLAN.sampler({"key": 1, "step": 2}), STATE),
    (lambda: PLAN.sampler(["key", "step"]), STATE),
    (lambda: dp.add_gaussian_noise(torch.zeros(3), SENSITIVITY, **RUN), SUMS),
    (lambda: dp.add_gaussian_noise([torch.zeros(3)], SENSITIVITY, **RUN), SUMS),
    (lambda: PLAN.add_noise([torch.zeros(3)], SENSITIVITY, key=KEY, step=0), SUMS),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_arguments_of_privacy_and_members_are_refused(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_a_scheduler_is_told_why_there_is_no_rate_also_after_loading():
    optimizer = optim.as_torch(optim.lion(1e-3), {"w": nn.Parameter(torch.ones(1))})
    optimizer.load_state_dict(optimizer.state_dict())
    message = r"\[\"lr\"\]: expected a transformation whose rate .* inject_hyperparams"
    with pytest.raises(ValueError, match=message):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(KeyError, match="betas"):
        optimizer.param_groups[0]["betas"]


def test_float16_on_a_cpu_is_told_once():
    autocasting.warn_slow.cache_clear()  # other tests have seen it
    x, y = torch.ones(3, 2), torch.ones(3, 1)
    step = training.private_step(LOSS, TX, PLAN, policy="mixed_float16")
    state = training.TrainState.create(TX, PARAMS, BUFFERS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            state, _ = step(state, x, y)
    (warning,) = [each for each in told if "autocast" in str(each.message)]
    assert "float16 on a CPU" in str(warning.message)
    assert "mixed_bfloat16" in str(warning.message)


@pytest.mark.parametrize("make", [vgrad.sample_loss, vgrad.batch_loss])
@pytest.mark.parametrize(
    ("criterion", "kind"),
    [("cross_entropy", "str"), (3, "int"), (nn.MSELoss, "type"), ([F.mse_loss], "lis")],
)
def test_what_is_no_criterion_is_refused(make, criterion, kind):
    message = rf"{make.__name__}\(criterion\): expected a function of output and target"
    with pytest.raises(TypeError, match=rf"{message}.* got a {kind}"):
        make(FMODEL, criterion)


def test_steps_without_a_state_are_refused():
    x, y = torch.ones(3, 2), torch.ones(3, 1)
    ensemble_step = training.ensemble_train_step(BATCH_LOSS, TX)
    private = training.private_step(LOSS, TX, PLAN)
    plain = training.train_step(BATCH_LOSS, TX)
    state = training.TrainState.create(TX, PARAMS, BUFFERS)
    stacked = {name: torch.stack([p, p]).detach() for name, p in PARAMS.items()}
    members = training.EnsembleState.create(TX, stacked, {})
    with distributed.single_process_mesh("dp") as mesh:
        with pytest.raises(TypeError, match=r"data_parallel.* expected a TrainState, "):
            distributed.data_parallel(private, mesh)(x, y)
    for step in (private, plain, ensemble_step):
        kind = "EnsembleState" if step is ensemble_step else "TrainState"
        other = state if step is ensemble_step else members
        for make in (lambda step: step, vgrad.compile):
            message = (
                rf"\(state, \*batch\): expected a {kind}, as {kind}.create makes it, "
            )
            for given in (x, dict(PARAMS), other):
                got = f"got a {type(given).__name__}"
                with pytest.raises(TypeError, match=message + got):
                    make(step)(given, x, y)


@pytest.mark.parametrize(
    "number", [np.int64(3), torch.tensor(3)], ids=["numpy", "torch"]
)
def test_whole_numbers_of_numpy_and_torch_are_those_of_python(number):
    """The same results as of an int, and no such number in them."""
    key = dp.secret_key(seed=0)
    x = torch.arange(10.0).reshape(5, 2)
    data = (x, x[:, :1])
    sums = {"w": torch.zeros(2)}
    tree = {"w": torch.arange(8.0).reshape(4, 2)}

    def everything(n):
        plan = dp.Plan(10, 0.5, 1.0, 1.0, n, 1e-5)
        assert type(plan.steps) is int
        yield plan
        yield dp.Plan(n, 0.5, 1.0, 1.0, 4, 1e-5)
        yield plan.sample(key=key, step=n)
        yield plan.epsilon(n)
        yield dp.epsilon(sampling_rate=0.5, noise_multiplier=1.0, steps=n, delta=1e-5)
        noise = {"noise_multiplier": 1.0, "key": key, "step": n, "member": n}
        yield dp.add_gaussian_noise(sums, vgrad.Sensitivity(1.0), **noise)
        yield [*dp.PoissonBatchSampler(n, 0.5, 4, key=key, start=n)]
        yield dp.secret_key(seed=n, member=n)
        yield vgrad.per_sample_grad(LOSS, chunk_size=n)(PARAMS, BUFFERS, *data)
        yield vgrad.per_sample_projection(LOSS, n, seed=n)(PARAMS, BUFFERS, *data)
        yield ensemble.bootstrap_indices(n, 5, seed=n)
        yield ensemble.fold_indices(n, 7, seed=n)
        yield ensemble.member_seed(n, n)
        yield ensemble.member(tree, n)
        yield training.EarlyStopping.create(n, patience=n)
        yield optim.schedules.cosine_with_restarts(1.0, 4, T_mult=n)(torch.arange(9))

    for found, expected in zip(everything(number), everything(3), strict=True):
        assert type(found) is type(expected)
        leaves, others = (vgrad.tree.tree_leaves(each) for each in (found, expected))
        for one, other in zip(leaves, others, strict=True):
            assert type(one) is type(other)
            if torch.is_tensor(one):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
            else:
                assert one == other
