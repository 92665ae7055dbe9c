"""Models that cannot be functional: hooks, closures, tensors that are not their own."""

from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vgrad import checks
from vgrad.functional.origins import Origins, check_apart
from vgrad.functional.slots import children, named_tensors, of_tensors
from vgrad.torch_private import tensors as private


def check_plain(function: str, model: Any) -> None:
    """Refuse what cannot be copied or exchanged tensor by tensor."""
    given = f"{function}({type(model).__name__})"
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if (
        not isinstance(model, nn.Module)
        or isinstance(model, (torch.jit.ScriptModule, *wrappers))
        or private.is_compiled(model)
    ):
        raise TypeError(
            f"{given}: expected a plain torch.nn.Module. Pass the module itself, "
            f"before it was scripted, compiled or wrapped (`wrapped.module`)."
        )
    modules = model.named_modules()
    if scripted := [n for n, m in modules if isinstance(m, torch.jit.ScriptModule)]:
        raise TypeError(
            f"{given}: expected modules whose tensors can be exchanged, got modules of "
            f"torch.jit in {checks.listed(scripted)}. Use them as they were before "
            f"they were scripted or traced."
        )
    tensors = list(named_tensors(model))
    if lazy := [n for n, tensor in tensors if nn.parameter.is_lazy(tensor)]:
        raise TypeError(
            f"{given}: expected initialised tensors, got lazy ones in "
            f"{checks.listed(lazy)}. Run the model once on a batch first."
        )
    if sparse := [n for n, x in tensors if x.layout is not torch.strided]:
        raise TypeError(
            f"{given}: expected dense tensors, got sparse ones in "
            f"{checks.listed(sparse)}. Register their indices and values, or a dense "
            f"tensor, and make the sparse one in the forward pass."
        )
    if hooked := [n for n, tensor in tensors if private.has_hooks(tensor)]:
        raise TypeError(
            f"{given}: expected tensors without hooks, which gradients of other "
            f"tensors would not run, got some on {checks.listed(hooked)}. Remove them "
            f"(`handle.remove()`). To change a gradient, use a parametrization with a "
            f"backward pass of its own (torch.nn.utils.parametrize)."
        )
    check_apart(function, model)


def check_closures(model: nn.Module) -> None:
    """Refuse functions that hold on to the module, which a copy of it would share."""
    known = {id(module) for module in model.modules()}
    origins = Origins(model)
    held = {n: private.copied_attributes(m) for n, m in model.named_modules()}
    for name, attributes in (*held.items(), *of_tensors(model).items()):
        for key, value in attributes.items():
            for each in value.values() if isinstance(value, dict) else (value,):
                if isinstance(each, FunctionType) and _reaches(each, known, origins):
                    raise TypeError(
                        f"make_functional_with_buffers(model): expected functions that "
                        f"get the module as an argument, got one in "
                        f"{f'{name}.{key}'.lstrip('.')!r} whose closure holds a part "
                        f"of the model and would go on using its values. Make it a "
                        f"method."
                    )


def _reaches(function: FunctionType, known: set[int], origins: Origins) -> bool:
    """Tell whether a function's closure or defaults hold a part of the module."""
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held += [each.cell_contents for each in function.__closure__ or () if _full(each)]
    groups = [each for each in held if isinstance(each, list | tuple | dict)]
    inside = [each for group in groups for each in children(group)]
    owners = [each.__self__ for each in held + inside if isinstance(each, MethodType)]
    return (
        any(id(each) in known for each in (*held, *inside, *owners))
        or any(isinstance(each, Tensor) and origins.lead_to(each) for each in held)
        # Not what was computed: hooks collect results that they do not use.
        or any(isinstance(each, Tensor) and origins.hold(each) for each in inside)
    )


def _full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that was never bound
        return False


def backward_hooks(model: nn.Module) -> list[str]:
    """Name the modules with hooks on gradients that pass them."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if private.has_backward_hooks(module)
    ]


def refuse_hooks(hooked: list[str]) -> None:
    """Raise inside a transform of `torch.func`, which would skip backward hooks."""
    raise RuntimeError(
        f"fmodel(params, buffers): expected a model without backward hooks, which "
        f"transforms of torch.func skip, got some on {checks.listed(hooked)}. Remove "
        f'them, or use strategy="loop".'
    )


def refuse_cached() -> None:
    """Raise inside `parametrize.cached()`, which would keep tensors from call to call.

    Raises:
        RuntimeError: the call is in such a block.
    """
    if private.keeps_parametrized():
        raise RuntimeError(
            "fmodel(params, buffers): expected a call outside of "
            "torch.nn.utils.parametrize.cached(), which keeps the tensors of one call "
            "for the next, got one inside. Leave the block first."
        )
