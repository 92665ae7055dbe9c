"""The options of a transform, and one call of it: the tensors of a batch."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, Self, TypedDict, get_args

import torch
from torch import Tensor

from vgrad import batches, checks
from vgrad.conditions import Unrepeatable, checks_collected
from vgrad.factors.base import Factor, Scaled
from vgrad.factors.costs import without_factors
from vgrad.factors.reductions import norm_dtype
from vgrad.functional.guards import Protected
from vgrad.functional.losses import check_loss, returned
from vgrad.generators import RandomState, set_random_state
from vgrad.loss.mode import LossMode, unchanged
from vgrad.loss.randomness import Draws, drew, fresh_keys
from vgrad.loss.values import Partition, SplitBatch
from vgrad.persample.engine.guard import Fallbacks, History, UnsupportedOp
from vgrad.precision.autocasting import AutocastMode
from vgrad.precision.loss_scale import LossScale
from vgrad.torch_private import autograd, modes
from vgrad.torch_private.tensors import with_attributes
from vgrad.tree import map_tensors, map_values, tensors, tree_leaves
from vgrad.typing import (
    Buffers,
    ChunkSize,
    LossFn,
    Params,
    Randomness,
    Scales,
    Strategy,
    Tree,
    shows,
)


class Options(TypedDict, total=False):
    """Options that all per-sample transforms share, each a keyword.

    All but `per_sample_gram` and `gradient_moments` also have `has_aux`: the loss
    returns `(scalar, aux)`, and the result is a pair with `aux`, stacked over samples
    (None for an empty batch).

    Attributes:
        strategy: how gradients are computed; the numbers are the same. `"recorded"`
            runs one backward pass for all samples and keeps a compact form of each
            gradient; `"vmap"` differentiates all samples at once and stores every
            gradient; `"loop"` runs one sample after another, and everything that plain
            autograd runs. `"auto"`, the default, records, and falls back to `"vmap"`
            and then to `"loop"` for a loss that cannot be recorded; later samples of
            the same kind take that way at once. A part of one sample, where
            values split a chunk, may run as in a loop. Inside transforms of
            `torch.func` it is `"vmap"`.
        chunk_size: samples at a time; None, the default, for all, `"auto"` for as many
            as fit into half of the free memory (the loss runs on one sample to find
            out).
        randomness: of random ops in the loss: `"error"`, the default, refuses them,
            with `"different"` each sample draws its own numbers, with `"same"` all
            samples draw the same. From one state of the generator a loop draws as the
            model would, called with one sample after another. The other strategies draw
            for all samples at once, and agree with it under `"same"` alone.
        loss_scale: a loss scale of `vgrad.precision`. Losses are multiplied by it
            before the backward pass, so that gradients in float16 do not underflow, and
            each sample's gradient is divided by it before anything else: results do not
            depend on the scale unless something overflows. Gradients are float32 or
            wider then.
        verify: compare the gradients of two samples with plain autograd, at calls 1, 2,
            4, 8, ... of each kind of batch (dtypes and numbers of dimensions, autocast,
            training mode). Where they differ, `"auto"` goes on with the next strategy,
            with a warning; another strategy raises, and so does private training. A
            loss with another value when it runs again raises. Results do not depend on
            this option. It costs some passes of two samples at each of these calls.
    """

    strategy: Strategy
    chunk_size: ChunkSize
    randomness: Randomness
    loss_scale: LossScale | None
    verify: bool


Take = Callable[[str, Factor], None]
"""Accepts the factor of one parameter."""


def check_options(function: Callable, options: Any, shared: type = Options) -> None:
    """Refuse options that are neither shared nor the function's own."""
    if unknown := sorted(options.keys() - shared.__annotations__):
        names = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
            and name not in shared.__annotations__
        ]
        raise TypeError(
            f"{function.__name__}({unknown[0]}=...): expected options among "
            f"{', '.join([*names, *shared.__annotations__])}, got {unknown[0]!r}."
        )


def check_loss_scale(function: str, loss_scale: Any) -> None:
    """Refuse objects without a scale, and several scales."""
    if loss_scale is not None and not hasattr(loss_scale, "loss_scale"):
        raise TypeError(
            f"{function}(loss_scale={checks.shown(loss_scale)}): expected a loss "
            f"scale such as precision.StaticLossScale(2.0**15), got a "
            f"{type(loss_scale).__name__}."
        )
    scale = torch.as_tensor(getattr(loss_scale, "loss_scale", 1.0))
    if scale.ndim:
        raise ValueError(
            f"{function}(loss_scale): expected a scale without dimensions, got one of "
            f"shape {tuple(scale.shape)}. For one scale a member use torch.vmap."
        )


class Inputs(NamedTuple):
    """The arguments of one call of a transform, as the caller passes them."""

    params: Params
    buffers: Buffers
    batch: Tree
    mask: Tensor | None = None  # which samples count, bool [B]
    weights: Tensor | None = None  # of the samples, [B]
    cross: Tree = None  # a second batch
    loss_scale: LossScale | None = None
    keys: Tensor | None = None  # int64 [B]: of random numbers that differ by sample
    max_norm: Tensor | None = None  # a bound of clipping that is not known before
    scales: Scales | None = None  # of gradients

    def padded(self, size: int, total: int) -> "Inputs":
        """Fill a batch up to `total` samples with some that do not count."""

        def fill(values: Tensor) -> Tensor:
            first = values[:1] if size else values.new_zeros((1, *values.shape[1:]))
            copies = first.expand(total - size, *values.shape[1:])
            return torch.cat([values, copies]) if total > size else values

        counts = torch.arange(total, device=tensors(self.batch)[0].device) < size
        if self.mask is not None:
            counts[:size] &= self.mask
        batch, weights, keys = map_tensors(fill, (self.batch, self.weights, self.keys))
        return self._replace(batch=batch, mask=counts, weights=weights, keys=keys)

    def with_keys(self) -> "Inputs":
        """Add keys of the samples, from a number of torch's generator."""
        leaves = tensors(self.batch)
        if checks_collected():  # of a step, whose graph would hold the number
            raise Unrepeatable("samples draw numbers before they read values")
        if not leaves or not leaves[0].ndim or self.cross is not None:
            return self  # samples of two batches have no keys
        if modes.inside_transform():
            return self
        return self._replace(keys=fresh_keys(len(leaves[0]), leaves[0].device))


class Reducer:
    """How sums over chunks are reduced over ranks: by default there is one rank."""

    def summed(self, name: str, value: Tensor) -> Tensor:
        """Return the value to keep of a parameter's sum over a chunk."""
        return value

    def reduced(self, name: str, value: Tensor) -> Tensor:
        """Like `summed`, for a sum that no other strategy will form again."""
        return value

    def of_part(self) -> "Reducer":
        """Return the reducer of a call on some of the samples."""
        return self

    def any_rank(self, condition: bool) -> bool:
        """Return whether a condition holds on any rank."""
        return condition


LOCAL = Reducer()


@dataclass(frozen=True, kw_only=True)
class AnyCall:
    """The options and the tensors that calls of samples and of members have in common.

    It is made without tensors, and run by `run_in_parts`, whose parts `select` returns.
    """

    function: str  # its name, for errors
    strategy: Any = "auto"
    randomness: Randomness = "error"
    # Of all calls: warnings, why a loss was not recorded, and the parameters that
    # receive no gradient, as plain autograd on one sample or member has confirmed.
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    unreached: set[frozenset[str]] = field(default_factory=set)
    params: Params = field(default_factory=dict)
    buffers: Buffers = field(default_factory=dict)
    draws: Draws = field(default_factory=Draws)
    captured: bool = False  # whether a graph keeps the ops, and no value may be read

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the caller."""
        raise NotImplementedError

    def replaced(self, **fields: Any) -> Self:
        """Return a copy with other fields."""
        # As `dataclasses.replace`, which takes as long as a small op.
        state, copy = vars(self), object.__new__(type(self))
        # Without properties, which are cached of the old fields.
        state = {name: state[name] for name in self.__dataclass_fields__}
        vars(copy).update(state, **fields)
        return copy

    def checked(self, strategies: Any) -> Self:
        """Refuse unknown strategies and kinds of randomness."""
        checks.choice(self.function, get_args(strategies), strategy=self.strategy)
        checks.choice(self.function, get_args(Randomness), randomness=self.randomness)
        return self

    def check_node_hooks(self) -> None:
        """Refuse hooks that would get the nodes of all samples or members."""
        if autograd.node_hooks():
            raise RuntimeError(
                f"{self.function}: expected no node_creation_hook around the call, "
                f"which has nodes of all at once, got one. Enter it inside of the loss."
            )

    def draws_by_keys(
        self, keys: Tensor | None, size: int, one: str, *, captured: bool
    ) -> Draws:
        """Return the random numbers of as many samples or members, by keys if any."""
        if keys is None:
            if self.fallbacks.keyed and captured:
                self.refuse_unkeyed(size)
            return Draws()
        if keys.dtype != torch.int64 or keys.shape != (size,):
            raise ValueError(
                f"{self.function}(keys): expected one key a {one}, int64 [{size}] as "
                f"sample_keys makes them, got {keys.dtype} {tuple(keys.shape)}."
            )
        if modes.inside_transform():
            raise ValueError(
                f"{self.function}(keys): expected a call outside of transforms of "
                f"torch.func, got one inside, where other {one}s draw as well. Leave "
                f"the keys out."
            )
        return Draws(keys=keys if self.randomness == "different" else None)

    def refuse_unkeyed(self, size: int) -> NoReturn:
        """Refuse a capture without keys; the next call has some."""
        raise SplitBatch(Partition([torch.arange(size)], "", keyed=True))

    def refuse_draws(
        self, before: RandomState, one: str, repeat: Callable, *, own: bool = False
    ) -> None:
        """Refuse random numbers drawn since then, unless the caller allows them.

        With `own` numbers of a generator of the loss's own were drawn.
        """
        if self.randomness == "error" and (own or drew(before, self.tensors, repeat)):
            set_random_state(before)
            raise RuntimeError(
                f"{self.function}: expected a loss without random numbers, since "
                f'randomness="error". Pass randomness="different" (each {one} draws '
                f'its own) or "same".'
            )

    def by_itself(self) -> Self:
        """Return a part of a call that is split in the way that suits it best."""
        return self

    @property
    def by_values(self) -> bool:
        """Whether the graph may depend on values that were read."""
        # A capture has the graph of the eager run before.
        return self.draws.values_read and not self.captured

    def confirmed(self, names: frozenset[str]) -> bool:
        """Return whether plain autograd has found that these receive no gradient."""
        return names in self.unreached and not self.by_values


@dataclass(frozen=True, kw_only=True)
class Call(AnyCall):
    """The options of a transform; `on` adds the tensors of one batch."""

    loss: LossFn
    strategy: Strategy = "auto"
    chunk_size: ChunkSize = None
    has_aux: bool = False
    loss_scale: LossScale | None = None
    max_norm: Tensor | None = None
    scales: Scales | None = None
    # The loss returns an output of any shape, and cotangents [K, ...] of it: gradients
    # are [B, K, ...], from one forward pass.
    columns: bool = False
    batch: batches.Batch = batches.NONE
    mask: Tensor | None = None  # as of `Inputs`
    weights: Tensor | None = None
    cross: Tree = None
    reducer: Reducer = LOCAL
    # Whether parts of one sample may run by plain autograd: graphs have other numbers.
    singly: bool = True
    verify: bool = True
    private: bool = False  # whether numbers may depend on no sample but by their sum
    history: History = field(default_factory=History)  # of the signature of this call

    @classmethod
    def of(
        cls, function: Callable, loss: LossFn, options: Options, has_aux: bool = False
    ) -> "Call":
        """Check the options of a transform."""
        check_options(function, options)
        name = function.__name__
        check_loss(name, loss)
        call = cls(function=name, loss=loss, has_aux=has_aux, **options)
        call.checked(Strategy)
        check_loss_scale(name, call.loss_scale)
        checks.choice(name, (True, False), verify=call.verify)
        size = batches.checked_chunk_size(name, call.chunk_size)
        return call.replaced(chunk_size=size)

    def on(self, inputs: Inputs) -> "Call":
        """Check the tensors of a batch, and return the call on it."""
        params, buffers, batch, mask, weights, cross = inputs[:6]
        captured = checks_collected()
        self.check_node_hooks()
        checks.dictionaries(self.function, params=params, buffers=buffers)
        read = batches.read(self.function, batch)
        _check_tensors(self.function, params, buffers, read.tensors)
        if mask is not None:
            batches.check_mask(self.function, mask, read.size)
        if any(map(Tensor.is_inference, (*params.values(), *buffers.values()))):
            params, buffers = map_values(usable, params), map_values(usable, buffers)
        if not torch.is_grad_enabled():  # nor can the caller differentiate
            buffers = map_values(_constant, buffers)
        draws = self.draws_by_keys(inputs.keys, read.size, "sample", captured=captured)
        if inputs.keys is not None and self.randomness == "same":
            draws = Draws(keys=inputs.keys[:1].expand(read.size), shared=True)
        return self.replaced(
            params=dict(params),
            buffers=dict(buffers),
            batch=read,
            mask=mask,
            weights=weights,
            cross=cross,
            loss_scale=inputs.loss_scale,
            max_norm=inputs.max_norm,
            scales=inputs.scales,
            draws=draws,
            captured=captured,
            history=self._history(params, buffers, read, captured=captured),
        )

    def _history(
        self, params: Params, buffers: Buffers, batch: batches.Batch, *, captured: bool
    ) -> History:
        """Return the record of calls with tensors of these kinds."""
        kinds = [*map(_KIND, (*params.values(), *buffers.values(), *batch.tensors))]
        casts = None
        if modes.autocast_is_on():
            casts = torch.get_autocast_dtype(batch.tensors[0].device.type)
        training = getattr(self.loss, "training", None)
        rest = casts, training, *batch.plain, *kinds
        histories = self.fallbacks.histories
        if captured:  # without grad mode, of the call before it
            eager = histories.get((True, *rest)) or histories.get((False, *rest))
            return eager or History()
        return histories.setdefault((torch.is_grad_enabled(), *rest), History())

    @property
    def changed(self) -> dict[str, Any]:
        """The options that are not the default ones."""
        names = *Options.__annotations__, "has_aux"
        defaults = {field.name: field.default for field in fields(self)}
        now = {name: getattr(self, name) for name in names}
        return {name: x for name, x in now.items() if x != defaults[name]}

    def select(self, rows: slice | Tensor) -> "Call":
        """Return the call on these samples, in this order: a chunk or a part."""
        size = self.batch.size
        if isinstance(rows, slice) and rows.indices(size) == (0, size, 1):
            return self
        mask, weights = self.mask, self.weights
        return self.replaced(
            batch=self.batch.select(rows),
            mask=None if mask is None else batches.select_rows(mask, rows),
            weights=None if weights is None else batches.select_rows(weights, rows),
            draws=self.draws.of(rows),
            reducer=self.reducer.of_part(),
        )

    def by_itself(self) -> "Call":
        """Run a part of one sample by plain autograd, without vmap and factors.

        The way depends on the part alone, and random numbers do not depend on the way.
        """
        draws = self.randomness != "error" and self.draws.keys is None
        if self.batch.size > 1 or self.strategy != "auto" or not self.singly or draws:
            return self
        sizes = [value.nbytes for value in self.params.values()]
        graph = modes.inside_transform() or self.differentiable
        return (
            self
            if graph or not without_factors(sizes)
            else self.replaced(strategy="loop")
        )

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.batch.size

    @cached_property
    def tensors(self) -> list[Tensor]:
        fixed = *self.params.values(), *self.buffers.values()
        return [*fixed, *self.batch.tensors, *tensors((self.weights, self.cross))]

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of norms over all parameters."""
        return norm_dtype(self.params)

    @property
    def device(self) -> torch.device:
        return next(iter(self.params.values())).device

    @property
    def differentiable(self) -> bool:
        """Whether the caller can differentiate the gradients once more."""
        return torch.is_grad_enabled() and any(
            map(attrgetter("requires_grad"), self.tensors)
        )

    def mode(self, *protected: Protected, **options: Any) -> LossMode:
        """Make the function mode of the loss, which must leave its arguments alone."""
        fixed, notes = {**self.params, **self.buffers}, self.fallbacks
        options |= {"looped": notes.looped, "hooks": notes.hooks, "draws": self.draws}
        options["captured"] = self.captured
        return LossMode(unchanged(fixed), *protected, **options)

    def cotangent(self, losses: Tensor, aux: Any = None) -> Tensor:
        """Return the loss scale, or one, for each loss; of columns times `aux`."""
        ones = aux if self.columns else torch.ones_like(losses)
        return ones if self.loss_scale is None else ones * self._scale(losses.dtype)

    def unscaled(self, add: Take) -> Take:
        """Return a function that takes factors without the loss scale, in `scales`."""
        scales, scale = self.scales or {}, None
        if self.loss_scale is not None:
            scale = self._scale(torch.float32)

        def add_unscaled(name: str, factor: Factor) -> None:
            factor = factor.times(scales[name]) if name in scales else factor
            add(name, factor if scale is None else Scaled(factor, scale))

        return add if scale is None and not scales else add_unscaled

    def _scale(self, dtype: torch.dtype) -> Tensor:
        scale: Any = self.loss_scale
        scale = torch.as_tensor(scale.loss_scale, device=self.device).detach()
        # A loss of any dtype can be multiplied by it without rounding. The gradients
        # are divided by the same number, so results do not depend on it.
        return scale.to(torch.bfloat16).to(dtype)

    def run_loss(
        self,
        params: Params,
        tensors: tuple[Tensor, ...],
        mode: LossMode,
        *,
        unbatched: bool = False,
    ) -> tuple[Tensor, Tree]:
        """Return `(scalar, aux)` of a copy of a sample, one of many or unbatched."""
        sample = self.batch.sample([*map(Tensor.clone, tensors)])
        for name, value in self.params.items():
            if vars(value):
                with_attributes(params[name], value)
        casts, size = partial(AutocastMode, [*params.values()]), self.batch.size
        with mode.inside(size, self.randomness, casts, unbatched=unbatched):
            # Dictionaries of its own, in which the loss may rebind names.
            try:
                result: Any = self.loss(dict(params), dict(self.buffers), *sample)
            finally:
                self._note_writes(mode)
        if self.columns:
            return result
        value, aux = returned(self.function, result, has_aux=self.has_aux)
        for leaf in tree_leaves(aux) if self.has_aux else ():
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"{self.function}(loss, has_aux=True): expected tensors in aux, "
                    f"got a {type(leaf).__name__}."
                )
        return value, aux

    def _note_writes(self, mode: LossMode) -> None:
        """Note the buffers that a run wrote, and whether all samples wrote the same."""
        names = {id(value): name for name, value in self.buffers.items()}
        for name, buffer, new in mode.writes:
            name, notes = names.get(id(buffer), name), self.fallbacks.written
            same, previous = _written_alike(mode, new, self.by_values), notes.get(name)
            if isinstance(previous, Tensor) and isinstance(same, Tensor):
                same = _equal(previous, same) and same
            elif isinstance(previous, Tensor) and same:
                same = previous
            notes[name] = previous is not False and same


def _written_alike(mode: LossMode, new: Tensor, by_values: bool) -> bool | Tensor:
    """Return whether all samples wrote this, or a value to compare with others."""
    if mode.vmap is None:
        return modes.unwrap_all(new).detach()
    try:
        rows = mode.values(new)
    except UnsupportedOp:  # of a vmap inside of the loss
        return False
    if rows is None or mode.captured:
        return modes.unwrap_all(new).detach() if by_values else True
    # Equal, for instance, where an op without a rule got copies of its parameter.
    return _equal(rows, rows[:1].expand_as(rows)) and modes.unwrap_all(rows[0]).detach()


def _equal(a: Tensor, b: Tensor) -> bool:
    with modes.exit_all(), modes.without_modes(), torch.no_grad():
        return checks.same_values(modes.unwrap_all(a), modes.unwrap_all(b))


shows_options = shows(Options, Call)
"""The decorator of a function that takes the options of all transforms."""

_KIND = attrgetter("dtype", "ndim")
"""The kind of a tensor; lengths share one."""


def usable(value: Tensor) -> Tensor:
    """Copy a tensor made in inference mode, which autograd cannot use."""
    return with_attributes(value.clone(), value) if value.is_inference() else value


def _constant(value: Tensor) -> Tensor:
    return with_attributes(value.detach(), value) if value.requires_grad else value


def _check_tensors(
    function: str, params: Params, buffers: Buffers, inputs: list[Tensor]
) -> None:
    if not params:
        raise ValueError(
            f"{function}(params, ...): expected at least one parameter, got none. Are "
            f"all of them frozen?"
        )
    for name, value in (*params.items(), *buffers.items()):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{function}(params, buffers, ...): expected a tensor in {name!r}, got "
                f"a {type(value).__name__}."
            )
    for name, value in params.items():
        if not (value.is_floating_point() or value.is_complex()):
            raise ValueError(
                f"{function}(params, ...): expected floating-point parameters, got "
                f"{value.dtype} in {name!r}. Move it to the buffers."
            )
        real = [x.device for x in inputs if not x.is_meta] if value.is_meta else []
        if real:
            raise ValueError(
                f"{function}(params, buffers, *batch): expected parameters with "
                f"values, got {name!r} on the device meta and a batch on {real[0]}. "
                f"Pass others, or give the model values before it is made functional: "
                f"model.load_state_dict(values, assign=True)."
            )
