"""A training state in a file of safetensors, with what a run must have in common."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vgrad import checks, files, tree
from vgrad.typing import T, Tree

KIND = "training state in a file"


def save_state(
    path: Path | str, state: Tree, *, settings: Mapping[str, Any] | None = None
) -> None:
    """Write a state, or any other tree of tensors, to a file of its own.

    At any moment the old file is there or the new one, and a kill leaves no part of
    one. Only its owner can read it, since a state holds a secret key. `settings` are
    what has to be the same when the run goes on, as JSON has it: see `load_state`.
    Nothing is pickled. While writing, two more copies of the state are in memory.

    Raises:
        TypeError: a leaf is no tensor, or has a dtype that the format lacks.
        ValueError: a setting is a number that is not finite, which JSON lacks.

    Example:
        >>> import tempfile
        >>> state = {"w": torch.ones(2), "step": torch.tensor(7)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_state(f"{folder}/state.safetensors", state, settings={"lr": 0.1})
    """
    description = {"kind": KIND, "settings": dict(settings or {})}
    tensors = tree.state_dict(state)
    files.write_tensors(Path(path), tensors, description, private=True)


def load_state(
    path: Path | str, like: T, *, settings: Mapping[str, Any] | None = None
) -> T:
    """Read what `save_state` wrote: the tree of `like`, with the tensors of the file.

    `like` is a state as the run starts with, which stays as it is. Devices and layouts
    in memory are its own, so that a run goes on with the same kernels and bits. Only
    the settings given here are compared. Files of states that do not say under which
    plan they have spent, as older versions wrote them, are refused.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, its names, shapes or dtypes are not those of `like`,
            or a setting was another one; the message says which.

    Example:
        >>> import tempfile
        >>> state = {"w": torch.ones(2), "step": torch.tensor(7)}
        >>> start = {"w": torch.zeros(2), "step": torch.tensor(0)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/state.safetensors"
        ...     save_state(path, state, settings={"lr": 0.1})
        ...     load_state(path, start, settings={"lr": 0.1})
        {'w': tensor([1., 1.]), 'step': tensor(7)}
    """
    path = Path(path)
    called = "a state as save_state writes it"
    parts, description = files.read_parts(path, KIND, [""], called=called)
    check_settings(path, description["settings"], settings)
    check_fit(path, tree.state_dict(like), parts[""])
    loaded = tree.load_state_dict(like, parts[""])
    return tree.tree_map(
        lambda old, new: torch.empty_like(old).copy_(new), like, loaded
    )


def check_fit(
    path: Path, expected: Mapping[str, Tensor], saved: Mapping[str, Tensor]
) -> None:
    """Refuse tensors that are not those expected, as `tree.check_fit` does."""
    lost = expected.keys() - saved.keys()
    if lost_digests(expected, saved):
        raise ValueError(
            f"{path}: expected a state with {checks.listed(lost)}, got an older one, "
            f"which does not say under which plan it has spent. If that is known, load "
            f"it into a NamedTuple of the other fields, and add plan.digest."
        )
    tree.check_fit(str(path), expected, saved)


def lost_digests(expected: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> bool:
    """Return whether a file has all of a state but the digests of plans."""
    lost = expected.keys() - saved.keys()
    return bool(lost) and all(name.endswith("plan_digest") for name in lost)


def check_settings(
    path: Path, saved: Mapping[str, Any], given: Mapping[str, Any] | None
) -> None:
    """Refuse settings that are not those saved; only the ones given are compared."""
    for name, value in json.loads(json.dumps(dict(given or {}))).items():
        if name not in saved or saved[name] != value:
            before = repr(saved[name]) if name in saved else "no such setting"
            raise ValueError(
                f"{path}: expected a state saved with {name} = {value!r}, got one with "
                f"{before}. Its run would go on with other numbers: keep the setting, "
                f"or save to another place."
            )
