"""Proxies of the parameters inside a loss, and the factors that arrive at them.

The loss gets proxies in the place of parameters. A value computed from parameters alone
(a transpose, a cast, a weight norm) is computed once and gets a proxy of its own; the
factors that arrive there are taken back to the parameters. Hooks in the graph make the
factors of ops with rules in the one backward pass.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from vgrad.factors.base import Dense, Factor, Outer, Zero, owned
from vgrad.factors.combined import Moved, Replay, disjoint, merged
from vgrad.loss.grad_flags import GRAPH, HOOKS, MEMORY, own_backward_pass
from vgrad.ops.record import Maker
from vgrad.persample.engine.guard import UnsupportedOp
from vgrad.torch_private import modes
from vgrad.torch_private.autograd import graph_nodes
from vgrad.torch_private.modes import op_name
from vgrad.torch_private.tensors import leaf, memory, version_of, viewed
from vgrad.tree import tree_map_only
from vgrad.typing import Params

Take = Callable[[str, Factor], None]


@dataclass(eq=False)
class ParamProxy:
    """A tensor that the loss takes for a parameter, or for a function of some."""

    names: tuple[str, ...]  # the parameters that it is computed from
    proxy: Tensor  # the tensor inside the loss, a leaf that requires grad
    value: Tensor  # the same for ops that need no gradient of it
    origin: Tensor  # the value with the graph that leads to the parameters' leaves
    replay: Replay | None = None  # for a view of a parameter, the way to it
    parent: "ParamProxy | None" = None  # of which it is a transpose or a cast
    transposed: bool = False
    copies: Tensor | None = None  # one copy for each sample, without memory
    copied_by: dict[str, bool] = field(default_factory=dict)  # ops: do rules fit?


class Use(NamedTuple):
    """One use of parameters, reported as soon as its gradients are known."""

    names: tuple[str, ...]
    ops: tuple[str, ...]  # the op, or all ops that take copies for the samples
    factor: Factor  # the gradients at the inputs of the ops
    ruled: bool  # the ops have rules that fit
    computed: bool  # the input was computed from parameters and is no view of one
    copied: int  # bytes of the factor that it holds as copies of its own


class Stamp(NamedTuple):
    """The version of a tensor that an op needs unchanged."""

    op: str
    tensor: ref[Tensor]
    version: int


def _stamped(op: str, value: Any) -> list[Stamp]:
    return [Stamp(op, ref(each), version_of(each)) for each in referenced(value)]


def _check_unchanged(stamps: Iterable[Stamp]) -> None:
    for stamp in stamps:
        tensor = stamp.tensor()
        if tensor is not None and version_of(tensor) != stamp.version:
            raise RuntimeError(
                f"{stamp.op}: expected an input that stays as it is until the backward "
                f"pass is over, but an op of the loss wrote into it in place."
            )


def referenced(value: Any) -> list[Tensor]:
    """Return the tensors that an object refers to, itself or through others."""
    tensors: list[Tensor] = []
    seen: set[int] = set()
    left: list[Any] = [value]
    while left:
        value = left.pop()
        known = id(value) in seen or isinstance(value, type | ModuleType)
        if known or not gc.is_tracked(value):  # numbers and the like refer to nothing
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):  # not to its globals
            fields = (value.__defaults__, value.__kwdefaults__, vars(value))
            left += gc.get_referents(*(value.__closure__ or ()), *fields)
        elif isinstance(value, Tensor):
            tensors.append(value)
        else:
            left += gc.get_referents(value)
    return tensors


@dataclass(eq=False)
class _Parameter:
    """One parameter: its own proxy, and the factors that arrived and are expected."""

    root: ParamProxy
    arrived: list[tuple[ParamProxy, Factor, list[Stamp]]] = field(default_factory=list)
    expected: int = 0
    pending: int = 0
    late: bool = False  # some are known only after the whole backward pass


class ParamProxies:
    """The proxies of one run of the loss, and the factors that arrived.

    `take(name, factor)` is called once for each parameter, as soon as all its factors
    are there. `callback` is optional, called once per use. In the end `unreached` names
    the parameters that received no gradient.

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
        callback: Callable[[Use], None] | None = None,
    ) -> None:
        self._size = size
        self._take = take
        self._callback = callback
        self._known: dict[int, ParamProxy] = {}
        self._waiting: dict[str, _Parameter] = {}
        self._stamps: list[Stamp] = []
        self.params: Params = {}
        self.unreached: set[str] = set()
        for name, value in params.items():
            proxy = leaf(value)
            root = ParamProxy((name,), proxy, proxy.detach(), proxy, lambda root: root)
            self.params[name] = proxy
            self._known[id(proxy)] = root
            self._waiting[name] = _Parameter(root)

    def find(self, tensor: Any) -> ParamProxy | None:
        """Return the entry of a tensor that is a proxy."""
        return self._known.get(id(tensor))

    def original(self, tensor: Tensor) -> Tensor:
        """Return the proxy itself for a copy that was saved with its data."""
        if id(tensor) in self._known or not tensor.requires_grad or not tensor.is_leaf:
            return tensor
        if modes.is_wrapped(tensor):
            return tensor
        place = _place(tensor)
        for known in self._known.values():
            if _place(known.proxy) == place:
                return known.proxy
        return tensor

    def check_read(self, func: Callable, proxies: Iterable[ParamProxy]) -> None:
        """Refuse to show the graph or memory of a value computed from parameters."""
        if func in GRAPH | MEMORY:
            for known in proxies:
                if known.origin is not known.proxy:
                    raise UnsupportedOp(
                        f"{op_name(func)}: expected a loss that does not ask for the "
                        f"graph of a value computed from {', '.join(known.names)} "
                        f'alone. Use strategy="vmap" or "loop".'
                    )

    def derive(
        self, func: Callable, args: tuple, kwargs: dict, proxies: list[ParamProxy]
    ) -> Any:
        """Run a function of parameters alone, once; its tensors are new proxies."""
        names = tuple(dict.fromkeys(name for known in proxies for name in known.names))
        if func in HOOKS or getattr(func, "__name__", "") in _OF_THE_OBJECT:
            raise UnsupportedOp(
                f"{op_name(func)}: expected a loss that leaves {', '.join(names)} as "
                f"it is, got one that writes to its data or puts a hook on it. Compute "
                f'a new tensor from it instead, or use strategy="loop".'
            )
        origins = {id(known.proxy): known.origin for known in proxies}
        args, kwargs = replaced((args, kwargs), origins)
        output = _computed(func, args, kwargs, proxies, names)

        def proxy_of(value: Any, place: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            for known in proxies:
                if value is known.origin:
                    return known.proxy
            if modes.is_batched(value) and modes.unwrapped(value).requires_grad:
                raise UnsupportedOp(
                    f"{op_name(func)}: expected values computed from "
                    f"{', '.join(names)} alone to be the same for all samples, got "
                    f'random numbers of each sample. Use strategy="vmap", or '
                    f'randomness="same".'
                )
            if value.grad_fn is None:  # views made under no_grad still require grad
                return value
            proxy = leaf(value)
            derived = ParamProxy(names, proxy, proxy.detach(), value)
            if len(proxies) == 1 and (replay := proxies[0].replay) is not None:
                parent = proxies[0]
                view = describe_view(func, args, kwargs, parent.origin, value, place)
                if view is not None:
                    move = view.replay
                    derived.replay = lambda tensor: move(replay(tensor))
                    if view.same_numbers or view.transposes:
                        derived.parent, derived.transposed = parent, view.transposes
            self._wait_for_the_end(derived)
            self._known[id(proxy)] = derived
            return proxy

        if isinstance(output, tuple | list):
            return type(output)(proxy_of(each, n) for n, each in enumerate(output))
        return proxy_of(output, None)

    def expand(self, known: ParamProxy, op: Callable | None, *, ruled: bool) -> Tensor:
        """Return one copy for each sample, [B, *shape], for `op`."""
        if self._callback is not None:
            known.copied_by[op_name(op)] = ruled
        if known.copies is None:
            with modes.exit_all():  # the loss may be inside a transform of its own
                copies = known.value.expand(self._size, *known.value.shape)
                known.copies = leaf(copies)
            self._wait_for_the_end(known)
        return known.copies

    def _wait_for_the_end(self, known: ParamProxy) -> None:
        for name in known.names:
            self._waiting[name].late = True

    def expect(self, known: ParamProxy) -> None:
        """Wait for one more factor."""
        for name in known.names:
            self._waiting[name].expected += 1

    @property
    def origins(self) -> list[Tensor]:
        """The tensors computed from parameters alone, with their graphs."""
        return [each.origin for each in self._known.values() if each.replay is None]

    def arrived(
        self, known: ParamProxy, factor: Factor | None, op: str, g: Tensor | None = None
    ) -> None:
        """Accept an expected factor; without a gradient there is none.

        The memory of `g` belongs to the factor.
        """
        if factor is not None:
            factor = owned(factor, g) if self.owns else factor
            self._keep(known, factor, {op: True})
        for name in known.names:
            parameter = self._waiting[name]
            parameter.pending -= 1
            if not parameter.pending and not parameter.late:
                self._complete(name)

    def differentiate(
        self, losses: Tensor, scales: Tensor, anchors: list[Tensor], *, last: bool
    ) -> None:
        """Run a backward pass, and pass on the factors of every parameter."""
        parameters = dict(self._waiting)
        for parameter in parameters.values():
            parameter.pending = parameter.expected
        proxies = list(self._known.values())
        expanded = [known for known in proxies if known.copies is not None]
        inputs: list[Any] = [known.copies for known in expanded]
        inputs += [known.proxy for known in proxies]
        for copies in inputs[: len(expanded)] if self.owns else ():
            copy_on_arrival(copies)
        if losses.requires_grad:
            grads = torch.autograd.grad(
                losses,
                inputs + anchors,
                grad_outputs=scales,
                allow_unused=True,
                retain_graph=not last,
            )
            _check_no_gradient(proxies, grads[len(expanded) :])
            for known, grad in zip(expanded, grads, strict=False):
                if grad is not None:
                    self._keep(known, Dense(grad), known.copied_by)
        if self.owns:
            self._pull_back_once()
        for name in list(self._waiting):
            self._complete(name)
        if not last:
            self._waiting = parameters
        _check_unchanged(self._stamps)

    def _keep(self, known: ParamProxy, factor: Factor, ops: Mapping[str, bool]) -> None:
        """Note a factor, at the parameter itself where the way there is short."""
        if self._callback is not None:
            ruled, computed = all(ops.values()), known.replay is None
            copied = factor.bytes if self.owns else 0
            self._callback(
                Use(known.names, tuple(ops), factor, ruled, computed, copied)
            )
        stamps = []
        if self.repeats and not self.owns:
            stamps = _stamped(", ".join(ops), factor)
            self._stamps += stamps
        while known.parent is not None:
            if known.transposed:
                if not isinstance(factor, Outer) or not factor.is_matrix:
                    break
                shape = known.parent.value.shape
                factor = Outer(factor.outputs, factor.inputs, shape)
            known = known.parent
        for name in known.names:
            self._waiting[name].arrived.append((known, factor, stamps))

    def _complete(self, name: str) -> None:
        parameter = self._waiting.pop(name)
        root, arrived = parameter.root, parameter.arrived
        parameter.arrived = []
        parts: dict[ParamProxy, list[Factor]] = {}
        for known, factor, stamps in arrived:
            _check_unchanged(stamps)
            parts.setdefault(known, []).append(factor)
        del arrived, parameter
        whole = {known: merged(factors) for known, factors in parts.items()}
        for known in [known for known in whole if known.replay is None]:
            dense = self._pulled_back(known, root, whole.pop(known))
            whole[root] = merged([whole[root], dense]) if root in whole else dense
        replays = tuple(known.replay for known in whole if known.replay is not None)
        if not whole:
            self.unreached.add(name)
            self._take(name, Zero(self._size, root.value))
        elif list(whole) == [root]:
            self._take(name, whole[root])
        else:
            moved = Moved(tuple(whole.values()), replays, root.value.shape)
            apart = disjoint(replays, root.value)
            self._take(name, moved if apart else Dense(moved.grad()))

    def _pull_back_once(self) -> None:
        """Run one backward pass through all values computed from parameters.

        Its nodes may write into their saved tensors, so none runs twice.
        """
        late: dict[ParamProxy, list[Factor]] = {}
        for parameter in self._waiting.values():
            parts: dict[ParamProxy, list[Factor]] = {}
            for known, factor, _ in parameter.arrived:
                if known.replay is None:
                    parts.setdefault(known, []).append(factor)
            late = parts | late  # a proxy is among the factors of each of its names
            parameter.arrived = [
                each for each in parameter.arrived if each[0] not in parts
            ]
        if not late:
            return
        names = {name for known in late for name in known.names}
        roots = [self._waiting[name].root for name in names]
        grads = [
            merged(factors).grad().to(known.origin.dtype, copy=True)
            for known, factors in late.items()
        ]

        def back(*grads: Tensor) -> tuple[Tensor, ...]:
            origins = [known.origin for known in late], [root.origin for root in roots]
            return torch.autograd.grad(*origins, grads, materialize_grads=True)

        # Unlike is_grads_batched, which ends the process where such a node reads .data.
        for root, grad in zip(roots, torch.vmap(back)(*grads), strict=True):
            self._waiting[root.names[0]].arrived.append((root, Dense(grad), []))

    def _pulled_back(self, known: ParamProxy, root: ParamProxy, factor: Factor):
        """Differentiate a value computed from a parameter, for every sample."""
        (grads,) = torch.autograd.grad(
            known.origin,
            root.origin,
            factor.grad().to(known.origin.dtype),
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
        return Zero(self._size, root.value) if grads is None else Dense(grads)


def _place(tensor: Tensor) -> tuple:
    offset, shape = tensor.storage_offset(), tensor.shape
    return memory(tensor), tensor.dtype, offset, shape, tensor.stride()


def copy_on_arrival(tensor: Tensor) -> None:
    """Copy the gradient of a tensor as it comes there, before another node writes."""
    tensor.register_hook(lambda grad: None if grad is None else grad.clone())


def replaced(tree: Any, by: Mapping[int, Tensor]) -> Any:
    """Replace tensors, which `by` has by their ids."""
    return tree_map_only(Tensor, lambda each: by.get(id(each), each), tree)


_OF_THE_OBJECT = {"__set__", "set_"}
"""Functions that act on the very tensor inside a loss, and not on its values."""


def _computed(
    func: Callable,
    args: tuple,
    kwargs: dict,
    proxies: list[ParamProxy],
    names: Sequence[str],
) -> Any:
    versions = [version_of(known.origin) for known in proxies]
    output = func(*args, **kwargs)
    if versions != [version_of(known.origin) for known in proxies]:
        raise UnsupportedOp(
            f"{op_name(func)}: expected a loss that computes new tensors from "
            f"{', '.join(names)}, got one that changes such a tensor in place. Use an "
            f'op that does not, or strategy="vmap".'
        )
    return output


def _check_no_gradient(proxies: list[ParamProxy], grads: Sequence[Any]) -> None:
    """Refuse gradients at the proxies themselves, past all hooks and copies."""
    pairs = zip(proxies, grads, strict=False)
    reached = [known.names for known, grad in pairs if grad is not None]
    if names := sorted({name for each in reached for name in each}):
        raise UnsupportedOp(
            f"loss: expected ops that a function mode sees, got {', '.join(names)} in "
            f"one that it does not, such as a transform of torch.func over it, or "
            f'compiled code. Use strategy="vmap" or "loop".'
        )


class Taps:
    """Hooks on the nodes of one graph, which make the factors of ops by rule."""

    def __init__(self, proxies: ParamProxies) -> None:
        self._proxies = proxies
        self._open = self._last = False
        self._waiting: dict[int, list] = {}

    @contextmanager
    def open(self, *, last: bool) -> Iterator[None]:
        """Run a backward pass in this block; makers are kept until the last one."""
        self._open, self._last = True, last
        try:
            yield
        finally:
            self._open = False

    def close(self) -> None:
        """Drop the makers of nodes that no backward pass reached."""
        for left in self._waiting.values():
            left.clear()

    def check_open(self) -> None:
        """Refuse a gradient of another backward pass, inside the loss."""
        if not self._open:
            raise own_backward_pass("loss")

    def tap(
        self,
        op: str,
        output: Tensor,
        uses: list[tuple[ParamProxy, Maker]],
        *,
        ends: bool,
        kept: bool = True,
    ) -> Tensor:
        """Hook the node of an op's output.

        With `ends` the backward pass ends there; `kept` says that the makers refer to
        the tensors they need.
        """
        whole, output = _with_node(output)
        number, shape = whole.output_nr, output.shape
        left = [
            (known, maker, _stamped(op, maker) if kept else []) for known, maker in uses
        ]
        for known, _ in uses:
            self._proxies.expect(known)

        def hook(grads: tuple[Tensor | None, ...]) -> Any:
            self.check_open()
            g = grads[number]
            if g is not None:
                g = g.reshape(shape)
                g = g.clone() if self._proxies.owns else g
            again = [] if self._last else left.copy()
            while left:
                known, maker, stamps = left.pop()
                _check_unchanged(stamps)
                factor = None if g is None else maker(g)
                del maker, stamps  # so that inputs are freed as early as possible
                self._proxies.arrived(known, factor, op, g)
                del factor
            left.extend(again)
            return (None,) * len(grads) if ends else None

        node: Any = whole.grad_fn
        node.register_prehook(hook)
        self._waiting[node._sequence_nr()] = left
        return output

    def check_reached(self, losses: Tensor) -> None:
        """Refuse a graph with hooks that the backward pass did not reach."""
        waiting = {number for number, uses in self._waiting.items() if uses}
        if waiting and not waiting.isdisjoint(
            node._sequence_nr() for node in graph_nodes([losses])
        ):
            raise UnsupportedOp(
                "loss: expected ops that a function mode sees, got one that it does "
                "not, whose result requires grad through something else than "
                'parameters, as compiled code may. Use strategy="vmap" or "loop".'
            )


def _with_node(output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensor that has the node to hook, and the output, copied if need be.

    An op that writes into a view replaces the view's node, never its base's.
    """
    base = viewed(output)
    if base is None or base.grad_fn is None:
        return output, output
    same = base.shape == output.shape and base.stride() == output.stride()
    contiguous = base.is_contiguous() and output.is_contiguous()
    if same or (contiguous and base.numel() == output.numel()):
        return base, output  # which holds all numbers of its base in their order
    copy = output.clone()
    return copy, copy


_CASTS = {"to", "type", "float", "double", "half", "bfloat16", "type_as"}
_COPIES = {"clone", "contiguous", "alias", "cpu", "cuda"}
_TRANSPOSES = {"t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute"}
_VIEWS = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "movedim"}
_VIEWS |= {"view_as", "reshape_as"}
_PARTS = {"chunk", "split", "unbind", "tensor_split", "narrow", "select", "__getitem__"}
_PARTS |= {"split_with_sizes", "unsafe_chunk", "unsafe_split"}


class View(NamedTuple):
    """How numbers were moved; `replay` does the same to another tensor."""

    replay: Callable[[Tensor], Tensor]
    same_numbers: bool  # each stayed in its place
    transposes: bool  # it is the transpose of a matrix


def describe_view(
    func: Callable,
    args: tuple,
    kwargs: dict,
    source: Tensor,
    output: Tensor,
    place: int | None,
) -> View | None:
    """Describe a call that only moved numbers of `source`; None for any other.

    `place` is the number of `output` among several results.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    cast = name in _CASTS | _COPIES
    if not cast and name not in _TRANSPOSES | _VIEWS | _PARTS:
        return None
    if name == "__getitem__" and not _is_basic(args[1]):
        return None
    if output.is_complex() != source.is_complex():
        return None  # the way back drops imaginary parts

    shape = output.shape

    def replay(tensor: Tensor) -> Tensor:
        if cast:
            return tensor
        if name in ("view", "view_as"):
            return tensor.reshape(shape)  # it may have other strides than the source
        other, named = replaced((args, kwargs), {id(source): tensor})
        moved = func(*other, **named)
        return moved if place is None else moved[place]

    if cast:
        return View(replay, same_numbers=True, transposes=False)
    transposes = name in _TRANSPOSES and source.ndim == 2 and _swaps(replay)
    return View(replay, same_numbers=False, transposes=transposes)


def _swaps(replay: Callable[[Tensor], Tensor]) -> bool:
    """Return whether two axes change places, which a square or its strides hide."""
    return replay(torch.empty(2, 3, device="meta")).shape == (3, 2)


def _is_basic(index: Any) -> bool:
    """Return whether an index takes parts without repeating any."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None or part is Ellipsis or isinstance(part, int | slice)
        for part in parts
    )
