"""A loss with the options of its transform, and in a call the tensors it is given."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypedDict, get_args

import torch
from torch import Tensor

from vgrad import batches, checks
from vgrad.functional.losses import check_loss, returned
from vgrad.lowering.randomness import Draws
from vgrad.persample.engine.guard import Fallbacks, LossGuard
from vgrad.persample.factors.base import Factor, Scaled
from vgrad.precision.autocasting import AutocastMode
from vgrad.precision.loss_scale import LossScale
from vgrad.torch_private import modes
from vgrad.torch_private.tensors import with_attributes
from vgrad.tree import map_values, tree_leaves
from vgrad.typing import Buffers, ChunkSize, LossFn, Params, Randomness, Strategy, Tree


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
            and then to `"loop"` for a loss that cannot be recorded. Inside transforms
            of `torch.func` it is `"vmap"`.
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
    """

    strategy: Strategy
    chunk_size: ChunkSize
    randomness: Randomness
    loss_scale: LossScale | None


def check_options(function: Callable, options: Options) -> None:
    """Refuse options that no per-sample transform has."""
    if unknown := sorted(options.keys() - Options.__annotations__):
        own = [
            name
            for name, each in inspect.signature(function).parameters.items()
            if each.kind is each.KEYWORD_ONLY
        ]
        raise TypeError(
            f"{function.__name__}({unknown[0]}=...): expected options among "
            f"{', '.join([*own, *Options.__annotations__])}, got {unknown[0]!r}."
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


class Others(Protocol):
    """Those who take part in a call, each with as many chunks of its own samples."""

    def summed(self, name: str, value: Tensor) -> Tensor:
        """Return what is kept of a parameter's sum, once a chunk has it."""
        ...

    def settled(self, name: str, value: Tensor) -> Tensor:
        """Do the same for a sum that no other strategy will form again."""
        ...

    def of_part(self) -> "Others | None":
        """Return who takes part where some samples of a call run, and then others."""
        ...

    def anywhere(self, condition: bool) -> bool:
        """Tell whether a condition holds for any of them."""
        ...


@dataclass(frozen=True)
class Problem:
    """What a transform was given, and what it learns as it runs; `on` adds a call.

    Attributes:
        function: the transform's name, for errors.
        fallbacks: the ops that it has warned of.
        unreached: sets of parameters to which no graph leads from a sample's loss, as
            one sample on its own has shown.
        params: those of one call, as `buffers` and `batch` are.
        mask: the samples of the batch that count, `[B]`; None for all.
        weights: of the samples, `[B]`, where the caller gives them.
        draws: what is known of their random numbers.
        others: who takes part in the call, if anyone does.
    """

    function: str
    loss: LossFn
    strategy: Strategy = "auto"
    chunk_size: ChunkSize = None
    randomness: Randomness = "error"
    has_aux: bool = False
    loss_scale: LossScale | None = None
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    unreached: set[frozenset[str]] = field(default_factory=set)
    params: Params = field(default_factory=dict)
    buffers: Buffers = field(default_factory=dict)
    batch: batches.Batch = batches.NONE
    mask: Tensor | None = None
    weights: Tensor | None = None
    draws: Draws = field(default_factory=Draws)
    others: Others | None = None

    @classmethod
    def of(
        cls, function: Callable, loss: LossFn, options: Options, has_aux: bool = False
    ) -> "Problem":
        """Check the options of a transform."""
        check_options(function, options)
        problem = cls(function.__name__, loss, has_aux=has_aux, **options)
        name = problem.function
        check_loss(name, loss)
        checks.choice(name, get_args(Strategy), strategy=problem.strategy)
        checks.choice(name, get_args(Randomness), randomness=problem.randomness)
        check_loss_scale(name, problem.loss_scale)
        size = batches.checked_chunk_size(name, problem.chunk_size)
        return replace(problem, chunk_size=size)

    def on(
        self,
        params: Params,
        buffers: Buffers,
        batch: Tree,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        loss_scale: LossScale | None = None,
        keys: Tensor | None = None,
    ) -> "Problem":
        """Check what a call is given, and return its problem.

        A loss scale takes the place of that of the options. With `keys` of the samples,
        int64 `[B]`, random numbers that differ from sample to sample follow from them;
        others draw as they do without keys.
        """
        checks.dictionaries(self.function, params=params, buffers=buffers)
        _check_tensors(self.function, params, buffers)
        read = batches.read(self.function, batch)
        _check_values(self.function, params, read.tensors)
        if mask is not None:
            batches.check_mask(self.function, mask, read.size)
        if keys is not None:
            _check_keys(self.function, keys, read.size)
            keys = keys if self.randomness == "different" else None
        return replace(
            self,
            params=map_values(_ordinary, params),
            buffers=map_values(_constant, map_values(_ordinary, buffers)),
            batch=read,
            mask=mask,
            weights=weights,
            loss_scale=self.loss_scale if loss_scale is None else loss_scale,
            draws=Draws(keys=keys),
        )

    def part(self, start: int, stop: int) -> "Problem":
        """Return the problem of these samples."""
        if stop - start == self.batch.size:
            return self
        return replace(
            self,
            batch=self.batch.part(start, stop),
            mask=None if self.mask is None else self.mask[start:stop],
            weights=None if self.weights is None else self.weights[start:stop],
            draws=self.draws.of(torch.arange(start, stop)),
            others=self._others_of_part(),
        )

    def rows(self, rows: Tensor, strategy: Strategy | None = None) -> "Problem":
        """Return the problem of these samples, in this order."""

        def of(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows.to(values.device)]

        return replace(
            self,
            batch=self.batch.rows(rows),
            mask=of(self.mask),
            weights=of(self.weights),
            draws=self.draws.of(rows),
            strategy=strategy or self.strategy,
            others=self._others_of_part(),
        )

    def summed(self, name: str, value: Tensor) -> Tensor:
        """Return what is kept of a parameter's sum over a chunk."""
        return value if self.others is None else self.others.summed(name, value)

    def settled(self, name: str, value: Tensor) -> Tensor:
        """Return what is kept of a sum over a chunk that is formed for good."""
        return value if self.others is None else self.others.settled(name, value)

    def _others_of_part(self) -> Others | None:
        return None if self.others is None else self.others.of_part()

    def anywhere(self, condition: bool) -> bool:
        """Tell whether a condition holds, here or for others."""
        return condition if self.others is None else self.others.anywhere(condition)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the call was given."""
        weights = () if self.weights is None else (self.weights,)
        given = (*self.params.values(), *self.buffers.values(), *self.batch.tensors)
        return [*given, *weights]

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.params.values())).device

    @property
    def differentiable(self) -> bool:
        """Whether the caller can differentiate the gradients once more."""
        wanted = any(tensor.requires_grad for tensor in self.tensors)
        return torch.is_grad_enabled() and wanted

    def cotangent(self, losses: Tensor) -> Tensor:
        """Return what losses are multiplied by before the backward pass."""
        ones = torch.ones_like(losses)
        return ones if self.loss_scale is None else ones * self._scale(losses.dtype)

    def unscaled(self, factor: Factor) -> Factor:
        """Take the scale of the losses out of what the backward pass found."""
        if self.loss_scale is None:
            return factor
        return Scaled(factor, self._scale(torch.float32))

    def _scale(self, dtype: torch.dtype) -> Tensor:
        scale = self.loss_scale.loss_scale if self.loss_scale else 1.0
        # A loss of any dtype can be multiplied by it without rounding. It is divided by
        # again, so results do not depend on it.
        scale = torch.as_tensor(scale, device=self.device).detach().to(torch.bfloat16)
        return scale.to(dtype)

    def run_loss(
        self,
        params: Params,
        tensors: tuple[Tensor, ...],
        guard: LossGuard,
        *,
        alone: bool = False,
    ) -> tuple[Tensor, Tree]:
        """Return `(scalar, aux)` of one sample, a copy, which the loss may change.

        It stands for all samples, or is `alone`.
        """
        sample = self.batch.sample(tuple(tensor.clone() for tensor in tensors))
        for name, value in params.items():
            with_attributes(value, self.params[name])
        casts, size = partial(AutocastMode, [*params.values()]), self.batch.size
        with guard.inside(size, self.randomness, casts, alone=alone):
            # Dictionaries of its own, in which the loss may bind names anew.
            result = self.loss(dict(params), dict(self.buffers), *sample)
        value, aux = returned(self.function, result, has_aux=self.has_aux)
        for leaf in tree_leaves(aux):
            if not isinstance(leaf, Tensor):
                raise TypeError(
                    f"{self.function}(loss, has_aux=True): expected tensors in aux, "
                    f"got a {type(leaf).__name__}."
                )
        return value, aux


def _ordinary(value: Tensor) -> Tensor:
    """Copy a tensor made in inference mode, which autograd cannot use."""
    return with_attributes(value.clone(), value) if value.is_inference() else value


def _constant(value: Tensor) -> Tensor:
    """Return a tensor that requires no grad unless the caller can differentiate."""
    wanted = torch.is_grad_enabled() or not value.requires_grad
    return value if wanted else with_attributes(value.detach(), value)


def _check_keys(function: str, keys: Tensor, size: int) -> None:
    """Refuse what are not keys of as many samples, or cannot be told apart."""
    if keys.dtype != torch.int64 or keys.shape != (size,) or keys.device.type != "cpu":
        raise ValueError(
            f"{function}(keys): expected one key a sample, int64 [{size}] on the CPU "
            f"as sample_keys makes them, got {keys.dtype} {tuple(keys.shape)} on "
            f"{keys.device}."
        )
    if modes.inside_transform():
        raise ValueError(
            f"{function}(keys): expected a call outside of transforms of torch.func, "
            f"got one inside, where other samples draw as well. Leave the keys out."
        )


def _check_values(function: str, params: Params, inputs: Iterable[Tensor]) -> None:
    """Refuse parameters without values, where samples have some."""
    real = next((each for each in inputs if not each.is_meta), None)
    for name, value in params.items():
        if value.is_meta and real is not None:
            raise ValueError(
                f"{function}(params, buffers, *batch): expected parameters with "
                f"values, got {name!r} on the device meta and a batch on "
                f"{real.device}. Pass others, or give the model values before it is "
                f"made functional: model.load_state_dict(values, assign=True)."
            )


def _check_tensors(function: str, params: Params, buffers: Buffers) -> None:
    """Refuse parameters that have no gradient, and entries that are no tensors."""
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
