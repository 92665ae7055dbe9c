"""Many models as one: stacked, shared in part, grouped, and taken apart again.

E members. A stacked entry is a tensor `[E, *shape]`, a shared one `[*shape]`.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.contents import contents, difference
from vgrad.devices import all_accelerators
from vgrad.ensemble.layout import Layout, shared_names
from vgrad.functional import guards, slots
from vgrad.functional.model import FunctionalModel, make_functional_with_buffers
from vgrad.generators import kept_random_state
from vgrad.tree import tree_flatten, tree_unflatten
from vgrad.typing import Buffers, Params, Tree


@overload
def stack(
    models: Iterable[nn.Module], /, *, disable_autograd_tracking: bool = False
) -> tuple[FunctionalModel, Params, Buffers]: ...
@overload
def stack(
    make: Callable[[], nn.Module],
    /,
    *,
    seeds: Iterable[int],
    disable_autograd_tracking: bool = False,
) -> tuple[FunctionalModel, Params, Buffers]: ...
def stack(
    models: Any,
    /,
    *,
    seeds: Iterable[int] | None = None,
    disable_autograd_tracking: bool = False,
) -> tuple[FunctionalModel, Params, Buffers]:
    """Stack E models: `models -> (fmodel, params, buffers)`, entries `[E, *shape]`.

    `fmodel` is the function of one member, and the entries are as
    `make_functional_with_buffers` gives them, with the members on axis 0: tied tensors
    appear once, parameters require grad unless `disable_autograd_tracking`, frozen ones
    are among the buffers. Nothing is shared with the modules. The cost is one copy.

    `stack(make, seeds=...)` makes the models: member i is `make()` after
    `torch.manual_seed(seeds[i])`; `member_seed` has seeds that differ from ensemble to
    ensemble. Torch's generators are restored; a `make` that uses others seeds them.

    Since all members run the code of the first, the models may differ in the values of
    their parameters and buffers only. Their classes, modes, hooks, functions and plain
    attributes are compared, and attributes of objects that they hold; objects within
    these by class alone. Models that differ on purpose go through `group`.

    Raises:
        ValueError: there is no model, or one is not like the first; the message names
            the place and the member.

    Example:
        >>> fmodel, params, buffers = stack(lambda: nn.Linear(3, 2), seeds=range(5))
        >>> params["weight"].shape, params["bias"].shape
        (torch.Size([5, 2, 3]), torch.Size([5, 2]))
        >>> in_dims = (0, 0, None)
        >>> torch.vmap(fmodel, in_dims)(params, buffers, torch.ones(4, 3)).shape
        torch.Size([5, 4, 2])
    """
    if seeds is not None:
        seeds = [
            seed for x in seeds for seed in checks.integers("stack", minimum=0, seeds=x)
        ]
        models = build_models("stack(make)", [models] * len(seeds), seeds)
    models = _listed("stack", models)
    return joined("stack(models)", models, (), not disable_autograd_tracking)


def joined(
    where: str, models: Sequence[nn.Module], common: Collection[str], grad: bool = True
) -> tuple[FunctionalModel, Params, Buffers]:
    """Stack the entries of models that are alike, but for those in common."""
    first = contents(models[0])
    for index, model in enumerate(models):
        unlike = difference(first, contents(model))
        if unlike is not None:
            path, expected, got = unlike
            raise ValueError(
                f"{where}: expected {expected} in {f'{path!r} of ' * bool(path)}member "
                f"{index} as in member 0, got {got}. All members run the code of "
                f"member 0: only the values of parameters and buffers may differ."
            )
    fmodel, params, buffers = make_functional_with_buffers(
        models[0], disable_autograd_tracking=not grad
    )
    tensors = [dict(slots.named_tensors(model)) for model in models]

    def stacked(names: Iterable[str], grad: bool) -> dict[str, Tensor]:
        columns = {n: [entries[n].detach() for entries in tensors] for n in names}
        return {
            n: (x[0].clone() if n in common else torch.stack(x)).requires_grad_(grad)
            for n, x in columns.items()
        }

    return fmodel, stacked(params, grad), stacked(buffers, False)


combine_state_for_ensemble = stack


def _listed(function: str, models: Any) -> list[nn.Module]:
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise TypeError(
            f"{function}(models): expected several models, got a single "
            f"{type(models).__name__}. Put the models into a list."
        )
    if not isinstance(models, Iterable):
        raise TypeError(
            f"{function}(models): expected several models, got {checks.shown(models)}. "
            f"vgrad.stack(make, seeds=range(5)) makes five."
        )
    models = list(models)
    if not models:
        raise ValueError(f"{function}(models): expected at least one model, got none.")
    for index, model in enumerate(models):
        guards.check_plain(f"{function}(models)[{index}]", model)
    return models


def build_models(
    where: str, makes: Sequence[Callable[[], nn.Module]], seeds: Sequence[int]
) -> list[nn.Module]:
    """Make a model by each function, after seeding torch; generators are restored."""
    models = []
    places = [torch.empty(0, device=device) for device in all_accelerators()]
    with kept_random_state(places):
        for make, seed in zip(makes, seeds, strict=True):
            torch.manual_seed(seed)
            model = make() if callable(make) else make
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"{where}: expected a function that returns a module, got a "
                    f"{type(model).__name__}."
                )
            models.append(model)
    if len({id(model) for model in models}) < len(models):
        raise ValueError(
            f"{where}: expected a new model from each call, got one of them again. "
            f"Build the model inside of the function."
        )
    return models


def member_seed(seed: int, i: int) -> int:
    """Return the seed of member i of an ensemble, a number below 2**32.

    No two members of an ensemble have the same one, and ensembles of neighbouring seeds
    are unrelated too. It is a permutation of the 32 bits that torch's generator on the
    CPU reads of a seed: a Feistel cipher whose rounds are SHA-256 of the ensemble's
    seed.

    Reference: Luby and Rackoff, How to construct pseudorandom permutations from
    pseudorandom functions, SIAM J. Comput. 17(2), 1988.

    Example:
        >>> member_seed(0, 0), member_seed(0, 1), member_seed(1, 0)
        (3543877940, 977323547, 1229769225)
    """
    seed, i = checks.integers("member_seed", minimum=0, seed=seed, i=i)
    if i >= 2**32:
        raise ValueError(f"member_seed(i={i}): expected i < 2**32.")
    left, right = divmod(i, 2**16)
    for turn in range(4):
        digest = hashlib.sha256(f"{seed} {turn} {right}".encode()).digest()
        left, right = right, left ^ int.from_bytes(digest[:2], "big")
    return left << 16 | right


def share(
    params: Params, buffers: Buffers, patterns: Patterns
) -> tuple[Params, Buffers]:
    """Let all members use one tensor for each entry that matches a shell-style pattern.

    These entries lose the member axis, `[E, *shape] -> [*shape]`, and take copies of
    the values of member 0, leaves that require grad as before; all others are passed
    on. Name all patterns in one call, and give the same ones as `shared=` to the
    functions that take the result.

    Example:
        >>> _, params, buffers = stack([nn.Linear(3, 2) for _ in range(5)])
        >>> params, buffers = share(params, buffers, ["weight"])
        >>> params["weight"].shape, params["bias"].shape
        (torch.Size([2, 3]), torch.Size([5, 2]))
    """
    Layout.of("share", params, buffers)
    common = shared_names("share", {**params, **buffers}, patterns)

    def shared(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: value.detach()[0].clone().requires_grad_(value.requires_grad)
            if name in common
            else value
            for name, value in values.items()
        }

    return shared(params), shared(buffers)


def member(params: Params, i: int, *, shared: Patterns = ()) -> dict[str, Tensor]:
    """Return the entries of member i as views: `[E, *shape] -> [*shape]`.

    Works for parameters and for buffers. `shared` holds patterns of the entries without
    a member axis, which are returned as they are.

    Example:
        >>> member({"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, 1)
        {'weight': tensor([3., 4.])}
    """
    checks.dictionaries("member", params=params)
    [i] = checks.integers("member", minimum=0, i=i)
    common = shared_names("member", params, shared)
    if common.issuperset(params):  # of any number of members
        return dict(params)
    layout = Layout.of("member", params, {}, shared)
    if i >= layout.members:
        raise ValueError(
            f"member(i={i}): expected i < {layout.members}, the number of members."
        )
    return layout.member(params, i)


def unstack(
    fmodel: FunctionalModel,
    params: Params,
    buffers: Buffers,
    *,
    shared: Patterns = (),
) -> list[nn.Module]:
    """Return the E members as modules of their own, with copies of their values.

    `shared` holds patterns of the entries without a member axis; each module gets a
    copy of them. Undoes `stack`.

    Example:
        >>> models = [nn.Linear(3, 2) for _ in range(5)]
        >>> again = unstack(*stack(models))
        >>> all(torch.equal(a.bias, b.bias) for a, b in zip(models, again))
        True
    """
    layout = Layout.of("unstack", params, buffers, shared)
    return [
        fmodel.to_module(layout.member(params, i), layout.member(buffers, i))
        for i in range(layout.members)
    ]


# Models of different architectures: E_g of the E models are in group g.


@dataclass(frozen=True)
class ModelGroups:
    """Groups of stacked models, as `group` makes them.

    Attributes:
        fmodels: the function of one member, for each group.
        params: the stacked parameters of each group, `[E_g, *shape]`.
        buffers: the stacked buffers of each group.
        positions: the places of each group's members among the models.
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
        """
        where = "ModelGroups.map(function)"
        groups = zip(self.fmodels, self.params, self.buffers, strict=True)
        results = [tree_flatten(function(*arguments)) for arguments in groups]
        first, structure = results[0]
        for number, (leaves, other) in enumerate(results):
            if other != structure:
                raise ValueError(
                    f"{where}: expected results of one structure, got {structure} from "
                    f"group 0 and {other} from group {number}."
                )
            count = len(self.positions[number])
            for leaf, like in zip(leaves, first, strict=True):
                if not isinstance(leaf, Tensor):
                    raise TypeError(
                        f"{where}: expected tensors, got a {type(leaf).__name__} from "
                        f"group {number}."
                    )
                expected = (count, *like.shape[1:]), like.dtype, like.device
                if (leaf.shape, leaf.dtype, leaf.device) != expected:
                    raise ValueError(
                        f"{where}: expected a first axis of {count} members from group "
                        f"{number}, and results that differ between groups in that "
                        f"axis only, got {tuple(leaf.shape)}, {leaf.dtype}, "
                        f"{leaf.device} and {tuple(like.shape)}, {like.dtype}, "
                        f"{like.device} from group 0."
                    )
        # The places of the models in the joined tensors.
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

    Example:
        >>> models = [nn.Linear(3, 2), nn.Linear(3, 2, bias=False), nn.Linear(3, 2)]
        >>> groups, x = group(models), torch.ones(4, 3)
        >>> groups.positions
        ((0, 2), (1,))
        >>> def outputs(fmodel, params, buffers):
        ...     return torch.vmap(fmodel, (0, 0, None))(params, buffers, x)
        >>> groups.map(outputs).shape
        torch.Size([3, 4, 2])
    """
    models = _listed("group", models)
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for index, model in enumerate(models):
        content = contents(model)
        for first, positions in groups:
            if difference(first, content) is None:
                positions.append(index)
                break
        else:
            groups.append((content, [index]))
    members = [positions for _, positions in groups]
    stacked = [stack(models[index] for index in positions) for positions in members]
    fmodels, params, buffers = zip(*stacked, strict=True)
    return ModelGroups(fmodels, params, buffers, tuple(map(tuple, members)))
