"""Curvature of a loss through the outputs of a model.

B samples, K columns, N samples in all. The curvature of a sample is
`sum_k (J^T c_k) (J^T c_k)^T`: J is the Jacobian of the outputs, and c_k are the columns
of a square root of the likelihood's curvature.
"""

import hashlib
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vgrad import batches as _batches
from vgrad import checks
from vgrad.functional.losses import SampleLoss, check_model, read
from vgrad.functional.model import FunctionalModel
from vgrad.generators import RandomState, random_state
from vgrad.persample import Options
from vgrad.persample.engine import Call, Evaluation, Quantity, Transform
from vgrad.persample.grad import Gradients
from vgrad.torch_private import modes
from vgrad.tree import map_tensors, tensors, wide
from vgrad.typing import Buffers, LossFn, Params, Tree

Likelihood = Literal["categorical", "gaussian"]

Batches = Iterable[tuple[Tree, ...]]
"""Batches `(*inputs)`, with targets at the end where the curvature has some."""


@dataclass(frozen=True)
class Curvature:
    """The curvature of the mean loss of samples; `ggn` and its neighbours make it."""

    function: str
    fmodel: FunctionalModel
    columns: Callable[[Tensor, Any, int], Tensor]
    has_targets: bool = False

    def measured(
        self,
        function: Callable,
        quantity: Quantity,
        params: Params,
        buffers: Buffers,
        batches: Batches,
        options: Options,
    ) -> Iterator[tuple[Any, int]]:
        """Yield a quantity of the gradients `J^T c_k`, [B, K, ...], and B of a batch.

        It is for the `function` of a user, with its options.
        """
        name = function.__name__
        check_real(name, params)
        call = Call.of(function, partial(_with_columns, self.fmodel), options)
        transform = Transform(replace(call, columns=True, singly=False), quantity)
        for number, batch in enumerate(_batches.each(name, batches)):
            with torch.no_grad():
                output, target = self.outputs(params, buffers, batch)
                columns = self.columns(output, target, number)
            inputs = batch[: len(batch) - self.has_targets]
            yield transform(params, buffers, *inputs, columns), len(columns)

    def outputs(
        self,
        params: Params,
        buffers: Buffers,
        batch: tuple[Tree, ...],
        *,
        apart: bool = False,
    ) -> tuple[Tensor, Any]:
        """Run the model on a batch, and return its target; refuse coupled samples.

        `apart` is whether they are known not to be.
        """
        criterion = torch.sub if self.has_targets else None  # for a target
        args, kwargs, target = read(self.function, batch, criterion)
        size = _batches.read(self.function, batch).size
        with fixed(f"{self.function}(fmodel)", tensors((params, batch))):
            output = self.fmodel(params, buffers, *args, **kwargs)
        check_output(self.function, output, size)
        # A recurrent net over the batch changes all samples but the first one.
        for place in () if apart else {0, size - 1}:
            row = slice(place, place + 1)
            with torch.no_grad():
                one, kept = map_tensors(operator.itemgetter(row), (args, kwargs))
                alone = self.fmodel(params, buffers, *one, **kept)
                gap = (alone - output[row]).abs().max()
                room = output[row].abs().max() * math.sqrt(
                    torch.finfo(output.dtype).eps
                )
            if gap > room:
                raise ValueError(
                    f"{self.function}(fmodel): expected outputs of a sample that do "
                    f"not depend on the batch, got a model with an output that differs "
                    f"by {float(gap):.2g} from the one of the sample alone. Split the "
                    f"model in eval mode, see vgrad.replace_batch_norm, or pass "
                    f"batch_first=True to recurrent layers."
                )
        return output, target


@contextmanager
def fixed(what: str, tensors: list[Tensor]) -> Iterator[None]:
    """Refuse random numbers, which would make another matrix at each product."""
    before = random_state(tensors)
    yield
    if _numbers(before) != _numbers(random_state(tensors)):
        raise ValueError(
            f"{what}: expected results that do not depend on chance, got a model that "
            f"draws random numbers, as dropout does. Split it in eval mode."
        )


def check_real(function: str, params: Params) -> None:
    """Refuse complex parameters, whose curvature is no product of complex numbers."""
    for name, value in params.items():
        if value.is_complex():
            raise ValueError(
                f"{function}(params): expected real parameters, got {name!r} of "
                f"{value.dtype}. Make the model of real parameters, and put them "
                f"together by torch.view_as_complex."
            )


def _numbers(state: RandomState) -> list[list[int]]:
    return [each.tolist() for each in (state[0], *state[1].values())]


def check_output(function: str, output: Any, size: int) -> None:
    """Refuse outputs that are not a row for each sample."""
    shaped = isinstance(output, Tensor) and output.is_floating_point()
    if not shaped or output.ndim < 2 or len(output) != size:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output)
        raise ValueError(
            f"{function}(fmodel): expected a model whose output is one floating-point "
            f"tensor [B, K] or [B, K, ...], got {got} for a batch of {size}. Wrap the "
            f"model in a module that returns such a tensor."
        )


def check_targets(
    function: str, likelihood: Likelihood, output: Tensor, target: Any
) -> None:
    """Refuse targets that are not numbers of the outputs' shape, or classes."""
    if likelihood == "gaussian":
        flat = output.squeeze(1) if output.ndim == 2 else output  # as torch broadcasts
        if getattr(target, "shape", None) not in (output.shape, flat.shape):
            raise ValueError(
                f"{function}(batches): expected targets of the outputs' shape "
                f"{tuple(output.shape)}, got {checks.shown(target)}."
            )
        return
    shape = (len(output), *output.shape[2:])
    int64 = isinstance(target, Tensor) and target.dtype == torch.int64
    if not int64 or target.shape != shape:
        raise ValueError(
            f"{function}(batches): expected classes of int64 {shape}, got "
            f"{checks.shown(target)}."
        )
    if not bool(((target >= 0) & (target < output.shape[1])).all()):
        raise ValueError(
            f"{function}(batches): expected classes from 0 to {output.shape[1] - 1}, "
            f"got others, such as those to be ignored. Leave their samples out."
        )


def _with_columns(
    fmodel: FunctionalModel, params: Params, buffers: Buffers, *sample: Tree
) -> tuple[Tensor, Tensor]:
    *inputs, columns = sample
    return _output(fmodel, params, buffers, inputs), columns


def _with_units(
    fmodel: FunctionalModel, params: Params, buffers: Buffers, *sample: Tree
) -> tuple[Tensor, Tensor]:
    output = _output(fmodel, params, buffers, sample)
    return output, _units(output.unsqueeze(0))[0]


def _output(
    fmodel: FunctionalModel, params: Params, buffers: Buffers, inputs: Any
) -> Tensor:
    with modes.without_modes():  # which would see every op of these
        inputs = map_tensors(lambda leaf: leaf.unsqueeze(0), inputs)
        args, kwargs, _ = read("curvature", inputs, None)
    output = fmodel(params, buffers, *args, **kwargs)
    check_output("per_sample_jacobian", output, 1)
    return output[0]


def ggn(
    fmodel: FunctionalModel | LossFn, likelihood: Likelihood | None = None
) -> Curvature:
    """Generalised Gauss-Newton matrix: `mean_n J_n^T H_n J_n`, H the likelihood's own.

    `"categorical"`: outputs are logits `[B, C, ...]`, as for
    `torch.nn.functional.cross_entropy`, summed over positions behind the classes (so
    logits `[B, T, C]` of a language model are to be transposed), and
    `H = diag(p) - p p^T`. `"gaussian"`: the loss is `|output - target|^2 / 2`, and H
    the identity. It needs no targets: batches are `(*inputs,)`. For these two the GGN
    is the Fisher information.

    In place of both, `sample_loss(fmodel, criterion)` with torch's `cross_entropy`,
    `CrossEntropyLoss()`, `mse_loss` or `MSELoss()`, of the two reductions, is one of
    them times a number: the mean over T positions divides by T, and the squared error
    is twice the Gaussian loss, as a mean over K numbers `2 / K` times it. H is
    multiplied by that number.

    Cost: K columns for each sample, one for each number of its output: a backward pass
    has K times the activations, but the inputs of layers once.

    Raises:
        ValueError: `likelihood` is unknown, or the criterion of the loss.

    Reference: Martens, arXiv 1412.1193.

    Example:
        >>> import torch, vgrad
        >>> from vgrad import curvature
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> matrix = curvature.ggn(fmodel, "gaussian")
        >>> curvature.diagonal(matrix, params, buffers, [(x,)])  # the mean of squares
        {'weight': tensor([[1., 2.]])}
    """
    fmodel, likelihood, weight = likelihood_of("ggn", fmodel, likelihood)
    exact = {"categorical": _classes, "gaussian": _units}[likelihood]

    def columns(output: Tensor, *rest: Any) -> Tensor:
        return exact(output) * math.sqrt(weight(output))

    return Curvature("ggn", fmodel, columns)


def fisher(
    fmodel: FunctionalModel | LossFn,
    likelihood: Likelihood | None = None,
    *,
    seed: int,
    samples: int = 1,
) -> Curvature:
    """Monte Carlo Fisher information: targets drawn from the model, as of `ggn`.

    Its mean over seeds is the GGN of the same likelihood or loss. The targets of a
    batch follow from `seed` and the batch's place in the sequence, so a matrix is the
    same one each time; generators of torch stay as they are. Batches are `(*inputs,)`.

    Cost: `samples` columns for each sample.

    Raises:
        ValueError: `likelihood` is unknown, or a number is not whole.

    Reference: Kunstner et al., arXiv 1905.12558.
    """
    fmodel, likelihood, weight = likelihood_of("fisher", fmodel, likelihood)
    [count] = checks.whole("fisher", least=1, samples=samples)
    [seed] = checks.whole("fisher", least=0, seed=seed)
    drawn = {"categorical": _drawn_classes, "gaussian": _drawn_numbers}[likelihood]

    def columns(output: Tensor, target: Any, number: int) -> Tensor:
        digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        scale = math.sqrt(weight(output) / count)
        return drawn(output, count, generator) * scale

    return Curvature("fisher", fmodel, columns)


def empirical_fisher(
    fmodel: FunctionalModel | LossFn, likelihood: Likelihood | None = None
) -> Curvature:
    """Uncentred covariance of gradients at the targets, `mean_n g_n g_n^T`.

    It has the likelihoods and losses of `ggn`; batches are `(*inputs, target)`.

    Raises:
        ValueError: `likelihood` is unknown, or a class is out of range.

    Reference: Kunstner et al., arXiv 1905.12558 (where it differs from the GGN).
    """
    given = likelihood_of("empirical_fisher", fmodel, likelihood)
    fmodel, likelihood, weight = given

    def columns(output: Tensor, target: Any, number: int) -> Tensor:
        check_targets("empirical_fisher", likelihood, output, target)
        if likelihood == "gaussian":
            return (output - target.view_as(output)).unsqueeze(1) * weight(output)
        chosen = torch.zeros_like(output).scatter_(1, target.unsqueeze(1), 1.0)
        return (output.softmax(1) - chosen).unsqueeze(1) * weight(output)

    return Curvature("empirical_fisher", fmodel, columns, has_targets=True)


def per_sample_jacobian(
    fmodel: FunctionalModel, **options: Unpack[Options]
) -> Callable[..., Params]:
    """Jacobians: `(params, buffers, *inputs) -> {name: [B, *out, *shape]}`.

    `out` is the shape of a sample's output, which is one tensor. The options are in
    `vgrad.persample.Options`; with `strategy="vmap"` the result can be differentiated,
    with respect to parameters and inputs.

    The model runs as on each sample alone, so batch statistics raise an error and
    samples cannot depend on each other.

    Cost: a forward pass and one backward pass for all numbers of an output together,
    for all samples or `chunk_size` at a time, and the memory of the result. In
    `strategy="vmap"` it is a backward pass for each number.

    Raises:
        ValueError: the output of the model is no tensor with a row for each sample, or
            the batch is empty.

    Example:
        >>> import torch, vgrad
        >>> from vgrad import curvature
        >>> model = torch.nn.Linear(2, 3, bias=False)
        >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        >>> jacobian = curvature.per_sample_jacobian(fmodel)
        >>> jacobian(params, buffers, torch.ones(5, 2))["weight"].shape
        torch.Size([5, 3, 3, 2])
    """
    check_model("per_sample_jacobian", fmodel)
    call = Call.of(per_sample_jacobian, partial(_with_units, fmodel), options)
    return Transform(replace(call, columns=True), _Jacobians())


class _Jacobians(Gradients):
    def total(self, partials: Iterator[Params], run: Evaluation) -> Params:
        grads = super().total(partials, run)
        if not run.done:
            raise ValueError(
                "per_sample_jacobian(fmodel)(params, buffers, *inputs): expected a "
                "sample at least, got an empty batch, whose outputs have no shape."
            )
        out = run.chunks_run[0].losses.shape[1:]
        return {name: each.unflatten(1, out) for name, each in grads.items()}


def likelihood_of(
    function: str, fmodel: Any, likelihood: Any
) -> tuple[FunctionalModel, Likelihood, Callable[[Tensor], float]]:
    """Return model, likelihood, and by how much a loss is larger for an output."""
    known: Any = likelihood
    mean = None
    if isinstance(fmodel, SampleLoss):
        fmodel, criterion, copies = fmodel.parts
        options = vars(criterion) if isinstance(criterion, nn.Module) else {}
        mean = {"mean": True, "sum": False}.get(options.get("reduction", "mean"))
        kind = type(criterion) if options else criterion
        known = _KNOWN.get(kind) if isinstance(kind, Hashable) else None
        plain = not options.get("label_smoothing") and copies is None
        plain &= getattr(criterion, "weight", None) is None
        plain &= options.get("ignore_index", -100) == -100
        if likelihood is not None or not known or mean is None or not plain:
            raise ValueError(
                f"{function}(loss): expected a sample_loss of cross_entropy, "
                f"CrossEntropyLoss(), mse_loss or MSELoss(), without augmentations and "
                f"options but for a reduction by mean or sum, and no likelihood beside "
                f"it, got {checks.shown(criterion)}. Pass the model and its "
                f'likelihood: {function}(fmodel, "categorical").'
            )
    check_model(function, fmodel)
    checks.choice(function, get_args(Likelihood), likelihood=known)
    for name, module in fmodel.named_modules():
        if getattr(module, "scale_grad_by_freq", False):
            raise ValueError(
                f"{function}(fmodel): expected gradients that are derivatives, got "
                f"{name!r}, an embedding with scale_grad_by_freq=True. Set it to False."
            )

    def weight(output: Tensor) -> float:
        squared = known == "gaussian" and mean is not None
        terms = output[0].numel() // (1 if squared else output.shape[1])
        return (2 if squared else 1) / (terms if mean else 1)

    return fmodel, known, weight


_KNOWN: dict[Any, Any] = dict.fromkeys(
    (F.cross_entropy, nn.CrossEntropyLoss), "categorical"
)
_KNOWN |= dict.fromkeys((F.mse_loss, nn.MSELoss), "gaussian")


def _units(output: Tensor) -> Tensor:
    """Return the identity for each sample, [B, K, *out]."""
    units = torch.eye(output[0].numel(), dtype=output.dtype, device=output.device)
    units = units.view(-1, *output.shape[1:])
    return units.expand(len(output), *units.shape)


def _classes(output: Tensor) -> Tensor:
    """Return a root of `diag(p) - p p^T` at each position, [B, C * positions, *out]."""
    p = output.reshape(*output.shape[:2], -1).softmax(1).mT  # [B, positions, C]
    root = p.sqrt()
    columns = root.diag_embed() - root[..., None] * p[..., None, :]
    places = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
    columns = torch.einsum("blkc,lm->blkcm", columns, places)
    return columns.reshape(len(p), -1, *output.shape[1:])


def _drawn_classes(output: Tensor, count: int, generator: torch.Generator) -> Tensor:
    p = output.softmax(1).movedim(1, -1)
    flat = p.reshape(-1, p.shape[-1]).double().cpu()
    labels = torch.multinomial(flat, count, replacement=True, generator=generator)
    chosen = F.one_hot(labels.view(*p.shape[:-1], count), p.shape[-1]).to(p)
    return (p.unsqueeze(-2) - chosen).movedim((-2, -1), (1, 2))


def _drawn_numbers(output: Tensor, count: int, generator: torch.Generator) -> Tensor:
    shape = len(output), count, *output.shape[1:]
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return drawn.to(wide(output.dtype)).to(output.device)
