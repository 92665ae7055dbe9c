"""Muon: updates of matrices whose singular values are all about one.

Parameters of many members go through `torch.vmap`.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function

from vgrad import checks
from vgrad.optim.base import (
    GradientTransformation,
    Grads,
    Number,
    Rate,
    check_numbers,
    check_real,
    lerp,
    map_grads,
    of_gradient,
    per_parameter,
    scalar,
)
from vgrad.optim.transforms import descent
from vgrad.tree import no_autocast, widened

Coefficients = tuple[float, float, float]

Adjustment = Literal["original", "match_rms_adamw"]
"""How the size of an update follows from the shape of its matrix."""


def orthogonalize(
    *,
    ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
    eps: Number = 1e-7,
    ns_steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
) -> GradientTransformation:
    """Set all singular values of each matrix to about one and keep its directions.

    With `x = g / max(norm(g), eps)`, each of `ns_steps` iterations takes
    `s = x @ x.T; x = a * x + (b * s + c * s @ s) @ x`, on the transpose of a matrix
    that is taller than wide. By default, singular values of a hundredth of the norm and
    more end between 0.6 and 1.2.

    The iteration runs in `dtype`, norm included: bfloat16, the choice of
    `torch.optim.Muon`, is right to two or three digits. Take float32 for gradients
    through training. Reference: as for `muon`; Bernstein and Newhouse, arXiv
    2409.20325.

    Example:
        >>> even = orthogonalize(ns_coefficients=(2, -1.5, 0.5), ns_steps=9)
        >>> even.update({"w": torch.tensor([[4.0, 0.0]])}, ())[0]["w"].round(decimals=1)
        tensor([[1., 0.]])
    """
    if len(ns_coefficients) != 3:
        raise ValueError(
            f"orthogonalize(ns_coefficients={ns_coefficients!r}): expected three "
            f"numbers, got {len(ns_coefficients)}."
        )
    for index, value in enumerate(ns_coefficients):
        checks.finite("orthogonalize", **{f"ns_coefficients[{index}]": value})
    checks.whole("orthogonalize", least=0, ns_steps=ns_steps)
    checks.between("orthogonalize", -1, 100, ns_steps=ns_steps)
    if not dtype.is_floating_point:
        raise ValueError(
            f"orthogonalize(dtype={dtype}): expected a real floating-point dtype."
        )
    a, b, c = ns_coefficients

    def init(params):
        check_real("orthogonalize", params)
        _check_matrices("orthogonalize(params)", params)
        return ()

    def iterate(grad):
        if hasattr(grad, "full_tensor"):
            return _on_whole(iterate, grad)
        tall = grad.shape[0] > grad.shape[1]
        x = grad.to(dtype).mT if tall else grad.to(dtype)
        with no_autocast(x.device):
            x = x / x.norm().clamp(min=scalar(eps, x))
            for _ in range(ns_steps):
                gram = x @ x.mT
                x = _addmm(x, _addmm(gram, gram, gram, b, c), x, a, 1.0)
        return widened(x.mT if tall else x).to(widened(grad).dtype)

    def update(grads, state, params=None):
        _check_matrices("orthogonalize(grads)", grads)
        return map_grads(iterate, grads), state

    return GradientTransformation(init, update)


def _check_matrices(argument: str, tensors: Grads) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.ndim != 2:
            raise ValueError(
                f"{argument}: expected matrices, got shape {tuple(tensor.shape)} in "
                f"{name!r}. Use vgrad.optim.partition to give other parameters another "
                f"optimizer."
            )


def _on_whole(function: Callable[[Tensor], Tensor], value: Any) -> Tensor:
    """Apply a function to a whole DTensor on every rank, and keep this rank's part.

    Sums of parts would round in another way, in bfloat16 from the third digit on.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh = value.device_mesh
    whole = function(value.full_tensor())
    whole = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=value.placements)


def _addmm(added, left, right, beta, alpha) -> Tensor:
    """`beta * added + alpha * left @ right`, rounded once."""
    if torch.compiler.is_compiling():
        return torch.addmm(added, left, right, beta=beta, alpha=alpha)
    return _Addmm.apply(added, left, right, beta, alpha)


class _Addmm(Function):
    """`torch.addmm` that stays one kernel under vmap, where torch runs three.

    Three kernels round to bfloat16 three times, by which members would differ from the
    same members alone.
    """

    @staticmethod
    def forward(added, left, right, beta, alpha):
        if left.ndim == 2:
            return torch.addmm(added, left, right, beta=beta, alpha=alpha)
        flat = (matrices.flatten(0, -3) for matrices in (added, left, right))
        product = torch.baddbmm(*flat, beta=beta, alpha=alpha)
        return product.unflatten(0, left.shape[:-2])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, left, right, ctx.beta, ctx.alpha = inputs
        ctx.save_for_backward(left, right)
        ctx.save_for_forward(left, right)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        left, right = ctx.saved_tensors
        d_left, d_right = grad @ right.mT, left.mT @ grad
        return ctx.beta * grad, ctx.alpha * d_left, ctx.alpha * d_right, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        left, right = ctx.saved_tensors
        d_added, d_left, d_right, _, _ = tangents
        return ctx.beta * d_added + ctx.alpha * (d_left @ right + left @ d_right)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *inputs: Any) -> Any:
        *tensors, beta, alpha = inputs
        # All of them are products of the same matrix, so all are mapped.
        stacked = (t.movedim(dim, 0) for t, dim in zip(tensors, in_dims, strict=False))
        return _Addmm.apply(*stacked, beta, alpha), 0


def muon(
    lr: Rate = 1e-3,
    *,
    weight_decay: Number = 0.1,
    momentum: Number = 0.95,
    nesterov: bool = True,
    ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
    eps: Number = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: Adjustment | None = None,
    maximize: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> GradientTransformation:
    """Descend along the mean gradient of each matrix, made orthogonal.

    `m = momentum * m + (1 - momentum) * g`, and then
    `p -= lr * (weight_decay * p + s * o)`, with the result `o` of `orthogonalize` for
    `m`, or for `momentum * m + (1 - momentum) * g` again with `nesterov`. For a matrix
    of n by m, `s` is `sqrt(max(1, n / m))`, also with `adjust_lr_fn="original"`, and
    `0.2 * sqrt(max(n, m))` with `"match_rms_adamw"`, for the rates of AdamW. State: one
    tensor per parameter.

    It takes the matrices of hidden layers. Biases, embeddings, kernels of convolutions
    and the last layer go to another optimizer, see `partition`. Reference: Jordan et
    al., Muon, 2024; Liu et al., arXiv 2502.16982.
    """
    check_numbers("muon", lr, weight_decay=weight_decay, momentum=momentum, eps=eps)
    choices = (None, *get_args(Adjustment))
    checks.choice("muon", choices, adjust_lr_fn=adjust_lr_fn)
    options = {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps}

    def average(g, mean):
        mean = lerp(mean, g, 1 - momentum)
        ahead: Any = scalar(momentum, mean)
        return g.to(mean.dtype).lerp(mean, ahead) if nesterov else mean, mean

    def by_shape(grad):
        n, m = grad.shape
        if adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(n, m)) * grad
        return math.sqrt(max(1.0, n / max(m, 1))) * grad

    slots = {"momentum_buffer": 0}
    return descent(
        lr,
        per_parameter("muon", slots, lambda count: average, real=False),
        orthogonalize(**options, dtype=dtype),
        of_gradient(by_shape),
        weight_decay=weight_decay,
        decoupled=True,
        maximize=maximize,
    )
