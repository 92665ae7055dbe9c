"""In which dtype a run computes, and what the processor at hand makes of it."""

import warnings

import torch

from vgrad.functional.model import FunctionalModel
from vgrad.precision import policy_for

POLICIES: dict[str, str | None] = {
    "float32": None,
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}
"""By the name of a precision; parameters and optimizer are float32 in each."""

_SUPPORTED = {
    "bfloat16": "_is_mkldnn_bf16_supported",
    "float16": "_is_mkldnn_fp16_supported",
}
"""The ops that tell what oneDNN can do on this CPU; builds without it have none."""


def under(precision: str, fmodel: FunctionalModel) -> FunctionalModel:
    """Run a functional model in a precision."""
    policy = POLICIES[precision]
    return fmodel if policy is None else policy_for(fmodel, policy)


def warn_if_slow(precision: str, device: str) -> None:
    """Say so if a run in float16 or bfloat16 goes to a CPU that is slow in it."""
    if torch.device(device).type != "cpu" or not _is_slow(precision):
        return
    if precision == "bfloat16":
        advice = "float32"
    elif _is_slow("bfloat16"):
        advice = "float32 (bfloat16 is as slow here)"
    else:
        advice = "bfloat16"
    warnings.warn(
        f"--precision {precision}: this CPU lacks the instructions for {precision}. "
        f"Convolutions and products of large matrices can take 50 times as long as in "
        f"float32, or longer. Use --precision {advice}, or a GPU.",
        stacklevel=2,
    )


def instructions() -> list[str]:
    """List what the CPU has for float16 and bfloat16: other ones round otherwise."""
    # Older torch does not tell.
    found = getattr(torch.cpu, "get_capabilities", dict)()
    low = {name for name in found if "f16" in name or "fp16" in name}
    return sorted(name for name in low if found[name])


def _is_slow(precision: str) -> bool:
    """Tell whether torch knows the CPU to be slow; where it cannot tell, it is not."""
    if precision not in _SUPPORTED:
        return False
    supported = getattr(torch.ops.mkldnn, _SUPPORTED[precision], lambda: True)
    return not supported()
