"""Files that are there as a whole or not at all, and tensors kept in such files."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

Description = dict[str, Any]
"""What a file says about its tensors, as JSON has it; `kind` says what they are."""


def replace(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file so that at any moment the old or the new content is there.

    When this returns, the new one is on the disk. A private file can be read by its
    owner alone, from the moment it exists.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # left by a process that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = os.open(partial, flags, 0o600 if private else 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(
    path: Path,
    tensors: dict[str, Tensor],
    description: Description,
    *,
    private: bool = False,
) -> None:
    """Replace a file by tensors and their description, sealed with a hash of both."""
    plain = {name: _plain(tensor) for name, tensor in tensors.items()}
    text = json.dumps(description)
    metadata = {"vgrad": text, "sha256": _seal(text, plain)}
    replace(path, safetensors.torch.save(plain, metadata), private=private)


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Tensor], Description]:
    """Read what `write_tensors` wrote, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, was written by another program, or holds another
            kind of tensors.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected the {kind} of a run, got no file.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copied, because torch aligns its own memory and a file does not, and the
            # numbers that a kernel computes may depend on that.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: expected the {kind} of a run, got a damaged file ({error})."
        ) from error
    if "vgrad" not in metadata:
        raise ValueError(
            f"{path}: expected the {kind} of a run, got a file not made by vgrad."
        )
    text = metadata["vgrad"]
    if metadata.get("sha256") != _seal(text, tensors):
        raise ValueError(
            f"{path}: expected the {kind} of a run, got a damaged file (what it holds "
            f"is not what was written)."
        )
    description = json.loads(text)
    if description["kind"] != kind:
        raise ValueError(
            f"{path}: expected the {kind} of a run, got a {description['kind']}."
        )
    return tensors, description


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU that shares its memory with no other."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _seal(text: str, tensors: dict[str, Tensor]) -> str:
    """Hash a description and the tensors, SHA-256 in hexadecimal."""
    found = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
