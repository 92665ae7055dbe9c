"""The function mode inside of a loss.

Every call of torch in a loss goes through a list of handlers, in order. The first one
that returns a result ends it; a handler that leaves the call to the next one returns
`NONE`. The strategies differ in their lists.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from vgrad.conditions import Unrepeatable
from vgrad.functional.batch_norm import mended, normalises, refuse_batch_statistics
from vgrad.functional.guards import Again, Protected, Reruns, protect
from vgrad.generators import (
    RandomState,
    drawn_since,
    random_state,
)
from vgrad.loss.functions import custom_function, for_samples
from vgrad.loss.grad_flags import (
    AUTOGRAD,
    HOOKS,
    REQUIRES_GRAD,
    RESHAPES,
    UnsupportedOp,
    VmapLevel,
    among,
    is_plain_read,
    is_refused,
    own_backward_pass,
    raise_clearly,
    requires_grad,
)
from vgrad.loss.made import MAKERS, Rooms, copied, is_mapped
from vgrad.loss.randomness import Draws
from vgrad.loss.values import (
    NONE,
    Partition,
    SplitBatch,
    of_each,
    physical,
    read_value,
    unanimous,
    where,
    with_numbers,
)
from vgrad.loss.writes import may_write, written
from vgrad.ops.record import OPS, Form
from vgrad.torch_private import autograd, modes
from vgrad.torch_private.autograd import is_foreign_op
from vgrad.torch_private.control import CONTROL_FLOW, uncompiled
from vgrad.torch_private.tensors import memory, version_of

Handler = Callable[["LossMode", Callable, tuple, dict], Any]
"""From the mode, a function of torch and its arguments to the result, or `NONE`."""


class LossMode(Reruns):
    """The function mode under which a loss runs."""

    def __init__(
        self,
        *protected: Protected,
        handlers: Sequence[Handler] = (),
        vmap: VmapLevel | None = None,
        draws: Draws | None = None,
        looped: dict[str, str] | None = None,
        hooks: dict[str, str] | None = None,
        is_parameter: Callable[[Tensor], bool] = lambda _: False,
        rooms: Rooms | None = None,
        seen: bool = False,
        captured: bool = False,
    ) -> None:
        self.draws = draws = draws or Draws()
        super().__init__()
        for group in protected:
            if group.at_checkpoint is not None:
                self._callbacks.append(group.at_checkpoint)
        if draws.keys is not None:  # a checkpoint draws by its place in the loss
            self._callbacks.append(draws.restorer)
        self._protected = protected
        self._handlers = handlers
        self.vmap = vmap  # None for one sample or member by itself
        self.looped = {} if looped is None else looped  # autograd.Functions, and lines
        self.hooks = {} if hooks is None else hooks  # on gradients, and lines
        self.is_parameter = is_parameter
        self.rooms = rooms  # of a run that may be repeated
        self.seen = seen  # whether it has run under vmap, where batch norms are refused
        self.captured = captured  # whether no value may be read
        self.size = 1  # how many samples or members run at once
        self.randomness = "error"  # as of `torch.vmap`
        self._before: RandomState | None = None  # where numbers have no keys
        self._stopped: BaseException | None = None
        self._watched: Callable[..., AbstractContextManager] = nullcontext
        self._casts: Callable[[], AbstractContextManager] = nullcontext
        self._later: list[list[Again]] = []
        # Tensors into which a write would be another one for one sample, and versions.
        self._doubtful: list[tuple[Tensor, int]] = []
        self.grads: dict[int, tuple[Tensor, Tensor | None]] = {}  # of leaves, as before
        # Makes the mode that casts for autocast, entered where the loss turns that on.
        self.waiting: Callable[[], AbstractContextManager] | None = None

    @contextmanager
    def inside(
        self,
        size: int,
        randomness: str,
        casts: Callable[[], AbstractContextManager],
        *,
        unbatched: bool = False,
    ) -> Iterator[None]:
        """Watch a loss of that many samples or members, or of an unbatched one."""
        self.size, self.randomness, captured = size, randomness, self.captured
        unkeyed = randomness == "different" and self.draws.keys is None
        if unkeyed and self.vmap is not None and not captured:
            self._before = random_state(self._protected[0].tensors.values())
        self._watched = partial(
            self.draws.watched, unbatched=unbatched, captured=captured
        )
        self._casts = casts
        unwritten = protect(*self._protected)
        try:
            with unwritten, uncompiled(), self, self._watched(), self._casting():
                yield
            if self._doubtful:
                self._check_writes()
        finally:
            if self._entered:
                self.ensure_left()
            self._doubtful.clear()
            self.waiting = None
            for leaf, grad in self.grads.values():
                leaf.grad = grad

    def _casting(self) -> AbstractContextManager:
        """Return a block that casts the arguments of ops while torch's autocast is on.

        The mode for that waits until it is: it would take as long as a small op.
        """
        on = modes.autocast_is_on()
        self.waiting = None if on else cache(self._casts)
        return self._casts() if on else nullcontext()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_plain_read(func):
            return func(*args, **kwargs)
        if autograd.innermost_hooks(False) is not None:
            self.look_at_hooks()
        if self.waiting is not None and modes.autocast_is_on():
            waiting, self.waiting = self.waiting, None
            try:
                with self, waiting():
                    return func(*args, **kwargs)
            finally:
                self.waiting = waiting
        if (run := CONTROL_FLOW.get(func)) is not None:
            with self:
                return run(*args, **kwargs)
        targets: list[Tensor] = []
        if may_write(func) or (kwargs and not _OPTIONS.isdisjoint(kwargs)):
            targets = written(func, args, kwargs)
            if kwargs.get("generator") is not None:
                self.draws.used_generator = True
        handlers = self._handlers
        try:
            if targets and (split := self._room(targets, func, args, kwargs)):
                raise split
            if func is Tensor.register_hook:
                self.note_hook("register_hook")
                self.doubt(args[0])  # a write may replace the node
            for handle in handlers[-1:] if is_ordinary(func) else handlers:
                if (output := handle(self, func, args, kwargs)) is not NONE:
                    return output
            return func(*args, **kwargs)
        except (SplitBatch, RuntimeError) as error:
            if self.vmap is None:
                raise
            if targets and isinstance(error, RuntimeError):
                error = self._room(targets) or error
            arguments = None
            if any(message in str(error) for message in modes.ITEM_ERRORS):
                arguments = with_numbers(self, func, args, kwargs)
            if arguments is not None:
                try:
                    self.note_read()
                    return self.__torch_function__(func, types, *arguments)
                except (TypeError, AttributeError):
                    pass  # it takes tensors alone
            self._stop(error, func, args, kwargs)

    def doubt(self, *tensors: Any) -> None:
        """Note tensors into which a write is another one for one sample."""
        if self.vmap is not None:
            below = [modes.unwrap_all(tensor) for tensor in tensors]
            self._doubtful.extend((tensor, version_of(tensor)) for tensor in below)

    def reshaped(self, tensor: Tensor, output: Tensor) -> None:
        """Note a copy where one sample may have a view."""
        one, other = modes.unwrap_all(tensor), modes.unwrap_all(output)
        if memory(one) != memory(other):
            self.doubt(tensor, output)

    def _check_writes(self) -> None:
        """Refuse writes that would be others for one sample."""
        if self.vmap and any(version_of(x) != before for x, before in self._doubtful):
            one, otherwise = self.vmap.one, self.vmap.otherwise
            raise UnsupportedOp(
                f"loss: expected writes in place whose target is the same for one "
                f"{one} and for all, got one behind a reshape, flatten or contiguous "
                f"that copies here, or into a tensor with a hook. Write into a clone, "
                f"or use {otherwise}."
            )

    def note_read(self) -> None:
        """Note that Python gets a value; run again with keys if it may be a draw."""
        self.draws.values_read = True
        if self._before is not None:
            with modes.without_modes():
                drew = drawn_since(self._before, self._protected[0].tensors.values())
            if drew:
                every = Partition([torch.arange(self.size)], "", keyed=True)
                raise SplitBatch(every, self._level)

    def note_hook(self, name: str) -> None:
        """Note the line of a hook on a gradient."""
        self.hooks.setdefault(name, where(sys._getframe()))

    def _room(
        self, targets: list[Tensor], func: Any = None, args: Any = (), kwargs: Any = ()
    ) -> SplitBatch | None:
        """Return the repetition that a write needs into a tensor of all samples."""
        # Without arguments the write has failed.
        if self.rooms is None or self.vmap is None or func in AUTOGRAD:
            return None
        if self.rooms.line:
            return None
        level = self._level
        with modes.without_modes():
            if func is not None:
                others = among(args, kwargs)
                targets = [target for target in targets if not is_mapped(target, level)]
                per_sample = self.differ(others) or any(map(self.is_parameter, others))
                if not (targets and per_sample):
                    return None
        self.rooms.line = where(sys._getframe())
        if self.captured:
            raise Unrepeatable(f"{modes.op_name(func)} needs a tensor a sample")
        return SplitBatch(Partition([torch.arange(self.size)], ""), level)

    def differ(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether some tensors are one for each sample or member."""
        return any(is_mapped(tensor, self._level) for tensor in tensors)

    def _stop(
        self,
        error: SplitBatch | RuntimeError,
        func: Callable,
        args: tuple,
        kwargs: dict,
    ) -> NoReturn:
        """Raise an error of the loss in words that say what to do, and remember it."""
        assert self.vmap is not None
        try:
            if isinstance(error, SplitBatch):
                self.draws.values_read |= len(error.parts.rows) > 1
                raise error
            writes, one = bool(written(func, args, kwargs)), self.vmap.one
            raise_clearly(error, modes.op_name(func), in_place=writes, one=one)
        except (SplitBatch, UnsupportedOp) as stopped:
            self._stopped = stopped
            raise
        finally:
            del error  # which would keep this frame, and all tensors of its callers

    def __exit__(self, *raised: Any) -> None:
        # Even if the loss caught an error: it would not have stopped a single sample.
        super().__exit__(*raised)
        stopped, self._stopped = self._stopped, None
        if stopped is not None and stopped is not raised[1]:
            raise stopped

    # Activation checkpoints, which run again in the backward pass.

    @contextmanager
    def repeating(self, *args: Any) -> Iterator[None]:
        """Restore the mode of the beginning of a checkpoint, under a vmap like it."""
        watched = self._watched(repeated=True)
        waiting = self.waiting
        with ExitStack() as stack:
            if self.vmap is not None:
                level = stack.enter_context(
                    modes.vmap_level(self.size, self.randomness)
                )
                if level != self.vmap.level:
                    raise UnsupportedOp(
                        "checkpoint: expected a region that runs again by itself, got "
                        "one inside of another or of a transform. Use "
                        'strategy="loop".'
                    )
            stack.enter_context(uncompiled())
            for block in (super().repeating(*args), watched):
                stack.enter_context(block)
            try:
                with self._casting():
                    yield
            finally:
                self.waiting = waiting

    def releasable(self, rerun: Again) -> Again:
        """Return a function that refers to nothing after `close`."""
        later = [rerun]
        self._later.append(later)

        def run() -> AbstractContextManager:
            if not later:
                raise own_backward_pass("loss")
            return later[0]()

        return run

    def close(self) -> None:
        """Let go of checkpoints that never ran again, in cycles Python cannot see."""
        for later in self._later:
            later.clear()

    def is_shared(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the same for all samples, as far as is known."""
        if self.vmap is None:
            return self.seen
        with modes.without_modes():
            return self.values(tensor) is None

    # The methods of `Samples`.

    def values(self, tensor: Tensor) -> Tensor | None:
        return physical(tensor, self._level)

    def logical(self, tensor: Tensor) -> Tensor:
        return modes.add_batch_axis(tensor, 0, self._level)

    def outside(self) -> AbstractContextManager:
        return modes.exit_to(self._level)

    def drawing(self, axis: int | None) -> AbstractContextManager:
        return self.draws.samples_at(axis)

    def agreed(self, tensor: Tensor, read: Callable = Tensor.item) -> Any:
        value = read_value(self, read, (tensor,), {})
        return read(tensor) if value is NONE else value

    def stacked(self, func: Callable, args: tuple, kwargs: dict) -> Form | None:
        level, tensors = self._level, among(args, kwargs)
        if any(tensor.requires_grad for tensor in tensors):
            return None
        if self.captured and any(physical(x, level) is not None for x in tensors):
            raise Unrepeatable(f"the shape of {modes.op_name(func)} depends on values")
        with self.outside():  # else the transforms inside wrap the results
            outputs = of_each(func, args, kwargs, level)
        if outputs is None:
            return None
        rows = [row if isinstance(row, tuple) else (row,) for row in outputs]
        unanimous([[tensor.shape for tensor in row] for row in rows], level)
        columns = zip(*rows, strict=True)
        with self.outside():
            stacked = [torch.stack(column).to(tensors[0].device) for column in columns]
        results = tuple(map(self.logical, stacked))
        return lambda: results if isinstance(outputs[0], tuple) else results[0]

    @property
    def _level(self) -> int:
        assert self.vmap is not None
        return self.vmap.level


_OPTIONS = {"out", "generator"}
"""Arguments that make a call out of the ordinary, of whichever function."""


@lru_cache(maxsize=4096)
def is_ordinary(func: Callable) -> bool:
    """Return whether the last handler alone has something to do for a function."""
    op = OPS.get(func)
    return not (
        (op is not None and (op.read or op.selected))
        or func is modes.custom_function_call
        or func in modes.ASKING
        or is_refused(func)
        or is_foreign_op(func)
        or normalises(func)
    )


# Handlers.


def checkpoints(mode: LossMode, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run the function by which torch's checkpoints save their arguments."""
    if func is modes.custom_function_call:
        if args[0] is autograd.Reentrant:
            raise UnsupportedOp(autograd.REENTRANT_ERROR)
        if args[0] is autograd.SAVES_ARGUMENTS:
            return autograd.SavedArguments(*args[2:])
    return NONE


def refusals(mode: LossMode, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Refuse a batch norm that has no per-sample gradient; else as `checkpoints`."""
    if func is modes.custom_function_call:
        return checkpoints(mode, func, args, kwargs)
    refuse_batch_statistics(func, args, kwargs, mode.is_shared)
    return NONE


def one_sample(mode: LossMode, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a call for one sample by itself, which has `.grad` of others for itself."""
    for node in autograd.graph_nodes(args[:1]) if func is Tensor.backward else ():
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in mode.grads:
            mode.grads[id(leaf)] = leaf, leaf.grad
            leaf.grad = None if leaf.grad is None else leaf.grad.clone()
    if func is Tensor.requires_grad_ and not modes.is_wrapped(args[0]):
        with modes.exit_all():  # inside of transforms it raises
            return func(*args, **kwargs)
    return mended(func, func(*args, **kwargs))


def reads(mode: LossMode, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Hand a value to Python, if all samples or members have the same."""
    op = OPS.get(func)
    if op is None or op.read is None:
        return NONE
    assert mode.vmap is not None
    value = read_value(mode, func, args, kwargs)
    if value is not NONE:
        mode.note_read()
    return value


def selections(mode: LossMode, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a call whose shapes depend on values, if all samples agree."""
    op = OPS.get(func)
    if op is None or op.selected is None:
        return NONE
    if (form := op.selected(mode, *args, **kwargs)) is None:
        return NONE
    mode.note_read()
    with mode:
        return form()


def at_once(run: Handler) -> Handler:
    """Return a handler that runs calls for all samples or members at once."""

    def handle(mode: LossMode, func: Callable, args: tuple, kwargs: dict) -> Any:
        assert mode.vmap is not None
        if not is_ordinary(func):
            with modes.without_modes():  # a loss around this one has modes of its own
                if func == REQUIRES_GRAD:
                    return requires_grad(args[0])
                mode.vmap.refuse(func, among(args, kwargs))
        output = run(mode, func, args, kwargs)
        if func in RESHAPES:
            mode.reshaped(args[0], output)
        if mode.rooms is not None and mode.rooms.line and func in MAKERS:
            output = copied(mode, output)
        return output

    return handle


def run_op(mode: LossMode, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run one op in the form that it has under vmap."""
    if func is not modes.custom_function_call:
        op = OPS.get(func)
        run = func if op is None or op.mapped is None else op.mapped
        return run(*args, **kwargs)
    with mode.draws.samples_at(None):  # its random numbers have any layout
        output, looped = for_samples(mode, args[0], args[1:], kwargs)
    if looped:
        mode.looped.setdefault(args[0].__name__, where(sys._getframe()))
    return output


SINGLE = refusals, one_sample
"""The handlers for one sample by itself."""

SAMPLES = refusals, reads, selections, at_once(run_op)
"""The handlers for all samples under vmap."""


def of_members(
    on_form: Callable[[str, str], None] | None = None, *, chosen: bool = True
) -> tuple[Handler, ...]:
    """Return the handlers for all members under vmap, each op in its best form.

    `on_form` is an optional callback, invoked once per op that has several forms, with
    the names of the op and of the form. With `chosen=False` all ops run in torch's own
    way, except ops that it runs member by member, wrongly or not at all.
    """

    def run(mode: LossMode, func: Callable, args: tuple, kwargs: dict) -> Any:
        if func in HOOKS:
            with modes.without_modes():
                wanted = requires_grad(args[0])
            if wanted:  # also on tensors that all members share
                assert mode.vmap is not None
                raise mode.vmap.refusal(func)
        op = OPS.get(func)
        if op is not None and op.mapped is not None:
            return op.mapped(*args, **kwargs)
        if modes.is_python(func):
            with mode:
                return modes.opened(func)(*args, **kwargs)
        if func is modes.custom_function_call:
            if (output := checkpoints(mode, func, args, kwargs)) is not NONE:
                return output
            with mode.draws.samples_at(None):  # its random ops have axes of their own
                return custom_function(*args, **kwargs)
        if op is None or op.per_member is None or not chosen:
            return func(*args, **kwargs)
        form, name = op.per_member(*args, **kwargs)
        if on_form is not None:
            on_form(modes.op_name(func), name)
        return func(*args, **kwargs) if form is None else form()

    return reads, at_once(run)


def unchanged(tensors: Mapping[str, Tensor]) -> Protected:
    """Protect the arguments of a loss."""
    expected = "loss: expected one that changes nothing it is given"
    return Protected(tensors, expected, "Copy it first.")
