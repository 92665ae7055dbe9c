"""Rows of tables that a step chooses by noisy counts, and leaves the others alone.

Beside the sum of gradients clipped to C, a step releases in how many samples each row
has a gradient, a vector of which a sample moves an L2 norm of at most 1. Both are one
Gaussian release: with the deviations s and g C it has the multiplier z of the plan
where z^-2 = s^-2 + g^-2. Rows are chosen by the counts with noise, and the gradient of
the others is dropped after noise has been added to all of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vgrad import checks, optim
from vgrad.batches import Sensitivity
from vgrad.dp.noise import Streams, gaussian_noise
from vgrad.persample.clipped import ClippedGradFn, ClippedSum
from vgrad.persample.row_counts import UNIT
from vgrad.torch_private import shards
from vgrad.tree import map_values, tree_map_with_path
from vgrad.typing import Params, Tree


@dataclass(frozen=True)
class RowSelection:
    """Tables whose rows are chosen by noisy counts; `dp.row_selection` makes it."""

    tables: tuple[str, ...]
    threshold: float
    share: float

    def __post_init__(self) -> None:
        function, own = "row_selection", self.__dict__
        checks.patterns(function, tables=self.tables)
        if not self.tables:
            raise ValueError(
                f"{function}(tables={self.tables!r}): expected a pattern of names of "
                f"parameters at least, got none."
            )
        checks.finite(function, threshold=self.threshold)
        checks.between(function, 0, 1, share=self.share)
        own["tables"] = tuple(self.tables)  # selections of equal numbers are equal
        own.update(threshold=float(self.threshold), share=float(self.share))

    def count_multiplier(self, noise_multiplier: float) -> float:
        """Return the deviation of the noise on counts."""
        return noise_multiplier / math.sqrt(self.share)

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """Return the multiplier of the noise on gradients alone."""
        return noise_multiplier / math.sqrt(1 - self.share)

    def counting(self, clipped: ClippedGradFn) -> ClippedGradFn:
        """Return a function whose result has counts of rows beside clipped sums."""
        quantity = clipped.quantity
        assert isinstance(quantity, ClippedSum)
        return replace(clipped, quantity=replace(quantity, tables=self.tables))

    def chosen(
        self,
        counts: Params,
        noise_multiplier: float,
        *,
        streams: Streams,
        key: Tensor,
        step: int,
    ) -> dict[str, Tensor]:
        """Return the chosen rows of each table, bool `[V]`, from sums of counts."""
        place: Any = {"key": key, "step": step, "streams": streams}
        place["noise_multiplier"] = self.count_multiplier(noise_multiplier)
        noise = gaussian_noise("row_selection", Sensitivity(1.0), **place)
        numbers = map_values(lambda count: count.double() / UNIT, counts)
        noisy = noise.added(numbers)
        return map_values(lambda count: count >= self.threshold, noisy)


def step_of_rows(
    chosen: Mapping[str, Tensor],
    tx: optim.GradientTransformation,
    grads: Params,
    state: Tree,
    params: Params,
) -> tuple[Params, Tree]:
    """Take a step of the chosen rows; others stay as they are, as does their state."""
    own = {
        n: torch.where(_along(x, grads[n]), grads[n], 0.0) for n, x in chosen.items()
    }
    new = optim.step(tx, {**grads, **own}, state, params)

    def kept(path: Any, new: Any, old: Any) -> Any:
        mask = chosen.get(getattr(path[-1], "key", ""))
        if mask is None or new.shape[:1] != mask.shape:  # no numbers of single rows
            return new
        return torch.where(_along(mask, new), new, old)

    return tree_map_with_path(kept, new, (params, state))


def _along(mask: Tensor, rows: Tensor) -> Tensor:
    mask = mask.view(-1, *[1] * (rows.ndim - 1))
    return (
        shards.cut(mask.expand(rows.shape), rows)
        if shards.is_distributed(rows)
        else mask
    )


def row_selection(
    tables: checks.Patterns, *, threshold: float, share: float = 0.1
) -> RowSelection:
    """Choose the rows of embeddings that a step trains, for `Plan(rows=...)`.

    Noise on a table of many rows outweighs the gradient of the few that a batch looks
    up. Here each step counts at which rows the gradients of its samples are not zero: a
    sample with k such rows, of all tables together, adds 1 / sqrt(k) at each. Noise is
    added to every count. Rows whose noisy count is at least the threshold get the
    clipped sum with its noise, also where no sample has a gradient; all others, their
    momentum and the rest of the optimizer's state included, stay as they are, as if
    there had been no step.

    All of it is one release at the plan's noise multiplier z: the noise on counts has
    the deviation `z / sqrt(share)`, and the multiplier of gradients is
    `z / sqrt(1 - share)`, so that their squares' reciprocals add up to `z^-2`.
    The samples' gradients are clipped before rows are left out.

    Cost: a number of noise for each row; sort and count of the rows that samples look
    up. The noise of gradients is drawn for all rows.

    Args:
        tables: patterns of names of parameters, whose first axis numbers the rows.
        threshold: in samples, as each of them counts at most 1. It is public: choose
            it without a look at the data.
        share: the part of `z^-2` that counts spend.

    Raises:
        TypeError: tables are no list of patterns.
        ValueError: a number is outside its range, or there is no pattern.

    Reference: Ghazi et al., arXiv 2311.08357 (DP-AdaFEST).

    Example:
        >>> from vgrad import dp
        >>> rows = dp.row_selection(["embedding.weight"], threshold=4.0, share=0.2)
        >>> run = {"sampling_rate": 0.01, "noise_multiplier": 1.0, "steps": 1000}
        >>> plan = dp.Plan(60_000, max_norm=1.0, delta=1e-6, rows=rows, **run)
        >>> round(plan.epsilon(), 2)  # as without rows
        2.12
    """
    return RowSelection(tables, threshold, share)  # pyright: ignore[reportArgumentType]
