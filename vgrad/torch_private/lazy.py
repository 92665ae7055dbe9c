"""Tensors without memory, whose values are computed wherever an op reads them.

An op that only moves or casts numbers gives another such tensor. So autograd, which
saves tensors for the backward pass, saves the way to the values and not the values.

Rests on `torch.Tensor._make_wrapper_subclass` and on `__torch_dispatch__`, which is
documented, as used in torch/distributed/tensor/_api.py; on the schemas of ops in
torch/_ops.py. A public maker of wrapper subclasses would end the need.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Lazy"]

_CAST = torch.ops.aten._to_copy.default

_SIZES = {torch.ops.aten.new_zeros.default, torch.ops.aten.new_empty.default}
_SIZES |= {torch.ops.aten.new_ones.default, torch.ops.aten.new_full.default}
"""Ops that ask a tensor for no more than its dtype and its device."""


class Lazy(Tensor):
    """A contiguous tensor of this shape, whose values `compute` returns when asked.

    Reading anything else than values of `compute` is impossible: there is no memory.
    Writing raises.
    """

    _compute: Callable[[], Tensor]
    _of: "Lazy | None" = None  # what it is a view of

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        compute: Callable[[], Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Lazy":
        """Make one that requires no grad."""
        like = torch.empty(shape, dtype=dtype, device="meta")
        return _made(compute, like, device)

    @property
    def root(self) -> "Lazy":
        """The one that it is a view of, or itself."""
        return self if self._of is None else self._of

    def value(self) -> Tensor:
        """Return the values, an ordinary tensor."""
        return self._compute()

    def data_ptr(self) -> int:
        """Refuse: there is no memory."""
        raise RuntimeError(
            "data_ptr: expected a tensor with memory, got a parameter of which this "
            "process has a part. Use a copy of it."
        )

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: there is no memory."""
        self.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Show what is known without the values."""
        return f"Lazy(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple = (),
        kwargs: Any = None,
    ) -> Any:
        """Run an op on the values, or put it off where it only moves them."""
        kwargs = dict(kwargs or {})
        if func in _SIZES:
            memory = torch.empty((), dtype=args[0].dtype, device=args[0].device)
            return func(memory, *args[1:], **kwargs)
        if _moves(func, args, kwargs):
            return _put_off(func, args, kwargs)
        _check_read_only(func, args, kwargs)
        args = pytree.tree_map_only(Lazy, Lazy.value, args)
        return func(*args, **pytree.tree_map_only(Lazy, Lazy.value, kwargs))


def _made(compute: Callable[[], Tensor], like: Tensor, device: torch.device) -> Lazy:
    """Make one of the sizes and strides of a tensor."""
    made = Tensor._make_wrapper_subclass(
        Lazy,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
    )
    made._compute = compute
    return made


def _moves(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Tell whether an op gives views or a cast of its first argument alone."""
    if not args or not isinstance(args[0], Lazy):
        return False
    leaves = pytree.tree_leaves((args[1:], kwargs))
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        return False
    if func is _CAST:
        return kwargs.get("device") in (None, args[0].device)
    returns = func._schema.returns
    infos = [each.alias_info for each in returns]
    return bool(infos) and all(each and not each.is_write for each in infos)


def _put_off(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Return what an op gives, to be computed when it is asked for."""
    source, *rest = args
    like = torch.empty_strided(
        source.shape, source.stride(), dtype=source.dtype, device="meta"
    ).as_strided(source.shape, source.stride())
    sizes = {name: each for name, each in kwargs.items() if name != "device"}
    output = func(like, *rest, **sizes)
    leaves, structure = pytree.tree_flatten(output)

    def part(number: int) -> Callable[[], Tensor]:
        return lambda: pytree.tree_leaves(func(source.value(), *rest, **kwargs))[number]

    parts = [
        _made(part(number), each, source.device) for number, each in enumerate(leaves)
    ]
    for each in parts:
        if func is not _CAST:
            each._of = source.root
    return pytree.tree_unflatten(parts, structure)


def _check_read_only(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Refuse to write."""
    for place, argument in enumerate(func._schema.arguments):
        info = argument.alias_info
        if info is None or not info.is_write:
            continue
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        if any(isinstance(leaf, Lazy) for leaf in pytree.tree_leaves(given)):
            raise RuntimeError(
                f"{func}: expected a parameter that is only read, got one that is "
                f"written to, of which this process has a part. Copy it first."
            )
