"""Where the loss takes parameters from, and what came back from there.

The loss gets stand-ins for the parameters. What it computes from parameters alone (a
transpose, a cast, a weight norm) is computed once and gets a stand-in of its own; the
factors that arrive there are taken back to the parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad.lowering.truthful import GRAPH, HOOKS, MEMORY
from vgrad.persample.engine import views
from vgrad.persample.engine.guard import UnsupportedOp
from vgrad.persample.factors.base import Dense, Factor, Zero
from vgrad.persample.factors.combined import Moved, Replay, disjoint, merged
from vgrad.persample.factors.outer import Outer
from vgrad.torch_private import levels
from vgrad.torch_private.modes import op_name
from vgrad.torch_private.tensors import leaf, version_of
from vgrad.tree import tree_map_only
from vgrad.typing import Params

Take = Callable[[str, Factor], None]


@dataclass(eq=False)
class Site:
    """A tensor that the loss takes for a parameter, or for a function of some.

    Attributes:
        names: the parameters that it is computed from.
        handed: what the loss gets, a leaf that requires grad.
        plain: the same for ops that need no gradient of it.
        source: the value with the graph that leads to the parameters' leaves.
        replay: where the value is a view of a parameter, the way to it.
        parent: the site of which this one is a transpose or a cast.
        expansion: one copy for each sample, without memory of its own.
    """

    names: tuple[str, ...]
    handed: Tensor
    plain: Tensor
    source: Tensor
    replay: Replay | None = None
    parent: "Site | None" = None
    transposed: bool = False
    expansion: Tensor | None = None


class Use(NamedTuple):
    """One use of parameters, told as soon as its gradients are known.

    Attributes:
        names: the parameters.
        ops: the op; where copies for the samples were used, all that asked for them.
        factor: the gradients of what the ops took.
        ruled: whether the ops have rules that fit.
        computed: whether that was computed from the parameters and no view of one.
    """

    names: tuple[str, ...]
    ops: tuple[str, ...]
    factor: Factor
    ruled: bool
    computed: bool


class Sites:
    """The stand-ins of one run of the loss, and the factors that arrived.

    `take(name, factor)` is called once for each parameter, as soon as all its factors
    are there. `tell` is for who wants to know every single use. `unreached` then names
    the parameters for which nothing came.
    """

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
        self._asked: dict[Site, dict[str, bool]] = {}
        self._known: dict[int, Site] = {}
        self._found: dict[str, list[tuple[Site, Factor]]] = {n: [] for n in params}
        self._pending = dict.fromkeys(params, 0)
        self._late: set[str] = set()
        self._roots: dict[str, Site] = {}
        for name, value in params.items():
            handed = leaf(value)
            root = Site((name,), handed, handed.detach(), handed, views.itself)
            self._roots[name] = self._known[id(handed)] = root
        self.params = {name: site.handed for name, site in self._roots.items()}
        self.unreached: set[str] = set()

    def find(self, tensor: Any) -> Site | None:
        """Return the site of a stand-in."""
        return self._known.get(id(tensor))

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
        if func in HOOKS or getattr(func, "__name__", "") in _AROUND:
            names = ", ".join(name for site in sites for name in site.names)
            raise UnsupportedOp(
                f"{op_name(func)}: expected a loss that leaves {names} as it is, got "
                f"one that writes to its data or puts a hook on it. Compute a new "
                f'tensor from it instead, or use strategy="loop".'
            )
        sources = {id(site.handed): site.source for site in sites}
        args, kwargs = replaced((args, kwargs), sources)
        names = tuple(dict.fromkeys(name for site in sites for name in site.names))
        versions = [version_of(site.source) for site in sites]
        output = func(*args, **kwargs)
        if versions != [version_of(site.source) for site in sites]:
            raise UnsupportedOp(
                f"{op_name(func)}: expected a loss that computes new tensors from "
                f"{', '.join(names)}, got one that changes such a tensor in place. "
                f'Use an op that does not, or strategy="vmap".'
            )
        known = {id(site.source): site for site in sites}

        def handed(value: Any, place: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in known:
                return known[id(value)].handed
            _check_same_for_all(op_name(func), names, value)
            if value.grad_fn is None:  # views made under no_grad say they require grad
                return value
            stand_in = leaf(value)
            site = Site(names, stand_in, stand_in.detach(), value)
            if len(sites) == 1:
                source = sites[0].source
                view = views.describe(func, args, kwargs, source, value, place)
                if view is not None and sites[0].replay is not None:
                    site.replay = views.after(sites[0].replay, view.replay)
                    if view.same_numbers or view.transposes:
                        site.parent, site.transposed = sites[0], view.transposes
            self._late.update(names)
            self._known[id(stand_in)] = site
            return stand_in

        if isinstance(output, tuple | list):
            return type(output)(handed(each, n) for n, each in enumerate(output))
        return handed(output, None)

    def expand(self, site: Site, op: Callable | None, *, ruled: bool) -> Tensor:
        """Return one copy for each sample, [B, *shape], which `op` asked for."""
        if self._tell is not None:
            self._asked.setdefault(site, {})[op_name(op)] = ruled
        if site.expansion is None:
            with ExitStack() as stack:  # the loss may be inside a transform of its own
                while levels.current_level() is not None:
                    stack.enter_context(levels.without_innermost())
                copies = site.plain.expand(self._size, *site.plain.shape)
                site.expansion = leaf(copies)
            self._late.update(site.names)
        return site.expansion

    def expect(self, site: Site) -> None:
        """Wait for one more factor."""
        for name in site.names:
            self._pending[name] += 1

    def arrived(self, site: Site, factor: Factor | None, op: str) -> None:
        """Accept what was expected; without a gradient there is no factor."""
        if factor is not None:
            self._keep(site, factor, {op: True})
        for name in site.names:
            self._pending[name] -= 1
            if not self._pending[name] and name not in self._late:
                self._complete(name)

    def differentiate(
        self, losses: Tensor, scales: Tensor, anchors: list[Tensor]
    ) -> None:
        """Run the one backward pass, and hand on the factors of every parameter."""
        sites = list(self._known.values())
        expanded = [site for site in sites if site.expansion is not None]
        inputs: list[Any] = [site.expansion for site in expanded]
        inputs += [site.handed for site in sites]
        if losses.requires_grad:
            grads = torch.autograd.grad(
                losses, inputs + anchors, grad_outputs=scales, allow_unused=True
            )
            passed_by = zip(sites, grads[len(expanded) :], strict=False)
            _check_nothing_passed_by([s for s, grad in passed_by if grad is not None])
            for site, grad in zip(expanded, grads, strict=False):
                if grad is not None:
                    self._keep(site, Dense(grad), self._asked.get(site, {}))
        for name in list(self._found):
            self._complete(name)

    def _keep(self, site: Site, factor: Factor, ops: Mapping[str, bool]) -> None:
        """Note a factor, under the parameter itself where the way there is short."""
        if self._tell is not None:
            ruled, computed = all(ops.values()), site.replay is None
            self._tell(Use(site.names, tuple(ops), factor, ruled, computed))
        while site.parent is not None:
            if site.transposed:
                if not isinstance(factor, Outer) or not factor.is_matrix:
                    break
                shape = site.parent.plain.shape
                factor = Outer(factor.outputs, factor.inputs, shape)
            site = site.parent
        for name in site.names:
            self._found[name].append((site, factor))

    def _complete(self, name: str) -> None:
        """Hand on what was found for a parameter, as one factor."""
        found = self._found.pop(name, None)
        if found is None:
            return
        root = self._roots[name]
        parts: dict[Site, list[Factor]] = {}
        for site, factor in found:
            parts.setdefault(site, []).append(factor)
        del found
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


def replaced(tree: Any, by: Mapping[int, Tensor]) -> Any:
    """Put other tensors in the place of some."""
    return tree_map_only(Tensor, lambda each: by.get(id(each), each), tree)


_AROUND = {"__set__", "set_"}
"""What acts on the very tensor a loss was handed, and not on its values."""


def _check_same_for_all(op: str, names: tuple[str, ...], value: Tensor) -> None:
    drawn = levels.is_batched(value)
    if drawn and levels.unwrapped(value).requires_grad:
        raise UnsupportedOp(
            f"{op}: expected what is computed from {', '.join(names)} alone to be the "
            f"same for all samples, got random numbers of each sample's own. Use "
            f'strategy="vmap", or randomness="same".'
        )


def _check_nothing_passed_by(sites: list[Site]) -> None:
    if sites:
        names = sorted({name for site in sites for name in site.names})
        raise UnsupportedOp(
            f"loss: expected ops that a function mode sees, got {', '.join(names)} in "
            f"one that it does not, such as a transform of torch.func over it, or "
            f'compiled code. Use strategy="vmap" or "loop".'
        )
