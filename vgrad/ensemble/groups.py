"""Models of different architectures behind one call: those that are alike are stacked.

E models, of which E_g are in group g.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vgrad.ensemble.matching import difference
from vgrad.ensemble.stacking import listed_models, stack
from vgrad.functional.model import FunctionalModel
from vgrad.tree import tree_flatten, tree_unflatten
from vgrad.typing import Buffers, Params, Tree


@dataclass(frozen=True)
class ModelGroups:
    """Groups of stacked models, as `group` makes them.

    Attributes:
        fmodels: the function of one member, for each group.
        params: the stacked parameters of each group, `[E_g, *shape]`.
        buffers: the stacked buffers of each group.
        positions: where the members of each group were among the models.
    """

    fmodels: tuple[FunctionalModel, ...]
    params: tuple[Params, ...]
    buffers: tuple[Buffers, ...]
    positions: tuple[tuple[int, ...], ...]

    def map(self, function: Callable[[FunctionalModel, Params, Buffers], Tree]) -> Tree:
        """Call `function(fmodel, params, buffers)` for each group and join the results.

        The function returns a tree of tensors `[E_g, ...]`, which differ between groups
        in that axis only. Returned is the same tree of tensors `[E, ...]`, in the order
        of the models. The groups run one after the other; gradients flow through.

        Raises:
            ValueError: the results of two groups do not fit together, or have no axis
                for the members of their group.
            TypeError: a result is not a tensor.

        Example:
            >>> models = [nn.Linear(3, 2), nn.Linear(3, 2, bias=False), nn.Linear(3, 2)]
            >>> groups, x = group(models), torch.ones(4, 3)
            >>> def outputs(fmodel, params, buffers):
            ...     return torch.vmap(fmodel, (0, 0, None))(params, buffers, x)
            >>> groups.map(outputs).shape
            torch.Size([3, 4, 2])
        """
        parts = zip(self.fmodels, self.params, self.buffers, strict=True)
        results = [tree_flatten(function(*part)) for part in parts]
        structure = results[0][1]
        for number, (leaves, other) in enumerate(results):
            if other != structure:
                raise ValueError(
                    f"ModelGroups.map(function): expected results of one structure, "
                    f"got {structure} from group 0 and {other} from group {number}."
                )
            for leaf, expected in zip(leaves, results[0][0], strict=True):
                _check_leaf(leaf, expected, number, len(self.positions[number]))
        # Where the member that comes i-th among the models lies in the joined tensors.
        order = torch.tensor([i for group in self.positions for i in group]).argsort()
        joined = [
            torch.cat(leaves).index_select(0, order.to(leaves[0].device))
            for leaves in zip(*(leaves for leaves, _ in results), strict=True)
        ]
        return tree_unflatten(joined, structure)


def group(models: Iterable[nn.Module]) -> ModelGroups:
    """Stack the models that are alike, and put the groups behind one call.

    Two models are in one group if `stack` takes them. The groups come in the order of
    their first models, the members of each in the order of the models. Only groups of
    more than one model save time.

    Raises:
        ValueError: there is no model.
        TypeError: a model is not a module, or cannot be copied.

    Example:
        >>> models = [nn.Linear(3, 2), nn.Linear(3, 2, bias=False), nn.Linear(3, 2)]
        >>> group(models).positions
        ((0, 2), (1,))
    """
    models = listed_models("group", models)
    alike: list[list[int]] = []
    for index, model in enumerate(models):
        for each in alike:
            if difference(models[each[0]], model) is None:
                each.append(index)
                break
        else:
            alike.append([index])
    stacked = [stack(models[index] for index in each) for each in alike]
    fmodels, params, buffers = zip(*stacked, strict=True)
    return ModelGroups(fmodels, params, buffers, tuple(map(tuple, alike)))


def _check_leaf(leaf: Tensor, first: Tensor, number: int, count: int) -> None:
    """Refuse a result of one group that cannot be joined with that of the first."""
    where = "ModelGroups.map(function)"
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"{where}: expected tensors, got a {type(leaf).__name__} from group "
            f"{number}."
        )
    if leaf.ndim == 0 or len(leaf) != count:
        raise ValueError(
            f"{where}: expected a first axis of {count} members from group {number}, "
            f"got shape {tuple(leaf.shape)}."
        )
    kinds = [(tuple(each.shape[1:]), each.dtype, each.device) for each in (first, leaf)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{where}: expected results that differ between groups in the first axis "
            f"only, got {(count, *kinds[1][0])}, {kinds[1][1]}, {kinds[1][2]} from "
            f"group {number} and {tuple(first.shape)}, {first.dtype}, {first.device} "
            f"from group 0."
        )
