"""What autograd saves for the backward pass, and the checkpoints that compute it again.

A checkpoint of `torch.utils.checkpoint` packs away what is saved inside of it, and runs
its function once more, in the backward pass, when the first of that is needed. By then
the modes, transforms and values around it are gone: `repeats` has them put in place.

Rests on torch/utils/checkpoint.py: on the hooks of a `_CheckpointFrame`, whose
`recompute_fn` is what runs, and on those of the run that is a repetition; and on
`torch._C._autograd` for the hooks at work. A hook around the repetition that users can
set would end the need.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import (  # pyright: ignore[reportMissingModuleSource]
    _top_saved_tensors_default_hooks as _top,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction as Reentrant
from torch.utils.checkpoint import checkpoint

from vgrad.torch_private import levels
from vgrad.torch_private.nodes import nodes
from vgrad.torch_private.tensors import version_of

__all__ = [
    "Hooks",
    "Reentrant",
    "hooks",
    "keeps_values",
    "plain",
    "reenters",
    "repeats",
    "run_once",
]

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs a tensor that autograd saves, and what unpacks it."""


def hooks() -> Hooks | None:
    """Return the hooks on saved tensors that are at work, the innermost ones."""
    return _top(False)


# Dynamo, which cannot trace it, may take the answer for a constant; what
# torch.compiler.assume_constant_result does, without an import of all of Dynamo.
hooks._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def plain() -> AbstractContextManager:
    """Save tensors as they are in this block, whatever hooks are around it."""
    if hooks() is None:
        return nullcontext()
    return saved_tensors_hooks(_unchanged, _unchanged)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor.detach()  # the tensor itself would make a cycle


def keeps_values(pack: Callable) -> bool:
    """Tell whether tensors come back as they were: from checkpoints, `save_on_cpu`."""
    return getattr(pack, "__qualname__", "").startswith((_FIRST, *_OTHERS))


_FIRST, *_OTHERS = "_checkpoint_hook.", "_recomputation_hook.", "save_on_cpu."


def repeats(pack: Callable, around: Callable[[], AbstractContextManager]) -> None:
    """Have a block around the repetition of what a checkpoint saves by this hook.

    Other hooks are left alone.
    """
    if not getattr(pack, "__qualname__", "").startswith(_FIRST):
        return
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)
    frame = dict(cells)["frame"].cell_contents
    run = frame.recompute_fn
    # Only where transforms run: the hooks of a region around this one see what is
    # read here, and run it once more.
    versions = _versions(_inputs(frame)) if levels.inside_transform() else []

    def again(*args: Any) -> Any:
        if _versions(args) != versions:
            raise RuntimeError(
                "checkpoint: expected arguments that stay as they are until the "
                "backward pass, but an op wrote into one in place. Copy it first."
            )
        with around():
            return run(*args)

    frame.recompute_fn = again


def _inputs(frame: Any) -> Sequence[Any]:
    """Return what a checkpoint has saved of its arguments."""
    if hasattr(frame, "get_inputs"):
        return frame.get_inputs()
    saver = frame.input_saver.grad_fn  # in older versions of torch
    return saver.get_args(saver.saved_tensors)


def _versions(args: Sequence[Any]) -> list[int]:
    """Return how often tensors of transforms changed, of which autograd is not told."""
    wrapped = [t for t in args if isinstance(t, Tensor) and levels.is_wrapped(t)]
    return [version_of(levels.stored(each)) for each in wrapped]


def reenters(loss: Tensor) -> bool:
    """Tell whether a re-entrant checkpoint is a part of a graph.

    It adds to the `.grad` of what it reaches: a backward pass that asks for other
    gradients does not even come to it.
    """
    return any(isinstance(node, _OF_REENTRANT) for node in nodes([loss]))


_OF_REENTRANT = Reentrant._backward_cls  # pyright: ignore[reportAttributeAccessIssue]


def run_once(run: Callable, preserve_rng_state: bool, *args: Any) -> Any:
    """Do what a re-entrant checkpoint does, whose backward pass is one of its own.

    The other kind computes the same, but for one thing: a re-entrant one has no
    gradients where none of its arguments requires grad.
    """
    if not any(isinstance(each, Tensor) and each.requires_grad for each in args):
        with torch.no_grad():
            return run(*args)
    return checkpoint(
        run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
    )
