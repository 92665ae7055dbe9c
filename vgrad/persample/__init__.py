"""Per-sample quantities: norms, sums and products of the gradients of all samples.

Each transform takes a loss of one sample, `loss(params, buffers, *sample) -> scalar`,
and returns a function of `(params, buffers, *batch)`. B samples; every tensor of the
batch is `[B, ...]`. The transforms are names of `vgrad` itself.

* `Options`: the options that the transforms share
* `EXPANDED`: the beginning of a reason in `vgrad.explain` if no rule fits an op

`mask` is an option of the call: which samples count, bool `[B]`; the others, such as
copies that fill a batch up to a fixed size, add nothing and appear in no result.

A loss is a pure function of its arguments. Samples are copies, and a loss that writes
into parameters or buffers raises, once it has run: version counters show the write.
Writes by `.data` or numpy move none: the comparison below finds such a write if it
changes the loss.

Gradients are compared with plain autograd on two samples, at calls 1, 2, 4, 8, ... of
each kind of batch (`verify` in `Options`).

The loss runs under the autocast of the caller; everything else is float32 or wider.
Recorded results are constants: where an argument requires grad (and grad mode is on),
differentiating one raises, and `.numpy()` needs a `.detach()` first. Results of
`"vmap"` and `"loop"` can be differentiated; for `"loop"` a tensor that the loss closes
over is a constant then, so pass it in `params` or `buffers`.

Under vmap one tensor stands for all samples. Code of the loss that reads its
`requires_grad` gets the answer of `"loop"`, and code that reads its graph, version or
address an `UnsupportedOp`. Code that looks for transforms of `torch.func` finds some,
and strides and contiguity of the output of an op may differ. If a parameter receives no
gradient, one sample is re-run with plain autograd (once for a transform and such
parameters) to confirm that its gradient is really zero.
"""

from vgrad.persample.clipped import ClippedGrad as ClippedGrad
from vgrad.persample.clipped import clipped_grad as clipped_grad
from vgrad.persample.clipped_sum import ClippedValues as ClippedValues
from vgrad.persample.clipped_sum import clipped_sum as clipped_sum
from vgrad.persample.engine import Options
from vgrad.persample.explain import EXPANDED
from vgrad.persample.grad import per_sample_grad as per_sample_grad
from vgrad.persample.grad import per_sample_norm as per_sample_norm
from vgrad.persample.grad import weighted_grad as weighted_grad
from vgrad.persample.gram import per_sample_gram as per_sample_gram
from vgrad.persample.moments import GradientMoments as GradientMoments
from vgrad.persample.moments import NoiseScale as NoiseScale
from vgrad.persample.moments import gradient_moments as gradient_moments
from vgrad.persample.projection import per_sample_projection as per_sample_projection

__all__ = ["EXPANDED", "Options"]


def __dir__() -> list[str]:
    return __all__
