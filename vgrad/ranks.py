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
        self, caller: str, *, error: BaseException | None = None, **facts: Any
    ) -> list[dict[str, Any]]:
        """Exchange the place of this rank and some facts; return all ranks' facts."""
        stopped = None if error is None else f"{type(error).__name__}: {error}"
        notes = [{"what": caller, "error": stopped, **facts}]
        if self.size > 1:
            note = from_bytes(_encoded(notes[0]))
            texts = self.padded(note.to(self.device), _NOTE).cpu().split(_NOTE)
            notes = [json.loads(bytes(text.tolist()).rstrip(b"\0")) for text in texts]
        if error is not None:
            return notes  # it is raised by the caller
        for rank, note in enumerate(notes):
            if note["error"] is not None:
                raise RankError(f"{caller}: rank {rank} stopped with {note['error']}")
        if any(note["what"] != caller for note in notes):
            places = ", ".join(f"{n} at {note['what']}" for n, note in enumerate(notes))
            raise RankError(
                f"{caller}: expected all ranks at the same place, got rank {places}. "
                f"Call the same functions in the same order on every rank."
            )
        return notes

    def check_same(
        self, caller: str, individual: Mapping[str, Any] | None = None, **facts: Any
    ) -> list[dict[str, Any]]:
        """Refuse facts that differ between ranks; return all, `individual` ones too."""
        # Of options a hash is sent; the error has the values.
        options: Any = facts.get("options")
        if options is not None:
            facts["options"] = options.digest()
        notes = self.agree(caller, **(individual or {}), **facts)
        if options is not None and len({note["options"] for note in notes}) > 1:
            values = self.exchanged(f"{caller}, options", json.dumps(options))
            raise RankError(
                f"{caller}: expected the same options on all ranks, got "
                f"{differences(values)} on ranks 0 to {self.size - 1}. Make it of the "
                f"same values on every rank; values that may differ are tensors."
            )
        for name in facts:
            values = [note[name] for note in notes]
            if any(value != values[0] for value in values):
                raise RankError(
                    f"{caller}: expected the same {name} on all ranks, got {values} on "
                    f"ranks 0 to {self.size - 1}."
                )
        return notes

    @contextmanager
    def together(self, caller: str) -> Iterator["Facts"]:
        """Run a block; if it fails on a rank, or same facts differ, all ranks raise."""
        facts = Facts()
        try:
            yield facts
        except BaseException as error:
            self.agree(caller, error=error)
            raise
        facts.notes = self.check_same(caller, facts.own, **facts.same)

    def summed(self, caller: str, tensors: Params) -> Params:
        """Sum over the ranks, which all get the same bits. {name: shape}."""
        return Summing(self, caller, tensors).finished(tensors)

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
        part = tensor.detach().contiguous()
        if len(part) < rows:
            part = part.new_zeros((rows, *part.shape[1:]))
            part[: len(tensor)] = tensor.detach()
        joined = part.new_empty((rows * self.size, *part.shape[1:]))
        if part.numel():  # collectives do not know all dtypes
            parts = joined.view(-1).view(torch.uint8).split(part.nbytes)
            part = part.view(-1).view(torch.uint8)
            distributed.all_gather(list(parts), part, group=self.group)
        return joined

    def exchanged(self, caller: str, text: str) -> list[Any]:
        """Return the JSON values of all ranks, whose texts may be of any length."""
        encoded = from_bytes(text.encode())
        sizes = [note["size"] for note in self.agree(caller, size=len(encoded))]
        texts = self.joined(encoded.to(self.device), sizes).cpu().split(sizes)
        return [json.loads(bytes(text.numpy())) for text in texts]


@dataclass
class Facts:
    """Facts of this rank, facts that all must have, and after a block all of them."""

    own: dict[str, Any] = field(default_factory=dict)
    same: dict[str, Any] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)


class Summing:
    """A sum over the ranks of tensors; each bucket travels as soon as it is full."""

    def __init__(self, ranks: Ranks, caller: str, like: Params) -> None:
        like = dict(sorted(like.items()))
        self._ranks = ranks
        self._like = like
        self._tensors: Params = {}
        self._pending = [*_buckets(like)]
        self._sent: list[tuple[list[str], Tensor, Any]] = []
        ranks.check_same(f"{caller}, sums", layout=layout(like))

    def give(self, name: str, value: Tensor) -> None:
        """Add a tensor; one that was added already stays."""
        self._tensors.setdefault(name, value)
        while self._pending and all(name in self._tensors for name in self._pending[0]):
            names = self._pending[0]
            parts = [_as_real(self._tensors[name]).reshape(-1) for name in names]
            flat = torch.cat(parts)
            group = self._ranks.group
            work = distributed.all_reduce(flat, group=group, async_op=True)
            # A bucket that fails above stays, for all ranks expect it.
            del self._pending[0]
            self._sent.append((names, flat, work))

    def finished(self, tensors: Params) -> Params:
        """Add all tensors that are missing, and return the sums."""
        for name in self._like:
            self.give(name, tensors[name])
        sums: Params = {}
        for names, flat, work in self._sent:
            work.wait()
            like = [_as_real(self._like[name]) for name in names]
            pieces = flat.split([tensor.numel() for tensor in like])
            for name, tensor, piece in zip(names, like, pieces, strict=True):
                piece = piece.view(tensor.shape)
                complex_ = self._like[name].is_complex()
                sums[name] = torch.view_as_complex(piece) if complex_ else piece
        return {name: sums[name] for name in tensors}

    def given_up(self) -> None:
        """Let the others come through, who do not yet know of an error."""
        device = self._ranks.device
        self.finished(
            {n: torch.zeros_like(x, device=device) for n, x in self._like.items()}
        )


def differences(facts: Sequence[Mapping[str, str]]) -> str:
    """Say where facts of all ranks differ; of many names the first few."""
    names = dict.fromkeys(name for entry in facts for name in entry)
    values = {name: [entry.get(name, "nothing") for entry in facts] for name in names}
    texts = [f"{n} [{', '.join(x)}]" for n, x in values.items() if len({*x}) > 1]
    more = f"; and {len(texts) - 4} more" if len(texts) > 4 else ""
    return "; ".join(texts[:4]) + more


def layout(tensors: Mapping[str, Tensor]) -> str:
    """Tell dictionaries of other names, dtypes, sizes or places on a mesh apart."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in tensors.items():
        placed = (
            getattr(value, "placements", ()) if shards.is_distributed(value) else ()
        )
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} {placed}".encode())
    return digest.hexdigest()


def _encoded(note: Mapping[str, Any]) -> bytes:
    # An error's message may be long, and is cut.
    text = json.dumps(note).encode()
    error, room = note["error"], _NOTE
    while len(text) > _NOTE and error is not None and room:
        room = room * 7 // 8  # characters, of which one may take twelve bytes
        text = json.dumps({**note, "error": f"{error[:room]} ..."}).encode()
    checks.integers("agree", minimum=0, room=_NOTE - len(text))
    return text


def _buckets(tensors: Params) -> Iterator[list[str]]:
    names: list[str] = []
    size, dtype = 0, None
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if names and (tensor.dtype != dtype or size + nbytes > _BUCKET):
            yield names
            names, size = [], 0
        names.append(name)
        size, dtype = size + nbytes, tensor.dtype
    if names:
        yield names


def _as_real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
