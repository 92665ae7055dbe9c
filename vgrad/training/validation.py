"""Losses and scores of all members on samples that they were not trained on.

E members.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vgrad.ensemble.execution import EnsembleExecutor
from vgrad.functional.losses import Criterion, batch_loss
from vgrad.functional.model import FunctionalModel
from vgrad.precision import Policy
from vgrad.training.ensemble import EnsembleState
from vgrad.training.state import own_randomness, under
from vgrad.tree import map_tensors, tensors, tree_map
from vgrad.typing import Buffers, Params, Tree

Figures = dict[str, Tensor]
"""Numbers of each member by name."""

Metric = Callable[[Any, Any], Tensor | float]
"""A number of all outputs of a member, and of their targets."""


class Validation:
    """Judges the members of an ensemble in evaluation mode, each on its own samples."""

    def __init__(
        self,
        fmodel: FunctionalModel,
        criterion: Criterion,
        metric: Metric | None,
        policy: Policy | None,
        options: dict[str, Any],
    ) -> None:
        self._fmodel = fmodel.eval()
        self._criterion = criterion
        self._metric = metric
        self._policy = policy
        self._judged = under(policy, self._loss_and_output)
        self._executor = EnsembleExecutor("cross_validate", **options)

    def __call__(self, state: EnsembleState, batches: Iterable[tuple]) -> Figures:
        """Return the mean `losses` over batches `[E, B, ...]`, and `scores`; `[E]`.

        They are float64 and on the CPU. What the model draws follows from the state.
        """
        total, count, kept = torch.zeros(()), 0, []
        with torch.no_grad(), own_randomness(state):
            for batch in batches:
                call = self._executor.call(state.params, state.buffers, batch)
                strategy, _ = self._executor.choose(self._judged, call)
                losses, output = self._executor.run(self._judged, call, strategy)
                size = tensors(batch)[0].shape[1]
                total, count = total + losses.double() * size, count + size
                kept.append((output, batch[-1]) if output else ())
            figures = {"losses": (total / count).cpu()}
            if self._metric is not None:
                whole = tree_map(lambda *parts: torch.cat(parts, 1), *kept)
                figures["scores"] = self._scores(self._metric, whole)
        return figures

    def _loss_and_output(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> tuple[Tensor, list[Tree]]:
        """Return the loss of a batch, and what the criterion was given if needed."""
        given: list[Tree] = []

        def noted(output: Any, target: Any) -> Tensor:
            given.append(output)
            return self._criterion(output, target)  # pyright: ignore[reportOptionalCall]

        criterion = self._criterion if self._metric is None else noted
        return batch_loss(self._fmodel, criterion)(params, buffers, *batch), given

    def _scores(self, metric: Metric, whole: tuple[list[Tree], Tree]) -> Tensor:
        """Apply the metric to each member's output and target, `[E]`."""
        (output,), target = whole
        if self._policy is not None:
            output = self._policy.cast(output, to="output")
        scores = []
        for member in range(len(tensors(target)[0])):
            one = map_tensors(lambda x, i=member: x[i], (output, target))
            score = torch.as_tensor(metric(*one), dtype=torch.float64).detach().cpu()
            if score.numel() != 1:
                raise ValueError(
                    f"metric(output, target): expected one number for all samples, got "
                    f"shape {tuple(score.shape)}. Reduce it in the metric."
                )
            scores.append(score.reshape(()))
        return torch.stack(scores)
