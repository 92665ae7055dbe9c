"""Files that exist as a whole or not at all, and tensors in such files."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

Description = dict[str, Any]
"""The description of a file's tensors, as in JSON; `kind` names their kind."""


def replace(path: Path, *content: bytes | memoryview, private: bool = False) -> None:
    """Write a file so that at any moment either the old or the new content is there.

    Only its owner can read a private file, from the moment it exists.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # left by a process that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = os.open(partial, flags, 0o600 if private else 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Refuse a folder that another process has locked, and lock it in a block."""
    import fcntl  # which Windows lacks

    descriptor = os.open(folder, os.O_RDONLY)  # a kill releases it
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"{folder}: expected a folder in which no other process is {doing}."
            ) from error
        yield
    finally:
        os.close(descriptor)


def new_folder(
    folder: Path, contents: Mapping[str, Iterable[bytes | memoryview]]
) -> None:
    """Make a folder of files, which is there with all of them or not at all."""
    folder = folder.absolute()
    empty = folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())
    if os.path.lexists(folder) and not empty:
        raise FileExistsError(
            f"{folder}: expected a new or an empty folder, got one with other content, "
            f"or a file. Name another folder."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)  # left by a process that was killed
    partial.mkdir()
    try:
        for name, content in contents.items():
            replace(partial / name, *content)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def from_json(text: str | bytes) -> Any:
    """Read JSON that anybody may have written: anything else is a ValueError."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    description: Description,
    *,
    private: bool = False,
) -> None:
    """Replace a file by tensors and their description, sealed with a hash."""
    try:
        text = json.dumps(description, allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"{path}: expected settings that JSON has, got {description} ({error}). "
            f"Give a number that is not finite as text."
        ) from error
    values = {name: plain(value) for name, value in tensors.items()}
    metadata = {"vgrad": text, "sha256": _seal(text, values)}
    replace(path, *serialized(str(path), values, metadata), private=private)


def serialized(
    where: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> list[bytes | memoryview]:
    """Return a file of `plain` tensors, the same bytes for the same content."""
    try:
        content = safetensors.torch.save(dict(tensors), dict(metadata))
    except KeyError as error:
        raise TypeError(
            f"{where}: expected dtypes that the safetensors format has, got {error}."
        ) from error
    # A length, the header as JSON, the numbers. safetensors writes the metadata in
    # another order each time.
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, memoryview(content)[end:]]


def read_tensors(
    path: Path,
    kind: str,
    *,
    called: str | None = None,
    checked: set[str] | None = None,
) -> tuple[dict[str, Tensor], Description]:
    """Read a file of `write_tensors`, on the CPU; errors name it as `called`.

    With `checked`, a set of hashes, the file is mapped and not copied. A file is hashed
    unless its hash is among them, and then joins them.
    """
    called = called or f"the {kind} of a run"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected {called}, got no file.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        if checked is None:
            # Copied, because torch aligns its own memory and a file does not, and the
            # numbers that a kernel computes may depend on that.
            tensors = {key: tensor.clone() for key, tensor in tensors.items()}
        text, seal = metadata.get("vgrad", _FOREIGN), metadata.get("sha256", "")
        if text != _FOREIGN and seal not in (checked or ()):
            if seal != _seal(text, tensors):
                raise ValueError("its checksum does not match")
            if checked is not None:
                checked.add(seal)
        description = from_json(text)
        actual = description["kind"]
    except _DAMAGE as error:
        raise ValueError(
            f"{path}: expected {called}, got a damaged file ({error})."
        ) from error
    if actual != kind:
        raise ValueError(f"{path}: expected {called}, got a {actual}.")
    return tensors, description


_FOREIGN = '{"kind": "file not made by vgrad"}'
_DAMAGE = (safetensors.SafetensorError, OSError, ValueError, LookupError, TypeError)
"""TypeErrors are of descriptions and of torch, for a size beyond 64 bits."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash tensors by name, SHA-256 in hexadecimal; on the CPU nothing is copied."""
    return _seal("", {n: t.detach().cpu().contiguous() for n, t in tensors.items()})


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU that shares its memory with no other."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _seal(text: str, tensors: Mapping[str, Tensor]) -> str:
    seal = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        seal.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        seal.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return seal.hexdigest()
