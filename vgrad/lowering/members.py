"""Ops whose weights differ from member to member, in the form that suits the device.

torch's vmap turns E ordinary convolutions into one grouped one, which a CPU runs
several times slower than the E in turn, and adds the bias of a linear layer in a
separate pass. Everything else it batches as well as possible.

E members, B rows, I inputs, O outputs
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.functional.guards import Protected
from vgrad.lowering.grad_flags import HOOKS, GradFlags, among
from vgrad.lowering.mode import ValueReadMode
from vgrad.lowering.randomness import Draws
from vgrad.lowering.value_reads import NONE, VALUE_READS, SplitBatch
from vgrad.lowering.vmap import VMAPPED
from vgrad.torch_private import autograd, modes

Form = Callable[..., Tensor]
"""From E and tensors `[E, ...]` (`[...]` where all members share one) to `[E, ...]`."""


class Members(ValueReadMode):
    """Under `torch.vmap` over members, runs each op in its best form.

    `told` is an optional callback, invoked once per op that has several forms, with the
    names of the op and of the form. With `chosen=False` all ops run in torch's own way,
    except ops that it runs member by member, wrongly or not at all.
    """

    def __init__(
        self,
        told: Callable[[str, str], None] | None = None,
        *protected: Protected,
        flags: GradFlags,
        draws: Draws | None = None,
        chosen: bool = True,
    ) -> None:
        super().__init__(*protected, flags=flags, draws=draws)
        self._told = told
        self._forms = FORMS if chosen else {}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.look_at_hooks()
        self.check(func, args, kwargs)
        if func is modes.custom_function_call and args[0] is autograd.SAVES_ARGUMENTS:
            return autograd.SavedArguments(*args[2:])
        if kwargs:
            self.note(kwargs)
        try:
            return self._all(func, args, kwargs)
        except (SplitBatch, RuntimeError) as error:
            self.stop(error, func, kwargs)

    def _all(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one call for all members at once."""
        if (
            func in VALUE_READS
            and (found := self.value_of(func, args, kwargs)) is not NONE
        ):
            return found
        flags, tensors = self._flags, among(args, kwargs)
        assert flags is not None
        # The modes of a surrounding loss must not see these calls.
        with modes.without_modes():
            flags.before(func, tensors)
            if func in HOOKS and tensors and tensors[0].requires_grad:
                raise flags.refusal(func)  # also on tensors that all members share
        output = self._run(func, args, kwargs)
        with modes.without_modes():
            flags.after(func, tensors, output)
        return output

    def _run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one call in its best form."""
        if func in VMAPPED:
            return VMAPPED[func](*args, **kwargs)
        if modes.is_python(func):
            with self:
                return modes.opened(func)(*args, **kwargs)
        if func is modes.custom_function_call:
            with self._draws.samples_at(None):  # its random ops have axes of their own
                return func(*args, **kwargs)
        if func not in self._forms:
            return func(*args, **kwargs)
        form, name = self._forms[func](*args, **kwargs)
        if self._told is not None:
            self._told(modes.op_name(func), name)
        return func(*args, **kwargs) if form is None else form()


def run_member(
    run: Callable[[], Any],
    casts: Callable[[], AbstractContextManager],
    draws: Draws | None,
) -> Any:
    """Run one member with its draws; `casts` makes the mode for autocast."""
    if draws is None or draws.keys is None:
        known = nullcontext() if draws is None else draws.watched(1, alone=True)
        with known, casts():
            return run()
    mode = ValueReadMode(flags=None, draws=draws)
    with mode.inside(1, "different", casts, alone=True):
        return run()


Chosen = tuple[Callable[[], Tensor] | None, str]
"""How to run a call, None for torch's own way, and the name of that form."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Chosen:
    """Multiply the matrices of all members by one kernel, which adds the biases."""
    if bias is None or weight.ndim != 2 or bias.ndim != 1:
        return None, "torch"
    if not (is_mapped_here(weight) and is_mapped_here(bias)):
        return None, "torch"
    return lambda: _batched(_linear, input, weight, bias), "baddbmm"


def convolution(plain: Callable) -> Callable[..., Chosen]:
    """Make the choice for `conv1d`, `conv2d` or `conv3d`."""

    def choose(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kw: Any
    ) -> Chosen:
        if not is_mapped_here(weight):
            return None, "one convolution of all members' batches"
        if not is_mapped_here(input):
            return None, "one convolution with the channels of all members"
        if input.device.type != "cpu":
            return None, "grouped"

        def separate(
            members: int, stacked: list[bool], *tensors: Tensor | None
        ) -> Tensor:
            # The backward pass of unbind is one stack; indexing would make a whole
            # tensor of zeros for each member.
            columns = [
                [x] * members if x is None or not own else x.unbind(0)
                for x, own in zip(tensors, stacked, strict=True)
            ]
            rows = zip(*columns, strict=True)
            return torch.stack([plain(*row, *args, **kw) for row in rows])

        return lambda: _batched(separate, input, weight, bias), "one call a member"

    return choose


FORMS: dict[Callable, Callable[..., Chosen]] = {
    F.linear: linear,
    F.conv1d: convolution(F.conv1d),
    F.conv2d: convolution(F.conv2d),
    F.conv3d: convolution(F.conv3d),
}
"""Ops with several forms, and the choice of one by the arguments of a call."""


def is_mapped_here(tensor: Tensor) -> bool:
    """Return whether the innermost transform is a vmap that maps over a tensor.

    If an outer vmap does, the transforms in between have to see torch's own op.
    """
    level = modes.current_level()
    return modes.is_batched(tensor) and modes.level_of(tensor) == level


def _batched(form: Form, *tensors: Tensor | None) -> Tensor:
    """Call a form with the tensors of all members, below the level of the vmap.

    `torch.autograd.Function` does the same for a function with a rule for vmap, in
    several times the time: below the vmap, autograd sees the ops of the form.
    """
    interpreter: Any = modes.innermost()
    level = interpreter.level()
    given, stacked = [], []
    for tensor in tensors:
        dim = None
        if tensor is not None:
            tensor, dim = modes.split_batch_axis(tensor, level)
            tensor = tensor.movedim(dim, 0) if dim else tensor
        given.append(tensor)
        stacked.append(dim is not None)
    with interpreter.lower():
        out = form(interpreter.batch_size(), stacked, *given)
    return modes.add_batch_axis(out, 0, level)


def _linear(
    members: int, stacked: list[bool], x: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Compute `x @ weight.mT + bias` for `x [E or nothing, ..., I]`."""
    shape = x.shape if stacked[0] else (members, *x.shape)
    rows = x if stacked[0] else x.expand(shape)
    if len(shape) != 3:
        rows = rows.reshape(members, math.prod(shape[1:-1]), shape[-1])
    if (
        weight.requires_grad
        and torch.is_grad_enabled()
        and not modes.inside_transform()
    ):
        out = _Product.apply(rows, weight, bias)
    else:
        out = torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return out if len(shape) == 3 else out.reshape(*shape[:-1], out.shape[-1])


class _Product(torch.autograd.Function):
    """`[E, B, I], [E, O, I], [E, O] -> [E, B, O]`, whose gradients lie like the inputs.

    Autograd transposes the gradient of the right factor of a product; code that needs
    it in the layout of the weight would have to copy it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight.conj()) if to_x else None,
            torch.bmm(grad.mT, x.conj()) if to_weight else None,
            grad.sum(1) if to_bias else None,
        )
