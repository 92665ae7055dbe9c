"""The state of a transformation written into an optimizer of `torch.optim`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vgrad.optim.interop.counterparts import (
    Entry,
    Group,
    asgd_rate,
    fields_of,
    groups_of,
    steps_of,
)
from vgrad.tree import check_fit, state_dict
from vgrad.typing import Tree

_UNCOUNTED = (torch.optim.SGD, torch.optim.Muon)
"""Optimizers that do not count their steps in torch."""


def to_torch(
    state: Tree, optimizer: Optimizer, params: Mapping[str, Tensor] | None = None
) -> None:
    """Write a state into an optimizer of `torch.optim`, to go on there.

    `from_torch` of the optimizer has to give the transformation that made the state,
    with its options and groups: what is not in a state, such as rates, is not written.
    The optimizer is changed as a whole or, after an error, not at all. `params` names
    the parameters as in `from_torch`; load their values into the module.

    Tensors are copies in the dtype of torch, so that what `from_torch` read comes back
    exactly. Adadelta, RMSprop and Rprop, and Adagrad without `lr_decay`, keep a `step`
    in torch on which nothing depends; where a state does not have it, it stays.

    Raises:
        TypeError: there is no transformation for this class, subclasses included.
        ValueError: the state is one of another optimizer, or of other parameters; a
            parameter has no name or two places; the optimizer is differentiable.

    Example:
        >>> from vgrad.optim import adam, step
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


def _written(optimizer: Optimizer, group: Group, state: Tree) -> dict[str, Entry]:
    """Return what torch holds for each parameter of a group."""
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
            new["eta"] = number(asgd_rate(group.options, counts[0]))
            new["mu"] = number(1 / max(1, counts[0] - group.options["t0"]))
        return new

    return {name: entry(name, param) for name, param in group.params.items()}


def _number(
    value: float, param: Tensor, optimizer: Optimizer, settings: dict[str, Any]
) -> Tensor:
    """Make a number in the dtype and on the device in which torch keeps it."""
    fused = settings.get("fused")
    wide = torch.get_default_dtype() == torch.float64 and not fused
    there = fused or settings.get("capturable")
    there = there or isinstance(optimizer, torch.optim.ASGD)
    return torch.tensor(
        value,
        dtype=torch.float64 if wide else torch.float32,
        device=param.device if there else None,
    )
