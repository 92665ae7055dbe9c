"""The comparison of per-sample gradients with plain autograd, on two samples.

B samples, k directions.
"""

import hashlib
import math
import random
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from vgrad.factors.base import Dense, Factor, Probes
from vgrad.factors.reductions import row_norms
from vgrad.generators import (
    hashed_bits,
    kept_random_state,
    random_state,
    sample_keys,
    set_random_state,
    unit,
)
from vgrad.loss.mode import SINGLE
from vgrad.loss.randomness import Draws
from vgrad.persample.engine.call import LOCAL, Call
from vgrad.persample.engine.collectors import Collector
from vgrad.persample.engine.guard import (
    Failure,
    Fallbacks,
    History,
    UnsupportedOp,
)
from vgrad.persample.engine.joins import Concatenated, Joined
from vgrad.persample.engine.parts import note_split, run_in_parts
from vgrad.persample.engine.strategies import STRATEGIES, Chunk, plain_gradient
from vgrad.torch_private import autograd, kernels, modes
from vgrad.torch_private.shards import is_distributed
from vgrad.torch_private.tracing import DispatchMode
from vgrad.tree import double, map_values, tensors
from vgrad.typing import Params, Strategy, Tree

_DIRECTIONS = 4
"""Random directions on which gradients are compared: one may miss a difference."""

_SPREAD = 8.0
"""How many times gradients may differ as much as those at a point close by."""

_INFINITE = "gradients are not finite"
"""Why samples show nothing, which others may."""

_NONE: frozenset[str] = frozenset()

_WIDE = 2**28
"""Bytes of parameters in float64 up to which they are compared in it."""


class Bound(NamedTuple):
    """How far two right gradients may be apart, in arithmetic of some precision."""

    relative: float  # to the norm of the parameter's gradient
    share: float  # of the norm over all parameters that is added to that norm
    floor: float = 0.0  # below this numbers have lost their digits


def bound_of(kinds: Collection[torch.dtype]) -> Bound:
    """Return the bound for arithmetic in these dtypes."""
    eps = max(torch.finfo(kind).eps for kind in kinds)
    # Thousands of the smallest numbers, into which sums of products underflow.
    tiny = 2**15 * max(torch.finfo(kind).tiny * torch.finfo(kind).eps for kind in kinds)
    if eps <= torch.finfo(torch.float64).eps:
        return Bound(1e-6, 1e-6, tiny)
    if eps <= torch.finfo(torch.float32).eps:
        return Bound(2e-2, 1e-2, tiny)
    return Bound(1e-1, 1e-1, tiny)


def verify(call: Call, *, strict: bool) -> "Disagreement | None":
    """Compare gradients with plain autograd at calls 1, 2, 4, ... of a signature.

    Where they differ, the signature gets another route; `UnsupportedOp` where the
    caller has chosen the strategy, in private training, and if `strict`. Where two
    samples do not run together, nothing was compared: return why.
    """
    history = call.history
    if not _is_compared(call):
        return None
    history.calls += 1
    if history.calls & (history.calls - 1):
        return None
    return _verified(call, strict=strict)


def _is_compared(call: Call) -> bool:
    if not call.verify or not call.batch.size or call.strategy == "loop":
        return False
    looped = call.history.lasting and call.history.way == "loop"
    return not (looped or call.captured or modes.inside_transform())


def confirm(
    call: Call,
    joint: frozenset[str],
    doubt: "Disagreement | None",
    *,
    strict: bool,
) -> bool:
    """Return whether the results of strategies may stay that ran samples together.

    A strategy that runs for the first time is compared at once, whatever the number of
    the call; and none may stay where two samples do not run together.
    """
    history = call.history
    if not joint or not _is_compared(call):
        return True
    for strategy in sorted(joint - history.compared) if history.compared else ():
        doubt = doubt or _verified(call, strict=strict, strategy=strategy)
        history.compared |= {strategy}  # or it cannot be
    if doubt is not None:
        if strict or call.private or call.strategy != "auto":
            raise UnsupportedOp(doubt.text(call))
        doubt.exclude(call, "loop")
    order: tuple[str, ...] = get_args(Strategy)
    return all(order.index(one) >= order.index(history.first) for one in joint)


def _verified(
    call: Call, *, strict: bool, strategy: str | None = None
) -> "Disagreement | None":
    """Compare by the call's strategy, or by another one."""
    history = call.history
    shards = call.reducer is not LOCAL  # whose values all ranks gather together
    if shards or any(x.is_meta or is_distributed(x) for x in call.tensors):
        history.why = "tensors without values, or shards, are not compared"
        return None
    pair = _pair(call, history)
    if pair is None:
        history.why = "no sample counts"
        return None
    pair = pair.replaced(strategy=strategy or call.strategy)
    try:
        return _settle(call, pair, history, strict)
    except BaseException:
        history.calls -= 1  # so that the next call is compared, too
        raise


def _settle(
    call: Call, pair: Call, history: History, strict: bool
) -> "Disagreement | None":
    """Compare two samples until a route agrees; return why they do not run together."""
    wide = history.calls.bit_length() % 2 and not modes.autocast_is_on()
    while True:
        # The pair has other graphs, and other numbers: its way is not the call's.
        before = history.way, history.failure, history.lasting
        with undisturbed(pair.tensors) as restart, torch.no_grad():
            result = _compare(pair, history, restart, wide=bool(wide))
        history.way, history.failure, history.lasting = before
        if not isinstance(result, Disagreement):
            history.why = result or history.why
            history.calls -= result == _INFINITE  # the next call may have others
            return None
        history.why = result.why
        if not result.strategies:
            history.calls -= 1  # the next call is compared, too
            return result
        if strict or call.private or call.strategy != "auto":
            raise UnsupportedOp(result.text(call))
        result.exclude(call, "vmap" if result.strategy == "recorded" else "loop")
        if history.way == "loop" or pair.strategy != "auto":
            return None


@dataclass(frozen=True)
class Disagreement:
    """Two samples have other gradients than plain autograd, or do not run together."""

    why: str
    strategies: frozenset[str]  # which ran; none of samples that run alone

    @property
    def strategy(self) -> Strategy:
        return "recorded" if "recorded" in self.strategies else "vmap"

    def text(self, call: Call) -> str:
        by = f" by {self.strategy!r}" if self.strategies else ""
        got = "other ones" if self.strategies else "some that cannot be compared"
        return (
            f"{call.function}(loss, strategy={call.strategy!r}): expected gradients "
            f"that agree with plain autograd, got {got}{by}: {self.why}. Use "
            f'strategy="loop".'
        )

    def exclude(self, call: Call, first: Strategy) -> None:
        """Have later calls begin with another strategy, with a warning."""
        before = f"strategy={self.strategy!r}" if self.strategies else "all at once"
        call.fallbacks.warn(
            f"{call.function}: the loss does not run with {before}, since {self.why}. "
            f"The numbers are right, but slow."
        )
        failure, history = Failure("a comparison", self.why, refused=True), call.history
        history.first, history.refuted = first, failure
        history.way, history.failure, history.lasting = first, failure, True


def _pair(call: Call, history: History) -> Call | None:
    """Return the call on two samples that count, other ones each time."""
    places = torch.arange(call.batch.size)
    if call.mask is not None:
        places = call.mask.nonzero().flatten().cpu()
    if not len(places):
        return None
    number = 2 * history.calls.bit_length()
    rows = places[torch.tensor([number - 2, number - 1]).remainder(len(places))]
    changes: dict[str, Any] = {"mask": None, "weights": None, "cross": None}
    changes |= {"draws": Draws(), "reducer": LOCAL, "chunk_size": None}
    fallbacks = Fallbacks(silent=True)
    fallbacks.route = call.fallbacks.route
    changes |= {"fallbacks": fallbacks, "unreached": set()}
    detached = {"params": map_values(Tensor.detach, call.params)}
    pair = call.replaced(**changes, **detached).select(rows)
    return _beside(pair.select(slice(1))) if len(places) == 1 else pair


def _widened(call: Call) -> Call | None:
    """Return a call in float64, None where it would take much memory."""
    if sum(8 * value.numel() for value in call.params.values()) > _WIDE:
        return None

    def widen(tensor: Tensor) -> Tensor:
        real = tensor.is_floating_point() or tensor.is_complex()
        return double(tensor.detach()) if real else tensor

    params, buffers = (map_values(widen, x) for x in (call.params, call.buffers))
    tensors = [*map(widen, call.batch.tensors)]
    batch = type(call.batch)(call.batch.size, call.batch.tree, tensors)
    return call.replaced(params=params, buffers=buffers, batch=batch)


@contextmanager
def undisturbed(tensors: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
    """Keep all generators, and strategies silent; yield the restart of the former."""
    python, of_numpy = random.getstate(), np.random.get_state()
    with kept_random_state(tensors), autograd.plain():
        state = random_state(tensors)

        def restart() -> None:
            set_random_state(state)
            random.setstate(python)
            np.random.set_state(of_numpy)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield restart
            finally:
                restart()
    for warning in caught:
        if str(warning.message).startswith("autocast: "):  # once in a process
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


def _compare(
    call: Call, history: History, restart: Callable[[], None], *, wide: bool
) -> "Disagreement | str | None":
    """Return a disagreement, None for none, or why there is no comparison."""
    draws = call.randomness != "error"
    calls = [call]
    if draws:
        # By keys a number follows from its place in a tensor of a sample; torch's
        # generators fill the memory of all samples in another order.
        keys = sample_keys(0, 0, call.batch.size, call.device)
        keyed = call.replaced(randomness="different", draws=Draws(keys=keys))
        calls = [keyed, call.replaced(randomness="same")]
    result: Any = None
    for trial in calls:
        if wide and (widened := _widened(trial)) is not None:
            # A loss with a constant of its own dtype may refuse float64.
            result = _of_two(widened, history, restart)
            raises = isinstance(result, Disagreement) and "raises" in result.why
            if not (raises or isinstance(result, str) or _runs_apart(result)):
                break
        result = _of_two(trial, history, restart)
        if not (isinstance(result, str) or (draws and _runs_apart(result))):
            break
    if isinstance(result, Disagreement) and draws and trial is not keyed:
        return "samples do not draw by keys"
    return result


def _runs_apart(result: Any) -> bool:
    return isinstance(result, Disagreement) and not result.strategies


def _of_two(
    call: Call, history: History, restart: Callable[[], None]
) -> "Disagreement | str | None":
    """Compare two samples, and where each runs by itself, one and one close by.

    Values that a loss reads are the same for these, and so is the way they take.
    """
    result = _compared(call, history, restart)
    if not isinstance(result, _Apart):
        return result
    near = _compared(_beside(call.select(slice(1))), history, restart)
    if isinstance(near, Disagreement) and near.strategies:
        return near
    return None if near is None else result.failure


@dataclass(frozen=True)
class _Apart:
    """Two samples ran one by one, for their values or because they cannot together."""

    failure: Disagreement | str | None


def _beside(call: Call) -> Call:
    """Return the call on a sample and on one with slightly other real numbers."""

    def doubled(tensor: Tensor) -> Tensor:
        near = tensor
        if tensor.is_floating_point() or tensor.is_complex():
            near = _shifted(tensor, 1e-3)
        return torch.cat([tensor, near])

    tensors = [*map(doubled, call.batch.tensors)]
    batch = type(call.batch)(2, call.batch.tree, tensors, call.batch.plain)
    keys = call.draws.keys
    draws = Draws(keys=None if keys is None else keys.repeat(2))
    return call.replaced(batch=batch, draws=draws)


def _compared(
    call: Call, history: History, restart: Callable[[], None]
) -> "Disagreement | _Apart | str | None":
    names, probes, failure = [*call.params], {}, ""
    singles = [call.select(slice(row, row + 1)) for row in range(call.batch.size)]
    parts = Joined(call, {"products": Concatenated()})
    try:
        restart()
        run, rows = partial(_run, probes), range(call.batch.size)
        run_in_parts([(call, rows)], run, run, note_split, parts.add)
        parts.close()
    except torch.OutOfMemoryError as error:
        return _first_line(error)
    except Exception as error:
        failure = _first_line(error)
    used = frozenset(chunk.strategy for chunk in parts.chunks) - {"loop"}
    try:
        plain = _plain(singles, probes, restart)
        restart()
        repeated = _value(singles[0])
    except Exception as error:
        failure = failure or _first_line(error)
        kinds = torch.OutOfMemoryError | NotImplementedError
        if kernels.NO_KERNEL in str(error):
            return failure
        if not used or isinstance(error, kinds) or not isinstance(error, RuntimeError):
            return failure
        return Disagreement(f"plain autograd raises {failure!r} for a sample", used)
    if failure:
        return _Apart(Disagreement(f"two samples raise {failure!r} together", _NONE))
    products = parts.values["products"][""]
    if any(trial.draws.used_generator for trial in (call, *singles)):
        return "the loss draws from a torch.Generator of its own"
    _check_pure(call, plain.losses[0], repeated)
    if not plain.total.isfinite().any():
        return _INFINITE
    kinds = {value.dtype for value in call.params.values()}
    bound = bound_of(kinds)
    differences = _differences(products, plain, bound)
    if bool((differences > bound.relative).any()):
        # Arithmetic inside of the loss may be less precise, or gradients may be made of
        # rounding errors: then those at points close by differ as much.
        restart()
        with Dtypes() as mode:
            _value(singles[0])
        kinds |= mode.seen
        bound, eps = bound_of(kinds), max(torch.finfo(kind).eps for kind in kinds)
        near = _plain([_moved(one, 16 * eps) for one in singles], probes, restart)
        differences = _differences(products, plain, bound, near)
    difference, name = float(differences.max()), names[int(differences.argmax())]
    if difference > bound.relative:
        if not used:
            raise _impure(call, "other gradients")
        return Disagreement(
            f"its gradient of {name!r} differs from plain autograd's by "
            f"{difference:.0e} of the norm",
            used,
        )
    if not used:
        stopped = history.failure if history.way == "loop" else None
        why = "samples run one after another"
        return _Apart(why if stopped is None else Disagreement(stopped.why, _NONE))
    history.times += 1
    history.compared |= used
    apart = all(len(chunk.losses) == 1 for chunk in parts.chunks)
    if difference > history.largest:
        history.largest, history.where = difference, name
    zeros = (products == 0).all(2).all(0) & (plain.norms == 0).all(0)
    unseen = {name for name, zero in zip(names, zeros.tolist(), strict=True) if zero}
    history.unseen = frozenset(unseen & history.unseen if history.times > 1 else unseen)
    return _Apart(None) if apart and call.batch.size > 1 else None


def _differences(
    products: Tensor, plain: "_Plain", bound: Bound, near: "_Plain | None" = None
) -> Tensor:
    """Return the differences of parameters, relative to the norms of gradients, [P]."""
    gap = _length(products - plain.values).nan_to_num(torch.inf)
    size = plain.norms + bound.share * plain.total
    if near is not None:
        spread = _length(near.values - plain.values)
        size = size + (_SPREAD * spread + bound.floor) / bound.relative
    relative = torch.where(gap == 0, 0.0, gap / size)
    return torch.where(plain.total.isfinite(), relative, 0.0).amax(0)


def _length(values: Tensor) -> Tensor:
    """Return norms of gradients, by their inner products with the directions."""
    return values.square().mean(-1).sqrt()


@dataclass
class _Projections(Collector):
    """Keeps inner products with the directions, [B, k] in float64."""

    params: Params
    probes: dict[str, Probes]
    factors: dict[str, Factor] = field(default_factory=dict)

    def add(self, name: str, factor: Factor) -> None:
        self.factors[name] = factor  # until the end, as collectors of norms do

    def values(self) -> Tensor:
        """Return the products [B, P, k], for which factors are given up."""
        products = {
            name: self.product(name, self.factors.pop(name)) for name in self.params
        }
        return _stacked(products)

    def product(self, name: str, factor: Factor) -> Tensor:
        """Return the products of one parameter, [B, k]."""
        if name not in self.probes:
            like = self.params[name]
            self.probes[name] = _directions(name, factor.shape, like)
        value = factor.project(self.probes[name]).detach()
        return double(value).view(factor.size, _DIRECTIONS)


def _directions(name: str, shape: torch.Size, like: Tensor) -> Probes:
    """Return directions that follow from a name, of uniform numbers of variance one."""
    sizes = (*shape, 2) if like.is_complex() else (*shape,)
    digest = hashlib.sha256(name.encode()).digest()

    def draw(key: bytes, size: int) -> Tensor:
        bits = hashed_bits(key, _DIRECTIONS * size, like.device)
        numbers = (unit(bits, 53, torch.float64) - 0.5) * math.sqrt(12)
        return numbers.view(_DIRECTIONS, size)

    if len(sizes) < 2:
        return Probes(None, draw(digest[:16], math.prod(sizes)))
    return Probes(draw(digest[16:], sizes[0]), draw(digest[:16], math.prod(sizes[1:])))


def _run(probes: dict[str, Probes], call: Call) -> Chunk:
    chunk = STRATEGIES[call.strategy](call, partial(_Projections, call.params, probes))
    return chunk._replace(collected={"products": {"": chunk.collected.values()}})


def _stacked(values: Params) -> Tensor:
    """Join tensors `[B, ...]` of P parameters, [B, P, ...], and read them at once."""
    device = next(iter(values.values())).device
    return torch.stack([value.to(device) for value in values.values()], 1).cpu()


class _Plain(NamedTuple):
    """What plain autograd computes, sample by sample."""

    losses: list[Tensor]
    values: Tensor  # [B, P, k]
    norms: Tensor  # [B, P]

    @property
    def total(self) -> Tensor:
        """The norms over all parameters, [B, 1]."""
        return self.norms.norm(dim=1, keepdim=True)


def _plain(
    calls: Sequence[Call], probes: dict[str, Probes], restart: Callable[[], None]
) -> _Plain:
    losses, values, norms = [], [], []
    for call in calls:
        restart()
        loss, products, lengths = _of_one(call, probes)
        losses.append(loss)
        values.append(_stacked(products))
        norms.append(_stacked(lengths))
    return _Plain(losses, torch.cat(values), torch.cat(norms))


def _of_one(call: Call, probes: dict[str, Probes]) -> tuple[Tensor, Params, Params]:
    """Return the loss of one sample, products with directions [1, k] and norms [1]."""
    grads, loss, _ = plain_gradient(partial(_run_alone, call), call)
    collector = _Projections(call.params, probes)
    products: Params = {}
    norms: Params = {}

    def add(name: str, factor: Factor) -> None:
        products[name] = collector.product(name, factor)
        norms[name] = row_norms(factor.grad())

    unscaled = call.unscaled(add)
    for name in list(grads):  # each is freed before the next one is projected
        unscaled(name, Dense(grads.pop(name).detach().unsqueeze(0)))
    return loss, products, norms


def _run_alone(call: Call, params: Params) -> tuple[Tensor, Tree]:
    mode = call.mode(handlers=SINGLE)
    return call.run_loss(params, call.batch.one(0), mode, unbatched=True)


def _value(call: Call) -> Tensor:
    with torch.enable_grad():
        params = map_values(lambda value: value.detach().requires_grad_(), call.params)
        return _run_alone(call, params)[0].detach()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _check_pure(call: Call, value: Tensor, repeated: Tensor) -> None:
    """Refuse a loss that has another value when it runs again."""
    if not torch.allclose(value, repeated, rtol=1e-3, equal_nan=True):
        raise _impure(call, "another value")


def _impure(call: Call, got: str) -> RuntimeError:
    return RuntimeError(
        f"{call.function}(loss): expected a loss that depends on its arguments alone, "
        f"got {got} when it ran once more on the same sample and random numbers. A "
        f"loss may keep nothing for its next call (counters, moving averages, caches), "
        f"and may not write into parameters, by .data and numpy neither. Pass "
        f"verify=False if it differs on purpose."
    )


def _moved(call: Call, part: float) -> Call:
    """Return the call at a point that differs by such a part of each number."""

    def moved(tensor: Tensor) -> Tensor:
        real = tensor.is_floating_point() or tensor.is_complex()
        return _shifted(tensor, part) if real else tensor

    params, buffers = (map_values(moved, x) for x in (call.params, call.buffers))
    return call.replaced(params=params, buffers=buffers)


def _shifted(value: Tensor, part: float) -> Tensor:
    """Return numbers that each differ by such a part."""
    real = value.real if value.is_complex() else value
    parts = _directions("", torch.Size((real.numel(),)), real).right[0]
    return (value * (1 + part * parts.view_as(real))).to(value.dtype)


class Dtypes(DispatchMode):
    """Notes the dtypes of the numbers that a block computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        floats = filter(torch.is_floating_point, tensors(output))
        self.seen.update(tensor.dtype for tensor in floats)
        return output
