"""An ensemble in one file of safetensors, from which a single member can be read.

The entry `name` of member i is `i/name`, one that all members share is `shared/name`.
The file holds values and nothing else: whoever reads it brings the model's code.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from vgrad import checks, files, tree
from vgrad.checks import Patterns
from vgrad.ensemble.axes import members, split
from vgrad.typing import Buffers, Params

KIND = "model ensemble"
SHARED = "shared"


def save_ensemble(
    path: str | Path,
    params: Params,
    buffers: Buffers,
    *,
    shared: Patterns = (),
) -> None:
    """Write stacked entries `[E, *shape]` to a file, which is replaced as a whole.

    `shared` holds patterns of the entries without a member axis. Values from any device
    are written bit by bit; the file does not say which entries are parameters. While
    writing, two more copies of the ensemble are in memory.

    Raises:
        ValueError: entries differ in the number of members, or a pattern matches none.
        TypeError: a dtype that the format lacks, such as `torch.complex128`.

    Example:
        >>> import tempfile
        >>> params = {"weight": torch.tensor([[1.0], [2.0], [3.0]])}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_ensemble(f"{folder}/ensemble.safetensors", params, {})
    """
    values = _merged("save_ensemble", params, buffers)
    stacked, whole = split("save_ensemble", values, shared)
    count = members(stacked, {})
    parts = {SHARED: whole}
    for i in range(count):
        parts[str(i)] = {name: value[i] for name, value in stacked.items()}
    description = {"kind": KIND, "members": count, "shared": sorted(whole)}
    files.write_parts(Path(path), parts, description)


def load_ensemble(
    path: str | Path,
    params: Params,
    buffers: Buffers,
    *,
    shared: Patterns = (),
) -> tuple[Params, Buffers]:
    """Read the ensemble in a file, `[E, *shape]`.

    The given entries are templates: the result has their names, devices and
    `requires_grad`, and which are parameters. They stay as they are. `shared` holds
    patterns of the entries without a member axis, those that `save_ensemble` was given.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged or no ensemble, or its members, names, shapes, dtypes
            or shared entries are not those of the templates.

    Example:
        >>> import tempfile
        >>> params = {"weight": torch.tensor([[1.0], [2.0], [3.0]])}
        >>> templates = {"weight": torch.zeros(3, 1)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/ensemble.safetensors"
        ...     save_ensemble(path, params, {})
        ...     read, _ = load_ensemble(path, templates, {})
        >>> torch.equal(read["weight"], params["weight"])
        True
    """
    path = Path(path)
    templates = _merged("load_ensemble", params, buffers)
    stacked, whole = split("load_ensemble", templates, shared)
    count = members(stacked, {})
    in_file, stored = _open(path)
    if in_file != count:
        raise ValueError(f"{path}: expected {count} members, got {in_file}.")
    if stored.keys() != whole.keys():
        raise ValueError(
            f"{path}: expected shared entries as in the call, which names "
            f"[{checks.listed(whole)}], got a file that shares "
            f"[{checks.listed(stored)}]. Pass the same shared= as for saving."
        )
    tree.check_fit(str(path), whole, stored)
    one = {name: value[0] for name, value in stacked.items()}
    parts = _read(path, map(str, range(count)))
    for i, part in parts.items():
        tree.check_fit(f"{path}, member {i}", one, part)
    values = stored | {
        name: torch.stack([part[name] for part in parts.values()]) for name in one
    }
    return _like(params, values), _like(buffers, values)


def load_member(
    path: str | Path, i: int, params: Params, buffers: Buffers
) -> tuple[Params, Buffers]:
    """Read member i alone, `[*shape]`, with what it shares with the others.

    The templates are the entries of one model, as `make_functional_with_buffers` makes
    them. Only this member's part of the file is read and checked.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged or no ensemble, has no such member, or holds other
            names, shapes or dtypes than the templates.

    Example:
        >>> import tempfile
        >>> params = {"weight": torch.tensor([[1.0], [2.0], [3.0]])}
        >>> template = {"weight": torch.zeros(1)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/ensemble.safetensors"
        ...     save_ensemble(path, params, {})
        ...     load_member(path, 2, template, {})
        ({'weight': tensor([3.])}, {})
    """
    path = Path(path)
    templates = _merged("load_member", params, buffers)
    [i] = checks.whole("load_member", least=0, i=i)
    count, shared = _open(path)
    if i >= count:
        raise ValueError(
            f"{path}: expected a file with member {i}, got {count} members."
        )
    values = shared | _read(path, [str(i)])[str(i)]
    tree.check_fit(f"{path}, member {i}", templates, values)
    return _like(params, values), _like(buffers, values)


def _open(path: Path) -> tuple[int, dict[str, Tensor]]:
    """Return the number of members in a file, and the entries that they share."""
    parts, description = files.read_parts(path, KIND, [SHARED], called=f"a {KIND}")
    count = description.get("members")
    if type(count) is not int or count < 1:
        raise ValueError(
            f"{path}: expected a {KIND}, got a damaged file (members: {count!r})."
        )
    return count, parts[SHARED]


def _read(path: Path, parts: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    return files.read_parts(path, KIND, parts, called=f"a {KIND}")[0]


def _merged(function: str, params: Params, buffers: Buffers) -> dict[str, Tensor]:
    """Return all entries by name."""
    checks.dictionaries(function, params=params, buffers=buffers)
    both = params.keys() & buffers.keys()
    if both:
        raise ValueError(
            f"{function}(params, buffers): expected each name in one of the two, got "
            f"{checks.listed(both)} in both."
        )
    return {**params, **buffers}


def _like(
    templates: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the values under the names of templates, on their devices, as leaves."""
    return {
        name: values[name].to(template.device).requires_grad_(template.requires_grad)
        for name, template in templates.items()
    }
