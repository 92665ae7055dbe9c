"""Which strategy is cheapest, from the work of one member and the device.

Small members spend their time between kernels, and gain from running at once. Members
that keep the device busy gain nothing: on a CPU the data of all of them does not fit
its caches, and convolutions have no batched kernel there.
"""

from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.conditions import checks_collected
from vgrad.ensemble.axes import InDims
from vgrad.ensemble.execution import (
    Call,
    Told,
    Vmapped,
    autocasting,
    looped,
    stacked,
)
from vgrad.functional.guards import protect
from vgrad.generators import kept_random_state
from vgrad.lowering.draws import Draws
from vgrad.lowering.questions import Parts
from vgrad.persample.engine.guard import Fallbacks
from vgrad.report import Report, table
from vgrad.torch_private import modes
from vgrad.typing import Buffers, EnsembleStrategy, Params, Randomness

BUSY = 50.0
"""MFLOP of a forward pass above which one member saturates a CPU."""

CONVOLVED = 5.0
"""The same for the convolutions among them."""


@dataclass(frozen=True)
class EnsembleExplanation(Report):
    """The report of `vgrad.explain` for a function of an ensemble.

    Attributes:
        function: the transform's name.
        strategy: the strategy.
        why: why it is that one.
        members: E.
        forms: op and form, in order of execution, of the ops that have a choice; those
            of one group of members after the other, if they take different branches.
        groups: how many groups run apart.
        splits: the lines that ask what members answer differently, and how often they
            or one of their groups split there.
    """

    function: str
    strategy: str
    why: str
    members: int
    forms: tuple[tuple[str, str], ...]
    groups: int = 1
    splits: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        title = (
            f"{self.function} of {self.members} members, strategy {self.strategy}: "
            f"{self.why}"
        )
        if self.splits:
            lines = [f"  {where} ({times} x)" for where, times in self.splits]
            title += (
                f"\n\n{self.members} members run in {self.groups} groups. They take "
                f"different branches at\n"
            ) + "\n".join(lines)
        if not self.forms:
            return title
        return f"{title}\n\n{table([('op', 'form'), *self.forms])}"


class Keyed:
    """A function of an ensemble whose members may draw from keys of their own."""

    _keys: Tensor | None = None

    def keyed(self, keys: Tensor | None) -> Self:
        """Return the same, where what a member draws follows from its key.

        The keys are int64 `[E]`, as `sample_keys` makes them.
        """
        other = copy(self)
        other._keys = keys
        return other


class OfRunner(Keyed):
    """A function of an ensemble that a runner runs."""

    _runner: "Runner"

    @property
    def randomness(self) -> Randomness:
        """Whether members draw random numbers, and whether each its own."""
        return self._runner.randomness

    @property
    def shared(self) -> Patterns:
        """Patterns of the entries without a member axis."""
        return self._runner.shared


class Runner:
    """Runs functions for all members, as the options of a transform say.

    It remembers the work of the shapes that it has seen.
    """

    def __init__(
        self,
        function: str,
        in_dims: InDims,
        randomness: Randomness,
        strategy: EnsembleStrategy,
        shared: Patterns,
    ) -> None:
        """Check the options."""
        checks.choice(function, get_args(EnsembleStrategy), strategy=strategy)
        checks.choice(function, get_args(Randomness), randomness=randomness)
        checks.patterns(function, shared=shared)
        self._function = function
        self._options: dict[str, Any] = {"in_dims": in_dims, "shared": tuple(shared)}
        self._randomness: Randomness = randomness
        self._strategy: EnsembleStrategy = strategy
        self._known: dict[Any, tuple[str, str]] = {}
        self._fallbacks = Fallbacks()

    def call(self, params: Params, buffers: Buffers, batch: tuple) -> Call:
        """Check what was given."""
        return Call(self._function, params, buffers, batch, **self._options)

    def choose(self, function: Callable, call: Call) -> tuple[str, str]:
        """Return the strategy and why it is that one."""
        if self._strategy != "auto":
            return self._strategy, f'as strategy="{self._strategy}" says'
        if modes.inside_transform():
            return "hybrid", "inside a transform of torch.func"
        if call.members == 1:
            return "loop", "there is one member"
        key = _kind(call)
        if key not in self._known:
            self._known[key] = _by_work(function, call)
        return self._known[key]

    def run(
        self,
        function: Callable,
        call: Call,
        strategy: str,
        *,
        with_buffers: bool = False,
        told: Told = None,
        parted: Callable[[Parts], None] | None = None,
        draws: Draws | None = None,
    ) -> Any:
        """Run a function for all members at once, or for one after the other.

        `parted` is invoked where not all can run at once; else they are remembered.
        What members ask is noted in `draws`.
        """
        draws = draws or Draws()
        if strategy == "loop":
            results = self.loop(autocasting(function, draws.each()), call)
            return (call.stacked_with_buffers if with_buffers else stacked)(results)
        run = Vmapped(
            function,
            self._randomness,
            hybrid=strategy == "hybrid",
            with_buffers=with_buffers,
            told=told,
            parted=parted or partial(self._parted, call),
            or_loop=self.may_loop,
        )
        return run(call, draws)

    def _parted(self, call: Call, parts: Parts) -> None:
        """Remember which members cannot run at once, and warn of what is slow."""
        if parts.strategy is None:
            self._fallbacks.tell(parts, self._function, "member")
            return
        self.loops(call, _why(parts))

    @property
    def randomness(self) -> Randomness:
        """Whether members draw random numbers, and whether each its own."""
        return self._randomness

    @property
    def shared(self) -> Patterns:
        """Patterns of the entries without a member axis."""
        return self._options["shared"]

    @property
    def may_loop(self) -> bool:
        """Whether members run one after the other where nothing else is possible."""
        bound = modes.inside_transform() or checks_collected()
        return self._strategy == "auto" and not bound

    def loops(self, call: Call, why: str) -> None:
        """Remember that these members run one after the other, and warn once."""
        self._known[_kind(call)] = "loop", why
        self._fallbacks.warn(
            f"{self._function}: runs one member after another. The numbers are right, "
            f"but it may be slow: {why}"
        )

    def loop(self, function: Callable, call: Call) -> list[Any]:
        """Run a function for one member after the other; return their results."""
        return looped(function, call, self._randomness)

    def draws(self, call: Call, keys: Tensor | None) -> Draws:
        """Return what members draw, which follows from their `keys` if there are."""
        if keys is None or self._randomness != "different":
            return Draws()
        check_keys(self._function, keys, call.members)
        return Draws(keys=keys)

    def explain(self, function: Callable, call: Call) -> EnsembleExplanation:
        """Run the forward pass once, and say what happened; generators are put back."""
        strategy, why = self.choose(function, call)
        forms: list[tuple[str, str]] = []
        parts: list[Parts] = []
        if strategy != "loop":
            with kept_random_state(call.tensors()), torch.no_grad():
                self.run(
                    function,
                    call,
                    strategy,
                    told=lambda *each: forms.append(each),
                    parted=parts.append,
                )
        splits = Counter(each.where for each in parts if each.strategy is None)
        for each in parts:
            if each.strategy is not None:
                strategy, why = each.strategy, _why(each)
        return EnsembleExplanation(
            self._function,
            strategy,
            why,
            call.members,
            tuple(forms),
            1 + sum(len(each.rows) - 1 for each in parts),
            tuple(splits.items()),
        )


def check_keys(function: str, keys: Tensor, members: int) -> None:
    """Refuse keys of other members, or where members cannot be told apart."""
    if len(keys) != members:
        raise ValueError(
            f"{function}(params): expected {len(keys)} members, those of this rank, "
            f"got {members}."
        )
    if modes.inside_transform():
        raise ValueError(
            f"{function}(params): expected a call outside of transforms of torch.func, "
            f"where members have keys, got one inside."
        )


def _kind(call: Call) -> tuple:
    """Return what the strategy depends on."""
    return tuple((each.shape, each.dtype, each.device) for each in call.tensors())


def _why(parts: Parts) -> str:
    """Say why members run one after the other."""
    return f"all at once they stopped at {parts.where}: {parts.why}"


def _by_work(function: Callable, call: Call) -> tuple[str, str]:
    """Count the work of one member, in a forward pass of its own."""
    if call.tensors()[0].device.type != "cpu":
        return "hybrid", "an accelerator has room for all members at once"
    counter = modes.flop_counter()
    with kept_random_state(call.tensors()), counter, protect(call.promise()):
        autocasting(function)(*call.of(0))
    found = counter.get_flop_counts().get("Global", {})  # which is not there for none
    work = {str(op): flops for op, flops in found.items()}
    total = sum(work.values()) / 1e6
    convolved = sum(flops for op, flops in work.items() if "conv" in op) / 1e6
    if convolved > CONVOLVED:
        return "loop", f"{convolved:.1f} MFLOP of a member are convolutions, on a CPU"
    if total > BUSY:
        return "loop", f"the {total:.1f} MFLOP of a member keep a CPU busy"
    return "hybrid", f"the {total:.1f} MFLOP of a member leave a CPU waiting for calls"
