"""The run of calls whose samples or members may fall into parts."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from vgrad.generators import RNG_LOCK, drawn_since, random_state, set_random_state
from vgrad.loss.randomness import Draws, Undrawn, Unkeyed, check_drawn, fresh_keys
from vgrad.loss.values import Partition, SplitBatch
from vgrad.persample.engine.call import Call
from vgrad.persample.engine.guard import Failure
from vgrad.torch_private import modes


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
                own = part.randomness == "different" and part.strategy != "loop"
                if part.captured:  # a graph must not miss a random op
                    result = _run(part, execute)
                elif part.draws.keys is not None:
                    result = _run_keyed(part, execute, run_part)
                elif own:
                    result, part = _run_drawing(part, execute, run_part)
                else:
                    result = _run(part, execute)
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


def _run(part: Any, run: Callable[[Any], Any]) -> Any:
    """Return a result or parts, and keep no exception, which would keep all tensors.

    `Undrawn` if parts would draw from a generator whose state is unknown.
    """
    around = modes.current_level() or 0
    try:
        return run(part)
    except SplitBatch as split:
        if split.level is not None and split.level <= around:
            raise  # a vmap around this call maps over these samples
        draws, parts = part.draws, split.parts
    if draws.keys is None and draws.used_generator and draws.values_read:
        raise Undrawn("some of a torch.Generator of the loss's own")
    return parts


def _run_keyed(
    part: Any, run: Callable[[Any], Any], run_part: Callable[[Any], Any]
) -> Any:
    """Run samples that have keys; refuse numbers that are drawn outside of the loss."""
    fallbacks, draws, before = part.fallbacks, part.draws, random_state(part.tensors)
    if fallbacks.draws is False:
        # None is looked for in a loss that had none so far, unless it draws now.
        draws.idle = True
        result = _run(part, run)
        draws.idle = False
        if not (draws.used_generator or drawn_since(before, part.tensors)):
            return result
        set_random_state(before)
        fallbacks.draws, run = True, run_part
    result = _run(part, run)
    check_drawn(before, part.tensors, partial(_run, part, run))
    fallbacks.draws = draws.drew or bool(fallbacks.draws)
    return result


def _run_drawing(
    part: Any, run: Callable[[Any], Any], run_part: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """Run samples that draw numbers of their own; return the part with their keys.

    They run once more, with keys, where they read values after they drew.
    """
    if part.fallbacks.keyed:
        return _run_with_new_keys(part, run_part)
    before = random_state(part.tensors)
    result = _run(part, run)
    if isinstance(result, Partition) and drawn_since(before, part.tensors):
        set_random_state(before)
        if result.keyed or (len(result.rows) > 1 and result.strategy is None):
            return _run_with_new_keys(part, run_part)
    return result, part


def _run_with_new_keys(part: Any, run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Run samples with keys of their own, one after another where keys cannot be."""
    tensors, part.draws.values_read = part.tensors, True
    keyed = part.replaced(draws=Draws(keys=fresh_keys(part.size, tensors[0].device)))
    before = random_state(tensors)
    try:
        result = _run(keyed, run)
        check_drawn(before, tensors, partial(_run, keyed, run))
    except Unkeyed as error:
        rows = torch.arange(part.size).split(1)
        return Partition(rows, "a random op", "loop", str(error)), part
    part.fallbacks.keyed = True
    return result, keyed
