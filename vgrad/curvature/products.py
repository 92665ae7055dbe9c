"""Products of curvature matrices with vectors, solves by them, diagonals and traces.

The matrices are over all parameters; vectors are dictionaries of their names and
shapes. N samples in all batches.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vgrad import batches as _batches
from vgrad import checks
from vgrad.curvature.outputs import (
    Batches,
    Curvature,
    check_tensors,
    first_and_last,
    fixed,
)
from vgrad.factors import Sums
from vgrad.functional.losses import check_loss, returned
from vgrad.persample import Options
from vgrad.persample.engine import constants, shows_options
from vgrad.persample.grad import Norms
from vgrad.persample.moments import Squares
from vgrad.torch_private import autograd
from vgrad.tree import double, no_autocast, wide
from vgrad.typing import BatchLossFn, Buffers, Params

Product = Callable[[Params], Params]


def vector_product(
    curvature: Curvature, params: Params, buffers: Buffers, batches: Batches
) -> Product:
    """Product with a curvature matrix: `vector {name: shape} -> {name: shape}`.

    It is exact: `mean_n J_n^T C_n C_n^T J_n v`, with C the columns of `ggn`, `fisher`
    or `empirical_fisher`. The dtype is the parameters', float32 or wider.

    Cost: for each batch and vector a forward pass and three backward passes, one of
    them through the backward pass, whatever the number of outputs.

    Args:
        batches: a list, or what can be gone through more than once.

    Raises:
        ValueError: names or shapes of the vector are others than the parameters'.
        RuntimeError: an op of the model has no second derivative.

    Reference: Schraudolph, Neural Computation 14(7), 2002; van den Berg, Townsend's
    trick of two backward passes.
    """
    first = True

    def product(
        params: Params, buffers: Buffers, batches: Batches, vector: Params
    ) -> Params:
        nonlocal first
        _check("vector_product", params, buffers, vector)
        sums, count = Sums(), 0
        for number, batch in enumerate(_batches.each("vector_product", batches)):
            leaves = _leaves(params)
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                arguments = leaves, buffers, batch, number
                output, targets = curvature.outputs(*arguments)
                if first:
                    ends = first_and_last(len(output))
                    rows = range(len(output))[ends]
                    runs = [
                        curvature.outputs(*arguments, slice(n, n + 1)) for n in rows
                    ]
                    apart = torch.cat([run[0] for run in runs])
                    curvature.check_apart(output[ends], apart)
                # Where gradients are zero, the ones of logcumsumexp have no derivative.
                start = torch.arange(1.0, output.numel() + 1).sin().view(output.shape)
                start = start.to(output).requires_grad_()
                pulled = _pulled(output, leaves, start, create_graph=True)
                inner = _inner(pulled, params, vector)
            with no_autocast(output.device):
                (pushed,) = _pulled(inner, {"": start}, torch.ones_like(inner))
                if first:
                    inner_products = double(start) * double(pushed)
                    _check_linear(output, inner_products, pulled, params, vector)
                columns = curvature.columns(output.detach(), targets)
                weights = (columns * pushed.unsqueeze(1)).flatten(2).sum(2)
                seen = torch.einsum("bk,bk...->b...", weights, columns)
            sums.add(dict(zip(leaves, _pulled(output, leaves, seen), strict=True)))
            count += len(output)
        first = False
        return _mean(sums, params, count)

    return partial(constants(product), params, buffers, batches)


def hessian_vector_product(
    loss: BatchLossFn, params: Params, buffers: Buffers, batches: Batches
) -> Product:
    """Product with the Hessian of a batch loss: `vector {name: shape} -> the same`.

    The loss is a mean over the batch, as `batch_loss` makes it; over batches the mean
    is by their sizes. The dtype is the parameters', float32 or wider.

    Cost: for each batch and vector a forward pass and two backward passes.

    Raises:
        TypeError: the loss is one of a sample.
        ValueError: names or shapes of the vector are others than the parameters', or
            the loss is no scalar.
        RuntimeError: an op of the loss has no second derivative.

    Reference: Pearlmutter, Neural Computation 6(1), 1994.
    """
    function = "hessian_vector_product"
    check_loss(function, loss, of_batch=True)

    def product(
        params: Params, buffers: Buffers, batches: Batches, vector: Params
    ) -> Params:
        _check(function, params, buffers, vector)
        sums, count = Sums(), 0
        for batch in _batches.each(function, batches):
            leaves, size = _leaves(params), _batches.read("loss", batch).size
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                run = partial(loss, leaves, buffers, *batch)
                result = fixed(f"{function}(loss)", run, (params, batch))
                value, _ = returned(function, result, has_aux=False)
                ones = torch.ones_like(value)
                grads = _pulled(value, leaves, ones, create_graph=True)
                inner = _inner(grads, params, vector)
            if inner.requires_grad:  # else the loss is linear
                pulled = _pulled(inner, leaves, torch.full_like(inner, size))
                sums.add(dict(zip(leaves, pulled, strict=True)))
            count += size
        return _mean(sums, params, count)

    return partial(constants(product), params, buffers, batches)


@shows_options
@constants
def diagonal(
    curvature: Curvature,
    params: Params,
    buffers: Buffers,
    batches: Batches,
    **options: Unpack[Options],
) -> Params:
    """Diagonal of a curvature matrix, `mean_n sum_k (J_n^T c_nk)^2`: {name: shape}.

    In the parameters' dtype, float32 or wider. The options are in
    `vgrad.persample.Options`.

    Cost: a forward pass and a backward pass of K columns for each batch; if samples
    have one position none of the gradients is formed, else one parameter at a time.
    """

    def shaped(squares: Params) -> Params:
        return {n: square.view_as(params[n]) for n, square in squares.items()}

    arguments = params, buffers, batches, options
    sums = curvature.mean(diagonal, Squares(), *arguments, part=shaped)
    return sums.rounded(params)


@shows_options
@constants
def trace(
    curvature: Curvature,
    params: Params,
    buffers: Buffers,
    batches: Batches,
    **options: Unpack[Options],
) -> Tensor:
    """Trace of a curvature matrix, `mean_n sum_k |J_n^T c_nk|^2`: a float64 number.

    Cost: the same passes, and norms for which few gradients are formed. It has the
    options of `diagonal`.
    """

    def square(norms: Tensor) -> Params:
        return {"": double(norms).square().sum()}

    arguments = params, buffers, batches, options
    return curvature.mean(trace, Norms(None), *arguments, part=square).totals[""]


def linear_operator(product: Product, params: Params) -> Any:
    """Wrap a product as a `scipy.sparse.linalg.LinearOperator` of size [P, P].

    Vectors are the parameters one after another, each by rows, as by
    `torch.nn.utils.parameters_to_vector`. Needs scipy: `pip install "vgrad[dp]"`.

    Example:
        >>> import torch
        >>> from vgrad import curvature
        >>> twice = lambda vector: {"w": 2 * vector["w"]}
        >>> operator = curvature.linear_operator(twice, {"w": torch.ones(3)})
        >>> operator @ [1.0, 2.0, 3.0]
        array([2., 4., 6.])
    """
    linalg = checks.package("scipy.sparse.linalg", "dp")
    numbers = [value.numel() for value in params.values()]

    def matvec(flat: Any) -> Any:
        parts = torch.as_tensor(flat, dtype=torch.float64).flatten().split(numbers)
        vector = {
            name: part.to(value.device, value.dtype).view(value.shape)
            for (name, value), part in zip(params.items(), parts, strict=True)
        }
        result = product(vector)
        parts = [double(result[name]).flatten().cpu() for name in params]
        return torch.cat(parts).detach().numpy()

    shape = (sum(numbers),) * 2
    return linalg.LinearOperator(shape, matvec, rmatvec=matvec, dtype="float64")


@dataclass(frozen=True)
class Iterative:
    """A matrix that solves by conjugate gradients; `iterative` makes it."""

    product: Product = field(repr=False)
    params: Params = field(repr=False)
    tolerance: float
    max_steps: int | None

    @constants
    def solve(self, vector: Params, *, damping: float) -> Params:
        """Solve `(matrix + damping I) x = vector` for x.

        Raises:
            RuntimeError: the tolerance is not reached.
        """
        function = "Iterative.solve"
        linalg = checks.package("scipy.sparse.linalg", "dp")
        [damping] = checks.non_negative(function, damping=damping)
        checks.vectors(f"{function}(vector)", self.params, vector)
        params = self.params.items()
        rows = [double(vector[n]).reshape(-1, value.numel()) for n, value in params]
        matrix = linear_operator(self.product, self.params)

        def damped(flat: Any) -> Any:
            return matrix.matvec(flat) + damping * flat

        operator = linalg.LinearOperator(matrix.shape, damped, dtype="float64")
        solutions = []
        for right in torch.cat(rows, 1).detach().cpu():
            solution, _ = linalg.cg(
                operator, right.numpy(), rtol=self.tolerance, maxiter=self.max_steps
            )
            solutions.append(torch.from_numpy(solution))
            # Of the matrix itself: the solver's own residual drifts from it.
            gap = (torch.from_numpy(damped(solution)) - right).norm()
            if not gap <= 10 * self.tolerance * right.norm():
                raise RuntimeError(
                    f"{function}(damping={damping}): expected a residual of "
                    f"{self.tolerance:.1g} of the vector, got "
                    f"{float(gap / right.norm()):.1g}. Take more damping, float64, or "
                    f"another tolerance or max_steps, and no matrix that has negative "
                    f"eigenvalues, as a Hessian may."
                )
        columns = torch.stack(solutions).split([part.shape[1] for part in rows], 1)
        parts = dict(zip(self.params, columns, strict=True))
        return {n: parts[n].to(x.device).view(x.shape) for n, x in vector.items()}


def iterative(
    product: Product,
    params: Params,
    *,
    tolerance: float = 1e-5,
    max_steps: int | None = None,
) -> Iterative:
    """Solve with a matrix by its products: an object with `solve(vector, damping=)`.

    Conjugate gradients, in float64 between products. It is exact up to `tolerance`, the
    size of the residual relative to the vector, for any model, and slow: one product
    for each step and vector. Vectors are `{name: [..., *shape]}`, each of the leading
    entries a vector of its own. Needs scipy: `pip install "vgrad[dp]"`.

    Args:
        product: of `vector_product` or `hessian_vector_product`.
        max_steps: of one vector; None for `10 P`.

    Raises:
        ValueError: `tolerance` or `max_steps` is not above zero.

    Reference: Martens, Deep learning via Hessian-free optimization, ICML 2010.

    Example:
        >>> import torch
        >>> from vgrad import curvature
        >>> twice = lambda vector: {"w": 2 * vector["w"]}
        >>> matrix = curvature.iterative(twice, {"w": torch.ones(3)})
        >>> matrix.solve({"w": torch.tensor([3.0, 6.0, 9.0])}, damping=1.0)
        {'w': tensor([1., 2., 3.], dtype=torch.float64)}
    """
    checks.dictionaries("iterative", params=params)
    [tolerance] = checks.positive("iterative", tolerance=tolerance)
    if max_steps is not None:
        [max_steps] = checks.integers("iterative", minimum=1, max_steps=max_steps)
    return Iterative(product, params, tolerance, max_steps)


def _inner(grads: Sequence[Tensor], params: Params, vector: Params) -> Tensor:
    pairs = zip(grads, params, strict=True)
    parts = [(grad * vector[name].to(grad.dtype)).sum() for grad, name in pairs]
    return torch.stack([part.to(wide(part.dtype)) for part in parts]).sum()


def _leaves(params: Params) -> Params:
    return {name: value.detach().requires_grad_() for name, value in params.items()}


def _pulled(
    output: Tensor, leaves: Params, cotangent: Tensor, *, create_graph: bool = False
) -> Sequence[Tensor]:
    if not output.requires_grad:
        return [*map(torch.zeros_like, leaves.values())]
    return torch.autograd.grad(
        output,
        list(leaves.values()),
        cotangent.to(output.dtype),
        create_graph=create_graph,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )


@torch.no_grad()
def _check_linear(
    output: Tensor, one: Tensor, pulled: Sequence[Tensor], params: Params, v: Params
) -> None:
    """Refuse a backward pass that is not linear in the gradient it starts from."""
    pairs = zip(pulled, params, strict=True)
    other = torch.cat([(double(g) * double(v[name])).flatten() for g, name in pairs])
    # Half precision loses up to 0.002, float32 1e-7.
    room = min(0.01, math.sqrt(autograd.coarsest(output)))
    if (one.sum() - other.sum()).abs() > room * (one.abs().sum() + other.abs().sum()):
        raise ValueError(
            "vector_product(fmodel): expected a model whose backward pass can be "
            "differentiated, got one with another derivative than its values have, as "
            "of an autograd.Function that leaves torch in its backward pass. Use "
            "diagonal, kfac or full."
        )


def _check(function: str, params: Params, buffers: Buffers, vector: Params) -> None:
    check_tensors(function, params=params, buffers=buffers, vector=vector)
    checks.names(f"{function}(vector)", params, vector)
    checks.shapes(f"{function}(vector)", params, vector)


def _mean(sums: Sums, params: Params, count: int) -> Params:
    sums.divide(count)
    return sums.rounded(params)
