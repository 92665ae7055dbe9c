"""The run of calls whose samples or members may fall into parts."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from vgrad.conditions import checks_collected
from vgrad.generators import RNG_LOCK, drawn_since, random_state, set_random_state
from vgrad.loss.mode import run_or_split
from vgrad.loss.randomness import check_drawn
from vgrad.loss.values import Partition
from vgrad.persample.engine.call import Call
from vgrad.persample.engine.guard import Failure


def run_in_parts(
    calls: Iterable[tuple[Any, Sequence[int]]],
    run: Callable[[Any], Any],
    run_part: Callable[[Any], Any],
    note: Callable[[Any, Partition], None],
    add: Callable[[Any, Sequence[int]], None],
) -> None:
    """Run calls of samples or members, each with its rows; `add` results and rows.

    Where values split a call, its parts run by `run_part`, after a call of `note`.
    """
    state = None
    for call, all_rows in calls:
        pending = [(call, all_rows, run)]
        while pending:
            part, rows, execute = pending.pop(0)
            # Only a loop checks the generators for a loss that must not draw.
            draws = part.randomness != "error" or part.strategy == "loop"
            with RNG_LOCK if draws else nullcontext():
                if call.randomness == "same":
                    if state is not None:
                        set_random_state(state)
                    state = state or random_state(call.tensors)
                # A capture must not miss a random op.
                keyed = part.draws.keys is not None and not checks_collected()
                split = _keyed if keyed else run_or_split
                result, part = split(part, execute, run_part)
            if not isinstance(result, Partition):
                add(result, rows)
                continue
            note(part, result)
            part = part.replaced(strategy=result.strategy or part.strategy)
            several = len(result.rows) > 1
            pending[:0] = [
                (
                    part.select(places).by_itself() if several else part.select(places),
                    [rows[place] for place in places.tolist()],
                    run_part,
                )
                for places in result.rows
            ]


def note_split(part: Call, parts: Partition) -> None:
    """Note parts of samples; warn once where that is slow."""
    fallbacks = part.fallbacks
    if parts.strategy is None:
        fallbacks.warn_of_split(parts, part.function)
    elif parts.why:
        fallbacks.split = Failure(parts.where, parts.why, refused=True)
        fallbacks.warn(
            f"{part.function}: runs samples one after another because of {parts.why}, "
            f"at {parts.where}. The numbers are right, but slow."
        )


def _keyed(
    part: Any, run: Callable[[Any], Any], run_part: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """Run samples that have keys; refuse numbers that are drawn outside of the loss."""
    fallbacks, draws, before = part.fallbacks, part.draws, random_state(part.tensors)
    if fallbacks.draws is False:
        # None is looked for in a loss that had none so far, unless it draws now.
        draws.idle = True
        chunk, _ = run_or_split(part, run, run_part)
        draws.idle = False
        if not (draws.used_generator or drawn_since(before, part.tensors)):
            return chunk, part
        set_random_state(before)
        fallbacks.draws, run = True, run_part
    chunk, _ = run_or_split(part, run, run_part)
    check_drawn(before, part.tensors, partial(run_or_split, part, run, run_part))
    fallbacks.draws = draws.drew or bool(fallbacks.draws)
    return chunk, part
