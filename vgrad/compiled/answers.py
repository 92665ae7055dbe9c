"""Samples that answer differently where a loss reads a value: a graph for each group.

A small graph follows the loss up to its last read, and finds which known pattern of
answers each sample has. Samples are sorted by it, and each group runs a graph that was
captured for its answers, filled up to one of a few sizes. That graph compares all
answers once more, so that a group with others is computed again in eager mode.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch

from vgrad.compiled.captures import CaptureReport, Captures
from vgrad.conditions import Unrepeatable, collect_checks
from vgrad.generators import drawn_since, random_state, set_random_state
from vgrad.loss.values import Answers, Partition, SplitBatch, answered
from vgrad.persample.engine import Call, Chunk, Evaluation, Inputs, Transform
from vgrad.persample.engine.guard import NON_RETRYABLE

_MOST = 16
"""Patterns of answers of samples of one shape; more would mean that none repeats."""

_PARTS = 8
"""The sizes of groups are multiples of this part of a batch."""


class Drew(Unrepeatable):
    """A group has drawn random numbers, which eager mode draws in another order."""


class Sorting:
    """Runs chunks of a transform sorted by the answers of their samples."""

    def __init__(self, plain: Transform, captures: Captures) -> None:
        self._plain, self._captures = plain, captures
        self._known: dict[tuple, tuple[Answers, ...]] = {}
        self._following = copy.copy(captures)  # the graphs that find patterns
        self._graphs: dict[str, Captures] = {}  # by pattern
        self._refused: set[tuple] = set()

    def reports(self) -> tuple[CaptureReport, ...]:
        """Return a report of every capture."""
        found = [
            replace(each, name=f"answers of {each.name}")
            for each in self._following.reports()
        ]
        for each in self._graphs.values():
            found += each.reports()
        return tuple(found)

    def chunk(self, call: Call) -> Chunk:
        """Run a chunk in eager mode, or raise its partition into groups."""
        if _kind(call) not in self._refused:
            before = random_state(call.tensors)
            try:
                self._split(call)
            except Unrepeatable as error:
                set_random_state(before)
                self.refuse(call, error)
        return self._plain.measured(call)

    def refuse(self, call: Call, why: Unrepeatable) -> None:
        """Run samples of these shapes in eager mode from now on."""
        self._refused.add(_kind(call))
        self._captures.refuse(self._plain.chunk, f"samples answer differently; {why}")

    def _split(self, call: Call) -> NoReturn:
        before, known = random_state(call.tensors), self._known.get(_kind(call), ())
        try:
            numbers = self._numbers(call, known)
        except NON_RETRYABLE:
            raise
        except Exception as error:
            text = f"a pattern of others fails ({type(error).__name__}: {error})"
            raise Unrepeatable(text) from error
        if drawn_since(before, call.tensors):
            raise Unrepeatable("their random numbers depend on the order")
        known = self._known[_kind(call)]
        groups: dict[int, list[int]] = {}
        for row, number in enumerate(numbers):
            groups.setdefault(number, []).append(row)
        step = -(-call.batch.size // _PARTS)
        runs: list[Callable[[Call], Chunk]] = []
        for number in groups:
            run = partial(self._group, repr(known[number]), step)
            runs.append(self._plain.measured if number < 0 else run)
        rows = [torch.tensor(each) for each in groups.values()]
        raise SplitBatch(Partition(rows, known[0][-1][0], runs=runs))

    def _numbers(self, call: Call, known: tuple[Answers, ...]) -> list[int]:
        """Return the pattern of each sample; -1 where there are too many."""
        inputs, numbers = inputs_of(call), [-1] * call.batch.size
        follow = self._plain.followed
        if known:
            numbers = self._following(follow, inputs, known).tolist()
        while -1 in numbers and len(known) < _MOST:
            row = numbers.index(-1)
            pattern = self._pattern(call.take(torch.tensor([row])))
            found = follow(inputs, (pattern,)).tolist()
            if found[row] != 0:
                raise Unrepeatable("one does not answer twice the same")
            for other, number in enumerate(found):
                if number == 0 and numbers[other] < 0:
                    numbers[other] = len(known)
            known = *known, pattern
            self._following = copy.copy(self._captures)
        if -1 in numbers:
            text = f"samples have more than {_MOST} patterns of answers"
            self._captures.refuse(self._plain.chunk, text)
        self._known[_kind(call)] = known
        return numbers

    def _pattern(self, call: Call) -> Answers:
        """Return the answers of one sample."""
        run = Evaluation(call)
        for _ in run.parts(self._plain.measured):  # which finds the way to run it
            pass
        if run.chunks_run[-1].strategy == "loop":
            raise Unrepeatable('strategy="loop" runs any Python')
        with collect_checks(), answered() as reads:
            self._plain.measured(call)
        return tuple(reads.kept)

    def _group(self, pattern: str, step: int, call: Call) -> Chunk:
        """Run samples of one pattern, filled up to a multiple of `step`."""
        size = call.batch.size
        total = -(-size // step) * step
        captures = self._graphs.setdefault(pattern, copy.copy(self._captures))
        before = random_state(call.tensors)
        chunk = captures(self._plain.chunk, inputs_of(call).padded(size, total))
        if drawn_since(before, call.tensors):
            self._refused.add(_kind(call))
            raise Drew("samples answer differently; they draw random numbers")
        return chunk


def inputs_of(call: Call) -> Inputs:
    """Return the arguments of a call."""
    batch = call.batch.sample(tuple(call.batch.tensors))
    tensors = call.params, call.buffers, batch, call.mask, call.weights, call.cross
    more = call.loss_scale, call.draws.keys, call.max_norm, call.scales
    return Inputs(*tensors, *more)


def _kind(call: Call) -> tuple:
    """Describe the shape of a sample."""
    return tuple((each.dtype, each.shape[1:]) for each in call.batch.tensors)
