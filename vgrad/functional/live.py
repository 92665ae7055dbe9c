"""A module of the user's own as a function of its parameters, without a copy.

The values of a call stay in the module until the next call, or `restore`: a backward
pass may run code of the module again, or read what its forward pass has left.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn

from vgrad.functional import guards
from vgrad.functional.model import FunctionalModel
from vgrad.functional.slots import Fields, Placeholder, Slots, taken, tensors_of
from vgrad.torch_private import tensors as private


class LiveModel(FunctionalModel):
    """A functional model that runs the module itself; `restore` ends its calls."""

    # Other code must not run the module between a call and `restore`.

    _slots: "LiveSlots"

    def __init__(self, function: str, model: nn.Module) -> None:
        guards.check_plain(function, model)
        self._function = function
        super().__init__(model, {})
        registered = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.values = {name: registered[name] for name in self.names}
        self._facts = self._changing_in_place()

    def is_current(self) -> bool:
        """Return whether the module holds the objects that it held at first."""
        return self._slots.unchanged() and self._changing_in_place() == self._facts

    def restore(self) -> None:
        """Put back the state of the module before its calls, if there were any."""
        self._slots.restore()

    def _changing_in_place(self) -> list[tuple]:
        return [
            (x.dtype, x.device, x.requires_grad, x.shape, private.has_hooks(x))
            for x in self.values.values()
        ]

    def _find_slots(self, names: dict[int, str]) -> Slots:
        return LiveSlots(self._function, self._skeleton, names)


class LiveSlots(Slots):
    """The slots of a module itself, with the functions that it leads to."""

    def __init__(self, function: str, model: nn.Module, names: dict[int, str]) -> None:
        self._function = function
        super().__init__(model, names)
        self._compiled = [
            each
            for each, _ in self.state
            if isinstance(each, dict) and "_compiled_call_impl" in each
        ]
        trained = (each for each in model.parameters() if each.requires_grad)
        self._trained = [(each, type(each)) for each in trained]
        self._filled = False

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Put values in the place of tensors, once the last call is undone."""
        self.restore()
        self._filled = True
        super().fill(values)
        for attributes in self._compiled:  # whose code does not run inside of modes
            attributes["_compiled_call_impl"] = None
        for parameter, _ in self._trained:  # raises if it is used, as by a global
            parameter.__class__ = Placeholder

    def end(self) -> None:
        """Leave the module as the call has left it, for the backward pass."""

    def restore(self) -> None:
        """Restore everything; after an interrupt, call it again."""
        if self._filled:
            for parameter, kind in self._trained:
                parameter.__class__ = kind
            super().end()
            self._filled = False

    def _follow(self, left: list[tuple[str, Any]]) -> None:
        hooks = [("a hook on all modules", each) for each in private.GLOBAL_HOOKS]
        super()._follow(left + hooks)

    def _shared(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, FunctionType):
            if next(tensors_of(value.__defaults__), None) is not None:
                own: Any = FunctionType.__defaults__
                yield from self._entries(path, Fields(value, [own]))
            yield path, value.__kwdefaults__
            yield from ((path, each) for each in value.__closure__ or ())
            yield path, vars(value)
        elif isinstance(value, CellType):
            own = CellType.cell_contents
            yield from self._entries(path, Fields(value, [own]))
        else:
            builtin = isinstance(value, BuiltinFunctionType)
            held = value.__self__ if builtin else value()
            self._check_fixed(path, [held])
            yield path, held

    def _numbers(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                self._check_fixed(path, value.flat)
                yield from ((path, each) for each in value.flat)
            if isinstance(value, np.memmap) or not value.flags.writeable:
                return
        self.state.append((value, taken(value)))

    def _check_fixed(self, path: str, values: Iterable[Any]) -> None:
        """Refuse parameters where they cannot be exchanged."""
        for value in values:
            for tensor in tensors_of(value):
                if id(tensor) in self.names or self._follows(tensor):
                    raise TypeError(
                        f"{self._function}({type(self._model).__name__}): expected "
                        f"parameters in modules, containers or attributes, got one, or "
                        f"a result of one, in {path!r}, held by an object that keeps "
                        f"it for good. Hold the module in its place."
                    )
