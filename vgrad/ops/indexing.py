"""Reads and writes by index, where torch's rules of vmap loop, fail or miss axes.

Some ops have results whose shapes depend on values. Samples that run together must
have one number of results n, by which `x[mask]`, `nonzero` and the like have a known
shape. The places that masks `[B, ...]` hit are indices `[B, n]` then, which take the
place of the masks.

B samples, n hits of each, T items of an axis
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.ops.record import Form, Kind, Samples, in_place, register
from vgrad.torch_private import modes


def _index_add(
    input: Tensor, dim: int, index: Tensor, source: Tensor, **options: Any
) -> Tensor:
    """Add rows at an index; torch's rule loops where each sample has its own."""
    per_sample = modes.is_batched(index) and index.dim() == 1 and input.dim() > 0
    shape = [*input.shape]
    if per_sample:
        shape[dim] = len(index)
    if not per_sample or options.keys() - {"alpha"} or [*source.shape] != shape:
        return torch.index_add(input, dim, index, source, **options)
    alpha = options.get("alpha", 1)
    source = source if alpha == 1 else alpha * source
    after = (1,) * (input.dim() - dim % input.dim() - 1)
    index = index.long().reshape(-1, *after).expand(shape)
    return torch.scatter_add(input, dim, index, source)


def _histc(
    input: Tensor, bins: int = 100, min: Any = 0, max: Any = 0, **options: Any
) -> Tensor:
    """Count as `torch.histc`, which has no rule of vmap, without a derivative."""
    if min >= max or options or not modes.is_batched(input):
        return torch.histc(input, bins, min, max, **options)
    x = input.detach().flatten()
    low, high = (x.new_full((), bound) for bound in (min, max))
    place = ((x - low) * bins).div(high - low, rounding_mode="trunc")
    inside = (x >= low) & (x <= high)
    place = torch.where(inside, place, 0).long().clamp(max=bins - 1)
    counts = x.new_zeros(bins)
    return counts.scatter_add(0, place, inside.to(x.dtype))


def _squeeze_(input: Tensor, *dims: Any, **options: Any) -> Tensor:
    """Remove axes in place; torch's rule removes the axis of a single sample, too."""
    if not dims and not options:
        dims = (tuple(axis for axis, size in enumerate(input.shape) if size == 1),)
    return input.squeeze_(*dims, **options)


def _roll(input: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    """Roll entries; torch's rule rolls samples that are single numbers."""
    single = not input.ndim and dims in ((), [])
    return input.clone() if single else torch.roll(input, shifts, dims)


def _select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """Write a slice; torch's rule takes the gradients of another one."""
    if input.select(dim, index).shape != src.shape:
        return torch.select_scatter(input, src, dim, index)
    start = index % input.shape[dim]
    before, after = input.narrow(dim, 0, start), input.shape[dim] - start - 1
    parts = before, src.unsqueeze(dim % input.ndim), input.narrow(dim, start + 1, after)
    return torch.cat([part.to(input.dtype) for part in parts], dim)


class _Mask(NamedTuple):
    """A mask of each sample's own in an index."""

    place: int  # in the index
    axis: int  # the first that it stands for
    logical: Tensor
    values: Tensor  # [B, ...], of all samples


def _getitem(samples: Samples, x: Tensor, index: Any) -> Form | None:
    """Take entries by the places that masks hit."""
    items = index if isinstance(index, tuple) else (index,)
    if not (masks := _masks(samples, x, items)):
        return None
    if len(items) == 1 and not masks[0].logical.ndim:  # all of x, or nothing
        with samples.outside():
            counts = (masks[0].values != 0).long()
        first = torch.zeros(_one(samples, counts), dtype=torch.int64)
        return lambda: x.unsqueeze(0)[first]
    places = _by_places(samples, items, masks)
    return None if places is None else lambda: x[places]


def _setitem(samples: Samples, x: Tensor, index: Any, value: Any) -> Form | None:
    """Write where masks hit; one value for all hits needs no count of them."""
    items = index if isinstance(index, tuple) else (index,)
    if not (masks := _masks(samples, x, items)):
        return None
    rest = (item for n, item in enumerate(items) if n != masks[0].place)
    if all(
        item is Ellipsis or (isinstance(item, slice) and item == slice(None))
        for item in rest
    ):
        form = _for_all_hits(x, masks[0], value)
        if form is not None:
            return form
    places = _by_places(samples, items, masks)
    return None if places is None else partial(Tensor.__setitem__, x, places, value)


def _for_all_hits(x: Tensor, mask: _Mask, value: Any) -> Form | None:
    """Write a value that has no axis of hits; None for others."""
    after = x.ndim - mask.axis - mask.logical.ndim
    shape: Sequence[int] = ()
    if isinstance(value, Tensor):
        shape, extra = value.shape, value.ndim - after - 1
        if value.dtype != x.dtype and value.numel() > 1:
            return None  # as torch, which casts single numbers alone
        if extra >= 0:
            if extra > mask.axis or shape[extra] != 1:
                return None
            ones = (1,) * mask.logical.ndim
            shape = (*shape[:extra], *ones, *shape[extra + 1 :])
    elif not isinstance(value, bool | int | float | complex):
        return None

    def write() -> None:
        if isinstance(value, Tensor):
            source = value.reshape(shape).to(x.dtype)
        else:
            source = torch.full((), value, dtype=x.dtype, device=x.device)
        where = mask.logical.bool().reshape(*mask.logical.shape, *(1,) * after)
        x.copy_(torch.where(where, source, x))

    return write


def _index_put(
    func: Callable,
    samples: Samples,
    x: Tensor,
    indices: Any,
    values: Tensor,
    *more: Any,
    **options: Any,
) -> Form | None:
    """Write by index, which has no masks then."""
    if any(index is None for index in indices):  # here a whole axis, there a new one
        return None
    places = _by_places(samples, indices, _masks(samples, x, indices))
    if places is None:
        return None
    return partial(func, x, places, values, *more, **options)


def _masked_select(
    samples: Samples, input: Tensor, mask: Tensor, **options: Any
) -> Form | None:
    """Take entries of both, broadcast together, by the places that the mask hits."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    values = samples.values(mask)
    if options or values is None or not shape or mask.dtype != torch.bool:
        return None
    ones, size = (1,) * (len(shape) - mask.ndim), len(values)
    with samples.outside():
        values = values.reshape(size, *ones, *mask.shape).expand(size, *shape)
    places = _hits(samples, values)
    return lambda: input.expand(shape)[places]


def _nonzero(
    samples: Samples, input: Tensor, *, as_tuple: bool = False, **options: Any
) -> Form | None:
    """List the places of nonzero entries: `[n, d]`, or d times `[n]`."""
    values = samples.values(input)
    if options or values is None or not input.ndim:
        return None
    places = _hits(samples, values)
    return lambda: places if as_tuple else torch.stack(places, 1)


def _where(
    samples: Samples, condition: Tensor, *others: Any, **more: Any
) -> Form | None:
    """List places, where there is nothing to choose from."""
    if others or more:
        return None
    return _nonzero(samples, condition, as_tuple=True)


def _repeat_interleave(
    samples: Samples,
    input: Tensor,
    repeats: Any = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Form | None:
    """Take items by index, each as often as it says; of one argument, the index."""
    is_single = repeats is None
    times = input if is_single else repeats
    values = samples.values(times) if isinstance(times, Tensor) else None
    if values is None or (dim is not None and not input.ndim):
        return None
    items = input.numel() if dim is None else input.shape[dim]
    if times.ndim > 1 or times.numel() not in (1, items) or times.is_floating_point():
        return None
    size = len(values)
    with samples.outside():
        values = values.reshape(size, times.numel()).expand(size, items)
        counts = values.sum(1).where((values >= 0).all(1), -1)
    count = _one(samples, counts)
    if count < 0 or output_size not in (None, count):
        return None
    with samples.outside():
        steps = torch.arange(count, device=values.device).expand(size, count)
        places = torch.searchsorted(values.cumsum(1), steps.contiguous(), right=True)
        # A graph whose counts are others is dropped, but must not fail.
        index = samples.logical(places.clamp(max=items - 1))
    if is_single:
        return lambda: index
    return lambda: (input.flatten() if dim is None else input).index_select(
        dim or 0, index
    )


def _one_hot(samples: Samples, input: Tensor, num_classes: int = -1) -> Form | None:
    values = samples.values(input) if num_classes == -1 and input.numel() else None
    if values is None or input.dtype != torch.int64:
        return None
    with samples.outside():
        values = values.reshape(len(values), input.numel())
        largest = values.amax(1).where((values >= 0).all(1), -1)
    largest = _one(samples, largest)
    if largest < 0:
        return None
    return lambda: F.one_hot(input, largest + 1)


def _one_hot_of(input: Tensor, num_classes: int = -1) -> Tensor:
    """Mark classes, whose range torch checks by reading values."""
    if num_classes < 1 or input.dtype != torch.int64:
        return F.one_hot(input, num_classes)
    zeros = input.new_zeros(*input.shape, num_classes)
    return zeros.scatter(-1, input.unsqueeze(-1), 1)  # which checks it as well


def _masks(samples: Samples, x: Tensor, items: Sequence[Any]) -> list[_Mask]:
    """Return the masks of each sample's own in an index; none if it is another one."""
    if not any(map(_is_mask, items)):
        return []
    sizes = [*map(_axes, items)]
    if -1 in sizes:
        return []
    axis, masks = 0, []
    for place, item in enumerate(items):
        if item is Ellipsis:
            axis = x.ndim - sum(sizes[place:])
        if _is_mask(item):
            if item.shape != x.shape[axis : axis + item.ndim]:
                return []
            if (values := samples.values(item)) is not None:
                masks.append(_Mask(place, axis, item, values))
        axis += sizes[place]
    return masks


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _axes(item: Any) -> int:
    """Return for how many axes an item of an index stands; -1 if that is unclear."""
    if item is None or item is Ellipsis:
        return 0
    if _is_mask(item):
        return item.ndim
    is_index = isinstance(item, Tensor | slice | int) and not isinstance(item, bool)
    return 1 if is_index else -1


def _by_places(
    samples: Samples, items: Sequence[Any], masks: list[_Mask]
) -> tuple | None:
    """Return an index with the places that masks hit; None if that does not do."""
    if not masks or not all(mask.logical.ndim for mask in masks):
        return None
    hits = {mask.place: _hits(samples, mask.values) for mask in masks}
    index: list[Any] = []
    for place, item in enumerate(items):
        index += hits.get(place, (item,))
    return tuple(index)


def _hits(samples: Samples, values: Tensor) -> tuple[Tensor, ...]:
    """Return the places of nonzero entries, along each axis: `[B, ...] -> d * [n]`."""
    with samples.outside():
        hit = values != 0
        counts = hit.flatten(1).sum(1)
    count, size = _one(samples, counts), len(values)
    with samples.outside():
        if modes.is_wrapped(hit):  # by a vmap around, whose mode has a form for this
            coordinates = hit.nonzero()
        else:
            coordinates = torch.nonzero_static(hit, size=size * count)
        places = coordinates[:, 1:].t().reshape(values.ndim - 1, size, count).unbind()
    return tuple(samples.logical(place) for place in places)


def _one(samples: Samples, counts: Tensor) -> int:
    """Return the whole number that all samples have in `[B]`."""
    return samples.agreed(samples.logical(counts))


register(torch.index_add, Tensor.index_add, mapped=_index_add)
register(Tensor.index_add_, mapped=in_place(_index_add))
register(Tensor.scatter_, mapped=in_place(torch.scatter))  # which has a rule
# A copy, since the backward pass reads what is overwritten.
register(Tensor.clamp_, mapped=in_place(lambda x, *a, **o: x.clone().clamp(*a, **o)))
register(Tensor.squeeze_, mapped=_squeeze_)
register(torch.histc, Tensor.histc, mapped=_histc)
register(torch.roll, Tensor.roll, mapped=_roll)
register(torch.select_scatter, Tensor.select_scatter, mapped=_select_scatter)
register(Tensor.__getitem__, selected=_getitem)
register(Tensor.__setitem__, selected=_setitem)
register(torch.masked_select, Tensor.masked_select, selected=_masked_select)
register(torch.nonzero, Tensor.nonzero, selected=_nonzero)
register(torch.argwhere, Tensor.argwhere, selected=_nonzero)
register(torch.where, selected=_where)
register(torch.repeat_interleave, selected=_repeat_interleave)
register(Tensor.repeat_interleave, selected=_repeat_interleave)
register(F.one_hot, selected=_one_hot, mapped=_one_hot_of)
for _op in (torch.index_put, torch.index_put_, Tensor.index_put, Tensor.index_put_):
    register(_op, selected=partial(_index_put, _op))
register(torch.index_put, Tensor.index_put, autocast=(None, Kind.WIDEST))
for _name in ("bincount", "unique", "unique_consecutive"):  # one after another
    for _op in (getattr(torch, _name), getattr(Tensor, _name)):
        register(_op, selected=lambda x, *a, f=_op, **k: x.stacked(f, a, k))
