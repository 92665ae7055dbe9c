"""Rows of tables that a step chooses by noisy counts; it leaves the others alone.

Beside the sum of gradients clipped to C, a step releases in how many samples each row
has a gradient, a vector that a sample moves by an L2 norm of at most 1. Both are one
Gaussian release: with the deviations s and g C it has the multiplier z of the plan
where z^-2 = s^-2 + g^-2. All of the sum gets its noise, and then other rows than the
chosen ones are dropped.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vgrad import checks, optim
from vgrad.batches import Sensitivity
from vgrad.dp.noise import gaussian_noise
from vgrad.persample.clipped import ClippedGradFn
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
        function = "row_selection"
        checks.patterns(function, tables=self.tables)
        if not self.tables:
            raise ValueError(
                f"{function}(tables={self.tables!r}): expected a pattern of names of "
                f"parameters at least, got none."
            )
        [threshold] = checks.finite(function, threshold=self.threshold)
        [share] = checks.between(function, 0, 1, share=self.share)
        # Selections of equal numbers are equal.
        same = {"tables": tuple(self.tables), "threshold": float(threshold)}
        self.__dict__.update(same, share=float(share))

    def count_multiplier(self, noise_multiplier: float) -> float:
        """Return the deviation of the noise on counts."""
        return noise_multiplier / math.sqrt(self.share)

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """Return the multiplier of the noise on gradients alone."""
        return noise_multiplier / math.sqrt(1 - self.share)

    def counting(self, clipped: ClippedGradFn) -> ClippedGradFn:
        """Return the same function, with counts of rows in its result."""
        quantity: Any = clipped.quantity
        return replace(clipped, quantity=replace(quantity, tables=self.tables))

    def chosen(
        self, counts: Params, noise_multiplier: float, **place: Any
    ) -> dict[str, Tensor]:
        """Return the chosen rows of each table, bool `[V]`, from sums of counts."""
        place["noise_multiplier"] = self.count_multiplier(noise_multiplier)
        noise = gaussian_noise("row_selection", Sensitivity(1.0), **place)
        noisy = noise.added(map_values(lambda count: count.double() / UNIT, counts))
        return map_values(lambda count: count >= self.threshold, noisy)


def step_of_rows(
    chosen: Mapping[str, Tensor],
    tx: optim.GradientTransformation,
    grads: Params,
    state: Tree,
    params: Params,
) -> tuple[Params, Tree]:
    """Take a step of the chosen rows; others stay as they are, as does their state."""
    grads = dict(grads)
    for name, mask in chosen.items():
        grads[name] = torch.where(_along(mask, grads[name]), grads[name], 0.0)

    def kept(path: Any, new: Any, old: Any) -> Any:
        mask = chosen.get(getattr(path[-1], "key", ""))
        if mask is None or new.shape[:1] != mask.shape:  # no numbers of single rows
            return new
        return torch.where(_along(mask, new), new, old)

    new = optim.step(tx, grads, state, params)
    return tree_map_with_path(kept, new, (params, state))


def _along(mask: Tensor, rows: Tensor) -> Tensor:
    """Give a mask of rows the dimensions of a table, cut as that is."""
    mask = mask.view(-1, *[1] * (rows.ndim - 1))
    return shards.cut(mask.expand(rows.shape), rows)


def row_selection(
    tables: checks.Patterns, *, threshold: float, share: float = 0.1
) -> RowSelection:
    """Choose the rows of embeddings that a step trains, for `Plan(rows=...)`.

    A sample with gradients at k rows, of all tables together, counts 1 / sqrt(k) at
    each. Noise is added to the count of every row. Rows whose noisy count is at least
    `threshold` get the clipped sum with its noise, also where no sample has a gradient.
    All others stay as they are, with their momentum and the rest of the optimizer's
    state, as if there were no step.

    All of it is one release at the plan's noise multiplier z: the noise on counts has
    the deviation `z / sqrt(share)`, and gradients have the noise multiplier
    `z / sqrt(1 - share)`. Gradients are clipped before rows are dropped. Costs the
    noise of a number for each row, and a sort of the rows that samples look up; the
    noise of gradients is drawn for all rows.

    Args:
        tables: patterns of names of parameters, whose first axis numbers the rows.
        threshold: in samples. It is public: choose it without a look at the data.
        share: the part of `z^-2` that counts spend.

    Raises:
        TypeError: the tables are no list of patterns.
        ValueError: a number is outside its range, or there is no pattern.

    Reference: Ghazi et al., DP-AdaFEST, arXiv 2311.08357.

    Example:
        >>> from vgrad import dp
        >>> rows = dp.row_selection(["embedding.weight"], threshold=4.0, share=0.2)
        >>> run = {"sampling_rate": 0.01, "noise_multiplier": 1.0, "steps": 1000}
        >>> plan = dp.Plan(60_000, max_norm=1.0, delta=1e-6, rows=rows, **run)
        >>> round(plan.epsilon(), 2)  # as without rows
        2.12
    """
    return RowSelection(tables, threshold, share)  # pyright: ignore
