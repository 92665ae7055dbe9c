"""Solves with a curvature matrix of which only products with vectors are computed.

P numbers in all parameters.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from vgrad import checks
from vgrad.curvature.products import Product, linear_operator
from vgrad.tree import double
from vgrad.typing import Params


@dataclass(frozen=True)
class Iterative:
    """A matrix that solves by conjugate gradients; `iterative` makes it."""

    product: Product = field(repr=False)
    params: Params = field(repr=False)
    tolerance: float
    max_steps: int | None

    def solve(self, vector: Params, *, damping: float) -> Params:
        """Solve `(matrix + damping I) x = vector` for x.

        Raises:
            RuntimeError: the tolerance is not reached.
        """
        function = "Iterative.solve"
        linalg = checks.package("scipy.sparse.linalg", "dp")
        [damping] = checks.non_negative(function, damping=damping)
        shapes = {name: value.shape for name, value in self.params.items()}
        checks.vectors(f"{function}(vector)", shapes, vector)
        sizes = [value.numel() for value in self.params.values()]
        pairs = zip(self.params, sizes, strict=True)
        rows = [double(vector[name]).reshape(-1, size) for name, size in pairs]
        matrix = linear_operator(self.product, self.params)

        def damped(flat: Any) -> Any:
            return matrix.matvec(flat) + damping * flat

        operator = linalg.LinearOperator(matrix.shape, damped, dtype="float64")
        found = []
        for right in torch.cat(rows, 1).detach().cpu():
            left, _ = linalg.cg(
                operator, right.numpy(), rtol=self.tolerance, maxiter=self.max_steps
            )
            found.append(torch.from_numpy(left))
            # Of the matrix itself: the solver's own residual drifts from it.
            gap = (torch.from_numpy(damped(left)) - right).norm()
            if not gap <= 10 * self.tolerance * right.norm():
                raise RuntimeError(
                    f"{function}(damping={damping}): expected a residual of "
                    f"{self.tolerance:.1g} of the vector, got "
                    f"{float(gap / right.norm()):.1g}. Take more damping, float64, or "
                    f"another tolerance or max_steps, and no matrix that has negative "
                    f"eigenvalues, as a Hessian may."
                )
        parts = zip(vector.items(), torch.stack(found).split(sizes, 1), strict=True)
        return {n: x.to(like.device).view(like.shape) for (n, like), x in parts}


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
        [max_steps] = checks.whole("iterative", least=1, max_steps=max_steps)
    return Iterative(product, params, tolerance, max_steps)
