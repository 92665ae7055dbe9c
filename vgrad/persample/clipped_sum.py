"""Clipped sums of the values of any function of a sample.

A value is the gradient of its inner product with a tensor. So the engine gets the loss
`sum_i <one_i, f_i(params, buffers, *sample)>`, of tensors `one_i` as parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from vgrad import batches, checks
from vgrad.generators import kept_random_state
from vgrad.loss.mode import SINGLE
from vgrad.persample.clipped import ClippedGradFn, ClippedSum
from vgrad.persample.engine import (
    Call,
    Fallbacks,
    Inputs,
    Options,
    constant,
    shows_options,
)
from vgrad.torch_private import modes
from vgrad.tree import (
    TreeSpec,
    named_leaves,
    tensors,
    tree_unflatten,
)
from vgrad.typing import Clipping, LossFn, Params, Tree


class ClippedValues(NamedTuple):
    """The result of `clipped_sum`. Only `sum`, with noise, is private.

    Attributes:
        sum: over samples of the clipped values, divided by `normalize_by`; a tree as
            the function returns it, in float32 or wider.
        norms: L2 norm of each sample's value before clipping, `[B]`.
        clipped: how many finite samples had a norm above the bound, as in
            `ClippedGrad`.
        nonfinite: how many samples had an infinite or NaN value, or numbers beyond
            1e15; they add zero.
    """

    sum: Tree
    norms: Tensor
    clipped: Tensor
    nonfinite: Tensor


@shows_options
def clipped_sum(
    f: LossFn,
    *,
    max_norm: float | Mapping[str, float],
    clipping: Clipping = "flat",
    normalize_by: float = 1.0,
    rescale: bool = False,
    **options: Unpack[Options],
) -> "ClippedSumFn":
    """Sum of a function's clipped values: `(params, buffers, *batch) -> ClippedValues`.

    `f(params, buffers, *sample)` returns a tree of real or complex tensors, of the same
    shapes for all samples: the change of a model that a client has trained (a client is
    a sample), statistics, gradients made by hand. The norm of a sample is over all
    tensors. Samples are clipped and counted as by `clipped_grad`, with its guarantee,
    its options but `passes` and `has_aux`, and a `.sensitivity` for `Plan.add_noise`,
    where the tree is a dictionary of tensors.

    Patterns and layers of `clipping="per_layer"` are of places in the tree, whose keys
    and numbers are joined by dots: `"head.0"` is the first of a tuple at `"head"`,
    `"value"` a tensor that is the whole tree.

    The function runs for all samples at once or, where it cannot, one by one, and is
    compared on two samples with runs of each alone. It is as pure as a loss. Messages
    call it the loss, its tensors parameters and their values gradients. To find shapes
    it runs once more for each kind of batch, on the first sample, or on zeros where the
    batch is empty. Results are constants. The other options are in
    `vgrad.persample.Options`; `loss_scale` and `chunk_size="auto"` are refused.

    Cost: the function, and B times the memory of its value.

    Reference: McMahan et al., Learning Differentially Private Recurrent Language
    Models, arXiv 1710.06963 (federated averaging).

    Raises:
        TypeError: `f` is no function, or its tree has other leaves.
        ValueError: as `clipped_grad`; or trees are empty, or differ between samples.

    Example:
        >>> f = lambda params, buffers, x: {"mean": x.mean(), "square": x * x}
        >>> compute = clipped_sum(f, max_norm=1.0)
        >>> x = torch.tensor([[3.0, 1.0], [0.1, 0.1], [torch.nan, 0.0]])
        >>> result = compute({}, {}, x)
        >>> result.sum
        {'mean': tensor(0.3157), 'square': tensor([0.9805, 0.1178])}
        >>> result.clipped, result.nonfinite, compute.sensitivity.value
        (tensor(1), tensor(1), 1.0)
    """
    total = ClippedSum.of("clipped_sum", max_norm, clipping, normalize_by, rescale)
    if not callable(f) or isinstance(f, nn.Module):
        raise TypeError(
            f"clipped_sum(f): expected a function f(params, buffers, *sample) that "
            f"returns a tree of tensors, got a {type(f).__name__}."
        )
    if options.get("loss_scale") is not None or options.get("chunk_size") == "auto":
        raise ValueError(
            'clipped_sum(loss_scale=..., chunk_size="auto"): expected neither, since '
            "no gradient is formed that could underflow, and memory is the function's "
            "own. Scale inside it, or pass a number of samples as chunk_size."
        )
    call = Call.of(clipped_sum, _InnerProduct(f), options)
    return ClippedSumFn(call, total)


@dataclass(frozen=True)
class _InnerProduct:
    """The loss whose gradients are the values of a function."""

    f: LossFn

    def __call__(self, ones: Params, packed: Params, /, *sample: Tree) -> Tensor:
        """Return the inner product for one sample."""
        values, _ = self.values(packed, sample)
        shapes, expected = (
            {name: (x.shape, x.is_complex()) for name, x in tree.items()}
            for tree in (values, ones)
        )
        if shapes != expected:
            raise ValueError(
                f"clipped_sum(f): expected the same tree from f for all samples, "
                f"{checks.shown(ones)}, got {checks.shown(values)}."
            )
        total: Any = 0.0
        for name, value in values.items():
            value = value.detach().to(ones[name].dtype)
            part = ones[name] * (value.conj() if value.is_complex() else value)
            total = total + (part.real if value.is_complex() else part).sum()
        return total

    def values(self, packed: Params, sample: Tree) -> tuple[Params, TreeSpec]:
        """Return the values of the function by their places, and their structure."""
        params, buffers = (
            {n[len(kind) :]: x for n, x in packed.items() if n.startswith(kind)}
            for kind in ("params.", "buffers.")
        )
        values, spec = named_leaves(self.f(params, buffers, *sample))
        for name, value in values.items():
            real = isinstance(value, Tensor) and value.is_floating_point()
            if not (real or (isinstance(value, Tensor) and value.is_complex())):
                raise TypeError(
                    f"clipped_sum(f): expected a tree of real or complex tensors from "
                    f"f, got {checks.shown(value)} in {name!r}. Convert whole numbers "
                    f"by .float()."
                )
        if not values or len(values) < spec.num_leaves:
            raise ValueError(
                f"clipped_sum(f): expected tensors from f, each with another name, got "
                f"{spec.num_leaves} by the names [{checks.listed(values)}]. Leave dots "
                f"out of the keys of dictionaries."
            )
        return values, spec


@dataclass(frozen=True, eq=False, repr=False)
class ClippedSumFn(ClippedGradFn[ClippedValues]):
    """The function of `clipped_sum`, with its sensitivity."""

    trees: dict[Any, Tree] = field(default_factory=dict)  # of ones, by kind of batch

    def on(self, *arguments: Any, **more: Any) -> Any:
        """Compute the sum; the inputs are checked in `prepared`."""
        with torch.inference_mode(False), torch.no_grad():
            result = super().on(*arguments, **more)
        _, spec = named_leaves(self._ones(*arguments[:3]))
        total = tree_unflatten(result.grads.values(), spec)
        result = ClippedValues(total, result.norms, result.clipped, result.nonfinite)
        inputs = tensors(arguments) if torch.is_grad_enabled() else ()
        return constant(self.options.function, result, inputs)

    def prepared(self, inputs: Inputs) -> Inputs:
        """Return the inputs of the inner product."""
        ones, _ = named_leaves(self._ones(*inputs[:3]))
        return inputs._replace(params=ones, buffers=_packed(*inputs[:2]))

    def _ones(self, params: Params, buffers: Params, batch: Tree) -> Tree:
        """Return ones of the shapes of the tree, found once for a kind of batch."""
        packed, one = _packed(params, buffers), batches.read("clipped_sum", batch)
        one = one.select(slice(1))
        kinds = [(name, x.shape, x.dtype, x.device) for name, x in packed.items()]
        kinds += [(x.shape[1:], x.dtype, x.device) for x in one.tensors]
        places = tuple(named_leaves(one.tree)[0])
        key = places, one.plain, modes.autocast_is_on(), *kinds
        if key not in self.trees:
            first = [
                x if len(x) else x.new_zeros((1, *x.shape[1:])) for x in one.tensors
            ]
            product: Any = self.options.loss
            options = self.options.replaced(
                loss=lambda _, packed, *sample: product.values(packed, sample),
                columns=True,  # the result is no scalar
                fallbacks=Fallbacks(silent=True),
            )
            nothing = {"": torch.zeros((), device=first[0].device)}
            call = options.on(Inputs(nothing, packed, one.sample(first)))
            with kept_random_state(call.tensors), torch.enable_grad():
                run = nothing, call.batch.one(0), call.mode(handlers=SINGLE)
                result: Any = call.run_loss(*run, unbatched=True)
            values, spec = result
            # Not `ones_like`, which inside a vmap would make one for each of its calls.
            shapes = [(x.shape, x.dtype, x.device) for x in values.values()]
            ones = [torch.ones(x, dtype=kind, device=at) for x, kind, at in shapes]
            self.trees[key] = tree_unflatten(ones, spec)
        return self.trees[key]


def _packed(params: Params, buffers: Params) -> Params:
    """Put parameters and buffers of a function among the buffers of a loss."""
    checks.dictionaries("clipped_sum", params=params, buffers=buffers)
    packed = {f"params.{name}": value for name, value in params.items()}
    packed |= {f"buffers.{name}": value for name, value in buffers.items()}
    for name, value in packed.items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise TypeError(f"clipped_sum: expected a tensor in {name}, got a {kind}.")
    checks.whole_tensors("clipped_sum", packed)
    return packed
