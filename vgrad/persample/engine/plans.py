"""How one call of an op runs by its rule."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from vgrad import checks
from vgrad.persample.engine.sites import Site
from vgrad.persample.rules.table import Maker, Rule
from vgrad.torch_private import modes

FUSED = {F.linear}
"""Ops that run as their rule says though no weight is a parameter.

vmap adds a bias in a pass of its own.
"""


class Plan(NamedTuple):
    """How one call runs."""

    arguments: dict[str, Any]  # those of the op, physical where it is batched
    weights: dict[str, Site]  # the parameters among them
    makers: dict[str, Maker]  # what makes their factors of the gradient at the output
    kept: dict[str, Any]  # what the makers were made of
    batched: bool  # the output differs from sample to sample
    follows: bool  # an input leads on to other parameters


def planned(
    recorder: Any, rule: Rule, func: Callable, bound: dict[str, Any]
) -> "Plan | None":
    """Say how to run an op of these arguments; None where its rule does not fit."""
    weights: dict[str, Site] = {}
    batched = follows = False
    physical = dict(bound)
    for name, value in bound.items():
        if not isinstance(value, Tensor):
            continue
        site = recorder.site(value)
        if name in rule.weights:
            if modes.is_batched(value) or value.is_complex():
                return None
            if site is not None:
                weights[name] = site
            follows |= site is None and value.requires_grad
            continue
        if site is not None:
            value = recorder.expanded(site, func)
        batched |= modes.is_batched(value)
        physical[name] = recorder.physical(value)
        follows |= physical[name].requires_grad
    if not batched and follows:
        return None
    if not weights and not (batched and func in FUSED):
        return None
    for name, site in weights.items():
        # Only where no input leads on to other parameters does a weight have to
        # require grad, for the pass to come here at all.
        physical[name] = site.plain if follows else recorder.anchor(site.plain)
    # What is kept must not keep the graph alive.
    kept = {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in physical.items()
    }
    makers = rule.factors(**kept)
    if makers is None:
        return None
    if missing := weights.keys() - makers.keys():
        raise TypeError(
            f"rule({modes.op_name(func)}): expected a function for each weight "
            f"that got a parameter, got none for {checks.listed(missing)}."
        )
    if not batched:
        physical = {**bound, **{name: physical[name] for name in weights}}
    return Plan(physical, weights, makers, kept, batched, follows)
