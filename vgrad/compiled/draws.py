"""Random ops of a capture, drawn once where a checkpoint runs them again."""

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

    before: Tensor
    after: Tensor
    op: str  # and its arguments, shapes for tensors
    inputs: list[Tensor]
    result: Any  # a copy, to which no later op writes


class Draws(DispatchMode):
    """Repeats the results of random ops where the generator's state is restored."""

    def __init__(self, arguments: list) -> None:
        super().__init__()
        host, others = random_state(tree.tensors(arguments))
        self._states = {torch.device("cpu"): host, **others}  # after the last new draw
        self._drawn: list[_Draw] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not may_draw(func):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise Unrepeatable("it draws from a generator of its own")
        tensors, name = tree.tensors((args, kwargs)), op_name(func)
        place = tensors[0].device if tensors else kwargs.get("device") or "cpu"
        device = torch.device(place)
        generator = default_generator(device)
        before = generator.get_state()
        # The first argument may be memory that is not read.
        unread = writes(func) or name in _OF_SHAPE or (name, len(args)) in _OF_SHAPE
        with static_values():
            inputs = [each.clone() for each in tensors[unread:]]
        shapes = tree.map_tensors(lambda each: (each.shape, each.device), args)
        op = f"{func} {shapes} {kwargs}"
        for draw in self._drawn:
            if _equal(draw.before, before):
                same = op == draw.op and all(map(_equal, draw.inputs, inputs))
                if not same or (writes(func) and name not in SHOWN):
                    raise Unrepeatable(f"{name} draws from a state a second time")
                generator.set_state(draw.after)
                if writes(func):
                    return tensors[0].copy_(draw.result)
                return tree.map_tensors(Tensor.clone, draw.result)
        result, after = func(*args, **kwargs), generator.get_state()
        if not _equal(before, after):
            self._check(device, before)
            self._states[device] = after
            kept = tree.map_tensors(Tensor.clone, result)
            self._drawn.append(_Draw(before, after, op, inputs, kept))
        return result

    def check(self) -> None:
        """Refuse a function that leaves generators in another state than its graph."""
        for device in self._states:
            self._check(device, default_generator(device).get_state())

    def _check(self, device: torch.device, state: Tensor) -> None:
        if device in self._states and not _equal(self._states[device], state):
            raise Unrepeatable("it seeds torch's generators, or puts them back")


_OF_SHAPE = {"cauchy", "exponential", "geometric", "log_normal", "normal_functional"}
_OF_SHAPE |= {"rand_like", "randint_like", "randn_like", "random", "uniform"}
_OF_SHAPE |= {("bernoulli", 2)}
"""Ops that read no more than the shape of a tensor; with a number of arguments."""


def _equal(one: Tensor, other: Tensor) -> bool:
    with static_values():
        return torch.equal(one, other)
