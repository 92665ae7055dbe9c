"""Writing values and gradients into a module of the user's own."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vgrad import checks
from vgrad.functional import slots
from vgrad.generators import ALONE
from vgrad.typing import Params


def write_values_(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write a value into every tensor of a module, under each of its names."""
    function = "copy_to_(model, params, buffers)"
    with ALONE:  # no other thread computes on the module
        targets = dict(slots.named_tensors(model))
    checks.same_names(function, targets, values)
    shapes = {name: target.shape for name, target in targets.items()}
    checks.same_shapes(function, shapes, values)
    given: dict[int, Tensor] = {}
    for name, target in targets.items():
        _check_writable(function, name, target)
        first = given.setdefault(id(target), values[name])
        if not checks.same_values(first, values[name]):
            raise ValueError(
                f"{function}: expected one value for {name!r} and the names that the "
                f"module ties to it, got two."
            )
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(values[name])


def write_grads_(model: nn.Module, grads: Params) -> None:
    """Fill `.grad` of a module's parameters, for a loop that uses `torch.optim`.

    Copies each gradient and casts it to its parameter's dtype. Parameters without one
    get `None`, so that no gradient of an earlier step is applied again.

    Raises:
        ValueError: a name is not a parameter of the module, or a shape is wrong.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> write_grads_(model, {"weight": torch.ones(1, 2)})
        >>> model.weight.grad
        tensor([[1., 1.]])
    """
    with ALONE:
        targets = dict(model.named_parameters(remove_duplicate=False))
    unexpected = grads.keys() - targets.keys()
    if unexpected:
        raise ValueError(
            f"write_grads_(model, grads): expected names of parameters, got "
            f"{checks.listed(unexpected)}."
        )
    shapes = {name: targets[name].shape for name in grads}
    checks.same_shapes("write_grads_(model, grads)", shapes, grads)
    if len({id(targets[name]) for name in grads}) < len(grads):
        raise ValueError(
            f"write_grads_(model, grads): expected one gradient for each parameter, "
            f"got {checks.listed(grads)}, of which some name the same one."
        )
    for target in targets.values():
        target.grad = None
    for name, grad in grads.items():
        targets[name].grad = grad.detach().to(targets[name], copy=True)


def _check_writable(function: str, name: str, target: Tensor) -> None:
    """Refuse a tensor that cannot be written into as a whole."""
    repeated = any(
        step == 0 and size > 1
        for step, size in zip(target.stride(), target.shape, strict=True)
    )
    if target.is_meta or target.is_inference() or repeated:
        raise ValueError(
            f"{function}: expected tensors with memory of their own, got one in "
            f"{name!r} that is on the device meta, expanded, or made in inference mode."
        )
