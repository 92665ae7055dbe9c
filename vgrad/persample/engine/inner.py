"""Derivatives inside of a loss, in recorded passes.

No sample's values depend on another one's variables. So where a loss differentiates by
a tensor that differs between samples, one backward pass through the tensors `[B, ...]`,
from the sum over samples, finds each sample's derivative. By a tensor that all samples
share it would add them up: such a tensor gets a copy for each sample first. No function
mode sees the ops of such a pass. Where they use a parameter, as `gx = g @ w` does, its
copies lead to its gradients, or the op is one whose derivatives leave factors as well.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.autograd import Function

from vgrad.conditions import Unrepeatable
from vgrad.loss.grad_flags import UnsupportedOp
from vgrad.loss.values import NONE, Partition, SplitBatch, where
from vgrad.ops.record import OPS, Rule
from vgrad.torch_private import modes
from vgrad.tree import tensors

GRAD: Any = Tensor.grad
REQUIRES_GRAD: Any = Tensor.requires_grad
SETS = {GRAD.__set__, GRAD.__delete__}
REQUIRE = {Tensor.requires_grad_, REQUIRES_GRAD.__set__}


class Derivatives:
    """The backward passes of the loss in one run of it."""

    def __init__(self, recorder: Any) -> None:
        self.recorder: Any = recorder
        self._copied = recorder.call.fallbacks.inner
        self.twice = self._copied is not None  # uses may be differentiated twice
        self.leaves: list[Tensor] = []  # that the loss has made
        self._grads: dict[int, tuple[Tensor, Tensor]] = {}  # leaves and their `.grad`
        self.met: dict[str, str] = {}  # parameters, and ops of theirs
        self._end = recorder.anchor(torch.zeros(())) if self.twice else None
        self.runs = self._accumulated = False

    def close(self) -> None:
        """Break cycles, of which Python cannot see those through graphs."""
        self.recorder = None
        self._grads.clear()
        self.leaves.clear()

    def start(self) -> None:
        """Give parameters that a pass of the loss has met a copy for each sample."""
        for name, why in (self._copied or {}).items():
            param = self.recorder.parameter(self.recorder.params[name])
            copies = self.recorder.params[name] = self.recorder.expanded(param, why)
            self.leaves.append(copies)

    def run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a call of the loss to autograd; `NONE` for others."""
        if func is torch.autograd.grad:
            arguments = tensors((args, kwargs))
            mapped = [*map(modes.is_mapped_here, arguments)]
            # As in `torch.func.vjp`, which differentiates by tensors of transforms.
            pairs = zip(arguments, mapped, strict=True)
            others = [tensor for tensor, is_mapped in pairs if not is_mapped]
            if any(mapped) and not any(map(modes.is_wrapped, others)):
                return self._grad(*args, **kwargs)
        elif func is Tensor.backward:
            if modes.is_mapped_here(args[0]):
                return self._backward(*args, **kwargs)
        elif func == GRAD.__get__:
            if modes.is_mapped_here(args[0]):
                return self._grads.get(id(modes.unwrapped(args[0])), (None, None))[1]
            if self._accumulated and args[0].requires_grad:
                self.needs_copies(args[0], "backward")
        elif func in SETS and modes.is_mapped_here(args[0]):
            tensor, value, *_ = *args, None  # `del` sets none
            below = modes.unwrapped(tensor)
            self._grads.pop(id(below), None)
            if value is not None:
                self._grads[id(below)] = below, value
            return None
        return NONE

    def _grad(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
        others: Sequence[Tensor] = (),  # leaves below, whose gradients nobody needs
    ) -> tuple[Tensor | None, ...]:
        recorder = self.recorder
        if recorder.checkpoints:
            raise refusal("grad", "activation checkpoints")
        if create_graph and not self.twice:
            self._rerun({})
        outputs, inputs = _listed(outputs), _listed(inputs)
        for tensor in inputs:
            if not isinstance(tensor, Tensor):
                raise refusal("grad", "an edge of the graph")
            if not modes.is_mapped_here(tensor):
                self.needs_copies(tensor, "grad")
        seeds = [None] * len(outputs) if grad_outputs is None else _listed(grad_outputs)
        with torch.enable_grad():
            ends = [*map(recorder.copies, outputs)]
        seeds = [self._seed(*pair) for pair in zip(outputs, seeds, strict=True)]
        rows = [seeds]
        if is_grads_batched:
            rows = [*zip(*(seed.unbind(1) for seed in seeds), strict=True)]
        keep = create_graph if retain_graph is None else retain_graph
        self.runs, self.met = True, {}
        try:
            with recorder.below(), torch.set_grad_enabled(create_graph):
                gradients = [
                    torch.autograd.grad(
                        ends,
                        [*map(modes.unwrapped, inputs), *others],
                        row,
                        keep or number < len(rows),
                        create_graph,
                        allow_unused=allow_unused,
                        materialize_grads=materialize_grads,
                    )
                    for number, row in enumerate(rows, 1)
                ]
                if is_grads_batched:
                    columns = zip(*gradients, strict=True)
                    grads = [None if c[0] is None else torch.stack(c) for c in columns]
                else:
                    grads = gradients[0]
        finally:
            self.runs = False
        if create_graph and self.met:
            self._rerun(self.met)
        places = [(modes.batch_axis(x), modes.level_of(x)) for x in inputs]
        return tuple(
            g if g is None else modes.add_batch_axis(g, axis + is_grads_batched, level)
            for g, (axis, level) in zip(grads, places, strict=False)
        )

    def _seed(self, output: Tensor, seed: Tensor | None) -> Tensor:
        if seed is not None:
            return self.recorder.copies(seed)
        if output.numel() != 1 or output.is_complex():
            raise refusal("grad", "no grad_outputs for more than one number")
        return torch.ones_like(self.recorder.physical(output.detach()))

    def _backward(
        self,
        tensor: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        self._accumulated = True
        leaves, others = self.leaves, []
        if inputs is not None:
            leaves = _listed(inputs)
        elif not (create_graph if retain_graph is None else retain_graph):
            others = self.recorder.ends()  # so that autograd frees the graph
        if not leaves and not others:
            return
        grads = self._grad(
            *(tensor, leaves, gradient, retain_graph, create_graph),
            allow_unused=True,
            others=others,
        )
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is None:
                continue
            below = modes.unwrapped(leaf)
            _, before = self._grads.get(id(below), (None, None))
            if before is not None and not create_graph:
                before.add_(grad)  # as autograd does, for who has read it
            else:
                new = grad.clone() if before is None else before + grad
                self._grads[id(below)] = below, new

    def needs_copies(self, tensor: Tensor, op: str) -> NoReturn:
        """Run again with copies of a tensor that all samples share."""
        param = self.recorder.parameter(tensor)
        if param is not None:
            self._rerun(dict.fromkeys(param.names, op))
        rooms = self.recorder.rooms
        if rooms.line:
            raise refusal(op, "one that all samples share")
        rooms.line = where(sys._getframe())
        self._rerun({})

    def _rerun(self, names: Mapping[str, str]) -> NoReturn:
        """Run the loss again, by ops that can be differentiated twice."""
        call = self.recorder.call
        if call.draws.used_generator:
            raise refusal("grad", "random numbers of a generator of the loss's own")
        if call.captured:
            raise Unrepeatable("the loss differentiates by others than it did before")
        call.fallbacks.inner = {**(self._copied or {}), **names}
        every = Partition([torch.arange(call.batch.size)], "")
        raise SplitBatch(every, modes.current_level())

    # Ops whose derivatives have factors.

    def applied(
        self, op: str, func: Callable, x: Tensor, rest: dict, uses: Mapping
    ) -> Tensor | None:
        """Run an op that is linear in `x`; None if its derivative is none that has."""
        rest = rest | {name: param.value for name, param in uses.items()}
        transposed = _rule(func).transposed
        if transposed is None or (back := transposed(x, **rest)) is None:
            return None
        for param in uses.values():
            self.recorder.expect(param)
        context = self, op, func, rest, uses, back
        return cast(Tensor, _Product.apply(context, x, self._end))


class _Product(Function):
    """An op that is linear in its first argument; its derivative is one as well."""

    @staticmethod
    def forward(ctx: Any, context: tuple, x: Tensor, end: Tensor) -> Tensor:
        _, _, func, rest, *_ = ctx.context = context
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return _run(func, x, **rest)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,), (x,) = grads, ctx.saved_tensors
        if g is None:
            return None, None, None
        inner, op, func, rest, uses, (back, rest_of_back) = ctx.context
        if not inner.runs:  # but the pass for the gradients of the loss
            makers: Any = _rule(func).factors(x.detach(), **rest)
            for name, param in uses.items():
                inner.recorder.accept(param, makers[name](g), {op: True}, g)
        if not ctx.needs_input_grad[1]:
            return None, None, None
        if not torch.is_grad_enabled():
            return None, _run(back, g, **rest_of_back), None
        uses = {name: uses[name] for name in rest_of_back if name in uses}
        op = op if op.startswith("derivative") else f"derivative of {op}"
        return None, inner.applied(op, back, g, rest_of_back, uses), None


def _rule(func: Callable) -> Rule:
    return cast(Rule, OPS[func].rule)


def _run(func: Callable, x: Tensor, /, **rest: Any) -> Tensor:
    return (_rule(func).run or func)(x, **rest)


def refusal(op: str, got: str) -> UnsupportedOp:
    """Return the error for a derivative inside of a loss that is not recorded."""
    return UnsupportedOp(
        f"{op}: expected a loss that differentiates by tensors of each sample or by "
        f"parameters, got {got}. Use torch.func.grad inside it, or "
        f'strategy="loop".'
    )


def _listed(value: Any) -> list:
    return [value] if isinstance(value, Tensor) else list(value)
