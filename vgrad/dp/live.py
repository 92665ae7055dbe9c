"""A module that an optimizer changes in place, as a function of its present values."""

from typing import Any

from torch import Tensor, nn

from vgrad.functional.model import FunctionalModel, make_functional_with_buffers
from vgrad.torch_private.tensors import has_forward_hooks
from vgrad.typing import Buffers, Params

_PLAIN = (bool, int, float, str, type(None))


class LiveModule:
    """Reads a module afresh: its values, its mode, and what its layers are set to."""

    def __init__(self, model: nn.Module) -> None:
        """Split the module for the first time."""
        self.model = model
        self.function, self._settings = self._split()
        self._parts = _parts(model)

    def follow(self) -> bool:
        """Split again if the module was moved, switched or set otherwise: was it?

        Raises:
            RuntimeError: it has other modules or parameters.
        """
        if _parts(self.model) != self._parts:
            raise RuntimeError(
                f"PrivateGradients({type(self.model).__name__}): expected the modules "
                f"and parameters that it had at first, got others, of which no "
                f"optimizer knows. Build the model first, then PrivateGradients, and "
                f"hand on the state_dict() of a run that has begun."
            )
        if self._settings == _settings(self.model):
            return False
        self.function, self._settings = self._split()
        return True

    def values(self) -> tuple[Params, Buffers]:
        """Return what is trained and what is not, detached and not copied."""
        held = {**self.parameters(), **dict(self.model.named_buffers())}
        held = {name: held[name] for name in self.function.names}
        params = {name: each for name, each in held.items() if each.requires_grad}
        buffers = {name: held[name] for name in held.keys() - params.keys()}
        return _detached(params), _detached(buffers)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their first names."""
        return dict(self.model.named_parameters())

    def _split(self) -> tuple[FunctionalModel, Any]:
        function, params, _ = make_functional_with_buffers(self.model)
        if not params:
            raise ValueError(
                f"PrivateGradients({type(self.model).__name__}): expected a parameter "
                f"that requires grad, got none."
            )
        return function, _settings(self.model)


def _detached(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _parts(model: nn.Module) -> list[tuple[str, int]]:
    """Return the identity of everything that a module is made of."""
    modules = [(name, id(each)) for name, each in model.named_modules()]
    named = model.named_parameters(remove_duplicate=False)
    return modules + [(name, id(each)) for name, each in named]


def _settings(model: nn.Module) -> list[Any]:
    """Return what a copy of a module would not follow: modes, numbers, dtypes, hooks.

    Tensors, lists and objects in plain attributes are left out.
    """
    found: list[Any] = [
        (each.dtype, each.device, each.requires_grad) for each in model.parameters()
    ]
    found += [(name, x.dtype, x.device, x.shape) for name, x in model.named_buffers()]
    for module in model.modules():
        attributes = vars(module).items()
        found.append({k: v for k, v in attributes if isinstance(v, _PLAIN)})
        found.append(has_forward_hooks(module))
    return found
