"""Many models as one: made from modules or from a factory, and taken apart again.

E members. A stacked entry is a tensor `[E, *shape]`, a shared one `[*shape]`.
"""

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.ensemble.axes import members, split
from vgrad.ensemble.matching import check_alike
from vgrad.functional import guards, slots
from vgrad.functional.model import FunctionalModel, make_functional_with_buffers
from vgrad.generators import RNG_LOCK
from vgrad.typing import Buffers, Params


def stack(
    models: Iterable[nn.Module], *, disable_autograd_tracking: bool = False
) -> tuple[FunctionalModel, Params, Buffers]:
    """Stack E models: `models -> (fmodel, params, buffers)`, entries `[E, *shape]`.

    `fmodel` is the function of one member, and the entries are those that
    `make_functional_with_buffers` gives, with the members on axis 0: tied tensors
    appear once, parameters require grad unless `disable_autograd_tracking`, frozen ones
    are among the buffers. Nothing is shared with the modules. The cost is one copy.

    Since all members run the code of the first, the models may differ in the values of
    their parameters and buffers only. Their classes, modes, hooks, functions and plain
    attributes are compared. Models that differ on purpose go through `group`.

    Raises:
        ValueError: there is no model, or one is not like the first; the message names
            the entry, or the submodule and its attribute, and the member.
        TypeError: a model is not a module, or cannot be copied; else as
            `make_functional_with_buffers`.

    Example:
        >>> fmodel, params, buffers = stack([nn.Linear(3, 2) for _ in range(5)])
        >>> params["weight"].shape, params["bias"].shape
        (torch.Size([5, 2, 3]), torch.Size([5, 2]))
        >>> in_dims = (0, 0, None)
        >>> torch.vmap(fmodel, in_dims)(params, buffers, torch.ones(4, 3)).shape
        torch.Size([5, 4, 2])
    """
    models = listed_models("stack", models)
    check_alike("stack(models)", models)
    fmodel, params, buffers = make_functional_with_buffers(
        models[0], disable_autograd_tracking=disable_autograd_tracking
    )
    tensors = [dict(slots.named_tensors(model)) for model in models]

    def stacked(names: Iterable[str], grad: bool) -> dict[str, Tensor]:
        each = {name: [own[name].detach() for own in tensors] for name in names}
        return {
            n: torch.stack(values).requires_grad_(grad) for n, values in each.items()
        }

    trained = stacked(params, not disable_autograd_tracking)
    return fmodel, trained, stacked(buffers, False)


combine_state_for_ensemble = stack


def listed_models(function: str, models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return models as a list of at least one module, each of which can be copied."""
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise TypeError(
            f"{function}(models): expected several models, got a single "
            f"{type(models).__name__}. Put the models into a list."
        )
    models = list(models)
    if not models:
        raise ValueError(f"{function}(models): expected at least one model, got none.")
    for index, model in enumerate(models):
        guards.check_plain(f"{function}(models)[{index}]", model)
    return models


def init_ensemble(
    factory: Callable[[], nn.Module], n: int, *, seed: int
) -> tuple[FunctionalModel, Params, Buffers]:
    """Stack n models made by a factory, each from random numbers of its own.

    Member i is exactly what `factory()` gives after
    `torch.manual_seed(member_seed(seed, i))`, whatever n is. The generators of torch,
    on the CPU and on CUDA devices, are afterwards what they were before. Those of
    `random` and NumPy are not touched: a factory that uses them seeds them itself.

    Raises:
        ValueError: the factory returns one model twice, or models that are not alike.
        TypeError: it returns something else than a module.

    Example:
        >>> factory = lambda: nn.Linear(3, 2)
        >>> fmodel, params, buffers = init_ensemble(factory, 5, seed=0)
        >>> _ = torch.manual_seed(member_seed(0, 3))
        >>> torch.equal(params["weight"][3], factory().weight)
        True
    """
    [n] = checks.whole("init_ensemble", least=1, n=n)
    return stack(made("init_ensemble", lambda i: factory(), range(n), seed=seed))


def made(
    function: str, factory: Callable[[int], nn.Module], which: range, *, seed: int
) -> list[nn.Module]:
    """Make models by `factory(i)`, each from the random numbers of member i.

    Torch's generators are put back.
    """
    [seed] = checks.whole(function, least=0, seed=seed)
    devices = range(torch.cuda.device_count())
    models = []
    with RNG_LOCK, torch.random.fork_rng(devices, device_type="cuda"):
        for i in which:
            torch.manual_seed(member_seed(seed, i))
            models.append(factory(i))
    if len({id(model) for model in models}) < len(which):
        raise ValueError(
            f"{function}(factory): expected a new model from each call, got one of "
            f"them again. Build the model inside of the factory."
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
    seed, i = checks.whole("member_seed", least=0, seed=seed, i=i)
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

    These entries lose the member axis, `[E, *shape] -> [*shape]`. They take the values
    of member 0; those of the others are dropped. They are copies, leaves that require
    grad as before; everything else is passed on as it is. Name all patterns in one
    call, and give the same ones as `shared=` to the functions that take the result.

    Raises:
        ValueError: a pattern matches nothing, or an entry has no member axis.

    Example:
        >>> _, params, buffers = stack([nn.Linear(3, 2) for _ in range(5)])
        >>> params, buffers = share(params, buffers, ["weight"])
        >>> params["weight"].shape, params["bias"].shape
        (torch.Size([2, 3]), torch.Size([5, 2]))
    """
    members(params, buffers)
    _, whole = split("share", {**params, **buffers}, patterns)

    def shared(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: value.detach()[0].clone().requires_grad_(value.requires_grad)
            if name in whole
            else value
            for name, value in values.items()
        }

    return shared(params), shared(buffers)


def member(params: Params, i: int, *, shared: Patterns = ()) -> dict[str, Tensor]:
    """Return the entries of member i as views: `[E, *shape] -> [*shape]`.

    Works for parameters and for buffers. `shared` holds patterns of the entries without
    a member axis, which are returned as they are.

    Raises:
        ValueError: there is no such member, or a pattern matches nothing.

    Example:
        >>> member({"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, 1)
        {'weight': tensor([3., 4.])}
    """
    checks.dictionaries("member", params=params)
    [i] = checks.whole("member", least=0, i=i)
    stacked, whole = split("member", params, shared)
    if stacked and i >= members(stacked, {}):
        raise ValueError(
            f"member(i={i}): expected i < {members(stacked, {})}, the number of "
            f"members."
        )
    return {
        name: value if name in whole else value[i] for name, value in params.items()
    }


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

    Raises:
        ValueError: the entries are not those of `fmodel`, have other shapes, or other
            numbers of members.

    Example:
        >>> models = [nn.Linear(3, 2) for _ in range(5)]
        >>> again = unstack(*stack(models))
        >>> all(torch.equal(a.bias, b.bias) for a, b in zip(models, again))
        True
    """
    stacked, whole = split("unstack", {**params, **buffers}, shared)

    def of(values: dict[str, Tensor], i: int) -> dict[str, Tensor]:
        return {n: value if n in whole else value[i] for n, value in values.items()}

    count = members(stacked, {})
    return [fmodel.to_module(of(params, i), of(buffers, i)) for i in range(count)]
