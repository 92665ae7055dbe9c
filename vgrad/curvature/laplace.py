"""Laplace approximation: a Gaussian posterior of the parameters of a trained model.

B samples, K numbers of an output, N samples of the training data; parameters are
matrices [O, I] as in `kronecker`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.nn import functional as F

from vgrad import batches as _batches
from vgrad import checks
from vgrad.curvature.kronecker import (
    Block,
    Full,
    Kronecker,
    eigen,
    ekfac,
    full,
    joint,
    kfac,
)
from vgrad.curvature.outputs import (
    IGNORED,
    Batches,
    Likelihood,
    check_targets,
    ggn,
    likelihood_of,
)
from vgrad.curvature.products import diagonal
from vgrad.functional.model import FunctionalModel
from vgrad.generators import secret_key, torch_seed
from vgrad.persample import Options
from vgrad.persample.engine import (
    Groups,
    check_groups,
    constants,
    members,
    shows_options,
)
from vgrad.persample.grad import Gradients
from vgrad.persample.moments import InnerProducts
from vgrad.tree import double, map_values, wide
from vgrad.typing import Buffers, Params, Tree

Structure = Literal["kfac", "ekfac", "diagonal", "full"]


class Gaussian(NamedTuple):
    """A normal distribution of outputs, with `mean [B, ...]`.

    `covariance [B, K, K]` is between the K numbers of a sample's output.
    """

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class Laplace:
    """A Gaussian posterior of parameters; `laplace` makes it.

    Its mean are the parameters, and its precision is `N / (temperature noise^2) matrix`
    plus the prior's, a number or one for each parameter by name. Another prior,
    temperature or noise is `dataclasses.replace(posterior, noise=0.1)`.

    Attributes:
        samples: N, of the training data.
        loss: sum over samples, of cross-entropies or of half the squared distances.
        numbers: how many numbers the outputs of all samples have.
    """

    fmodel: FunctionalModel = field(repr=False)
    likelihood: Likelihood
    params: Params = field(repr=False)
    buffers: Buffers = field(repr=False)
    matrix: Kronecker = field(repr=False)
    samples: int
    loss: float
    numbers: int
    prior_precision: float | Mapping[str, float]
    temperature: float
    noise: float

    def __post_init__(self) -> None:
        prior: Any = self.prior_precision
        by_name = isinstance(prior, Mapping)
        if by_name and isinstance(self.matrix, Full):
            raise ValueError(
                f"laplace(prior_precision={checks.shown(prior)}): expected a number, "
                f"since one matrix of all parameters has one prior. Pass "
                f'structure="kfac".'
            )
        if by_name:
            checks.names("laplace(prior_precision)", self.matrix.blocks, prior)
        numbers = dict(prior) if by_name else {"prior_precision": prior}
        numbers |= {"temperature": self.temperature, "noise": self.noise}
        checks.between("laplace", 0, math.inf, **numbers)
        if self.likelihood == "categorical" and self.noise != 1:
            raise ValueError(
                f"laplace(noise={self.noise}): expected noise of a Gaussian "
                f'likelihood, got a categorical one. Pass likelihood="gaussian", or '
                f"temperature={self.noise}."
            )

    @constants
    def log_marginal_likelihood(self) -> Tensor:
        """Return `log p(targets)`, a float64 number, by Laplace's approximation.

        It is the log-likelihood at the parameters plus the prior's log-density, minus
        half the log-determinant of the posterior's precision, with all constants.

        Reference: MacKay, Neural Computation 4(3), 1992; Immer et al., arXiv
        2104.04975.
        """
        scale = self._scale
        value = torch.tensor(-self.loss * scale / self.samples, dtype=torch.float64)
        if self.likelihood == "gaussian":
            value -= self.numbers * math.log(self.noise * math.sqrt(2 * math.pi))
        for name, precision in self._priors.items():
            values, square = self._evidence(name)
            ratio = torch.log1p(values / precision).sum()
            value = value.to(ratio.device) - (ratio + precision * square) / 2
        return value

    def fit_prior(self, *, groups: Groups = None) -> "Laplace":
        """Return the posterior with the prior of the largest marginal likelihood.

        Each of the `groups`, `"parameter"`, `"layer"` or patterns by name, has a
        precision of its own; None is for one of all. The optimum is unique, and exact.
        Needs scipy: `pip install "vgrad[dp]"`.

        Raises:
            ValueError: parameters or curvature of a group are zero, so that the optimum
                is infinite or zero.
        """
        function, blocks = "Laplace.fit_prior", self.matrix.blocks
        check_groups(function, groups)
        priors = dict(self._priors)
        for group, names in members(function, groups, blocks).items():
            parts, squares = zip(*map(self._evidence, names), strict=True)
            values, square = torch.cat(parts), sum(squares)
            if not (square and values.any()):
                raise ValueError(
                    f"{function}(groups): expected parameters and curvature that are "
                    f"not all zero in {group!r}. Put them in a group with others."
                )
            priors |= dict.fromkeys(names, _fitted(values, square))
        prior = priors if groups is not None else next(iter(priors.values()))
        return replace(self, prior_precision=prior)

    def log_likelihood(self, batches: Batches) -> Tensor:
        """Return the mean of `log p(target)` of other data, by `predict`; a number."""
        total, count = torch.zeros((), dtype=torch.float64), 0
        function = "Laplace.log_likelihood"
        for *inputs, target in _batches.each(function, batches):
            prediction = self.predict(*inputs)
            mean = prediction.mean if isinstance(prediction, Gaussian) else prediction
            check_targets(function, self.likelihood, mean.shape, target)
            if isinstance(prediction, Gaussian):
                apart = double(target.view_as(mean) - mean).flatten(1)
                normal = MultivariateNormal(apart, double(prediction.covariance))
                logs = normal.log_prob(torch.zeros_like(apart))
            else:
                counts = (target != IGNORED).unsqueeze(1)
                classes = target.unsqueeze(1).where(counts, 0)
                logs = double(prediction.log().gather(1, classes)).where(counts, 0)
            total, count = total.to(logs.device) + logs.sum(), count + len(logs)
        return total / count

    def covariance(self, *inputs: Tree, **options: Unpack[Options]) -> Tensor:
        """Covariance of outputs, `J (precision)^-1 J^T`: [B, K, K] in float64.

        J is the Jacobian [K, P] of a sample's outputs, so it is of the model that is
        linear in its parameters. The options are in `vgrad.persample.Options`.

        Cost: a forward pass, a backward pass of K columns, and for each layer
        `B (O I + K^2 O)` operations in its eigenbasis, where samples have one position;
        else its gradients [B, K, O, I], some samples at a time. With
        `structure="full"` the gradients of all layers are formed.

        Reference: Immer et al., arXiv 2008.08400.
        """
        return self._outputs(inputs, options).covariance

    @constants
    def _outputs(self, inputs: tuple[Tree, ...], options: Options) -> Gaussian:
        precisions, is_full = self._precisions, isinstance(self.matrix, Full)
        weights = map_values(torch.reciprocal, precisions)
        of_blocks = InnerProducts(*self.matrix.bases, weights)
        quantity = Gradients() if is_full else of_blocks
        data = replace(ggn(self.fmodel, "gaussian"), function="Laplace")
        arguments = self.params, self.buffers, [inputs], options
        [(value, mean)] = data.measured(Laplace.covariance, quantity, *arguments)
        if is_full:
            block = self.matrix.blocks[""]
            rows = block.rotated(joint({name: value[name] for name in block.names}))
            value = (rows / precisions[""]) @ rows.mT
        return Gaussian(mean, value)

    @constants
    def sample(self, count: int, *, seed: int) -> Params:
        """Draw parameters from the posterior: `{name: [count, *shape]}`.

        They are members as `vgrad.ensemble.predict` takes them. The numbers follow from
        `seed` and the names of parameters; generators of torch stay as they are.
        """
        noise = _normal("Laplace.sample", count, seed, self.params)
        scales = map_values(torch.rsqrt, self._precisions)
        apart, params = self.matrix.scaled(noise, scales), self.params.items()
        return {name: (double(x) + apart[name]).to(x.dtype) for name, x in params}

    def draw(
        self, *inputs: Tree, count: int, seed: int, **options: Unpack[Options]
    ) -> Tensor:
        """Draw outputs of the linear model, [count, B, ...], by their covariance.

        `vgrad.ensemble.EnsemblePrediction.from_logits` and
        `ValuePrediction.from_outputs` take them: the Monte Carlo link.
        """
        mean, covariance = self._outputs(inputs, options)
        values, vectors = eigen("Laplace.draw(inputs)", "", covariance)
        root = vectors * values.sqrt().unsqueeze(-2)
        like = {"": covariance[..., :1]}
        noise = root @ _normal("Laplace.draw", count, seed, like)[""]
        drawn = double(mean) + noise.view(count, *mean.shape)
        return drawn.to(wide(mean.dtype))

    def predict(self, *inputs: Tree, **options: Unpack[Options]) -> Tensor | Gaussian:
        """Predict targets: probabilities `[B, C, ...]`, or a `Gaussian` of numbers.

        Probabilities are `softmax(mean / sqrt(1 + pi / 8 variance))`, the probit
        approximation; a Gaussian has the noise in its covariance.

        Reference: MacKay, Neural Computation 4(5), 1992.
        """
        mean, covariance = self._outputs(inputs, options)
        dtype = wide(mean.dtype)
        if self.likelihood == "gaussian":
            noise = self.noise**2 * torch.eye(len(covariance.mT[0])).to(covariance)
            return Gaussian(mean, (covariance + noise).to(dtype))
        variance = covariance.diagonal(dim1=1, dim2=2).view(mean.shape)
        scaled = double(mean) / (1 + math.pi / 8 * variance).sqrt()
        return scaled.softmax(1).to(dtype)

    @property
    def _scale(self) -> float:
        return self.samples / (self.temperature * self.noise**2)

    @property
    def _priors(self) -> dict[str, float]:
        prior = self.prior_precision
        if isinstance(prior, Mapping):
            return dict(prior)
        return dict.fromkeys(self.matrix.blocks, prior)

    @property
    def _precisions(self) -> dict[str, Tensor]:
        """The eigenvalues of the posterior's precision, [O, I] of each block."""
        blocks, priors = self.matrix.blocks.items(), self._priors
        return {name: self._scale * b.values + priors[name] for name, b in blocks}

    def _evidence(self, name: str) -> tuple[Tensor, float]:
        """Return the likelihood's part of a block's eigenvalues, and `|params|^2`."""
        block = self.matrix.blocks[name]
        values = [double(self.params[n].detach()) for n in block.names or (name,)]
        square = sum(float(value.square().sum()) for value in values)
        return self._scale * block.values.flatten(), square


@shows_options
def laplace(
    fmodel: FunctionalModel,
    likelihood: Likelihood,
    params: Params,
    buffers: Buffers,
    batches: Batches,
    *,
    structure: Structure | Kronecker = "kfac",
    prior_precision: float | Mapping[str, float] = 1.0,
    temperature: float = 1.0,
    noise: float = 1.0,
    **options: Unpack[Options],
) -> Laplace:
    """Gaussian posterior around trained parameters: `N(params, (N H + tau I)^-1)`.

    H is the Gauss-Newton matrix `ggn(fmodel, likelihood)` of the training data, batches
    `(*inputs, target)`, and tau the precision of a prior around zero: a decay of
    `tau / (2 N) |params|^2` in a mean loss. With a temperature and the standard
    deviation `noise` of a Gaussian's targets, N is `N / (temperature noise^2)`.

    Parameters that are frozen have no posterior:
    `params, buffers = vgrad.freeze(params, buffers, ["encoder.*"])`, for the last layer
    all but its own. The options are in `vgrad.persample.Options`.

    Cost: the one of the structure; of a matrix a forward pass.

    Args:
        structure: `"kfac"`, `"ekfac"`, `"diagonal"`, `"full"` for small models, or a
            matrix, such as `kfac(fisher(...), ...)`.
        prior_precision: a number, or one for each parameter by name.

    Raises:
        ValueError: a precision, temperature or noise is not positive; targets do
            not fit the likelihood; and as the structure.

    Reference: Daxberger et al., Laplace Redux, arXiv 2106.14806.

    Example:
        >>> import torch, vgrad
        >>> from vgrad import curvature
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        >>> data = [(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]]))]
        >>> given = fmodel, "gaussian", params, buffers, data
        >>> posterior = curvature.laplace(*given, prior_precision=3.0, noise=2.0)
        >>> posterior.covariance(torch.tensor([[2.0]])).detach()  # 4 / (5 / 4 + 3)
        tensor([[[0.9412]]], dtype=torch.float64)
    """
    functions = {"kfac": kfac, "ekfac": ekfac, "full": full, "diagonal": _diagonal}
    samples, numbers, loss = 0, 0, 0.0

    def note(output: Tensor, target: Tensor) -> None:
        nonlocal samples, numbers, loss
        output = double(output)
        if likelihood == "gaussian":
            loss += float((output - target.view_as(output)).square().sum() / 2)
        else:
            loss += float(F.cross_entropy(output, target, reduction="sum"))
        samples, numbers = samples + len(output), numbers + output.numel()

    likelihood_of("laplace", fmodel, likelihood or "")
    data = replace(ggn(fmodel, likelihood, targets=True), note=note)
    data = replace(data, function="laplace", caller=laplace)
    if isinstance(structure, Kronecker):
        matrix = structure
        checks.names("laplace(structure)", params, matrix.shapes)
        checks.shapes("laplace(structure)", matrix.shapes, params)
        for batch in _batches.each("laplace", batches):
            with torch.no_grad():
                note(*data.outputs(params, buffers, batch))
    else:
        checks.choice("laplace", functions, structure=structure)
        matrix = functions[structure](data, params, buffers, batches, **options)
    kind = fmodel, likelihood, params, buffers, matrix
    return Laplace(*kind, samples, loss, numbers, prior_precision, temperature, noise)


def _fitted(values: Tensor, square: float) -> float:
    """Return the precision of the largest evidence, by eigenvalues and `|params|^2`."""
    optimize = checks.package("scipy.optimize", "dp")

    # The derivative by the logarithm, but for -1/2; it increases.
    def slope(log: float) -> float:
        precision = math.exp(log)
        return precision * square - float((values / (values + precision)).sum())

    low, high = min(float(values.max()), 0.5 / square), len(values) / square
    return math.exp(optimize.brentq(slope, math.log(low), math.log(high)))


def _diagonal(*arguments: Any, **options: Unpack[Options]) -> Kronecker:
    entries = diagonal(*arguments, **options).items()
    sides = {name: double(x).reshape(*x.shape[:1], -1) for name, x in entries}
    blocks = {name: Block(None, None, x) for name, x in sides.items()}
    return Kronecker(blocks, {name: x.shape for name, x in entries})


def _normal(function: str, count: int, seed: int, like: Params) -> Params:
    """Draw normal numbers in float64, {name: [count, *shape]}."""
    [count] = checks.integers(function, minimum=1, count=count)
    [seed] = checks.integers(function, minimum=0, seed=seed)
    key, drawn = secret_key(seed=seed), {}
    for name, value in like.items():
        source = torch.Generator().manual_seed(torch_seed(key, name))
        shape = count, *value.shape
        numbers = torch.randn(shape, generator=source, dtype=torch.float64)
        drawn[name] = numbers.to(value.device)
    return drawn
