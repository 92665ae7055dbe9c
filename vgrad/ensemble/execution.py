"""The ways to run all members: same numbers, different cost.

Small members spend their time between kernels, and gain from running at once. Members
that keep the device busy gain nothing: on a CPU the data of all of them does not fit
its caches, and convolutions have no batched kernel there. E members.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from vgrad.conditions import checks_collected
from vgrad.devices import is_host
from vgrad.ensemble.layout import MemberCall
from vgrad.functional.guards import protect
from vgrad.generators import (
    RNG_LOCK,
    drawn_since,
    kept_random_state,
    random_state,
    sample_keys,
    set_random_state,
)
from vgrad.loss.grad_flags import UnsupportedOp, VmapLevel, raise_clearly
from vgrad.loss.mode import LossMode, of_members
from vgrad.loss.randomness import Draws
from vgrad.loss.values import Partition, SplitBatch
from vgrad.persample.engine.guard import NON_RETRYABLE, Failure, Fallbacks
from vgrad.persample.engine.parts import run_in_parts
from vgrad.persample.engine.verify import Bound, Dtypes, bound_of, undisturbed
from vgrad.precision.autocasting import AutocastMode
from vgrad.report import Report, table
from vgrad.torch_private import autograd, modes
from vgrad.tree import double, map_tensors, tensors
from vgrad.typing import Buffers, Params, Tree

BUSY = 1000.0
"""MFLOP of products in a forward pass above which one member saturates a CPU."""

CONVOLVED = 4.0
"""Million outputs of convolutions, of all members, above which a CPU's caches are full.

Below, the ops around the convolutions gain from running for all members at once.
"""

FEW, FEW_DIFFERENTIATED = 4, 2
"""Members up to which the passes of each cost a CPU less than the one of all.

The latter runs as much Python as some members; a backward pass runs none.
"""

Forms = list[tuple[str, str]]
"""Ops and their forms, in order."""


def run_member(
    function: Callable, draws: Draws, params: Params, buffers: Buffers, *batch: Tree
) -> Any:
    """Run a function for a member by itself; each weight is cast once."""
    casts = partial(AutocastMode, [*params.values()])
    if draws.keys is None or draws.idle:
        # Without a transform torch's own autocast does for a loss that turns it on.
        if not (modes.autocast_is_on() or modes.inside_transform()):
            return function(params, buffers, *batch)
        with casts():
            return function(params, buffers, *batch)
    mode = LossMode(draws=draws, captured=checks_collected())
    with mode.inside(1, "different", casts, unbatched=True):
        return function(params, buffers, *batch)


def looped(
    function: Callable, call: MemberCall, keep: Callable = lambda member, result: result
) -> list[Any]:
    """Run `function(member, draws, params, buffers, *batch)` for each in turn."""
    draws = [call.draws.of(slice(n, n + 1)) for n in range(call.layout.members)]
    keyed, fallbacks = call.draws.keys is not None, call.fallbacks
    # Members that drew nothing so far run without their keys, unless they draw now.
    idle = keyed and fallbacks.draws is False and not call.captured
    results = []
    with RNG_LOCK, call.unchanged():
        # Each member draws from where the one before it stopped, unless told otherwise.
        before = random_state(
            call.tensors if idle or call.randomness != "different" else ()
        )
        for member, inputs in enumerate(call.unstacked()):
            if call.randomness == "same":
                set_random_state(before)
            draws[member].idle = idle
            arguments = member, draws[member], *inputs
            result = function(*arguments)
            if call.randomness == "error":
                call.refuse_draws(before, "member", partial(function, *arguments))
            results.append(keep(member, result))
        if idle and drawn_since(before, call.tensors):
            set_random_state(before)
            fallbacks.draws = True
            return looped(function, call, keep)
    if keyed and not idle and not call.captured:
        fallbacks.draws = bool(fallbacks.draws) or any(member.drew for member in draws)
    return results


def in_turn(function: Callable, call: MemberCall) -> tuple[Any, Buffers]:
    """Run a function for one member after another; tensors gain the axis 0."""

    def of_member(member: int, *arguments: Any) -> Any:
        return run_member(function, *arguments)

    return call.joined(looped(of_member, call), stack_results)


def stack_results(*leaves: Any) -> Tensor:
    """Stack a leaf of every member's result."""
    return torch.stack([*map(_tensor, leaves)])


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    raise TypeError(
        f"ensemble: expected a model that returns tensors, got a "
        f"{type(value).__name__} among its outputs."
    )


def at_once(
    function: Callable, call: MemberCall, forms: Forms | None
) -> tuple[Any, Buffers]:
    """Run a function under a vmap; `forms` is extended where it succeeds."""
    seen: Forms = []
    note = None if forms is None else lambda *form: seen.append(form)
    members, randomness = call.layout.members, call.randomness
    vmapped = modes.vmapped(members, randomness)
    try:
        with vmapped as (wrapped, unwrapped):
            params, buffers, *batch = call.map(wrapped)
            level = VmapLevel(modes.current_level(), "member", 'strategy="loop"')
            handlers = of_members(note, chosen=call.strategy == "hybrid")
            mode = LossMode(
                call.protected(),
                handlers=handlers,
                vmap=level,
                draws=call.draws,
                rooms=call.fallbacks.rooms,
                captured=call.captured,
            )
            casts = partial(AutocastMode, [*params.values()])
            inside = mode.inside(members, randomness, casts)
            refused = autograd.for_all(old_style=False)
            with inside, modes.unoptimized_scripts(), refused:
                output = function(params, buffers, *batch)
            result = call.joined(
                [output],
                lambda value: unwrapped(_tensor(value)),
                lambda values: not modes.is_mapped_here(values[0]),
            )
            del output
    except RuntimeError as error:
        raise_clearly(error, "ensemble", one="member")
    if forms is not None:
        forms += seen
    return result


def run(
    function: Callable,
    call: MemberCall,
    strategy: str | None = None,
    *,
    forms: Forms | None = None,
    splits: list[Partition] | None = None,
) -> tuple[Any, Buffers]:
    """Run a function for all members; tensors of the results gain the axis 0.

    It returns a pair, any tree of tensors and new buffers. Members that take different
    branches run in groups; these are remembered, unless they are added to `splits`.
    """
    way: Any = strategy or choose(function, call)[0]
    if strategy is None:
        joint = partial(run, function, strategy=way, splits=[])
        way = verified(call, way, joint, partial(in_turn, function))
    if way == "loop" and call.draws.keys is None:
        return in_turn(function, call)
    partitions: list[Partition] = [] if splits is None else splits
    may_loop = call.may_loop

    def one_part(part: Any) -> Any:
        if part.strategy == "loop":
            return in_turn(function, part)
        try:
            return at_once(function, part, forms)
        except NON_RETRYABLE:
            raise
        except Exception as error:
            if not may_loop:
                raise
            failure = Failure.of(error)
        rows = torch.arange(part.layout.members).split(1)
        raise SplitBatch(Partition(rows, failure.where, "loop", failure.why))

    def note(part: Any, parts: Partition) -> None:
        if parts.strategy is not None and not may_loop:
            raise UnsupportedOp(
                f"ensemble: expected ops that run for all members at once, got "
                f'{parts.why}, at {parts.where}. Use strategy="loop".'
            )
        partitions.append(parts)

    members = (call.replaced(strategy=way), range(call.layout.members))
    results: list[Any] = []
    rows: list[int] = []

    def add(result: Any, places: Sequence[int]) -> None:
        results.append(result)
        rows.extend(places)

    run_in_parts([members], one_part, one_part, note, add)
    if len(results) == 1:
        return results[0]
    places = torch.tensor(rows).argsort()
    joined = call.joined(
        results,
        lambda *leaves: torch.cat(leaves).index_select(0, places.to(leaves[0].device)),
    )
    if splits is None:  # all members have run
        for parts in partitions:
            if parts.strategy is None:
                call.fallbacks.warn_of_split(parts, call.function, "member")
            else:
                fall_back(call, _why(parts))
    return joined


# The comparison with members by themselves.


def verified(
    call: MemberCall,
    strategy: str,
    joint: Callable[[MemberCall], Tree],
    separate: Callable[[MemberCall], Tree],
) -> str:
    """Return the strategy, or "loop" if it has other results than plain autograd.

    The results of two members are compared, at calls 1, 2, 4, ... with tensors of one
    kind: `joint` runs them at once, `alone` one after the other.
    """
    if strategy == "loop" or not call.verify:
        return strategy
    if call.captured or modes.inside_transform():
        return strategy
    kind = strategy, *[(tensor.dtype, tensor.ndim) for tensor in call.tensors]
    call.counts[kind] = count = call.counts.get(kind, 0) + 1
    if count & (count - 1) or any(tensor.is_meta for tensor in call.tensors):
        return strategy
    number = 2 * count.bit_length()
    rows = torch.tensor([number - 2, number - 1]).remainder(call.layout.members)
    memory: dict[str, Any] = {"fallbacks": Fallbacks(silent=True), "strategies": {}}
    pair = call.select(rows).replaced(verify=False, unreached=set(), **memory)
    if call.randomness != "error":
        keys = sample_keys(0, 0, 2, call.tensors[0].device)
        pair = pair.replaced(randomness="different", draws=Draws(keys=keys))
    with undisturbed(call.tensors) as restart:
        try:
            difference = _difference(pair, joint, separate, restart)
        except Exception:
            return strategy  # the call of all members raises it, or is not comparable
    if difference is None:
        return strategy
    why = f"its results differ from plain autograd's by {difference:.0e} of their norm"
    if not call.may_loop:
        call.counts[kind] -= 1  # so that the next call is compared, too
        raise UnsupportedOp(
            f"{call.function}(strategy={call.strategy!r}): expected members that "
            f"compute at once as they do by themselves, got other results: {why}. Use "
            f'strategy="loop".'
        )
    fall_back(call, why)
    return "loop"


def _difference(
    pair: MemberCall, joint: Callable, separate: Callable, restart: Callable[[], None]
) -> float | None:
    """Return how far results of two ways are apart; None for a rounding error."""
    dtypes = {tensor.dtype for tensor in pair.tensors if tensor.is_floating_point()}
    ways = [pair]
    if not modes.autocast_is_on() and sum(x.numel() for x in pair.tensors) < 2**25:
        fixed = {name: getattr(pair, name) for name in ("params", "buffers", "items")}
        ways.insert(0, pair.replaced(**map_tensors(_widened, fixed)))
    for way in ways:
        try:
            restart()
            results = _real(joint(way))
            restart()
            with Dtypes() as mode:
                exact = _real(separate(way))
        except Exception:
            if way is pair:
                raise
            continue  # a constant of its own dtype may refuse float64
        kinds = {torch.float64} if way is not pair else dtypes or {torch.float32}
        return _largest(results, exact, bound_of(kinds | mode.seen))
    return None


def _largest(values: list[Tensor], exact: list[Tensor], bound: Bound) -> float | None:
    """Return the largest difference, relative to norms, where it is above a bound."""
    norms = [double(value).norm() for value in exact]
    finite = [bool(norm.isfinite()) for norm in norms]
    sizes = [norm for norm, counts in zip(norms, finite, strict=True) if counts]
    if not sizes:
        return None
    total = torch.stack(sizes).norm()
    gaps = [
        double(one - other).norm().nan_to_num(torch.inf) / (norm + bound.share * total)
        for one, other, norm, counts in zip(values, exact, norms, finite, strict=True)
        if counts and total
    ]
    largest = max(map(float, gaps), default=0.0)
    return largest if largest > bound.relative else None


def _real(results: Tree) -> list[Tensor]:
    return [x.detach() for x in tensors(results) if x.is_floating_point()]


def _widened(value: Tensor) -> Tensor:
    return double(value.detach()) if value.is_floating_point() else value


# The choice of a way.


def choose(function: Callable, call: MemberCall) -> tuple[str, str]:
    """Return the strategy and the reason for it."""
    if call.strategy != "auto":
        return call.strategy, f'as strategy="{call.strategy}" says'
    if modes.inside_transform():
        return "hybrid", "inside a transform of torch.func"
    if call.layout.members == 1:
        return "loop", "there is one member"
    key = _signature(call)
    if key not in call.strategies:
        call.strategies[key] = _by_work(function, call)
    return call.strategies[key]


def _signature(call: MemberCall) -> tuple:
    return tuple([(x.shape, x.dtype, x.device) for x in call.tensors])


def _by_work(function: Callable, call: MemberCall) -> tuple[str, str]:
    if not is_host(call.tensors[0].device):
        return "hybrid", "an accelerator has room for all members at once"
    few = FEW_DIFFERENTIATED if call.differentiates else FEW
    if call.layout.members <= few:
        return "loop", f"up to {few} members cost a CPU less one after another"
    counter = modes.flop_counter(dict.fromkeys(modes.CONVOLUTIONS, _outputs))
    with kept_random_state(call.tensors), counter, protect(call.protected()):
        try:
            run_member(function, Draws(), *call.unstacked()[0])
        except Exception:  # of a loss that differentiates, or of one that raises
            return "hybrid", "the work of a member is unknown"
    counts = counter.get_flop_counts().get("Global", {})  # absent if there are none
    convolved = sum(counts.pop(op, 0) for op in modes.CONVOLUTIONS) / 1e6
    outputs, work = convolved * call.layout.members, sum(counts.values()) / 1e6
    if outputs > CONVOLVED:
        return (
            "loop",
            f"{outputs:.1f} million outputs of convolutions fill a CPU's cache",
        )
    if work > BUSY:
        return "loop", f"the {work:.1f} MFLOP of a member keep a CPU busy"
    return "hybrid", f"the {work:.1f} MFLOP of a member leave a CPU waiting for calls"


def _outputs(*_: Any, out_shape: torch.Size, **__: Any) -> int:
    return math.prod(out_shape)


def fall_back(call: MemberCall, why: str) -> None:
    """Remember that these members run one after the other, and warn once."""
    call.strategies[_signature(call)] = "loop", why
    call.fallbacks.warn(
        f"{call.function}: runs one member after another. The numbers are right, "
        f"but it may be slow: {why}"
    )


def _why(parts: Partition) -> str:
    return f"all at once they stopped at {parts.where}: {parts.why}"


@dataclass(frozen=True)
class EnsembleExplanation(Report):
    """The report of `vgrad.explain` for a function of an ensemble.

    Attributes:
        function: the function's name.
        strategy, why: the strategy and the reason for it.
        members: E.
        forms: op and form, in order of execution, of the ops that have a choice; of one
            group of members after the other, if they take different branches.
        groups: how many groups run apart.
        splits: the lines at which members take different branches, and how often.
    """

    function: str
    strategy: str
    why: str
    members: int
    forms: tuple[tuple[str, str], ...]
    groups: int
    splits: tuple[tuple[str, int], ...]

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


def explain(function: Callable, call: MemberCall) -> EnsembleExplanation:
    """Run the forward pass once, and restore the generators."""
    strategy, why = choose(function, call)
    forms: Forms = []
    splits: list[Partition] = []
    if strategy != "loop":
        with kept_random_state(call.tensors), torch.no_grad():
            run(function, call, strategy, forms=forms, splits=splits)
    places = Counter(parts.where for parts in splits if parts.strategy is None)
    for parts in splits:
        if parts.strategy is not None:
            strategy, why = parts.strategy, _why(parts)
    return EnsembleExplanation(
        call.function,
        strategy,
        why,
        call.layout.members,
        tuple(forms),
        1 + sum(len(parts.rows) - 1 for parts in splits),
        tuple(places.items()),
    )


def run_eager(function: Callable, *arguments: Any) -> Any:
    """Call a function."""
    return function(*arguments)


@dataclass(frozen=True, eq=False, kw_only=True)
class EnsembleFn:
    """A function of an ensemble."""

    options: MemberCall  # without tensors
    execute: Any = run_eager  # runs methods in this process, or captures of them
    keys: Tensor | None = None  # of the members, int64 [E], for their random numbers

    def __repr__(self) -> str:
        run = getattr(self, "loss", None) or getattr(self, "fmodel", None)
        captured = "" if self.execute is run_eager else ", captured"
        return f"<{self.options.function}({run!r}){captured}>"

    def keyed(self, keys: Tensor | None) -> Self:
        """Return the same function, drawing from keys of the members, int64 `[E]`."""
        return replace(self, keys=keys)

    def reports(self) -> tuple[Any, ...]:
        """Return a report of every capture; none in eager mode."""
        return getattr(self.execute, "reports", tuple)()

    def clear(self) -> None:
        """Forget all captures; the next call of each kind captures again."""
        getattr(self.execute, "clear", tuple)()

    def _explained(self, function: Callable, call: MemberCall) -> Any:
        explained = explain(function, call)
        captured = getattr(self.execute, "explanation", None)
        return explained if captured is None else captured(explained)
