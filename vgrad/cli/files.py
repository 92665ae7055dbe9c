"""The files of a run: whole or not at all, with tensors of one kind in one part."""

from pathlib import Path

from torch import Tensor

from vgrad import files
from vgrad.files import Description as Description
from vgrad.files import from_json as from_json
from vgrad.files import open_own as open_own
from vgrad.files import replace as replace
from vgrad.files import sync_folder as sync_folder


def write_tensors(
    path: Path,
    tensors: dict[str, Tensor],
    description: Description,
    *,
    private: bool = False,
) -> None:
    """Replace a file by tensors and their description, sealed with a hash of both."""
    files.write_parts(path, {"": tensors}, description, private=private)


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Tensor], Description]:
    """Read what `write_tensors` wrote, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, was written by another program, or holds another
            kind of tensors.
    """
    called = f"the {kind} of a run"
    parts, description = files.read_parts(path, kind, [""], called=called)
    return parts[""], description
