"""Random numbers of each member from a stream of its own, when members run at once.

torch draws for all members from one generator, so that what a member gets depends on
how many run beside it. Here every random op runs member by member, each time with the
generators as its member left them: what it draws follows from its seed, and not from
who its neighbours are, nor from which process it is in.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vgrad.generators import drawn_since, random_state, set_random_state, set_seed
from vgrad.lowering.truthful import UnsupportedOp, among
from vgrad.torch_private.tracing import DispatchMode


class MemberDraws(DispatchMode):
    """Sees the random ops of one run, on tensors whose first axis is the members'.

    The generators are left where the last member stopped.
    """

    def __init__(
        self, seeds: Sequence[int], shown: set[str], *, repeated: bool
    ) -> None:
        """Start every member's stream; `shown` are ops that show all they draw."""
        super().__init__()
        self._seeds = seeds
        self._shown = shown
        self._repeated = repeated
        self._states: dict[Any, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run one op, a random one for each member."""
        kwargs = kwargs or {}
        name = getattr(func, "overloadpacket", func).__name__
        if name.rstrip("_") not in self._shown:
            if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
                return func(*args, **kwargs)
            before = random_state(given := among(args, kwargs))
            found = func(*args, **kwargs)
            if drawn_since(before, given):
                raise _refusal(name, "one that keeps its numbers to itself")
            return found
        if self._repeated:
            raise _refusal(name, "one in an activation checkpoint")
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)  # whoever made it says what it draws
        lead = _lead(args)
        count, rest = divmod(lead[0], len(self._seeds)) if lead else (0, 0)
        if lead is None or rest or "out" in kwargs:
            raise _refusal(name, "one without an axis of the members in front")
        given = [*among(args, kwargs), torch.empty(0, device=kwargs.get("device"))]
        parts = []
        for member, seed in enumerate(self._seeds):
            stream = member, given[0].device
            if stream in self._states:
                set_random_state(self._states[stream])
            else:
                set_seed(seed, given[:1])
            own = [_own(each, lead, member * count, count) for each in args]
            parts.append(func(*own, **kwargs))
            self._states[stream] = random_state(given[:1])
        if name.endswith("_") and not name.startswith("_"):
            return args[0]
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)
        return type(parts[0])(torch.cat(each) for each in zip(*parts, strict=True))


def _lead(args: tuple) -> tuple[int, int] | None:
    """Return the first size of what an op draws, and the number of its dimensions."""
    for each in args:
        if isinstance(each, Tensor) and each.ndim:
            return each.shape[0], each.ndim
        if isinstance(each, list | tuple) and each:
            return each[0], len(each)
    return None


def _own(value: Any, lead: tuple[int, int], start: int, count: int) -> Any:
    """Return one member's part of an argument; what broadcasts stays as it is."""
    if isinstance(value, Tensor) and (*value.shape[:1], value.ndim) == lead:
        return value.narrow(0, start, count)
    if isinstance(value, list | tuple) and value and value[0] == lead[0]:
        return [count, *value[1:]]
    return value


def _refusal(op: str, got: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"random numbers of members: expected random ops of which each member has its "
        f'own part, got {op}, {got}. Use strategy="loop".'
    )
