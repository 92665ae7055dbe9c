"""What keeps an optimizer from steps on gradients that are not private."""

import os
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from vgrad.dp.live import LiveModule


class Released(NamedTuple):
    """A gradient that was written, and what tells whether it was changed since."""

    grad: Tensor
    bits: Tensor

    @classmethod
    def of(cls, grad: Tensor) -> "Released":
        """Remember a gradient."""
        return cls(grad, _bits(grad))

    def is_(self, grad: Tensor | None) -> bool:
        """Tell whether this is the same tensor, with the same values.

        How often it was written to does not tell: trainers that log norms multiply by
        one, and torch does not count what a loss scaler writes.
        """
        return grad is self.grad and torch.equal(_bits(self.grad), self.bits)


class Watch:
    """Knows the gradients that were released, and which optimizers have used them."""

    def __init__(self, live: LiveModule) -> None:
        """Start before the first release."""
        self._live = live
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self.forget()

    def forget(self) -> None:
        """Start as before the first release."""
        self._released: dict[str, Released] = {}
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._used = False  # by an optimizer that may be gone
        self._partial = False

    @property
    def ready(self) -> bool:
        """Whether the gradients of a whole logical batch are there."""
        return bool(self._released)

    def check_written(self) -> None:
        """Refuse a gradient that is not from here."""
        for name, each in self._live.parameters.items():
            if each.grad is not None and not self._wrote(name, each.grad):
                raise RuntimeError(
                    f"PrivateGradients.backward(*batch): expected no gradient that it "
                    f"did not write, got one in {name!r}. Remove loss.backward(), and "
                    f"clear what is left of it with model.zero_grad()."
                )

    def check_used(self) -> None:
        """Refuse another logical batch before an optimizer has used the last one."""
        if self._released and self._optimizers and not self._used:
            raise RuntimeError(
                "PrivateGradients.backward(*batch): expected optimizer.step() after "
                "the last logical batch, got another batch, whose gradients would take "
                "the place of those. Switch gradient accumulation off: what is too "
                "large for the memory takes physical_batch_size or chunk_size."
            )

    def begin(self) -> None:
        """Clear the gradients of the last logical batch."""
        for each in self._live.parameters.values():
            each.grad = None
        self.forget()
        self._partial = True

    def _wrote(self, name: str, grad: Tensor) -> bool:
        return name in self._released and self._released[name].grad is grad

    def release(self) -> None:
        """Remember the gradients that have just been written."""
        self._partial = False
        for name, each in self._live.parameters.items():
            if each.grad is not None:
                self._released[name] = Released.of(each.grad)

    def add(self, optimizer: Optimizer) -> None:
        """Look at the gradients before each step of an optimizer."""
        if optimizer in self._optimizers:
            return
        if _held(optimizer).isdisjoint(map(id, self._live.parameters.values())):
            raise ValueError(
                "PrivateGradients.watch(optimizer): expected one of the module's own "
                "parameters, got one of others, which it would train without privacy. "
                "Make it from the parameters of the module that was passed."
            )
        self._optimizers.add(optimizer)

        def before(
            optimizer: Optimizer, args: tuple, kwargs: dict
        ) -> tuple[tuple, dict]:
            closure = kwargs.get("closure") or (args[1:] or (None,))[0]
            if closure is None:
                self._check(optimizer)
                return args, kwargs

            def checked() -> Any:
                value = closure()  # which may write gradients
                self._check(optimizer)
                return value

            return args[:1], {**kwargs, "closure": checked}

        def after(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
            if not self._partial:
                self._stepped.add(optimizer)
                self._used = True

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _check(self, optimizer: Optimizer) -> None:
        """Refuse a step on anything but what was released, once."""
        fresh = self._released and optimizer not in self._stepped
        if not fresh and not self._partial:
            raise RuntimeError(
                "optimizer.step(): expected PrivateGradients.backward(*batch) before "
                "each step, got a step without. Its gradients would be those of an "
                "earlier batch, or not private."
            )
        held = _held(optimizer)
        # Where a scaler leaves what a fused optimizer divides by.
        scaled = getattr(optimizer, "grad_scale", None) is not None
        for name, each in self._live.parameters.items():
            if id(each) not in held:
                continue
            released = self._released.get(name)
            same = each.grad is None if released is None else released.is_(each.grad)
            if scaled or not same:
                raise RuntimeError(
                    f"optimizer.step(): expected the gradients as PrivateGradients "
                    f"wrote them, got another one for {name!r}. Remove "
                    f"loss.backward(), call zero_grad() before backward(*batch) and "
                    f"not after it, and switch off gradient clipping and loss scaling."
                )


def _held(optimizer: Optimizer) -> set[int]:
    """Return the identities of what an optimizer trains."""
    groups = optimizer.param_groups
    return {id(each) for group in groups for each in group["params"]}


def _bits(grad: Tensor) -> Tensor:
    """Add up the bits of a tensor, 64 at a time: almost any change shows."""
    raw = grad.contiguous().view(-1).view(torch.uint8)
    words = len(raw) // 8 * 8
    return raw[:words].view(torch.int64).sum() + raw[words:].sum()


def check_alone(process: int) -> None:
    """Refuse several processes, each with a key of its own, and forks of one key."""
    if process != os.getpid():
        raise RuntimeError(
            "PrivateGradients.backward(*batch): expected the process that made it, got "
            "a fork of that, with the same key: two runs with the same noise show the "
            "data. Make PrivateGradients in each process, after the fork."
        )
    grouped = distributed.is_available() and distributed.is_initialized()
    if grouped and distributed.get_world_size() > 1:
        raise RuntimeError(
            f"PrivateGradients.backward(*batch): expected one process, got "
            f"{distributed.get_world_size()}, which would draw their own batches and "
            f"noise. Use vgrad.distributed with private_step."
        )
