"""In which dtype numbers are computed: float32 or wider, whatever surrounds us."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for arithmetic on numbers of `dtype`: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    """Cast a tensor to float32 or wider."""
    return cast(tensor, wide(tensor.dtype))


def double(tensor: Tensor) -> Tensor:
    """Cast a tensor to float64, or to its complex numbers."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor; `to` without effect would cost as much as a small sum."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def no_autocast(device: torch.device) -> AbstractContextManager:
    """Keep a surrounding autocast from rounding what is computed in a block."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
