"""Arguments that are refused, and the words in which that is said."""

import math
import re
from functools import partial

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.optim.optimizers import every
from tests.optim.problems import double
from tests.tables import rows
from vgrad import optim
from vgrad.optim import adamw, masked, partition, schedules, sgd, step

noise = partial(optim.add_noise, eta=1.0, gamma=0.5, seed=0)
# What some have to be given besides.
BOUND = {
    "schedule_free": partial(optim.schedule_free, sgd()),
    "adaptive_grad_clip": partial(optim.adaptive_grad_clip, clipping=1.0),
    "apply_if_finite": partial(optim.apply_if_finite, sgd()),
    "multi_steps": partial(optim.multi_steps, sgd()),
    "lookahead": partial(optim.lookahead, sgd()),
    "reduce_on_plateau": partial(optim.reduce_on_plateau, sgd, lr=0.1),
    "add_noise": noise,
}
DECAYING = "sgd adam adamw nadam radam adamax adagrad adadelta rmsprop asgd lion lamb "
DECAYING += "lars adafactor muon schedule_free_sgd schedule_free_adamw"
FREE = "schedule_free_sgd schedule_free_adamw schedule_free"
WITH_EPS = "adam adamw nadam radam adamax adagrad adadelta rmsprop lamb muon "
WITH_BETAS = "adam adamw nadam radam adamax lamb lion schedule_free_adamw"
# Names, an argument of each, and what is expected of it.
RANGES = [
    (DECAYING + " rprop schedule_free reduce_on_plateau", dict(lr=-0.1), "lr >= 0"),
    (DECAYING, dict(weight_decay=-1), "weight_decay >= 0"),
    (WITH_EPS + "schedule_free_adamw", dict(eps=-1.0), "eps >= 0"),
    ("sgd", dict(lr=math.nan), "lr >= 0"),
    ("sgd rmsprop lars muon", dict(momentum=-1.0), "momentum >= 0"),
    ("nadam", dict(momentum_decay=-1), "momentum_decay >= 0"),
    ("adagrad", dict(lr_decay=-1), "lr_decay >= 0"),
    ("adagrad", dict(initial_accumulator_value=-1), "initial_accumulator_value >= 0"),
    ("adadelta", dict(rho=1.5), "0 <= rho <= 1"),
    ("rmsprop", dict(alpha=-0.5), "0 <= alpha"),
    ("rprop", dict(etas=(0.5, 1.0)), "0 < etas[0] < 1"),
    ("rprop", dict(step_sizes=(2.0, 1.0)), "0 <= step_sizes[0]"),
    ("asgd", dict(lambd=-1), "lambd >= 0"),
    ("asgd", dict(alpha=-1), "alpha >= 0"),
    ("asgd", dict(t0=-1), "t0 >= 0"),
    ("lars", dict(trust_coefficient=-1), "trust_coefficient >= 0"),
    ("adafactor", dict(beta2_decay=0.8), "beta2_decay <= 0"),
    ("adafactor", dict(d=0.5), "d >= 1"),
    ("muon", dict(adjust_lr_fn="rms"), "one of None, 'original', 'match_rms_adamw', "),
    ("orthogonalize", dict(ns_coefficients=(1.0, 2.0)), "three numbers"),
    ("orthogonalize", dict(ns_steps=100), "-1 < ns_steps < 100"),
    ("orthogonalize", dict(ns_steps=-1), "a whole number >= 0"),
    ("orthogonalize", dict(dtype=torch.int64), "a real floating-point dtype"),
    ("schedule_free_sgd", dict(momentum=-0.5), "0 <= momentum < 1"),
    (FREE, dict(weight_lr_power=-1), "weight_lr_power >= 0"),
    ("clip_by_value", dict(clip_value=0.0), "clip_value > 0"),
    ("clip_by_global_norm", dict(max_norm=-1.0), "max_norm > 0"),
    ("clip_by_block_rms", dict(threshold=math.nan), "threshold > 0"),
    ("adaptive_grad_clip", dict(clipping=0.0), "clipping > 0"),
    ("ema", dict(decay=1.0), "0 <= decay < 1"),
    ("ema_parameters", dict(decay=-0.1), "0 <= decay < 1"),
    ("polyak_average", dict(start=-1), "a whole number >= 0"),
    ("scale", dict(factor=math.inf), "a finite number"),
    ("schedule_free", dict(beta=1.0), "0 <= beta < 1"),
    ("adaptive_grad_clip", dict(eps=0.0), "eps > 0"),
    ("apply_if_finite", dict(max_consecutive_errors=-1), "a whole number >= 0"),
    ("multi_steps", dict(steps=0), "a whole number >= 1"),
    ("lookahead", dict(sync_period=0), "a whole number >= 1"),
    ("lookahead", dict(slow_step_size=0.0), "slow_step_size > 0"),
    ("reduce_on_plateau", dict(mode="least"), "one of 'min', 'max'"),
    ("reduce_on_plateau", dict(threshold_mode="both"), "one of 'rel', 'abs'"),
    ("reduce_on_plateau", dict(factor=1.0), "0 < factor < 1"),
    ("reduce_on_plateau", dict(patience=-1), "a whole number >= 0"),
    ("reduce_on_plateau", dict(cooldown=0.5), "a whole number >= 0"),
    ("reduce_on_plateau", dict(min_lr=-1.0), "min_lr >= 0"),
    ("add_noise", dict(eta=-1.0), "eta >= 0"),
    ("add_noise", dict(gamma=math.inf), "a finite number"),
    ("add_noise", dict(seed=-1), "a whole number >= 0"),
    ("add_noise", dict(seed=2**63), "-1 < seed < "),
]  # fmt: skip
PARAMS = {"w": torch.zeros(2), "b": torch.zeros(2)}
PLATEAU, OBSERVE = optim.reduce_on_plateau(sgd, 0.1)
injected, with_hyperparams = optim.inject_hyperparams, optim.with_hyperparams
RATE, FREE_SGD = injected(sgd, lr=1.0), optim.schedule_free_sgd()
AHEAD, MULTI = optim.lookahead(sgd()), optim.multi_steps(sgd(), 2)
ONE, SGD = schedules.constant(1.0), sgd().init(PARAMS)
# A call, and a part of what is said.
VALUES = r"""
    sgd(nesterov=True) | momentum=0.0, dampening=0.0): expected momentum > 0
    sgd(momentum=0.9, dampening=0.5, nesterov=True) | dampening=0.5): expected momentum
    adafactor(eps=(-1.0, 1e-3)) | adafactor(eps[0]=-1.0): expected eps[0] >= 0
    adafactor(eps=(None, -1.0)) | adafactor(eps[1]=-1.0): expected eps[1] >= 0
    injected(sgd, lr=-1.0) | sgd(lr=-1.0): expected lr >= 0
    partition({}) | partition({}): expected at least one group

    linear(1.0, torch.tensor([2, 3])) | linear(steps of shape (2,)): expected a number \
        or a tensor without dimensions. For one value per member, make the sched
    exponential(torch.ones(1), 0.5) | exponential(lr of shape (1,)): expected
    multi_step(1.0, [3, -1]) | multi_step(milestones[1]=-1): expected a whole
    join([ONE], [3]) | join(1 schedules, 1 boundaries): expected one of sched
    join([ONE, ONE], [0]) | join(boundaries[0]=0): expected a whole number >=
    join([ONE] * 3, [3, 3]) | join(boundaries=[3, 3]): expected them to incre
    piecewise_constant([1.0], [2]) | piecewise_constant(1 values, 1 boundaries): exp
    piecewise_constant([1.0, -2.0], [2]) | piecewise_constant(values[1]=-2.0): expected
    warmup(ONE, 0) | warmup(steps=0): expected a whole number >= 1.
    warmup(ONE, 3, start_factor=-1) | warmup(start_factor=-1): expected start

    multi_steps(sgd(), torch.tensor([2, 3])).update(PARAMS, MULTI.init(PARAMS)) \
        | hyperparameter of shape (2,)): expected
    chain(trace(0.9)).update(PARAMS, SGD) | chain(state of 3 parts): expected 1, as init
    partition({"*": sgd()}).update(PARAMS, ((), ()), PARAMS) \
        | chain(state of 2 parts): expected 1, as init of the same chain or partition
    RATE.update(PARAMS, injected(adam, eps=1.0).init({})) \
        | inject_hyperparams(state.hyperparams): expected the names of the model, \
          got missing: 'lr'; unexpected: 'eps'.
    with_hyperparams(RATE.init({}), eps=1.0) | with_hyperparams('eps'): expected names
    with_hyperparams(RATE.init({}), lr=torch.ones(2)) | with_hyperparams(lr of shape (2,
    with_hyperparams(injected(adam, betas=(0.9, 0.9)).init({}), betas=0.5) \
        | with_hyperparams(betas=0.5): expected a tuple of 2
    OBSERVE(PLATEAU.init(PARAMS), torch.ones(2)) | observe(value of shape (2,)): expect
    OBSERVE(SGD, 1.0) | observe(state with 0 plateaus): expected the state of one
    averaged_parameters(SGD) | averaged_parameters(state with 0 averages): expect
    evaluation_parameters(SGD, PARAMS) | evaluation_parameters(state): expected
    evaluation_parameters(FREE_SGD.init(PARAMS), {"w": 1}) | evaluation_parameters(par
    apply_updates(PARAMS, {"w": torch.zeros(2)}) \
        | apply_updates(updates): expected the names of the model, got missing: 'b'.
    AHEAD.update(PARAMS, AHEAD.init(PARAMS), {"w": 1}) \
        | lookahead(params): expected the names of the model, got missing: 'b'

    masked(sgd(), ["c*"]).init(PARAMS) \
        | masked('c*'): expected a pattern that matches a parameter, got none. \
          The names are 'b', 'w'.
    masked(sgd(), ("w", "c")).init(PARAMS) | masked('c'): expected a
    masked(sgd(), lambda name: False).init(PARAMS) \
        | expected a function that selects a parameter, got none. The names are 'b', 'w'
    set_to_zero(["c"]).init(PARAMS) | set_to_zero('c'): expected a pattern that
    partition({"w": sgd()}).init(PARAMS) | partition('b'): expected a group that select
    partition({"w": sgd(), "c": sgd(), "*": sgd()}).init(PARAMS) | partition('c'): expec
"""
KINDS = r"""
    adam("0.1") | adam(lr='0.1'): expected a number, got a
    rprop(lambda count: 0.1) | expected a number, got a function
    muon(ns_coefficients=(2.0, torch.tensor(-1.5), 0.5)) \
        | orthogonalize(ns_coefficients[1]=Tensor of torch.float32 ()): expected a numbe
    masked(sgd(), "*.weight") \
        | masked(selection='*.weight'): expected a list or tuple of patterns, \
          got a string. Write ['*.weight'].
    set_to_zero("w") | set_to_zero(selection='w'): expected a list
    set_to_zero(3) | set_to_zero(selection=3): expected a list or tuple of patter
    partition({3: sgd()}) | partition(key=3): expected a list or tuple
    partition({("w", 3): sgd()}) | partition(key=('w', 3)): expected patterns that are s
    add_decayed_weights(0.0, mask="w") | add_decayed_weights(mask='w'): expected a
    injected(sgd, momentum=0.9, nesterov=True) \
        | inject_hyperparams(nesterov=True): expected a number, a tensor, a schedule \
          or a tuple of these, got a bool. Bind it before: partial(make, nesterov=True).
    with_hyperparams(SGD, lr=0.1) | with_hyperparams(state): expected the state of injec
    constant("fast") | constant(lr='fast'): expected a number, got a str.
    join([ONE, 0.1], [3]) \
        | join(schedules[1]=0.1): expected a function of the step count, got a float. \
          For a number, use constant.
    warmup(torch.tensor(0.1), 3) | warmup(schedule=tensor(0.1000)): expected a
    trace(0.9).update(PARAMS, ()) | trace(state): expected the state that its init
    scale_by_adam().update(PARAMS, ()) | scale_by_adam(state): expected the state
"""
BETAS = [
    [
        f"optim.{name}(betas={betas})",
        f"{name}(betas[{bad}]={betas[bad]}): expected 0 <=",
    ]
    for name in WITH_BETAS.split()
    for bad, betas in enumerate([(1.0, 0.9), (0.9, -0.1)])
]
REFUSED = [(ValueError, *row) for row in rows(VALUES) + BETAS]
REFUSED += [(TypeError, *row) for row in rows(KINDS)]


@pytest.mark.parametrize(
    ("name", "argument", "expected"),
    [(name, *rest) for names, *rest in RANGES for name in names.split()],
)
def test_numbers_out_of_range_are_refused(name, argument, expected):
    ((key, value),) = argument.items()
    message = f"{name}({key}={value!r}): expected {expected}"
    with pytest.raises(ValueError, match=re.escape(message)):
        BOUND.get(name, getattr(optim, name))(**argument)


@pytest.mark.parametrize(("error", "call", "message"), REFUSED)
def test_bad_calls_are_refused(error, call, message):
    with pytest.raises(error, match=re.escape(message)):
        eval(call, {**vars(schedules), **vars(optim), **globals()})


# What does not fit the parameters.

DIRECTIONS = "nadam radam adamax adagrad rmsprop adadelta rprop lion"
MATRICES = {"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}
GRADS = {
    "trace": optim.trace(0.9),
    "muon": optim.muon(),
    "zero_nans": optim.zero_nans(),
    "masked": masked(sgd(), ["*"]),
    "partition": partition({"*": sgd()}),
    "multi_steps": optim.multi_steps(sgd(), 2),
    "ema": optim.ema(0.5),
}
BOTH = {
    "add_decayed_weights": optim.add_decayed_weights(0.1),
    "scale_by_trust_ratio": optim.scale_by_trust_ratio(),
    "adafactor": optim.adafactor(),
    "asgd": optim.asgd(lambd=0.0),
    "schedule_free": FREE_SGD,
    "adaptive_grad_clip": optim.adaptive_grad_clip(1.0),
    "ema_parameters": optim.ema_parameters(0.5),
    "polyak_average": optim.polyak_average(),
    "lookahead": optim.lookahead(sgd()),
}
REAL = {n: getattr(optim, n)() for n in DIRECTIONS.split()}
REAL |= {"scale_by_adam": optim.adam(), "amsgrad": adamw(amsgrad=True)}
REAL |= {"adafactor": optim.adafactor()}
MORE_REAL = {
    "orthogonalize": optim.muon(),
    "schedule_free_adamw": optim.schedule_free_adamw(),
    "add_noise": noise(seed=0),
}
"""By the function that speaks: what minds names, missing parameters or their kind."""


@pytest.mark.parametrize(("name", "tx"), (GRADS | BOTH | REAL).items())
def test_names_that_differ_are_listed(name, tx):
    a, b = MATRICES.values()
    message = rf"^{name}\(grads\).*missing: 'b'; unexpected: 'c'"
    with pytest.raises(ValueError, match=message):
        tx.update({"a": a, "c": b}, tx.init(MATRICES), MATRICES)


@pytest.mark.parametrize(("name", "tx"), BOTH.items())
def test_missing_parameters_are_named(name, tx):
    message = rf"^{name}\(params=None\): expected the parameters, got none"
    with pytest.raises(ValueError, match=message):
        tx.update(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
@pytest.mark.parametrize(("name", "tx"), (REAL | MORE_REAL).items())
def test_parameters_that_are_not_real_are_refused(name, tx, dtype):
    with pytest.raises(TypeError, match=rf"^{name}\(params\): expected real.*'w'"):
        tx.init({"w": torch.zeros(2, 2, dtype=dtype)})


def test_muon_takes_matrices_alone_and_names_the_way_out():
    params = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}
    message = r"orthogonalize\(params\): .*shape \(3,\) in 'b'.*vgrad.optim.partition"
    with pytest.raises(ValueError, match=message):
        optim.muon().init(params)
    with pytest.raises(ValueError, match=r"\(grads\): .*shape \(5, 2, 3\) in 'w'"):
        optim.orthogonalize().update({"w": torch.zeros(5, 2, 3), "b": None}, ())
    tx = partition({"w": optim.muon(), "*": adamw()})
    updated, _ = step(tx, params, tx.init(params), params)
    assert not any(p.any() for p in updated.values())


@every
def test_gradients_and_numbers_with_a_dimension_of_members_are_refused(case):
    params, _ = case.problem()
    grads = {name: torch.zeros(5, *p.shape).double() for name, p in params.items()}
    with pytest.raises(ValueError, match=r"expected (shape|matrices).*got"):
        step(case.tx(), grads, case.tx().init(params), params)
    for name, value in case.of().items():
        pairs = pytree.tree_map(lambda v: double([v, v]), value)

        def stepped(numbers):
            tx = case.make(**numbers)
            return step(tx, params, tx.init(params), params)

        with pytest.raises(ValueError, match=r"of shape \(2,\).*torch.vmap"):
            stepped(case.of() | {name: pairs})
