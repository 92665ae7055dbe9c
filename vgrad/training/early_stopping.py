"""Early stopping of the members of an ensemble."""

from typing import NamedTuple

import torch
from torch import Tensor

from vgrad import checks


class EarlyStopping(NamedTuple):
    """The members that still improve; a tree of tensors, one entry for each member.

    Attributes:
        best: each member's best value so far, `[E]`.
        waited: the number of values in a row that were no better, `[E]`.
        patience: the number of such values after which a member stops.
        min_delta: how much lower a value has to be to count as better.

    Example:
        >>> stopping = EarlyStopping.create(2, patience=1)
        >>> for values in ([1.0, 1.0], [0.5, 1.0]):
        ...     stopping = stopping.update(torch.tensor(values))
        >>> stopping.active
        tensor([ True, False])
    """

    best: Tensor
    waited: Tensor
    patience: Tensor
    min_delta: Tensor

    without_members = ("patience", "min_delta")

    @classmethod
    def create(
        cls, members: int, *, patience: int, min_delta: float = 0.0
    ) -> "EarlyStopping":
        """Start without values; a lower value is a better one."""
        function = "EarlyStopping.create"
        members, patience = checks.integers(
            function, minimum=1, members=members, patience=patience
        )
        checks.non_negative(function, min_delta=min_delta)
        return cls(
            torch.full((members,), torch.inf, dtype=torch.float64),
            torch.zeros(members, dtype=torch.int64),
            torch.tensor(patience),
            torch.tensor(min_delta, dtype=torch.float64),
        )

    def update(self, values: Tensor) -> "EarlyStopping":
        """Take each member's value, `[E]`; NaN is never better, and no member restarts.

        The best parameters are not kept: save them where `waited` is zero.
        """
        if values.shape != self.best.shape:
            raise ValueError(
                f"EarlyStopping.update(values of shape {tuple(values.shape)}): "
                f"expected one value a member, {tuple(self.best.shape)}."
            )
        values = values.to(self.best)
        better = self.active & (values < self.best - self.min_delta)
        return self._replace(
            best=torch.where(better, values, self.best),
            waited=torch.where(better, 0, self.waited + 1),
        )

    @property
    def active(self) -> Tensor:
        """Whether each member goes on, bool `[E]`, for `EnsembleState.active`."""
        return self.waited < self.patience
