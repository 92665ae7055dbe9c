"""A module that an optimizer changes in place, as a function of its present values."""

from typing import Any

from torch import Tensor, nn

from vgrad.functional.model import FunctionalModel, make_functional_with_buffers
from vgrad.torch_private.tensors import has_forward_hooks, version_of
from vgrad.typing import Buffers, Params

_REGISTERED = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, str, type(None))


class LiveModule:
    """Reads a module afresh: its values, its mode, and what its layers are set to."""

    def __init__(self, model: nn.Module) -> None:
        """Split the module for the first time."""
        self.model = model
        self._split()
        self._parts = _parts(model)

    def follow(self, *, within: bool) -> bool:
        """Split again if the module was moved, switched or set otherwise: was it?

        `within` a logical batch only what plain attributes hold may be another.

        Raises:
            RuntimeError: it has other modules or parameters, or other settings within
                a logical batch.
        """
        if _parts(self.model) != self._parts:
            raise RuntimeError(
                f"PrivateGradients({type(self.model).__name__}): expected the modules "
                f"and parameters that it had at first, got others, of which no "
                f"optimizer knows. Build the model first, then PrivateGradients, and "
                f"hand on the state_dict() of a run that has begun."
            )
        settings, held = _settings(self.model), _held(self.model)
        if within and settings != self._settings:
            raise RuntimeError(
                "PrivateGradients.backward(*batch): expected one module for all parts "
                "of a logical batch, got one that was moved, switched or set otherwise "
                "in between. Do that between logical batches."
            )
        if (settings, held) == (self._settings, self._held):
            return False
        self._split()
        return True

    def values(self) -> tuple[Params, Buffers]:
        """Return what is trained and what is not, detached and not copied."""
        held = dict(self.model.named_buffers()) | self.parameters()
        held = {name: held[name] for name in self.function.names}
        params = {name: each for name, each in held.items() if each.requires_grad}
        buffers = {name: held[name] for name in held.keys() - params.keys()}
        return _detached(params), _detached(buffers)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their first names."""
        return dict(self.model.named_parameters())

    def _split(self) -> None:
        function, params, _ = make_functional_with_buffers(self.model)
        if not params:
            raise ValueError(
                f"PrivateGradients({type(self.model).__name__}): expected a parameter "
                f"that requires grad, got none."
            )
        self.function: FunctionalModel = function
        self._settings, self._held = _settings(self.model), _held(self.model)


def _detached(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _parts(model: nn.Module) -> list[tuple[str, int]]:
    """Return the identity of everything that a module is made of."""
    modules = [(name, id(each)) for name, each in model.named_modules()]
    named = model.named_parameters(remove_duplicate=False)
    return modules + [(name, id(each)) for name, each in named]


def _settings(model: nn.Module) -> list[Any]:
    """Return modes, numbers, dtypes and hooks, which a copy would not follow."""
    found: list[Any] = [
        (each.dtype, each.device, each.requires_grad) for each in model.parameters()
    ]
    found += [(name, x.dtype, x.device, x.shape) for name, x in model.named_buffers()]
    for module in model.modules():
        attributes = vars(module).items()
        found.append({k: v for k, v in attributes if isinstance(v, _PLAIN)})
        found.append(has_forward_hooks(module))
    return found


def _held(model: nn.Module) -> list[Any]:
    """Return what else plain attributes hold: tensors, functions, lists of them.

    Objects are told apart by their identity, whatever changes inside of them.
    """
    own = {id(each) for each in (*model.parameters(), *model.buffers())}

    def frozen(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [frozen(each) for each in value]
        if isinstance(value, dict):
            return [(frozen(key), frozen(each)) for key, each in value.items()]
        if isinstance(value, Tensor) and id(value) not in own:
            return _Same(value), None if value.is_inference() else version_of(value)
        return value if isinstance(value, _PLAIN) else _Same(value)

    attributes = (vars(module).items() for module in model.modules())
    return [
        (name, frozen(value))
        for each in attributes
        for name, value in each
        if not isinstance(value, _PLAIN)
        and not (isinstance(value, dict) and (name in _REGISTERED or not value))
    ]


class _Same:
    """An object that equals itself alone, kept so that no other takes its place."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    __hash__ = None  # pyright: ignore
