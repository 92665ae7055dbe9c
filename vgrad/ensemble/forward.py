"""The outputs of all members: `[E, B, ...]` from stacked parameters."""

from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.ensemble.axes import InDims
from vgrad.ensemble.choice import EnsembleExplanation, OfRunner, Runner
from vgrad.ensemble.execution import Call
from vgrad.functional.model import FunctionalModel
from vgrad.generators import fold_in
from vgrad.persample.engine.guard import LossGuard
from vgrad.tree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from vgrad.typing import Buffers, EnsembleStrategy, Params, Randomness, Tree


class EnsembleForward(OfRunner):
    """What `ensemble_forward` returns.

    Attributes:
        fmodel: the model of one member.
    """

    name = "ensemble_forward"

    def __init__(
        self, fmodel: FunctionalModel, runner: Runner, chunk_size: int | None
    ) -> None:
        """Keep the options."""
        self.fmodel = fmodel
        self._runner = runner
        self._chunk_size = chunk_size

    def __call__(self, params: Params, buffers: Buffers, /, *batch: Tree) -> Tree:
        """Return the outputs, each tensor with the member axis in front."""
        call = self._runner.call(params, buffers, batch)
        if self._chunk_size is None:
            return self._of(self.fmodel, call)
        with LossGuard(given={}):  # statistics of a chunk are not the batch's
            parts = [
                self._chunk(number)._of(
                    self.fmodel, self._runner.call(params, buffers, rows)
                )
                for number, rows in enumerate(self._chunks(call, batch))
            ]
        return tree_map(lambda *leaves: torch.cat(leaves, 1), *parts)

    def with_buffers(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> tuple[Tree, Buffers]:
        """Return the outputs and the buffers as each member's forward pass left them.

        Raises:
            ValueError: the batch is run in chunks, or members leave different values in
                a buffer that they share.
        """
        if self._chunk_size is not None:
            raise ValueError(
                f"ensemble_forward(chunk_size={self._chunk_size}).with_buffers: "
                f"expected chunk_size=None, since buffers depend on the whole batch."
            )
        call = self._runner.call(params, buffers, batch)
        return self._of(self.fmodel.call_and_update, call, with_buffers=True)

    def explain(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> EnsembleExplanation:
        """Say which strategy is taken, why, and the form of each op."""
        call = self._runner.call(params, buffers, batch)
        if self._chunk_size is not None:
            rows, *_ = self._chunks(call, batch)
            call = self._runner.call(params, buffers, rows)
        return self._runner.explain(self.fmodel, call)

    def _chunk(self, number: int) -> "EnsembleForward":
        """Return the same for one chunk: members draw other numbers in each."""
        return self.keyed(None if self._keys is None else fold_in(self._keys, number))

    def _of(self, function: Callable, call: Call, *, with_buffers: bool = False) -> Any:
        strategy, _ = self._runner.choose(function, call)
        draws = self._runner.draws(call, self._keys)
        run = self._runner.run
        return run(function, call, strategy, with_buffers=with_buffers, draws=draws)

    def _chunks(self, call: Call, batch: tuple) -> list[tuple]:
        """Split the batch along the axis after the members'."""
        leaves, structure = tree_flatten(batch)
        items = zip(batch, call.dims[2:], strict=True)
        dims = [dim for item, dim in items for _ in tree_leaves(item)]
        axes = [_axis(*each) for each in zip(leaves, dims, strict=True)]
        pairs = list(zip(leaves, axes, strict=True))
        sizes = {leaf.shape[axis] for leaf, axis in pairs if axis is not None}
        if len(sizes) != 1:
            raise ValueError(
                f"ensemble_forward(chunk_size={self._chunk_size}): expected batches of "
                f"one size, got {sorted(sizes)}."
            )
        pieces = [
            repeat(leaf) if axis is None else leaf.split(self._chunk_size, axis)
            for leaf, axis in pairs
        ]
        rows = zip(*pieces, strict=False)  # what is not split repeats without end
        return [tree_unflatten(row, structure) for row in rows]


def _axis(leaf: Any, dim: int | None) -> int | None:
    """Return the axis of samples beside that of members; None if there is none."""
    if not isinstance(leaf, Tensor) or leaf.ndim == (dim is not None):
        return None
    return int(dim is not None and dim % leaf.ndim == 0)


def ensemble_forward(
    fmodel: FunctionalModel,
    *,
    in_dims: InDims = None,
    chunk_size: int | None = None,
    randomness: Randomness = "different",
    strategy: EnsembleStrategy = "auto",
    shared: Patterns = (),
) -> EnsembleForward:
    """Run all members: `(params, buffers, *batch) -> [E, B, ...]`.

    `params` and `buffers` have a member axis in front, as `stack` makes them, except
    for entries that match the patterns in `shared`. With `in_dims=None` all members get
    the same batch, with `0` each its own (`x[indices]` with indices `[E, B]` for a
    bootstrap); a sequence has an entry for each item. `.with_buffers(...)` returns
    `(output, new_buffers)`, for batch statistics. Nothing that was given changes,
    except by code that torch does not see, such as `.detach().numpy()[0] = 0`.

    `strategy="loop"` runs one member after the other, `"vmap"` all in one pass by
    torch's rules, `"hybrid"` all in one pass with each op in the form that suits the
    device, and `"auto"` chooses by the model's work and the device, and takes the loop,
    with a warning, where nothing else can run. Members that answer a question about
    values differently (an `if` on a tensor, `.item()`) run in groups. `chunk_size` says
    how many samples are run at a time. With `randomness="different"`
    dropout draws for every member, with `"same"` all share one mask; masks are not the
    same for different strategies.

    Args:
        in_dims: 0 where each member has a batch of its own, None where all have one, or
            a sequence with an entry for each item.
        chunk_size: samples at a time; None for all.
        randomness: of random ops: `"error"`, `"different"` for each member, `"same"`.
        strategy: how members run: `"vmap"` at once, `"hybrid"` at once in the best form
            of each op, `"loop"` one by one; `"auto"` takes what suits the device.
        shared: patterns of the entries without a member axis.

    Raises:
        ValueError: sizes do not fit, or an option is none of those allowed.
        TypeError: the model returns something else than tensors.
        UnsupportedOp: an op cannot run for all members at once, as the strategy says.

    Example:
        >>> import vgrad
        >>> models = [torch.nn.Linear(3, 2) for _ in range(4)]
        >>> fmodel, params, buffers = vgrad.stack(models)
        >>> ensemble_forward(fmodel)(params, buffers, torch.ones(5, 3)).shape
        torch.Size([4, 5, 2])
    """
    runner = Runner("ensemble_forward", in_dims, randomness, strategy, shared)
    if chunk_size is not None:
        [chunk_size] = checks.whole("ensemble_forward", least=1, chunk_size=chunk_size)
    return EnsembleForward(fmodel, runner, chunk_size)
