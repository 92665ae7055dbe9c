"""What an ensemble predicts whose members are cut among ranks.

Every rank runs its own members on the same inputs, one chunk of samples after the
other. Sums over members are taken over the ranks, so that no rank holds the outputs of
others. E members on all ranks, N samples, C classes, Q quantiles.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vgrad.checks import Patterns
from vgrad.distributed.options import Options
from vgrad.ensemble.axes import Here
from vgrad.ensemble.forward import ensemble_forward
from vgrad.ensemble.prediction import (
    EnsemblePrediction,
    ValuePrediction,
    outputs_of,
    summarised,
    summarised_values,
)
from vgrad.functional.model import FunctionalModel
from vgrad.ranks import RankError, Ranks
from vgrad.typing import Buffers, EnsembleStrategy, Params, Tree

T = TypeVar("T")


def predict(
    fmodel: FunctionalModel,
    params: Params,
    buffers: Buffers,
    /,
    *inputs: Tree,
    mesh: DeviceMesh,
    axis: str = "members",
    chunk_size: int | None = None,
    strategy: EnsembleStrategy = "auto",
    shared: Patterns = (),
) -> EnsemblePrediction:
    """Probabilities and uncertainty over ranks: `inputs [N, ...] -> [N, C]`, `[N]`.

    What `vgrad.ensemble.predict` returns for all members, on every rank. `params` and
    `buffers` are those of this rank's members, as `own_members` cuts them; the inputs
    are the same on all ranks.

    Cost: one forward pass of each rank's own members. Of a chunk of n samples about
    `5 n C` numbers are summed over the ranks, whatever E is, in float64.

    Args:
        chunk_size: samples at a time; None for all.
        strategy: how members run: `"vmap"` at once, `"hybrid"` at once in the best form
            of each op, `"loop"` one by one; `"auto"` takes what suits the device.
        shared: patterns of the entries without a member axis.

    Raises:
        ValueError: as `vgrad.ensemble.predict`.
        RankError: another rank failed, or has other numbers of samples or classes.

    Example:
        >>> import vgrad
        >>> from vgrad.distributed import alone, own_members
        >>> models = [torch.nn.Linear(3, 2) for _ in range(4)]
        >>> fmodel, *whole = vgrad.stack(models)
        >>> x = torch.ones(5, 3)
        >>> with alone("members") as mesh:
        ...     params, buffers = own_members(whole, mesh)
        ...     found = predict(fmodel, params, buffers, x, mesh=mesh)
        >>> found.mean.shape, found.mutual_information.shape
        (torch.Size([5, 2]), torch.Size([5]))
    """
    function = "predict"
    ranks = Ranks.of(function, mesh, axis)
    forward = partial(ensemble_forward, strategy=strategy, shared=shared)
    chunks = _outputs(function, fmodel, forward, params, buffers, inputs, chunk_size)
    options = _options(fmodel, shared=shared)
    parts = _over_ranks(function, ranks, options, chunks, summarised)
    return EnsemblePrediction(*(torch.cat(each) for each in zip(*parts, strict=True)))


def predict_values(
    fmodel: FunctionalModel,
    params: Params,
    buffers: Buffers,
    /,
    *inputs: Tree,
    mesh: DeviceMesh,
    axis: str = "members",
    quantiles: Sequence[float] = (),
    chunk_size: int | None = None,
    strategy: EnsembleStrategy = "auto",
    shared: Patterns = (),
) -> ValuePrediction:
    """Mean, variance and quantiles over ranks: `inputs [N, ...] -> [N, ...]`.

    What `vgrad.ensemble.predict_values` returns for all members, on every rank; all
    else is as for `predict`. Quantiles need the outputs of all members, which every
    rank then holds for one chunk of samples, `[E, chunk_size, ...]`.

    Args:
        chunk_size: samples at a time; None for all.
        strategy: how members run: `"vmap"` at once, `"hybrid"` at once in the best form
            of each op, `"loop"` one by one; `"auto"` takes what suits the device.
        shared: patterns of the entries without a member axis.

    Raises:
        ValueError: as `vgrad.ensemble.predict_values`.
        RankError: another rank failed, or has outputs of other shapes.

    Example:
        >>> import vgrad
        >>> from vgrad.distributed import alone, own_members
        >>> models = [torch.nn.Linear(3, 1) for _ in range(4)]
        >>> fmodel, *whole = vgrad.stack(models)
        >>> x = torch.ones(5, 3)
        >>> with alone("members") as mesh:
        ...     own = own_members(whole, mesh)
        ...     found = predict_values(fmodel, *own, x, mesh=mesh, quantiles=[0.5])
        >>> found.mean.shape, found.quantiles.shape
        (torch.Size([5, 1]), torch.Size([1, 5, 1]))
    """
    function = "predict_values"
    ranks = Ranks.of(function, mesh, axis)
    forward = partial(ensemble_forward, strategy=strategy, shared=shared)
    chunks = _outputs(function, fmodel, forward, params, buffers, inputs, chunk_size)

    def summary(outputs: Tensor, members: Here) -> ValuePrediction:
        return summarised_values(outputs, quantiles, members)

    options = _options(fmodel, shared=shared, quantiles=quantiles)
    parts = _over_ranks(function, ranks, options, chunks, summary)
    means, variances, found = zip(*parts, strict=True)
    return ValuePrediction(
        torch.cat(means), torch.cat(variances), torch.cat(found, dim=1)
    )


def _options(fmodel: FunctionalModel, **parts: Any) -> Options:
    """Read the options of a prediction; anything but a model is refused later."""
    model = fmodel.eval() if isinstance(fmodel, FunctionalModel) else None
    return Options(fmodel=model, **parts)


def _outputs(
    function: str, fmodel: FunctionalModel, forward: Callable, *given: Any
) -> Iterator[Tensor]:
    """Yield outputs chunk by chunk; nothing runs, or fails, before the first one."""
    yield from outputs_of(function, forward(fmodel.eval()), *given)


class _OverRanks(Here):
    """Members on several ranks, of which this one has some."""

    def __init__(self, ranks: Ranks, counts: Sequence[int]) -> None:
        self._ranks = ranks
        self._counts = counts

    def firsts(self, *each: Tensor) -> list[Tensor]:
        mine = [value[0] for value in each]
        if self._ranks.rank:
            mine = [torch.zeros_like(value) for value in mine]
        return self._summed(mine)

    def means(self, *each: Tensor) -> list[Tensor]:
        sums = self._summed([value.sum(0) for value in each])
        return [value / sum(self._counts) for value in sums]

    def gathered(self, each: Tensor) -> Tensor:
        return self._ranks.joined(each.contiguous(), self._counts)

    def _summed(self, values: Sequence[Tensor]) -> list[Tensor]:
        named = {str(number): value for number, value in enumerate(values)}
        return [*self._ranks.summed("predict", named).values()]


def _over_ranks(
    function: str,
    ranks: Ranks,
    options: Options,
    chunks: Iterator[Tensor],
    summary: Callable[[Tensor, Here], T],
) -> list[T]:
    """Summarise chunks of outputs `[E of the rank, chunk, ...]`, each when it comes."""
    parts: list[T] = []
    while True:
        try:
            outputs = next(chunks, None)
            if outputs is not None:
                # What is wrong with them is wrong before anything is sent.
                summary(outputs[:, :0], Here())
        except BaseException as error:
            ranks.agree(function, error=error)
            raise
        kind = None if outputs is None else [str(outputs.dtype), *outputs.shape[1:]]
        count = 0 if outputs is None else len(outputs)
        own = {"outputs": kind, "members": count}
        notes = ranks.check_same(function, own, options=options)
        kinds = [note["outputs"] for note in notes]
        if any(each != kind for each in kinds):
            raise RankError(
                f"{function}: expected the same samples on all ranks, and outputs of "
                f"one dtype and shape, got {kinds} on ranks 0 to {ranks.size - 1}."
            )
        if outputs is None:
            return parts
        counts = [note["members"] for note in notes]
        parts.append(summary(outputs, _OverRanks(ranks, counts)))
