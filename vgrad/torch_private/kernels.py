"""Kernels that torch calls itself and lists nowhere.

The fused optimizers run where `torch.optim.SGD(fused=True)` and its like do
(torch/optim/_functional and aten/src/ATen/native/native_functions.yaml).
"""

import torch

unsafe_view = torch.ops.aten._unsafe_view
"""View a tensor that nobody else has: autograd sees no view, so writes are free."""

fused_sgd_ = torch.ops.aten._fused_sgd_
fused_adam_ = torch.ops.aten._fused_adam_
fused_adamw_ = torch.ops.aten._fused_adamw_
"""Whole steps in place, on lists of tensors of one device and dtype."""

convolution_backward = torch.ops.aten.convolution_backward
sigmoid_backward = torch.ops.aten.sigmoid_backward
tanh_backward = torch.ops.aten.tanh_backward
"""The derivatives that autograd calls, with a choice of which of them."""

_ON_CPU = {
    "bfloat16": "_is_mkldnn_bf16_supported",
    "float16": "_is_mkldnn_fp16_supported",
}


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Tell whether this CPU has instructions for products of a low precision dtype.

    True where torch cannot tell.
    """
    name = _ON_CPU.get(str(dtype).removeprefix("torch."), "")
    return getattr(torch.ops.mkldnn, name, lambda: True)()
