"""Parameters of which each rank holds a part: dictionaries of DTensors.

W ranks. A tensor is cut along its first dimension into parts of `ceil(N / W)` rows, so
that the last ranks may hold fewer rows, or none; or every rank holds all of it. That is
how `torch.distributed.fsdp.fully_shard` cuts parameters, whose dictionaries these are.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from vgrad import files, tree
from vgrad.ranks import Ranks, layout
from vgrad.typing import Params, T


def shard(params: Params, mesh: DeviceMesh, *, data: str = "dp") -> Params:
    """Keep this rank's part of each tensor: `{name: DTensor}`, along an axis of a mesh.

    All ranks have to call it with the same values, and each of them frees the whole
    tensors when nothing else holds them. Tensors without dimensions stay on all ranks.
    Works for the state of an optimizer as well, though `tx.init(shard(params, mesh))`
    never makes the whole of it.

    What `fully_shard` makes of a module needs no `shard`. Its DTensors go into a state
    as they are, `{name: p.detach() for name, p in module.named_parameters()}`, and back
    by `module.load_state_dict(params)`, under the names that the module had before.

    Raises:
        TypeError: an entry is no ordinary tensor, or `mesh` is no mesh.
        RankError: the tensors of another rank are others.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> def on_each_rank(params):
        ...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        ...     return shard(params, mesh)
    """
    ranks = Ranks.of("shard", mesh, data)
    with ranks.together("shard"):
        for name, value in params.items():
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                raise TypeError(
                    f"shard(params): expected ordinary tensors, got a "
                    f"{type(value).__name__} in {name!r}."
                )
    ranks.check_same("shard", tensors=files.digest(params))
    mesh = mesh if mesh.ndim == 1 else mesh[data]
    return {name: _cut(ranks, mesh, value) for name, value in params.items()}


def wholes(params: Mapping[str, Tensor]) -> Params:
    """Put what `shard` has cut together again, on every rank.

    Raises:
        ValueError: a tensor lies in another way than `shard` lays it.
        RankError: the tensors of another rank are others.
    """
    ranks = ranks_of("sharded", params)
    if ranks is None:
        return dict(params)
    ranks.check_same("sharded", tensors=layout(params))
    return {
        name: _gathered(ranks, value) if isinstance(value, DTensor) else value
        for name, value in params.items()
    }


def ranks_of(function: str, params: Mapping[str, Tensor]) -> Ranks | None:
    """Return the ranks that hold the parts; None where all tensors are ordinary.

    Raises:
        ValueError: they lie in another way than `shard` lays them.
    """
    found: DeviceMesh | None = None
    for name, value in params.items():
        if not isinstance(value, DTensor):
            continue
        mesh, placements = value.device_mesh, tuple(value.placements)
        if found is None:
            found = mesh
        if mesh.ndim != 1 or mesh != found:
            raise ValueError(
                f"{function}(params): expected tensors on one mesh with one axis, got "
                f"{name!r} on {mesh}."
            )
        if placements not in ((Shard(0),), (Replicate(),)):
            raise ValueError(
                f"{function}(params): expected tensors cut along their first "
                f"dimension, or whole on every rank, got {name!r} placed as "
                f"{placements}. Use value.redistribute(placements=[Shard(0)])."
            )
    if found is None:
        return None
    if found.mesh_dim_names is None:
        raise ValueError(
            f"{function}(params): expected a mesh whose axis has a name. Pass "
            f"mesh_dim_names to init_device_mesh."
        )
    return Ranks.of(function, found, found.mesh_dim_names[0])


def whole(ranks: Ranks, local: Tensor, size: int) -> Tensor:
    """Put a tensor of so many rows together, of which this rank has its part."""
    if ranks.size == 1:
        return local.clone()
    rows = _rows(size, ranks.size)
    own = _padded(local, rows).view(-1).view(torch.uint8)  # of any dtype
    gathered = local.new_empty((rows * ranks.size, *local.shape[1:]))
    parts = gathered.view(-1).view(torch.uint8).split(max(1, own.numel()))
    if own.numel():
        distributed.all_gather(list(parts), own, group=ranks.group)
    return gathered[:size]


def reduced(ranks: Ranks, value: Tensor, like: DTensor) -> Tensor:
    """Sum over the ranks, and keep what this one holds of a tensor cut as `like`.

    Writes into `value`: no more memory is needed than that of the part.
    """
    value = value.detach().contiguous()
    numbers = torch.view_as_real(value) if value.is_complex() else value
    if not is_cut(like):
        if ranks.size > 1:
            distributed.all_reduce(numbers, group=ranks.group)
        return value
    rows = _rows(len(value), ranks.size)
    for rank in range(ranks.size if value.numel() else 0):
        part = numbers[rows * rank : rows * (rank + 1)]
        if ranks.size > 1 and part.numel():
            distributed.reduce(part, group=ranks.group, group_dst=rank)
    return value[rows * ranks.rank : rows * (ranks.rank + 1)].clone()


def laid(local: Tensor, like: DTensor) -> DTensor:
    """Make this rank's part of a tensor one that is cut as `like`."""
    return _placed(local, like.device_mesh, like.placements[0], like.shape)


def is_cut(value: DTensor) -> bool:
    """Tell whether ranks hold parts of a tensor."""
    return value.placements[0].is_shard()


def gather(state: T, mesh: DeviceMesh | None) -> T:
    """Return a tree with plain tensors in the place of DTensors, on every rank.

    Called on every rank of the mesh. One of them can write the result with
    `vgrad.training.release`, for others; a state itself is saved by
    `vgrad.training.save`, whose files hold the secret key. Plain tensors stay as they
    are.

    Raises:
        RankError: names, shapes or dtypes differ between ranks.

    Example:
        >>> gather({"w": torch.ones(2)}, None)
        {'w': tensor([1., 1.])}
    """
    ranks = Ranks.of_all("gather", mesh)
    with ranks.together("gather"):
        tensors = tree.state_dict(state)
    ranks.check_same("gather", tensors=layout(tensors))
    with torch.no_grad():
        return tree.map_tensors(
            lambda each: each.full_tensor() if isinstance(each, DTensor) else each,
            state,
        )


def _gathered(ranks: Ranks, value: DTensor) -> Tensor:
    local = value.to_local().detach()
    return whole(ranks, local, len(value)) if is_cut(value) else local.clone()


def _cut(ranks: Ranks, mesh: DeviceMesh, value: Tensor) -> DTensor:
    """Keep the part of a rank."""
    value = value.detach().to(ranks.device)
    if not value.ndim:
        return _placed(value.clone(), mesh, Replicate(), value.shape)
    rows = _rows(len(value), ranks.size)
    own = value[rows * ranks.rank : rows * (ranks.rank + 1)]
    own = own.clone(memory_format=torch.contiguous_format)
    return _placed(own, mesh, Shard(0), value.shape)


def _placed(
    local: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size
) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=shape, stride=stride
    )


def _rows(rows: int, size: int) -> int:
    """Return how many rows a part has, but for the last ones."""
    return -(-rows // size)


def _padded(value: Tensor, rows: int) -> Tensor:
    """Return a contiguous tensor of so many rows."""
    value = value.contiguous()
    if len(value) == rows:
        return value
    padded = value.new_zeros((rows, *value.shape[1:]))
    padded[: len(value)] = value
    return padded
