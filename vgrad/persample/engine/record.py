"""Run the loss of one sample under vmap, keeping a factor of each use of a parameter.

An op with a rule runs on the physical tensors `[B, ...]`, and a hook on the node
that autograd makes for it sees the gradient at its output during the one backward pass:
with the op's input that is the factor. A parameter that reaches any other op is
expanded over the samples there, so that autograd's gradient of the expansion is the
per-sample gradient.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from vgrad import checks, tree
from vgrad.factors.base import Factor
from vgrad.functional.guards import Protected
from vgrad.loss.functions import once
from vgrad.loss.grad_flags import (
    WATCHED_READS,
    GradFlags,
    UnsupportedOp,
    among,
    only_reads,
)
from vgrad.loss.mode import SAMPLES, LossMode, is_ordinary, run_op, unchanged
from vgrad.ops.record import OPS, Maker, Op, Rule
from vgrad.persample.engine.call import Call
from vgrad.persample.engine.proxies import (
    ParamProxies,
    ParamProxy,
    Take,
    Taps,
    Use,
    replaced,
)
from vgrad.torch_private import autograd, modes
from vgrad.torch_private.autograd import Hooks, foreign_nodes, is_foreign_op
from vgrad.torch_private.tensors import leaf
from vgrad.tree import tree_map_only
from vgrad.typing import Tree


class Plan(NamedTuple):
    """How one call of an op runs by its rule."""

    arguments: dict[str, Any]  # of the op, physical where it is batched
    weights: dict[str, ParamProxy]  # the parameters among them
    makers: dict[str, Maker]  # from the gradient at the output to their factors
    kept: dict[str, Any]  # the tensors that the makers refer to
    batched: bool  # the output differs from sample to sample
    follows: bool  # an input leads on to other parameters


class Recorder:
    """One run of the loss for all samples of a call, and its backward pass.

    `take(name, factor)` is called once for each parameter, during the backward pass
    where possible, so that factors are freed before the next one comes. `callback` is
    optional, called once per use.
    """

    def __init__(
        self, call: Call, take: Take, callback: Callable[[Use], None] | None = None
    ) -> None:
        self._call = call
        self.size, self.randomness = call.batch.size, call.randomness
        self._proxies = ParamProxies(call.params, self.size, take, callback)
        self._op: Callable | None = None  # of the recorded form that runs
        self._repeats = False  # whether a checkpoint runs again
        self._taps = Taps(self._proxies)
        self._foreign: dict[str, None] = {}  # ops of libraries
        self._ends: dict[int, Tensor] = {}
        self._mode: Any = None
        self._level = 0
        self.params = self._proxies.params
        self.unreached = self._proxies.unreached

    def mode(self) -> LossMode:
        """Make the function mode of the loss, under the vmap over samples."""
        self._level = modes.current_level()
        flags = GradFlags(self._level, "sample", 'strategy="vmap" or "loop"')
        self._mode = LossMode(
            unchanged(self._call.fixed),
            Protected({}, "", "", self._checkpoint),
            handlers=(*SAMPLES[:-1], self._handle),
            flags=flags,
            draws=self._call.draws,
            looped=self._call.fallbacks.looped,
            is_parameter=self.is_parameter,
        )
        return self._mode

    def _checkpoint(self) -> Callable[[], AbstractContextManager]:
        """Have a checkpoint inside of the loss run again as it ran first."""
        hooks = autograd.hooks()
        if hooks is None or not autograd.keeps_values(hooks[0]):
            raise UnsupportedOp(
                "loss: expected tensors that are saved for the backward pass as they "
                "are, by an activation checkpoint or by save_on_cpu, got other hooks "
                'on saved tensors, which would see all samples. Use strategy="loop".'
            )
        self._proxies.repeats = True
        return self._repeating

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        """Run a checkpoint again for its values alone.

        They are not differentiated, so no use of a parameter counts twice.
        """
        self._repeats = True
        try:
            yield
        finally:
            self._repeats = False

    def close(self) -> None:
        """Break cycles, and free tensors that no backward pass reached."""
        self._taps.close()
        if self._mode is not None:
            self._mode.close()
            self._mode = None

    def check_result(self, result: Tree) -> None:
        """Refuse results of other samples."""
        flags = self._mode.flags
        flags.end(tree.tensors(result))
        self._mode.flags = flags.afresh()  # nor does it keep their memory

    def foreign(self, losses: Tensor) -> list[str]:
        """Name the nodes and ops, not torch's own, that run in a backward pass.

        They may write into all tensors that they reach, also in ways that move no
        version. So factors hold copies from here on.
        """
        nodes = foreign_nodes([losses, *self._proxies.origins])
        names = list(dict.fromkeys([*nodes, *self._foreign]))
        self._proxies.owns = bool(names)
        return names

    def backward(self, losses: Tensor, scales: Tensor, *, last: bool = True) -> None:
        """Run a backward pass, and pass on the factors of every parameter.

        Losses are multiplied by `scales`. Nothing is freed before the `last` pass; as a
        rule there is one.
        """
        ends = list(self._ends.values())
        with self._taps.open(last=last):
            self._proxies.differentiate(losses, scales, ends, last=last)
        if last:
            self._taps.check_reached(losses)

    def _handle(self, mode: LossMode, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a call for all samples, and keep the uses of parameters."""
        if self._repeats:
            args, kwargs = tree_map_only(Tensor, self._proxies.original, (args, kwargs))
        ordinary = is_ordinary(func)
        reads = not ordinary and only_reads(func)
        if reads and func not in WATCHED_READS:
            return func(*args, **kwargs)
        tensors, flags = among(args, kwargs), self._mode.flags
        proxies, batched = self._seen(tensors)
        if not ordinary:
            if func is Tensor.requires_grad_ and all((*args[1:], *kwargs.values())):
                if modes.current_level() == self._level:  # not a transform inside
                    return self._requiring_grad(args[0])
            if is_foreign_op(func):
                self._foreign[str(func)] = None
            flags.refuse(func, tensors)
        if reads:
            self._proxies.check_read(func, proxies)
            return func(*args, **kwargs)
        output = self._run(func, args, kwargs, proxies, batched)
        flags.after(func, tensors, output)
        return output

    def _seen(self, tensors: Sequence[Tensor]) -> tuple[list[ParamProxy], bool]:
        """Return proxies among arguments, and whether some differ between samples.

        Tensors that the loss closes over may require grad for the caller. The backward
        pass must visit the ops between them and the loss, which may use parameters.
        """
        flags = self._mode.flags
        proxies, batched = [], False
        for tensor in tensors:
            if flags.sync(tensor):
                batched = True
            elif (known := self._proxies.find(tensor)) is not None:
                if known not in proxies:
                    proxies.append(known)
            elif tensor.requires_grad:
                if not modes.is_wrapped(tensor) and not self._repeats:
                    self._ends[id(tensor)] = tensor
        return proxies, batched

    def _run(
        self,
        func: Callable,
        args: tuple,
        kwargs: dict,
        proxies: list[ParamProxy],
        batched: bool,
    ) -> Any:
        op = OPS.get(func)
        if op is None and not proxies and func not in modes.ASKING:
            return run_op(self._mode, func, args, kwargs)
        here = modes.current_level() == self._level
        if op is not None and here:
            output = None
            if op.rule is not None:
                if proxies or (batched and op.fused):
                    output = self._by_rule(op, func, args, kwargs)
            elif op.recorded is not None and batched:
                output = self._by_form(op.recorded, func, args, kwargs)
            if output is not None:
                return output
        if func in modes.ASKING:
            with self._mode:
                return modes.opened(func)(*args, **kwargs)
        if not proxies:
            return run_op(self._mode, func, args, kwargs)
        if here and not batched:
            if func is modes.custom_function_call:
                func = self._function
            # The graph is kept: factors are taken back through it in the end.
            with autograd.plain():
                return self._proxies.derive(func, args, kwargs, proxies)
        user = args[0] if func is modes.custom_function_call else func
        copies = {id(known.proxy): self._expanded(known, user) for known in proxies}
        return run_op(self._mode, func, *replaced((args, kwargs), copies))

    def _requiring_grad(self, tensor: Tensor) -> Tensor:
        """Run `requires_grad_` of the loss on its inputs, as for checkpoints."""
        if not tensor.requires_grad:
            with modes.exit_all():
                stored = modes.unwrap_all(tensor).requires_grad_()
            self._ends[id(stored)] = stored
            self._mode.flags.sync(tensor)
        return tensor

    def _function(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return once(function, args, kwargs, self.is_parameter)

    def physical(self, tensor: Tensor) -> Tensor:
        if not modes.is_batched(tensor):
            return tensor.expand(self.size, *tensor.shape)
        axis = modes.batch_axis(tensor)
        tensor = modes.unwrapped(tensor)
        return tensor.movedim(axis, 0) if axis else tensor

    def logical(self, tensor: Tensor) -> Tensor:
        return modes.add_batch_axis(tensor, 0, self._level)

    def below(self) -> AbstractContextManager:
        return modes.without_innermost()

    def drawing(self, axis: int) -> AbstractContextManager:
        return self._call.draws.samples_at(axis)

    def watching(self) -> AbstractContextManager:
        return self._mode

    def is_parameter(self, tensor: Tensor) -> bool:
        return self._proxies.find(tensor) is not None

    def is_batched(self, tensor: Tensor) -> bool:
        return modes.is_batched(tensor)

    def copies(self, tensor: Tensor) -> Tensor:
        known = self._proxies.find(tensor)
        if known is None:
            return self.physical(tensor)
        return self._proxies.expand(known, self._op, ruled=True)

    def plain(self, tensor: Tensor) -> Tensor:
        known = self._proxies.find(tensor)
        return tensor if known is None else known.value

    def anchor(self, value: Tensor) -> Tensor:
        anchor = leaf(value)
        if not self._repeats:
            self._ends[id(anchor)] = anchor
        return anchor

    def use(self, tensor: Tensor) -> Callable[[Factor], None] | None:
        known = self._proxies.find(tensor)
        if known is None:
            return None
        if self._repeats:
            return lambda _: None
        name = modes.op_name(self._op)
        self._proxies.expect(known)

        def arrived(factor: Factor) -> None:
            self._taps.check_open()
            self._proxies.arrived(known, factor, name)

        return arrived

    def _by_form(self, form: Callable, func: Callable, args: tuple, kwargs: dict):
        around, self._op = self._op, self._op or func
        try:
            return form(self, *args, **kwargs)
        finally:
            self._op = around

    def _by_rule(self, op: Op, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run an op with a rule; None where the rule does not fit this call."""
        rule: Any = op.rule
        bound = rule.bind(args, kwargs)
        plan = None if bound is None else self._planned(op, func, bound)
        if plan is None:
            return None
        with self.below():
            output = (rule.run or func)(*plan.arguments.values())
            if not plan.batched:  # the same for all samples: computed once
                output = output.expand(self.size, *output.shape)
            if output.requires_grad and plan.weights:  # not under no_grad
                output = self._tapped(rule, func, plan, output)
            return self.logical(output)

    def _planned(self, op: Op, func: Callable, bound: dict[str, Any]) -> Plan | None:
        """Plan an op with these arguments; None where its rule does not fit."""
        rule: Any = op.rule
        weights: dict[str, ParamProxy] = {}
        batched = follows = False
        physical = dict(bound)
        for name, value in bound.items():
            if not isinstance(value, Tensor):
                continue
            known = self._proxies.find(value)
            if name in rule.weights:
                if modes.is_batched(value) or value.is_complex():
                    return None
                if known is not None:
                    weights[name] = known
                follows |= known is None and value.requires_grad
                continue
            if known is not None:
                value = self._expanded(known, func)
            batched |= modes.is_batched(value)
            physical[name] = self.physical(value)
            follows |= physical[name].requires_grad
        if not batched and follows:
            return None
        if not weights and not (batched and op.fused):
            return None
        for name, known in weights.items():
            # Only where no input leads on to other parameters does a weight have to
            # require grad, for the pass to come here at all.
            physical[name] = known.value if follows else self.anchor(known.value)
        # The kept tensors must not keep the graph alive.
        kept = {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in physical.items()
        }
        makers = rule.factors(**kept)
        if makers is None:
            return None
        if missing := weights.keys() - makers.keys():
            raise TypeError(
                f"rule({modes.op_name(func)}): expected a function for each weight "
                f"that got a parameter, got none for {checks.listed(missing)}."
            )
        if not batched:
            physical = {**bound, **{name: physical[name] for name in weights}}
        return Plan(physical, weights, makers, kept, batched, follows)

    def _tapped(self, rule: Rule, func: Callable, plan: Plan, output: Tensor) -> Tensor:
        makers, hooks = plan.makers, autograd.hooks()
        if hooks is not None:
            makers = _packed(rule.factors, plan.kept, plan.weights, hooks)
        if self._repeats:
            return output
        uses = [(known, makers[name]) for name, known in plan.weights.items()]
        name = modes.op_name(self._op or func)
        kept = hooks is None
        return self._taps.tap(name, output, uses, ends=not plan.follows, kept=kept)

    def _expanded(self, known: ParamProxy, op: Callable) -> Tensor:
        copies = self._proxies.expand(known, op, ruled=op is self._op)
        tensor = self.logical(copies)
        self._mode.flags.sync(tensor)
        return tensor


def _packed(
    factors: Callable[..., Mapping[str, Maker] | None],
    kept: Mapping[str, Any],
    weights: Collection[str],
    hooks: Hooks,
) -> dict[str, Maker]:
    """Pack the kept tensors as autograd packs saved tensors; return their makers.

    Only when the first of them runs are the tensors unpacked, all of them, once in a
    backward pass.
    """
    pack, unpack = hooks
    handles = {
        name: pack(value)
        for name, value in kept.items()
        if isinstance(value, Tensor) and name not in weights
    }
    rest = {name: value for name, value in kept.items() if name not in handles}
    left: dict[str, Maker] = {}

    def maker(name: str) -> Maker:
        def make(g: Tensor) -> Any:
            if not left:
                unpacked = {name: unpack(each) for name, each in handles.items()}
                makers = factors(**rest, **unpacked) or {}
                left.update((name, makers[name]) for name in weights)
            return left.pop(name)(g)

        return make

    return {name: maker(name) for name in weights}
