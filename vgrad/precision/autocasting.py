"""Autocast that works under `vmap`, `grad` and every other transform of `torch.func`.

Torch decides on dtypes below the transforms, where an op may have become another one:
under `torch.vmap` a convolution on a CPU stays in float32, `nn.Linear` returns float32,
and a layer norm of that raises. Here a function mode decides above them, for each op as
the model calls it, from torch's own state and by torch's own lists.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vgrad.lowering.vmapped import VMAPPED
from vgrad.precision.ops import KINDS, Kind
from vgrad.torch_private import modes
from vgrad.torch_private.tensors import version_of
from vgrad.tree import tree_leaves, tree_map_only


@cache
def tell_slow() -> None:
    """Warn of float16 on a CPU, once in the life of a process."""
    warnings.warn(
        "autocast: float16 on a CPU is slow, since few of them have arithmetic for it; "
        "the numbers are right. Take bfloat16, as the policy mixed_bfloat16 does.",
        stacklevel=3,
    )


class autocast(torch.autocast):
    """`torch.autocast` that also holds under the transforms of `torch.func`.

    The arguments, the lists of ops and the results are those of `torch.autocast` for
    the device; an inner `torch.autocast(device_type, enabled=False)` counts, too. Ops
    outside of transforms are left to torch. The transforms of vgrad do the same by
    themselves under a plain `torch.autocast`.

    The transforms of vgrad cast weights once per forward pass. In transforms of
    `torch.func` that a region contains, weights are cast at each use: a cast kept from
    one transform to the next would be a constant there, with a gradient of zero.

    Example:
        >>> x, weight = torch.ones(3, 4, 5), torch.ones(2, 5)
        >>> linear = lambda x: torch.nn.functional.linear(x, weight, torch.ones(2))
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     torch.vmap(linear)(x).dtype
        torch.bfloat16
    """

    def __enter__(self) -> "autocast":
        """Switch on."""
        options = (self.device, self.fast_dtype, self._enabled, self._cache_enabled)
        if options[:3] == ("cpu", torch.float16, True):
            tell_slow()
        region = ExitStack()
        region.enter_context(torch.autocast(*options))
        # A transform of vgrad has set one already, which knows the weights.
        stack = modes.function_modes()
        if not any(isinstance(mode, AutocastMode) for mode in stack):
            region.enter_context(AutocastMode())
        # torch's context keeps the state to restore for one region at a time.
        self._regions = [*getattr(self, "_regions", ()), region]
        return self

    def __exit__(self, *error: Any) -> Any:
        """Switch off."""
        *self._regions, region = self._regions
        return region.__exit__(*error)

    def __call__(self, func: Callable) -> Callable:
        """Decorate a function: each call is a region of its own, in any thread."""
        if not callable(func):
            raise TypeError(
                f"autocast({self.device!r})(func): expected a function to decorate, "
                f"got {type(func).__name__}. Use `with autocast(...):` around a block."
            )
        options = (self.device, self.fast_dtype, self._enabled, self._cache_enabled)

        @wraps(func)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with autocast(*options):
                return func(*args, **kwargs)

        return inside


class AutocastMode(TorchFunctionMode):
    """The function mode that casts the arguments of ops while torch's autocast is on.

    It casts `weights` once in its life, at the level where it was made.
    """

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        """Take the weights, which the caller keeps alive."""
        super().__init__()
        self._weights = {id(weight) for weight in weights}
        self._casts: dict[tuple, Tensor] = {}
        self._level = modes.current_level()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run one call."""
        kwargs = kwargs or {}
        if not modes.autocast_is_on():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **kwargs)
        if modes.current_level() is None and not _clashes(name, args, kwargs):
            return func(*args, **kwargs)
        if func is modes.custom_function_call:  # whose insides torch casts
            return func(*args, **kwargs)
        device = _device(args, kwargs)
        if device not in KINDS or not torch.is_autocast_enabled(device):
            return func(*args, **kwargs)
        kind = _kind(device, name, args, kwargs)
        if kind is Kind.INSIDE:
            return func(*args, **kwargs)
        if kind is Kind.STEPS:
            with self:
                return VMAPPED[func](*args, **kwargs)
        if kind is None and name not in _WHOLE and modes.is_python(func):
            with self:
                return modes.opened(func)(*args, **kwargs)
        low = torch.get_autocast_dtype(device)
        torch.set_autocast_enabled(device, False)
        try:
            return self._run(kind, func, args, kwargs, low)
        finally:
            torch.set_autocast_enabled(device, True)

    def _run(
        self,
        kind: Kind | None,
        func: Callable,
        args: tuple,
        kwargs: dict,
        low: torch.dtype,
    ) -> Any:
        """Run one op with its inputs in the dtypes that its kind asks for."""
        match kind:
            case None:
                return func(*args, **kwargs)
            case Kind.LOW:
                to = low
            case Kind.FLOAT32:
                to = None if kwargs.get("dtype") is not None else torch.float32
            case Kind.WIDEST:
                dtypes = {each.dtype for each in _eligible(args, kwargs)}
                to = torch.float32 if torch.float32 in dtypes else None
            case Kind.NORM:
                to = None if _mixes(func, args, kwargs) else torch.float32
            case _:
                raise RuntimeError(
                    f"{modes.op_name(func)}: expected an op that is safe to autocast. "
                    f"Its gradient overflows in {low}: use the form that takes logits, "
                    f"or torch.autocast(..., enabled=False) around it."
                )
        dtypes = [each.dtype for each in _eligible(args, kwargs)]
        statistics = _statistics(func, args, kwargs)
        if to is not None and any(dtype != to for dtype in dtypes):
            args, kwargs = self._cast((args, kwargs), to)
        output = func(*args, **kwargs)
        updated = _statistics(func, args, kwargs)
        for old, new in zip(statistics, updated, strict=True):
            if new is not old:
                old.copy_(new)
        return output.to(dtypes[0]) if kind is Kind.NORM and dtypes else output

    def _cast(self, tree: Any, dtype: torch.dtype) -> Any:
        """Cast the tensors of a tree that autocast may cast."""

        def cast(leaf: Tensor) -> Tensor:
            if not _may_cast(leaf) or leaf.dtype == dtype:
                return leaf
            here = modes.current_level() == self._level
            if not here or id(leaf) not in self._weights:
                return leaf.to(dtype)
            with modes.without_modes():  # modes have no say in it
                written = version_of(leaf)
            key = (id(leaf), written, dtype, torch.is_grad_enabled())
            if key not in self._casts:
                self._casts[key] = leaf.to(dtype)
            return self._casts[key]

        return tree_map_only(Tensor, cast, tree)


_WHOLE = {"layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm"}
_WHOLE |= {"embedding", "embedding_bag"}
"""Python functions of torch that call no op of the lists."""


def _kind(device: str, name: str, args: tuple, kwargs: dict) -> Kind | None:
    """Return what is done to an op, which for some depends on its arguments."""
    table = KINDS[device]
    if kwargs.get("out") is not None:
        return None  # torch has no kernels of autocast for these
    if name == "pad":
        mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
        inner = {"reflect": "reflection", "replicate": "replication"}.get(mode)
        pads = kwargs.get("pad", args[1] if len(args) > 1 else ())
        return table.get(f"{inner}_pad{len(pads) // 2}d", Kind.INSIDE)
    kind = table.get(name)
    if kind is Kind.PRODUCT:
        return None if _one_number(name, args, kwargs) else Kind.LOW
    return kind


def _clashes(name: str, args: tuple, kwargs: dict) -> bool:
    """Tell whether a batch norm has low weights beside statistics in float32.

    Torch refuses that, which policies with low parameters lead to.
    """
    if name != "batch_norm":
        return False
    return len({each.dtype for each in _eligible(args, kwargs)[1:]}) > 1


def _mixes(func: Callable, args: tuple, kwargs: dict) -> bool:
    """Tell whether a batch norm reads a low input beside float32, as in eager mode.

    The kernel computes in float32 all the same, but keeps no float32 copy of the input
    for the backward pass. Under `torch.vmap` it wants one dtype. Where there is just
    one, running statistics stay what the kernel updates in place.
    """
    if getattr(func, "__name__", "") != "batch_norm":
        return False
    if len({each.dtype for each in _eligible(args, kwargs)}) == 1:
        return True
    if modes.active_transforms() != ("Grad",):
        return False
    others = _eligible(args, kwargs)[1:]  # float64 is none of them
    return all(each.dtype == torch.float32 for each in others)


def _statistics(func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the running statistics that a norm updates in place."""
    if func not in _FIRST_STATISTICS:
        return []
    by_default = func is F.instance_norm
    own = kwargs.get("training", kwargs.get("use_input_stats", by_default))
    if not (args[5] if len(args) > 5 else own):
        return []
    first = _FIRST_STATISTICS[func]
    found = [kwargs.get("running_mean"), kwargs.get("running_var")]
    found += args[first : first + 2]
    return [each for each in found if isinstance(each, Tensor)]


_FIRST_STATISTICS = {F.batch_norm: 1, F.instance_norm: 1}
_FIRST_STATISTICS |= {torch.batch_norm: 3, torch.instance_norm: 3}
"""The place of the first of two running statistics."""


def _one_number(name: str, args: tuple, kwargs: dict) -> bool:
    """Tell whether `inner` or `tensordot` sums a product up to one number."""
    one, other, *_ = _tensors(args, kwargs)
    if name == "inner" and not (one.ndim and other.ndim):
        return True  # no more than a product of numbers either
    dims = kwargs.get("dims", ((-1,), (-1,)))
    dims = dims.tolist() if isinstance(dims, Tensor) else dims
    if isinstance(dims, int):
        dims = range(-dims, 0), range(dims)
    left = 1
    for tensor, axes in zip((one, other), dims, strict=True):
        for axis, size in enumerate(tensor.shape):
            left *= 1 if axis in axes or axis - tensor.ndim in axes else size
    return left == 1


def _device(args: tuple, kwargs: dict) -> str | None:
    """Return the type of device of the first tensor."""
    return next((each.device.type for each in _tensors(args, kwargs)), None)


def _tensors(args: tuple, kwargs: dict) -> list[Tensor]:
    leaves = tree_leaves((args, kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _eligible(args: tuple, kwargs: dict) -> list[Tensor]:
    return [each for each in _tensors(args, kwargs) if _may_cast(each)]


def _may_cast(leaf: Tensor) -> bool:
    return leaf.is_floating_point() and leaf.dtype != torch.float64
