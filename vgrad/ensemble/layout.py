"""The member axis: the tensors that have one, and the arguments of all members.

E members. A stacked entry is a tensor `[E, *shape]`, a shared one `[*shape]`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, TypedDict, Unpack, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.conditions import checks_collected
from vgrad.functional.guards import Protected
from vgrad.loss.randomness import Draws
from vgrad.persample.engine.guard import Fallbacks
from vgrad.torch_private import modes
from vgrad.tree import map_tensors, tensors, tree_map
from vgrad.typing import Buffers, EnsembleStrategy, Params, Randomness, Tree

InDims = int | None | Sequence[int | None]


class EnsembleOptions(TypedDict, total=False):
    """The options of every function of an ensemble; `ensemble_grad` explains them."""

    in_dims: InDims
    randomness: Randomness
    strategy: EnsembleStrategy
    shared: Patterns


def shared_names(
    function: str, names: Iterable[str], patterns: Patterns
) -> frozenset[str]:
    """Return the names of the entries without a member axis, which match a pattern."""
    if patterns in ((), []):
        return frozenset()
    checks.patterns(function, shared=patterns)
    return _matched(function, tuple(names), tuple(patterns))


@lru_cache
def _matched(function: str, names: tuple, patterns: tuple) -> frozenset[str]:
    kind = "parameter or buffer"
    return frozenset(checks.all_matched(function, names, patterns, kind=kind))


def count_members(where: str, entries: Params) -> int:
    """Return the number of members, on which the first axes of all entries agree."""
    axes = {value.shape[:1] for value in entries.values()}
    if len(axes) > 1 or not all(axes):
        (first, like), *_ = entries.items()
        expected = f"{len(like)} members as in {first!r}" if like.ndim else "members"
        name, shape = next(
            (name, tuple(value.shape))
            for name, value in entries.items()
            if not value.ndim or value.shape[:1] != like.shape[:1]
        )
        raise ValueError(
            f"{where}: expected {expected} on the first axis of {name!r}, got shape "
            f"{shape}. If the members share one of them, name it in shared=."
        )
    if not axes:
        raise ValueError(f"{where}: expected an entry with a member axis, got none.")
    [[count]] = axes
    if not count:
        raise ValueError(f"{where}: expected at least one member, got none.")
    return count


class Layout(NamedTuple):
    """The member axis of parameters and buffers."""

    members: int
    shared: frozenset[str]  # the names of the entries without that axis

    @classmethod
    def of(
        cls, function: str, params: Params, buffers: Buffers, patterns: Patterns = ()
    ) -> "Layout":
        """Read the layout of entries, which have to agree on E."""
        checks.dictionaries(function, params=params, buffers=buffers)
        entries = {**params, **buffers}
        shared = shared_names(function, entries, patterns)
        own = {name: value for name, value in entries.items() if name not in shared}
        return cls(count_members(f"{function}(params, buffers)", own), shared)

    def member(self, entries: Params, i: int) -> Params:
        """Return the entries of one member, as views."""
        return {n: x if n in self.shared else x[i] for n, x in entries.items()}


_NO_MEMBERS = Layout(0, frozenset())


@dataclass(frozen=True)
class Call:
    """The options of a function of an ensemble; `on` adds the tensors of one call."""

    function: str  # its name, for errors
    in_dims: InDims = None
    randomness: Randomness = "different"
    strategy: EnsembleStrategy = "auto"
    shared: Patterns = ()
    # Of all calls: warnings, the strategies of the shapes so far with the reasons, and
    # sets of parameters that receive no gradient, as one member has confirmed.
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    known: dict[Any, tuple[str, str]] = field(default_factory=dict)
    unreached: set[frozenset[str]] = field(default_factory=set)
    layout: Layout = _NO_MEMBERS
    args: tuple = ()  # parameters, buffers and items of the batch, members in front
    dims: tuple[int | None, ...] = ()  # the member axis of each item, 0 or None
    draws: Draws = field(default_factory=Draws)

    @classmethod
    def of(cls, function: str, **options: Unpack[EnsembleOptions]) -> "Call":
        """Check the options of a function."""
        call = cls(function, **options)
        checks.choice(function, get_args(EnsembleStrategy), strategy=call.strategy)
        checks.choice(function, get_args(Randomness), randomness=call.randomness)
        checks.patterns(function, shared=call.shared)
        return call

    def on(
        self,
        params: Params,
        buffers: Buffers,
        batch: tuple[Tree, ...],
        keys: Tensor | None = None,
    ) -> "Call":
        """Check the tensors of a call; `keys` are of the members, int64 `[E]`."""
        layout = Layout.of(self.function, params, buffers, self.shared)
        dims = self._dims(batch, layout.members)
        items = [
            map_tensors(partial(torch.movedim, source=dim, destination=0), item)
            if dim
            else item
            for dim, item in zip(dims, batch, strict=True)
        ]
        return self.replaced(
            layout=layout,
            args=(dict(params), dict(buffers), *items),
            dims=tuple([None if dim is None else 0 for dim in dims]),
            draws=Draws() if keys is None else self._draws(keys, layout.members),
        )

    def replaced(self, **fields: Any) -> "Call":
        """Return a copy with other fields."""
        # As `dataclasses.replace`, which takes as long as a small op.
        copy = object.__new__(Call)
        copy.__dict__.update(self.__dict__)
        copy.__dict__.pop("tensors", None)  # cached, from the old fields
        copy.__dict__.update(fields)
        return copy

    def _dims(self, batch: tuple[Tree, ...], count: int) -> Sequence[int | None]:
        dims = self.in_dims
        if dims is None or isinstance(dims, int):
            dims = (dims,) * len(batch)
        if len(dims) != len(batch):
            raise ValueError(
                f"{self.function}(in_dims={tuple(dims)}): expected one axis for each "
                f"of the {len(batch)} items of the batch. None stands for one that all "
                f"members share."
            )
        for number, (dim, item) in enumerate(zip(dims, batch, strict=True)):
            if dim is None:
                continue
            for leaf in tensors(item):
                if not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != count:
                    raise ValueError(
                        f"{self.function}(in_dims={tuple(dims)}): expected {count} "
                        f"members along axis {dim} of item {number} of the batch, got "
                        f"shape {tuple(leaf.shape)}. in_dims=None gives all members "
                        f"the same."
                    )
        return dims

    def _draws(self, keys: Tensor, count: int) -> Draws:
        if self.randomness != "different":
            return Draws()
        if len(keys) != count:
            raise ValueError(
                f"{self.function}(params): expected the {len(keys)} members of this "
                f"rank, got {count}."
            )
        if modes.inside_transform():
            raise ValueError(
                f"{self.function}(params): expected a call outside of transforms of "
                f"torch.func, where members have keys, got one inside."
            )
        return Draws(keys=keys)

    def member(self, i: int) -> tuple:
        """Return the arguments of one member."""
        return self.map(lambda value: value[i])

    def draws_of(self, member: int) -> Draws:
        """Return the random numbers of one member."""
        if self.draws.keys is None and self.layout.members > 1:
            return Draws()  # of the generators, in turn
        return self.draws.of(slice(member, member + 1))

    def take(self, rows: Tensor) -> "Call":
        """Return the call of these members, in this order."""
        return self.replaced(
            layout=Layout(len(rows), self.layout.shared),
            args=self.map(lambda x: x.index_select(0, rows.to(x.device))),
            draws=self.draws.of(rows),
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> tuple:
        """Apply a function to all tensors with a member axis, in new containers."""
        shared, (params, buffers, *items) = self.layout.shared, self.args
        return (
            {n: x if n in shared else function(x) for n, x in params.items()},
            {n: x if n in shared else function(x) for n, x in buffers.items()},
            *[
                map_tensors(_itself if dim is None else function, item)
                for dim, item in zip(self.dims, items, strict=True)
            ],
        )

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All tensors of the caller."""
        params, buffers, *batch = self.args
        return [*params.values(), *buffers.values(), *tensors(batch)]

    @property
    def may_loop(self) -> bool:
        """Whether members run one after the other where nothing else is possible."""
        bound = modes.inside_transform() or checks_collected()
        return self.strategy == "auto" and not bound

    def protected(self) -> Protected:
        """Return the tensors as ones that must not change."""
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
        joined = {}
        for name, first in buffers[0].items():
            left = [new[name] for new in buffers]
            if name not in self.layout.shared:
                joined[name] = join(*left)
            elif (one_value or _same)(left):
                joined[name] = first
            else:
                raise ValueError(
                    f"ensemble(shared=...): expected members that leave one value in "
                    f"the buffer {name!r}, which they share, got one of each. Give "
                    f"each member its own."
                )
        return _joint(join, values), joined


def _joint(join: Callable[..., Tensor], trees: Sequence[Any]) -> Tree:
    """Join trees leaf by leaf; pairs go without pytree, which takes longer."""
    if isinstance(trees[0], Tensor):
        return join(*trees)
    if type(trees[0]) is tuple:
        return tuple([_joint(join, parts) for parts in zip(*trees, strict=True)])
    return tree_map(join, *trees)


def _same(values: Sequence[Tensor]) -> bool:
    return all(checks.same_values(value, values[0]) for value in values)


def _itself(value: Tensor) -> Tensor:
    return value
