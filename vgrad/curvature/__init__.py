"""Curvature of losses: products, diagonals, Kronecker factors, Jacobians.

A curvature matrix belongs to a model and a likelihood of its outputs, and is the mean
over samples; the functions take `(matrix, params, buffers, batches)`.

* `ggn`: the generalised Gauss-Newton matrix, exact
* `fisher`: the Fisher information with targets drawn from the model
* `empirical_fisher`: the covariance of gradients at the targets
* `vector_product`: multiply such a matrix and a vector
* `hessian_vector_product`: multiply the Hessian of a batch loss and a vector
* `linear_operator`: wrap a product for scipy's solvers
* `diagonal`, `trace`: entries of such a matrix
* `kfac`, `ekfac`: Kronecker products for each parameter, a `Kronecker` matrix
* `full`: the matrix of all parameters of a small model, a `Full` matrix
* `iterative`: solve by products alone, an `Iterative` matrix
* `per_sample_jacobian`: the Jacobian of a model's outputs for every sample
* `Curvature`, `Kronecker`, `Full`, `Iterative`: the kinds of matrices
* `laplace`: a Gaussian posterior of parameters around trained ones
* `Laplace`, `Gaussian`: the posterior, and its prediction of numbers
"""

from vgrad.curvature.kronecker import Full, Kronecker, ekfac, full, kfac
from vgrad.curvature.laplace import Gaussian, Laplace, laplace
from vgrad.curvature.outputs import (
    Curvature,
    empirical_fisher,
    fisher,
    ggn,
    per_sample_jacobian,
)
from vgrad.curvature.products import (
    Iterative,
    diagonal,
    hessian_vector_product,
    iterative,
    linear_operator,
    trace,
    vector_product,
)

__all__ = [
    "Curvature",
    "Full",
    "Gaussian",
    "Iterative",
    "Kronecker",
    "Laplace",
    "diagonal",
    "ekfac",
    "empirical_fisher",
    "fisher",
    "full",
    "ggn",
    "hessian_vector_product",
    "iterative",
    "kfac",
    "laplace",
    "linear_operator",
    "per_sample_jacobian",
    "trace",
    "vector_product",
]


def __dir__() -> list[str]:
    return __all__
