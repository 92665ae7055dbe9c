"""An optimizer of `torch.optim` read into a transformation and its state.

Training goes on with the functional optimizer of the same name, without repeating or
losing a step; `to_torch` is the way back.
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
    Group,
    asgd_rate,
    fields_of,
    groups_of,
    steps_of,
)
from vgrad.optim.methods.sgd import TraceState
from vgrad.typing import Params, Tree


def from_torch(
    optimizer: Optimizer, params: Mapping[str, Tensor] | None = None
) -> tuple[GradientTransformation, Tree]:
    """Read an optimizer of `torch.optim` into `(tx, state)`, to go on from there.

    `tx` is the optimizer of the same name with the current numbers of `param_groups`,
    without schedulers and hooks; several groups become a `partition` by name. The state
    holds copies. One step of it is one step of torch, to the rounding of float64 if
    everything is in float64; NAdam and ASGD keep numbers in the default dtype of torch.
    An optimizer that has not stepped gives a fresh state.

    Names are those the optimizer was made with, from `model.named_parameters()`, or
    those of `params`, a dictionary of the same tensors. Parameters that require no
    gradient and have not been stepped are left out, as in
    `make_functional_with_buffers`.

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


def _counts(template: Tree, options: dict[str, Any]) -> bool:
    """Tell whether the numbers depend on the count of steps."""
    return any(
        # For a sum without dampening, no step and one from zero are the same.
        field == "count" and (options.get("dampening") or type(state) is not TraceState)
        for state in template
        for field, _, _ in fields_of(state)
    )


def _check_asgd(group: Group, steps: float) -> None:
    """The rate that torch has in its state for the next step is the one we compute."""
    expected = asgd_rate(group.options, steps)
    # torch keeps it in its default dtype, hence the tolerance.
    for entry in group.entries.values():
        if entry and not math.isclose(float(entry["eta"]), expected, rel_tol=1e-6):
            raise ValueError(
                f"from_torch(ASGD, lr={group.options['lr']}): expected the rate of "
                f"the last step, got one that was changed since, which torch applies "
                f"one step late. Make one more step before."
            )


def _among(names: Params) -> Key:
    """Make the function that tells whether a name is one of these."""
    own = frozenset(names)
    return lambda name: name in own
