"""Calls that hand values to Python, which all samples or members must share."""

import torch
from torch import Tensor

from vgrad.ops.record import ITSELF, Read, register
from vgrad.torch_private import kernels

register(
    *(Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero),
    read=Read(compared=torch.bool, convert=bool),
)
register(Tensor.__int__, Tensor.__index__, read=Read(compared=torch.int64))
register(Tensor.__float__, read=Read(compared=torch.float64, convert=float))
register(Tensor.item, read=Read(compared=ITSELF, convert=lambda value: value))
register(
    *(Tensor.__complex__, Tensor.tolist, Tensor.__contains__, Tensor.__format__),
    *(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose),
    kernels.is_left_aligned,
    read=Read(),
)
