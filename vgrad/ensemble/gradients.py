"""The gradient of every member's loss, of a batch and of single samples.

New buffers, such as running statistics of batch norm, have the member axis of the old
ones. E members, B samples.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    Required,
    Unpack,
    overload,
)

import torch
from torch import Tensor

from vgrad import batches, checks
from vgrad.batches import Sensitivity
from vgrad.checks import Patterns
from vgrad.dp.noise import checked, gaussian_noise
from vgrad.ensemble import execution
from vgrad.ensemble.execution import (
    EnsembleExplanation,
    EnsembleFn,
    looped,
    run_member,
    stack_results,
)
from vgrad.ensemble.layout import (
    EnsembleOptions,
    InDims,
    MemberCall,
    shows_member_options,
)
from vgrad.functional.losses import check_loss, gradient, returned
from vgrad.generators import (
    RNG_LOCK,
    RandomState,
    drawn_since,
    kept_random_state,
    random_state,
    sample_keys,
)
from vgrad.loss.randomness import Draws, check_drawn
from vgrad.persample.clipped import ClippedGrad, clipped_grad
from vgrad.persample.engine.call import (
    Options,
    check_options,
    shows_options,
    usable,
)
from vgrad.persample.engine.guard import UnsupportedOp
from vgrad.persample.engine.transform import Transform
from vgrad.persample.grad import per_sample_grad
from vgrad.torch_private import modes
from vgrad.torch_private.kernels import copy_all_
from vgrad.tree import map_tensors, tree_map
from vgrad.typing import (
    BatchLossFn,
    Buffers,
    Clipping,
    LossFn,
    Params,
    Result,
    Tree,
)


class EnsembleGrads(NamedTuple):
    """The result of `ensemble_grad`.

    Attributes:
        grads: `[E, ...]`; of shared parameters sums over the members, `[...]`.
        losses: `[E]`.
        buffers: the buffers after each member's forward pass, `[E, ...]`.
    """

    grads: Params
    losses: Tensor
    buffers: Buffers


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class EnsembleGradFn(EnsembleFn, Generic[Result]):
    """The function that `ensemble_grad` returns, with its `loss` and `has_aux`."""

    name: ClassVar = "ensemble_grad"
    loss: BatchLossFn | LossFn
    run: Callable[..., Any]  # the loss: returns (loss, aux) and new buffers
    has_aux: bool

    def __call__(
        self,
        params: Params,
        buffers: Buffers,
        /,
        *batch: Tree,
        loss_scale: Tensor | float = 1.0,
    ) -> Result:
        """Return an `EnsembleGrads`, or with `has_aux` a pair of it and aux.

        Gradients are of `loss_scale * loss`, a number or one for each member, `[E]`.
        The losses are without it.
        """
        return self.execute(self._differentiated, params, buffers, batch, loss_scale)

    def _differentiated(
        self, params: Params, buffers: Buffers, batch: tuple, loss_scale: Tensor | float
    ) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self._differentiated(params, buffers, batch, loss_scale)
        call = self.options.on(params, buffers, batch, self.keys)
        if any(map(Tensor.is_inference, call.tensors)):
            names = ("params", "buffers", "items")
            fixed = {name: getattr(call, name) for name in names}
            call = call.replaced(**map_tensors(usable, fixed))
        sizes = ((), (call.layout.members,))
        if isinstance(loss_scale, Tensor) and loss_scale.shape not in sizes:
            raise ValueError(
                f"ensemble_grad(loss_scale of shape {tuple(loss_scale.shape)}): "
                f"expected a number, or one for each of the {call.layout.members} "
                f"members."
            )
        with torch.enable_grad():  # a loss may differentiate on its own
            strategy, _ = execution.choose(self.loss, call)
        keyed = call.draws.keys is not None
        with RNG_LOCK if keyed else nullcontext():
            before = random_state(call.tensors)
            strategy = execution.verified(
                call,
                strategy,
                lambda pair: self._of_sum(pair, strategy, 1.0, before),
                lambda pair: self._by_members(pair, 1.0),
            )
            run = partial(self._of_sum, call, strategy, loss_scale, before)
            if strategy == "loop" and not modes.inside_transform():
                run = partial(self._by_members, call, loss_scale)
            grads, (losses, aux), new = run()
            if keyed:
                check_drawn(before, call.tensors, run)
        result = EnsembleGrads(grads, losses, new)
        return (result, aux) if self.has_aux else result

    def explain(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> EnsembleExplanation:
        """Return the strategy, the reason for it and the form of each op."""
        return self._explained(self.run, self.options.on(params, buffers, batch))

    def _of_sum(
        self, call: MemberCall, strategy: str, loss_scale: Any, before: RandomState
    ) -> tuple[Params, Any, Buffers]:
        """Differentiate the sum of all losses: no member's depends on another's."""

        def total(params: Params) -> tuple[Tensor, tuple[Tensor, Tree, Buffers]]:
            inner = call.replaced(params=params)
            (losses, aux), new = execution.run(self.run, inner, strategy)
            return (losses * loss_scale).sum(), (losses, aux, new)

        grads, (losses, aux, new), unreached = gradient(total, call.params)
        if unreached and strategy != "loop":
            try:
                self._check_unreached(call, frozenset(unreached), before)
            except UnsupportedOp as error:
                if not call.may_loop:
                    raise
                result = self._by_members(call, loss_scale)
                execution.fall_back(call, str(error))
                return result
        return grads, (losses, aux), new

    def _check_unreached(
        self, call: MemberCall, names: frozenset[str], before: RandomState
    ) -> None:
        if call.confirmed(names):
            return
        branches = call.by_values
        if branches and drawn_since(before, call.tensors):
            return  # other numbers may lead to other branches
        members = call.unstacked()
        for member in range(len(members) if branches else 1):
            draws = call.draws.of(torch.tensor([member]))
            with kept_random_state(call.tensors):
                *_, unreached = self._of_member(draws, None, *members[member])
            if reached := names - unreached:
                raise UnsupportedOp(
                    f"ensemble_grad(loss): expected gradients of all members wherever "
                    f"one member has some, got none of {checks.listed(reached)}: an op "
                    f'hides its graph from vmap. Use strategy="loop".'
                )
        call.unreached.add(names)

    def _of_member(
        self, draws: Draws, scale: Tensor | None, params: Params, *rest: Any
    ) -> tuple[Params, Any, set[str]]:
        """Differentiate the loss of a member by itself, as `gradient` does."""

        def scaled(params: Params) -> tuple[Tensor, tuple[Any, Buffers]]:
            (loss, aux), new = run_member(self.run, draws, params, *rest)
            if scale is None:
                return loss, ((loss, aux), new)
            return loss * scale.to(loss.device, loss.dtype), ((loss, aux), new)

        return gradient(scaled, params)

    def _by_members(
        self, call: MemberCall, loss_scale: Tensor | float
    ) -> tuple[Params, Any, Buffers]:
        """Write each member's gradients into their place: nothing is copied twice."""
        members, shared = call.layout
        if isinstance(loss_scale, Tensor):
            scales: Sequence[Tensor | None] = loss_scale.expand(members).unbind(0)
        elif loss_scale == 1:
            scales = [None] * members
        else:
            scales = [torch.tensor(loss_scale, dtype=torch.float64)] * members
        grads = {
            name: torch.empty_like(value, memory_format=torch.contiguous_format)
            for name, value in call.params.items()
        }
        stacked = [name for name in grads if name not in shared]
        places = [*zip(*(grads[name].unbind(0) for name in stacked), strict=True)]

        def one(member: int, draws: Draws, *inputs: Any) -> tuple:
            return self._of_member(draws, scales[member], *inputs)

        def keep(member: int, result: tuple) -> tuple:
            member_grads, pair, _ = result
            with modes.without_modes():  # which watch the loss
                for name in shared.intersection(grads):
                    if member == 0:
                        grads[name].zero_()
                    grads[name] += member_grads[name]
                if stacked:
                    copy_all_(places[member], [member_grads[n] for n in stacked])
            return pair

        pairs = looped(one, call, keep)
        return grads, *call.joined(pairs, stack_results)


def returning_buffers(function: str, loss: Any, *, has_aux: bool) -> Callable:
    """Let a loss return `(value, aux)` and buffers, which a plain function leaves."""
    with_buffers = getattr(loss, "with_buffers", None)

    def run(params: Params, buffers: Buffers, /, *batch: Tree) -> tuple[Any, Buffers]:
        if with_buffers is None:
            value = loss(params, buffers, *batch)
        else:
            value, buffers = with_buffers(params, buffers, *batch)
        return returned(function, value, has_aux=has_aux), buffers

    return run


@overload
def ensemble_grad(
    loss: BatchLossFn | LossFn,
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[EnsembleOptions],
) -> EnsembleGradFn[EnsembleGrads]: ...
@overload
def ensemble_grad(
    loss: BatchLossFn | LossFn,
    *,
    has_aux: Literal[True],
    **options: Unpack[EnsembleOptions],
) -> EnsembleGradFn[tuple[EnsembleGrads, Tree]]: ...
@shows_member_options
def ensemble_grad(
    loss: BatchLossFn | LossFn,
    *,
    has_aux: bool = False,
    **options: Unpack[EnsembleOptions],
) -> EnsembleGradFn[Any]:
    """Differentiate every member's loss: `(params, buffers, *batch) -> EnsembleGrads`.

    `loss` is the loss of a batch for one member, from `batch_loss` or a function of
    your own; without `.with_buffers` it changes no buffers. The result has `.grads`
    `[E, ...]`, `.losses` `[E]` and `.buffers`. The gradient of one member depends on no
    other; gradients of parameters that match `shared` are sums over the members. Aux is
    a tree of tensors `[E, ...]`. Results are constants, as with `torch.autograd.grad`;
    inside a transform of `torch.func` they can be differentiated.

    `strategy="loop"` runs one member after the other, `"vmap"` all in one pass by
    torch's rules, `"hybrid"` all in one pass with each op in the form that suits the
    device, and `"auto"` chooses by the model's work and the device, and takes the loop,
    with a warning, where nothing else can run. Members that take different branches (an
    `if` on a tensor, `.item()`) run in groups.

    Cost: except in a loop one backward pass, with activations of all members at once.

    Args:
        in_dims: 0 where each member has a batch of its own, None where all have one, or
            a sequence with an entry for each item.
        randomness: of random ops: `"error"`, `"different"` for each member, `"same"`.
        shared: patterns of the entries without a member axis.
        verify: compare two members with plain autograd on each, at calls 1, 2, 4, 8,
            ... with tensors of one kind. Where they differ, `"auto"` takes the loop,
            with a warning, and another strategy raises.
        has_aux: the loss returns `(scalar, aux)`, and the result is a pair with aux.

    Raises:
        UnsupportedOp: an op cannot run for all members at once, as the strategy says.

    Example:
        >>> import vgrad
        >>> models = [torch.nn.Linear(3, 2) for _ in range(4)]
        >>> fmodel, params, buffers = vgrad.stack(models)
        >>> loss = vgrad.batch_loss(fmodel, torch.nn.functional.mse_loss)
        >>> x, y = torch.ones(5, 3), torch.ones(5, 2)
        >>> result = ensemble_grad(loss)(params, buffers, x, y)
        >>> result.grads["weight"].shape, result.losses.shape
        (torch.Size([4, 2, 3]), torch.Size([4]))
    """
    check_options(ensemble_grad, options, EnsembleOptions)
    call = MemberCall.of("ensemble_grad", **options).replaced(differentiates=True)
    check_loss("ensemble_grad", loss, of_batch=True)
    run = returning_buffers("ensemble_grad", loss, has_aux=has_aux)
    return EnsembleGradFn(options=call, loss=loss, run=run, has_aux=has_aux)


# Per-sample quantities. Members run one after the other, each through the recorded
# engine: the samples of one fill the device, and its gradients need not be stored.


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class EnsemblePerSampleFn(EnsembleFn, Generic[Result]):
    """The function that `ensemble_per_sample_grad` returns."""

    transforms: tuple[Any, ...]  # one for all members, or one for each

    @classmethod
    def of(cls, function: str, transforms: Sequence[Transform], **options: Any) -> Any:
        """Make the function; members draw their own numbers if samples draw any."""
        draws = any(x.options.randomness != "error" for x in transforms)
        call = MemberCall.of(
            function, randomness="different" if draws else "error", **options
        )
        return cls(options=call, transforms=tuple(transforms))

    def __call__(self, params: Params, buffers: Buffers, /, *batch: Tree) -> Result:
        """Return the result of every member, stacked along a new first axis."""
        return self.execute(self._stacked, params, buffers, batch)

    def _stacked(self, params: Params, buffers: Buffers, batch: tuple) -> Any:
        call = self.options.on(params, buffers, batch, self.keys)
        turns, members, keys = self.transforms, call.layout.members, call.draws.keys
        if len(turns) not in (1, members):
            raise ValueError(
                f"ensemble_clipped_grad(max_norm of {len(turns)} members): expected "
                f"one number or one for each of the {members} members."
            )

        def one(member: int, _: Draws, *arguments: Any) -> Any:
            transform = turns[member if len(turns) > 1 else 0]
            if keys is not None:
                size = batches.read(call.function, arguments[2:]).size
                transform = transform.keyed(sample_keys(int(keys[member]), 0, size))
            return run_member(transform, Draws(), *arguments)

        return tree_map(stack_results, *looped(one, call))


@dataclass(frozen=True, eq=False, kw_only=True)
class EnsembleClippedGradFn(EnsemblePerSampleFn[Result]):
    """The function that `ensemble_clipped_grad` returns."""

    @property
    def sensitivities(self) -> tuple[Sensitivity, ...]:
        """How far one sample can move each member's sum; one for all if alike."""
        return tuple(transform.sensitivity for transform in self.transforms)

    def add_noise(
        self,
        grads: Params,
        *,
        noise_multiplier: float | Sequence[float],
        key: Tensor,
        step: int,
        first: int = 0,
    ) -> Params:
        """Add Gaussian noise to the sums `[E, ...]`, independent for every member.

        The standard deviation is the member's noise multiplier times its sensitivity.
        The noise follows from `key`, `step` and the member's number, as in
        `dp.add_gaussian_noise`: never use a key and a step for two sums. For a group of
        members among more, as on one of several ranks, `first` is the number of its
        first one; otherwise two groups would share their noise. Members trained on the
        same data are composed: E of them cost E times the steps of one.
        """
        checks.dictionaries("add_noise", grads=grads)
        [first] = checks.integers("add_noise", minimum=0, first=first)
        sizes = {len(value) for value in grads.values()}
        count = max(sizes, default=0)
        one = isinstance(noise_multiplier, Real | int | float)
        multipliers = [noise_multiplier] * count if one else list(noise_multiplier)
        sensitivities = self.sensitivities
        if len(sensitivities) == 1:
            sensitivities *= count
        sizes |= {len(multipliers), len(sensitivities)}
        if sizes != {count}:
            raise ValueError(
                f"add_noise(grads of {count} members): expected as many members in "
                f"every entry, in noise_multiplier and in max_norm, got "
                f"{sorted(sizes)}."
            )
        # Members with the same numbers get their noise together.
        alike: dict[tuple, list[int]] = {}
        for member, numbers in enumerate(zip(sensitivities, multipliers, strict=True)):
            alike.setdefault(numbers, []).append(member)
        noisy: dict[tuple[int, str], Tensor] = {}
        for (sensitivity, multiplier), members in alike.items():
            function, place = "add_gaussian_noise", {"key": key, "step": step}
            numbers = checked(function, sensitivity, multiplier, **place)
            noise = gaussian_noise(function, sensitivity, **numbers)
            sums = {
                (first + member, name): value[member]
                for name, value in grads.items()
                for member in members
            }
            noisy |= noise.added_to(sums)[0]
        places = range(first, first + count)
        return {name: torch.stack([noisy[m, name] for m in places]) for name in grads}


class _Options(Options, total=False):
    in_dims: InDims
    shared: Patterns


@overload
def ensemble_per_sample_grad(
    loss: LossFn, *, has_aux: Literal[False] = False, **options: Unpack[_Options]
) -> EnsemblePerSampleFn[Params]: ...
@overload
def ensemble_per_sample_grad(
    loss: LossFn, *, has_aux: Literal[True], **options: Unpack[_Options]
) -> EnsemblePerSampleFn[tuple[Params, Tree]]: ...
@shows_options
def ensemble_per_sample_grad(
    loss: LossFn,
    *,
    in_dims: InDims = None,
    shared: Patterns = (),
    has_aux: bool = False,
    **options: Unpack[Options],
) -> EnsemblePerSampleFn[Any]:
    """Gradient of every sample for every member: `{name: [E, B, *shape]}`.

    `loss` is the loss of one sample for one member; `in_dims` and `shared` are as in
    `ensemble_grad`, the other options in `vgrad.persample.Options`. Every member has a
    gradient of its own for shared entries.

    Example:
        >>> import vgrad
        >>> models = [torch.nn.Linear(3, 2) for _ in range(4)]
        >>> fmodel, params, buffers = vgrad.stack(models)
        >>> loss = vgrad.sample_loss(fmodel, torch.nn.functional.mse_loss)
        >>> x, y = torch.ones(5, 3), torch.ones(5, 2)
        >>> grads = ensemble_per_sample_grad(loss)(params, buffers, x, y)
        >>> grads["weight"].shape
        torch.Size([4, 5, 2, 3])
    """
    function = "ensemble_per_sample_grad"
    check_loss(function, loss)
    check_options(ensemble_per_sample_grad, options)
    transform = per_sample_grad(loss, has_aux=has_aux, **options)
    return EnsemblePerSampleFn.of(function, [transform], in_dims=in_dims, shared=shared)


class _ClippingOptions(_Options, total=False):
    max_norm: Required[float | Mapping[str, float] | Tensor | Sequence[float]]
    clipping: Clipping
    normalize_by: float


@overload
def ensemble_clipped_grad(
    loss: LossFn,
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[_ClippingOptions],
) -> EnsembleClippedGradFn[ClippedGrad]: ...
@overload
def ensemble_clipped_grad(
    loss: LossFn, *, has_aux: Literal[True], **options: Unpack[_ClippingOptions]
) -> EnsembleClippedGradFn[tuple[ClippedGrad, Tree]]: ...
@shows_options
def ensemble_clipped_grad(
    loss: LossFn,
    *,
    max_norm: float | Mapping[str, float] | Tensor | Sequence[float],
    clipping: Clipping = "flat",
    normalize_by: float = 1.0,
    in_dims: InDims = None,
    shared: Patterns = (),
    has_aux: bool = False,
    **options: Unpack[Options],
) -> EnsembleClippedGradFn[Any]:
    """Sum of clipped gradients of every member: a `ClippedGrad` of `[E, ...]`.

    `max_norm` is one bound as `clipped_grad` takes it, or a list or a tensor of one for
    each member. `clipping` and `normalize_by` are as in `clipped_grad`, `in_dims` and
    `shared` as in `ensemble_grad`, the other options in `vgrad.persample.Options`.
    `.add_noise` adds each member's noise.

    Example:
        >>> import vgrad
        >>> models = [torch.nn.Linear(3, 2) for _ in range(2)]
        >>> fmodel, params, buffers = vgrad.stack(models)
        >>> loss = vgrad.sample_loss(fmodel, torch.nn.functional.mse_loss)
        >>> x, y = torch.ones(5, 3), torch.ones(5, 2)
        >>> clipped = ensemble_clipped_grad(loss, max_norm=[0.1, 10.0])
        >>> result = clipped(params, buffers, x, y)
        >>> result.grads["weight"].shape, result.norms.shape
        (torch.Size([2, 2, 3]), torch.Size([2, 5]))
    """
    function = "ensemble_clipped_grad"
    check_loss(function, loss)
    check_options(ensemble_clipped_grad, options)
    bounds: Any = max_norm if isinstance(max_norm, Sequence) else [max_norm]
    if isinstance(max_norm, Tensor):
        if max_norm.requires_grad:
            raise ValueError(
                "ensemble_clipped_grad(max_norm): expected numbers, by which results "
                "are not differentiated, got a tensor that requires grad. Pass "
                "max_norm.detach()."
            )
        bounds = max_norm.reshape(-1).tolist()
    transforms = [
        clipped_grad(
            loss,
            max_norm=bound,
            clipping=clipping,
            normalize_by=normalize_by,
            has_aux=has_aux,
            **options,
        )
        for bound in bounds
    ]
    return EnsembleClippedGradFn.of(
        function, transforms, in_dims=in_dims, shared=shared
    )
