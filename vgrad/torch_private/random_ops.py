"""The ops that draw random numbers, as modes see them below transforms and autograd.

Rests on the tag `nondeterministic_seeded` of ops (aten/src/ATen/native/tags.yaml) and
on their schemas (torch/_ops.py). A documented list of random ops would end the need.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vgrad.torch_private.tensors import written


def op_name(op: Any) -> str:
    """Return the name of an op, the same for its form in place.

    Example:
        >>> op_name(torch.ops.aten.bernoulli_.float)
        'bernoulli'
    """
    return getattr(op, "overloadpacket", op).__name__.rstrip("_")


def may_draw(op: Any) -> bool:
    """Tell whether an op may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def named(op: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return all arguments of a call of an op by their names, defaults included."""
    known = op._schema.arguments
    defaults = {each.name: each.default_value for each in known}
    names = (each.name for each in known)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def writes(op: Any) -> bool:
    """Tell whether an op writes into one of its arguments."""
    return next(written(op), None) is not None


def shown_results(op: Any, args: tuple, kwargs: dict, found: Any) -> list[Tensor]:
    """Return what an op returned and what it wrote into, each tensor once."""
    returned = found if isinstance(found, tuple | list) else (found,)
    both = (*_written(op, args, kwargs), *returned)
    tensors = {id(each): each for each in both if isinstance(each, Tensor)}
    return [*tensors.values()]


def _written(op: Any, args: tuple, kwargs: dict) -> Iterator[Any]:
    """Yield the arguments that an op writes into."""
    for place, name, by_keyword in written(op):
        yield args[place] if not by_keyword and place < len(args) else kwargs.get(name)


SHOWN = {
    *("bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal"),
    *("multinomial", "native_dropout", "normal", "normal_functional", "poisson"),
    *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random"),
    *("randperm", "rrelu_with_noise", "rrelu_with_noise_functional", "uniform"),
    *("_fused_dropout", "_sample_dirichlet", "_standard_gamma"),
}
"""Random ops whose results, or what they write, show all the numbers they drew."""
