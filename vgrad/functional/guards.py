"""Refusals: writes into protected tensors, and models that cannot be functional.

A function mode sees every call of torch, custom ops included, but no write by NumPy,
DLPack or compiled code. It also sees a checkpoint begin, which is re-run in the
backward pass, with the values of the call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vgrad import checks
from vgrad.functional.slots import named_tensors
from vgrad.overlaps import Bytes, overlapping
from vgrad.torch_private import autograd, modes
from vgrad.torch_private import tensors as private
from vgrad.tree import tensors

Again = Callable[[], AbstractContextManager]
"""Returns a block around the re-run of a checkpoint."""


class Protected(NamedTuple):
    """Tensors that stay as they are, and the error for a call that writes into one."""

    tensors: Mapping[str, Tensor]
    expected: str  # `function(argument): expected ...`
    advice: str
    # Called where a checkpoint begins; returns a block with the values of the call.
    again: Callable[[], Again] | None = None


class WriteGuard(TorchFunctionMode):
    """The function mode that refuses writes into protected tensors."""

    hooked = 0  # the level of a transform that runs backward hooks

    def __init__(self, *protected: Protected) -> None:
        super().__init__()
        self._protected = [*protected]
        self._saved: WeakSet[Callable] = WeakSet()  # hooks that were seen
        # Buffers that functional models wrote: name, value before and after.
        self.left: list[tuple[str, Tensor, Tensor]] = []

    def __enter__(self) -> "WriteGuard":
        self._note_hooks()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if raised[1] is not None:
            autograd.close(raised[1])

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.look_at_hooks()
        self.check(func, args, kwargs)
        return func(*args, **kwargs)

    def look_at_hooks(self) -> None:
        """Have a checkpoint that has begun re-run under this mode as it is now."""
        active = autograd.hooks()
        if active is None or active[0] in self._saved:
            return
        self._note_hooks()
        protected = tuple(self._protected)
        blocks = [each.again() for each in protected if each.again is not None]
        self._note_hooks()  # which a block may have replaced
        again = self.held(lambda: self.repeating(protected, blocks))
        autograd.repeats(active[0], again)

    def _note_hooks(self) -> None:
        if (active := autograd.hooks()) is not None:
            with suppress(TypeError):  # a method in C, which no checkpoint has
                self._saved.add(active[0])

    def held(self, again: Again) -> Again:
        """Return the function that a checkpoint holds for its re-run."""
        return again

    @contextmanager
    def repeating(
        self,
        protected: Sequence[Protected],
        blocks: Sequence[Again],
    ) -> Iterator[None]:
        """Run the mode as it was when it protected these."""
        before, self._protected = self._protected, [*protected]
        try:
            with ExitStack() as stack:
                for block in blocks:
                    stack.enter_context(block())
                stack.enter_context(self)
                yield
        finally:
            self._protected = before

    def check(self, func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
        """Return the tensors that a call writes into; raise if one is protected."""
        if not may_write(func) and kwargs.get("out") is None:
            return []
        if not (targets := written(func, args, kwargs)):
            return []
        name = getattr(func, "__name__", "").partition(".")[0]
        # A call that changes the object alone does not write into its memory.
        key = id if name in _OF_THE_OBJECT else _where
        places = {key(tensor) for tensor in targets} - {None}
        for protected in self._protected:
            for entry, tensor in protected.tensors.items():
                if key(tensor) in places:
                    raise RuntimeError(
                        f"{protected.expected}, got {name}, which writes into "
                        f"{entry!r} in place. {protected.advice}"
                    )
        return targets

    @contextmanager
    def protecting(self, protected: Protected) -> Iterator[None]:
        """Protect more tensors while a block runs."""
        self.look_at_hooks()  # the block may lie in a checkpoint
        self._protected.append(protected)
        try:
            yield
        finally:
            self._protected.pop()


def protect(protected: Protected) -> AbstractContextManager:
    """Protect tensors in a block, by the current mode or a new one."""
    for mode in reversed(modes.function_modes()):
        if isinstance(mode, WriteGuard):
            return mode.protecting(protected)
    return WriteGuard(protected)


def hooks_run() -> bool:
    """Return whether the transform here runs backward hooks of modules."""
    level, running = modes.current_level(), modes.function_modes()
    return any(getattr(mode, "hooked", None) == level for mode in running)


_OF_THE_OBJECT = {"__set__", "set_", "requires_grad_", "detach_", "rename_"}
_OF_THE_OBJECT |= {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_"}
_OF_THE_OBJECT |= {"unsqueeze_", "as_strided_"}
"""Calls that leave the numbers in memory as they are."""

STATISTICS = {F.batch_norm: 1, F.instance_norm: 1}
STATISTICS |= {torch.batch_norm: 3, torch.instance_norm: 3}
"""The place of the first of two running statistics, which training writes into."""

_TABLES = {F.embedding, F.embedding_bag}
"""Functions that rewrite their second argument, if there is a `max_norm`."""


@lru_cache(maxsize=4096)
def may_write(func: Callable) -> bool:
    """Return whether some calls of a function write into arguments other than `out`."""
    name = getattr(func, "__name__", "")
    if isinstance(func, private.OPS):
        return private.writes(func)
    in_place = name.endswith("_") and not name.endswith("__")
    tables = (_INPLACE, STATISTICS, _TABLES)
    return in_place or name in _BY_SIGN or any(func in table for table in tables)


def written(func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors that a call writes into."""
    arguments: list[Any] = [kwargs.get("out"), *updated_statistics(func, args, kwargs)]
    if isinstance(func, private.OPS):
        arguments += private.arguments_written(func, args, kwargs)
    elif func in _TABLES:
        if kwargs.get("max_norm") is not None:
            arguments += args[1:2] or [kwargs["weight"]]
    elif (place := _INPLACE.get(func)) is not None:
        if args[place] if len(args) > place else kwargs.get("inplace"):
            arguments += args[:1] or [kwargs["input"]]
    elif func not in STATISTICS and may_write(func):
        arguments += args[:1] or list(kwargs.values())[:1]
    return tensors(arguments)


def updated_statistics(func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the running statistics that a norm updates in place."""
    if func not in STATISTICS:
        return []
    by_default = func is F.instance_norm
    training = kwargs.get("training", kwargs.get("use_input_stats", by_default))
    if not (args[5] if len(args) > 5 else training):
        return []
    first = STATISTICS[func]
    running = [kwargs.get("running_mean"), kwargs.get("running_var")]
    running += args[first : first + 2]
    return [tensor for tensor in running if isinstance(tensor, Tensor)]


_BY_SIGN = {"__setitem__", "__set__", "__delitem__"}
_BY_SIGN |= {"__ior__", "__iand__", "__ixor__", "__ilshift__", "__irshift__"}
"""Writes without an underscore; for `+=` and the like torch calls `add_`."""

_INPLACE = {
    func: func.__code__.co_varnames.index("inplace")
    for func in vars(F).values()
    if isinstance(func, FunctionType)
    and "inplace" in func.__code__.co_varnames[: func.__code__.co_argcount]
}
"""The place of the argument `inplace`."""


def _where(tensor: Tensor) -> int | None:
    """Identify memory, inside transforms too."""
    return private.memory(modes.unwrap_all(tensor))


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
