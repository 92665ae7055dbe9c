"""The member axis: the tensors that have one, and the arguments of all members.

E members. A stacked entry is a tensor `[E, *shape]`, a shared one `[*shape]`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, NoReturn, TypedDict, Unpack

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.conditions import Unrepeatable, checks_collected
from vgrad.functional.guards import Protected
from vgrad.persample.engine.call import AnyCall
from vgrad.torch_private import modes
from vgrad.torch_private.tensors import versions_of
from vgrad.tree import map_tensors, tensors, tree_map
from vgrad.typing import Buffers, EnsembleStrategy, Params, Randomness, Tree, shows

InDims = int | None | Sequence[int | None]


class EnsembleOptions(TypedDict, total=False):
    """The options of every function of an ensemble; `ensemble_grad` explains them."""

    in_dims: InDims
    randomness: Randomness
    strategy: EnsembleStrategy
    shared: Patterns
    verify: bool


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
        stacked = {name: value for name, value in entries.items() if name not in shared}
        return cls(count_members(f"{function}(params, buffers)", stacked), shared)

    def member(self, entries: Params, i: int) -> Params:
        """Return the entries of one member, as views."""
        return {n: x if n in self.shared else x[i] for n, x in entries.items()}


_NO_MEMBERS = Layout(0, frozenset())


@dataclass(frozen=True, kw_only=True)
class MemberCall(AnyCall):
    """The options of a function of an ensemble; `on` adds the tensors of one call."""

    strategy: EnsembleStrategy = "auto"
    randomness: Randomness = "different"
    in_dims: InDims = None
    shared: Patterns = ()
    verify: bool = True
    differentiates: bool = False  # whether each call has a backward pass
    # Of all calls: the strategies of the shapes so far, with the reasons, and how many
    # calls there were of each kind of tensors.
    strategies: dict[Any, tuple[str, str]] = field(default_factory=dict)
    counts: dict[Any, int] = field(default_factory=dict)
    layout: Layout = _NO_MEMBERS
    items: tuple = ()  # of the batch, members in front
    dims: tuple[int | None, ...] = ()  # the member axis of each item, 0 or None

    @classmethod
    def of(cls, function: str, **options: Unpack[EnsembleOptions]) -> "MemberCall":
        """Check the options of a function."""
        call = cls(function=function, **options).checked(EnsembleStrategy)
        checks.patterns(function, shared=call.shared)
        checks.choice(function, (True, False), verify=call.verify)
        return call

    def on(
        self,
        params: Params,
        buffers: Buffers,
        batch: tuple[Tree, ...],
        keys: Tensor | None = None,
    ) -> "MemberCall":
        """Check the tensors of a call; `keys` are of the members, int64 `[E]`."""
        self.check_node_hooks()
        captured = checks_collected()
        layout = Layout.of(self.function, params, buffers, self.shared)
        dims = self._dims(batch, layout.members)
        return self.replaced(
            params=dict(params),
            buffers=dict(buffers),
            layout=layout,
            items=tuple(map(_in_front, dims, batch)),
            dims=tuple([dim if dim is None else 0 for dim in dims]),
            draws=self.draws_by_keys(keys, layout.members, "member", captured=captured),
            captured=captured,
        )

    def refuse_unkeyed(self, size: int) -> NoReturn:
        """Refuse a capture."""
        raise Unrepeatable("members draw numbers before they read values")

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

    def unstacked(self) -> list[tuple]:
        """Return the arguments of each member, views in new containers."""
        count, shared = self.layout

        def rows(named: Params) -> list[Params]:
            columns = {
                n: [x] * count if n in shared else x.unbind(0) for n, x in named.items()
            }
            return [{n: x[i] for n, x in columns.items()} for i in range(count)]

        def items(i: int) -> list[Tree]:
            dims = zip(self.dims, self.items, strict=True)
            return [
                map_tensors(_itself if dim is None else lambda x: x[i], item)
                for dim, item in dims
            ]

        members = zip(rows(self.params), rows(self.buffers), strict=True)
        return [(*entries, *items(i)) for i, entries in enumerate(members)]

    def select(self, rows: Tensor) -> "MemberCall":
        """Return the call of these members, in this order."""
        params, buffers, *items = self.map(
            lambda x: x.index_select(0, rows.to(x.device))
        )
        return self.replaced(
            params=params,
            buffers=buffers,
            items=tuple(items),
            layout=Layout(len(rows), self.layout.shared),
            draws=self.draws.of(rows),
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> tuple:
        """Apply a function to all tensors with a member axis, in new containers."""

        def mapped(named: Params) -> Params:
            shared = self.layout.shared
            return {n: x if n in shared else function(x) for n, x in named.items()}

        items = [
            map_tensors(_itself if dim is None else function, item)
            for dim, item in zip(self.dims, self.items, strict=True)
        ]
        return mapped(self.params), mapped(self.buffers), *items

    @property
    def size(self) -> int:
        """The number of members."""
        return self.layout.members

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All tensors of the caller."""
        return tensors((self.params, self.buffers, self.items))

    @property
    def may_loop(self) -> bool:
        """Whether members run one after the other where nothing else is possible."""
        bound = modes.inside_transform() or self.captured
        return self.strategy == "auto" and not bound

    def protected(self) -> Protected:
        """Return the tensors as ones that must not change."""
        batch = enumerate(tensors(self.items))
        items = {f"tensor {n} of the batch": x for n, x in batch}
        expected = "ensemble: expected a function that changes nothing it is given"
        fixed = {**items, **self.buffers, **self.params}
        return Protected(fixed, expected, "Copy it first.")

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise after a block that has written into the caller's tensors."""
        protected = self.protected()
        before = versions_of(protected.tensors.values())
        # Batch norm does not count its writes into statistics, which are vectors.
        buffers = self.buffers.items() if not self.captured else ()
        axes = {name: 1 + (name not in self.layout.shared) for name in self.buffers}
        vectors = {n: x.clone() for n, x in buffers if x.ndim == axes[n]}
        yield
        after = versions_of(protected.tensors.values())
        written = zip(protected.tensors, before, after, strict=True)
        names = [name for name, one, other in written if one != other]
        names += [n for n, x in vectors.items() if not _same([x, self.buffers[n]])]
        for name in names:
            raise RuntimeError(
                f"{protected.expected}, got one that has written into {name!r} in "
                f"place. {protected.advice}"
            )

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
            leaves = [new[name] for new in buffers]
            if name not in self.layout.shared:
                joined[name] = join(*leaves)
            elif (one_value or _same)(leaves):
                joined[name] = first
            else:
                raise ValueError(
                    f"ensemble(shared=...): expected members that leave one value in "
                    f"the buffer {name!r}, which they share, got one of each. Give "
                    f"each member its own."
                )
        return _joint(join, values), joined


shows_member_options = shows(EnsembleOptions, MemberCall)
"""The decorator of a function that takes the options of all ensembles."""


def _joint(join: Callable[..., Tensor], trees: Sequence[Any]) -> Tree:
    """Join trees leaf by leaf; pairs go without pytree, which takes longer."""
    if isinstance(trees[0], Tensor):
        return join(*trees)
    if type(trees[0]) is tuple:
        return tuple([_joint(join, parts) for parts in zip(*trees, strict=True)])
    return tree_map(join, *trees)


def _in_front(dim: int | None, item: Tree) -> Tree:
    if not dim:
        return item
    return map_tensors(partial(torch.movedim, source=dim, destination=0), item)


def _same(values: Sequence[Tensor]) -> bool:
    return all(checks.same_values(value, values[0]) for value in values)


def _itself(value: Tensor) -> Tensor:
    return value
