"""What `torch.optim` and this package have in common, and torch's groups by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from vgrad import checks
from vgrad.optim.averaging import AverageState
from vgrad.optim.base import GradientTransformation
from vgrad.optim.methods import (
    adafactor,
    adam,
    adaptive,
    muon,
    nadam_radam_adamax,
    rprop,
    sgd,
)
from vgrad.optim.transforms import ScheduleState
from vgrad.typing import Params

Entry = dict[str, Any]
"""What `torch.optim` keeps for one parameter, by torch's names."""

OPTIMIZERS: dict[type[Optimizer], Callable[..., GradientTransformation]] = {
    torch.optim.SGD: sgd.sgd,
    torch.optim.Adam: adam.adam,
    torch.optim.AdamW: adam.adamw,
    torch.optim.NAdam: nadam_radam_adamax.nadam,
    torch.optim.RAdam: nadam_radam_adamax.radam,
    torch.optim.Adamax: nadam_radam_adamax.adamax,
    torch.optim.Adagrad: adaptive.adagrad,
    torch.optim.Adadelta: adaptive.adadelta,
    torch.optim.RMSprop: adaptive.rmsprop,
    torch.optim.Rprop: rprop.rprop,
    torch.optim.ASGD: sgd.asgd,
    torch.optim.Adafactor: adafactor.adafactor,
    torch.optim.Muon: muon.muon,
}
"""The optimizers that exist on both sides."""

_ADAM = {"mean": "exp_avg", "square": "exp_avg_sq"}
FIELDS: dict[type, dict[str, str]] = {
    adam.AdamState: _ADAM,
    adam.AmsgradState: {**_ADAM, "largest": "max_exp_avg_sq"},
    nadam_radam_adamax.NadamState: {**_ADAM, "product": "mu_product"},
    nadam_radam_adamax.AdamaxState: {"mean": "exp_avg", "largest": "exp_inf"},
    adaptive.RssState: {"total": "sum"},
    adaptive.AdadeltaState: {"square": "square_avg", "moved": "acc_delta"},
    adaptive.RmsState: {"square": "square_avg"},
    adaptive.StddevState: {"mean": "grad_avg", "square": "square_avg"},
    rprop.RpropState: {"previous": "prev", "size": "step_size"},
    AverageState: {"average": "ax"},
    adafactor.FactoredState: {
        "rows": "row_var",
        "columns": "col_var",
        "squares": "variance",
    },
    sgd.TraceState: {"momentum": "momentum_buffer"},
    muon.MuonState: {"mean": "momentum_buffer"},
    ScheduleState: {},
}
"""torch's names for the fields of each state; `count` is `step` in all of them."""


class Group(NamedTuple):
    """A group of parameters: its transformation, and what torch holds by name."""

    tx: GradientTransformation
    options: dict[str, Any]
    params: Params
    entries: dict[str, Entry]
    settings: dict[str, Any]


def groups_of(
    function: str, optimizer: Optimizer, params: Mapping[str, Tensor] | None
) -> list[Group]:
    """Collect the groups that hold parameters to be trained."""
    if type(optimizer) not in OPTIMIZERS:
        known = ", ".join(kind.__name__ for kind in OPTIMIZERS)
        raise TypeError(
            f"{function}(optimizer of class {type(optimizer).__name__}): expected one "
            f"of {known}, of torch.optim itself."
        )
    given: dict[int, str] = {}
    if params is not None:
        checks.dictionaries(function, params=params)
        for name, param in params.items():
            given.setdefault(id(param), name)
    seen: set[str] = set()
    found = []
    for number, settings in enumerate(optimizer.param_groups):
        names = settings.get("param_names")
        if params is not None:
            names = [given.get(id(param)) for param in settings["params"]]
        elif names is None:
            raise ValueError(
                f"{function}(params=None): expected the names of the parameters, got "
                f"an optimizer made without. Pass dict(model.named_parameters())."
            )
        trained, entries = {}, {}
        for name, param in zip(names, settings["params"], strict=True):
            entry = optimizer.state.get(param, {})
            entry = {key: value for key, value in entry.items() if value is not None}
            if not param.requires_grad and not steps_of(entry):
                continue
            if name is None or name in seen:
                got = "no name" if name is None else f"{name!r} a second time"
                raise ValueError(
                    f"{function}(params): expected one name for each parameter of the "
                    f"optimizer, got {got} for one of shape {tuple(param.shape)} in "
                    f"group {number}."
                )
            seen.add(name)
            trained[name], entries[name] = param, entry
        if trained:
            tx, options = _transformation(function, optimizer, settings)
            found.append(Group(tx, options, trained, entries, settings))
    if not found:
        raise ValueError(
            f"{function}(optimizer): expected parameters that require gradients, got "
            f"none."
        )
    return found


def _transformation(
    function: str, optimizer: Optimizer, settings: dict[str, Any]
) -> tuple[GradientTransformation, dict[str, Any]]:
    """Make the transformation of a group, and return its options as numbers."""
    if settings.get("differentiable"):
        raise ValueError(
            f"{function}(optimizer with differentiable=True): expected False, since "
            f"the graph of its steps would be cut. Steps of vgrad.optim are "
            f"differentiable from the first one on."
        )
    make = OPTIMIZERS[type(optimizer)]
    if make is adam.adam and settings["decoupled_weight_decay"]:
        make = adam.adamw
    known = inspect.signature(make).parameters
    options = {key: _plain(settings[key]) for key in known if key in settings}
    return make(**options), options


def fields_of(state: Any) -> list[tuple[str, str, Any]]:
    """List field, name in torch and value of a state of one transformation."""
    if state == ():
        return []
    named = {"count": "step", **FIELDS[type(state)]}
    return [(field, named[field], held) for field, held in state._asdict().items()]


def steps_of(entry: Entry) -> float:
    """Return the steps of a parameter; where torch does not count them, one for any."""
    return float(entry["step"]) if "step" in entry else float(bool(entry))


def asgd_rate(options: dict[str, Any], steps: float) -> float:
    """Return the rate of ASGD after a number of steps."""
    lr = options["lr"]
    return lr / ((1 + options["lambd"] * lr * steps) ** options["alpha"])


def _plain(value: Any) -> Any:
    """Turn tensors among hyperparameters into numbers."""
    if isinstance(value, tuple):
        return tuple(_plain(each) for each in value)
    return value.detach().item() if isinstance(value, Tensor) else value
