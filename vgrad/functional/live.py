"""A module of the user's own as a function of its parameters, without a copy.

The values of a call stay in the module until the next call, or `restore`: a backward
pass may run code of the module again, or read what its forward pass has left.
"""

from torch import Tensor, nn

from vgrad.functional import guards
from vgrad.functional.model import FunctionalModel
from vgrad.functional.slots import Placeholder, named_tensors
from vgrad.torch_private.tensors import has_hooks


class LiveModel(FunctionalModel):
    """A functional model that runs the module itself; `restore` ends its calls."""

    # Other code must not run the module between a call and `restore`.

    def __init__(self, function: str, model: nn.Module) -> None:
        guards.check_plain(function, model)
        super().__init__(model, {})
        self._shown = True  # and may change between steps
        registered = dict(named_tensors(model))
        self.values = {name: registered[name] for name in self.names}
        self._facts = self._changing_in_place()
        trained = (tensor for tensor in self.values.values() if tensor.requires_grad)
        self._trained = [(tensor, type(tensor)) for tensor in trained]

    def is_current(self) -> bool:
        """Return whether the module has the parts that it had at first."""
        return self._changing_in_place() == self._facts

    def restore(self) -> None:
        """Put back the state of the module; after an interrupt, call it again."""
        if self._slots.filled:
            for parameter, kind in self._trained:
                parameter.__class__ = kind
            self._slots.end()

    def _begin(self, values: dict[str, Tensor]) -> None:
        self.restore()
        super()._begin(values)
        for module in self._skeleton.modules():
            if "_compiled_call_impl" in vars(module):  # it does not run inside of modes
                vars(module)["_compiled_call_impl"] = None
        for parameter, _ in self._trained:  # raises if it is used, as by a global
            parameter.__class__ = Placeholder

    def _end(self) -> None:
        """Leave the module as the call has left it, for the backward pass."""

    def _changing_in_place(self) -> list[tuple]:
        named = [*named_tensors(self._skeleton)]
        facts = [(x.dtype, x.device, x.shape, x.requires_grad) for _, x in named]
        modules = [(id(module),) for module in self._skeleton.modules()]
        return [(n, id(x), has_hooks(x)) for n, x in named] + facts + modules
