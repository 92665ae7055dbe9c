"""Per-sample gradients from one backward pass, and many models as one.

The one convention is `loss(params, buffers, *sample) -> scalar`, a function of one
sample. What there is, a line each; `help` of a name says more.

Models and losses:

* `make_functional_with_buffers`: split a module into `(fmodel, params, buffers)`
* `make_functional`: the same for a module that has no buffers
* `FunctionalModel`: the result, `fmodel(params, buffers, *inputs) -> output`
* `sample_loss`, `batch_loss`: make a loss of one sample, of a batch
* `freeze`: move parameters among the buffers
* `replace_batch_norm`: copy a module with GroupNorm in the place of BatchNorm
* `write_grads_`: fill `.grad` of a module, for a loop that uses `torch.optim`
* `to_device`: move every tensor of a tree

Quantities of every sample, computed from `(params, buffers, *batch)`:

* `per_sample_grad`: the gradient of every sample
* `per_sample_norm`: its norm
* `per_sample_gram`: inner products of all pairs of gradients
* `per_sample_projection`: a random projection of every gradient
* `clipped_grad`: the sum of clipped gradients, a `ClippedGrad`
* `weighted_grad`: a weighted sum of gradients
* `gradient_moments`: mean, variance and noise of gradients, `GradientMoments`
* `explain`: how one of these runs a model and a batch, a `Report`
* `ClippedGrad`, `GradientMoments`, `Report`: their results
* `NoiseScale`: the gradient noise scale, averaged over batches
* `Sensitivity`: how far one sample can move a clipped sum

Ensembles:

* `stack`, `combine_state_for_ensemble`: stack models that are alike
* `ensemble_forward`: run all members
* `ensemble_grad`: differentiate every member's loss
* `for_members`: run an optimizer for every member by itself

Speed and precision:

* `compile`: capture a transform or a step as graphs
* `autocast`: `torch.autocast` that also holds under the transforms of `torch.func`
* `CompileWarning`, `FallbackWarning`: something runs, but slowly
* `UnsupportedOp`: the error for an op of the loss that a strategy cannot run

Rooms, each with a list like this one:

* `persample`: the options that all per-sample transforms share
* `dp`: private training: Poisson batches, noise, accounting
* `training`: steps: plain, private, of an ensemble
* `optim`: optimizers as pairs of pure functions
* `precision`: policies, loss scales
* `ensemble`: predictions, calibration, files of ensembles
* `compiled`: what `compile` reports
* `ops`, `testing`: rules for ops of your own, and their test
* `typing`: the types that annotations name

`import vgrad.distributed` adds many ranks, `import vgrad.cli` the models that
`python -m vgrad train` saved.

* `functional_call`, `grad`, `grad_and_value`, `vmap`: the functions of `torch.func`
"""

from typing import TYPE_CHECKING

from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    vmap,
)

from vgrad import (
    compiled,
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
    GradientMoments,
    NoiseScale,
    clipped_grad,
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
from vgrad.renamed import raising
from vgrad.report import Report
from vgrad.tree import to_device

__all__ = [
    "ClippedGrad",
    "CompileWarning",
    "FallbackWarning",
    "FunctionalModel",
    "GradientMoments",
    "NoiseScale",
    "Report",
    "Sensitivity",
    "UnsupportedOp",
    "autocast",
    "batch_loss",
    "clipped_grad",
    "combine_state_for_ensemble",
    "compile",
    "compiled",
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

if not TYPE_CHECKING:  # which sees no other names
    __getattr__ = raising(__name__)


def __dir__() -> list[str]:
    return __all__
