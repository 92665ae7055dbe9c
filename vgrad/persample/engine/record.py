"""Run the loss of one sample under vmap, keeping a factor of each use of a parameter.

An op with a rule runs on the physical tensors `[B, ...]`, and a hook on the node that
autograd makes for it sees the gradient at its output during the one backward pass: with
the op's input that is the factor. A value computed from parameters alone (a transpose,
a cast, a weight norm) is computed once; its factors are taken back to the parameters. A
parameter that reaches any other op is expanded over the samples there, so that
autograd's gradient of the expansion is the per-sample gradient.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vgrad.factors.base import Dense, Factor, Outer, Zero, owned
from vgrad.factors.combined import Moved, disjoint, merged
from vgrad.functional.guards import Protected
from vgrad.loss.functions import once
from vgrad.loss.grad_flags import (
    GRAPH,
    HOOKS,
    MEMORY,
    REQUIRES_GRAD,
    RESHAPES,
    UnsupportedOp,
    VmapLevel,
    among,
    only_reads,
    own_backward_pass,
    requires_grad,
)
from vgrad.loss.made import MAKERS, copied
from vgrad.loss.mode import SAMPLES, LossMode, is_ordinary, run_op
from vgrad.loss.values import NONE
from vgrad.ops.record import OPS, Maker, Op
from vgrad.persample.engine.call import Call, Take
from vgrad.persample.engine.hooks import check_saved, run_hooks
from vgrad.persample.engine.inner import REQUIRE, Derivatives, refusal
from vgrad.persample.engine.proxies import (
    ParamProxy,
    Stamp,
    Use,
    check_unchanged,
    copy_on_arrival,
    describe_view,
    place,
    replaced,
    stamped,
)
from vgrad.torch_private import autograd, modes
from vgrad.torch_private.autograd import (
    Hooks,
    foreign_nodes,
    graph_nodes,
    is_foreign_op,
)
from vgrad.torch_private.modes import op_name
from vgrad.torch_private.tensors import leaf, version_of, viewed
from vgrad.tree import tree_map_only
from vgrad.typing import Params, Tree

_SHOWN = GRAPH | MEMORY

_OF_THE_OBJECT = {"__set__", "set_"}
"""Functions that act on the very tensor inside a loss, and not on its values."""


@dataclass(eq=False)
class _Parameter:
    root: ParamProxy
    arrived: dict[ParamProxy, list[Factor]] = field(default_factory=dict)
    expected: int = 0  # factors, of which some may never come
    pending: int = 0


class Recorder:
    """One run of the loss for all samples of a call, and its backward pass.

    `callback` is called once per use. In the end `unreached` names the parameters that
    received no gradient.
    """

    _add: Take

    def __init__(
        self, call: Call, callback: Callable[[Use], None] | None = None
    ) -> None:
        self.call, self._callback = call, callback
        self.rooms = call.fallbacks.rooms
        self.size, self.randomness = call.batch.size, call.randomness
        self.columns = call.columns
        self.params: Params = {}
        self.unreached: set[str] = set()
        self._by_id: dict[int, ParamProxy] = {}
        self._waiting: dict[str, _Parameter] = {}
        self._copied: list[ParamProxy] = []  # which have copies
        self._computed: list[Tensor] = []  # from parameters, not views
        self._ends: dict[int, Tensor] = {}  # where the backward pass ends, too
        self._stamps: list[Stamp] = []
        self._hooked: dict[int, list] = {}  # makers of nodes that wait for gradients
        self._open = self._last = False  # whether a backward pass runs, and the last
        self._op: Callable | None = None  # of the recorded form that runs
        self.checkpoints = False  # whether ops run again in the backward pass
        self.saves = False  # whether saved tensors go through hooks of the loss
        self.repeats = False  # whether a checkpoint runs again now
        self._owns = False  # whether a node may write into any tensor it reaches
        self._foreign: dict[str, None] = {}  # ops of libraries
        self._mode: Any = None
        self._level = 0
        self.inner = Derivatives(self)
        self.twice = self.inner.twice
        for name, value in call.params.items():
            proxy = value.detach().requires_grad_()
            own = type(value) is not Tensor or value.requires_grad
            plain = value.detach() if own else value
            root = ParamProxy((name,), proxy, plain, proxy, lambda root: root)
            self.params[name] = proxy
            self._by_id[id(proxy)] = root
            self._waiting[name] = _Parameter(root)

    def mode(self) -> LossMode:
        """Make the function mode of the loss, under the vmap over samples."""
        self._level = modes.current_level()
        vmap = VmapLevel(self._level, "sample", 'strategy="vmap" or "loop"')
        self._mode = self.call.mode(
            Protected({}, "", "", self._checkpoint),
            handlers=(*SAMPLES[:-1], self._handle),
            vmap=vmap,
            is_parameter=self.is_parameter,
            rooms=self.rooms,
        )
        self._mode.hooked = self._level
        if self.twice:
            self.inner.start()
        return self._mode

    def checked(self, result: tuple[Tensor, Tree]) -> tuple[Tensor, Tree]:
        """Return results, one for each sample; refuse others than a loop has."""
        value, aux = result
        param = self._by_id.get(id(value))
        return (value if param is None else self.expanded(param, Tensor.expand)), aux

    def close(self) -> None:
        """Break cycles, and free tensors that no backward pass reached."""
        for waiting in self._hooked.values():
            waiting.clear()
        self.inner.close()
        if self._mode is not None:
            self._mode.close()
            self._mode = None

    # Checkpoints.

    def _checkpoint(self) -> Callable[[], AbstractContextManager]:
        """Have a checkpoint inside of the loss run again as it ran first."""
        self.saves |= check_saved(captured=self.call.captured)
        if self.twice:
            raise refusal("checkpoint", "activation checkpoints")
        self.checkpoints = True
        return self._repeating

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        # For values alone: nothing is differentiated, so no use counts twice.
        self.repeats = True
        try:
            yield
        finally:
            self.repeats = False

    def _original(self, tensor: Tensor) -> Tensor:
        """Return the proxy itself for a copy that was saved with its data."""
        if id(tensor) in self._by_id or not tensor.requires_grad or not tensor.is_leaf:
            return tensor
        if modes.is_wrapped(tensor):
            return tensor
        here = place(tensor)
        for param in self._by_id.values():
            if place(param.proxy) == here:
                return param.proxy
        return tensor

    # Calls of the loss.

    def _handle(self, mode: LossMode, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a call for all samples, and keep the uses of parameters."""
        if self.repeats:
            args, kwargs = tree_map_only(Tensor, self._original, (args, kwargs))
        if kwargs and kwargs.get("requires_grad") is True:  # once it has its copies
            output = self._handle(mode, func, args, kwargs | {"requires_grad": False})
            return self._requiring_grad(output)
        ordinary = is_ordinary(func)
        vmap, tensors = self._mode.vmap, among(args, kwargs)
        batched = False  # whether some differ between samples
        proxies: list[ParamProxy] = []
        for tensor in tensors:
            batched = batched or modes.level_of(tensor) == self._level
            if (param := self._by_id.get(id(tensor))) is not None:
                if param not in proxies:
                    proxies.append(param)
            elif tensor.requires_grad and not modes.is_wrapped(tensor):
                # The loss closes over it. The backward pass must visit the ops between
                # it and the loss, which may use parameters.
                if not self.repeats:
                    self._ends[id(tensor)] = tensor
        if not ordinary:
            if modes.current_level() == self._level:  # not a transform inside
                if func in REQUIRE and all((*args[1:], *kwargs.values())):
                    tensor = self._requiring_grad(args[0])
                    # Torch would keep a result of the setter forever.
                    return tensor if func is Tensor.requires_grad_ else None
                if (output := self.inner.run(func, args, kwargs)) is NONE:
                    output = run_hooks(self, func, args, kwargs)
                if output is not NONE:
                    return output
            if is_foreign_op(func):
                self._foreign[str(func)] = None
            vmap.refuse(func, tensors)
            if func == REQUIRES_GRAD:
                return requires_grad(args[0])
            if only_reads(func):
                self._check_shown(func, proxies)
                return func(*args, **kwargs)
        if ordinary and not proxies and func not in OPS and "out" not in kwargs:
            output = func(*args, **kwargs)
        else:
            output = self._run(func, args, kwargs, proxies, batched)
        if batched and func in RESHAPES:
            self._mode.reshaped(args[0], output)
        if self.rooms.line and not batched and func in MAKERS:
            output = copied(self._mode, output)
        return output

    def _check_shown(self, func: Callable, proxies: list[ParamProxy]) -> None:
        """Refuse to show the graph or memory of a value computed from parameters."""
        for param in proxies if func in _SHOWN else ():
            if param.origin is not param.proxy:
                raise UnsupportedOp(
                    f"{op_name(func)}: expected a loss that does not ask for the graph "
                    f"of a value computed from {', '.join(param.names)} alone. Use "
                    f'strategy="vmap" or "loop".'
                )

    def _run(
        self,
        func: Callable,
        args: tuple,
        kwargs: dict,
        proxies: list[ParamProxy],
        batched: bool,
    ) -> Any:
        op = OPS.get(func)
        here = modes.current_level() == self._level
        if op is not None and here:
            output = None
            if op.rule is not None:
                if proxies or (batched and op.fused):
                    output = self._by_rule(op, func, args, kwargs)
            elif op.recorded is not None and batched:
                around, self._op = self._op, self._op or func
                try:
                    output = op.recorded(self, *args, **kwargs)
                finally:
                    self._op = around
            if output is not None:
                return output
        if func in modes.ASKING:
            with self._mode:
                return modes.opened(func)(*args, **kwargs)
        if not proxies:
            return run_op(self._mode, func, args, kwargs)
        if here and not batched and not (self.rooms.line and func in MAKERS):
            # The graph is kept: factors are taken back through it in the end.
            active = autograd.hooks()
            keeps = active is None or autograd.keeps_values(active[0])
            with autograd.plain() if keeps else nullcontext():
                return self._derived(func, args, kwargs, proxies)
        user = args[0] if func is modes.custom_function_call else func
        copies = {id(param.proxy): self.expanded(param, user) for param in proxies}
        return run_op(self._mode, func, *replaced((args, kwargs), copies))

    def _requiring_grad(self, tensor: Tensor) -> Tensor:
        """Run `requires_grad_` of the loss on its inputs, as for checkpoints."""
        if not requires_grad(tensor):
            with modes.exit_all():
                stored = modes.unwrap_all(tensor).requires_grad_()
            self._ends[id(stored)] = stored
            if modes.is_mapped_here(tensor):
                self.inner.leaves.append(tensor)
        return tensor

    def _by_rule(self, op: Op, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run an op on physical tensors; None where its rule does not fit this call."""
        rule: Any = op.rule
        if (bound := rule.bind(args, kwargs)) is None:
            return None
        weights: dict[str, ParamProxy] = {}
        batched = follows = False  # whether an input leads on to other parameters
        # Operands must not keep the graph alive.
        physical, operands = bound.copy(), bound.copy()
        for name, value in bound.items():
            if not isinstance(value, Tensor):
                continue
            param = self._by_id.get(id(value))
            if name in rule.weights:
                if modes.is_batched(value) or value.is_complex():
                    return None
                if param is not None:
                    weights[name], operands[name] = param, param.value
                    continue
            else:
                if param is not None:
                    value = self.expanded(param, func)
                batched |= modes.is_batched(value)
                physical[name] = value = self.physical(value)
            follows |= value.requires_grad
            operands[name] = value.detach() if value.requires_grad else value
        if not batched and (follows or not weights):
            return None
        if not weights and not op.fused:
            return None
        if (makers := rule.factors(**operands)) is None:
            return None
        for name in weights:
            if name not in makers:
                raise TypeError(
                    f"rule({op_name(func)}): expected a function for each weight that "
                    f"got a parameter, got none for {name!r}."
                )
        if not batched:  # the same for all samples: computed once
            physical = bound
        if self.twice and follows and weights and torch.is_grad_enabled():
            name = op_name(self._op or func)
            (_, x), *rest = physical.items()
            with self.below():
                output = self.inner.applied(name, func, x, dict(rest), weights)
            if output is not None:
                return self.logical(output)
        with self.below():
            for name, param in weights.items():
                # Only where no input leads on to other parameters does a weight have to
                # require grad, for the pass to come here at all.
                value = param.value
                physical[name] = value if follows else self._end(value.detach())
            output = (rule.run or func)(*physical.values())
            if not batched:
                output = output.expand(self.size, *output.shape)
            if output.requires_grad and weights:  # not under no_grad
                hooks = autograd.hooks()
                if hooks is not None:
                    makers = _packed(rule.factors, operands, weights, hooks)
                if not self.repeats:
                    op_run = op_name(self._op or func)
                    rest = [] if hooks is not None else operands.items()
                    watched = [value for name, value in rest if name not in weights]
                    output = self._tapped(
                        op_run, output, weights, makers, follows, watched
                    )
            return self.logical(output)

    def _tapped(
        self,
        op: str,
        output: Tensor,
        weights: Mapping[str, ParamProxy],
        makers: Mapping[str, Maker],
        follows: bool,
        operands: Iterable[Any],
    ) -> Tensor:
        """Hook the node of an op, at which the backward pass ends, or which follows."""
        hooked, output = _with_node(output)
        number, shape = hooked.output_nr, output.shape
        waiting: list[tuple[ParamProxy, Maker]] = []
        for name, param in weights.items():
            waiting.append((param, makers[name]))
            self.expect(param)
        stamps = stamped(op, operands)

        def hook(grads: tuple[Tensor | None, ...]) -> Any:
            if self.inner.runs:
                for param, _ in waiting:
                    why = f"derivative of {op}"
                    self.inner.met.update(dict.fromkeys(param.names, why))
                return None
            if not self._open:
                raise own_backward_pass("loss")
            g = grads[number]
            if g is not None:
                g = g if g.shape == shape else g.reshape(shape)
                g = g.clone() if self._owns else g
            next_pass = [] if self._last else waiting.copy()
            check_unchanged(stamps)
            while waiting:
                param, maker = waiting.pop()
                factor = None if g is None else maker(g)
                del maker  # so that inputs are freed as early as possible
                self.accept(param, factor, {op: True}, g)
                del factor
            waiting.extend(next_pass)
            return None if follows else (None,) * len(grads)

        node: Any = hooked.grad_fn
        node.register_prehook(hook)
        self._hooked[node._sequence_nr()] = waiting
        return output

    def _derived(
        self, func: Callable, args: tuple, kwargs: dict, proxies: list[ParamProxy]
    ) -> Any:
        """Run a function of parameters alone, once; its tensors are new proxies."""
        names = tuple(dict.fromkeys(name for param in proxies for name in param.names))
        if func in HOOKS or getattr(func, "__name__", "") in _OF_THE_OBJECT:
            raise UnsupportedOp(
                f"{op_name(func)}: expected a loss that leaves {', '.join(names)} as "
                f"it is, got one that writes to its data or puts a hook on it. Compute "
                f'a new tensor from it instead, or use strategy="loop".'
            )
        origins = {id(param.proxy): param.origin for param in proxies}
        args, kwargs = replaced((args, kwargs), origins)
        versions = [version_of(param.origin) for param in proxies]
        before = {param.origin.grad_fn for param in proxies}
        ends = {id(param.origin) for param in proxies}
        if func is modes.custom_function_call:
            output = once(self._mode, args[0], args[1:], kwargs)
        else:
            op = OPS.get(func)
            run = func if op is None or op.mapped is None else op.mapped
            output = run(*args, **kwargs)
        if versions != [version_of(param.origin) for param in proxies]:
            raise UnsupportedOp(
                f"{op_name(func)}: expected a loss that computes new tensors from "
                f"{', '.join(names)}, got one that changes such a tensor in place. Use "
                f'an op that does not, or strategy="vmap".'
            )

        def proxy_of(value: Any, number: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            for param in proxies:
                if value is param.origin:
                    return param.proxy
            if modes.is_batched(value) and modes.unwrapped(value).requires_grad:
                raise UnsupportedOp(
                    f"{op_name(func)}: expected values computed from "
                    f"{', '.join(names)} alone to be the same for all samples, got "
                    f'random numbers of each sample. Use strategy="vmap", or '
                    f'randomness="same".'
                )
            if value.grad_fn is None:  # views made under no_grad still require grad
                return value
            for node in graph_nodes([value], before.__contains__):
                end = getattr(node, "variable", None)  # past all origins
                if id(end) in self._by_id and id(end) not in ends:
                    raise _unseen(self._by_id[id(end)].names)
            proxy = leaf(value)
            derived = ParamProxy(names, proxy, proxy.detach(), value)
            parent = proxies[0]
            if len(proxies) == 1 and (replay := parent.replay) is not None:
                view = describe_view(func, args, kwargs, parent.origin, value, number)
                if view is not None:
                    move = view.replay
                    derived.replay = lambda tensor: move(replay(tensor))
                    if view.same_numbers or view.transposes:
                        derived.parent, derived.transposed = parent, view.transposes
            if derived.replay is None:
                self._computed.append(value)
            self.expect(derived)  # all of its factors, for the end of the pass
            self._by_id[id(proxy)] = derived
            return proxy

        if isinstance(output, tuple | list):
            return type(output)(proxy_of(value, n) for n, value in enumerate(output))
        return proxy_of(output, None)

    def expanded(self, param: ParamProxy, op: Callable | str) -> Tensor:
        copies = self._copies(param, op, ruled=op is self._op)
        return self.logical(copies)

    def _copies(self, param: ParamProxy, op: Any, *, ruled: bool) -> Tensor:
        """Return one copy for each sample, [B, *shape], for `op`."""
        if self._callback is not None:
            param.copied_by[op if isinstance(op, str) else op_name(op)] = ruled
        if param.copies is None:
            with modes.exit_all():  # the loss may be inside a transform of its own
                copies = param.value.expand(self.size, *param.value.shape)
                param.copies = leaf(copies)
            self._copied.append(param)
            self.expect(param)
        return param.copies

    def expect(self, param: ParamProxy) -> None:
        for name in param.names:
            self._waiting[name].expected += 1

    def ends(self) -> list[Tensor]:
        """Return the leaves of the graph, but for the parameters themselves."""
        copies: list[Any] = [param.copies for param in self._copied]
        return [*copies, *self._ends.values()]

    # The methods of `Recording`.

    def physical(self, tensor: Tensor) -> Tensor:
        unwrapped = modes.in_front(tensor, self._level)
        return (
            tensor.expand(self.size, *tensor.shape) if unwrapped is None else unwrapped
        )

    def logical(self, tensor: Tensor) -> Tensor:
        return modes.add_batch_axis(tensor, 0, self._level)

    below = staticmethod(modes.without_innermost)
    is_batched = staticmethod(modes.is_batched)

    def drawing(self, axis: int) -> AbstractContextManager:
        return self.call.draws.samples_at(axis)

    def watching(self) -> AbstractContextManager:
        return self._mode

    def is_parameter(self, tensor: Tensor) -> bool:
        return id(tensor) in self._by_id

    def parameter(self, tensor: Tensor) -> ParamProxy | None:
        return self._by_id.get(id(tensor))

    def copies(self, tensor: Tensor) -> Tensor:
        param = self._by_id.get(id(tensor))
        if param is None:
            return self.physical(tensor)
        return self._copies(param, self._op, ruled=True)

    def plain(self, tensor: Tensor) -> Tensor:
        param = self._by_id.get(id(tensor))
        return tensor if param is None else param.value

    def anchor(self, value: Tensor) -> Tensor:
        with modes.exit_all():
            return self._end(value.detach())

    def _end(self, value: Tensor) -> Tensor:
        value.requires_grad_()
        if not self.repeats:
            self._ends[id(value)] = value
        return value

    def use(self, tensor: Tensor) -> Callable[[Factor], None] | None:
        param = self._by_id.get(id(tensor))
        if param is None:
            return None
        if self.repeats:
            return lambda _: None
        name = op_name(self._op)
        self.expect(param)

        def arrived(factor: Factor) -> None:
            if not self.inner.runs:
                if not self._open:
                    raise own_backward_pass("loss")
                self.accept(param, factor, {name: True})

        return arrived

    # The backward pass.

    def foreign(self, losses: Tensor) -> list[str]:
        """Name the nodes and ops of others, which may write into what they reach."""
        # So factors hold copies from here on: such writes may move no version.
        nodes = foreign_nodes([losses, *self._computed])
        names = dict.fromkeys([*nodes, *self._foreign])
        names.pop(f"{autograd.ModuleHooks.__name__}Backward", None)  # writes nothing
        self._owns = bool(names)
        return [*names]

    def backward(
        self, losses: Tensor, scales: Tensor, add: Take, *, last: bool
    ) -> None:
        """Run a backward pass, of several that keep the graph until the `last`.

        `add` is called once for each parameter, as early as the pass allows.
        """
        self._add, self._last = add, last
        parameters = dict(self._waiting)
        for parameter in parameters.values():
            parameter.pending = parameter.expected
        ends = self.ends()
        for copies in ends[: len(self._copied)] if self._owns else ():
            copy_on_arrival(copies)
        self._open = True
        try:
            if losses.requires_grad:
                proxies = [param.proxy for param in self._by_id.values()]
                grads = autograd.gradients(
                    losses, (*ends, *proxies), scales, retain_graph=not last
                )
                # None may reach the proxies themselves, past all hooks and copies.
                unseen: set[str] = set()
                for proxy, grad in zip(proxies, grads[len(ends) :], strict=True):
                    if grad is not None:
                        unseen.update(self._by_id[id(proxy)].names)
                if unseen:
                    raise _unseen(unseen)
                for param, grad in zip(self._copied, grads, strict=False):
                    if grad is not None:
                        self.accept(param, Dense(grad), param.copied_by, grad)
            if self._owns:
                self._pull_back_once()
            for name in list(self._waiting):
                self._complete(name)
        finally:
            self._open = False
        check_unchanged(self._stamps)
        if not last:
            self._waiting = parameters
            return
        if any(self._hooked.values()):
            for node in graph_nodes([losses]):
                if self._hooked.get(node._sequence_nr()):
                    raise UnsupportedOp(
                        "loss: expected ops that a function mode sees, got one that it "
                        "does not, whose result requires grad through something else "
                        "than parameters, as compiled code may. Use "
                        'strategy="vmap" or "loop".'
                    )

    def accept(
        self,
        param: ParamProxy,
        factor: Factor | None,
        ops: Mapping[str, bool],
        g: Tensor | None = None,
    ) -> None:
        """Keep an expected factor, to which the memory of `g` belongs.

        It is kept for the parameter itself where the way there is short.
        """
        if factor is not None and self._owns:
            factor = owned(factor, g)
        elif factor is not None and self.checkpoints:
            tensors = [*vars(factor).values(), *factor.sides]
            self._stamps += stamped(", ".join(ops), tensors)
        if factor is not None and self._callback is not None:
            ruled, computed = all(ops.values()), param.replay is None
            copied = factor.bytes if self._owns else 0
            use = Use(param.names, tuple(ops), factor, ruled, computed, copied)
            self._callback(use)
        while param.parent is not None:
            if param.transposed:
                if not isinstance(factor, Outer) or not factor.is_matrix:
                    break
                shape = param.parent.value.shape
                factor = Outer(factor.outputs, factor.inputs, shape)
            param = param.parent
        for name in param.names:
            parameter = self._waiting[name]
            if factor is not None:
                parameter.arrived.setdefault(param, []).append(factor)
            parameter.pending -= 1
            if not parameter.pending:
                self._complete(name)

    def _complete(self, name: str) -> None:
        parameter = self._waiting.pop(name)
        root, arrived = parameter.root, parameter.arrived
        parameter.arrived = {}
        if self.checkpoints:
            check_unchanged(self._stamps)
        if len(arrived) == 1 and len(factors := arrived.get(root, ())) == 1:
            self._add(name, factors[0])  # as for most parameters
            return
        sums = {param: merged(factors) for param, factors in arrived.items()}
        for param in [param for param in sums if param.replay is None]:
            dense = self._pulled_back(param, root, sums.pop(param))
            sums[root] = merged([sums[root], dense]) if root in sums else dense
        if not sums:
            self.unreached.add(name)
            self._add(name, Zero(self.size, root.value))
        elif list(sums) == [root]:
            self._add(name, sums[root])
        else:
            replays: Any = tuple(param.replay for param in sums)
            moved = Moved(tuple(sums.values()), replays, root.value.shape)
            apart = disjoint(replays, root.value)
            self._add(name, moved if apart else Dense(moved.grad()))

    def _pull_back_once(self) -> None:
        """Run one backward pass through all values computed from parameters."""
        # Its nodes may write into their saved tensors, so none runs twice.
        late: dict[ParamProxy, list[Factor]] = {}
        for parameter in self._waiting.values():
            for param in [use for use in parameter.arrived if use.replay is None]:
                late[param] = parameter.arrived.pop(param)  # the same for all its names
        if not late:
            return
        names = {name for param in late for name in param.names}
        roots = [self._waiting[name].root for name in names]
        grads = [
            merged(factors).grad().to(param.origin.dtype, copy=True)
            for param, factors in late.items()
        ]

        def back(*grads: Tensor) -> tuple[Tensor, ...]:
            origins = [param.origin for param in late], [root.origin for root in roots]
            return torch.autograd.grad(*origins, grads, materialize_grads=True)

        # Unlike is_grads_batched, which ends the process where such a node reads .data.
        for root, grad in zip(roots, torch.vmap(back)(*grads), strict=True):
            arrived = self._waiting[root.names[0]].arrived
            arrived.setdefault(root, []).append(Dense(grad))

    def _pulled_back(self, param: ParamProxy, root: ParamProxy, factor: Factor):
        """Differentiate a value computed from a parameter, for every sample."""
        ends, options = (param.origin, root.origin), {"retain_graph": True}
        cotangents = factor.grad().to(param.origin.dtype)
        if self.columns:  # is_grads_batched would loop over them

            def back(grad: Tensor) -> Tensor:
                return torch.autograd.grad(
                    *ends, grad, materialize_grads=True, **options
                )[0]

            return Dense(torch.vmap(back)(cotangents))
        (grads,) = torch.autograd.grad(
            *ends, cotangents, is_grads_batched=True, allow_unused=True, **options
        )
        return Zero(self.size, root.value) if grads is None else Dense(grads)


def _unseen(names: Iterable[str]) -> UnsupportedOp:
    return UnsupportedOp(
        f"loss: expected ops that a function mode sees, got "
        f"{', '.join(sorted(set(names)))} in one that it does not, such as a transform "
        f'of torch.func over it, or compiled code. Use strategy="vmap" or "loop".'
    )


def _with_node(output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensor whose node to hook, and the output, copied if need be."""
    # An op that writes into a view replaces the view's node, never its base's.
    base = viewed(output)
    if base is None or base.grad_fn is None:
        return output, output
    same = base.shape == output.shape and base.stride() == output.stride()
    contiguous = base.is_contiguous() and output.is_contiguous()
    if same or (contiguous and base.numel() == output.numel()):
        return base, output  # which holds all numbers of its base in their order
    copy = output.clone()
    return copy, copy


def _packed(
    factors: Callable[..., Mapping[str, Maker] | None],
    operands: Mapping[str, Any],
    weights: Collection[str],
    hooks: Hooks,
) -> dict[str, Maker]:
    """Pack operands as autograd packs saved tensors; return their makers."""
    # Only when the first of these runs are all tensors unpacked, once in a pass.
    pack, unpack = hooks
    handles = {
        name: pack(value)
        for name, value in operands.items()
        if isinstance(value, Tensor) and name not in weights
    }
    rest = {name: value for name, value in operands.items() if name not in handles}
    pending: dict[str, Maker] = {}

    def maker(name: str) -> Maker:
        def make(g: Tensor) -> Any:
            if not pending:
                unpacked = {name: unpack(handle) for name, handle in handles.items()}
                makers = factors(**rest, **unpacked) or {}
                pending.update((name, makers[name]) for name in weights)
            return pending.pop(name)(g)

        return make

    return {name: maker(name) for name in weights}
