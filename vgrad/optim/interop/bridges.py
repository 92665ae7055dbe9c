"""Optimizers of `torch.optim`: read into transformations, and written back.

A training that runs on `torch.optim` goes on with the functional optimizer of the same
name, and the other way round, without a step being repeated or forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vgrad import checks
from vgrad.optim.base import GradientTransformation
from vgrad.optim.grouping import Key, partition
from vgrad.optim.interop.counterparts import (
    Entry,
    Group,
    fields_of,
    groups_of,
    steps_of,
)
from vgrad.optim.transforms import TraceState
from vgrad.tree import check_fit, state_dict
from vgrad.typing import Params, Tree

_UNCOUNTED = (torch.optim.SGD, torch.optim.Muon)
"""Optimizers that do not count their steps in torch."""


def from_torch(
    optimizer: Optimizer, params: Mapping[str, Tensor] | None = None
) -> tuple[GradientTransformation, Tree]:
    """Read an optimizer of `torch.optim` into `(tx, state)`, to go on where it stands.

    `tx` is the optimizer of the same name with the numbers of `param_groups` as they
    are now, without schedulers and hooks; several groups become a `partition` by name.
    The state holds copies. One step of it is one step of torch, to the rounding of
    float64 if everything is in float64; NAdam and ASGD keep numbers in the default
    dtype of torch. An optimizer that has not stepped gives a fresh state.

    Names are those the optimizer was made with, from `model.named_parameters()`, or
    those of `params`, a dictionary of the same tensors. Parameters that require no
    gradient and have not been stepped are left out, as
    `make_functional_with_buffers` leaves them out of its parameters.

    Raises:
        TypeError: there is no transformation for this class, subclasses included.
        ValueError: a parameter has no name or two places; parameters of one group took
            different numbers of steps, where steps count; an option was changed so that
            the state does not fit it; the optimizer is differentiable; the rate of ASGD
            was changed after the last step.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.named_parameters(), lr=0.1)
        >>> model(torch.ones(2)).sum().backward()
        >>> optimizer.step()
        >>> tx, state = from_torch(optimizer)
        >>> state[1].count, state[1].mean["bias"]
        (tensor(1), tensor([0.1000]))
    """
    groups = groups_of("from_torch", optimizer, params)
    with torch.no_grad():
        states = [_read(optimizer, group) for group in groups]
    if len(groups) == 1:
        return groups[0].tx, states[0]
    members = {_among(group.params): group.tx for group in groups}
    return partition(members), tuple(states)


def to_torch(
    state: Tree, optimizer: Optimizer, params: Mapping[str, Tensor] | None = None
) -> None:
    """Write a state into an optimizer of `torch.optim`, to go on there.

    The optimizer has to be of the kind, with the options and groups, of the
    transformation that made the state, as `from_torch` would read it: what a state does
    not tell, such as rates, is not written. It is changed as a whole or, after an
    error, not at all. `params` names the parameters as in `from_torch`. Their values
    are not part of the state: load them into the module.

    Tensors are copies in the dtype that torch keeps them in, so that what was read by
    `from_torch` comes back exactly. Adadelta, RMSprop and Rprop, and Adagrad without
    `lr_decay`, keep a `step` in torch that nothing depends on and that a state may not
    know; it is then left as it is.

    Raises:
        TypeError: there is no transformation for this class, subclasses included.
        ValueError: the state is one of another optimizer, or of other parameters; a
            parameter has no name or two places; the optimizer is differentiable.

    Example:
        >>> from vgrad.optim.base import step
        >>> from vgrad.optim.methods.optimizers import adam
        >>> model = torch.nn.Linear(2, 1)
        >>> tx, params = adam(0.1), dict(model.named_parameters())
        >>> _, state = step(tx, params, tx.init(params), params)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        >>> to_torch(state, optimizer, params)
        >>> optimizer.state[model.bias]["step"]
        tensor(1.)
    """
    groups = groups_of("to_torch", optimizer, params)
    alone = len(groups) == 1
    with torch.no_grad():
        templates = tuple(group.tx.init(group.params) for group in groups)
    expected = state_dict(templates[0] if alone else templates)
    check_fit("to_torch(state)", expected, state_dict(state))
    new = {}
    for group, part in zip(groups, [state] if alone else state, strict=True):
        entries = _written(optimizer, group, part)
        new.update({group.params[name]: entry for name, entry in entries.items()})
    optimizer.state.update(new)


def _read(optimizer: Optimizer, group: Group) -> Tree:
    """Return the state of a group, in copies."""
    template = group.tx.init(group.params)
    if not any(group.entries.values()):
        return template
    steps = {name: steps_of(entry) for name, entry in group.entries.items()}
    most = max(steps.values())
    behind = {name: count for name, count in steps.items() if count < most}
    if behind and _counts(template, group.options):
        name, count = next(iter(behind.items()))
        raise ValueError(
            f"from_torch(optimizer): expected parameters of one group that took "
            f"equally many steps, got {count:.0f} of {name!r} and {most:.0f} of "
            f"others. Put those that missed steps into a group of their own, which "
            f"has its own counter: {checks.listed(behind)}."
        )
    if isinstance(optimizer, torch.optim.ASGD):
        _check_asgd(group, most)

    def tensor(name: str, key: str, held: Tensor) -> Tensor:
        entry = group.entries[name]
        if not entry:
            return held
        if key not in entry or entry[key].shape != held.shape:
            got = "none" if key not in entry else f"{tuple(entry[key].shape)}"
            raise ValueError(
                f"from_torch(optimizer): expected {key!r} of shape "
                f"{tuple(held.shape)} in the state of {name!r}, got {got}. Was an "
                f"option changed after the first step?"
            )
        return entry[key].detach().to(held, copy=True)

    def read(state: Any) -> Any:
        values = {}
        for field, key, held in fields_of(state):
            if isinstance(held, dict):
                values[field] = {n: tensor(n, key, old) for n, old in held.items()}
            elif field == "count":
                values[field] = torch.full_like(held, int(most))
            else:
                values[field] = tensor(next(iter(group.entries)), key, held)
        return state._replace(**values) if values else state

    return tuple(read(state) for state in template)


def _written(optimizer: Optimizer, group: Group, state: Tree) -> dict[str, Entry]:
    """Return what torch is to hold for each parameter of a group."""
    fields = [each for part in state for each in fields_of(part)]
    counts = [int(held) for field, _, held in fields if field == "count"]
    if isinstance(optimizer, torch.optim.SGD) and counts == [0]:
        return {name: {} for name in group.params}

    def entry(name: str, param: Tensor) -> Entry:
        def number(value: Any) -> Tensor:
            return _number(value, param, optimizer, group.settings)

        new: Entry = {}
        if not isinstance(optimizer, _UNCOUNTED):
            known = counts[0] if counts else steps_of(group.entries[name])
            new["step"] = number(known)
        for field, key, held in fields:
            if isinstance(held, dict) and name in held:
                new[key] = held[name].detach().to(param.device, param.dtype, copy=True)
            elif not isinstance(held, dict) and field != "count":
                new[key] = number(held.item())
        if isinstance(optimizer, torch.optim.ASGD):
            new["eta"] = number(_asgd_rate(group.options, counts[0]))
            new["mu"] = number(1 / max(1, counts[0] - group.options["t0"]))
        return new

    return {name: entry(name, param) for name, param in group.params.items()}


def _counts(template: Tree, options: dict[str, Any]) -> bool:
    """Tell whether numbers depend on the count of steps."""
    return any(
        # For a sum without dampening, no step and one from zero are the same.
        field == "count" and (options.get("dampening") or type(state) is not TraceState)
        for state in template
        for field, _, _ in fields_of(state)
    )


def _check_asgd(group: Group, steps: float) -> None:
    """The rate of the next step, which torch has in its state, is the one we compute.

    It is in the default dtype of torch, hence the tolerance.
    """
    expected = _asgd_rate(group.options, steps)
    for entry in group.entries.values():
        if entry and not math.isclose(float(entry["eta"]), expected, rel_tol=1e-6):
            raise ValueError(
                f"from_torch(ASGD, lr={group.options['lr']}): expected the rate of "
                f"the last step, got one that was changed since, which torch applies "
                f"one step late. Make one more step before."
            )


def _asgd_rate(options: dict[str, Any], steps: float) -> float:
    """Return the rate of ASGD after a number of steps."""
    lr = options["lr"]
    return lr / ((1 + options["lambd"] * lr * steps) ** options["alpha"])


def _number(
    value: float, param: Tensor, optimizer: Optimizer, settings: dict[str, Any]
) -> Tensor:
    """Make a number as torch keeps it: in which dtype, and on which device."""
    fused = settings.get("fused")
    wide = torch.get_default_dtype() == torch.float64 and not fused
    there = fused or settings.get("capturable")
    there = there or isinstance(optimizer, torch.optim.ASGD)
    return torch.tensor(
        value,
        dtype=torch.float64 if wide else torch.float32,
        device=param.device if there else None,
    )


def _among(names: Params) -> Key:
    """Make the function that tells whether a name is one of these."""
    own = frozenset(names)
    return lambda name: name in own
