"""Where the loss takes parameters from, and what came back from there.

The loss gets stand-ins for the parameters. What it computes from parameters alone (a
transpose, a cast, a weight norm) is computed once and gets a stand-in of its own; the
factors that arrive there are taken back to the parameters.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad.lowering.grad_flags import GRAPH, HOOKS, MEMORY
from vgrad.persample.engine import views
from vgrad.persample.engine.captured import Stamp, check_unchanged, stamped
from vgrad.persample.engine.guard import UnsupportedOp
from vgrad.persample.factors.base import Dense, Factor, Outer, Zero, owned
from vgrad.persample.factors.combined import Moved, Replay, disjoint, merged
from vgrad.torch_private import modes
from vgrad.torch_private.modes import op_name
from vgrad.torch_private.tensors import leaf, memory, version_of
from vgrad.tree import tree_map_only
from vgrad.typing import Params

Take = Callable[[str, Factor], None]


@dataclass(eq=False)
class Site:
    """A tensor that the loss takes for a parameter, or for a function of some."""

    names: tuple[str, ...]  # the parameters that it is computed from
    handed: Tensor  # what the loss gets, a leaf that requires grad
    plain: Tensor  # the same for ops that need no gradient of it
    source: Tensor  # the value with the graph that leads to the parameters' leaves
    replay: Replay | None = None  # for a view of a parameter, the way to it
    parent: "Site | None" = None  # the site of which it is a transpose or a cast
    transposed: bool = False
    expansion: Tensor | None = None  # one copy for each sample, without memory
    asked: dict[str, bool] = field(default_factory=dict)  # ops for copies: rules fit?


class Use(NamedTuple):
    """One use of parameters, told as soon as its gradients are known."""

    names: tuple[str, ...]  # the parameters
    ops: tuple[str, ...]  # the op, or all ops that asked for copies for the samples
    factor: Factor  # the gradients of what the ops took
    ruled: bool  # the ops have rules that fit
    computed: bool  # what they took was computed from parameters and is no view of one
    copied: int  # bytes of the factor that it holds as copies of its own


@dataclass(eq=False)
class _Parameter:
    """One parameter: its own site, and the factors that arrived and are expected."""

    root: Site
    found: list[tuple[Site, Factor, list[Stamp]]] = field(default_factory=list)
    expected: int = 0
    pending: int = 0
    late: bool = False  # some are known only after the whole backward pass


class Sites:
    """The stand-ins of one run of the loss, and the factors that arrived.

    `take(name, factor)` is called once for each parameter, as soon as all its factors
    are there. `tell` is an optional callback, invoked once per use. In the end
    `unreached` names the parameters for which nothing came.

    Attributes:
        owns: whether a node of the graph may write into any tensor that it reaches, so
            that factors hold copies.
        repeats: whether ops of the loss run again in the backward pass.
    """

    owns = False
    repeats = False

    def __init__(
        self,
        params: Params,
        size: int,
        take: Take,
        tell: Callable[[Use], None] | None = None,
    ) -> None:
        """Make the stand-ins for the parameters."""
        self._size = size
        self._take = take
        self._tell = tell
        self._known: dict[int, Site] = {}
        self._waiting: dict[str, _Parameter] = {}
        self._stamps: list[Stamp] = []
        self.params: Params = {}
        self.unreached: set[str] = set()
        for name, value in params.items():
            handed = leaf(value)
            root = Site((name,), handed, handed.detach(), handed, lambda root: root)
            self.params[name] = handed
            self._known[id(handed)] = root
            self._waiting[name] = _Parameter(root)

    def find(self, tensor: Any) -> Site | None:
        """Return the site of a stand-in."""
        return self._known.get(id(tensor))

    def original(self, tensor: Tensor) -> Tensor:
        """Return the stand-in itself for a copy that was packed away with its data."""
        if id(tensor) in self._known or not tensor.requires_grad or not tensor.is_leaf:
            return tensor
        if modes.is_wrapped(tensor):
            return tensor
        for site in self._known.values():
            if _is_copy(tensor, site.handed):
                return site.handed
        return tensor

    def check_read(self, func: Callable, sites: Iterable[Site]) -> None:
        """Refuse to tell where what is computed from parameters has its graph."""
        if func in GRAPH | MEMORY:
            for site in sites:
                if site.source is not site.handed:
                    raise UnsupportedOp(
                        f"{op_name(func)}: expected a loss that does not ask for the "
                        f"graph of what it computes from {', '.join(site.names)} "
                        f'alone. Use strategy="vmap" or "loop".'
                    )

    def derive(
        self, func: Callable, args: tuple, kwargs: dict, sites: list[Site]
    ) -> Any:
        """Run a function of parameters alone, once; its tensors are new sites."""
        names = tuple(dict.fromkeys(name for site in sites for name in site.names))
        if func in HOOKS or getattr(func, "__name__", "") in _AROUND:
            raise UnsupportedOp(
                f"{op_name(func)}: expected a loss that leaves {', '.join(names)} as "
                f"it is, got one that writes to its data or puts a hook on it. Compute "
                f'a new tensor from it instead, or use strategy="loop".'
            )
        sources = {id(site.handed): site.source for site in sites}
        args, kwargs = replaced((args, kwargs), sources)
        output = _computed(func, args, kwargs, sites, names)

        def handed(value: Any, place: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            for site in sites:
                if value is site.source:
                    return site.handed
            _check_same_for_all(op_name(func), names, value)
            if value.grad_fn is None:  # views made under no_grad say they require grad
                return value
            stand_in = leaf(value)
            site = Site(names, stand_in, stand_in.detach(), value)
            if len(sites) == 1 and (replay := sites[0].replay) is not None:
                parent = sites[0]
                view = views.describe(func, args, kwargs, parent.source, value, place)
                if view is not None:
                    move = view.replay
                    site.replay = lambda tensor: move(replay(tensor))
                    if view.same_numbers or view.transposes:
                        site.parent, site.transposed = parent, view.transposes
            self._wait_for_the_end(site)
            self._known[id(stand_in)] = site
            return stand_in

        if isinstance(output, tuple | list):
            return type(output)(handed(each, n) for n, each in enumerate(output))
        return handed(output, None)

    def expand(self, site: Site, op: Callable | None, *, ruled: bool) -> Tensor:
        """Return one copy for each sample, [B, *shape], which `op` asked for."""
        if self._tell is not None:
            site.asked[op_name(op)] = ruled
        if site.expansion is None:
            with modes.exit_all():  # the loss may be inside a transform of its own
                copies = site.plain.expand(self._size, *site.plain.shape)
                site.expansion = leaf(copies)
            self._wait_for_the_end(site)
        return site.expansion

    def _wait_for_the_end(self, site: Site) -> None:
        for name in site.names:
            self._waiting[name].late = True

    def expect(self, site: Site) -> None:
        """Wait for one more factor."""
        for name in site.names:
            self._waiting[name].expected += 1

    @property
    def sources(self) -> list[Tensor]:
        """The tensors computed from parameters alone, with their graphs."""
        derived = [each for each in self._known.values() if each.replay is None]
        return [site.source for site in derived]

    def arrived(
        self, site: Site, factor: Factor | None, op: str, own: Tensor | None = None
    ) -> None:
        """Accept what was expected; without a gradient there is no factor.

        The memory of `own` belongs to the factor.
        """
        if factor is not None:
            factor = owned(factor, own) if self.owns else factor
            self._keep(site, factor, {op: True})
        for name in site.names:
            parameter = self._waiting[name]
            parameter.pending -= 1
            if not parameter.pending and not parameter.late:
                self._complete(name)

    def differentiate(
        self, losses: Tensor, scales: Tensor, anchors: list[Tensor], *, last: bool
    ) -> None:
        """Run a backward pass, and hand on the factors of every parameter."""
        parameters = dict(self._waiting)
        for parameter in parameters.values():
            parameter.pending = parameter.expected
        sites = list(self._known.values())
        expanded = [site for site in sites if site.expansion is not None]
        inputs: list[Any] = [site.expansion for site in expanded]
        inputs += [site.handed for site in sites]
        for expansion in inputs[: len(expanded)] if self.owns else ():
            copy_at_once(expansion)
        if losses.requires_grad:
            grads = torch.autograd.grad(
                losses,
                inputs + anchors,
                grad_outputs=scales,
                allow_unused=True,
                retain_graph=not last,
            )
            _check_nothing_passed_by(sites, grads[len(expanded) :])
            for site, grad in zip(expanded, grads, strict=False):
                if grad is not None:
                    self._keep(site, Dense(grad), site.asked)
        if self.owns:
            self._pull_back_once()
        for name in list(self._waiting):
            self._complete(name)
        if not last:
            self._waiting = parameters
        check_unchanged(self._stamps)

    def _keep(self, site: Site, factor: Factor, ops: Mapping[str, bool]) -> None:
        """Note a factor, under the parameter itself where the way there is short."""
        if self._tell is not None:
            ruled, computed = all(ops.values()), site.replay is None
            copied = factor.bytes if self.owns else 0
            self._tell(Use(site.names, tuple(ops), factor, ruled, computed, copied))
        stamps = []
        if self.repeats and not self.owns:
            stamps = stamped(", ".join(ops), factor)
            self._stamps += stamps
        while site.parent is not None:
            if site.transposed:
                if not isinstance(factor, Outer) or not factor.is_matrix:
                    break
                shape = site.parent.plain.shape
                factor = Outer(factor.outputs, factor.inputs, shape)
            site = site.parent
        for name in site.names:
            self._waiting[name].found.append((site, factor, stamps))

    def _complete(self, name: str) -> None:
        """Hand on what was found for a parameter, as one factor."""
        parameter = self._waiting.pop(name)
        root, found = parameter.root, parameter.found
        parameter.found = []
        parts: dict[Site, list[Factor]] = {}
        for site, factor, stamps in found:
            check_unchanged(stamps)
            parts.setdefault(site, []).append(factor)
        del found, parameter
        whole = {site: merged(factors) for site, factors in parts.items()}
        for site in [site for site in whole if site.replay is None]:
            dense = self._pulled_back(site, root, whole.pop(site))
            whole[root] = merged([whole[root], dense]) if root in whole else dense
        replays = tuple(site.replay for site in whole if site.replay is not None)
        if not whole:
            self.unreached.add(name)
            self._take(name, Zero(self._size, root.plain))
        elif list(whole) == [root]:
            self._take(name, whole[root])
        else:
            moved = Moved(tuple(whole.values()), replays, root.plain.shape)
            apart = disjoint(replays, root.plain)
            self._take(name, moved if apart else Dense(moved.grad()))

    def _pull_back_once(self) -> None:
        """Run one backward pass through all that was computed from parameters.

        Its nodes may write into what they saved, so none runs twice.
        """
        late: dict[Site, list[Factor]] = {}
        for parameter in self._waiting.values():
            parts: dict[Site, list[Factor]] = {}
            for site, factor, _ in parameter.found:
                if site.replay is None:
                    parts.setdefault(site, []).append(factor)
            late = parts | late  # a site is found at each of its parameters
            parameter.found = [each for each in parameter.found if each[0] not in parts]
        if not late:
            return
        names = {name for site in late for name in site.names}
        roots = [self._waiting[name].root for name in names]
        grads = [
            merged(factors).grad().to(site.source.dtype, copy=True)
            for site, factors in late.items()
        ]

        def back(*grads: Tensor) -> tuple[Tensor, ...]:
            sources = [site.source for site in late], [root.source for root in roots]
            return torch.autograd.grad(*sources, grads, materialize_grads=True)

        # Unlike is_grads_batched, which ends the process where such a node reads .data.
        for root, grad in zip(roots, torch.vmap(back)(*grads), strict=True):
            self._waiting[root.names[0]].found.append((root, Dense(grad), []))

    def _pulled_back(self, site: Site, root: Site, factor: Factor) -> Factor:
        """Differentiate what was computed of parameters, for every sample."""
        grads = factor.grad().to(site.source.dtype)
        (found,) = torch.autograd.grad(
            site.source,
            root.source,
            grads,
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
        return Zero(self._size, root.plain) if found is None else Dense(found)


def copy_at_once(tensor: Tensor) -> None:
    """Copy the gradient of a tensor as it comes there, before another node writes."""
    tensor.register_hook(lambda grad: None if grad is None else grad.clone())


def replaced(tree: Any, by: Mapping[int, Tensor]) -> Any:
    """Put other tensors in the place of some."""
    return tree_map_only(Tensor, lambda each: by.get(id(each), each), tree)


_AROUND = {"__set__", "set_"}
"""What acts on the very tensor a loss was handed, and not on its values."""


def _computed(
    func: Callable, args: tuple, kwargs: dict, sites: list[Site], names: Sequence[str]
) -> Any:
    """Run a function of parameters, which must write into none of them."""
    versions = [version_of(site.source) for site in sites]
    output = func(*args, **kwargs)
    if versions != [version_of(site.source) for site in sites]:
        raise UnsupportedOp(
            f"{op_name(func)}: expected a loss that computes new tensors from "
            f"{', '.join(names)}, got one that changes such a tensor in place. Use an "
            f'op that does not, or strategy="vmap".'
        )
    return output


def _is_copy(tensor: Tensor, of: Tensor) -> bool:
    same = memory(tensor) == memory(of) and tensor.dtype == of.dtype
    same &= tensor.storage_offset() == of.storage_offset()
    return same and tensor.shape == of.shape and tensor.stride() == of.stride()


def _check_same_for_all(op: str, names: tuple[str, ...], value: Tensor) -> None:
    drawn = modes.is_batched(value)
    if drawn and modes.unwrapped(value).requires_grad:
        raise UnsupportedOp(
            f"{op}: expected what is computed from {', '.join(names)} alone to be the "
            f"same for all samples, got random numbers of each sample's own. Use "
            f'strategy="vmap", or randomness="same".'
        )


def _check_nothing_passed_by(sites: list[Site], grads: Sequence[Any]) -> None:
    passed_by = zip(sites, grads, strict=False)
    reached = [site.names for site, grad in passed_by if grad is not None]
    if names := sorted({name for each in reached for name in each}):
        raise UnsupportedOp(
            f"loss: expected ops that a function mode sees, got {', '.join(names)} in "
            f"one that it does not, such as a transform of torch.func over it, or "
            f'compiled code. Use strategy="vmap" or "loop".'
        )
