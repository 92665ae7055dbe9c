"""How far one person's data can move a clipped sum: what noise is calibrated to."""

from dataclasses import dataclass
from typing import Literal, get_args

from vgrad import checks

Neighbours = Literal["add_or_remove_one"]


@dataclass(frozen=True)
class Sensitivity:
    """The L2 sensitivity of a sum and the neighbouring relation it holds for.

    `value` bounds the L2 norm of `f(D) - f(D')` over all data sets D and D' that differ
    by exactly one added sample, except for the rounding errors of the other samples
    (figures are in `vgrad/dp/noise.py`). Noise is added by handing this object on,
    never by repeating its number.

    Raises:
        ValueError: `value` is not positive.

    Example:
        >>> Sensitivity(0.5).value
        0.5
    """

    value: float
    neighbours: Neighbours = "add_or_remove_one"

    def __post_init__(self) -> None:
        """Check the fields."""
        checks.positive("Sensitivity", value=self.value)
        allowed = get_args(Neighbours)
        checks.one_of("Sensitivity", allowed, neighbours=self.neighbours)
