"""Private properties of tensors, modules and ops; lazy tensors; random ops.

Torch's own Python code relies on all of them: torch/_tensor.py, torch/_ops.py,
torch/nn/modules/module.py, torch/multiprocessing/reductions.py, torch/_dynamo/guards.py
and torch/distributed/tensor/_api.py, which makes wrapper subclasses.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from vgrad.torch_private.modes import exit_all

__all__ = ["BatchNorm", "NormBase"]


_CAST = torch.ops.aten._to_copy.default

_SIZES = {torch.ops.aten.new_zeros.default, torch.ops.aten.new_empty.default}
_SIZES |= {torch.ops.aten.new_ones.default, torch.ops.aten.new_full.default}
"""Ops that ask a tensor for no more than its dtype and its device."""


class Lazy(Tensor):
    """A contiguous tensor without memory, whose values `compute` returns; read-only.

    Views and casts of one are lazy, so autograd saves the recipe, not the values.
    """

    _compute: Callable[[], Tensor]
    _of: "Lazy | None" = None  # the base of a view

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        compute: Callable[[], Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Lazy":
        like = torch.empty(shape, dtype=dtype, device="meta")
        return _lazy(compute, like, device)

    @property
    def root(self) -> "Lazy":
        """The one that it is a view of, or itself."""
        return self if self._of is None else self._of

    def value(self) -> Tensor:
        """Return the values, an ordinary tensor."""
        return self._compute()

    def data_ptr(self, *_: Any, **__: Any) -> Any:
        """Refuse: there is no memory."""
        raise RuntimeError(
            "data_ptr: expected a tensor with memory, got a parameter of which this "
            "process has a part. Use a copy of it."
        )

    __dlpack__ = data_ptr

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Lazy(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _SIZES:
            memory = torch.empty((), dtype=args[0].dtype, device=args[0].device)
            return func(memory, *args[1:], **kwargs)
        if _moves(func, args, kwargs):
            return _put_off(func, args, kwargs)
        for written_to in pytree.tree_leaves([*arguments_written(func, args, kwargs)]):
            if isinstance(written_to, Lazy):
                raise RuntimeError(
                    f"{func}: expected a parameter that is only read, got one that is "
                    f"written to, of which this process has a part. Copy it first."
                )
        args, kwargs = pytree.tree_map_only(Lazy, Lazy.value, (args, kwargs))
        return func(*args, **kwargs)


def _lazy(compute: Callable[[], Tensor], like: Tensor, device: torch.device) -> Lazy:
    lazy = Tensor._make_wrapper_subclass(
        Lazy,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
    )
    lazy._compute = compute
    return lazy


def _moves(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    # Whether an op gives views or a cast of its first argument alone.
    if not args or not isinstance(args[0], Lazy):
        return False
    leaves = pytree.tree_leaves((args[1:], kwargs))
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        return False
    if func is _CAST:
        return kwargs.get("device") in (None, args[0].device)
    returns = func._schema.returns
    infos = [result.alias_info for result in returns]
    return bool(infos) and all(info and not info.is_write for info in infos)


def _put_off(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    source, *rest = args
    like = torch.empty_strided(
        source.shape, source.stride(), dtype=source.dtype, device="meta"
    ).as_strided(source.shape, source.stride())
    sizes = {n: value for n, value in kwargs.items() if n != "device"}
    output = func(like, *rest, **sizes)
    leaves, structure = pytree.tree_flatten(output)

    def part(number: int) -> Callable[[], Tensor]:
        return lambda: pytree.tree_leaves(func(source.value(), *rest, **kwargs))[number]

    parts = [
        _lazy(part(number), lazy, source.device) for number, lazy in enumerate(leaves)
    ]
    for lazy in parts:
        if func is not _CAST:
            lazy._of = source.root
    return pytree.tree_unflatten(parts, structure)


GRAPH = ("_grad_fn", "_backward_hooks", "_post_accumulate_grad_hooks")
"""Private attributes that tell of a tensor's graph."""

MEMORY = ("_version", "_base")
"""Private attributes that tell of a tensor's memory."""

IS_VIEW = Tensor._is_view
"""The method that does the same."""

OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""The classes of ops in `torch.ops`."""

_KINDS = ("pre_hooks", "hooks")

HOOKS = [f"_{pass_}_{kind}" for pass_ in ("forward", "backward") for kind in _KINDS]
"""The attributes of a module that hold the hooks on its calls."""

GLOBAL_HOOKS = tuple(getattr(modules, f"_global{name}") for name in HOOKS)
"""Hooks on the calls of all modules, by number."""


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often the memory of a tensor was written to in place."""


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often the memory of tensors was written to, zero in inference mode."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a test of whether other tensors are like these in all but their values."""
    # It compares classes, shapes, strides, dtypes, devices, and which of them require
    # grad if grad mode is on, in 0.1 us for each. No tensor may be there twice.
    # None: no size is dynamic.
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return guards.check


def with_attributes(stand_in: Tensor, tensor: Tensor) -> Tensor:
    """Return `stand_in` with the attributes that users put on `tensor`."""
    if attributes := vars(tensor):
        vars(stand_in).update({**attributes, **vars(stand_in)})
    return stand_in


viewed: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that another one is a view of; None if it is no view."""


def leaf(value: Tensor) -> Tensor:
    """Return a leaf of the same memory that requires grad."""
    # Inside a transform `requires_grad_()` raises, even on tensors from outside.
    with exit_all():
        return value.detach().requires_grad_()


def memory(tensor: Tensor) -> int | None:
    """Return an address that identifies memory; None without ordinary storage."""
    if isinstance(tensor, Lazy):
        tensor = tensor.root
    if not torch._C._has_storage(tensor):
        return None
    return tensor.untyped_storage()._cdata


def storage(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to the memory, equal for all tensors that share it."""
    return StorageWeakRef(tensor.untyped_storage())


def has_hooks(tensor: Tensor) -> bool:
    """Return whether hooks wait for the gradient of a tensor."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


REGISTRIES = ("_parameters", "_buffers", "_modules")
"""The attributes of a module that hold its parameters, buffers and children."""


def registered(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the very dictionaries of a module's parameters, buffers and children."""
    return module._parameters, module._buffers, module._modules


def persistent(module: nn.Module) -> Iterator[Tensor | None]:
    """Yield the buffers of a module that its `state_dict()` holds."""
    for name, buffer in module._buffers.items():
        if name not in module._non_persistent_buffers_set:
            yield buffer


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` has made a module of another one."""
    return "_orig_mod" in module._modules


def keeps_parametrized() -> bool:
    """Return whether a block of `parametrize.cached()` runs: results stay in there."""
    return parametrize._cache_enabled > 0


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether hooks run when a module is called."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether hooks run when a gradient passes a module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def makes_memory(op: Any) -> bool:
    """Return whether an op returns nothing but new memory."""
    returns = getattr(getattr(op, "_schema", None), "returns", ())
    return bool(returns) and all(result.alias_info is None for result in returns)


def shared(op: Any) -> Iterator[tuple[int, str]]:
    """Yield place and name of the arguments whose memory an op may return."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None:
            yield place, argument.name


def written(op: Any) -> Iterator[tuple[int, str, bool]]:
    """Yield place, name and whether by keyword only, of arguments that an op writes."""
    packet = isinstance(op, torch._ops.OpOverloadPacket)
    for overload in [getattr(op, name) for name in op.overloads()] if packet else [op]:
        for place, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield place, argument.name, argument.kwarg_only


def op_name(op: Any) -> str:
    """Return the name of an op of aten, the same for its form in place."""
    return getattr(op, "overloadpacket", op).__name__.rstrip("_")


def may_draw(op: Any) -> bool:
    """Return whether an op may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def named(op: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return all arguments of a call of an op by their names, defaults included."""
    arguments = op._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    names = (argument.name for argument in arguments)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def writes(op: Any) -> bool:
    """Return whether an op writes into one of its arguments."""
    return next(written(op), None) is not None


def shown_results(op: Any, args: tuple, kwargs: dict, result: Any) -> list[Tensor]:
    """Return the results of an op and the tensors it wrote into, each once."""
    returned = result if isinstance(result, tuple | list) else (result,)
    both = (*arguments_written(op, args, kwargs), *returned)
    tensors = {id(tensor): tensor for tensor in both if isinstance(tensor, Tensor)}
    return [*tensors.values()]


def arguments_written(op: Any, args: tuple, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an op writes into."""
    for place, name, by_keyword in written(op):
        yield args[place] if not by_keyword and place < len(args) else kwargs.get(name)


SHOWN = {
    *("bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal"),
    *("multinomial", "native_dropout", "normal", "normal_functional", "poisson"),
    *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random"),
    *("randperm", "rrelu_with_noise", "rrelu_with_noise_functional", "uniform"),
    *("_fused_dropout", "_sample_dirichlet", "_standard_gamma"),
}
"""Random ops whose results, or written arguments, show all the numbers they drew."""
