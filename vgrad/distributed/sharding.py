"""Parameters of which each rank holds a part, and per-sample transforms of them.

W ranks. A tensor is cut along its first dimension into parts of `ceil(N / W)` rows, as
`torch.distributed.fsdp.fully_shard` does; the last ranks may hold fewer rows, or none.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from vgrad import batches, files, tree
from vgrad.persample.clipped import ClippedSum
from vgrad.persample.engine import (
    NON_RETRYABLE,
    Inputs,
    Reducer,
    Transform,
    at_a_time,
    eager,
)
from vgrad.persample.grad import WeightedSum
from vgrad.persample.gram import Products
from vgrad.persample.moments import MomentsOfGrads
from vgrad.ranks import Ranks, layout
from vgrad.torch_private import modes, shards
from vgrad.torch_private.tensors import Lazy
from vgrad.tree import cast, wide
from vgrad.typing import Buffers, Params, T


def shard(params: Params, mesh: DeviceMesh, *, data: str = "dp") -> Params:
    """Keep this rank's part of each tensor: `{name: DTensor}`, along an axis of a mesh.

    All ranks have to call it with the same values, and each of them frees the whole
    tensors when nothing else holds them. Tensors without dimensions stay on all ranks.
    Works for the state of an optimizer as well, though `tx.init(shard(params, mesh))`
    never makes the whole of it.

    The DTensors of `fully_shard` need no `shard`. They go into a state as they are,
    `{name: p.detach() for name, p in module.named_parameters()}`, and back by
    `module.load_state_dict(params)`, under the names that the module had before.

    Raises:
        RankError: another rank has other tensors.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> def on_each_rank(params):
        ...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        ...     return shard(params, mesh)
    """
    ranks = Ranks.of("shard", mesh, data)
    with ranks.together("shard") as facts:
        for name, value in params.items():
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                raise TypeError(
                    f"shard(params): expected ordinary tensors, got a "
                    f"{type(value).__name__} in {name!r}."
                )
        facts.same["tensors"] = files.digest(params)
    mesh = mesh if mesh.ndim == 1 else mesh[data]
    parts = {}
    for name, value in params.items():
        value = value.detach().to(ranks.device)
        placement = Shard(0) if value.ndim else Replicate()
        local = value[_rows_of(ranks, len(value))] if value.ndim else value
        local = local.clone(memory_format=torch.contiguous_format)
        parts[name] = shards.made(local, mesh, [placement], value.shape)
    return parts


def gather(state: T, mesh: DeviceMesh | None) -> T:
    """Return a tree with plain tensors in the place of DTensors, on every rank.

    Called on every rank of the mesh. One of them can write the result with
    `vgrad.training.release`, for others; a state itself is saved by
    `vgrad.training.save`, whose files hold the secret key. Plain tensors stay as they
    are.

    Raises:
        RankError: names, shapes or dtypes differ between ranks.

    Example:
        >>> gather({"w": torch.ones(2)}, None)
        {'w': tensor([1., 1.])}
    """
    ranks = Ranks.of_all("gather", mesh)
    with ranks.together("gather") as facts:
        facts.same["tensors"] = layout(tree.state_dict(state))
    with torch.no_grad():
        return tree.map_tensors(shards.whole, state)


def _is_cut(value: DTensor) -> bool:
    return value.placements[0].is_shard()


def _rows_of(ranks: Ranks, size: int, rank: int | None = None) -> slice:
    rows = -(-size // ranks.size)
    rank = ranks.rank if rank is None else rank
    return slice(rows * rank, rows * (rank + 1))


def _gathered(ranks: Ranks, local: Tensor, size: int) -> Tensor:
    if ranks.size == 1:
        return local.clone()
    return ranks.padded(local, _rows_of(ranks, size, 0).stop)[:size]


def _reduced(ranks: Ranks, value: Tensor, like: DTensor) -> Tensor:
    """Sum over the ranks in place, and keep this rank's part, cut as `like`."""
    value = value.detach().contiguous()
    numbers = torch.view_as_real(value) if value.is_complex() else value
    if not _is_cut(like):
        if ranks.size > 1:
            distributed.all_reduce(numbers, group=ranks.group)
        return value
    for rank in range(ranks.size if value.numel() else 0):
        part = numbers[_rows_of(ranks, len(value), rank)]
        if ranks.size > 1 and part.numel():
            distributed.reduce(part, group=ranks.group, group_dst=rank)
    return value[_rows_of(ranks, len(value))].clone()


# Calls of all ranks.


class RankCall:
    """One call of all ranks, which either come through together or raise together."""

    def __init__(self, label: str, ranks: Ranks) -> None:
        self.label = label
        self.ranks = ranks
        self.failed: BaseException | None = None  # the error that ended it here

    def exchange(
        self, place: str, facts: Mapping[str, Any] | None = None, **same: Any
    ) -> list[dict[str, Any]]:
        """Return the notes of all ranks; refuse `same` facts that differ."""
        with self.same_errors():
            return self.ranks.check_same(f"{self.label}, {place}", facts, **same)

    @contextmanager
    def same_errors(self) -> Iterator[None]:
        """Run a block whose errors need no exchange, since all ranks have them."""
        if self.failed is not None:
            raise self.failed
        try:
            yield
        except BaseException as error:
            self.failed = error
            raise

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block; if it fails on a rank, all ranks raise."""
        try:
            yield
        except BaseException as error:
            self.abandon()
            if self.failed is None:
                self.failed = error
                self.ranks.agree(self.label, error=error)
            raise self.failed from None

    def abandon(self) -> None:
        """Complete collectives that other ranks have begun."""


class _Gathering(RankCall, Reducer):
    """A call that gathers each parameter where it is used."""

    def __init__(self, label: str, ranks: Ranks) -> None:
        super().__init__(label, ranks)
        self._sharded: dict[str, DTensor] = {}
        self._cache: Params = {}  # the one that was read last comes last
        self._room = 0

    def lazy(self, tensors: Mapping[str, Tensor]) -> Params:
        return {name: self._lazy(name, value) for name, value in tensors.items()}

    def _lazy(self, name: str, value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return value
        self._sharded[name] = value
        local = value.to_local().detach()
        if not _is_cut(value):
            return local
        size = value.numel() * value.element_size()
        self._room = max(self._room, size)
        compute = partial(self._gather, name, local, len(value), size)
        return Lazy(compute, value.shape, value.dtype, local.device)

    def _gather(self, name: str, local: Tensor, rows: int, size: int) -> Tensor:
        if (tensor := self._cache.pop(name, None)) is None:
            used = sum(value.nbytes for value in self._cache.values())
            while self._cache and used + size > self._room:
                used -= self._cache.pop(next(iter(self._cache))).nbytes
            with modes.exit_all(), modes.without_modes():
                self.exchange(f"use of {name}")
                tensor = _gathered(self.ranks, local, rows)
        self._cache[name] = tensor
        return tensor

    def summed(self, name: str, value: Tensor) -> Tensor:
        """Add up the sums of all ranks, and return the part of this one."""
        self._cache.clear()  # no parameter is held beside a sum
        self.exchange(f"sum of {name}")
        like = self._sharded[name]
        return _reduced(self.ranks, cast(value, wide(like.dtype)), like)

    reduced = summed

    def any_rank(self, condition: bool) -> bool:
        notes = self.exchange("condition", {"holds": condition})
        return any(note["holds"] for note in notes)

    def minimum(self, number: int) -> int:
        return min(
            note["number"] for note in self.exchange("number", {"number": number})
        )

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            with super().together():
                yield
                self.exchange("end")
        finally:
            self._cache.clear()


def sharded_call(transform: Transform, ranks: Ranks, inputs: Inputs) -> Any:
    """Return sums over all ranks, cut as parameters are, and lists of this rank's."""
    options, (params, buffers, batch, *_) = transform.options, inputs
    label = f"sharded({options.function})"
    with (
        ranks.together(label) as facts,
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        _check(label, transform, ranks, params, buffers)
        size = batches.read(options.function, batch).size
        fallbacks = options.fallbacks
        mapped = any(entry.failure for entry in fallbacks.histories.values())
        mapped |= fallbacks.route in ("vmap", "loop")
        facts.own |= {"size": size, "mapped": mapped}
        facts.same["strategy"] = options.strategy
        facts.same["layout"] = layout({**params, **buffers})
    notes = facts.notes
    sizes = [note["size"] for note in notes]
    with torch.inference_mode(False), torch.no_grad():
        inputs = inputs._replace(scales=tree.map_tensors(shards.whole, inputs.scales))
        recorded = options.strategy == "recorded"
        if not any(note["mapped"] for note in notes):
            recorded |= options.strategy == "auto"
        if recorded and any(sizes):
            # A parameter is gathered where an op uses it, forward and backward, and
            # each sum is scattered before the next one is formed.
            try:
                gathering = _Gathering(label, ranks)
                with gathering.together():
                    result = _where_used(transform, gathering, size, max(sizes), inputs)
            except Exception as error:
                _check_fallback(transform, ranks, error)
            else:
                laid = lambda name, local: shards.like(params[name], local)  # noqa: E731
                return _of_all_ranks(transform, ranks, result, laid)
        # All parameters are gathered before the call.
        parameters, fixed = (
            tree.map_tensors(shards.whole, entries) for entries in (params, buffers)
        )
        with ranks.together(f"{label}, run"):
            gathered = inputs._replace(params=parameters, buffers=fixed)
            result = eager(transform, gathered)

        def scattered(name: str, value: Tensor) -> Tensor:
            like: Any = params[name]
            return shards.like(like, _reduced(ranks, value, like))

        return _of_all_ranks(transform, ranks, result, scattered)


def _check(
    label: str, transform: Transform, ranks: Ranks, params: Params, buffers: Buffers
) -> None:
    """Refuse parameters that are cut in another way than by `shard`."""
    meshes = []
    for name, value in {**params, **buffers}.items():
        if not isinstance(value, DTensor):
            if name not in params:
                continue
            raise TypeError(
                f"{label}(params): expected a DTensor in {name!r}, got a "
                f"{type(value).__name__}. Make all of them by shard(params, mesh)."
            )
        meshes.append(value.device_mesh)
        if meshes[-1].ndim != 1 or meshes[-1] != meshes[0]:
            raise ValueError(
                f"{label}(params): expected tensors on one mesh with one axis, got "
                f"{name!r} on {meshes[-1]}."
            )
        if tuple(value.placements) not in ((Shard(0),), (Replicate(),)):
            raise ValueError(
                f"{label}(params): expected tensors cut along their first dimension, "
                f"or whole on every rank, got {name!r} placed as {value.placements}. "
                f"Use value.redistribute(placements=[Shard(0)])."
            )
    for mesh in meshes[:1]:
        if mesh.mesh_dim_names is None:
            raise ValueError(
                f"{label}(params): expected a mesh whose axis has a name. Pass "
                f"mesh_dim_names to init_device_mesh."
            )
        holders = Ranks.of(label, mesh, mesh.mesh_dim_names[0])
        if holders.members != ranks.members:
            raise ValueError(
                f"{label}(params): expected parameters cut among the ranks that share "
                f"the batch, {ranks.members}, got {holders.members}."
            )
    if isinstance(transform.quantity, Products | MomentsOfGrads):
        raise TypeError(
            f"{label}: expected a sum over samples or a list of them, got another "
            f"quantity. Call it with gather(params, mesh)."
        )


def _check_fallback(transform: Transform, ranks: Ranks, error: Exception) -> None:
    """Raise the error that ended a recorded call, unless all ranks may gather all."""
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
    transform: Transform, gathering: _Gathering, present: int, size: int, inputs: Inputs
) -> Any:
    """Gather each parameter where it is used; this rank has `present` samples."""
    # Which ops run may depend on sizes. So all ranks run chunks of the same sizes.
    if size > present:
        inputs = inputs.padded(present, size)
    inputs = inputs._replace(
        params=gathering.lazy(inputs.params), buffers=gathering.lazy(inputs.buffers)
    )
    call = transform.options.on(inputs)
    chunk = gathering.minimum(at_a_time(call) or size)
    call = replace(call, chunk_size=chunk, strategy="recorded", reducer=gathering)
    value, mask = transform.evaluate(call), inputs.mask
    return value if mask is None else transform.selected(value, mask, inputs)


def _of_all_ranks(
    transform: Transform,
    ranks: Ranks,
    result: Any,
    summed: Callable[[str, Tensor], Tensor],
) -> Any:
    """Replace sums and counts of a result by those over all ranks."""

    def over_ranks(sums: Params) -> Params:  # one by one, which frees the whole ones
        return {name: summed(name, sums.pop(name)) for name in list(sums)}

    value, *aux = result if transform.options.has_aux else (result,)
    if isinstance(transform.quantity, ClippedSum):
        counts = {"clipped": value.clipped, "nonfinite": value.nonfinite}
        grads = over_ranks(value.grads)
        counts = ranks.summed(transform.options.function, counts)
        value = value._replace(grads=grads, **counts)
    elif isinstance(transform.quantity, WeightedSum):
        value = over_ranks(value)
    return (value, *aux) if aux else value
