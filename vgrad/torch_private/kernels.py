"""Kernels that torch calls itself: aten/src/ATen/native/native_functions.yaml."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

unsafe_view = torch.ops.aten._unsafe_view
"""View a tensor that nobody else holds: autograd sees no view, so writes are free."""


def _by_rate(op: Any) -> Callable[..., None]:
    # The choice among overloads would read a tensor on a device, to make it a float.
    def launch(*tensors: Any, lr: float | Tensor, **options: Any) -> None:
        overload = op.tensor_lr if isinstance(lr, Tensor) else op.default
        overload(*tensors, lr=lr, **options)

    return launch


fused_sgd_ = _by_rate(torch.ops.aten._fused_sgd_)
fused_adam_ = _by_rate(torch.ops.aten._fused_adam_)
fused_adamw_ = _by_rate(torch.ops.aten._fused_adamw_)
"""Whole steps in place, on lists of tensors of one device and dtype, as
`torch.optim.SGD(fused=True)` and its like take them (torch/optim/sgd.py, adam.py)."""

copy_all_ = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
"""Copy a list of tensors into another one, on a GPU by few launches, as
torch/optim/asgd.py does."""

divide_all = torch._foreach_div  # pyright: ignore[reportPrivateImportUsage]
"""Divide all tensors of a list by a number, likewise."""

NO_KERNEL = "could not create a primitive"
"""The error of oneDNN where a CPU has no kernel, as for LSTMs in bfloat16."""

split_copy: Any = torch.split_with_sizes_copy
"""Split a tensor into parts with memory of their own, on a GPU by one launch."""

convolution_backward = torch.ops.aten.convolution_backward
sigmoid_backward = torch.ops.aten.sigmoid_backward
tanh_backward = torch.ops.aten.tanh_backward
"""The derivatives that autograd calls (tools/autograd/derivatives.yaml); for a
convolution, of a choice of input, weight and bias."""

grouped_mm: Any = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
"""The function that `F.grouped_mm` calls, without a rule of vmap
(torch/nn/functional.py)."""

pack_padded_sequence = torch._VF._pack_padded_sequence
pad_packed_sequence = torch._VF._pad_packed_sequence
"""The kernels of the functions of these names (torch/nn/utils/rnn.py)."""

_CUDNN_MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""In the order of their numbers (torch/backends/cudnn/rnn.py)."""


def recurrent_layer(
    mode: str, x: Tensor, state: list[Tensor], weights: list[Tensor]
) -> tuple[Tensor, ...]:
    """Run one layer of a net forward: its outputs, and the last `state`."""
    if not torch.backends.cudnn.is_acceptable(x.new_empty(0, dtype=torch.float32)):
        hidden = state[0] if len(state) == 1 else state
        options = (len(weights) == 4, 1, 0.0, False, False, False)
        return getattr(torch, mode)(x, hidden, weights, *options)
    # `torch.lstm` looks for weights in one block of memory, and autocast makes such a
    # block, by ops that no graph holds (aten/src/ATen/native/cudnn/RNN.cpp).
    kind, count = x.device.type, len(weights)
    if torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        x, *rest = (tensor.to(low) for tensor in (x, *state, *weights))
        state, weights = rest[: len(state)], rest[len(state) :]
    h, c, number = state[0], (*state, None)[1], _CUDNN_MODES.index(mode)
    sizes = (number, h.shape[2], 0, 1, False, 0.0, False, False, [], None)
    with torch.autocast(kind, enabled=False):
        results = torch._cudnn_rnn(x, weights, count, None, h, c, *sizes)  # pyright: ignore[reportPrivateImportUsage]
    return results[: 1 + len(state)]


is_left_aligned = torch._nested_tensor_from_mask_left_aligned  # pyright: ignore[reportPrivateImportUsage]
"""Whether a mask hides nothing but the end, for which a TransformerEncoder has a
kernel of inference (torch/nn/modules/transformer.py)."""


def attention(query: Tensor, *inputs: Any, **options: Any) -> Tensor:
    """Call `F.scaled_dot_product_attention`; without heads, not its fused kernel."""
    # Before torch 2.12 the fused kernel of a CPU divides by the number of heads, which
    # ends the process (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
    if query.shape[-3:-2] != (0,):
        return F.scaled_dot_product_attention(query, *inputs, **options)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, *inputs, **options)


fp32_precision = torch._C._get_fp32_precision_getter
"""Torch's switch for an op of a backend, at a tenth of the time of
`torch.backends.cuda.matmul` and its like (torch/backends/__init__.py)."""

_ON_CPU = {
    "bfloat16": "_is_mkldnn_bf16_supported",
    "float16": "_is_mkldnn_fp16_supported",
}


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Return whether this CPU has instructions for products of a low precision."""
    name = _ON_CPU.get(str(dtype).removeprefix("torch."), "")
    # Builds without oneDNN lack these ops (aten/src/ATen/native/mkldnn/Utils.cpp).
    return getattr(torch.ops.mkldnn, name, lambda: True)()


@cache
def multiplies_halves(device: torch.device) -> bool:
    """Return whether products of half precision have float32 results on a device."""
    # `mm`, `bmm` and their like with `out_dtype`, from torch 2.8 on, on some backends.
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has("aten::bmm.dtype", torch._C._dispatch_key_for_device(device.type)):
        return False
    one = torch.ones(1, 1, 1, dtype=torch.bfloat16, device=device)
    try:  # which older devices refuse
        torch.bmm(one, one, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


@cache
def autocast_ops(device: str) -> set[str]:
    """Return the ops of aten that autocast casts on a type of device."""
    of_others = device == torch._C._get_privateuse1_backend_name()
    return _ops_of(f"Autocast{'PrivateUse1' if of_others else device.upper()}")


@cache
def composite_ops() -> set[str]:
    """Return the ops of aten that are other ops, to autocast and to transforms."""
    others = map(_ops_of, ("Autograd", "CompositeExplicitAutograd", "CPU"))
    return _ops_of("CompositeImplicitAutograd").difference(*others)


def _ops_of(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::").partition(".")[0] for name in names}


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that ops on a device draw from by default."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    if not hasattr(module, "default_generators"):  # mps (torch/mps/__init__.py)
        return module._get_default_mps_generator()
    return module.default_generators[device.index or 0]
