"""Autocast that works under `vmap`, `grad` and every other transform of `torch.func`.

Torch chooses dtypes below the transforms, where an op may have become another one: a
layer norm after an `nn.Linear` raises under `torch.vmap`. Here a function mode chooses
above them, from torch's state and lists, by the name of the function that a model calls
(`linear` for `F.linear`, `__matmul__` for `x @ y`), composite ops included.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import cache, wraps
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vgrad.functional.batch_norm import updated_statistics
from vgrad.ops.record import OPS, Kind
from vgrad.torch_private import modes
from vgrad.torch_private.kernels import autocast_ops, composite_ops
from vgrad.torch_private.tensors import version_of
from vgrad.torch_private.tracing import DispatchMode
from vgrad.tree import tensors, tree_map_only


def _table(**kinds: str) -> dict[str, Kind]:
    return {name: Kind[kind] for kind, names in kinds.items() for name in names.split()}


# Ops of torch's lists without a record, about which nothing else is special.

_PRODUCTS = """
    __matmul__ addbmm chain_matmul linalg_multi_dot linalg_vecdot prelu conv_tbc
"""

_LOSSES = """
    cross_entropy_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss
    kl_div poisson_nll_loss cosine_embedding_loss hinge_embedding_loss
    margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    multilabel_margin_loss binary_cross_entropy_with_logits
"""

_CPU = _table(
    LOW=_PRODUCTS,
    FLOAT32=_LOSSES
    + """
        binary_cross_entropy ctc_loss grid_sampler grid_sampler_2d grid_sampler_3d prod
        avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_pool3d trace
    """,
    WIDEST="stack cat index_copy",
    PRODUCT="inner",
    INSIDE="linalg_pinv linalg_polar affine_grid_generator",
)

_CUDA = _table(
    LOW=_PRODUCTS + "addr convolution",
    FLOAT32=_LOSSES
    + """
        native_layer_norm softmax log_softmax softplus exp expm1 log log10 log1p log2
        logsumexp pow __pow__ __rpow__ reciprocal rsqrt __rdiv__ __rtruediv__ square
        special_softmax special_log_softmax special_logsumexp special_expm1
        special_log1p special_erfinv arccos arcsin norm sum cumsum cumprod prod
        frobenius_norm nuclear_norm linalg_norm pdist _upsample_bicubic2d_aa
        linalg_vector_norm linalg_matrix_norm cosine_similarity upsample_nearest1d
        upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
        upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    """,
    WIDEST="addcdiv addcmul arctan2 cross dot vdot inner grid_sampler scatter_add",
    INSIDE="linalg_pinv linalg_polar affine_grid_generator",
    REFUSED="binary_cross_entropy",
)

KINDS: dict[str, dict[str, Kind]] = {
    device: table
    | {
        modes.op_name(func): kind
        for func, op in OPS.items()
        if (kind := op.kind(host=device == "cpu")) is not None
    }
    for device, table in (("cpu", _CPU), ("cuda", _CUDA))
}
"""By device type and name. Torch says what it does to others: it casts them, or those
they are made of, or none. Other accelerators cast as cuda does."""


@cache
def _lacking(device: str) -> set[str]:
    """Return ops of the table that a device, or a release of torch, does not cast."""
    if device == "cpu":
        return set()
    listed = {"rms_norm"} if device == "cuda" else autocast_ops("cuda")
    return listed - autocast_ops(device)


@cache
def warn_slow() -> None:
    """Warn of float16 on a CPU, once per process."""
    warnings.warn(
        "autocast: float16 on a CPU is slow, since few of them have arithmetic for it; "
        "the numbers are right. Take bfloat16, as the policy mixed_bfloat16 does.",
        stacklevel=3,
    )


class autocast(torch.autocast):
    """`torch.autocast` that also holds under the transforms of `torch.func`.

    It takes the arguments of `torch.autocast`, casts the same ops and gives the same
    results; an inner `torch.autocast(device_type, enabled=False)` switches it off. Ops
    outside of transforms are left to torch. vgrad's own transforms need only a plain
    `torch.autocast`, and cast weights once per forward pass. In transforms of
    `torch.func` weights are cast at each use: a cast that is kept from one transform to
    the next would be a constant there, with a gradient of zero.

    Example:
        >>> x, weight = torch.ones(3, 4, 5), torch.ones(2, 5)
        >>> linear = lambda x: torch.nn.functional.linear(x, weight, torch.ones(2))
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     torch.vmap(linear)(x).dtype
        torch.bfloat16
    """

    @property
    def _options(self) -> tuple:
        return self.device, self.fast_dtype, self._enabled, self._cache_enabled

    def __enter__(self) -> "autocast":
        if self._options[:3] == ("cpu", torch.float16, True):
            warn_slow()
        region = ExitStack()
        region.enter_context(torch.autocast(*self._options))
        # A transform of vgrad has one already, with its weights, or one that waits.
        stack = modes.function_modes()
        if not any(
            isinstance(mode, AutocastMode) or getattr(mode, "waiting", None)
            for mode in stack
        ):
            region.enter_context(AutocastMode())
        # torch's context keeps the state to restore for one region at a time.
        self._regions = [*getattr(self, "_regions", ()), region]
        return self

    def __exit__(self, *error: Any) -> Any:
        *self._regions, region = self._regions
        return region.__exit__(*error)

    def __call__(self, func: Callable) -> Callable:
        """Decorate a function: each call is a region, in any thread."""
        if not callable(func):
            raise TypeError(
                f"autocast({self.device!r})(func): expected a function to decorate, "
                f"got {type(func).__name__}. Use `with autocast(...):` around a block."
            )

        @wraps(func)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with autocast(*self._options):
                return func(*args, **kwargs)

        return inside


class AutocastMode(TorchFunctionMode):
    """Casts the arguments of ops while torch's autocast is on."""

    # Each of `weights`, which the caller keeps alive, is cast once, at the level where
    # the mode was made.
    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._weights = {id(weight) for weight in weights}
        self._casts: dict[tuple, Tensor] = {}
        self._level = modes.current_level()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not modes.autocast_is_on():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        clashes = False
        if name == "batch_norm":  # low weights and float32 statistics: torch refuses
            clashes = len({x.dtype for x in _eligible(args, kwargs)[1:]}) > 1
        if (
            name in ("__get__", "grad", "backward")  # of autograd, which keep it on
            or (modes.current_level() is None and not clashes)
            or func is modes.custom_function_call  # torch casts the ops inside
        ):
            return func(*args, **kwargs)
        device = next((x.device.type for x in tensors((args, kwargs))), None)
        if (
            device is None
            or not torch.amp.is_autocast_available(device)
            or not torch.is_autocast_enabled(device)
        ):
            return func(*args, **kwargs)
        kind = _kind(device, func, args, kwargs)
        if kind is Kind.INSIDE:
            return func(*args, **kwargs)
        if kind is Kind.STEPS and (mapped := OPS[func].mapped) is not None:
            with self:
                return mapped(*args, **kwargs)
        if kind is None and modes.is_python(func):
            with self:
                return modes.opened(func)(*args, **kwargs)
        low = torch.get_autocast_dtype(device)
        torch.set_autocast_enabled(device, False)
        try:
            return self._run(kind, func, args, kwargs, low)
        finally:
            torch.set_autocast_enabled(device, True)

    def _run(
        self, kind: Kind | None, func: Callable, args: Any, kwargs: Any, low: Any
    ) -> Any:
        if kind in (None, Kind.OWN):
            return func(*args, **kwargs)
        dtypes = [x.dtype for x in _eligible(args, kwargs)]
        match kind:
            case Kind.LOW:
                dtype = low
            case Kind.FLOAT32:
                dtype = None if kwargs.get("dtype") is not None else torch.float32
            case Kind.WIDEST:
                dtype = torch.float32 if torch.float32 in dtypes else None
            case Kind.NORM:
                dtype = None if _mixes(func, args, kwargs) else torch.float32
            case _:
                raise RuntimeError(
                    f"{modes.op_name(func)}: expected an op that is safe to autocast. "
                    f"Its gradient overflows in {low}: use the form that takes logits, "
                    f"or torch.autocast(..., enabled=False) around it."
                )
        statistics = updated_statistics(func, args, kwargs)
        if dtype is not None and any(old != dtype for old in dtypes):
            args, kwargs = self._cast((args, kwargs), dtype)
        output = func(*args, **kwargs)
        updated = updated_statistics(func, args, kwargs)
        for old, new in zip(statistics, updated, strict=True):
            if new is not old:
                old.copy_(new)
        return output.to(dtypes[0]) if kind is Kind.NORM and dtypes else output

    def _cast(self, tree: Any, dtype: torch.dtype) -> Any:
        def cast(leaf: Tensor) -> Tensor:
            if not _may_cast(leaf) or leaf.dtype == dtype:
                return leaf
            here = modes.current_level() == self._level
            if not here or id(leaf) not in self._weights:
                return leaf.to(dtype)
            with modes.without_modes():
                written = version_of(leaf)
            key = (id(leaf), written, dtype, torch.is_grad_enabled())
            if key not in self._casts:
                self._casts[key] = leaf.to(dtype)
            return self._casts[key]

        return tree_map_only(Tensor, cast, tree)


def _kind(device: str, func: Callable, args: tuple, kwargs: dict) -> Kind | None:
    name, op = getattr(func, "__name__", ""), OPS.get(func)
    table = KINDS["cpu" if device == "cpu" else "cuda"]
    if kwargs.get("out") is not None:
        return None  # torch has no kernels of autocast for these
    if name == "pad":
        words = {x for x in (*args, *kwargs.values()) if isinstance(x, str)}
        other = words & {"reflect", "replicate"}  # whose kernels may be listed
        return _tried(device, func, args, kwargs) if other else Kind.INSIDE
    if name in _lacking(device):
        return None if op is None else Kind.OWN
    kind = None if op is None else op.kind(host=device == "cpu")
    kind = kind or table.get(name)
    if kind is Kind.PRODUCT:
        return None if _one_number(name, args, kwargs) else Kind.LOW
    free = op is None or op.autocast is None
    if kind is None and free and not modes.is_python(func):
        if name in autocast_ops(device):
            return _tried(device, func, args, kwargs)
        return Kind.INSIDE if name in composite_ops() else None
    return kind


def _tried(device: str, func: Callable, args: tuple, kwargs: dict) -> Kind:
    """Return the kind of an op of torch's list, whose first op is the cast."""
    low, seen = torch.get_autocast_dtype(device), []

    class First(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((kwargs or {}).get("dtype"))
            raise NotImplementedError

    def cast(*dtypes: torch.dtype) -> Any:
        next_dtypes = chain(dtypes, repeat(dtypes[-1]))

        def other(leaf: Tensor) -> Tensor:
            dtype = next(next_dtypes) if _may_cast(leaf) else leaf.dtype
            return torch.empty(leaf.shape, dtype=dtype, device=leaf.device)

        with modes.exit_all(), modes.without_modes(), suppress(NotImplementedError):
            positional, named = tree_map_only(Tensor, other, (args, kwargs))
            with First():
                func(*positional, **named)
        return seen[-1] if seen else None  # of an op that does nothing

    if cast(torch.float32) == low:
        return Kind.LOW
    if cast(low) == torch.float32:
        return Kind.FLOAT32
    return Kind.WIDEST if cast(low, torch.float32) == torch.float32 else Kind.INSIDE


def _mixes(func: Callable, args: tuple, kwargs: dict) -> bool:
    # A batch norm runs on inputs of several dtypes as in eager mode, in float32 without
    # a float32 copy of the input for the backward pass; under `torch.vmap` the kernel
    # needs one dtype. With one dtype it updates running statistics in place.
    if getattr(func, "__name__", "") != "batch_norm":
        return False
    dtypes = [x.dtype for x in _eligible(args, kwargs)]  # float64 is none of them
    if len({*dtypes}) == 1:
        return True
    in_grad = modes.active_transforms() == ("Grad",)
    return in_grad and all(dtype == torch.float32 for dtype in dtypes[1:])


def _one_number(name: str, args: tuple, kwargs: dict) -> bool:
    """Return whether `inner` or `tensordot` sums a product up to one number."""
    one, other, *_ = tensors((args, kwargs))
    if name == "inner" and not (one.ndim and other.ndim):
        return True
    dims = kwargs.get("dims", ((-1,), (-1,)))
    dims = dims.tolist() if isinstance(dims, Tensor) else dims
    if isinstance(dims, int):
        dims = range(-dims, 0), range(dims)
    numel = 1
    for tensor, axes in zip((one, other), dims, strict=True):
        for axis, size in enumerate(tensor.shape):
            numel *= 1 if axis in axes or axis - tensor.ndim in axes else size
    return numel == 1


def _eligible(args: tuple, kwargs: dict) -> list[Tensor]:
    return [x for x in tensors((args, kwargs)) if _may_cast(x)]


def _may_cast(leaf: Tensor) -> bool:
    return leaf.is_floating_point() and leaf.dtype != torch.float64
