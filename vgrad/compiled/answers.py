"""Samples that answer differently where a loss reads a value: a graph for each group.

One small graph follows the loss up to its last read, for every known pattern of
answers, and finds the pattern of each sample. Each group of samples runs a graph that
was captured for the same answers, and that compares them once more.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad.compiled.captures import Captures
from vgrad.conditions import Unrepeatable, collect_checks
from vgrad.devices import is_host
from vgrad.loss.values import Answers, Partition, Reads, SplitBatch, answered
from vgrad.persample.engine import Call, Chunk, Evaluation, Inputs, Transform
from vgrad.torch_private.tensors import op_name
from vgrad.torch_private.tracing import DispatchMode
from vgrad.tree import tensors

_MOST = 16
"""Patterns of answers of samples of one shape; more would mean that none repeats."""

_SIZES = 8
"""Sizes that groups are filled up to, so that a few captures do for all."""


class _Of(NamedTuple):
    """A function of samples, equal to the same one for the same answers."""

    name: str  # in reports
    function: Callable[..., Any]
    answers: Any

    def __call__(self, inputs: Inputs) -> Any:
        return self.function(inputs, self.answers)


class Groups:
    """Runs chunks of a transform in groups of samples with the same answers."""

    def __init__(self, plain: Transform, captures: Captures) -> None:
        self._plain, self._captures = plain, captures
        self._name = plain.options.function
        self._known: dict[tuple, tuple[Answers, ...] | None] = {}  # None: refused

    def chunk(self, call: Call) -> Chunk:
        """Raise the partition of a chunk into groups, or run it in eager mode."""
        kind = kind_of(call.batch.tensors)
        if (known := self._known.get(kind, ())) is None:
            return self._plain.measured(call)
        try:
            known, numbers = self._numbers(call, known)
        except Exception as error:
            self._known[kind] = None
            why = "" if isinstance(error, Unrepeatable) else f"{type(error).__name__}: "
            text = f"samples answer differently, and none can follow others: {why}"
            self._captures.refuse(self._plain.chunk, f"{text}{error}")
            return self._plain.measured(call)
        self._known[kind] = known
        groups: dict[int, list[int]] = {}
        for row, number in enumerate(numbers):
            groups.setdefault(number, []).append(row)
        if -1 in groups:
            text = f"samples have more than {_MOST} patterns of answers"
            self._captures.refuse(self._plain.chunk, text)
        step, runs = -(-call.batch.size // _SIZES), []
        for number in groups:
            group = partial(self._group, repr(known[number]), step)
            runs.append(self._plain.measured if number < 0 else group)
        rows = [*map(torch.tensor, groups.values())]
        raise SplitBatch(Partition(rows, known[0][-1][0], runs=runs))

    def _numbers(self, call: Call, known: tuple[Answers, ...]) -> tuple[tuple, list]:
        """Return all patterns, and the number of each sample's, -1 for too many."""
        inputs, numbers = inputs_of(call), [-1] * call.batch.size
        if known:
            following = _Of(f"answers of {self._name}", self._followed, known)
            numbers = self._captures(following, inputs).tolist()
        while -1 in numbers and len(known) < _MOST:
            row = numbers.index(-1)
            pattern = self._pattern(call.take(torch.tensor([row])))
            found = self._followed(inputs, (pattern,)).tolist()
            if found[row]:
                raise Unrepeatable("one does not answer twice the same")
            for other, missing in enumerate(found):
                if not missing and numbers[other] < 0:
                    numbers[other] = len(known)
            known = *known, pattern
        return known, numbers

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

    def _followed(self, inputs: Inputs, patterns: tuple[Answers, ...]) -> Tensor:
        """Return the number of the pattern that each sample follows, or -1, `[B]`."""
        call = self._plain.options.on(inputs)
        found = torch.full((call.batch.size,), -1, device=call.device)
        for number, pattern in enumerate(patterns):
            with collect_checks(), answered(pattern) as reads, _Safe(reads):
                try:
                    self._plain.measured(call)
                except SplitBatch:
                    if reads.follows is None:
                        raise
            if reads.follows is not None:
                found = torch.where(reads.follows.to(found.device), number, found)
        return found

    def _group(self, pattern: str, step: int, call: Call) -> Chunk:
        """Run samples of one pattern, filled up to a multiple of `step`."""
        size = call.batch.size
        inputs = inputs_of(call).padded(size, -(-size // step) * step)
        try:
            return self._captures(_Of(self._name, self._computed, pattern), inputs)
        except SplitBatch:  # of an eager run: values of the closure have changed
            self._known[kind_of(call.batch.tensors)] = ()
            return self._plain.measured(call)  # without the samples filled up

    def _computed(self, inputs: Inputs, pattern: str) -> Chunk:
        return self._plain.chunk(inputs)


class _Safe(DispatchMode):
    """Refuses ops that stop a device for good where a sample has other answers."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        fails = self._reads.differ and op_name(func).lstrip("_").startswith(_LOOKS_UP)
        if fails and not all(is_host(each.device) for each in tensors((args, kwargs))):
            raise Unrepeatable(f"{func} may stop the device")
        return func(*args, **(kwargs or {}))


_LOOKS_UP = ("index", "gather", "scatter", "embedding", "take", "put", "nll_loss")
_LOOKS_UP += ("binary_cross_entropy", "multinomial", "bernoulli", "bincount", "assert")
"""Ops that check values on the device itself."""


def inputs_of(call: Call) -> Inputs:
    """Return the arguments of a call."""
    batch = call.batch.sample(tuple(call.batch.tensors))
    tensors = call.params, call.buffers, batch, call.mask, call.weights, call.cross
    more = call.loss_scale, call.draws.keys, call.max_norm, call.scales
    return Inputs(*tensors, *more)


def kind_of(batch: list[Tensor]) -> tuple:
    """Describe the shape of a sample."""
    return tuple((each.dtype, each.shape[1:]) for each in batch)
