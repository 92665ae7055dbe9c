"""The gradient of a function of parameters, by plain autograd wherever that works.

Inside of `torch.func.grad` torch takes the formula of group norm's backward pass that
can be differentiated once more, at twice the time and memory of its kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vgrad.dtypes import no_autocast
from vgrad.torch_private import levels
from vgrad.torch_private.tensors import with_attributes
from vgrad.tree import map_tensors
from vgrad.typing import Params


def gradient(function: Callable, params: Params) -> tuple[Params, Any, set[str]]:
    """Differentiate `params -> (scalar, rest)`; return gradients and the rest.

    Last come the names of parameters to which no graph leads, as far as that is known.
    """
    if torch.is_inference_mode_enabled():
        # Plain autograd saves no tensor that was made there, and before torch 2.12
        # gradients of torch.func are zero inside.
        with torch.inference_mode(False), torch.no_grad():
            grads, rest = torch.func.grad(function, has_aux=True)(params)
        return grads, rest, set()
    if levels.inside_transform():
        grads, rest = torch.func.grad(function, has_aux=True)(params)
        return grads, rest, set()
    with torch.enable_grad():
        leaves = {
            name: with_attributes(p.detach().requires_grad_(), p)
            for name, p in params.items()
        }
        value, rest = function(leaves)
    found = dict.fromkeys(leaves)
    if value.requires_grad:
        with no_autocast(value.device):
            each = torch.autograd.grad(value, [*leaves.values()], allow_unused=True)
        found = dict(zip(leaves, each, strict=True))
    unreached = {name for name, grad in found.items() if grad is None}
    grads = {
        name: torch.zeros_like(params[name]) if grad is None else grad
        for name, grad in found.items()
    }
    return grads, map_tensors(Tensor.detach, rest), unreached
