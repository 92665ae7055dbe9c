"""Per-sample transforms of parameters that are cut among ranks.

W ranks, each with its own part of a batch, which may be empty.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vgrad import batches
from vgrad.distributed.sharding import is_cut, laid, ranks_of, reduced, whole, wholes
from vgrad.persample.clipped import ClippedGradFn
from vgrad.persample.engine import (
    NON_RETRYABLE,
    Evaluation,
    Reducer,
    Transform,
    at_a_time,
)
from vgrad.persample.grad import WeightedGradFn
from vgrad.precision.loss_scale import LossScale
from vgrad.ranks import RankError, Ranks, layout
from vgrad.torch_private import modes
from vgrad.torch_private.tensors import Lazy
from vgrad.tree import cast, map_tensors, tensors, wide
from vgrad.typing import Buffers, Params, Tree


class Gathering(Reducer):
    """One call of all ranks, which either come through together or raise together.

    Attributes:
        failed: what ended the call on this rank, if anything did.
    """

    def __init__(self, what: str, ranks: Ranks) -> None:
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

    def any_rank(self, condition: bool) -> bool:
        """Return whether a condition holds on any rank."""
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


def sharded_call(
    transform: Transform,
    ranks: Ranks,
    params: Params,
    buffers: Buffers,
    batch: Tree,
    mask: Tensor | None = None,
    more: Any = None,
    loss_scale: LossScale | None = None,
) -> Any:
    """Call a transform with this rank's part of the parameters and of a batch.

    Sums and counts are those of the samples of all ranks, sums cut as the parameters
    are. What there is for each sample is that of this rank's samples. `more` and
    `loss_scale` are those of `Transform.on_all`. Results are constants.

    A loss that is recorded gathers a parameter where an op uses it, forward and
    backward, and frees it after. Each sum is scattered before the next one is formed.
    For other strategies all parameters are gathered before the call; so they are if the
    strategy is `"auto"` and a rank cannot record, or ranks use other parameters.

    Raises:
        TypeError: the quantity is neither a sum nor a list over samples.
        RankError: another rank has failed, or does something else.
    """
    options = transform.options
    what, given = f"sharded({options.function})", (params, buffers, batch, mask, more)
    with ranks.together(what), torch.inference_mode(False), torch.no_grad():
        _check(transform, ranks, params, buffers)
        size = batches.read(options.function, batch).size
    facts = {"strategy": options.strategy, "layout": layout({**params, **buffers})}
    own = {"size": size, "mapped": options.fallbacks.failure is not None}
    notes = ranks.check_same(what, own, **facts)
    sizes = [note["size"] for note in notes]
    with torch.inference_mode(False), torch.no_grad():
        recorded = options.strategy == "recorded"
        if not any(note["mapped"] for note in notes):
            recorded |= options.strategy == "auto"
        if recorded and any(sizes):
            gathering = Gathering(what, ranks)
            try:
                with gathering.together():
                    found = _where_used(
                        transform, gathering, size, max(sizes), given, loss_scale
                    )
            except Exception as error:
                _may_go_on(transform, ranks, error)
            else:
                return _of_all(transform, ranks, found, partial(_laid, params))
        return _before(transform, ranks, given, loss_scale)


def _check(
    transform: Transform, ranks: Ranks, params: Params, buffers: Buffers
) -> None:
    """Refuse what has parts that no rank knows, and what these ranks do not hold."""
    what = f"sharded({transform.options.function})"
    for name, value in params.items():
        if not isinstance(value, DTensor):
            raise TypeError(
                f"{what}(params): expected a DTensor in {name!r}, got a "
                f"{type(value).__name__}. Make all of them by shard(params, mesh)."
            )
    held = ranks_of(what, {**params, **buffers})
    if held is not None and held.members != ranks.members:
        raise ValueError(
            f"{what}(params): expected parameters cut among the ranks that share the "
            f"batch, {ranks.members}, got {held.members}."
        )
    if type(transform) not in (Transform, ClippedGradFn, WeightedGradFn):
        raise TypeError(
            f"{what}: expected a sum over samples or a "
            f"list of them, got another quantity. Call it with gather(params, mesh)."
        )


def _may_go_on(transform: Transform, ranks: Ranks, error: Exception) -> None:
    """Raise what ended a recorded call, unless all ranks may gather everything."""
    options = transform.options
    if options.strategy == "recorded":
        raise error
    final = isinstance(error, NON_RETRYABLE)
    notes = ranks.agree(f"sharded({options.function}), stopped", final=final)
    if any(note["final"] for note in notes):
        raise error
    why = str(error).partition("\n")[0]
    options.fallbacks.warn(
        f"{options.function}: all parameters are gathered before the loss runs, which "
        f"takes their memory on every rank, since they cannot be where they are used. "
        f"{type(error).__name__}: {why}"
    )


def _where_used(
    transform: Transform,
    gathering: Gathering,
    own: int,
    size: int,
    given: tuple[Params, Buffers, Tree, Tensor | None, Any],
    loss_scale: LossScale | None,
) -> Any:
    """Record, and gather each parameter where it is used.

    There are `own` samples here. Which ops run may depend on sizes. So all ranks run
    chunks of the same sizes, filled up with samples that do not count.
    """
    params, buffers, batch, mask, more = given
    weights = more if isinstance(transform, WeightedGradFn) else None
    keys = transform.keys
    if size > own:
        if mask is None:
            mask = torch.ones(own, dtype=torch.bool, device=tensors(batch)[0].device)
        mask = _filled(mask, size, again=False)
        batch = map_tensors(lambda each: _filled(each, size), batch)
        if weights is not None:
            weights = _filled(weights, size, again=False)
        keys = None if keys is None else _filled(keys, size)
    parameters, fixed = gathering.lazy(params), gathering.lazy(buffers)
    call = transform.options.on(
        parameters, fixed, batch, mask, weights, loss_scale, keys
    )
    chunk = gathering.least(at_a_time(call) or size)
    call = replace(call, chunk_size=chunk, strategy="recorded", reducer=gathering)
    found = transform.called(Evaluation(call), weights)
    return found if mask is None else transform.selected(found, mask)


def _laid(params: Params, name: str, local: Tensor) -> Tensor:
    """Make a part of a sum a part of a whole."""
    like = params[name]
    assert isinstance(like, DTensor)
    return laid(local, like)


def _before(
    transform: Transform,
    ranks: Ranks,
    given: tuple[Params, Buffers, Tree, Tensor | None, Any],
    loss_scale: LossScale | None,
) -> Any:
    """Gather all parameters, and run on them."""
    params, buffers, batch, mask, more = given
    parameters, fixed = wholes(params), wholes(buffers)
    with ranks.together(f"sharded({transform.options.function}), run"):
        found = transform.on_all(parameters, fixed, batch, mask, more, loss_scale)
        if mask is not None:
            found = transform.selected(found, mask)

    def scattered(name: str, value: Tensor) -> Tensor:
        like = params[name]
        assert isinstance(like, DTensor)
        return laid(reduced(ranks, value, like), like)

    return _of_all(transform, ranks, found, scattered)


def _of_all(
    transform: Transform,
    ranks: Ranks,
    found: Any,
    summed: Callable[[str, Tensor], Tensor],
) -> Any:
    """Make the sums and counts of a result those of all ranks."""
    value, *aux = found if transform.options.has_aux else (found,)
    if isinstance(transform, ClippedGradFn):
        counts = {"clipped": value.clipped, "nonfinite": value.nonfinite}
        grads = _each(value.grads, summed)
        whole = ranks.summed(transform.options.function, counts)
        value = value._replace(grads=grads, **whole)
    elif isinstance(transform, WeightedGradFn):
        value = _each(value, summed)
    return (value, *aux) if aux else value


def _each(sums: Params, summed: Callable[[str, Tensor], Tensor]) -> Params:
    """Replace sums one by one, so that the whole ones are freed."""
    return {name: summed(name, sums.pop(name)) for name in list(sums)}


def _filled(tensor: Tensor, size: int, *, again: bool = True) -> Tensor:
    """Fill a batch up, with its last sample if there is one and `again`; else zeros."""
    more = size - len(tensor)
    if again and len(tensor):
        rest = tensor[-1:].expand(more, *tensor.shape[1:])
    else:
        rest = tensor.new_zeros((more, *tensor.shape[1:]))
    return torch.cat([tensor.detach(), rest])
