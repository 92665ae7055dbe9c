"""Ops whose weights differ from member to member, in the form that suits the device.

torch's vmap makes one grouped convolution of E ordinary ones, which a CPU runs several
times slower than one after the other, and adds the bias of a linear layer in a pass of
its own. Everything else it batches as well as can be done.

E members, B rows, I inputs, O outputs
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.functional.untouched import Promise, Untouched
from vgrad.lowering.truthful import HOOKS, Truth, among
from vgrad.lowering.vmapped import VMAPPED
from vgrad.torch_private import levels, modes

Form = Callable[..., Tensor]
"""From E and tensors `[E, ...]` (those that all members share: `[...]`) to the same."""


class Members(Untouched):
    """Under `torch.vmap` over members, runs each op in its best form.

    `told` gets the name of each op that has several forms, and of the one it took. With
    `chosen=False` there is no choice: all ops run in torch's own way, but for those
    that it does member by member, wrongly or not at all. Tensors tell the `truth`.
    """

    def __init__(
        self,
        told: Callable[[str, str], None] | None = None,
        *promises: Promise,
        truth: Truth,
        chosen: bool = True,
    ) -> None:
        """Say who wants to know, what is to stay, and whether there is a choice."""
        super().__init__(*promises)
        self._told = told
        self._truth = truth
        self._forms = FORMS if chosen else {}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run one call."""
        kwargs = kwargs or {}
        self.check(func, args, kwargs)
        tensors = among(args, kwargs)
        # A loss around this one, which has modes of its own, is not asked.
        with modes.without_modes():
            self._truth.before(func, tensors)
            if func in HOOKS and tensors and tensors[0].requires_grad:
                raise self._truth.refusal(func)  # on what all members share, too
        output = self._run(func, args, kwargs)
        with modes.without_modes():
            self._truth.after(func, tensors, output)
        return output

    def _run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one call in the form that suits it."""
        if func in VMAPPED:
            return VMAPPED[func](*args, **kwargs)
        if modes.is_python(func):
            with self:
                return modes.opened(func)(*args, **kwargs)
        if func not in self._forms:
            return func(*args, **kwargs)
        form, name = self._forms[func](*args, **kwargs)
        if self._told is not None:
            self._told(modes.op_name(func), name)
        return func(*args, **kwargs) if form is None else form()


Chosen = tuple[Callable[[], Tensor] | None, str]
"""How to run a call, None standing for torch's own way, and what that is called."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Chosen:
    """Multiply the matrices of all members by one kernel, which adds the biases."""
    if bias is None or weight.ndim != 2 or bias.ndim != 1:
        return None, "torch"
    if not (mapped_here(weight) and mapped_here(bias)):
        return None, "torch"
    return lambda: _batched(_linear, input, weight, bias), "baddbmm"


def convolution(plain: Callable) -> Callable[..., Chosen]:
    """Make the choice for `conv1d`, `conv2d` or `conv3d`."""

    def choose(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kw: Any
    ) -> Chosen:
        if not mapped_here(weight):
            return None, "one convolution of all members' batches"
        if not mapped_here(input):
            return None, "one convolution with the channels of all members"
        if input.device.type != "cpu":
            return None, "grouped"

        def one(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            return plain(x, w, b, *args, **kw)

        form = _Separate(one)
        return lambda: _batched(form, input, weight, bias), "one call a member"

    return choose


FORMS: dict[Callable, Callable[..., Chosen]] = {
    F.linear: linear,
    F.conv1d: convolution(F.conv1d),
    F.conv2d: convolution(F.conv2d),
    F.conv3d: convolution(F.conv3d),
}
"""Ops with a choice of forms, and what chooses by the arguments of a call."""


def mapped_here(tensor: Tensor) -> bool:
    """Tell whether the innermost transform is a vmap that maps over a tensor.

    If a vmap further out does, what is in between has to see torch's own op.
    """
    return (
        levels.is_batched(tensor) and levels.level_of(tensor) == levels.current_level()
    )


def _batched(form: Form, *tensors: Tensor | None) -> Tensor:
    """Give a form the tensors of all members, the level of the vmap taken off.

    What `torch.autograd.Function` does for a function with a rule for vmap, in a
    fraction of the time: below the vmap, autograd sees the ops of the form.
    """
    interpreter: Any = levels.innermost()
    level = interpreter.level()
    given, stacked = [], []
    for tensor in tensors:
        dim = None
        if tensor is not None:
            tensor, dim = levels.split_batch_axis(tensor, level)
            tensor = tensor.movedim(dim, 0) if dim else tensor
        given.append(tensor)
        stacked.append(dim is not None)
    with interpreter.lower():
        out = form(interpreter.batch_size(), stacked, *given)
    return levels.add_batch_axis(out, 0, level)


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
        and not levels.inside_transform()
    ):
        out = _Product.apply(rows, weight, bias)
    else:
        out = torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return out if len(shape) == 3 else out.reshape(*shape[:-1], out.shape[-1])


class _Product(torch.autograd.Function):
    """`[E, B, I], [E, O, I], [E, O] -> [E, B, O]`, whose gradients lie like the inputs.

    In autograd the right factor of a product gets its gradient transposed, and who
    wants it as the weight lies has to copy it.
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


class _Separate:
    """Runs the plain op once for each member."""

    def __init__(self, one: Callable) -> None:
        self._one = one

    def __call__(
        self, members: int, stacked: list[bool], *tensors: Tensor | None
    ) -> Tensor:
        # The backward pass of unbind is one stack; that of indexing would be a
        # whole tensor of zeros for each member.
        columns = [
            [x] * members if x is None or not own else x.unbind(0)
            for x, own in zip(tensors, stacked, strict=True)
        ]
        return torch.stack([self._one(*row) for row in zip(*columns, strict=True)])
