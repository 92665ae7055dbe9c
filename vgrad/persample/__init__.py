"""Per-sample quantities: norms, sums and products of the gradients of all samples.

Each transform takes a loss of one sample, `loss(params, buffers, *sample) -> scalar`,
and returns a function of `(params, buffers, *batch)`. B samples; every tensor of the
batch is `[B, ...]`.

The transforms are names of `vgrad` itself: `per_sample_grad`, `per_sample_norm`,
`per_sample_gram`, `per_sample_projection`, `clipped_grad`, `weighted_grad` and
`gradient_moments`.

* `EXPANDED`: the beginning of the reason in `vgrad.explain` where no rule fits an op
* `Options`: the options that the transforms share

`mask` is an option of the call: which samples count, bool `[B]`; the others, such as
copies that fill a batch up to a fixed size, add nothing and appear in no result.

What a transform is given does not change: samples are copies, and an op of the loss
that would write into parameters or buffers, `.data` or not, is refused before it runs.
Only writes that torch does not see get through, as `.detach().numpy()[0] = 0` or those
of compiled code.

The loss runs under the autocast of the caller; everything else is float32 or wider.
Recorded results are constants: where an argument requires grad (and grad mode is on),
differentiating one raises, and `.numpy()` asks for a `.detach()` first. Parameters made
with `disable_autograd_tracking=True` require none. Results of `"vmap"` and `"loop"` can
be differentiated; for `"loop"` what the loss closes over is a constant then, so hand it
over in `params` or `buffers`.

Where one tensor stands for all samples, code of the loss that asks it something (does
it require grad, which version is it, what is at this address) gets the answer of
`"loop"` or an `UnsupportedOp`; the same holds where one stands for all members of an
ensemble. Three things differ from a loop without an error. Functions that ask for the
transforms of `torch.func` themselves find some. Strides and contiguity of what an op
returns may differ: a copy made only where they do has the same numbers, and writes in
place with another result are refused. And `Tensor.set_`, which no function mode sees,
changes nothing. If no gradient of a parameter arrives, one sample runs by plain
autograd, once for a transform and such parameters: zero is what it finds zero.
"""

from vgrad.persample.clipped import ClippedGrad as ClippedGrad
from vgrad.persample.clipped import clipped_grad as clipped_grad
from vgrad.persample.engine import Options
from vgrad.persample.explain import EXPANDED
from vgrad.persample.explain import Explanation as Explanation
from vgrad.persample.explain import aligned as aligned
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
