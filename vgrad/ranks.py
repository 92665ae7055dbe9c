"""The ranks along one axis of a mesh, and their collectives.

Every rank has to issue the same collectives in the same order. Each group of them
begins with `agree`: where ranks are at different places, or one has failed, all raise.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed

from vgrad import checks, devices
from vgrad.generators import from_bytes
from vgrad.torch_private import shards
from vgrad.typing import Params

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NOTE = 1024
"""Bytes of the facts that ranks exchange before collectives."""

_BUCKET = 2**25
"""Bytes of small tensors that are summed in one collective."""


class Values(dict[str, str]):
    """Values that have to be the same on all ranks, too many to send each time."""

    def digest(self) -> str:
        """Return a hash of the values."""
        text = json.dumps(self, sort_keys=True).encode()
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def facts(self) -> "Values":
        """Return the values by name."""
        return self


class RankError(RuntimeError):
    """Another rank has failed, or ranks are at different places."""


class Ranks(NamedTuple):
    """The ranks along one axis of a mesh."""

    group: "distributed.ProcessGroup | None"  # None for a process alone
    rank: int
    size: int
    device: torch.device  # of tensors that take part in collectives

    @classmethod
    def of(cls, function: str, mesh: "DeviceMesh", axis: str) -> "Ranks":
        """Return the ranks along an axis of a mesh, to which this rank belongs."""
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"{function}(mesh={mesh!r}): expected a DeviceMesh, as "
                f"torch.distributed.init_device_mesh makes one, got a "
                f"{type(mesh).__name__}."
            )
        names = mesh.mesh_dim_names or ()
        if axis not in names:
            raise ValueError(
                f"{function}(mesh, {axis!r}): expected one of the names of the mesh's "
                f"axes, {list(names)}. Pass mesh_dim_names to init_device_mesh."
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"{function}(mesh): expected a mesh that this rank belongs to, got "
                f"one of the ranks {mesh.mesh.flatten().tolist()} on rank "
                f"{distributed.get_rank()}."
            )
        device = devices.current(mesh.device_type)
        return cls(
            mesh.get_group(axis),
            mesh.get_local_rank(axis),
            mesh.size(names.index(axis)),
            device,
        )

    @classmethod
    def of_all(cls, function: str, mesh: "DeviceMesh | None") -> "Ranks":
        """Return all ranks of a mesh, along whatever axes; None is one process."""
        if mesh is None:
            return cls(None, 0, 1, devices.HOST)
        names = getattr(mesh, "mesh_dim_names", None) or ("",)
        ranks = cls.of(function, mesh, names[0])
        if mesh.ndim == 1:
            return ranks
        rank, size = distributed.get_rank(), distributed.get_world_size()
        if mesh.size() != size:
            raise ValueError(
                f"{function}(mesh): expected a mesh of one axis, or of all {size} "
                f"ranks, got {mesh.ndim} axes and {mesh.size()} ranks. Pass the mesh "
                f"that init_device_mesh made."
            )
        return ranks._replace(group=distributed.group.WORLD, rank=rank, size=size)

    @property
    def members(self) -> list[int]:
        """Their numbers among all processes."""
        return distributed.get_process_group_ranks(self.group)

    def agree(
        self, what: str, *, error: BaseException | None = None, **facts: Any
    ) -> list[dict[str, Any]]:
        """Exchange the place of this rank and some facts; return all ranks' facts."""
        stopped = None if error is None else f"{type(error).__name__}: {error}"
        notes = [{"what": what, "error": stopped, **facts}]
        if self.size > 1:
            own = from_bytes(_encoded(notes[0]))
            texts = self.padded(own.to(self.device), _NOTE).cpu().split(_NOTE)
            notes = [json.loads(bytes(each.tolist()).rstrip(b"\0")) for each in texts]
        if error is not None:
            return notes  # it is raised by the caller
        for rank, note in enumerate(notes):
            if note["error"] is not None:
                raise RankError(f"{what}: rank {rank} stopped with {note['error']}")
        if any(note["what"] != what for note in notes):
            places = ", ".join(f"{n} at {each['what']}" for n, each in enumerate(notes))
            raise RankError(
                f"{what}: expected all ranks at the same place, got rank {places}. "
                f"Call the same functions in the same order on every rank."
            )
        return notes

    def check_same(
        self, what: str, own: Mapping[str, Any] | None = None, **facts: Any
    ) -> list[dict[str, Any]]:
        """Refuse facts that differ between ranks; return all, with `own` ones."""
        # Of options a hash is sent; the error has the values.
        options: Any = facts.get("options")
        if options is not None:
            facts["options"] = options.digest()
        found = self.agree(what, **(own or {}), **facts)
        if options is not None and len({note["options"] for note in found}) > 1:
            values = self.exchanged(f"{what}, options", json.dumps(options.facts()))
            raise RankError(
                f"{what}: expected the same options, loss and optimizer on all ranks, "
                f"got {differences(values)} on ranks 0 to {self.size - 1}. Make it of "
                f"the same values on every rank; values that may differ are tensors."
            )
        for name in facts:
            values = [note[name] for note in found]
            if any(value != values[0] for value in values):
                raise RankError(
                    f"{what}: expected the same {name} on all ranks, got {values} on "
                    f"ranks 0 to {self.size - 1}."
                )
        return found

    @contextmanager
    def together(self, what: str) -> Iterator["Facts"]:
        """Run a block; if it fails on a rank, or same facts differ, all ranks raise."""
        facts = Facts()
        try:
            yield facts
        except BaseException as error:
            self.agree(what, error=error)
            raise
        facts.notes = self.check_same(what, facts.own, **facts.same)

    def summed(self, what: str, tensors: Params) -> Params:
        """Sum over the ranks, which all get the same bits. {name: shape}."""
        return Summing(self, what, tensors).finished(tensors)

    def of_first(self, tensor: Tensor) -> Tensor:
        """Return the tensors of the first rank, bit by bit; shapes must be the same."""
        sent = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            flat = sent.view(-1).view(torch.uint8)
            distributed.broadcast(flat, group=self.group, group_src=0)
        return sent

    def joined(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate `[size of this rank, ...]` over the ranks, in their order."""
        if self.size == 1:
            return tensor
        parts = self.padded(tensor, max(sizes)).chunk(self.size)
        pairs = zip(parts, sizes, strict=True)
        return torch.cat([part[:size] for part, size in pairs])

    def padded(self, tensor: Tensor, rows: int) -> Tensor:
        """Concatenate over the ranks, each part filled up to `rows` with zeros."""
        own = tensor.detach().contiguous()
        if len(own) < rows:
            own = own.new_zeros((rows, *own.shape[1:]))
            own[: len(tensor)] = tensor.detach()
        found = own.new_empty((rows * self.size, *own.shape[1:]))
        if own.numel():  # collectives do not know all dtypes
            parts = found.view(-1).view(torch.uint8).split(own.nbytes)
            own = own.view(-1).view(torch.uint8)
            distributed.all_gather(list(parts), own, group=self.group)
        return found

    def exchanged(self, what: str, text: str) -> list[Any]:
        """Return the JSON values of all ranks, whose texts may be of any length."""
        own = from_bytes(text.encode())
        sizes = [note["size"] for note in self.agree(what, size=len(own))]
        texts = self.joined(own.to(self.device), sizes).cpu().split(sizes)
        return [json.loads(bytes(each.numpy())) for each in texts]


@dataclass
class Facts:
    """Facts of this rank, facts that all must have, and after a block all of them."""

    own: dict[str, Any] = field(default_factory=dict)
    same: dict[str, Any] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)


class Summing:
    """A sum over the ranks of tensors; each bucket travels as soon as it is full."""

    def __init__(self, ranks: Ranks, what: str, like: Params) -> None:
        like = dict(sorted(like.items()))
        self._ranks = ranks
        self._like = like
        self._given: Params = {}
        self._left = [*_buckets(like)]
        self._sent: list[tuple[list[str], Tensor, Any]] = []
        ranks.check_same(f"{what}, sums", layout=layout(like))

    def give(self, name: str, value: Tensor) -> None:
        """Add a tensor; one that was added already stays."""
        self._given.setdefault(name, value)
        while self._left and all(name in self._given for name in self._left[0]):
            names = self._left[0]
            parts = [_as_real(self._given[name]).reshape(-1) for name in names]
            flat = torch.cat(parts)
            group = self._ranks.group
            work = distributed.all_reduce(flat, group=group, async_op=True)
            del self._left[0]  # what fails above stays, for all ranks expect a bucket
            self._sent.append((names, flat, work))

    def finished(self, tensors: Params) -> Params:
        """Add all tensors that are missing, and return the sums."""
        for name in self._like:
            self.give(name, tensors[name])
        found: Params = {}
        for names, flat, work in self._sent:
            work.wait()
            like = [_as_real(self._like[name]) for name in names]
            pieces = flat.split([each.numel() for each in like])
            for name, each, piece in zip(names, like, pieces, strict=True):
                piece = piece.view(each.shape)
                complex_ = self._like[name].is_complex()
                found[name] = torch.view_as_complex(piece) if complex_ else piece
        return {name: found[name] for name in tensors}

    def given_up(self) -> None:
        """Let the others come through, who do not yet know of an error."""
        device = self._ranks.device
        self.finished(
            {n: torch.zeros_like(x, device=device) for n, x in self._like.items()}
        )


def differences(facts: Sequence[Mapping[str, str]]) -> str:
    """Say where facts of all ranks differ; of many places the first few."""
    places = dict.fromkeys(name for each in facts for name in each)
    values = {name: [each.get(name, "nothing") for each in facts] for name in places}
    found = {name: each for name, each in values.items() if len({*each}) > 1}

    def is_first(name: str) -> bool:  # a part of what differs as a whole is not
        parts = name.split(".")
        return not any(".".join(parts[:n]) in found for n in range(1, len(parts)))

    names = sorted(filter(is_first, found), key=lambda name: (name.count("."), name))
    first = names[:4]
    told = [
        f"{n.replace('._', '.').lstrip('_')} [{', '.join(found[n])}]" for n in first
    ]
    more = len(names) - len(told)
    return "; ".join(told) + (f"; and {more} more" if more else "")


def layout(tensors: Mapping[str, Tensor]) -> str:
    """Tell dictionaries of other names, dtypes, sizes or places on a mesh apart."""
    found = hashlib.blake2b(digest_size=16)
    for name, value in tensors.items():
        placed = (
            getattr(value, "placements", ()) if shards.is_distributed(value) else ()
        )
        found.update(f"{name} {value.dtype} {tuple(value.shape)} {placed}".encode())
    return found.hexdigest()


def _encoded(note: Mapping[str, Any]) -> bytes:
    # An error's message may be long, and is cut.
    text = json.dumps(note).encode()
    error, room = note["error"], _NOTE
    while len(text) > _NOTE and error is not None and room:
        room = room * 7 // 8  # characters, of which one may take twelve bytes
        text = json.dumps({**note, "error": f"{error[:room]} ..."}).encode()
    checks.whole("agree", least=0, room=_NOTE - len(text))
    return text


def _buckets(tensors: Params) -> Iterator[list[str]]:
    names: list[str] = []
    size, dtype = 0, None
    for name, tensor in tensors.items():
        own = tensor.numel() * tensor.element_size()
        if names and (tensor.dtype != dtype or size + own > _BUCKET):
            yield names
            names, size = [], 0
        names.append(name)
        size, dtype = size + own, tensor.dtype
    if names:
        yield names


def _as_real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
