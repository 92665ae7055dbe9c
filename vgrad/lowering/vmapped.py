"""Which torch functions have a form of ours under `torch.vmap`, and which it is."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vgrad.lowering.attention import scaled_dot_product_attention
from vgrad.lowering.custom import custom_function
from vgrad.lowering.indexing import index_add, index_add_, scatter_
from vgrad.lowering.sequences import cells
from vgrad.torch_private import modes


def _by_steps(mode: str) -> Callable[..., tuple[Tensor, ...]]:
    """Make a function with torch's signature that runs a recurrent net in steps."""

    def run(
        input: Tensor,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        layout = cells.Layout(num_layers, bidirectional, dropout, train, batch_first)
        return cells.steps(mode, input, state, params, **layout._asdict())

    return run


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows; torch's rule for one table a sample pads only the first table."""
    options = (max_norm, norm_type, scale_grad_by_freq, sparse)
    rows = F.embedding(input, weight, None, *options)
    if padding_idx is None:
        return rows
    padding = (input == padding_idx % len(weight)).unsqueeze(-1)
    return torch.where(padding, rows.detach(), rows)


def _lookup(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Do the same for `torch.embedding`, which `F.embedding` calls."""
    padding = None if padding_idx < 0 else padding_idx
    return _embedding(indices, weight, padding, None, 2.0, scale_grad_by_freq, sparse)


VMAPPED: dict[Callable, Callable] = {
    F.embedding: _embedding,
    torch.embedding: _lookup,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    torch.lstm: _by_steps("lstm"),
    torch.gru: _by_steps("gru"),
    torch.rnn_tanh: _by_steps("rnn_tanh"),
    torch.rnn_relu: _by_steps("rnn_relu"),
    torch.lstm_cell: cells.lstm_cell,
    torch.gru_cell: cells.gru_cell,
    torch.rnn_tanh_cell: cells.rnn_tanh_cell,
    torch.rnn_relu_cell: cells.rnn_relu_cell,
    torch.index_add: index_add,
    Tensor.index_add: index_add,
    Tensor.index_add_: index_add_,
    Tensor.scatter_: scatter_,
    modes.custom_function_call: custom_function,
}
"""Here torch's own vmap loops over samples, gives wrong numbers, or refuses."""
