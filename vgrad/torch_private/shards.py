"""The part of a DTensor that this rank holds, and where it stands in the whole.

Nothing is imported before there is a DTensor: torch may be built without
`torch.distributed`, and needs most of a second for this part of it.
"""

import sys
from typing import Any

import torch
from torch import Tensor

_MODULE = "torch.distributed.tensor"


def is_distributed(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    kind = getattr(sys.modules.get(_MODULE), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def unsupported_placements(tensor: Any) -> list[Any]:
    """Return the placements of a DTensor by which ranks hold terms of its entries."""
    module: Any = sys.modules[_MODULE]
    # The others are Partial, and any that torch does not document.
    known = (module.Shard, module.Replicate)
    return [each for each in tensor.placements if type(each) not in known]


def local(tensor: Any) -> Tensor:
    """Return the part of this rank, all of a tensor that is not distributed."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def offsets(tensor: Any) -> tuple[int, ...]:
    """Return where the part of this rank begins."""
    if not is_distributed(tensor):
        return (0,) * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, found = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(found)


def cut(whole: Tensor, like: Any) -> Tensor:
    """Make a DTensor of a tensor that every rank has, placed like another one."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    module: Any = sys.modules[_MODULE]
    terms = unsupported_placements(like)  # along these, all ranks have the whole
    placements = [module.Replicate() if x in terms else x for x in like.placements]
    mesh = like.device_mesh
    shape, starts = compute_local_shape_and_global_offset(like.shape, mesh, placements)
    part = whole
    for dim, (start, size) in enumerate(zip(starts, shape, strict=True)):
        part = part.narrow(dim, min(start, whole.shape[dim]), size)
    return _made(like, part.contiguous(), placements)


def reduced(tensor: Any, like: Any, dim: int) -> Tensor:
    """Place a DTensor like another one, but whole on all ranks along a dimension."""
    module: Any = sys.modules[_MODULE]
    along = dim % like.ndim
    placements = [
        module.Replicate() if x.is_shard(along) else x for x in like.placements
    ]
    return tensor.redistribute(placements=placements)


def placed(tensor: Any, like: Any) -> Tensor:
    """Place a DTensor like another one."""
    return tensor.redistribute(placements=like.placements)


def like(tensor: Any, part: Tensor) -> Tensor:
    """Make a DTensor of the parts of all ranks, placed like another one if that is."""
    return _made(tensor, part, tensor.placements) if is_distributed(tensor) else part


def _made(like: Any, part: Tensor, placements: Any) -> Tensor:
    stride = torch.empty(like.shape, device="meta").stride()  # contiguous
    return type(like).from_local(
        part,
        like.device_mesh,
        placements,
        run_check=False,
        shape=like.shape,
        stride=stride,
    )
