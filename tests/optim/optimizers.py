"""Every optimizer and every transformation around one, made from its numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.optim.problems import matrices, perceptron
from tests.tables import rows
from vgrad import optim
from vgrad.optim import GradientTransformation, adam, adamw, sgd


@dataclass(frozen=True)
class Case:
    """An optimizer as a function of its numbers, each of which may be a tensor."""

    make: Callable[..., GradientTransformation]
    numbers: dict[str, Any]
    """By name: the values of three members in a list, or a tuple of such lists."""
    problem: Callable = perceptron
    outcome: Callable = lambda params, state: params
    """What the numbers move."""
    averages: bool = False
    """Whether it averages parameters, which count although they have no gradient."""
    smooth: bool = True
    """Whether it can be differentiated: rounding to bfloat16 cannot."""
    compiles: bool = True
    """Whether it is compiled with the others; else they run the same code, or alone."""
    adapts: bool = True
    """Whether it can be made an optimizer of torch."""

    def of(self, member: int = 0) -> dict[str, Any]:
        return each_list(lambda column: column[member], self.numbers)

    def tx(self, member: int = 0) -> GradientTransformation:
        return self.make(**self.of(member))


def each_list(function, tree):
    return pytree.tree_map(function, tree, is_leaf=lambda node: isinstance(node, list))


LR, DECAY, EPS = [0.01, 0.1, 0.001], [0.1, 0.0, 0.2], [1e-4, 1e-8, 1e-2]
BETAS = ([0.9, 0.5, 0.8], [0.99, 0.9, 0.7])
SLOW_BETAS = (BETAS[0], [0.999, 0.9, 0.5])
ADAM = dict(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
MUON = dict(lr=[0.02, 0.1, 0.01], weight_decay=[0.2, 0.1, 0.4], momentum=BETAS[0])
FREE = dict(lr=[0.02, 0.1, 0.2], weight_decay=DECAY, weight_lr_power=[1.5, 2.0, 1.0])
LIKE = dict(compiles=False)
DECOUPLED = dict(decoupled_weight_decay=True)
OPTIMIZERS = {
    "sgd": Case(sgd, dict(lr=LR), **LIKE),
    "sgd, dampened": Case(sgd, dict(
        lr=LR, momentum=[0.9, 0.5, 0.0], dampening=[0.5, 0.0, 0.9], weight_decay=DECAY
    )),
    "sgd, nesterov": Case(
        partial(sgd, nesterov=True, maximize=True), dict(lr=LR, momentum=BETAS[0])
    ),
    "adam": Case(adam, ADAM),
    "adam, amsgrad": Case(partial(adam, amsgrad=True), ADAM),
    "adamw": Case(adamw, ADAM, **LIKE),
    "adamw, amsgrad": Case(partial(adamw, amsgrad=True, maximize=True), ADAM, **LIKE),
    "nadam": Case(optim.nadam, ADAM | dict(momentum_decay=[4e-3, 0.1, 0.0])),
    "nadam, decoupled": Case(partial(optim.nadam, **DECOUPLED), ADAM, **LIKE),
    "radam": Case(optim.radam, ADAM | dict(betas=SLOW_BETAS)),
    "radam, decoupled": Case(partial(optim.radam, **DECOUPLED), ADAM, **LIKE),
    "adam_bc": Case(optim.adam_bc, dict(
        lr=LR,
        deviation=[0.1, 0.0, 1.0],
        betas=BETAS,
        floor=[1e-4, 1e-8, 1e-2],
        weight_decay=DECAY,
    )),
    "adamax": Case(partial(optim.adamax, maximize=True), ADAM),
    "adagrad": Case(optim.adagrad, dict(
        lr=LR, lr_decay=DECAY, initial_accumulator_value=DECAY, eps=EPS
    )),
    "adadelta": Case(optim.adadelta, dict(lr=LR, rho=BETAS[0], eps=EPS)),
    "rmsprop": Case(
        partial(optim.rmsprop, maximize=True), dict(lr=LR, alpha=BETAS[1], eps=EPS)
    ),
    "rmsprop, centered": Case(
        partial(optim.rmsprop, centered=True),
        dict(lr=LR, alpha=BETAS[1], eps=EPS, momentum=BETAS[0]),
    ),
    "rprop": Case(optim.rprop, dict(
        lr=LR,
        etas=([0.5, 0.3, 0.9], [1.2, 1.5, 3.0]),
        step_sizes=([1e-6, 1e-3, 0.0], [50.0, 0.1, 0.01]),
    )),
    "asgd": Case(
        optim.asgd,
        dict(lr=LR, lambd=DECAY, alpha=BETAS[0], t0=[2.0, 0.0, 1e6]),
        averages=True,
    ),
    "lion": Case(optim.lion, dict(
        lr=LR, betas=([0.8, 0.9, 0.5], [0.9, 0.8, 0.7]), weight_decay=DECAY
    )),
    "lamb": Case(optim.lamb, ADAM),
    "lars": Case(optim.lars, dict(
        lr=[2.0, 1.0, 4.0],
        momentum=[0.8, 0.5, 0.9],
        weight_decay=DECAY,
        trust_coefficient=[0.01, 0.002, 0.02],
    )),
    "adafactor": Case(optim.adafactor, dict(
        lr=[0.05, 0.01, 0.1],
        beta2_decay=[-0.7, -0.5, -0.8],
        eps=([1e-4, 1e-8, 1e-2], [1e-2, 1e-3, 0.1]),
        d=[2.0, 1.0, 3.0],
    )),
    "muon": Case(
        partial(optim.muon, dtype=torch.float64), MUON | dict(eps=EPS), matrices, **LIKE
    ),
    "muon, rounded": Case(optim.muon, MUON, matrices, smooth=False, **LIKE),
    "schedule_free_sgd": Case(optim.schedule_free_sgd, FREE | dict(momentum=BETAS[0])),
    "schedule_free_adamw": Case(
        optim.schedule_free_adamw, FREE | dict(betas=BETAS, eps=EPS)
    ),
}  # fmt: skip

AROUND = r"""
    clip_by_value | chain(clip_by_value(0.1 * h), sgd(0.1))
    clip_by_global_norm | chain(clip_by_global_norm(0.2 * h), sgd(0.1))
    clip_by_block_rms | chain(clip_by_block_rms(0.1 * h), sgd(0.1))
    adaptive_grad_clip | chain(adaptive_grad_clip(0.1 * h), sgd(0.1))
    centralize | chain(centralize(), sgd(0.1 * h))
    zero_nans | chain(zero_nans(), sgd(0.1 * h))
    scale | scale(-0.1 * h)
    scale, scheduled | scale(lambda t: -h * 0.1 / (t.double() + 1))
    masked | chain(masked(trace(0.5 * h), ["*.weight"]), sgd(0.1))
    masked, decay | chain(add_decayed_weights(0.1 * h, mask=["*.weight"]), sgd(0.1))
    partition | partition({"*.bias": sgd(0.1 * h), "*": adamw(0.1 * h)})
    set_to_zero | chain(set_to_zero(["*.bias"]), adam(0.1 * h))
    apply_if_finite | apply_if_finite(adam(0.1 * h), max_consecutive_errors=3)
    multi_steps | multi_steps(adam(0.1 * h), 2)
    ema | chain(ema(0.5 * h), sgd(0.1))
    ema_parameters | chain(sgd(0.1), ema_parameters(0.5 * h))
    polyak_average | chain(sgd(0.1 * h), polyak_average(start=1))
    lookahead | lookahead(adam(0.1), sync_period=2, slow_step_size=0.5 * h)
    inject_hyperparams | inject_hyperparams(adamw, lr=0.1 * h, betas=(0.5 * h, 0.9), \
        weight_decay=lambda t: h / (t.double() + 1))
    scale_then_privatize | scale_then_privatize(adam(0.1 * h), decay=0.5 * h)
    reduce_on_plateau | reduce_on_plateau(adam, 0.1 * h)[0]
    add_noise | chain(add_noise(0.1 * h, 0.55 * h, seed=7), sgd(0.1))
"""
"""Transformations around others, made from one number, about one."""

AVERAGED = dict(
    averages=True, outcome=lambda params, state: optim.averaged_parameters(state)
)
for _name, _text in rows(AROUND):
    _averaged = _name in ("ema_parameters", "polyak_average")
    _options = AVERAGED if _averaged else {"adapts": _name != "scale_then_privatize"}
    _make = eval(f"lambda h: {_text}", vars(optim))
    OPTIMIZERS[_name] = Case(_make, dict(h=[1.0, 0.5, 1.5]), **_options)


def each(**fields):
    """Every case, or those of which a field says so."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, id=name)
            for name, case in OPTIMIZERS.items()
            if all(getattr(case, field) == value for field, value in fields.items())
        ],
    )


every = each()


# The optimizers that torch has, too.

WITHOUT = {torch.optim.Optimizer, torch.optim.SparseAdam, torch.optim.LBFGS}
TORCH = {
    theirs.__name__.lower(): (getattr(optim, theirs.__name__.lower()), theirs)
    for theirs in vars(torch.optim).values()
    if isinstance(theirs, type) and theirs not in WITHOUT
}
"""Optimizers of ours and of torch; a new one of torch has to be made or left out."""

MORE = dict(betas=(0.8, 0.9), eps=1e-6)
# Rates and options, to be multiplied by weight decay and direction; the last ones are
# the furthest from the defaults. Long steps are left out where a change of the start by
# one rounding changes torch by more than 1e-12.
OPTIONS = {
    "sgd": [dict(lr=1e-4), dict(lr=1e-3, dampening=0.5), dict(lr=1e-4, momentum=0.9),
            dict(lr=1e-3, momentum=0.9, dampening=0.5),
            dict(lr=1e-4, momentum=0.9, nesterov=True)],
    "adam": [dict(), dict(lr=1e-2, **MORE), dict(amsgrad=True, **MORE)],
    "adamw": [dict(), dict(lr=1e-2, **MORE), dict(amsgrad=True, **MORE)],
    "nadam": [dict(lr=5e-3), dict(lr=2e-3, momentum_decay=0.1, **MORE),
              dict(lr=2e-3, **DECOUPLED),
              dict(lr=5e-3, momentum_decay=0.1, **DECOUPLED, **MORE)],
    "radam": [dict(lr=1e-3), dict(lr=1e-4, **MORE), dict(lr=1e-3, **DECOUPLED),
              dict(lr=1e-3, **DECOUPLED, **MORE)],
    "adamax": [dict(lr=1e-2), dict(lr=2e-3, betas=(0.8, 0.9), eps=1e-3)],
    "adagrad": [dict(lr=0.1),
                dict(lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.5, eps=1e-3)],
    "adadelta": [dict(lr=1.0), dict(lr=0.1, rho=0.5, eps=1e-7)],
    "rmsprop": [dict(lr=1e-2), dict(lr=1e-3, momentum=0.9, alpha=0.9, eps=1e-4),
                dict(lr=1e-3, centered=True),
                dict(lr=1e-3, centered=True, momentum=0.9, alpha=0.9, eps=1e-4)],
    "rprop": [dict(lr=1e-2), dict(lr=1e-3, etas=(0.3, 1.5), step_sizes=(1e-4, 0.02))],
    "asgd": [dict(lr=1e-3), dict(lr=1e-4, lambd=0.1, alpha=0.5, t0=20.0)],
    "adafactor": [dict(), dict(lr=0.005, d=2.0), dict(lr=1e-3, beta2_decay=-0.5),
                  dict(eps=(1e-2, 0.5))],
    "muon": [dict(lr=0.02, momentum=0.5), dict(lr=0.02, nesterov=False),
             dict(lr=0.02, adjust_lr_fn="match_rms_adamw"),
             dict(lr=0.02, adjust_lr_fn="original", ns_steps=3, eps=0.1),
             dict(lr=0.02, ns_coefficients=(2.0, -1.5, 0.5))],
}  # fmt: skip
if torch.__version__ >= torch.torch_version.TorchVersion("2.15"):
    OPTIONS["muon"].append(dict(lr=0.02, adjust_lr_fn="spectral_unclamped"))

UNCOUNTED = [
    ("sgd", dict(weight_decay=0.1)),
    ("sgd", dict(momentum=0.9, nesterov=True)),
    ("rmsprop", dict(momentum=0.9, centered=True)),
    *((name, {}) for name in ("adadelta", "rprop", "adagrad")),
]
"""Optimizers whose numbers do not depend on the steps of a parameter."""
COUNTED = [
    ("sgd", dict(momentum=0.9, dampening=0.5)),
    ("adagrad", dict(lr_decay=0.5)),
    ("adamw", dict(amsgrad=True)),
    ("asgd", dict(lambd=0.1)),
    *((name, {}) for name in ("adam", "nadam", "radam", "adamax", "adafactor")),
]
