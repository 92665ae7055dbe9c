"""Which members of an ensemble a step moves; the others stay as they were.

E members.
"""

from typing import Any

import torch
from torch import Tensor

from vgrad.conditions import checks_collected
from vgrad.ensemble.optimizer import MembersState
from vgrad.precision import LossScale
from vgrad.tree import map_tensors, tree_map
from vgrad.typing import Params, Tree


def keep(mask: Tensor, new: Tree, old: Tree) -> Tree:
    """Take `new` where a mask of members `[E]`, or one for all, is true, else `old`."""

    def choose(new: Tensor, old: Tensor) -> Tensor:
        aligned = mask.reshape((*mask.shape, *[1] * (new.ndim - mask.ndim)))
        return torch.where(aligned, new, old)

    return tree_map(choose, new, old)


def put_back(
    new: Any, old: Any, trained: Tensor, common: dict[str, Any], anyone: Tensor
) -> Any:
    """Put back what members keep that were not trained, and what they share.

    `new` and `old` are states of an ensemble; `common` has the gradients of all that
    its members share, None for buffers. `anyone` says whether any of them is active.
    """
    finite = [grad.isfinite().all() for grad in common.values() if grad is not None]
    together = torch.stack([anyone, *finite]).all()

    def chosen(new: Params, old: Params) -> Params:
        masks = {name: together if name in common else trained for name in new}
        return {name: keep(masks[name], new[name], old[name]) for name in new}

    optimizer = MembersState(
        keep(trained, new.optimizer.members, old.optimizer.members),
        keep(together, new.optimizer.shared, old.optimizer.shared),
    )
    return new._replace(
        params=chosen(new.params, old.params),
        buffers=chosen(new.buffers, old.buffers),
        optimizer=optimizer,
    )


def of_each(scale: LossScale, count: int) -> LossScale:
    """Give every member a scale of its own."""
    return map_tensors(lambda x: x if x.ndim else x.expand(count).contiguous(), scale)


def finite_of_each(grads: list[Tensor], like: Tensor) -> Tensor:
    """Tell which members' gradients are finite, `[E]`, without a device sync."""
    found = torch.ones_like(like)
    if like.device.type == "cpu" and not checks_collected():
        # A sum that is finite says so of all it is of, in a fraction of the time.
        if all(bool(grad.sum().isfinite()) for grad in grads):
            return found
    for grad in grads:
        each = grad.isfinite().reshape(len(found), grad[0].numel())
        found = found & each.all(1)
    return found
