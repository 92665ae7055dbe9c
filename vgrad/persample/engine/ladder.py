"""Which strategy runs a loss: the first that can.

Recording is the cheapest; a loop over samples runs whatever plain autograd runs.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from vgrad.conditions import Unrepeatable, checks_collected
from vgrad.generators import (
    RandomState,
    drawn_since,
    kept_random_state,
    random_state,
    set_random_state,
)
from vgrad.lowering.value_reads import Parts, Split, stopped_at
from vgrad.persample.engine.guard import UnsupportedOp
from vgrad.persample.engine.problem import Problem
from vgrad.persample.engine.strategies import (
    Chunk,
    Collect,
    alone,
    loop,
    recorded,
    vmap,
)
from vgrad.torch_private import modes
from vgrad.typing import Strategy


def auto(problem: Problem, collect: Collect) -> Chunk:
    """Record; else differentiate under `torch.vmap`; else one sample after another.

    Whatever stops the first two, plain autograd may still be able to run the loss.
    """
    if modes.inside_transform():
        return vmap(problem, collect)
    if checks_collected():  # eager mode has run it, and has found the way
        return (vmap if problem.fallbacks.mapped else recorded)(problem, collect)
    state = random_state(problem.tensors) if problem.randomness != "error" else None
    problem.fallbacks.mapped = False
    try:
        return recorded(problem, collect)
    except FINAL:
        raise
    except Exception as error:
        _back(problem, state)
        stopped = Stop.of(error)
    problem.fallbacks.mapped = True
    try:
        found = vmap(problem, collect)
    except FINAL:
        raise
    except Exception:
        _back(problem, state)
    else:
        if not stopped.refused:
            problem.fallbacks.warn(
                f"{problem.function}: the recorder stopped at {stopped.where}, so all "
                f"gradients are stored, which is slow. {stopped.why}"
            )
        return found
    _check_alone(problem, stopped)
    problem.fallbacks.warn(
        f"{problem.function}: runs one sample after another, since neither a recorded "
        f"pass nor vmap can run the loss. The numbers are right, but slow. It stopped "
        f"at {stopped.where}: {stopped.why}"
    )
    rows = torch.arange(problem.batch.size).split(1)
    raise Split(Parts(rows, stopped.where, "loop"))


_ADVICE = re.compile(r'[,.]? (or )?(use )?strategy="loop".*', re.IGNORECASE)
"""What errors say of a loop, which was tried."""

FINAL = (torch.OutOfMemoryError, Unrepeatable, Warning)
"""Errors that no other strategy could avoid, or should."""


class Stop(NamedTuple):
    """What is left to say of an error; itself it would keep all tensors."""

    where: str
    why: str
    refused: bool  # by vgrad, and for a reason

    @classmethod
    def of(cls, error: Exception) -> "Stop":
        """Keep the line of the loss, and the first of the message."""
        refused = isinstance(error, UnsupportedOp)
        why = str(error).partition("\n")[0]
        return cls(
            stopped_at(error),
            why if refused else f"{type(error).__name__}: {why}",
            refused,
        )


def _back(problem: Problem, state: RandomState | None) -> None:
    """Go back to the start of a chunk, from where an error has stopped it.

    Raises:
        Split: the loss has asked for values, perhaps of random numbers. So the next try
            has to see the same ones.
    """
    draws = problem.draws
    if state is None or draws.known is not None:
        return  # what was drawn is known, and seen again
    if not drawn_since(state, problem.tensors):
        return
    if draws.asked and problem.randomness == "different":
        raise Split(Parts([torch.arange(problem.batch.size)], ""))
    set_random_state(state)


def _check_alone(problem: Problem, stopped: Stop) -> None:
    """Raise what plain autograd raises for the first sample."""
    try:
        with kept_random_state(problem.tensors):
            alone(problem.rows(torch.zeros(1, dtype=torch.int64)))
    except Exception as error:
        if stopped.refused:
            why = _ADVICE.sub("", stopped.why)
            error.add_note(f"A loop was tried, since a recorded pass ended in: {why}.")
        raise


STRATEGIES: dict[Strategy, Callable[[Problem, Collect], Chunk]] = {
    "auto": auto,
    "recorded": recorded,
    "vmap": vmap,
    "loop": loop,
}
