"""Per-sample quantities of every member: its own clip norm, its own noise.

Members run one after the other, each through the recorded engine: the samples of one
fill the device, and its gradients need not be stored. E members, B samples
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, Required, Unpack, overload

from torch import Tensor

from vgrad import batches, checks
from vgrad.batches import Sensitivity
from vgrad.checks import Patterns
from vgrad.dp.noise import add_gaussian_noise
from vgrad.ensemble.axes import InDims
from vgrad.ensemble.choice import Keyed, check_keys
from vgrad.ensemble.execution import (
    Call,
    autocasting,
    looped,
    stacked,
)
from vgrad.functional.losses import check_loss
from vgrad.generators import sample_keys, set_seed
from vgrad.persample.clipped import ClippedGrad, clipped_grad
from vgrad.persample.engine.problem import Options, check_options
from vgrad.persample.engine.transform import Transform
from vgrad.persample.grad import per_sample_grad
from vgrad.typing import Buffers, Clipping, LossFn, Params, Result, Tree


class EnsemblePerSampleFn(Keyed, Generic[Result]):
    """What `ensemble_per_sample_grad` and `ensemble_clipped_grad` return."""

    def __init__(
        self,
        function: str,
        transforms: Sequence[Transform],
        in_dims: InDims,
        shared: Patterns,
    ) -> None:
        """Take one transform, or one for each member."""
        checks.patterns(function, shared=shared)
        self._function = function
        self._transforms: tuple[Any, ...] = tuple(transforms)
        self._options: dict[str, Any] = {"in_dims": in_dims, "shared": tuple(shared)}

    @property
    def randomness(self) -> Literal["error", "different"]:
        """Whether members draw random numbers, then each its own."""
        drawing = any(each.options.randomness != "error" for each in self._transforms)
        return "different" if drawing else "error"

    @property
    def shared(self) -> Patterns:
        """Patterns of the entries without a member axis."""
        return self._options["shared"]

    def __call__(self, params: Params, buffers: Buffers, /, *batch: Tree) -> Result:
        """Return the result of every member, stacked along a new first axis."""
        call = Call(self._function, params, buffers, batch, **self._options)
        own = self._transforms
        if len(own) not in (1, call.members):
            raise ValueError(
                f"ensemble_clipped_grad(max_norm of {len(own)} members): expected one "
                f"number or one for each of the {call.members} members."
            )
        turns = own * call.members if len(own) == 1 else own
        if self._keys is not None:
            check_keys(self._function, self._keys, call.members)
            turns = map(partial(self._keyed, call), turns, self._keys.tolist())
        turns = iter(turns)
        one = autocasting(lambda *args: next(turns)(*args))
        return stacked(looped(one, call, "different"))

    def _keyed(self, call: Call, transform: Any, key: int) -> Callable:
        """Return what one member computes, whose draws follow from its key."""

        def run(params: Params, buffers: Buffers, *batch: Tree) -> Any:
            size = batches.read(self._function, batch).size
            set_seed(key, call.tensors())  # where all samples draw the same
            keys = sample_keys(key, 0, size)
            return transform.keyed(keys)(params, buffers, *batch)

        return run


class EnsembleClippedGradFn(EnsemblePerSampleFn[Result]):
    """What `ensemble_clipped_grad` returns."""

    @property
    def sensitivities(self) -> tuple[Sensitivity, ...]:
        """How far one sample can move each member's sum; one for all if alike."""
        return tuple(each.sensitivity for each in self._transforms)

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
        The noise follows from `key`, `step` and the member's number, as that of
        `dp.add_gaussian_noise`: never use a key and a step for two sums. A group of
        members among more of them, as on one of several ranks, says by `first` which
        number its first one has; else the noise would be that of another group. Members
        trained on the same data are composed: E of them cost E times the steps of one.

        Raises:
            ValueError: sums, noise multipliers and clip norms are not equally many;
                else as `dp.add_gaussian_noise`.
        """
        checks.dictionaries("add_noise", grads=grads)
        [first] = checks.whole("add_noise", least=0, first=first)
        sizes = {len(value) for value in grads.values()}
        count = max(sizes, default=0)
        one = isinstance(noise_multiplier, int | float)
        multipliers = [noise_multiplier] * count if one else list(noise_multiplier)
        own = self.sensitivities
        sensitivities = own * count if len(own) == 1 else own
        sizes |= {len(multipliers), len(sensitivities)}
        if sizes != {count}:
            raise ValueError(
                f"add_noise(grads of {count} members): expected as many members in "
                f"every entry, in noise_multiplier and in max_norm, got "
                f"{sorted(sizes)}."
            )
        return stacked(
            [
                add_gaussian_noise(
                    {name: value[member] for name, value in grads.items()},
                    sensitivities[member],
                    noise_multiplier=multipliers[member],
                    key=key,
                    step=step,
                    member=first + member,
                )
                for member in range(count)
            ]
        )


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
def ensemble_per_sample_grad(
    loss: LossFn,
    *,
    in_dims: InDims = None,
    shared: Patterns = (),
    has_aux: bool = False,
    **options: Unpack[Options],
) -> EnsemblePerSampleFn[Any]:
    """Gradient of every sample for every member: `{name: [E, B, *shape]}`.

    `loss` is the loss of one sample for one member. `in_dims` and `shared` are those of
    `ensemble_grad`, the other options are in `vgrad.persample.Options`. Every member
    has a gradient of its own for what is shared.

    Args:
        in_dims: 0 where each member has a batch of its own, None where all have one, or
            a sequence with an entry for each item.
        shared: patterns of the entries without a member axis.

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
    check_loss("ensemble_per_sample_grad", loss)
    check_options(ensemble_per_sample_grad, options)
    transform = per_sample_grad(loss, has_aux=has_aux, **options)
    name = "ensemble_per_sample_grad"
    return EnsemblePerSampleFn(name, [transform], in_dims, shared)


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

    `max_norm` is what `clipped_grad` takes, or a list of that for each member.
    `in_dims` and `shared` are those of `ensemble_grad`, `clipping` and `normalize_by`
    those of `clipped_grad`, the other options are in `vgrad.persample.Options`.
    `.add_noise` adds each member's noise.

    Args:
        in_dims: 0 where each member has a batch of its own, None where all have one, or
            a sequence with an entry for each item.
        shared: patterns of the entries without a member axis.

    Raises:
        ValueError: `max_norm` requires grad; when called, if there are not as many clip
            norms as members.

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
    check_loss("ensemble_clipped_grad", loss)
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
    name = "ensemble_clipped_grad"
    return EnsembleClippedGradFn(name, transforms, in_dims, shared)
