"""Refusals of writes and of modules; checkpoints that run again in a backward pass.

Version counters show writes by torch, custom ops included, but none by `.data`, NumPy
or compiled code.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vgrad import checks
from vgrad.functional.slots import named_tensors
from vgrad.overlaps import Bytes, overlapping
from vgrad.torch_private import autograd, modes
from vgrad.torch_private import tensors as private

Again = Callable[[], AbstractContextManager]
"""Returns a block around the re-run of a checkpoint."""


class Protected(NamedTuple):
    """Tensors that stay as they are, and the error for a call that writes into one."""

    tensors: Mapping[str, Tensor]
    expected: str  # `function(argument): expected ...`
    advice: str
    # Called where a checkpoint begins; returns a block with the values of the call.
    at_checkpoint: Callable[[], Again] | None = None


class WriteError(RuntimeError):
    """A loss or a module has written into a tensor that it was given."""


@contextmanager
def protect(*protected: Protected) -> Iterator[None]:
    """Refuse a block that writes into tensors, as their version counters show."""
    tensors: list[Tensor] = []
    for group in protected:
        tensors += group.tensors.values()
    with modes.without_modes():
        before = private.versions_of(tensors)
    try:
        yield
    except Exception as error:
        _check_unwritten(protected, tensors, before, error)
        raise
    _check_unwritten(protected, tensors, before)


def _check_unwritten(
    protected: Sequence[Protected],
    tensors: Sequence[Tensor],
    before: Sequence[int],
    error: Exception | None = None,
) -> None:
    with modes.without_modes():
        after = private.versions_of(tensors)
    if after != before:
        named = ((group, name) for group in protected for name in group.tensors)
        for (group, name), one, other in zip(named, before, after, strict=True):
            if one != other:
                text = f"{group.expected}, got a write into {name!r}. {group.advice}"
                raise WriteError(text) from error


class Reruns(TorchFunctionMode):
    """The function mode that has checkpoints run again as they ran first."""

    hooked = 0  # the level of a transform that runs backward hooks

    def __init__(self, *callbacks: Callable[[], Again]) -> None:
        super().__init__()
        # Called where a checkpoint begins; each returns a block around its re-run.
        self._callbacks = [*callbacks]
        self._saved: WeakSet[Callable] = WeakSet()  # hooks that were seen
        # Buffers that functional models wrote: name, value before and after.
        self.writes: list[tuple[str, Tensor, Tensor]] = []
        self._entered = 0

    def __enter__(self) -> "Reruns":
        self._note_hooks()
        self._entered += 1
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._entered -= 1
        if raised[1] is not None:
            autograd.close(raised[1])

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if autograd.hooks() is not None:
            self.look_at_hooks()
        return func(*args, **(kwargs or {}))

    def ensure_left(self, entered: int = 0) -> None:
        """Leave the mode, where an interrupt came as it was left."""
        if self._entered > entered:
            self._entered = entered
            modes.leave(self)

    def look_at_hooks(self) -> None:
        """Have a checkpoint that has begun re-run under this mode as it is now."""
        active = autograd.hooks()
        if active is None or active[0] in self._saved:
            return
        self._note_hooks()
        callbacks = tuple(self._callbacks)
        blocks = [callback() for callback in callbacks]
        self._note_hooks()  # which a block may have replaced
        rerun = self.releasable(lambda: self.repeating(callbacks, blocks))
        autograd.repeats(active[0], rerun)

    def _note_hooks(self) -> None:
        if (active := autograd.hooks()) is not None:
            with suppress(TypeError):  # a method in C, which no checkpoint has
                self._saved.add(active[0])

    def releasable(self, rerun: Again) -> Again:
        """Return the function that a checkpoint holds for its re-run."""
        return rerun

    @contextmanager
    def repeating(
        self, callbacks: Sequence[Callable[[], Again]], blocks: Sequence[Again]
    ) -> Iterator[None]:
        """Run the mode as it was when a checkpoint began."""
        before, self._callbacks = self._callbacks, [*callbacks]
        entered = self._entered
        try:
            with ExitStack() as stack:
                for block in blocks:
                    stack.enter_context(block())
                stack.enter_context(self)
                yield
        finally:
            self._callbacks = before
            self.ensure_left(entered)

    @contextmanager
    def rerunning(self, callback: Callable[[], Again]) -> Iterator[None]:
        """Have checkpoints in a block run again in another block as well."""
        self.look_at_hooks()  # the block may lie in a checkpoint
        before, self._callbacks = self._callbacks, [*self._callbacks, callback]
        try:
            yield
        finally:
            self._callbacks = before


def rerunning(callback: Callable[[], Again]) -> AbstractContextManager:
    """Have checkpoints in a block run again in another one, by the mode of a loss."""
    for mode in reversed(modes.function_modes()):
        if isinstance(mode, Reruns) and type(mode) is not Reruns:
            return mode.rerunning(callback)
    return Reruns(callback)


def hooks_run() -> bool:
    """Return whether the transform here runs backward hooks of modules."""
    level, running = modes.current_level(), modes.function_modes()
    return any(getattr(mode, "hooked", None) == level for mode in running)


def check_plain(function: str, model: Any) -> None:
    """Refuse modules that cannot be copied or exchanged tensor by tensor."""
    start = f"{function}({type(model).__name__}): expected"
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if (
        not isinstance(model, nn.Module)
        or isinstance(model, (torch.jit.ScriptModule, *wrappers))
        or private.is_compiled(model)
    ):
        raise TypeError(
            f"{start} a plain torch.nn.Module. Pass the module itself, before it was "
            f"scripted, compiled or wrapped (`wrapped.module`)."
        )
    modules = dict(model.named_modules())
    tensors = dict(named_tensors(model))
    for names, expected, advice in (
        (
            [n for n, m in modules.items() if isinstance(m, torch.jit.ScriptModule)],
            "modules whose tensors can be exchanged, got modules of torch.jit in",
            "Use them as they were before they were scripted or traced.",
        ),
        (
            [n for n, tensor in tensors.items() if nn.parameter.is_lazy(tensor)],
            "initialised tensors, got lazy ones in",
            "Run the model once on a batch first.",
        ),
        (
            [n for n, x in tensors.items() if x.layout is not torch.strided],
            "dense tensors, got sparse ones in",
            "Register their indices and values, or a dense tensor, and make the sparse "
            "one in the forward pass.",
        ),
        (
            [n for n, tensor in tensors.items() if private.has_hooks(tensor)],
            "tensors without hooks, which gradients of other tensors would not run, "
            "got some on",
            "Remove them (`handle.remove()`). To change a gradient, use a "
            "parametrization with a backward pass of its own "
            "(torch.nn.utils.parametrize).",
        ),
    ):
        if names:
            raise TypeError(f"{start} {expected} {checks.listed(names)}. {advice}")
    _check_apart(function, model)


def _check_apart(function: str, model: nn.Module) -> None:
    """Refuse two registered tensors on one memory: a step on one changes the other."""
    groups: dict[int, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (where := private.memory(tensor)) is not None:
            groups.setdefault(where, {}).setdefault(id(tensor), (name, tensor))
    for group in groups.values():
        blocks = {
            name: Bytes(tensor, int(tensor.storage_offset()) * tensor.element_size())
            for name, tensor in group.values()
            if tensor.numel()
        }
        if any(overlapping(blocks)):
            names = ", ".join(repr(name) for name, _ in group.values())
            raise TypeError(
                f"{function}({type(model).__name__}): expected parameters and buffers "
                f"with memory of their own, or one tensor under several names, got "
                f"several on one memory: {names}. Tie them by "
                f"assigning the tensor itself (b.weight = a.weight), or clone one."
            )
