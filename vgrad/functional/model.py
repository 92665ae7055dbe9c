"""A module split into a pure function, its parameters and its buffers, and back."""

import copy
import threading
from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from vgrad import checks
from vgrad.functional import refused, slots
from vgrad.functional.entries import Entries
from vgrad.functional.held import Held
from vgrad.functional.untouched import Promise, untouched
from vgrad.functional.writing import write_values_
from vgrad.generators import ALONE
from vgrad.torch_private import levels, modes
from vgrad.torch_private.tensors import version_of, with_attributes
from vgrad.tree import copied, tensors
from vgrad.typing import Buffers, Params


class FunctionalModel:
    """A module without values: `fmodel(params, buffers, *args, **kwargs) -> output`.

    Made by `make_functional_with_buffers`. A call is pure: it changes neither the
    tensors it is given nor itself. It copies buffers, inputs and tensors in plain
    attributes before the module sees them, and undoes what the forward pass sets or
    appends on the module, after an exception too. An op that would write into a
    parameter is refused before it runs, `.data` or not; only code that torch does not
    see could write: `.detach().numpy()[0] = 0`, or compiled code. Attributes that users
    put on parameters and buffers of the module (`weight.tau`) are there in a call, on
    the values in their place. A lock lets threads share one object.

    `params` and `buffers` together hold every name exactly once, each name in whichever
    of the two the caller likes. A whole `state_dict()` may stand in for `params` with
    `{}` for `buffers`. A call costs one copy of the buffers and of the inputs.

    Attributes:
        names: all entries, tied tensors under their first name only.
        buffer_names: those that are buffers of the module.
    """

    def __init__(self, skeleton: nn.Module, constants: dict[str, Tensor]) -> None:
        """Take a module of placeholders, and the values that no `state_dict` holds."""
        self._skeleton = skeleton
        self._entries = Entries(skeleton, constants)
        self._lock = threading.RLock()
        self._running = False
        firsts = self._entries.firsts
        self._slots = self._find_slots(skeleton, firsts)
        own_buffers = slots.own_buffers(skeleton)
        copied = own_buffers | slots.renormalised(skeleton)
        self._attributes = {
            name: held
            for name, held in slots.of_tensors(skeleton).items()
            if name in self._entries.aliases
        }
        self._hooked = refused.backward_hooks(skeleton)
        self._parametrized = any(map(is_parametrized, skeleton.modules()))
        self.names = tuple(self._entries.aliases)
        self.buffer_names = tuple(n for key, n in firsts.items() if key in own_buffers)
        self._copied = {name for key, name in firsts.items() if key in copied}
        # Torch's own modules write into no parameter, and into an input only if they
        # say so; watching and copying would only cost.
        self._only_torch = slots.only_of_torch(skeleton)
        in_place = any(getattr(each, "inplace", False) for each in skeleton.modules())
        self._writes = in_place or not self._only_torch
        self._watched = () if self._only_torch else set(self.names) - self._copied

    def __call__(
        self, params: Params, buffers: Buffers, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the module with these values.

        Raises:
            ValueError: an entry is missing, unexpected, of the wrong shape or in both
                dictionaries, or tied names have different values.
            RuntimeError: the forward pass changes a parameter in place, or uses a view
                of one that the module keeps.
        """
        return self._run(self._entries.merged(params, buffers), args, kwargs)[0]

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
        output, left = self._run(self._entries.merged(params, buffers), args, kwargs)
        return output, {name: left[name] for name in buffers or self.buffer_names}

    def train(self, mode: bool = True) -> "FunctionalModel":
        """Return a new function whose module is in training mode."""
        skeleton = copy.deepcopy(self._skeleton).train(mode)
        return FunctionalModel(skeleton, self._entries.constants)

    def eval(self) -> "FunctionalModel":
        """Return a new function whose module is in evaluation mode."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self._skeleton.training

    @property
    def constants(self) -> list[Tensor]:
        """The tensors in plain attributes of the module, which each call copies."""
        return [value for _, _, value in self._slots.loose]

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules, whose tensors are placeholders."""
        return self._skeleton.named_modules()

    def to_module(self, params: Params, buffers: Buffers) -> nn.Module:
        """Return a module of its own with copies of these values, ties kept.

        Its parameters require grad unless their names are in `buffers`.
        """
        module = copy.deepcopy(self._skeleton)
        own: dict[str, Tensor] = {}
        for name, given in self._entries.merged(params, buffers).items():
            own[name] = value = given.detach().clone()
            if name not in self.buffer_names:
                real_or_complex = value.is_floating_point() or value.is_complex()
                trained = name in params and real_or_complex
                own[name] = nn.Parameter(value, requires_grad=trained)
        filled = FunctionalModel(module, self._entries.constants)
        filled._slots.fill(own)
        filled._attribute(own)
        for each in module.modules():
            if isinstance(each, nn.RNNBase):
                each.flatten_parameters()  # cuDNN wants the weights in one block
        return module

    def copy_to_(self, model: nn.Module, params: Params, buffers: Buffers) -> None:
        """Write the values into a module of yours, all of them or, on error, none.

        Raises:
            ValueError: the module lacks a name, has one more, or another shape.
        """
        values, aliases = self._entries.merged(params, buffers), self._entries.aliases
        write_values_(model, {n: values[key] for key in values for n in aliases[key]})

    def __reduce__(self) -> tuple:
        """Copy and pickle by parts, since a lock can be neither."""
        return FunctionalModel, (self._skeleton, self._entries.constants)

    def __repr__(self) -> str:
        """Name the module's class and how much it holds."""
        kind = type(self._skeleton).__name__
        return f"FunctionalModel({kind}, {len(self.names)} tensors)"

    def _find_slots(self, skeleton: nn.Module, firsts: dict[int, str]) -> slots.Slots:
        return slots.Slots(skeleton, firsts)

    def _run(
        self, values: dict[str, Tensor], args: tuple, kwargs: dict
    ) -> tuple[Any, dict[str, Tensor]]:
        """Call the module with copies of what it may change; return what it left."""
        if self._hooked and levels.inside_transform():
            refused.refuse_hooks(self._hooked)
        if self._parametrized:
            refused.refuse_cached()
        own = {
            name: with_attributes(value.clone(), value)
            if name in self._copied
            else value
            for name, value in values.items()
        }
        copies = self._writes
        if not copies:  # autograd saves no tensor of inference mode, but copies of them
            with modes.without_modes():
                copies = any(each.is_inference() for each in tensors((args, kwargs)))
        if copies:
            args, kwargs = copied((args, kwargs))
        versions = _versions(own, self._copied)
        written = [own[name] for name in self._copied]
        marked = [vars(own[name]) for name in self._attributes]
        before = [(each, dict(each)) for each in marked]
        held = Held(self._slots, before, self._lock, written)
        again = None if self._only_torch else held.again
        promise = Promise({n: own[n] for n in self._watched}, _EXPECTED, _ADVICE, again)
        with self._lock:
            if self._running:
                raise RuntimeError(
                    "fmodel(params, buffers): expected a call that has ended, got one "
                    "from inside of its own forward pass. Make a second function with "
                    "make_functional_with_buffers."
                )
            self._running = True
            try:
                self._slots.fill(own)
                self._attribute(own)
                with untouched(promise):
                    output = self._skeleton(*args, **kwargs)
                left = {name: self._left(name, own[name]) for name in own}
            finally:
                held.end()
                self._running = False
        for name, version in _versions(own, self._copied).items():
            if versions[name] != version or left[name] is not own[name]:
                raise RuntimeError(f"{_EXPECTED}, but it changed {name!r}. {_ADVICE}")
        return output, left

    def _attribute(self, values: Mapping[str, Tensor]) -> None:
        """Give the values the attributes that the module's tensors have.

        Those that a value has already stay: it may be another tensor of the user's.
        """
        for name, held in self._attributes.items():
            vars(values[name]).update({**held, **vars(values[name])})

    def _left(self, name: str, given: Tensor) -> Tensor:
        """Return what the forward pass left registered under a name and its aliases."""
        found = [held.get(key) for held, key in self._slots.registered.get(name, [])]
        changed = [value for value in found if value is not given]
        new = changed[0] if changed else given
        if not isinstance(new, Tensor) or any(value is not new for value in changed):
            raise RuntimeError(
                f"fmodel(params, buffers): expected one tensor to be left in {name!r} "
                f"and the names tied to it, got {[type(each) for each in found]}."
            )
        return new


class BufferlessModel:
    """`fmodel(params, *args, **kwargs)`: a `FunctionalModel` that has no buffers.

    Attributes:
        with_buffers: the same as a function of `(params, buffers, *args)`, which is
            what `sample_loss` and the other functions of this package take.
    """

    def __init__(self, with_buffers: FunctionalModel) -> None:
        """Take the function of parameters and (no) buffers."""
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
    alias, those in plain lists and dictionaries of the module included. Parameters
    require grad unless `disable_autograd_tracking`; those that do not require grad in
    the module are constants and come back among the buffers.

    Views and results of them that the module keeps in attributes, detached or not,
    would be constants: until the forward pass has set one anew, its use raises.

    Raises:
        TypeError: not a module, or one that cannot be copied (scripted, lazy and not
            yet initialised, wrapped for data parallelism, with a parameter in a tuple,
            with hooks on parameters or with several of them on one memory).

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> fmodel, params, buffers = make_functional_with_buffers(model)
        >>> x = torch.ones(4, 3)
        >>> torch.equal(fmodel(params, buffers, x), model(x))
        True
        >>> list(params), list(buffers)
        (['weight', 'bias'], [])
    """
    with ALONE:  # a call of PrivateGradients may run the module in another thread
        return _split(model, disable_autograd_tracking)


def _split(
    model: nn.Module, disable_autograd_tracking: bool
) -> tuple[FunctionalModel, Params, Buffers]:
    refused.check_plain("make_functional_with_buffers", model)
    refused.check_closures(model)
    own_buffers = slots.own_buffers(model)
    constant = own_buffers - slots.persistent(model)
    placeholders: dict[int, slots.Placeholder] = {}
    params: Params = {}
    buffers: Buffers = {}
    constants: dict[str, Tensor] = {}
    for name, tensor in slots.named_tensors(model):
        if id(tensor) in placeholders:
            continue
        value = tensor.detach().clone()
        if id(tensor) not in own_buffers and tensor.requires_grad:
            params[name] = value.requires_grad_(not disable_autograd_tracking)
        else:
            buffers[name] = value
        if id(tensor) in constant:
            constants[name] = value.clone()
        placeholders[id(tensor)] = slots.placeholder(tensor)
    skeleton = slots.duplicate(model, placeholders)
    return FunctionalModel(skeleton, constants), params, buffers


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


_EXPECTED = (
    "fmodel(params, buffers): expected a forward pass that leaves parameters alone"
)
_ADVICE = "Keep what changes in a buffer (register_buffer) and use call_and_update."


def _versions(values: Mapping[str, Tensor], but: Container[str]) -> dict[str, int]:
    """Return how often tensors were changed in place, as far as torch counts it."""
    with modes.without_modes():  # modes have no say in it
        return {
            name: 0 if value.is_inference() else version_of(value)
            for name, value in values.items()
            if name not in but
        }
