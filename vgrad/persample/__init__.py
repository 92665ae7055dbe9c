"""Per-sample quantities: norms, sums and products of the gradients of all samples.

Each transform takes a loss of one sample, `loss(params, buffers, *sample) -> scalar`,
and returns a function of `(params, buffers, *batch)`. B samples; every tensor of the
batch is `[B, ...]`. The transforms are names of `vgrad` itself.

* `Options`: the options that the transforms share
* `EXPANDED`: the beginning of a reason in `vgrad.explain` if no rule fits an op

`mask` is an option of the call: which samples count, bool `[B]`; the others, such as
copies that fill a batch up to a fixed size, add nothing and appear in no result.

Arguments do not change: samples are copies, and an op of the loss that would write into
parameters or buffers, `.data` or not, is refused before it runs. Writes that bypass
torch, such as `.detach().numpy()[0] = 0` or writes from compiled code, are not
detected.

The loss runs under the autocast of the caller; everything else is float32 or wider.
Recorded results are constants: where an argument requires grad (and grad mode is on),
differentiating one raises, and `.numpy()` needs a `.detach()` first. Results of
`"vmap"` and `"loop"` can be differentiated; for `"loop"` a tensor that the loss closes
over is a constant then, so pass it in `params` or `buffers`.

Under vmap one tensor stands for all samples. Code of the loss that reads its
`requires_grad`, version or address gets the answer of `"loop"` or an `UnsupportedOp`.
Three things differ from a loop without an error: code that looks for transforms of
`torch.func` finds some; strides and contiguity of the output of an op may differ; and
`Tensor.set_`, which no function mode sees, changes nothing. If a parameter receives no
gradient, one sample is re-run with plain autograd (once for a transform and such
parameters) to confirm that its gradient is really zero.
"""

from vgrad.persample.clipped import ClippedGrad as ClippedGrad
from vgrad.persample.clipped import clipped_grad as clipped_grad
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
