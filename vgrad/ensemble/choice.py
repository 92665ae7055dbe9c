"""Which strategy is cheapest, from the work of one member and the device.

Members that do little work spend their time between kernels, and gain from running at
once. Members that keep the device busy gain nothing: on a CPU what all of them need at
once does not fit its caches, and convolutions have no batched kernel there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vgrad.ensemble.execution import Call, Randomness, Strategy, autocasting, vmapped
from vgrad.functional.untouched import untouched
from vgrad.generators import kept_random_state
from vgrad.persample.explain import aligned
from vgrad.torch_private import levels

BUSY = 50.0
"""MFLOP of a member's forward pass from which on it keeps a CPU busy by itself."""

CONVOLVED = 5.0
"""The same for what of it are convolutions."""


@dataclass(frozen=True)
class EnsembleExplanation:
    """Which strategy runs, and how; `str` makes a table of it.

    Attributes:
        function: the transform's name.
        strategy: the strategy.
        why: why it is that one.
        members: E.
        forms: op and form, in order of execution, of the ops that have a choice.
    """

    function: str
    strategy: str
    why: str
    members: int
    forms: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Return a table in plain text."""
        title = (
            f"{self.function} of {self.members} members, strategy {self.strategy}: "
            f"{self.why}"
        )
        if not self.forms:
            return title
        return f"{title}\n\n{aligned([('op', 'form'), *self.forms])}"


class Chooser:
    """Chooses for one transform; it remembers the work of the shapes it has seen."""

    def __init__(self, function: str, strategy: Strategy) -> None:
        """Say what is asked for."""
        self._function = function
        self._strategy: Strategy = strategy
        self._known: dict[Any, tuple[str, str]] = {}

    def choose(self, function: Callable, call: Call) -> tuple[str, str]:
        """Return the strategy and why it is that one."""
        if self._strategy != "auto":
            return self._strategy, f'as strategy="{self._strategy}" says'
        if levels.inside_transform():
            return "hybrid", "inside a transform of torch.func"
        if call.members == 1:
            return "loop", "there is one member"
        key = _key(call)
        if key not in self._known:
            self._known[key] = _by_work(function, call)
        return self._known[key]

    def explain(
        self, function: Callable, call: Call, randomness: Randomness
    ) -> EnsembleExplanation:
        """Run the forward pass once, and say what happened; generators are put back."""
        strategy, why = self.choose(function, call)
        forms: list[tuple[str, str]] = []
        if strategy != "loop":
            with kept_random_state(call.tensors()), torch.no_grad():
                vmapped(
                    function,
                    call,
                    randomness,
                    hybrid=strategy == "hybrid",
                    told=lambda op, form: forms.append((op, form)),
                )
        return EnsembleExplanation(
            self._function, strategy, why, call.members, tuple(forms)
        )


def _key(call: Call) -> Any:
    """Tell calls apart whose work differs."""
    return tuple((each.shape, each.dtype, each.device) for each in call.tensors())


def _by_work(function: Callable, call: Call) -> tuple[str, str]:
    """Count the work of one member, in a forward pass of its own."""
    if call.tensors()[0].device.type != "cpu":
        return "hybrid", "an accelerator has room for all members at once"
    counter = FlopCounterMode(display=False)
    with kept_random_state(call.tensors()), counter, untouched(call.promise()):
        autocasting(function)(*call.of(0))
    found = counter.get_flop_counts().get("Global", {})  # which is not there for none
    work = {str(op): flops for op, flops in found.items()}
    total = sum(work.values()) / 1e6
    convolved = sum(flops for op, flops in work.items() if "conv" in op) / 1e6
    if convolved > CONVOLVED:
        return "loop", f"{convolved:.1f} MFLOP of a member are convolutions, on a CPU"
    if total > BUSY:
        return "loop", f"the {total:.1f} MFLOP of a member keep a CPU busy"
    return "hybrid", f"the {total:.1f} MFLOP of a member leave a CPU waiting for calls"
