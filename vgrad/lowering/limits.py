"""What torch's vmap cannot run, in words that say what to do instead."""

from collections.abc import Callable
from typing import NoReturn

import torch

from vgrad.lowering.truthful import UnsupportedOp, own_backward_pass
from vgrad.torch_private import modes


def raise_clearly(
    error: RuntimeError, op: str, *, in_place: bool = False, one: str = "sample"
) -> NoReturn:
    """Raise an error of vmap again in words that say what to do; others as they are.

    `one` is what vmap maps over.
    """
    if isinstance(error, torch.OutOfMemoryError | UnsupportedOp):
        raise error
    if modes.RANDOM_ERROR in str(error):
        raise RuntimeError(
            f'{op}: expected a loss without random numbers, since randomness="error". '
            f'Pass randomness="different" (each {one} draws its own) or "same".'
        ) from error
    if (limit := _limit(str(error), op, in_place=in_place, one=one)) is not None:
        raise limit from error
    if not getattr(error, "__notes__", ()):  # of the op, if this is around it
        error.add_note(
            f"This happened in {op} while one {one} stood for all {one}s at once. If "
            f'it works for a single {one}, strategy="loop" can run it.'
        )
    raise error


def _limit(message: str, op: str, *, in_place: bool, one: str) -> UnsupportedOp | None:
    """Say which limit of vmap an error is about, and what to do; None for others."""
    differentiable = "expected ops that transforms of torch.func can differentiate, got"
    if modes.SAME_RANDOM_ERROR in message:
        limit = (
            f"expected random numbers that all {one}s can share, since "
            f'randomness="same", got some whose distribution depends on the {one}. '
            f'Pass randomness="different", or use strategy="loop".'
        )
    elif any(each in message for each in modes.SAVED_HOOKS_ERRORS):
        limit = (
            f"{differentiable} activation checkpointing (or other hooks on saved "
            f'tensors). Use strategy="auto" or "loop".'
        )
    elif modes.SETUP_CONTEXT_ERROR in message or modes.HIDDEN_FUNCTION_ERROR in message:
        limit = (
            f"{differentiable} an autograd.Function without setup_context. Give it "
            f'setup_context and a vmap rule, or use strategy="loop".'
        )
    elif op == "retain_grad":
        limit = (
            f"expected a loss that leaves the graph of its tensors alone, got one that "
            f"asks a tensor to keep its gradient, where one tensor stands for all "
            f'{one}s. Leave it out, or use strategy="loop".'
        )
    elif op in _AUTOGRAD or any(each in message for each in modes.BACKWARD_ERRORS):
        return own_backward_pass(op)
    elif (
        in_place
        or (op in _RECURRENT and modes.SHAPES_ERROR in message)
        or any(each in message for each in modes.VMAP_ERRORS)
    ):
        shared = f"writes in place into a tensor that all {one}s share, or is too small"
        values = "looks at values or has shapes that depend on them"
        limit = (
            f"expected ops that vmap can run for all {one}s at once, got one that "
            f'{shared if in_place else values}. Use strategy="loop", which runs it '
            f"{one} by {one}."
        )
    else:
        return None
    return UnsupportedOp(f"{op}: {limit}")


_AUTOGRAD = {"grad", "backward", "requires_grad_", "requires_grad"}
"""What a loss calls only if it differentiates on its own."""

_RECURRENT = {"rnn_tanh", "rnn_relu", "lstm", "gru"}
_RECURRENT |= {"rnn_tanh_cell", "rnn_relu_cell", "lstm_cell", "gru_cell"}
"""What torch's vmap stumbles over with an error about shapes."""


def in_place(func: Callable, kwargs: dict) -> bool:
    """Tell whether a call writes into one of its arguments."""
    name = getattr(func, "__name__", "")
    ends = name.endswith("_") and not name.endswith("__")
    return ends or name == "__setitem__" or kwargs.get("out") is not None
