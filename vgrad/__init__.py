"""Per-sample gradients, private training and ensembles for PyTorch.

The one convention is `loss(params, buffers, *sample) -> scalar`, a function of one
sample. `help(vgrad.name)` has the details; each module lists its contents.

* `make_functional_with_buffers`: split a module into `(fmodel, params, buffers)`
* `make_functional`: the same for a module that has no buffers
* `FunctionalModel`: the result, `fmodel(params, buffers, *inputs) -> output`
* `sample_loss`, `batch_loss`: make a loss of one sample, of a batch
* `freeze`: move parameters among the buffers
* `replace_batch_norm`: copy a module with GroupNorm in place of BatchNorm
* `write_grads_`: fill `.grad` of a module, for a loop that uses `torch.optim`
* `to_device`: move every tensor of a tree

Computed from `(params, buffers, *batch)`, for every sample or from all of them:

* `per_sample_grad`: the gradient of every sample
* `per_sample_norm`: its norm
* `per_sample_gram`: inner products of all pairs of gradients
* `per_sample_projection`: a random projection of every gradient
* `clipped_grad`, `weighted_grad`: the sum of clipped gradients, a weighted sum
* `clipped_sum`: the sum of the clipped values of any function of a sample
* `gradient_moments`: mean, variance and noise of gradients
* `explain`: how one of these runs a model and a batch, a `Report`
* `ClippedGrad`, `ClippedValues`, `GradientMoments`, `Report`: their results
* `NoiseScale`: the gradient noise scale, averaged over batches
* `Sensitivity`: how far one sample can move a clipped sum

For ensembles, and for speed:

* `stack`, `combine_state_for_ensemble`: stack models that are alike
* `ensemble_forward`: run all members
* `ensemble_grad`: differentiate every member's loss
* `for_members`: run an optimizer for every member by itself
* `compile`: capture a transform or a step as graphs
* `autocast`: `torch.autocast` that also holds under the transforms of `torch.func`
* `CompileWarning`, `FallbackWarning`: the numbers are right, but slow
* `UnsupportedOp`: the error for an op of the loss that a strategy cannot run
* `functional_call`, `grad`, `grad_and_value`, `vmap`: the functions of `torch.func`

Modules; `vgrad.distributed`, for many ranks, and `vgrad.cli` are imported by name:

* `persample`: the options that all per-sample transforms share
* `dp`, `training`: private training, and the steps of any training
* `attribution`: the training samples that made a prediction
* `curvature`: Gauss-Newton and Fisher matrices, Kronecker factors, Jacobians
* `optim`, `precision`: optimizers as pairs of pure functions, policies
* `ensemble`, `compiled`: predictions, reports of `compile`
* `ops`, `testing`, `typing`: rules for your own ops, their check, types
"""

from torch.func import functional_call, grad, grad_and_value, vmap

from vgrad import (
    attribution,
    compiled,
    curvature,
    dp,
    ensemble,
    ops,
    optim,
    persample,
    precision,
    testing,
    training,
    typing,
)
from vgrad.batches import Sensitivity
from vgrad.compiled import CompileWarning, compile
from vgrad.ensemble import (
    combine_state_for_ensemble,
    ensemble_forward,
    ensemble_grad,
    for_members,
    stack,
)
from vgrad.functional.batch_norm import replace_batch_norm
from vgrad.functional.losses import batch_loss, sample_loss
from vgrad.functional.model import (
    FunctionalModel,
    freeze,
    make_functional,
    make_functional_with_buffers,
    write_grads_,
)
from vgrad.persample import (
    ClippedGrad,
    ClippedValues,
    GradientMoments,
    NoiseScale,
    clipped_grad,
    clipped_sum,
    gradient_moments,
    per_sample_grad,
    per_sample_gram,
    per_sample_norm,
    per_sample_projection,
    weighted_grad,
)
from vgrad.persample.engine import FallbackWarning, UnsupportedOp
from vgrad.persample.explain import explain
from vgrad.precision import autocast
from vgrad.report import Report
from vgrad.tree import to_device

__all__ = [
    "ClippedGrad",
    "ClippedValues",
    "CompileWarning",
    "FallbackWarning",
    "FunctionalModel",
    "GradientMoments",
    "NoiseScale",
    "Report",
    "Sensitivity",
    "UnsupportedOp",
    "attribution",
    "autocast",
    "batch_loss",
    "clipped_grad",
    "clipped_sum",
    "combine_state_for_ensemble",
    "compile",
    "compiled",
    "curvature",
    "dp",
    "ensemble",
    "ensemble_forward",
    "ensemble_grad",
    "explain",
    "for_members",
    "freeze",
    "functional_call",
    "grad",
    "grad_and_value",
    "gradient_moments",
    "make_functional",
    "make_functional_with_buffers",
    "ops",
    "optim",
    "per_sample_grad",
    "per_sample_gram",
    "per_sample_norm",
    "per_sample_projection",
    "persample",
    "precision",
    "replace_batch_norm",
    "sample_loss",
    "stack",
    "testing",
    "to_device",
    "training",
    "typing",
    "vmap",
    "weighted_grad",
    "write_grads_",
]


def __dir__() -> list[str]:
    return __all__
