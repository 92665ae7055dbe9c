"""What a step of some members has to know of the others, which train elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from vgrad.ensemble.gradients import EnsembleGradFn, EnsembleGrads
from vgrad.generators import Tag, sample_keys, torch_seed
from vgrad.typing import Tree

Found = tuple[EnsembleGrads, Tree]
"""Gradients without the scale, and aux."""


class Others(Protocol):
    """The members of an ensemble that other processes train."""

    @property
    def numbers(self) -> range:
        """The numbers that the members of this process have among all of them."""
        ...

    def check(self, given: int) -> None:
        """Refuse other members than those of this process."""
        ...

    def joined(
        self, compute: Callable[[], Found], state: Any, shared: Sequence[str]
    ) -> tuple[Found, Tensor]:
        """Sum gradients of what is shared, and say whether any member is active."""
        ...


def keyed(gradient: EnsembleGradFn, state: Any, numbers: range) -> EnsembleGradFn:
    """Let what each member draws follow from its number and the state."""
    seed = torch_seed(state.key, "loss", int(state.step), "members")
    return gradient.keyed(sample_keys(seed, numbers.start, len(numbers)))


def place(gradient: EnsembleGradFn, numbers: range) -> tuple[Tag, ...]:
    """Tell what these members draw, all from one stream, from what others do."""
    apart = gradient.randomness == "different" and numbers.start
    return ("members", numbers.start) if apart else ()
