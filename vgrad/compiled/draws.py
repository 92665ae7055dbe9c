"""Random ops of a capture, and their repetition where a checkpoint runs again.

A checkpoint restores the state of torch's generators, and draws the same numbers once
more. A graph draws them once: the ops that run again take the results of the first run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import tree
from vgrad.conditions import Unrepeatable, static_values
from vgrad.generators import random_state
from vgrad.torch_private.kernels import default_generator
from vgrad.torch_private.tensors import SHOWN, may_draw, op_name, writes
from vgrad.torch_private.tracing import DispatchMode


class _Draw(NamedTuple):
    """A random op, and the state of its generator before and after."""

    device: torch.device
    before: Tensor
    after: Tensor
    op: tuple  # and its arguments without tensors
    inputs: list[Tensor]
    result: Any  # a copy, which no later op writes to


class Draws(DispatchMode):
    """Keeps random ops, and has them repeated where their state is restored."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        host, others = random_state(tensors)
        self._states = {torch.device("cpu"): host, **others}  # after the last new draw
        self._drawn: list[_Draw] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not may_draw(func) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        tensors = tree.tensors((args, kwargs))
        device = tensors[0].device if tensors else kwargs.get("device") or "cpu"
        device = torch.device(device)
        generator = default_generator(device)
        before = generator.get_state()
        of_shape = writes(func) or op_name(func) in _OF_SHAPE or len(args) > 1 and (
            op_name(func) == "bernoulli"
        )
        read = tensors[of_shape:]  # the first one may be memory of any values
        with static_values():
            inputs = [each.clone() for each in read]
        shapes = tree.map_tensors(lambda each: tuple(each.shape), (args, kwargs))
        op = func, repr(shapes)
        for draw in self._drawn:
            if draw.device == device and _equal(draw.before, before):
                return self._again(draw, op, inputs, tensors, generator)
        result = func(*args, **kwargs)
        after = generator.get_state()
        if not _equal(after, before):
            self._check(device, before)
            self._states[device] = after
            kept = tree.map_tensors(Tensor.clone, result)
            self._drawn.append(_Draw(device, before, after, op, inputs, kept))
        return result

    def _again(
        self,
        draw: _Draw,
        op: tuple,
        inputs: list[Tensor],
        tensors: list[Tensor],
        generator: torch.Generator,
    ) -> Any:
        hidden = writes(op[0]) and op_name(op[0]) not in SHOWN
        same = op == draw.op and all(map(_equal, draw.inputs, inputs))
        if hidden or not same:
            raise Unrepeatable(
                f"{op_name(op[0])} draws from a state of torch's generators from which "
                f"another op has drawn"
            )
        generator.set_state(draw.after)
        if writes(op[0]):
            return tensors[0].copy_(draw.result)
        return tree.map_tensors(Tensor.clone, draw.result)

    def check(self) -> None:
        """Refuse a function after which the generators are not as a graph has them."""
        for device in self._states:
            self._check(device, default_generator(device).get_state())

    def _check(self, device: torch.device, state: Tensor) -> None:
        if device in self._states and not _equal(self._states[device], state):
            raise Unrepeatable("it seeds torch's generators, or puts them back")


_OF_SHAPE = {"cauchy", "exponential", "geometric", "log_normal", "normal_functional"}
_OF_SHAPE |= {"rand_like", "randint_like", "randn_like", "random", "uniform"}
"""Ops whose first argument is not read: as `bernoulli`, where a probability follows."""


def _equal(one: Tensor, other: Tensor) -> bool:
    with static_values():
        return torch.equal(one, other)
