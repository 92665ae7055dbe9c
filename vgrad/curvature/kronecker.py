"""Curvature as Kronecker products, a block for each parameter; or as one whole block.

A parameter is a matrix `[O, I]` of its first dimension and all others. T positions of a
sample use it, with inputs a_t and gradients g_t at their outputs; K columns, N samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from vgrad import checks
from vgrad.curvature.outputs import Batches, Curvature
from vgrad.factors import Factor
from vgrad.factors.columns import Appended, Covariances, covariances
from vgrad.persample import Options
from vgrad.persample.engine import Call, Join, Joined, constants, shows_options
from vgrad.persample.grad import Gradients
from vgrad.persample.moments import OfBlocks, Pairs, Sides, Squares
from vgrad.tree import double
from vgrad.typing import Buffers, Params

Sharing = Literal["expand", "reduce"]

_MOST = 10_000
"""Numbers of all parameters; their matrix is 800 MB, and its eigenvectors too."""


@dataclass(frozen=True)
class Block:
    """The curvature of one parameter, `(Q_o x Q_i) diag(values) (Q_o x Q_i)^T`.

    -> left [O, O] and right [I, I], orthogonal, in float64, None for the identity;
    values [O, I]. Parameters of several `names` follow each other in rows.
    """

    left: Tensor | None
    right: Tensor | None
    values: Tensor
    names: tuple[str, ...] = ()

    def rotated(self, matrix: Tensor, *, back: bool = False) -> Tensor:
        """Return `Q_o^T M Q_i`, or `Q_o M Q_i^T`, of [..., O, I]."""
        if self.left is not None:
            matrix = (self.left if back else self.left.mT) @ matrix
        if self.right is not None:
            matrix = matrix @ (self.right.mT if back else self.right)
        return matrix


@dataclass(frozen=True)
class Kronecker:
    """A block-diagonal curvature matrix; `kfac` and `ekfac` make it.

    Vectors are dictionaries `{name: [..., *shape]}`. Results are float64.
    """

    blocks: dict[str, Block]
    shapes: dict[str, torch.Size]

    def solve(self, vector: Params, *, damping: float) -> Params:
        """Solve `(matrix + damping I) x = vector` for x."""
        function = f"{type(self).__name__}.solve"
        return self.scaled(vector, self.inverse(function, damping))

    def inverse(self, function: str, damping: float) -> Params:
        """Return the eigenvalues of `(matrix + damping I)^-1`, {name: [O, I]}."""
        damping = self._damping(function, damping)
        return {name: 1 / (b.values + damping) for name, b in self.blocks.items()}

    def product(self, vector: Params) -> Params:
        """Multiply a vector by the matrix."""
        return self.scaled(vector, {n: b.values for n, b in self.blocks.items()})

    def scaled(self, vector: Params, values: Params) -> Params:
        """Multiply a vector by a matrix of the same eigenvectors, and these values."""
        lead = self.check(f"{type(self).__name__}(vector)", vector)
        result = {}
        for name, block in self.blocks.items():
            rows = len(block.values)
            shapes = {n: self.shapes[n] for n in block.names or (name,)}
            sizes = {n: (*lead, rows, s.numel() // rows) for n, s in shapes.items()}
            parts = [double(vector[n]).reshape(size) for n, size in sizes.items()]
            matrix = block.rotated(torch.cat(parts, -1)) * values[name]
            widths = [part.shape[-1] for part in parts]
            parts = block.rotated(matrix, back=True).split(widths, -1)
            for parameter, part in zip(sizes, parts, strict=True):
                result[parameter] = part.reshape(vector[parameter].shape)
        return {name: result[name] for name in vector}

    def check(self, function: str, vector: Params) -> torch.Size:
        """Refuse vectors of other names or shapes; return the axes in front."""
        return checks.vectors(function, self.shapes, vector)

    def logdet(self, *, damping: float) -> Tensor:
        """Return `log det(matrix + damping I)`."""
        damping = self._damping(f"{type(self).__name__}.logdet", damping)
        values = torch.cat([*self.eigenvalues().values()])
        return (values + damping).log().sum()

    def trace(self) -> Tensor:
        """Return the sum of all eigenvalues."""
        return torch.cat([*self.eigenvalues().values()]).sum()

    def eigenvalues(self) -> dict[str, Tensor]:
        """Return the eigenvalues of each block, [P], in no order."""
        return {name: block.values.flatten() for name, block in self.blocks.items()}

    def sides(
        self, dim: tuple[int, int]
    ) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        """Return the eigenvectors of most curvature, for `per_sample_projection`.

        {name: (left [k_o, O], right [k_i, I])} for `dim=(k_o, k_i)`, at most (O, I), in
        float64 and by falling curvature, which is summed over the other side. None is
        the identity. A parameter of one dimension has k_o k_i directions on the left.
        """
        sizes = {"dim[0]": dim[0], "dim[1]": dim[1]}
        k_o, k_i = checks.integers("Kronecker.sides", minimum=1, **sizes)
        sides = {}
        for name, block in self.blocks.items():
            if block.names:
                raise ValueError(
                    f"Kronecker.sides: expected separate_weight_and_bias=True, got a "
                    f"block of {checks.listed(block.names)}."
                )
            values, column = block.values, block.values.shape[1] == 1
            count = k_o * k_i if column else k_o
            left = _top(block.left, values.sum(1), count)
            sides[name] = (
                left,
                None if column else _top(block.right, values.sum(0), k_i),
            )
        return sides

    @property
    def bases(self) -> tuple[Sides, Pairs]:
        """The eigenvectors of all blocks, and the names in blocks of several."""
        sides = {name: (block.left, block.right) for name, block in self.blocks.items()}
        blocks = self.blocks.values()
        return sides, {name: block.names for block in blocks for name in block.names}

    def _damping(self, function: str, damping: float) -> float:
        [damping] = checks.non_negative(function, damping=damping)
        for name, values in self.eigenvalues().items():
            lower, upper = (float(value) for value in values.aminmax())
            if lower + damping <= len(values) * torch.finfo(values.dtype).eps * upper:
                raise ValueError(
                    f"{function}(damping={damping}): expected a larger number, "
                    f"since {name or 'the matrix'!r} has eigenvalues down to "
                    f"{lower:.2g}, which are lost in the rounding of {upper:.2g}."
                )
        return damping


@shows_options
@constants
def kfac(
    curvature: Curvature,
    params: Params,
    buffers: Buffers,
    batches: Batches,
    *,
    weight_sharing: Sharing = "expand",
    separate_weight_and_bias: bool = True,
    **options: Unpack[Options],
) -> Kronecker:
    """Kronecker-factored curvature of each parameter, `S x A / mean T`.

    `S = mean_n sum_kt g_nkt g_nkt^T` [O, O] and `A = mean_n sum_t a_nt a_nt^T` [I, I],
    with T positions of a sample; a weight that is used twice has the positions of both
    uses. With `weight_sharing="reduce"` a sample has one position, `sum_t g_nkt` and
    `mean_t a_nt`, which is exact for models that average over positions; tables of
    lookups stay expanded. A parameter with one dimension, such
    as a bias, has its whole covariance, and so has one of up to 4,096 numbers that no
    product uses. The options are in `vgrad.persample.Options`.

    With `separate_weight_and_bias=False` a bias is one more column of its weight, for
    an input that is 1, in a block [O, I + 1] under the weight's name. Their names
    differ in "bias" for "weight", as of torch's modules, and in each sample the bias
    has the gradients at all outputs of the weight, and no others. Others stay separate,
    as in grouped convolutions.

    Cost: a forward pass and a backward pass of K columns for each batch, two
    products of matrices in float64 for each layer, and the memory of two covariances.

    Raises:
        ValueError: a parameter has no factors, and too many numbers.

    Reference: Martens and Grosse, arXiv 1503.05671; Eschenhagen et al., arXiv
    2311.00636 (weight sharing).

    Example:
        >>> import torch, vgrad
        >>> from vgrad import curvature
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        >>> matrix = curvature.ggn(fmodel, "gaussian")
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> blocks = curvature.kfac(matrix, params, buffers, [(x,)])
        >>> blocks.logdet(damping=1.0).exp().detach()  # of blocks [[2, 1], [1, 3]]
        tensor(25.0000, dtype=torch.float64)
    """
    checks.choice("kfac", get_args(Sharing), weight_sharing=weight_sharing)
    sums: dict[str, Covariances] = {}
    count = 0
    pairs = {} if separate_weight_and_bias else _pairs(params)
    quantity = _Covariances(pairs, weight_sharing == "reduce")
    arguments = params, buffers, batches, options
    for batch_sums, output in curvature.measured(kfac, quantity, *arguments):
        for name, covariance in batch_sums.items():
            _add(sums, name, covariance)
        count += len(output)
    several: dict[str, tuple[str, ...]] = dict.fromkeys(params, ())
    for weight, bias in dict.fromkeys(pairs.values()):
        if len(sums[weight].right) > params[weight].shape[1:].numel():
            several |= {weight: (weight, bias)}
            del several[bias]
    blocks = {}
    for name, names in several.items():
        left, right, positions = sums[name]
        sides = (left / count, right / count)
        spectra = (eigen("kfac(batches)", name, side) for side in sides)
        (values, basis), (others, other) = spectra
        values = torch.outer(values, others) * (count / max(1, positions))
        blocks[name] = Block(basis, other, values, names)
    return Kronecker(blocks, {name: value.shape for name, value in params.items()})


def _pairs(params: Params) -> Pairs:
    pairs: Pairs = {}
    for name, value in params.items():
        layer, dot, leaf = name.rpartition(".")
        bias = f"{layer}{dot}{leaf.replace('weight', 'bias')}"
        fits = bias in params and params[bias].shape == value.shape[:1] != value.shape
        if fits and bias not in pairs:
            pairs |= dict.fromkeys((name, bias), (name, bias))
    return pairs


@shows_options
@constants
def ekfac(
    curvature: Curvature,
    params: Params,
    buffers: Buffers,
    batches: Batches,
    *,
    weight_sharing: Sharing = "expand",
    separate_weight_and_bias: bool = True,
    **options: Unpack[Options],
) -> Kronecker:
    """Kronecker-factored eigenvectors with the eigenvalues that fit them best.

    The eigenvalues of `kfac` are replaced by the curvature along its eigenvectors,
    `mean_n sum_k (Q_o^T G_nk Q_i)^2`, which makes the smallest error (in the norm of
    Frobenius) that these eigenvectors allow. It has the arguments and errors of `kfac`.

    Cost: twice the passes of `kfac`, and the rotated gradients of one layer at a time,
    in the gradients' dtype.

    Reference: George et al., arXiv 1806.03884.
    """
    arguments = params, buffers, batches
    settings: Any = {"weight_sharing": weight_sharing}
    settings |= {"separate_weight_and_bias": separate_weight_and_bias}
    start = kfac(curvature, *arguments, **settings, **options)
    curvature = replace(curvature, note=None)  # which has seen the batches
    values = curvature.mean(ekfac, Squares(*start.bases), *arguments, options).totals
    blocks = start.blocks.items()
    return replace(start, blocks={n: replace(b, values=values[n]) for n, b in blocks})


@dataclass(frozen=True)
class Full(Kronecker):
    """A curvature matrix [P, P] with its eigenvectors; `full` makes it.

    It has the methods of `Kronecker`, with one block of all parameters, named "".
    """


@shows_options
@constants
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
        >>> solved = whole.solve({"weight": torch.tensor([[5.0, 0.0]])}, damping=1.0)
        >>> solved["weight"].detach()
        tensor([[ 3.0000, -1.0000]], dtype=torch.float64)
    """
    size = sum(value.numel() for value in params.values())
    if size > _MOST:
        raise ValueError(
            f"full(params): expected up to {_MOST} numbers, got {size}, whose matrix "
            f"would take {size * size * 8 / 2**30:.3g} GiB. Use kfac, ekfac or "
            f"vector_product, or leave parameters out by vgrad.freeze."
        )

    def square(grads: Params) -> Params:
        flat = joint(grads).flatten(0, 1)
        return {"": flat.mT @ flat}

    arguments = params, buffers, batches, options
    matrix = curvature.mean(full, Gradients(), *arguments, part=square).totals[""]
    values, vectors = eigen("full(batches)", "", matrix)
    shapes = {name: value.shape for name, value in params.items()}
    block = Block(None, vectors, values[None], (*params,))
    return Full({"": block}, shapes)


def joint(grads: Params) -> Tensor:
    """Join gradients [B, K, ...] of all parameters, [B, K, P] in float64."""
    rows = [double(grad).reshape(*grad.shape[:2], -1) for grad in grads.values()]
    return torch.cat(rows, 2)


class _Added(Join):
    """Covariances of each parameter, added up."""

    def __init__(self) -> None:
        self.value: dict[str, Covariances] = {}

    def add(
        self, value: dict[str, Covariances], rows: Sequence[int], size: int
    ) -> None:
        for name, covariance in value.items():
            _add(self.value, name, covariance)


@dataclass(frozen=True)
class _Covariances(OfBlocks):
    pairs: Pairs
    reduce: bool

    def joins(self) -> dict[str, Join]:
        return {"values": _Added()}

    def of_block(self, name: str, factor: Factor) -> dict[str, Any]:
        if not isinstance(factor, Appended):
            return {name: covariances(factor, reduce=self.reduce)}
        # Other samples may not share the bias.
        joint = factor if factor.is_shared else factor.weight
        parts = {name: joint, self.pairs[name][1]: factor.bias}
        return {n: covariances(part, reduce=self.reduce) for n, part in parts.items()}

    def partial(self, collector: Any, call: Call) -> dict[str, Any]:
        for name, value in collector.values.items():
            if value is None:
                raise ValueError(
                    f"{call.function}(params): expected parameters of layers with two "
                    f"sides, or with few numbers, got {name!r} of shape "
                    f"{tuple(call.params[name].shape)}, whose gradients have one side. "
                    f"Leave it out: params, buffers = "
                    f"vgrad.freeze(params, buffers, [{name!r}])."
                )
        return super().partial(collector, call)

    def total(self, parts: Joined) -> dict[str, Covariances]:
        return parts.values["values"]

    def mapped(self, function: Any, value: Any) -> Any:
        return value


def _top(vectors: Tensor | None, values: Tensor, count: int) -> Tensor | None:
    """Return the columns with the largest values as rows, at most `count`."""
    order = values.argsort(descending=True, stable=True)[:count]
    if vectors is not None:
        return vectors.mT[order]
    if count >= len(values):
        return None
    return torch.eye(len(values), dtype=values.dtype, device=values.device)[order]


def _add(sums: dict[str, Covariances], name: str, part: Covariances) -> None:
    total = sums.get(name, part)
    size = min(len(total.right), len(part.right))  # without a bias if one has none
    total, part = (
        x._replace(right=x.right[(slice(size),) * x.right.ndim]) for x in (total, part)
    )
    used = total.positions and part.positions
    if used and len(total.left) != len(part.left):
        raise ValueError(
            f"kfac(fmodel): expected uses of {name!r} of one kind, got samples where a "
            f"layer multiplies it and others where it is used otherwise. Leave it out: "
            f"params, buffers = vgrad.freeze(params, buffers, [{name!r}])."
        )
    sums[name] = part.plus(total) if name in sums else part


def eigen(function: str, name: str, matrix: Tensor) -> tuple[Tensor, Any]:
    """Return eigenvalues, none below zero, and eigenvectors; None for a diagonal."""
    if not bool(matrix.isfinite().all()):
        raise ValueError(
            f"{function}: expected gradients whose squares are finite, got others of "
            f"{name or 'a parameter'!r}. Leave out samples with such inputs or outputs."
        )
    if matrix.ndim == 1:
        return matrix, None
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp(min=0), vectors
