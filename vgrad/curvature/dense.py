"""Curvature as one matrix of all parameters, for small models.

P numbers in all parameters, one after another, each by rows.
"""

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from vgrad.curvature.kronecker import Block, Kronecker, eigen
from vgrad.curvature.outputs import Batches, Curvature
from vgrad.persample import Options
from vgrad.persample.grad import Gradients
from vgrad.tree import double
from vgrad.typing import Buffers, Params

_MOST = 10_000
"""Numbers of all parameters; their matrix is 800 MB, and its eigenvectors too."""


@dataclass(frozen=True)
class Full(Kronecker):
    """A curvature matrix [P, P] with its eigenvectors; `full` makes it.

    It has the methods of `Kronecker`, with one block of all parameters, named "".
    """


@torch.no_grad()
def full(
    curvature: Curvature,
    params: Params,
    buffers: Buffers,
    batches: Batches,
    **options: Unpack[Options],
) -> Full:
    """Whole curvature matrix of up to 10,000 numbers: `mean_n sum_k (J_n^T c_nk)^2`.

    The square is an outer product, [P, P] in float64, which is kept as eigenvalues and
    eigenvectors. The options are in `vgrad.persample.Options`.

    Cost: the gradients of all columns of a batch, and an eigendecomposition:
    about `10 P^3` operations, and `24 P^2` bytes.

    Raises:
        ValueError: the parameters have more numbers.

    Example:
        >>> import torch, vgrad
        >>> from vgrad import curvature
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> matrix = curvature.ggn(fmodel, "gaussian")  # [[1, 1], [1, 2]]
        >>> whole = curvature.full(matrix, params, buffers, [(x,)])
        >>> whole.solve({"weight": torch.tensor([[5.0, 0.0]])}, damping=1.0)
        {'weight': tensor([[ 3.0000, -1.0000]], dtype=torch.float64)}
    """
    size = sum(value.numel() for value in params.values())
    if size > _MOST:
        raise ValueError(
            f"full(params): expected up to {_MOST} numbers, got {size}, whose matrix "
            f"would take {size * size * 8 / 2**30:.3g} GiB. Use kfac, ekfac or "
            f"vector_product, or leave parameters out by vgrad.freeze."
        )
    total, count = torch.zeros((), dtype=torch.float64), 0
    given = params, buffers, batches, options
    for grads, output in curvature.measured(full, Gradients(), *given):
        flat = joint(grads).flatten(0, 1)
        total = total.to(flat.device) + flat.mT @ flat
        count += len(output)
    values, vectors = eigen("full(batches)", "", total / count)
    shapes = {name: each.shape for name, each in params.items()}
    block = Block(None, vectors, values[None], (*params,))
    return Full({"": block}, shapes)


def joint(grads: Params) -> Tensor:
    """Join gradients [B, K, ...] of all parameters, [B, K, P] in float64."""
    rows = [double(each).reshape(*each.shape[:2], -1) for each in grads.values()]
    return torch.cat(rows, 2)
