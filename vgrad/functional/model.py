"""A module split into a pure function, its parameters and its buffers, and back."""

import copy
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from vgrad import checks, tree
from vgrad.checks import Patterns
from vgrad.functional import guards, slots
from vgrad.functional.guards import Again, Reruns, WriteError, rerunning
from vgrad.functional.slots import Slots, State
from vgrad.generators import RNG_LOCK
from vgrad.torch_private import modes
from vgrad.torch_private.tensors import (
    has_backward_hooks,
    has_forward_hooks,
    keeps_parametrized,
    versions_of,
    with_attributes,
)
from vgrad.typing import Buffers, Params


class FunctionalModel:
    """A module without values: `fmodel(params, buffers, *args, **kwargs) -> output`.

    Made by `make_functional_with_buffers`. A call runs the module with copies of
    buffers, inputs, and the tensors, lists, dictionaries, sets and tuples in plain
    attributes, so that nothing that the forward pass writes there lasts. State of other
    objects is not followed. A write into a parameter raises after the call, by its
    version counter, which writes by `.data`, numpy and compiled code leave as it is.
    Attributes of the module's parameters and buffers (`weight.tau`) are set on their
    values in a call. Threads may share one object.

    `params` and `buffers` together hold every name exactly once, each name in either of
    the two. A whole `state_dict()` with `{}` for `buffers` will do. A call costs one
    copy of the buffers and of the inputs.

    Raises:
        ValueError: an entry is missing, unexpected, of the wrong shape or in both
            dictionaries, or tied names have different values.
        RuntimeError: the forward pass changes a parameter in place, or uses a view of
            one that the module keeps.

    Attributes:
        names: all entries, tied tensors under their first name only.
        buffer_names: the names of the module's buffers.
    """

    def __init__(self, skeleton: nn.Module, defaults: dict[str, Tensor]) -> None:
        self._skeleton = skeleton
        self._defaults = defaults  # of the buffers that no state_dict() holds
        self._locks: dict[int, Any] = {}  # of processes: a fork may begin in a call
        self._shown = False
        self._read()

    def _read(self) -> None:
        with modes.without_modes():  # which would see each tensor that is read
            self._read_module(self._skeleton)

    def _read_module(self, model: nn.Module) -> None:
        firsts: dict[int, str] = {}
        self._aliases: dict[str, list[str]] = {}
        self._shapes: dict[str, torch.Size] = {}
        for name, tensor in slots.named_tensors(model):
            first = firsts.setdefault(id(tensor), name)
            self._aliases.setdefault(first, []).append(name)
            self._shapes[first] = tensor.shape
        self._slots = Slots(model, firsts)
        own_buffers = slots.own_buffers(model)
        self.names = tuple(self._aliases)
        self.buffer_names = tuple(n for key, n in firsts.items() if key in own_buffers)
        modules = dict(model.named_modules())
        tables = {  # that `max_norm` rewrites in the forward pass
            firsts[id(module.weight)]
            for module in modules.values()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.max_norm is not None
        }
        copied = {*self.buffer_names} | tables
        self._copied = {name: None for name in self.names if name in copied}
        self._hooked = [
            name or type(module).__name__
            for name, module in modules.items()
            if has_backward_hooks(module)
        ]
        self._parametrized = any(map(is_parametrized, modules.values()))
        # Torch's own modules write into no parameter, and into an input only with
        # `inplace`: copies would only cost.
        self._only_torch = all(map(_is_of_torch, modules.values()))
        in_place = any(getattr(module, "inplace", False) for module in modules.values())
        self._writes = in_place or not self._only_torch
        watched = () if self._only_torch else {*self.names} - copied
        self._followed = (*watched, *self.buffer_names)

    def __call__(
        self, params: Params, buffers: Buffers, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the module with these values."""
        return self._run(self._merged(params, buffers), args, kwargs)[0]

    def call_and_update(
        self, params: Params, buffers: Buffers, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Buffers]:
        """Run the module and return `(output, new_buffers)`.

        `new_buffers` has the keys of `buffers`, with the values that the forward pass
        left, whether it changed them in place or bound new ones. The old ones stay.

        Example:
            >>> model = torch.nn.BatchNorm1d(2)
            >>> fmodel, params, buffers = make_functional_with_buffers(model)
            >>> x = torch.ones(4, 2)
            >>> output, new = fmodel.call_and_update(params, buffers, x)
            >>> buffers["running_mean"], new["running_mean"]
            (tensor([0., 0.]), tensor([0.1000, 0.1000]))
        """
        output, after = self._run(self._merged(params, buffers), args, kwargs)
        return output, {name: after[name] for name in buffers or self.buffer_names}

    def train(self, mode: bool = True) -> "FunctionalModel":
        """Return a new function whose module is in training mode."""
        skeleton = copy.deepcopy(self._between_calls()).train(mode)
        return FunctionalModel(skeleton, self._defaults)

    def eval(self) -> "FunctionalModel":
        """Return a new function whose module is in evaluation mode."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self._skeleton.training

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules; tensors are placeholders, changes hold for later calls."""
        self._shown = True
        return self._between_calls().named_modules()

    def to_module(self, params: Params, buffers: Buffers) -> nn.Module:
        """Return a module of its own with copies of these values, ties kept.

        Its parameters require grad unless their names are in `buffers`.
        """
        module = copy.deepcopy(self._between_calls())
        copies: dict[str, Tensor] = {}
        for name, tensor in self._merged(params, buffers).items():
            copies[name] = value = tensor.detach().clone()
            if name not in self.buffer_names:
                real_or_complex = value.is_floating_point() or value.is_complex()
                trained = name in params and real_or_complex
                copies[name] = nn.Parameter(value, requires_grad=trained)
        FunctionalModel(module, self._defaults)._slots.fill(copies)
        for submodule in module.modules():
            if isinstance(submodule, nn.RNNBase):
                submodule.flatten_parameters()  # cuDNN wants the weights in one block
        return module

    def copy_to_(self, model: nn.Module, params: Params, buffers: Buffers) -> None:
        """Write the values into a module of yours, all of them or, on error, none.

        Raises:
            ValueError: the module lacks a name, has one more, or another shape.
        """
        function = "copy_to_(model, params, buffers)"
        merged = self._merged(params, buffers)
        values = {n: merged[key] for key in merged for n in self._aliases[key]}
        with RNG_LOCK:  # no other thread computes on the module
            targets = dict(slots.named_tensors(model))
        checks.names(function, targets, values)
        checks.shapes(function, targets, values)
        first_values: dict[int, Tensor] = {}
        for name, target in targets.items():
            sides = zip(target.stride(), target.shape, strict=True)
            repeated = any(step == 0 and size > 1 for step, size in sides)
            if target.is_meta or target.is_inference() or repeated:
                raise ValueError(
                    f"{function}: expected tensors with memory of their own, got one "
                    f"in {name!r} that is on the device meta, expanded, or made in "
                    f"inference mode."
                )
            first = first_values.setdefault(id(target), values[name])
            if not checks.same_values(first, values[name]):
                raise ValueError(
                    f"{function}: expected one value for {name!r} and the names that "
                    f"the module ties to it, got two."
                )
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(values[name])

    def __reduce__(self) -> tuple:
        return FunctionalModel, (self._between_calls(), self._defaults)

    def __repr__(self) -> str:
        kind = type(self._skeleton).__name__
        return f"FunctionalModel({kind}, {len(self.names)} tensors)"

    @property
    def _lock(self) -> Any:
        process = os.getpid()
        return self._locks.get(process) or self._locks.setdefault(
            process, threading.RLock()
        )

    def _between_calls(self) -> nn.Module:
        """Return the module as it is between calls, also after an interrupt."""
        if self._slots.filled and not self._runs():
            self._slots.end()
        return self._skeleton

    def _runs(self) -> bool:
        """Return whether a call of this function goes on in this thread."""
        frame = sys._getframe(2)
        while frame and (
            frame.f_code is not _RUN or frame.f_locals["self"] is not self
        ):
            frame = frame.f_back
        return frame is not None

    def _merged(self, params: Params, buffers: Buffers) -> dict[str, Tensor]:
        """Merge the two dictionaries into one value a name, or raise."""
        if self._shown:
            with self._lock:
                if not self._slots.filled and not self._slots.unchanged():
                    self._read()
        checks.dictionaries("fmodel", params=params, buffers=buffers)
        both = params.keys() & buffers.keys()
        if both:
            raise ValueError(
                f"fmodel(params, buffers): expected each name in one of the two, got "
                f"{checks.listed(both)} in both."
            )
        values = {**params, **buffers}
        if values.keys() != self._aliases.keys():
            if not buffers:
                values = self._of_state_dict(params)
            checks.names("fmodel(params, buffers)", self._aliases, values)
        with modes.without_modes():  # which would see each shape that is read
            checks.shapes("fmodel(params, buffers)", self._shapes, values)
        return values

    def _of_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fold tied names into their first, and add non-persistent buffers."""
        values = dict(state)
        for first, aliases in self._aliases.items():
            tied = {name: values.pop(name) for name in aliases if name in values}
            for name, value in tied.items():
                first_value = values.setdefault(first, value)
                if not checks.same_values(value, first_value):
                    raise ValueError(
                        f"fmodel(state_dict, {{}}): expected one value for the tied "
                        f"names {next(iter(tied))!r} and {name!r}, got two."
                    )
        device = next((value.device for value in values.values()), None)
        for name, default in self._defaults.items():
            values.setdefault(name, default.to(device))
        return values

    def _run(
        self, values: dict[str, Tensor], args: tuple, kwargs: dict
    ) -> tuple[Any, dict[str, Tensor]]:
        """Call the module; return its output and the values that it has left."""
        if self._hooked and modes.inside_transform() and not guards.hooks_run():
            raise RuntimeError(
                f"fmodel(params, buffers): expected a model without backward hooks, "
                f"which transforms of torch.func skip, got some on "
                f'{checks.listed(self._hooked)}. Remove them, or use strategy="loop".'
            )
        if self._parametrized and keeps_parametrized():
            raise RuntimeError(
                "fmodel(params, buffers): expected a call outside of "
                "torch.nn.utils.parametrize.cached(), which keeps the tensors of one "
                "call for the next, got one inside. Leave the block first."
            )
        tensors = dict(values)
        for name in self._copied:
            tensors[name] = with_attributes(values[name].clone(), values[name])
        followed = [*map(tensors.__getitem__, self._followed)]
        with modes.without_modes():  # which would see each attribute that is read
            versions = versions_of(followed)
            # Autograd saves no tensor of inference mode, but copies of them.
            inputs = () if self._writes else tree.tensors((args, kwargs))
            inference = any(map(Tensor.is_inference, inputs))
        if self._writes or inference:
            args, kwargs = tree.copied((args, kwargs))
        states: list[State | None] = []  # what the call leaves, if a checkpoint begins

        def at_checkpoint() -> Again:
            if not states:  # nor in a re-run, in which another checkpoint begins
                states.append(None)
            return lambda: self._repeating(states[-1])

        # Watches each op for checkpoints, of which there are none without a graph.
        watched = torch.is_grad_enabled() and not self._only_torch
        guard = rerunning(at_checkpoint) if watched else nullcontext()
        with self._lock:
            if self._slots.filled and self._runs():
                raise RuntimeError(
                    "fmodel(params, buffers): expected a call that has ended, got one "
                    "from inside of its own forward pass. Make a second function with "
                    "make_functional_with_buffers."
                )
            try:
                self._begin(tensors)
                with guard:
                    output = self._skeleton(*args, **kwargs)
                after = self._slots.values_after(tensors)
            finally:
                if states:
                    copies = {id(tensors[name]) for name in self._copied}
                    states.append(self._slots.snapshot(copies))
                self._end()
                if isinstance(guard, Reruns):
                    guard.ensure_left()
        with modes.without_modes():
            now = versions_of(followed)
        if after is tensors and now == versions:
            return output, after
        counts = zip(self._followed, versions, now, strict=True)
        written = {name for name, one, other in counts if one != other}
        written |= {name for name, value in after.items() if value is not tensors[name]}
        changed = sorted(written.difference(self._copied))
        if changed:
            raise WriteError(
                f"fmodel(params, buffers): expected a forward pass that leaves "
                f"parameters alone, but it changed {changed[0]!r}. Keep what changes "
                f"in a buffer (register_buffer) and use call_and_update."
            )
        for mode in modes.function_modes():
            if isinstance(mode, Reruns):
                names = written.intersection(self.buffer_names)
                mode.writes += [(name, values[name], after[name]) for name in names]
        return output, after

    def _begin(self, values: dict[str, Tensor]) -> None:
        self._slots.fill(values)

    def _end(self) -> None:
        self._slots.end()

    @contextmanager
    def _repeating(self, state: State | None) -> Iterator[None]:
        """Restore what a call has left; nothing where it was interrupted."""
        with self._lock, ExitStack() as stack:
            if state is not None:
                stack.enter_context(self._slots.restoring(state))
            yield


_RUN = FunctionalModel._run.__code__


def _is_of_torch(module: nn.Module) -> bool:
    """Return whether a call of a module runs code of torch itself and no other."""
    functions = (
        x for x in vars(module).values() if not isinstance(x, type | nn.Module)
    )
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and "forward" not in vars(module)
        and not has_forward_hooks(module)
        and all(
            str(getattr(function, "__module__", "")).startswith("torch")
            for function in functions  # an activation, for example
            if callable(function)
        )
    )


class BufferlessModel:
    """`fmodel(params, *args, **kwargs)`: a `FunctionalModel` that has no buffers.

    Attributes:
        with_buffers: the same as a function of `(params, buffers, *args)`, for
            `sample_loss` and the other functions of this package.
    """

    def __init__(self, with_buffers: FunctionalModel) -> None:
        self.with_buffers = with_buffers

    def __call__(self, params: Params, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module with these parameters."""
        return self.with_buffers(params, {}, *args, **kwargs)


def make_functional_with_buffers(
    model: nn.Module, *, disable_autograd_tracking: bool = False
) -> tuple[FunctionalModel, Params, Buffers]:
    """Split a module: `model -> (fmodel, params, buffers)`.

    `params` and `buffers` are dictionaries by name whose tensors share nothing with
    the module. A tied tensor appears once, under its first name, and drives every
    alias, in plain containers in attributes of the module too; a parameter in another
    object raises where it is used. Parameters require grad unless
    `disable_autograd_tracking`; a parameter that does not require grad in the module is
    a constant and comes back among the buffers.

    If the module caches a view of a parameter, or a tensor computed from one, using the
    cached tensor raises until the forward pass recomputes it; otherwise it would be a
    silent constant.

    Raises:
        TypeError: not a module, or one that cannot be copied (scripted, lazy and not
            yet initialised, wrapped for data parallelism, with hooks on parameters,
            with several of them on one memory, or with functions that close over it).

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> fmodel, params, buffers = make_functional_with_buffers(model)
        >>> x = torch.ones(4, 3)
        >>> torch.equal(fmodel(params, buffers, x), model(x))
        True
        >>> list(params), list(buffers)
        (['weight', 'bias'], [])
    """
    with RNG_LOCK:  # a call of PrivateGradients may run the module in another thread
        guards.check_plain("make_functional_with_buffers", model)
        own_buffers = slots.own_buffers(model)
        constant = own_buffers - slots.persistent(model)
        placeholders: dict[int, slots.Placeholder] = {}
        params: Params = {}
        buffers: Buffers = {}
        defaults: dict[str, Tensor] = {}
        for name, tensor in slots.named_tensors(model):
            if id(tensor) in placeholders:
                continue
            value = tensor.detach().clone()
            if id(tensor) not in own_buffers and tensor.requires_grad:
                params[name] = value.requires_grad_(not disable_autograd_tracking)
            else:
                buffers[name] = value
            if id(tensor) in constant:
                defaults[name] = value.clone()
            placeholders[id(tensor)] = slots.placeholder(tensor)
        skeleton = slots.duplicate(model, placeholders)
    return FunctionalModel(skeleton, defaults), params, buffers


def make_functional(
    model: nn.Module, *, disable_autograd_tracking: bool = False
) -> tuple[BufferlessModel, Params]:
    """Split a module that has no buffers: `model -> (fmodel, params)`.

    Raises:
        ValueError: the module has buffers, or parameters that do not require grad.
        TypeError: as `make_functional_with_buffers`.

    Example:
        >>> fmodel, params = make_functional(torch.nn.Linear(3, 2))
        >>> fmodel(params, torch.ones(4, 3)).shape
        torch.Size([4, 2])
    """
    fmodel, params, buffers = make_functional_with_buffers(
        model, disable_autograd_tracking=disable_autograd_tracking
    )
    if buffers:
        raise ValueError(
            f"make_functional({type(model).__name__}): expected a model without "
            f"buffers or frozen parameters, got {checks.listed(buffers)}. Use "
            f"make_functional_with_buffers."
        )
    return BufferlessModel(fmodel), params


def write_grads_(model: nn.Module, grads: Params) -> None:
    """Fill `.grad` of a module's parameters, for a loop that uses `torch.optim`.

    Copies each gradient and casts it to its parameter's `grad_dtype`, which is the
    parameter's own dtype unless you set it; with None it keeps its dtype. Parameters
    without a gradient get `None`, so that none of an earlier step is applied again.

    Raises:
        ValueError: a name is not a parameter of the module, or a shape is wrong.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> write_grads_(model, {"weight": torch.ones(1, 2)})
        >>> model.weight.grad
        tensor([[1., 1.]])
    """
    with RNG_LOCK:
        targets = dict(model.named_parameters(remove_duplicate=False))
    unexpected = grads.keys() - targets.keys()
    if unexpected:
        raise ValueError(
            f"write_grads_(model, grads): expected names of parameters, got "
            f"{checks.listed(unexpected)}."
        )
    checks.shapes("write_grads_(model, grads)", {n: targets[n] for n in grads}, grads)
    if len({id(targets[name]) for name in grads}) < len(grads):
        raise ValueError(
            f"write_grads_(model, grads): expected one gradient for each parameter, "
            f"got {checks.listed(grads)}, of which some name the same one."
        )
    for target in targets.values():
        target.grad = None
    for name, grad in grads.items():
        target = targets[name]
        dtype = target.grad_dtype or grad.dtype
        target.grad = grad.detach().to(target.device, dtype, copy=True)


def freeze(
    params: Params, buffers: Buffers, patterns: Patterns
) -> tuple[Params, Buffers]:
    """Move the parameters that match a shell-style pattern among the buffers.

    The moved tensors are detached; nothing is copied, the given dictionaries stay.

    Raises:
        ValueError: a pattern matches no parameter.
        TypeError: the patterns are one string.

    Example:
        >>> import torch
        >>> params = {"encoder.weight": torch.ones(2), "head.weight": torch.ones(2)}
        >>> trained, constant = freeze(params, {}, ["encoder.*"])
        >>> list(trained), list(constant)
        (['head.weight'], ['encoder.weight'])
    """
    checks.patterns("freeze", patterns=patterns)
    moved = set(checks.all_matched("freeze", params, patterns))
    trained = {name: value for name, value in params.items() if name not in moved}
    frozen = {name: params[name].detach() for name in params if name in moved}
    return trained, {**buffers, **frozen}
