"""The entries of `params` and `buffers`: one for each tensor of a module."""

import torch
from torch import Tensor, nn

from vgrad import checks
from vgrad.functional import slots
from vgrad.torch_private import modes
from vgrad.typing import Buffers, Params


class Entries:
    """Which entries a module has, and what a caller gives for them.

    Attributes:
        aliases: by the first name of each tensor, all of its names.
        firsts: that name by the id of the tensor.
        constants: the values of buffers that no `state_dict()` holds.
    """

    def __init__(self, module: nn.Module, constants: dict[str, Tensor]) -> None:
        """Note names and shapes."""
        self.constants = constants
        self.aliases: dict[str, list[str]] = {}
        self.firsts: dict[int, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        for name, tensor in slots.named_tensors(module):
            first = self.firsts.setdefault(id(tensor), name)
            self.aliases.setdefault(first, []).append(name)
            self._shapes[first] = tensor.shape

    def merged(self, params: Params, buffers: Buffers) -> dict[str, Tensor]:
        """Merge the two dictionaries into one value a name, or say what is wrong."""
        checks.dictionaries("fmodel", params=params, buffers=buffers)
        both = params.keys() & buffers.keys()
        if both:
            raise ValueError(
                f"fmodel(params, buffers): expected each name in one of the two, got "
                f"{checks.listed(both)} in both."
            )
        values = {**params, **buffers}
        if values.keys() != self.aliases.keys():
            if not buffers:
                values = self._of_state_dict(params)
            checks.same_names("fmodel(params, buffers)", self.aliases, values)
        with modes.without_modes():  # which would see each shape that is read
            checks.same_shapes("fmodel(params, buffers)", self._shapes, values)
        return values

    def _of_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fold tied names into their first, add what a `state_dict()` leaves out."""
        values = dict(state)
        for first, aliases in self.aliases.items():
            given = [(alias, values.pop(alias)) for alias in aliases if alias in values]
            for alias, value in given:
                if not checks.same_values(value, given[0][1]):
                    raise ValueError(
                        f"fmodel(state_dict, {{}}): expected one value for the tied "
                        f"names {given[0][0]!r} and {alias!r}, got two."
                    )
            if given:
                values[first] = given[0][1]
        device = next((value.device for value in values.values()), None)
        for name, constant in self.constants.items():
            values.setdefault(name, constant.to(device))
        return values
