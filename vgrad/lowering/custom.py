"""An autograd.Function under vmap: by its vmap rule, or for one sample after another.

Torch runs a `vmap` of its own on the tensors of all samples and, where autograd runs
below the vmap, differentiates what it does. Only if it calls `apply` again is the
gradient the one that `backward` gives.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from vgrad.lowering.one_by_one import Foreign, one_by_one
from vgrad.lowering.truthful import UnsupportedOp, among
from vgrad.torch_private import modes
from vgrad.torch_private.autograd import graph_nodes
from vgrad.torch_private.tensors import version_of
from vgrad.tree import tree_leaves


def for_samples(
    function: Any, args: tuple, kwargs: dict, foreign: Foreign
) -> tuple[Any, bool]:
    """Run an autograd.Function; say whether it was called for one after another.

    Raises:
        UnsupportedOp: neither can be.
    """
    if not _has_rule(function):
        return one_by_one(function, args, kwargs, foreign), True
    given = [modes.unwrap_all(each) for each in among(args, kwargs)]
    versions = [version_of(each) for each in given]
    try:
        return custom_function(function, *args, **kwargs), False
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        written = versions != [version_of(each) for each in given]
        if written or modes.RANDOM_ERROR in str(error):
            raise
        try:
            return one_by_one(function, args, kwargs, foreign), True
        except UnsupportedOp:
            raise error from None


def _has_rule(function: Any) -> bool:
    """Tell whether there is something that torch could run under vmap."""
    plain = torch.autograd.Function
    if function.setup_context is plain.setup_context:
        return False
    return function.generate_vmap_rule or function.vmap is not plain.vmap


def custom_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an autograd.Function, and check that `backward` gives its gradient.

    Raises:
        UnsupportedOp: its `vmap` leaves `backward` out.
    """
    output = modes.custom_function_call(function, *args, **kwargs)
    own = function.vmap is not torch.autograd.Function.vmap
    if own and torch.is_grad_enabled() and _mapped_once((args, kwargs)):
        given = [each for each in _below((args, kwargs)) if each.requires_grad]
        made = [each for each in _below(output) if each.requires_grad]
        if given and (not made or _passed_by(given, made)):
            name = function.__name__
            raise UnsupportedOp(
                f"{name}.apply: expected an autograd.Function whose vmap calls apply, "
                f"got one whose vmap computes something that autograd differentiates "
                f"instead of running {name}.backward. Call {name}.apply inside of "
                f'vmap, set generate_vmap_rule = True instead, or use strategy="loop".'
            )
    return output


def _mapped_once(values: Any) -> bool:
    """Tell whether these tensors are mapped by one vmap alone, that over samples."""
    level = modes.current_level()
    for each in tree_leaves(values):
        if not isinstance(each, Tensor) or modes.level_of(each) != level:
            continue
        wraps = []
        while modes.is_wrapped(each):
            wraps.append(modes.is_batched(each))
            each = modes.unwrapped(each)
        if wraps[:1] == [True] and sum(wraps) == 1:
            return True
    return False


def _below(values: Any) -> Iterator[Tensor]:
    """Yield the tensors that have the graph, below all vmaps."""
    for each in tree_leaves(values):
        if isinstance(each, Tensor):
            while modes.is_batched(each):
                each = modes.unwrapped(each)
            yield each


def _passed_by(given: list[Tensor], made: list[Tensor]) -> bool:
    """Return whether a path from results to arguments passes no backward of its own."""
    leaves = {id(each) for each in given if each.grad_fn is None}
    ends = {each.grad_fn for each in given} - {None}

    def own_backward(node: Any) -> bool:
        return isinstance(node, BackwardCFunction) and node not in ends

    return any(
        node in ends or id(getattr(node, "variable", None)) in leaves
        for node in graph_nodes(made, own_backward)
    )
