"""The state of torch's own generators, which the random ops of a loss draw from."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vgrad.process import ALONE

RandomState = tuple[Tensor, dict[int, Tensor]]


def random_state(tensors: Iterable[Tensor]) -> RandomState:
    """Return the state of the generators that computing with `tensors` may use."""
    devices = {each.device.index for each in tensors if each.is_cuda}
    states = {index: torch.cuda.get_rng_state(index) for index in devices}
    return torch.get_rng_state(), states


def set_random_state(state: RandomState) -> None:
    """Put the generators back."""
    torch.set_rng_state(state[0])
    for index, of_device in state[1].items():
        torch.cuda.set_rng_state(of_device, index)


@contextmanager
def kept_random_state(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put the generators back after a block that computes with `tensors`."""
    with ALONE:
        state = random_state(tensors)
        try:
            yield
        finally:
            set_random_state(state)


def drawn_since(before: RandomState, tensors: Iterable[Tensor]) -> bool:
    """Tell whether random numbers were drawn."""
    after = random_state(tensors)
    return not torch.equal(before[0], after[0]) or any(
        not torch.equal(state, after[1][index]) for index, state in before[1].items()
    )
