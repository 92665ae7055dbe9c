"""Texts of torch's errors and warnings by which vgrad tells what happened.

Torch raises plain `RuntimeError` for all of these. Those about vmap come from
torch/_functorch and aten/src/ATen/functorch, those about autograd from
torch/autograd/__init__.py and torch/_functorch/eager_transforms.py, those about memory
from c10/core. Errors of classes of their own would end the need.
"""

RANDOM = "randomness error mode"
"""A random op under `randomness="error"`."""

RANDOM_OF_EACH = "does not currently support same randomness"
"""A draw from a mapped distribution, under `randomness="same"`."""

HOOKS_ON_SAVED = ("saved tensor hooks",)
"""Activation checkpointing, or another use of hooks on saved tensors."""

NO_SETUP_CONTEXT = "setup_context"
"""An autograd.Function in the old style, which transforms cannot run."""

HIDDEN_FUNCTION = "HigherOrderOperator custom_function_call"
"""The same in a custom op of torch's own, where no function mode sees it."""

OWN_BACKWARD = (
    "backward() called inside",
    "attempting to call Tensor.requires_grad_()",
)
"""A backward pass inside a transform."""

OF_A_NUMBER = "calling .item() on a Tensor"
"""A call that takes a number of Python and got a tensor."""

NOT_MAPPED = (
    "vmap:",
    "Batching rule not implemented",
    "vmap over",
    "under vmap",
    "inside of vmap",
    "doesn't have storage",
    "Cannot access storage",
    "mutating directly with `.data`",
    "view size is not compatible",
)
"""An op that vmap cannot run, or not for tensors that are mapped over."""

SHAPES = "broadcast shape"
"""Shapes that do not match, as recurrent kernels say when vmap maps their weights."""

_NO_RULE = "batching rule for"


def op_without_rule(warning: str) -> str:
    """Return the op that vmap warns of running sample by sample, or nothing."""
    _, found, rest = warning.partition(_NO_RULE)
    return rest.split()[0].rstrip(".") if found else ""
