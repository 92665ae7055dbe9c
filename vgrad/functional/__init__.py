"""A module as a pure function of its parameters and buffers, and losses on it.

* `make_functional_with_buffers`: split a module into `(fmodel, params, buffers)`
* `make_functional`: the same for a module that has no buffers
* `FunctionalModel`: the result, `fmodel(params, buffers, *inputs) -> output`
* `sample_loss`, `batch_loss`: make a loss of one sample, of a batch
* `freeze`: move parameters among the buffers
* `replace_batch_norm`: copy a module with GroupNorm instead of BatchNorm
* `write_grads_`: fill `.grad` of a module, for a loop that uses `torch.optim`
"""

from vgrad.functional.batch_norm import replace_batch_norm
from vgrad.functional.losses import batch_loss, sample_loss
from vgrad.functional.model import (
    FunctionalModel,
    freeze,
    make_functional,
    make_functional_with_buffers,
    write_grads_,
)

__all__ = [
    "FunctionalModel",
    "batch_loss",
    "freeze",
    "make_functional",
    "make_functional_with_buffers",
    "replace_batch_norm",
    "sample_loss",
    "write_grads_",
]


def __dir__() -> list[str]:
    return __all__
