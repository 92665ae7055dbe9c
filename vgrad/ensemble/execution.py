"""The members of an ensemble in one call: their arguments, and the ways to run them.

All ways give the same numbers at another cost. Small members spend their time between
kernels, and gain from running at once. Members that keep the device busy gain nothing:
on a CPU the data of all of them does not fit its caches, and convolutions have no
batched kernel there.

E members. A stacked entry is a tensor `[E, *shape]`, a shared one `[*shape]`.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, TypedDict, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.conditions import checks_collected
from vgrad.functional.guards import Protected, protect
from vgrad.generators import (
    RNG_LOCK,
    drawn_since,
    kept_random_state,
    random_state,
    set_random_state,
)
from vgrad.loss.grad_flags import GradFlags, UnsupportedOp, raise_clearly
from vgrad.loss.mode import LossMode, of_members, run_member, run_or_split
from vgrad.loss.randomness import Draws
from vgrad.loss.values import Partition, SplitBatch
from vgrad.persample.engine.guard import NON_RETRYABLE, Failure, Fallbacks
from vgrad.precision.autocasting import AutocastMode
from vgrad.report import Report, table
from vgrad.torch_private import modes
from vgrad.tree import map_tensors, tensors, tree_map
from vgrad.typing import Buffers, EnsembleStrategy, Params, Randomness, Tree

InDims = int | None | Sequence[int | None]

BUSY = 50.0
"""MFLOP of a forward pass above which one member saturates a CPU."""

CONVOLVED = 5.0
"""The same for the convolutions among them."""


class EnsembleOptions(TypedDict, total=False):
    """The options of every function of an ensemble; `ensemble_grad` explains them."""

    in_dims: InDims
    randomness: Randomness
    strategy: EnsembleStrategy
    shared: Patterns


# The member axis.


def shared_names(function: str, names: Iterable[str], patterns: Patterns) -> set[str]:
    """Return the names of the entries without a member axis, which match a pattern."""
    checks.patterns(function, shared=patterns)
    kind = "parameter or buffer"
    return set(checks.all_matched(function, names, patterns, kind=kind))


class Layout(NamedTuple):
    """The member axis of parameters and buffers.

    Attributes:
        members: E.
        shared: the names of the entries without that axis.
    """

    members: int
    shared: set[str]

    @classmethod
    def of(
        cls, function: str, params: Params, buffers: Buffers, patterns: Patterns = ()
    ) -> "Layout":
        """Read the layout of entries, which have to agree on E."""
        checks.dictionaries(function, params=params, buffers=buffers)
        entries, where = {**params, **buffers}, f"{function}(params, buffers)"
        shared = shared_names(function, entries, patterns) if patterns != () else set()
        stacked = [name for name in entries if name not in shared]
        if not stacked:
            raise ValueError(
                f"{where}: expected an entry with a member axis, got none."
            )
        first = stacked[0]
        count = entries[first].shape[:1]
        for name in stacked:
            shape = entries[name].shape
            if shape[:1] != count or not shape:
                expected = f"{count[0]} members as in {first!r}" if count else "members"
                raise ValueError(
                    f"{where}: expected {expected} on the first axis of {name!r}, got "
                    f"shape {tuple(shape)}. If the members share one of them, name it "
                    f"in shared=."
                )
        if not count[0]:
            raise ValueError(f"{where}: expected at least one member, got none.")
        return cls(count[0], shared)

    def member(self, entries: Params, i: int) -> Params:
        """Return the entries of one member, as views."""
        return {n: x if n in self.shared else x[i] for n, x in entries.items()}


def _batch_dims(
    function: str, in_dims: InDims, batch: tuple[Tree, ...], count: int
) -> tuple[int | None, ...]:
    if in_dims is None or isinstance(in_dims, int):
        in_dims = (in_dims,) * len(batch)
    if len(in_dims) != len(batch):
        raise ValueError(
            f"{function}(in_dims={tuple(in_dims)}): expected one axis for each of the "
            f"{len(batch)} items of the batch. None stands for one that all members "
            f"share."
        )
    for number, (dim, item) in enumerate(zip(in_dims, batch, strict=True)):
        if dim is None:
            continue
        for leaf in tensors(item):
            if not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != count:
                raise ValueError(
                    f"{function}(in_dims={tuple(in_dims)}): expected {count} members "
                    f"along axis {dim} of item {number} of the batch, got shape "
                    f"{tuple(leaf.shape)}. in_dims=None gives all members the same."
                )
    return tuple(in_dims)


class Call:
    """The arguments of all members in one call.

    Attributes:
        members: E.
        args: parameters, buffers and the items of the batch.
        dims: their member axes, by name and for each item; None without one.
    """

    def __init__(
        self,
        function: str,
        params: Params,
        buffers: Buffers,
        batch: tuple[Tree, ...],
        *,
        in_dims: InDims,
        shared: Patterns,
    ) -> None:
        self.members, common = Layout.of(function, params, buffers, shared)
        self.args = (dict(params), dict(buffers), *batch)
        self.dims = (
            {name: None if name in common else 0 for name in params},
            {name: None if name in common else 0 for name in buffers},
            *_batch_dims(function, in_dims, batch, self.members),
        )

    def of(self, member: int) -> tuple:
        """Return the arguments of one member."""
        return self._map(lambda value, dim: value.select(dim, member))

    def wrapped(self, level: int) -> tuple:
        """Return the arguments as a vmap of that level sees them."""
        return self._map(lambda x, dim: modes.add_batch_axis(x, dim % x.ndim, level))

    def with_params(self, params: Params) -> "Call":
        """Return the same call with other parameters, of the same shapes."""
        other = copy.copy(self)
        other.args = (dict(params), *self.args[1:])
        return other

    def rows(self, rows: Tensor) -> "Call":
        """Return the call of these members, in this order."""
        other = copy.copy(self)
        other.members = len(rows)
        other.args = self._map(lambda x, dim: x.index_select(dim, rows.to(x.device)))
        return other

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the caller."""
        params, buffers, *batch = self.args
        return [*params.values(), *buffers.values(), *tensors(batch)]

    def protected(self) -> Protected:
        """Return these tensors as ones that must not change."""
        params, buffers, *batch = self.args
        items = {f"tensor {n} of the batch": x for n, x in enumerate(tensors(batch))}
        expected = "ensemble: expected a function that changes nothing it is given"
        return Protected({**items, **buffers, **params}, expected, "Copy it first.")

    def joined(
        self,
        results: Sequence[tuple[Any, Buffers]],
        join: Callable[..., Tensor],
        one_value: Callable[[Sequence[Tensor]], bool] | None = None,
    ) -> tuple[Any, Buffers]:
        """Join the leaves of values, and the new buffers beside each.

        Shared buffers need `one_value` and are not joined.
        """
        values, buffers = zip(*results, strict=True)
        joined, dims = {}, {**self.dims[0], **self.dims[1]}  # any entry may be a buffer
        for name, first in buffers[0].items():
            left = [new[name] for new in buffers]
            if dims.get(name, 0) is not None:
                joined[name] = join(*left)
            elif (one_value or _same)(left):
                joined[name] = first
            else:
                raise ValueError(
                    f"ensemble(shared=...): expected members that leave one value in "
                    f"the buffer {name!r}, which they share, got one of each. Give "
                    f"each member its own."
                )
        return _map_leaves(join, *values), joined

    def _map(self, function: Callable[..., Tensor]) -> tuple:
        """Apply a function to all stacked tensors, in new containers."""
        named = [
            {
                name: value if dims[name] is None else function(value, dims[name])
                for name, value in values.items()
            }
            for values, dims in zip(self.args[:2], self.dims[:2], strict=True)
        ]
        items = [
            map_tensors(_itself if dim is None else partial(function, dim=dim), item)
            for item, dim in zip(self.args[2:], self.dims[2:], strict=True)
        ]
        return *named, *items


def _same(values: Sequence[Tensor]) -> bool:
    return all(checks.same_values(value, values[0]) for value in values)


def _itself(value: Tensor) -> Tensor:
    return value


def _map_leaves(function: Callable, *trees: Tree) -> Tree:
    """Apply a function to leaves of trees of one structure, mostly single tensors."""
    if isinstance(trees[0], Tensor):
        return function(*trees)
    return tree_map(function, *trees)


# Ways to run.


def looped(function: Callable, call: Call, randomness: Randomness) -> list[Any]:
    """Run a function, made by `autocasting`, for one member after the other."""
    # Each member draws from where the one before it stopped, unless told otherwise.
    given = () if randomness == "different" else call.tensors()
    results = []
    arguments = [*map(call.of, range(call.members))]
    with RNG_LOCK, protect(call.protected()):
        before = random_state(given)
        for member in arguments:
            if randomness == "same":
                set_random_state(before)
            results.append(function(*member))
            if randomness == "error" and drawn_since(before, given):
                set_random_state(before)
                raise RuntimeError(
                    'ensemble: expected no random numbers, since randomness="error". '
                    'Pass randomness="different" (each member draws its own) or "same".'
                )
    return results


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


def autocasting(function: Callable, draws: Iterable[Draws] = ()) -> Callable:
    """Cast each weight of a member once; members come in the order of their `draws`."""
    turns = iter(draws)

    def run(params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        casts = partial(AutocastMode, [*params.values()])
        one = partial(function, params, buffers, *batch)
        return run_member(one, casts, next(turns, None))

    return run


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


class EnsembleExecutor:
    """Runs functions for all members, as the options of a transform say.

    It remembers the strategies of the shapes that it has seen.
    """

    def __init__(
        self,
        function: str,
        *,
        in_dims: InDims = None,
        randomness: Randomness = "different",
        strategy: EnsembleStrategy = "auto",
        shared: Patterns = (),
    ) -> None:
        checks.choice(function, get_args(EnsembleStrategy), strategy=strategy)
        checks.choice(function, get_args(Randomness), randomness=randomness)
        checks.patterns(function, shared=shared)
        self.function = function
        self.randomness: Randomness = randomness
        self.shared = tuple(shared)
        self._in_dims = in_dims
        self._strategy = strategy
        self._known: dict[Any, tuple[str, str]] = {}
        self._fallbacks = Fallbacks()

    def call(self, params: Params, buffers: Buffers, batch: tuple) -> Call:
        """Check the arguments of a call."""
        dims, shared = self._in_dims, self.shared
        return Call(self.function, params, buffers, batch, in_dims=dims, shared=shared)

    def choose(self, function: Callable, call: Call) -> tuple[str, str]:
        """Return the strategy and the reason for it."""
        if self._strategy != "auto":
            return self._strategy, f'as strategy="{self._strategy}" says'
        if modes.inside_transform():
            return "hybrid", "inside a transform of torch.func"
        if call.members == 1:
            return "loop", "there is one member"
        key = _signature(call)
        if key not in self._known:
            self._known[key] = _by_work(function, call)
        return self._known[key]

    @property
    def may_loop(self) -> bool:
        """Whether members run one after the other where nothing else is possible."""
        bound = modes.inside_transform() or checks_collected()
        return self._strategy == "auto" and not bound

    def fall_back(self, call: Call, why: str) -> None:
        """Remember that these members run one after the other, and warn once."""
        self._known[_signature(call)] = "loop", why
        self._fallbacks.warn(
            f"{self.function}: runs one member after another. The numbers are right, "
            f"but it may be slow: {why}"
        )

    def draws(self, call: Call, keys: Tensor | None) -> Draws:
        """Return the random numbers of members, which follow from keys if there are."""
        if keys is None or self.randomness != "different":
            return Draws()
        if len(keys) != call.members:
            raise ValueError(
                f"{self.function}(params): expected the {len(keys)} members of this "
                f"rank, got {call.members}."
            )
        if modes.inside_transform():
            raise ValueError(
                f"{self.function}(params): expected a call outside of transforms of "
                f"torch.func, where members have keys, got one inside."
            )
        return Draws(keys=keys)

    def __call__(
        self, function: Callable, call: Call, keys: Tensor | None = None
    ) -> tuple[Any, Buffers]:
        """Run a function by the strategy that suits it."""
        strategy, _ = self.choose(function, call)
        return self.run(function, call, strategy, draws=self.draws(call, keys))

    def run(
        self,
        function: Callable,
        call: Call,
        strategy: str,
        *,
        draws: Draws | None = None,
        forms: list[tuple[str, str]] | None = None,
        on_split: Callable[[Partition], None] | None = None,
    ) -> tuple[Any, Buffers]:
        """Run a function for all members; tensors of the results gain the axis 0.

        It returns a pair, any tree of tensors and new buffers. Members that take
        different branches run in groups, for each of which `on_split` is called; by
        default they are remembered. `forms` is extended by op and form, and `draws`
        notes questions about values.
        """
        draws = draws or Draws()
        if strategy == "loop":
            turns = [draws] if call.members == 1 else draws.each()
            results = looped(autocasting(function, turns), call, self.randomness)
            return call.joined(results, stack_results)
        on_split = on_split or partial(self._note_split, call)
        may_loop = self.may_loop

        def all_members(draws: Draws) -> Any:
            try:
                return self._at_once(function, call, strategy, draws, forms)
            except NON_RETRYABLE:
                raise
            except Exception as error:
                if not may_loop:
                    raise
                failure = Failure.of(error)
            rows = torch.arange(call.members).split(1)
            raise SplitBatch(Partition(rows, failure.where, "loop", failure.why))

        differ, same = self.randomness == "different", self.randomness == "same"
        with RNG_LOCK if differ or same else nullcontext():
            state = random_state(call.tensors()) if same else None
            result, draws = run_or_split(
                all_members, draws, call.tensors(), differ=differ
            )
            if not isinstance(result, Partition):
                return result
            parts = result
            if parts.strategy is not None and not may_loop:
                raise UnsupportedOp(
                    f"ensemble: expected ops that run for all members at once, got "
                    f'{parts.why}, at {parts.where}. Use strategy="loop".'
                )
            groups, way = [], parts.strategy or strategy
            for rows in parts.rows:
                if state is not None:
                    set_random_state(state)
                some: Any = {"draws": draws.of(rows), "forms": forms}
                group = call.rows(rows)
                groups.append(self.run(function, group, way, **some, on_split=on_split))
        order = torch.cat([*parts.rows]).argsort()

        def regrouped(*leaves: Tensor) -> Tensor:
            return torch.cat(leaves).index_select(0, order.to(leaves[0].device))

        joined = call.joined(groups, regrouped)
        on_split(parts)
        return joined

    def _at_once(
        self,
        function: Callable,
        call: Call,
        strategy: str,
        draws: Draws,
        forms: list[tuple[str, str]] | None,
    ) -> tuple[Any, Buffers]:
        seen: list[tuple[str, str]] = []
        note = None if forms is None else lambda *form: seen.append(form)

        try:
            # As torch.vmap, but for its general treatment of trees, which costs as much
            # as a small model.
            modes.load_decompositions()
            with modes.vmap_level(call.members, self.randomness) as level:
                params, buffers, *batch = call.wrapped(level)
                flags = GradFlags(level, "member", 'strategy="loop"')
                with modes.without_modes():  # modes around it do not see this
                    for value in tensors((params, buffers, batch)):
                        flags.sync(value)
                protected, hybrid = call.protected(), strategy == "hybrid"
                handlers = of_members(note, chosen=hybrid)
                mode = LossMode(protected, handlers=handlers, flags=flags, draws=draws)
                casts = partial(AutocastMode, [*params.values()])
                inside = mode.inside(call.members, self.randomness, casts)
                with inside, modes.unoptimized_scripts():
                    output = function(params, buffers, *batch)
                flags.end(tensors(output))
                result = call.joined(
                    [output],
                    lambda value: modes.remove_batch_axis(
                        _tensor(value), level, call.members, 0
                    ),
                    lambda left: not modes.is_mapped_here(left[0]),
                )
        except RuntimeError as error:
            raise_clearly(error, "ensemble", one="member")
        if forms is not None:
            forms += seen
        return result

    def _note_split(self, call: Call, parts: Partition) -> None:
        """Remember members that cannot run at once, and warn of slow ones."""
        if parts.strategy is None:
            self._fallbacks.tell(parts, self.function, "member")
        else:
            self.fall_back(call, _why(parts))

    def explain(self, function: Callable, call: Call) -> EnsembleExplanation:
        """Run the forward pass once, and restore the generators."""
        strategy, why = self.choose(function, call)
        forms: list[tuple[str, str]] = []
        splits: list[Partition] = []
        if strategy != "loop":
            with kept_random_state(call.tensors()), torch.no_grad():
                self.run(function, call, strategy, forms=forms, on_split=splits.append)
        places = Counter(parts.where for parts in splits if parts.strategy is None)
        for parts in splits:
            if parts.strategy is not None:
                strategy, why = parts.strategy, _why(parts)
        return EnsembleExplanation(
            self.function,
            strategy,
            why,
            call.members,
            tuple(forms),
            1 + sum(len(parts.rows) - 1 for parts in splits),
            tuple(places.items()),
        )


def run_eager(function: Callable, *arguments: Any) -> Any:
    """Call a function."""
    return function(*arguments)


class EnsembleFn:
    """A function of an ensemble that an executor runs.

    Attributes:
        randomness: whether members draw random numbers, and whether each its own.
        shared: patterns of the entries without a member axis.
        execute: runs its methods: in eager mode, as graphs, or on one of several ranks.
    """

    def __init__(self, executor: EnsembleExecutor) -> None:
        self.execute: Any = run_eager
        self._executor = executor
        self._keys: Tensor | None = None
        self.randomness: Randomness = executor.randomness
        self.shared = executor.shared

    def executed_by(self, execute: Any) -> Self:
        """Return the same function, which runs as graphs or on one of several ranks."""
        if self.execute is not run_eager:
            raise TypeError(
                f"{self._executor.function}: expected a function of eager mode and one "
                f"process, got one that is compiled or member_parallel already. Only "
                f"steps may be both."
            )
        other = copy.copy(self)
        other.execute = execute
        return other

    def reports(self) -> tuple[Any, ...]:
        """Return a report of every capture; none in eager mode."""
        return getattr(self.execute, "reports", tuple)()

    def _explained(self, function: Callable, call: Call) -> Any:
        explained = self._executor.explain(function, call)
        captured = getattr(self.execute, "explanation", None)
        return explained if captured is None else captured(explained)

    def keyed(self, keys: Tensor | None) -> Self:
        """Return the same function, drawing from keys of the members, int64 `[E]`."""
        other = copy.copy(self)
        other._keys = keys
        return other


def _signature(call: Call) -> tuple:
    return tuple((x.shape, x.dtype, x.device) for x in call.tensors())


def _why(parts: Partition) -> str:
    return f"all at once they stopped at {parts.where}: {parts.why}"


def _by_work(function: Callable, call: Call) -> tuple[str, str]:
    """Choose by the work of one member, counted in a forward pass of its own."""
    if call.tensors()[0].device.type != "cpu":
        return "hybrid", "an accelerator has room for all members at once"
    counter = modes.flop_counter()
    with kept_random_state(call.tensors()), counter, protect(call.protected()):
        autocasting(function)(*call.of(0))
    counts = counter.get_flop_counts().get("Global", {})  # absent if there are none
    total = sum(counts.values()) / 1e6
    convolved = sum(flops for op, flops in counts.items() if "conv" in str(op)) / 1e6
    if convolved > CONVOLVED:
        return "loop", f"{convolved:.1f} MFLOP of a member are convolutions, on a CPU"
    if total > BUSY:
        return "loop", f"the {total:.1f} MFLOP of a member keep a CPU busy"
    return "hybrid", f"the {total:.1f} MFLOP of a member leave a CPU waiting for calls"
