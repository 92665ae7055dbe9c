"""A module that an optimizer changes in place, as a function of its present values."""

from collections.abc import Callable
from typing import Any

from torch import nn

from vgrad.functional.live import LiveModel
from vgrad.typing import Buffers, Params


class LiveModule:
    """Computes on the module itself, and looks at it again where it has changed."""

    def __init__(self, model: nn.Module) -> None:
        """Look at the module for the first time."""
        self.model = model
        self._read()
        self._parts = _parts(model)

    def follow(self, *, within: bool) -> LiveModel:
        """Return the module as a function, another one if it has been set otherwise.

        `within` a logical batch it may not be moved, switched or frozen.

        Raises:
            RuntimeError: it has other modules or parameters, or other settings within
                a logical batch.
        """
        if self.function.is_current():
            return self.function
        if _parts(self.model) != self._parts:
            raise RuntimeError(
                f"PrivateGradients({type(self.model).__name__}): expected the modules "
                f"and parameters that it had at first, got others, of which no "
                f"optimizer knows. Build the model first, then PrivateGradients, and "
                f"hand on the state_dict() of a run that has begun."
            )
        if within and _settings(self.model) != self._settings:
            raise RuntimeError(
                "PrivateGradients.backward(*batch): expected one module for all parts "
                "of a logical batch, got one that was moved, switched or set otherwise "
                "in between. Do that between logical batches."
            )
        self._read()
        return self.function

    def values(self) -> tuple[Params, Buffers]:
        """Return the trained tensors and the others, detached and not copied."""
        params = {n: x.detach() for n, x in self._tensors() if x.requires_grad}
        buffers = {n: x.detach() for n, x in self._tensors() if not x.requires_grad}
        return params, buffers

    def run(self, function: Callable, *args: Any) -> Any:
        """Call a function that runs the module, and put the module back."""
        try:
            return function(*args)
        finally:
            try:
                self.function.restore()
            except BaseException:  # an interrupt
                self.function.restore()
                raise

    def _tensors(self) -> Any:
        return self.function.values.items()

    def _read(self) -> None:
        function = LiveModel("PrivateGradients", self.model)
        self.parameters = dict(self.model.named_parameters())
        if not any(each.requires_grad for each in self.parameters.values()):
            raise ValueError(
                f"PrivateGradients({type(self.model).__name__}): expected a parameter "
                f"that requires grad, got none."
            )
        self.function = function
        self._settings = _settings(self.model)


def _parts(model: nn.Module) -> list[tuple[str, int]]:
    """Return the identity of everything that a module is made of."""
    modules = [(name, id(each)) for name, each in model.named_modules()]
    named = model.named_parameters(remove_duplicate=False)
    return modules + [(name, id(each)) for name, each in named]


def _settings(model: nn.Module) -> list[Any]:
    """Return modes and dtypes, and which parameters are trained."""
    modes = [each.training for each in model.modules()]
    return modes + [(x.dtype, x.device, x.requires_grad) for x in model.parameters()]
