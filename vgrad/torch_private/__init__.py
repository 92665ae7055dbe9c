"""The only door to the private names of torch.

Each has a test in `tests/test_torch_private.py`, which fails if torch removes it or
changes it. `vgrad/tree.py` borrows `torch.utils._pytree` in the same way.
"""

import warnings

import torch

NEWEST = "2.15.0"
"""The newest torch on which all tests passed; `make versions` installs it."""

if [*map(int, torch.__version__.split(".")[:2])] > [*map(int, NEWEST.split(".")[:2])]:
    warnings.warn(
        f"vgrad: expected torch up to {NEWEST}, the newest one that was tested, got "
        f"{torch.__version__}. Update vgrad, or compare with strategy='loop'.",
        stacklevel=2,
    )
