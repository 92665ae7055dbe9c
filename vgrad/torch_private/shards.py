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
    supported = (module.Shard, module.Replicate)
    return [x for x in tensor.placements if type(x) not in supported]


def local(tensor: Any) -> Tensor:
    """Return the part of this rank, all of a tensor that is not distributed."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def whole(tensor: Any) -> Tensor:
    """Return the tensor that all ranks have together, on each of them."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor


def offsets(tensor: Any) -> tuple[int, ...]:
    """Return where the part of this rank begins."""
    if not is_distributed(tensor):
        return (0,) * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, starts = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(starts)


def cut(tensor: Tensor, like: Any) -> Tensor:
    """Place a tensor that every rank has like another one, if that is a DTensor."""
    if not is_distributed(like):
        return tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    module: Any = sys.modules[_MODULE]
    terms = unsupported_placements(like)  # along these, all ranks have the whole
    placements = [module.Replicate() if x in terms else x for x in like.placements]
    mesh = like.device_mesh
    shape, starts = compute_local_shape_and_global_offset(like.shape, mesh, placements)
    part = tensor
    for dim, (start, size) in enumerate(zip(starts, shape, strict=True)):
        part = part.narrow(dim, min(start, tensor.shape[dim]), size)
    return made(part.contiguous(), mesh, placements, like.shape)


def reduced(tensor: Any, like: Any, dim: int) -> Tensor:
    """Place a DTensor like another one, but whole on all ranks along a dimension."""
    if not is_distributed(like):
        return tensor
    module: Any = sys.modules[_MODULE]
    along = dim % like.ndim
    placements = [
        module.Replicate() if x.is_shard(along) else x for x in like.placements
    ]
    return tensor.redistribute(placements=placements)


def placed(tensor: Any, like: Any) -> Tensor:
    """Place a DTensor like another one, if that is one."""
    if not is_distributed(like):
        return tensor
    return tensor.redistribute(placements=like.placements)


def like(tensor: Any, part: Tensor) -> Tensor:
    """Make a DTensor of the parts of all ranks, placed like another one if that is."""
    if not is_distributed(tensor):
        return part
    return made(part, tensor.device_mesh, tensor.placements, tensor.shape)


def made(part: Tensor, mesh: Any, placements: Any, shape: torch.Size) -> Tensor:
    """Make a DTensor of the parts of all ranks."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()  # contiguous
    options: Any = {"run_check": False, "shape": shape, "stride": stride}
    return DTensor.from_local(part, mesh, placements, **options)
