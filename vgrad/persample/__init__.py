"""Per-sample quantities: what can be had from the gradient of every sample.

Each transform takes a loss of one sample, `loss(params, buffers, *sample) -> scalar`,
and returns a function of `(params, buffers, *batch)`. B samples; every tensor of the
batch is `[B, ...]`.

They are names of `vgrad` itself: `per_sample_grad`, `per_sample_norm`,
`per_sample_gram`, `per_sample_projection`, `clipped_grad`, `weighted_grad` and
`gradient_moments`.

* `EXPANDED`: the beginning of the reason in `vgrad.explain` where no rule fits an op

The transforms share these options:

* `strategy`: how the gradients come about; the numbers are the same.
  `"recorded"` runs one backward pass for all samples and keeps a compact form of each
  gradient; `"vmap"` differentiates all samples at once and stores every gradient;
  `"loop"` runs one sample after another, and whatever plain autograd runs. `"auto"`
  records, and takes `"vmap"` inside transforms of `torch.func` and for losses that
  cannot be recorded.
* `chunk_size`: how many samples at a time; `None` for all, `"auto"` for what fits into
  half of the free memory (found by running the loss on one sample).
* `randomness`: what a random op in the loss does: `"error"`, `"different"` (each
  sample draws its own) or `"same"` (all samples draw the same). From one state of the
  generator a loop draws what the model would, called with one sample after another; the
  others draw for all samples at once, and agree with it under `"same"` alone.
* `loss_scale`: a loss scale of `vgrad.precision`. Losses are multiplied by it before
  the backward pass, so that gradients in float16 do not become zero on the way, and
  each sample's gradient is divided by it before anything else: results do not depend on
  the scale as long as nothing overflows. Gradients are float32 or wider then.
* `has_aux`: the loss returns `(scalar, aux)` and the function `(result, aux)`, with
  `aux` stacked over samples (`None` for an empty batch).
* `mask`, an option of the call: which samples count, bool `[B]`; the others, such as
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
from vgrad.persample.explain import EXPANDED
from vgrad.persample.explanation import Explanation as Explanation
from vgrad.persample.explanation import aligned as aligned
from vgrad.persample.grad import per_sample_grad as per_sample_grad
from vgrad.persample.gram import per_sample_gram as per_sample_gram
from vgrad.persample.moments import GradientMoments as GradientMoments
from vgrad.persample.moments import NoiseScale as NoiseScale
from vgrad.persample.moments import gradient_moments as gradient_moments
from vgrad.persample.norm import per_sample_norm as per_sample_norm
from vgrad.persample.projection import per_sample_projection as per_sample_projection
from vgrad.persample.weighted import weighted_grad as weighted_grad

__all__ = ["EXPANDED"]


def __dir__() -> list[str]:
    return __all__
