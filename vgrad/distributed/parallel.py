"""Per-sample transforms on batches whose samples are cut among ranks.

W ranks, each with its own part of a batch, which may be empty. B samples altogether.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vgrad import batches
from vgrad.compiled import CompiledTransform
from vgrad.distributed.ranks import Ranks
from vgrad.distributed.sharded import sharded_call
from vgrad.generators import ALONE, kept_random_state, sample_keys
from vgrad.persample.engine import Call, Transform, constant
from vgrad.persample.weighted import WeightedGradFn
from vgrad.precision.loss_scale import LossScale
from vgrad.tree import map_tensors
from vgrad.typing import Params


class ParallelTransform:
    """What `data_parallel` returns for a per-sample transform: the same function.

    It has the attributes of what it was made of.
    """

    def __init__(self, transform: Transform | CompiledTransform, ranks: Ranks) -> None:
        """Keep the transform."""
        self._transform = transform
        self._ranks = ranks
        self._takes_weights = isinstance(_plain(transform), WeightedGradFn)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the transform."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._transform, name)

    def with_loss_scale(self, loss_scale: LossScale | None) -> "ParallelTransform":
        """Return the same function with another loss scale."""
        scaled = self.__getattr__("with_loss_scale")(loss_scale)
        return ParallelTransform(scaled, self._ranks)

    def __call__(self, *arguments: Any, mask: Tensor | None = None) -> Any:
        """Compute the quantity of the whole batch, of which this rank has a part."""
        options = _plain(self._transform).options
        function, given = options.function, 3 if self._takes_weights else 2
        meeting = _Meeting(self._ranks, f"data_parallel({function})")
        draws = options.randomness != "error"
        with meeting.until():
            read = batches.read(function, arguments[given:])
            if mask is not None:
                batches.check_mask(function, mask, read.size)
            counted = read.size if mask is None else int(mask.sum())
            seed = int(torch.randint(2**62, ())) if draws else None
        notes = meeting.told(samples=counted, size=read.size, seed=seed)
        sizes = [note["samples"] for note in notes]
        seed, size = notes[0]["seed"], read.size
        if options.has_aux and not read.size and sum(sizes):
            # What aux looks like is known from a sample alone.
            own = arguments[: given - 2], arguments[given:]
            weights, batch = map_tensors(_one, own)
            arguments = (*weights, *arguments[given - 2 : given], *batch)
            mask = torch.zeros(1, dtype=torch.bool, device=read.tensors[0].device)
            size = 1
        with meeting.until(), torch.no_grad():
            transform = self._transform
            if options.randomness == "different":
                start = sum(note["size"] for note in notes[: self._ranks.rank])
                transform = transform.keyed(sample_keys(seed, start, size))
                seed = None
            with _seeded(seed, read.tensors):
                found = self._run(transform, meeting, arguments, mask)
        meeting.told()
        joined = partial(self._ranks.joined, sizes=sizes)
        found = _plain(self._transform).mapped(joined, found)
        if torch.is_grad_enabled():
            params = arguments[given - 2].values()
            found = constant(meeting.what, found, [*params, *read.tensors])
        return found

    def _run(
        self,
        transform: Transform | CompiledTransform,
        meeting: "_Meeting",
        arguments: tuple,
        mask: Tensor | None,
    ) -> Any:
        """Return sums over all ranks, and lists of this rank's samples."""
        *weights, params, buffers = arguments[: 3 if self._takes_weights else 2]
        if not any(isinstance(each, DTensor) for each in params.values()):
            calls = partial(Call, reduce=meeting.summed)
            run = transform.over(calls, self._ranks.size)
            return run(*arguments, mask=mask)
        batch = arguments[len(weights) + 2 :]
        if not isinstance(transform, Transform):
            raise TypeError(
                f"{meeting.what}(params): expected ordinary tensors for a compiled "
                f"function, got DTensors, which are gathered while it runs. Leave "
                f"vgrad.compile out, or pass gather(params, mesh)."
            )
        meeting.told()
        given = params, buffers, batch, mask, *weights
        return sharded_call(transform, self._ranks, *given)


class _Meeting:
    """One call of all ranks, which either come through together or raise together."""

    def __init__(self, ranks: Ranks, what: str) -> None:
        """Begin."""
        self.what = what
        self._ranks = ranks
        self._place = 0
        self._met = False

    @contextmanager
    def until(self) -> Iterator[None]:
        """Run a block before the ranks meet; tell them if it fails."""
        self._met = False
        try:
            yield
        except BaseException as error:
            if not self._met:
                self.told(error=error)
            raise

    def told(self, **facts: Any) -> list[dict[str, Any]]:
        """Meet, if the ranks have not since the block began."""
        if self._met:
            return []
        self._met = True
        self._place += 1
        return self._ranks.agree(f"{self.what}, {self._place}", **facts)

    def summed(self, tensors: Params) -> Params:
        """Meet, and sum over the ranks."""
        self._met = True
        return self._ranks.summed(self.what, tensors)


def _plain(transform: Transform | CompiledTransform) -> Transform:
    """Return a transform as it runs in eager mode."""
    return transform if isinstance(transform, Transform) else transform.plain


def _one(empty: Tensor) -> Tensor:
    """Make one sample where there is none."""
    return empty.new_zeros((1, *empty.shape[1:]))


@contextmanager
def _seeded(seed: int | None, tensors: list[Tensor]) -> Iterator[None]:
    """Draw from a seed that all ranks know, if all samples draw the same."""
    if seed is None:
        yield
        return
    with ALONE, kept_random_state(tensors):
        torch.manual_seed(seed)
        yield
