"""Parameters that ranks gather where they are used, and sums that they scatter.

W ranks, each with its part of every parameter and with its own samples. What a loss
gets has no memory: an op that reads it, in the forward or in the backward pass, first
has all ranks put the parameter together. The last parameters read are kept, as many as
fit into the memory of the largest one.

Each exchange begins with a note that says what it is for: where ranks use different
parameters, all of them raise.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from vgrad.distributed.sharding import is_cut, reduced, whole
from vgrad.ranks import RankError, Ranks
from vgrad.torch_private import modes
from vgrad.torch_private.tensors import Lazy
from vgrad.tree import cast, wide
from vgrad.typing import Params


class Gathering:
    """One call of all ranks, which either come through together or raise together.

    Attributes:
        failed: what ended the call on this rank, if anything did.
    """

    def __init__(self, what: str, ranks: Ranks) -> None:
        """Begin."""
        self.failed: BaseException | None = None
        self._what = what
        self._ranks = ranks
        self._like: dict[str, DTensor] = {}
        self._held: Params = {}  # the one that was read last comes last
        self._room = 0

    def lazy(self, tensors: Mapping[str, Tensor]) -> Params:
        """Return tensors that are gathered when an op reads them."""
        return {name: self._lazy(name, value) for name, value in tensors.items()}

    def _lazy(self, name: str, value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return value
        self._like[name] = value
        local = value.to_local().detach()
        if not is_cut(value):
            return local
        size = value.numel() * value.element_size()
        self._room = max(self._room, size)
        compute = partial(self._gathered, name, local, len(value), size)
        return Lazy(compute, value.shape, value.dtype, local.device)

    def _gathered(self, name: str, local: Tensor, rows: int, size: int) -> Tensor:
        """Return a whole parameter."""
        if (found := self._held.pop(name, None)) is None:
            used = sum(each.nbytes for each in self._held.values())
            while self._held and used + size > self._room:
                used -= self._held.pop(next(iter(self._held))).nbytes
            with modes.exit_all(), modes.without_modes():
                self._meet(f"use of {name}")
                found = whole(self._ranks, local, rows)
        self._held[name] = found
        return found

    def summed(self, name: str, value: Tensor) -> Tensor:
        """Add up the sums of all ranks, and return the part of this one.

        No parameter is held beside a sum.
        """
        self._held.clear()
        self._meet(f"sum of {name}")
        like = self._like[name]
        return reduced(self._ranks, cast(value, wide(like.dtype)), like)

    settled = summed

    def of_part(self) -> "Gathering":
        """Let all ranks take part, which have as many chunks."""
        return self

    def anywhere(self, condition: bool) -> bool:
        """Tell whether a condition holds on any rank."""
        notes = self._meet("condition", holds=condition)
        return any(note["holds"] for note in notes)

    def least(self, number: int) -> int:
        """Return the smallest number of any rank."""
        return min(note["number"] for note in self._meet("number", number=number))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the call in this block; if it fails on a rank, all ranks raise.

        There its own error, on the others a `RankError` that quotes it.
        """
        try:
            yield
            self._meet("end")
        except BaseException as error:
            if self.failed is None:
                self.failed = error
                self._ranks.agree(self._what, error=error)
            raise self.failed from None
        finally:
            self._held.clear()

    def _meet(self, place: str, **facts: Any) -> list[dict[str, Any]]:
        """Begin an exchange; after a failure there is none."""
        if self.failed is not None:
            raise self.failed
        try:
            return self._ranks.agree(f"{self._what}, {place}", **facts)
        except RankError as error:
            self.failed = error
            raise
