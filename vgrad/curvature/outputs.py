"""Curvature of a loss through the outputs of a model.

B samples, K columns, N samples in all. The curvature of a sample is
`sum_k (J^T c_k) (J^T c_k)^T`: J is the Jacobian of the outputs, and c_k are the columns
of a square root of the likelihood's curvature.
"""

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vgrad import batches as _batches
from vgrad import checks
from vgrad.factors import Sums
from vgrad.functional.losses import SampleLoss, check_model, read
from vgrad.functional.model import FunctionalModel
from vgrad.generators import (
    random_bits,
    random_state,
    sample_keys,
    secret_key,
    torch_seed,
    unit,
)
from vgrad.loss.randomness import drew
from vgrad.persample import Options
from vgrad.persample.engine import Call, Joined, Quantity, Transform, shows_options
from vgrad.persample.grad import Gradients
from vgrad.torch_private import modes
from vgrad.tree import map_tensors, no_autocast, tensors, wide
from vgrad.typing import Buffers, LossFn, Params, T, Tree

Likelihood = Literal["categorical", "gaussian"]

Targets = Literal["none", "some", "all"]
"""Whether batches end with targets; with `"some"`, batches of several items do."""

IGNORED = -100
"""The class that `torch.nn.functional.cross_entropy` ignores."""

Batches = Iterable[tuple[Tree, ...]]
"""Batches `(*inputs)`, with targets at the end where the curvature has some."""


@dataclass(frozen=True)
class Curvature:
    """The curvature of the mean loss of samples; `ggn` and its neighbours make it.

    `columns` are of outputs [B, ...] and targets, or keys and targets, [B, ...]: they
    are [B, K, ...].
    """

    function: str
    fmodel: FunctionalModel
    likelihood: Likelihood
    columns: Callable[[Tensor, Any], Tensor]
    targets: Targets = "none"
    seed: int | None = None  # of the keys
    ignored: int = IGNORED  # the class of positions that do not count
    note: Callable[[Tensor, Any], None] | None = None
    """Called with the outputs and targets of each batch."""
    caller: Callable | None = None
    """The function that the user called, for errors; None for the one that is."""

    def measured(
        self,
        function: Callable,
        quantity: Quantity,
        params: Params,
        buffers: Buffers,
        batches: Batches,
        options: Options,
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield a quantity of the gradients `J^T c_k`, [B, K, ...], and outputs.

        It is for the `function` of a user, with its options.
        """
        function = self.caller or function
        name = function.__name__
        check_tensors(name, params=params, buffers=buffers)
        loss = partial(_with_columns, self.columns, self.fmodel)
        call = Call.of(function, loss, options)
        call = replace(call, columns=True, singly=False)
        transform = Transform(call, _WithOutputs(quantity))
        for number, batch in enumerate(_batches.each(name, batches)):
            ends = first_and_last(_batches.read(name, batch).size)
            with torch.no_grad():
                arguments = params, buffers, batch, number
                together, targets = self.outputs(*arguments, ends)
            inputs = batch[: len(batch) - self._has_targets(batch)]
            value, output = transform(params, buffers, *inputs, targets)
            self.check_apart(together, output[ends])
            if self.note is not None:
                self.note(output, targets)
            yield value, output

    def mean(self, *arguments: Any, part: Callable[[Any], Params] = dict) -> Sums:
        """Return means over samples, {name: ...}, by sums over each batch."""
        sums, count = Sums(), 0
        for value, output in self.measured(*arguments):
            sums.add(part(value))
            count += len(output)
        sums.divide(count)
        return sums

    def outputs(
        self,
        params: Params,
        buffers: Buffers,
        batch: tuple[Tree, ...],
        number: int = 0,
        rows: slice = slice(None),
    ) -> tuple[Tensor, Any]:
        """Return the outputs of some samples together, and all targets and keys."""
        has_targets = self._has_targets(batch)
        form = "(*inputs, target)" if has_targets else "(*inputs,)"
        text = (
            f"{self.function}(fmodel): expected batches {form} that the model takes, "
            f"got {checks.shown(batch)}"
        )
        if len(batch) <= has_targets:
            raise ValueError(f"{text}, without a target.")
        criterion = torch.sub if has_targets else None  # for a target
        args, kwargs, targets = read(self.function, batch, criterion)
        size = _batches.read(self.function, batch).size
        if self.seed is not None:
            seed = torch_seed(secret_key(seed=self.seed), number)
            device = next(iter(params.values())).device
            targets = sample_keys(seed, 0, size).to(device), targets
        args, kwargs = map_tensors(operator.itemgetter(rows), (args, kwargs))
        run = partial(self.fmodel, params, buffers, *args, **kwargs)
        try:
            output = fixed(f"{self.function}(fmodel)", run, (params, batch))
        except TypeError as error:
            raise TypeError(f"{text}: {error}.") from error
        check_output(self.function, output, len(range(size)[rows]))
        if has_targets:
            shape = torch.Size((size, *output.shape[1:]))
            labels = targets if self.seed is None else targets[1]
            check_targets(self.function, self.likelihood, shape, labels, self.ignored)
        return output, targets

    def _has_targets(self, batch: tuple[Tree, ...]) -> bool:
        return self.targets == "all" or (self.targets == "some" and len(batch) > 1)

    def check_apart(self, together: Tensor, apart: Tensor) -> None:
        """Refuse outputs of samples that depend on others beside them."""
        # A recurrent net over the batch changes all samples but the first one.
        gaps = (apart - together).flatten(1).abs().amax(1)
        room = math.sqrt(torch.finfo(together.dtype).eps)
        if bool((gaps > room * together.flatten(1).abs().amax(1)).any()):
            raise ValueError(
                f"{self.function}(fmodel): expected outputs of a sample that do not "
                f"depend on the batch, got a model with an output that differs by "
                f"{float(gaps.max()):.2g} from the one of the sample alone. Split the "
                f"model in eval mode, see vgrad.replace_batch_norm, or pass "
                f"batch_first=True to recurrent layers."
            )


def first_and_last(size: int) -> slice:
    """Return the places of two samples, or of the only one."""
    return slice(None, None, max(1, size - 1))


class _WithOutputs(Quantity):
    """A quantity and the outputs of the samples."""

    def __init__(self, quantity: Quantity) -> None:
        self._quantity, self.joins = quantity, quantity.joins
        self.collector, self.partial = quantity.collector, quantity.partial

    def total(self, parts: Joined) -> tuple[Any, Tensor]:
        return self._quantity.total(parts), parts.losses


def fixed(label: str, run: Callable[[], T], inputs: Tree) -> T:
    """Return a result; refuse one by chance, another one at each product."""
    before = random_state(among := tensors(inputs))
    result = run()
    if drew(before, among, run):
        raise ValueError(
            f"{label}: expected results that do not depend on chance, got a model that "
            f"draws random numbers, as dropout does. Split it in eval mode."
        )
    return result


def check_tensors(function: str, **arguments: Params) -> None:
    """Refuse complex parameters, whose curvature is no product of complex numbers."""
    checks.dictionaries(function, **arguments)
    for argument, entries in arguments.items():
        checks.whole_tensors(f"{function}({argument})", entries)
    for name, value in arguments["params"].items():
        if value.is_complex():
            raise ValueError(
                f"{function}(params): expected real parameters, got {name!r} of "
                f"{value.dtype}. Make the model of real parameters, and put them "
                f"together by torch.view_as_complex."
            )


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
    function: str,
    likelihood: Likelihood,
    shape: torch.Size,
    target: Any,
    ignored: int = IGNORED,
) -> None:
    """Refuse targets that are not numbers of the outputs' shape, or classes."""
    if likelihood == "gaussian":
        flat = shape[:1] if shape[1:] == (1,) else shape  # as torch broadcasts
        if getattr(target, "shape", None) not in (shape, flat):
            raise ValueError(
                f"{function}(batches): expected targets of the outputs' shape "
                f"{tuple(shape)}, got {checks.shown(target)}."
            )
        return
    count, classes, *positions = shape
    int64 = isinstance(target, Tensor) and target.dtype == torch.int64
    if not int64 or target.shape != (count, *positions):
        raise ValueError(
            f"{function}(batches): expected classes of int64 {(count, *positions)}, "
            f"got {checks.shown(target)}."
        )
    right = (target >= 0) & (target < classes) | (target == ignored)
    if not bool(right.all()):
        raise ValueError(
            f"{function}(batches): expected classes from 0 to {classes - 1}, or "
            f"{ignored} for a position to ignore, got others."
        )


def _with_columns(
    columns: Callable[[Tensor, Any], Tensor],
    fmodel: FunctionalModel,
    params: Params,
    buffers: Buffers,
    *sample: Tree,
) -> tuple[Tensor, Tensor]:
    with modes.without_modes():  # which would see every op of these
        *inputs, targets = map_tensors(lambda leaf: leaf.unsqueeze(0), sample)
        args, kwargs, _ = read("curvature", inputs, None)
    output = fmodel(params, buffers, *args, **kwargs)
    check_output("curvature", output, 1)
    with modes.without_modes(), torch.no_grad(), no_autocast(output.device):
        cotangents = columns(output.detach(), targets)
    return output[0], cotangents[0]


def ggn(
    fmodel: FunctionalModel | LossFn,
    likelihood: Likelihood | None = None,
    *,
    targets: bool = False,
) -> Curvature:
    """Generalised Gauss-Newton matrix: `mean_n J_n^T H_n J_n`, H the likelihood's own.

    `"categorical"`: outputs are logits `[B, C, ...]`, as for
    `torch.nn.functional.cross_entropy`, summed over positions behind the classes (so
    logits `[B, T, C]` of a language model are to be transposed), and
    `H = diag(p) - p p^T`. `"gaussian"`: the loss is `|output - target|^2 / 2`, and H
    the identity. It needs no targets: batches are `(*inputs,)`. For these two the GGN
    is the Fisher information. With `targets=True` batches are `(*inputs, target)`, and
    positions of the class -100 do not count.

    In place of both, `sample_loss(fmodel, criterion)` with torch's `cross_entropy`,
    `CrossEntropyLoss()`, `mse_loss` or `MSELoss()`, of the two reductions, is one of
    them times a number: the mean over T positions divides by T, and the squared error
    is twice the Gaussian loss, as a mean over K numbers `2 / K` times it. H is
    multiplied by that number. Batches are as of the loss, `(*inputs, target)`, and T
    counts positions that are not of its `ignore_index`; of a batch `(input,)` all
    count. A sample without any adds nothing.

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
        >>> entries = curvature.diagonal(matrix, params, buffers, [(x,)])
        >>> entries["weight"].detach()  # the mean of squares
        tensor([[1., 2.]])
    """
    loss = likelihood_of("ggn", fmodel, likelihood, targets)
    exact = {"categorical": _classes, "gaussian": _units}[loss.likelihood]

    def columns(output: Tensor, target: Any) -> Tensor:
        return loss.weighed(exact(output), target, 0.5)

    return loss.curvature("ggn", columns)


def fisher(
    fmodel: FunctionalModel | LossFn,
    likelihood: Likelihood | None = None,
    *,
    seed: int,
    samples: int = 1,
    targets: bool = False,
) -> Curvature:
    """Monte Carlo Fisher information: targets drawn from the model, as of `ggn`.

    Its mean over seeds is the GGN of the same likelihood or loss. The targets of a
    sample follow from `seed`, the place of its batch and its own in there, so a matrix
    is the same one each time; generators of torch stay as they are. Batches, and
    positions that do not count, are as in `ggn`.

    Cost: `samples` columns for each sample.

    Raises:
        ValueError: `likelihood` is unknown, or a number is not whole.

    Reference: Kunstner et al., arXiv 1905.12558.
    """
    loss = likelihood_of("fisher", fmodel, likelihood, targets)
    [count] = checks.integers("fisher", minimum=1, samples=samples)
    [seed] = checks.integers("fisher", minimum=0, seed=seed)
    drawn = {"categorical": _drawn_classes, "gaussian": _drawn_numbers}[loss.likelihood]

    def columns(output: Tensor, place: tuple[Tensor, Any]) -> Tensor:
        keys, target = place
        return loss.weighed(drawn(output, keys, count) / count**0.5, target, 0.5)

    return replace(loss.curvature("fisher", columns), seed=seed)


def empirical_fisher(
    fmodel: FunctionalModel | LossFn, likelihood: Likelihood | None = None
) -> Curvature:
    """Uncentred covariance of gradients at the targets, `mean_n g_n g_n^T`.

    It has the likelihoods and losses of `ggn`, and positions of an ignored class do not
    count; batches are `(*inputs, target)`.

    Raises:
        ValueError: `likelihood` is unknown, or a class is out of range.

    Reference: Kunstner et al., arXiv 1905.12558 (where it differs from the GGN).
    """
    function = "empirical_fisher"
    loss = likelihood_of(function, fmodel, likelihood, True)

    def columns(output: Tensor, target: Tensor) -> Tensor:
        if loss.likelihood == "gaussian":
            return loss.weighed((output - target.view_as(output)).unsqueeze(1), target)
        chosen = _one_hot(target, output.shape[1]).movedim(-1, 1)
        return loss.weighed((output.softmax(1) - chosen).unsqueeze(1), target)

    return replace(loss.curvature(function, columns), targets="all")


@shows_options
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

    def loss(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _with_columns(lambda output, _: _units(output), fmodel, *arguments, None)

    call = Call.of(per_sample_jacobian, loss, options)
    return Transform(replace(call, columns=True), _Jacobians())


class _Jacobians(Gradients):
    def total(self, parts: Joined) -> Params:
        if not parts.call.batch.size:
            raise ValueError(
                "per_sample_jacobian(fmodel)(params, buffers, *inputs): expected a "
                "sample at least, got an empty batch, whose outputs have no shape."
            )
        grads, out = super().total(parts), parts.losses.shape[1:]
        return {name: grad.unflatten(1, out) for name, grad in grads.items()}


@dataclass(frozen=True)
class Loss:
    """The loss of a sample: a model's likelihood, times a number.

    `mean` tells how a `sample_loss` reduces; None for the likelihood itself.
    """

    fmodel: FunctionalModel
    likelihood: Likelihood
    mean: bool | None
    targets: Targets
    ignored: int = IGNORED

    def curvature(self, function: str, columns: Callable) -> Curvature:
        """Return the curvature with these columns."""
        kind = function, self.fmodel, self.likelihood, columns, self.targets
        return Curvature(*kind, ignored=self.ignored)

    def weighed(self, columns: Tensor, target: Any, power: float = 1.0) -> Tensor:
        """Multiply columns [B, K, *out] by the number, to a power.

        It is zero at positions that do not count.
        """
        out = columns.shape[2:]
        if self.likelihood == "gaussian":
            number = 1.0 if self.mean is None else 2 / (out.numel() if self.mean else 1)
            return columns * number**power
        if target is None:
            return columns * (1 / (out[1:].numel() if self.mean else 1)) ** power
        counts = target != self.ignored
        columns = columns * counts[:, None, None]
        if not self.mean:
            return columns
        terms = counts.reshape(len(counts), -1).sum(1).clamp(min=1)
        terms = terms.to(columns.dtype) ** power
        return columns / terms.view(-1, *(1,) * (columns.ndim - 1))


def likelihood_of(
    function: str, fmodel: Any, likelihood: Any, targets: bool = False
) -> Loss:
    """Return the loss that a model and a likelihood, or a `sample_loss`, stand for."""
    checks.choice(function, (False, True), targets=targets)
    chosen: Any = likelihood
    mean, ignored = None, IGNORED
    form: Targets = "all" if targets else "none"
    if isinstance(fmodel, SampleLoss):
        fmodel, criterion, copies = fmodel.parts
        options = vars(criterion) if isinstance(criterion, nn.Module) else {}
        mean = {"mean": True, "sum": False}.get(options.get("reduction", "mean"))
        kind = type(criterion) if options else criterion
        chosen = _KNOWN.get(kind) if isinstance(kind, Hashable) else None
        plain = not options.get("label_smoothing") and copies is None
        plain &= getattr(criterion, "weight", None) is None
        if likelihood is not None or not chosen or mean is None or not plain:
            raise ValueError(
                f"{function}(loss): expected a sample_loss of cross_entropy, "
                f"CrossEntropyLoss(), mse_loss or MSELoss(), without augmentations and "
                f"options but for ignore_index and a reduction by mean or sum, and no "
                f"likelihood beside it, got {checks.shown(criterion)}. Pass the model "
                f'and its likelihood: {function}(fmodel, "categorical").'
            )
        ignored = options.get("ignore_index", IGNORED)
        form = "all" if targets else "some"
    check_model(function, fmodel)
    checks.choice(function, get_args(Likelihood), likelihood=chosen)
    for name, module in fmodel.named_modules():
        if getattr(module, "scale_grad_by_freq", False):
            raise ValueError(
                f"{function}(fmodel): expected gradients that are derivatives, got "
                f"{name!r}, an embedding with scale_grad_by_freq=True. Set it to False."
            )
    return Loss(fmodel, chosen, mean, form, ignored)


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


def _drawn_classes(output: Tensor, keys: Tensor, count: int) -> Tensor:
    p = output.softmax(1).movedim(1, -1).unsqueeze(-2)  # [B, ..., 1, C]
    shape = *p.shape[:-2], count
    drawn = _drawn(keys, shape).unsqueeze(-1)
    labels = (p[..., :-1].cumsum(-1) <= drawn).sum(-1)
    return (p - _one_hot(labels, p.shape[-1])).movedim((-2, -1), (1, 2))


def _one_hot(classes: Tensor, count: int) -> Tensor:
    # torch's own reads values, which vmap cannot.
    places = torch.arange(count, device=classes.device)
    return (classes.unsqueeze(-1) == places).long()


def _drawn_numbers(output: Tensor, keys: Tensor, count: int) -> Tensor:
    shape = len(output), count, *output.shape[1:]
    normal = torch.special.ndtri(_drawn(keys, shape) + 2.0**-54)  # of neither 0 nor 1
    return normal.to(wide(output.dtype))


def _drawn(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Draw numbers in [0, 1) in float64."""
    bits = random_bits(keys, math.prod(shape[1:]))
    return unit(bits, 53, torch.float64).view(shape)
