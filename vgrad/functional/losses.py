"""Losses of one sample and of a batch, made from a functional model and a criterion."""

from collections.abc import Callable, Mapping
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from vgrad import checks
from vgrad.functional.model import FunctionalModel
from vgrad.torch_private import modes
from vgrad.torch_private.tensors import with_attributes
from vgrad.tree import copied, map_tensors, no_autocast, tensors
from vgrad.typing import BatchLossFn, Buffers, LossFn, Params, Tree

Criterion = Callable[[Any, Any], Tensor] | None


def sample_loss(
    fmodel: FunctionalModel,
    criterion: Criterion,
    *,
    augmentations: int | None = None,
) -> LossFn:
    """Make a loss of one sample: `loss(params, buffers, *sample) -> scalar`.

    The last item of a sample is the target, those before it are the model's inputs; a
    dictionary among the inputs becomes keyword arguments. The loss adds a batch
    dimension of one to every tensor and removes it again. The criterion gets
    `(output, target)` and may reduce by mean, by sum or, where one number a sample is
    left, not at all. With `criterion=None` all items are inputs, and the model's output
    is the loss or holds it (`.loss`, `["loss"]` or the first of a tuple, as in
    transformers).

    With `augmentations=K` a sample is K augmented copies of one: each of its tensors
    has one more dimension of K in front, or is a number (such as a label) that all of
    them share. The loss is the mean over the copies. A sample is then clipped once, and
    the sensitivity of the sum stays what it is. The model runs once on all copies, the
    criterion on one after another.

    Raises:
        TypeError: `fmodel` is a module, or the criterion no function.
        ValueError: when called, if one sample's loss is not a single number, if the
            criterion divides it by the weight of its own class, or if a tensor has
            another number of copies.

    Reference: De et al., arXiv 2204.13650 (augmentation multiplicity).

    Example:
        >>> import torch
        >>> import vgrad
        >>> model = torch.nn.Linear(3, 2)
        >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        >>> loss = sample_loss(fmodel, torch.nn.functional.cross_entropy)
        >>> loss(params, buffers, torch.ones(3), torch.tensor(1)).shape
        torch.Size([])
    """
    _check("sample_loss", fmodel, criterion)
    if augmentations is not None:
        [augmentations] = checks.integers(
            "sample_loss", minimum=1, augmentations=augmentations
        )
    return SampleLoss(fmodel, criterion, augmentations)


class SampleLoss(LossFn):
    """The result of `sample_loss`."""

    def __init__(
        self,
        fmodel: FunctionalModel,
        criterion: Criterion,
        augmentations: int | None = None,
    ) -> None:
        self._fmodel = fmodel
        self._criterion = criterion
        self._augmentations = augmentations

    def __repr__(self) -> str:
        return f"sample_loss({self._fmodel!r}, {_shown(self._criterion)})"

    @property
    def parts(self) -> tuple[FunctionalModel, Criterion, int | None]:
        """The model, the criterion and the number of augmentations."""
        return self._fmodel, self._criterion, self._augmentations

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._fmodel.training

    def __call__(self, params: Params, buffers: Buffers, /, *sample: Tree) -> Tensor:
        """Return the loss of one sample."""
        with modes.without_modes():  # which would see every op of these
            batch = map_tensors(methodcaller("unsqueeze", 0), sample)
        if self._augmentations is not None:
            return self.of_each(params, buffers, *batch)[0]
        return self._of_one(params, buffers, batch)

    def of_each(self, params: Params, buffers: Buffers, /, *samples: Tree) -> Tensor:
        """Return the losses `[k]` of k samples, on all of which the model runs once."""
        copies = self._augmentations
        if copies is not None:
            with modes.without_modes():
                samples = map_tensors(partial(_copies, copies), samples)
        count = len(tensors(samples)[0])
        if self._criterion is None:  # the model's own loss may be any mean
            parts = _rows(samples, count)
            losses = [self._of_one(params, buffers, part) for part in parts]
        else:
            args, kwargs, target = read("sample_loss", samples, self._criterion)
            output = self._fmodel(params, buffers, *args, **kwargs)
            losses = []
            for part, label in zip(
                _rows(output, count), _rows(target, count), strict=True
            ):
                _check_weights(self._criterion, label)
                losses.append(_value("sample_loss", part, label, self._criterion))
        values = torch.stack(losses)
        return values if copies is None else values.unflatten(0, (-1, copies)).mean(1)

    def _of_one(self, params: Params, buffers: Buffers, batch: Tree) -> Tensor:
        with modes.without_modes():
            args, kwargs, target = read("sample_loss", batch, self._criterion)
        _check_weights(self._criterion, target)
        output = self._fmodel(params, buffers, *args, **kwargs)
        return _value("sample_loss", output, target, self._criterion)


def _shown(criterion: Criterion) -> str:
    return getattr(criterion, "__name__", None) or repr(criterion)


def _copies(count: int, leaf: Tensor) -> Tensor:
    """Put the copies of several samples in one dimension."""
    if leaf.ndim == 1:  # a number for each sample
        leaf = leaf.unsqueeze(1).expand(-1, count)
    if leaf.shape[1] != count:
        raise ValueError(
            f"sample_loss(augmentations={count})(params, buffers, *sample): expected "
            f"tensors of {count} copies, or a number, got shape "
            f"{tuple(leaf.shape[1:])}. Stack the copies of a sample in front."
        )
    return leaf.flatten(0, 1)


def _rows(tree: Tree, count: int) -> list[Tree]:
    """Cut the tensors of a tree into batches of one."""
    leaves = tensors(tree)
    for leaf in leaves:
        if not leaf.ndim or len(leaf) != count:
            raise ValueError(
                f"sample_loss: expected an output with one row for each of {count} "
                f"inputs, got a tensor of shape {tuple(leaf.shape)}. Let the model "
                f"keep the batch dimension."
            )
    cut = [iter(leaf.split(1)) for leaf in leaves]

    def row() -> Tree:
        parts = iter(cut)
        return map_tensors(lambda _: next(next(parts)), tree)

    return [row() for _ in range(count)]


def batch_loss(fmodel: FunctionalModel, criterion: Criterion) -> "BatchLoss":
    """Make a loss of a whole batch: `loss(params, buffers, *batch) -> scalar`.

    Items are read as `sample_loss` reads them, but with their batch dimension. The
    criterion reduces over the batch. `.with_buffers(...) -> (scalar, new_buffers)` also
    returns the buffers as the forward pass left them.

    Raises:
        TypeError: `fmodel` is a module, or the criterion no function.
        ValueError: when called, if the criterion did not reduce to a single number.

    Example:
        >>> import torch
        >>> import vgrad
        >>> model = torch.nn.BatchNorm1d(2)
        >>> fmodel, params, buffers = vgrad.make_functional_with_buffers(model)
        >>> loss = batch_loss(fmodel, torch.nn.functional.mse_loss)
        >>> x = torch.ones(4, 2)
        >>> value, new_buffers = loss.with_buffers(params, buffers, x, x)
        >>> new_buffers["num_batches_tracked"]
        tensor(1)
    """
    _check("batch_loss", fmodel, criterion)
    return BatchLoss(fmodel, criterion)


class BatchLoss(BatchLossFn):
    """The result of `batch_loss`."""

    def __init__(self, fmodel: FunctionalModel, criterion: Criterion) -> None:
        self._fmodel = fmodel
        self._criterion = criterion

    def __call__(self, params: Params, buffers: Buffers, /, *batch: Tree) -> Tensor:
        """Return the loss of the batch."""
        args, kwargs, target = read("batch_loss", batch, self._criterion)
        output = self._fmodel(params, buffers, *args, **kwargs)
        return _value("batch_loss", output, target, self._criterion)

    def __repr__(self) -> str:
        return f"batch_loss({self._fmodel!r}, {_shown(self._criterion)})"

    def with_buffers(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> tuple[Tensor, Buffers]:
        """Return the loss of the batch and the new buffers."""
        args, kwargs, target = read("batch_loss", batch, self._criterion)
        update = self._fmodel.call_and_update
        output, new_buffers = update(params, buffers, *args, **kwargs)
        return _value("batch_loss", output, target, self._criterion), new_buffers


def check_loss(function: str, loss: Any, *, of_batch: bool = False) -> None:
    """Refuse a module, a functional model, the other kind of loss, no function."""
    maker, items = ("batch_loss", "batch") if of_batch else ("sample_loss", "sample")
    expected = f"expected a function loss(params, buffers, *{items})"
    if isinstance(loss, nn.Module):
        raise TypeError(
            f"{function}(loss): {expected}, got a module, {type(loss).__name__}. Split "
            f"the model by fmodel, params, buffers = "
            f"make_functional_with_buffers(model), and pass {maker}(fmodel, criterion)."
        )
    if isinstance(loss, FunctionalModel):
        raise TypeError(
            f"{function}(loss): {expected}, got a functional model, whose output is "
            f"no loss. Pass {maker}(fmodel, criterion)."
        )
    if isinstance(loss, SampleLoss if of_batch else BatchLoss):
        kinds = {True: "a whole batch", False: "a sample"}
        raise TypeError(
            f"{function}(loss): expected a loss of {kinds[of_batch]}, got one of "
            f"{kinds[not of_batch]}. Make it with {maker}."
        )
    if not callable(loss):
        raise TypeError(
            f"{function}(loss={checks.shown(loss)}): {expected}, for example from "
            f"{maker}."
        )


def returned(function: str, result: Any, *, has_aux: bool) -> tuple[Tensor, Any]:
    """Return the scalar and aux, or `()`, of a loss's result; check both."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(
            f"{function}(loss, has_aux=True): expected a loss that returns "
            f"(scalar, aux), got a {type(result).__name__}."
        )
    value, aux = result if has_aux else (result, ())
    # Whole numbers are refused, as by plain autograd: zero gradients would be silent.
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        tensor = isinstance(value, Tensor)
        got = f"{value.dtype} {tuple(value.shape)}" if tensor else type(value).__name__
        raise ValueError(
            f"{function}(loss): expected a loss that returns a real tensor without "
            f"dimensions (with has_aux=True a pair of it and aux), got {got}."
        )
    return value, aux


def _check(function: str, fmodel: Any, criterion: Any) -> None:
    check_model(function, fmodel)
    check_criterion(function, criterion)


def check_model(function: str, fmodel: Any) -> None:
    """Refuse a model that has not been split yet."""
    if isinstance(fmodel, nn.Module):
        raise TypeError(
            f"{function}(fmodel): expected a functional model, got a module, "
            f"{type(fmodel).__name__}. Split it: fmodel, params, buffers = "
            f"make_functional_with_buffers(model)."
        )


def check_criterion(function: str, criterion: Any) -> None:
    """Refuse the name of a criterion, or its class, among others."""
    if criterion is not None and (
        not callable(criterion) or isinstance(criterion, type)
    ):
        kind = type(criterion).__name__
        raise TypeError(
            f"{function}(criterion): expected a function of output and target such as "
            f"torch.nn.functional.cross_entropy or torch.nn.CrossEntropyLoss(), or "
            f"None for a model that returns its loss, got a {kind}."
        )


def read(
    function: str, items: Tree, criterion: Criterion
) -> tuple[list[Any], dict[str, Any], Any]:
    """Return arguments and keyword arguments of the model, and a copy of the target."""
    target = None
    if criterion is not None:
        if len(items) < 2:
            raise ValueError(
                f"{function}(fmodel, criterion): expected the model's inputs and then "
                f"the target, got {len(items)} items. A model that returns its own "
                f"loss takes criterion=None."
            )
        *items, target = items
        target = copied(target)
    args, kwargs = [], {}
    for item in items:
        if not isinstance(item, Mapping):
            args.append(item)
        elif twice := kwargs.keys() & item.keys():
            raise ValueError(
                f"loss(params, buffers, *inputs): expected each keyword argument "
                f"once, got {sorted(twice)} in two dictionaries."
            )
        else:
            kwargs.update(item)
    return args, kwargs, target


def _check_weights(criterion: Criterion, target: Any) -> None:
    """Refuse a weighted mean over one label, from which the weight is gone."""
    if not isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss):
        return
    label = isinstance(target, Tensor) and not target.is_floating_point()
    if criterion.weight is not None and criterion.reduction == "mean" and label:
        if target.numel() == 1:
            kind = type(criterion).__name__
            raise ValueError(
                f"sample_loss(criterion={kind}(weight=...)): expected weights that "
                f"count, but the mean over one label divides by its own weight. Pass "
                f'{kind}(weight=..., reduction="sum").'
            )


def _value(function: str, output: Any, target: Any, criterion: Criterion) -> Tensor:
    """Apply the criterion, or find the loss in an output that holds it."""
    if criterion is not None:
        value = criterion(output, target)
    elif isinstance(output, Mapping):
        value = output.get("loss")
    elif isinstance(output, tuple) and not hasattr(output, "loss"):
        value = output[0]
    else:
        value = getattr(output, "loss", output)
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{function}(fmodel, criterion): expected a tensor as loss, got a "
            f"{type(value).__name__}. Does the model need labels to return a loss?"
        )
    with modes.without_modes():
        shape = value.shape
    if shape.numel() != 1:
        raise ValueError(
            f"{function}(fmodel, criterion): expected a loss of one number, got shape "
            f"{tuple(shape)}. Reduce it in the criterion."
        )
    return value.reshape(()) if shape else value


def gradient(function: Callable, params: Params) -> tuple[Params, Any, set[str]]:
    """Differentiate `params -> (scalar, rest)`: gradients, rest, unreached names."""
    if torch.is_inference_mode_enabled():
        # Plain autograd saves no tensor that was made there, and before torch 2.12
        # gradients of torch.func are zero inside.
        with torch.inference_mode(False), torch.no_grad():
            return *torch.func.grad(function, has_aux=True)(params), set()
    if modes.inside_transform():
        return *torch.func.grad(function, has_aux=True)(params), set()
    with torch.enable_grad():
        leaves = {
            name: with_attributes(p.detach().requires_grad_(), p)
            for name, p in params.items()
        }
        value, rest = function(leaves)
    reached = dict.fromkeys(leaves)
    if value.requires_grad:
        with no_autocast(value.device):
            computed = torch.autograd.grad(value, [*leaves.values()], allow_unused=True)
        reached = dict(zip(leaves, computed, strict=True))
    unreached = {name for name, grad in reached.items() if grad is None}
    grads = {
        name: torch.zeros_like(params[name]) if grad is None else grad
        for name, grad in reached.items()
    }
    return grads, map_tensors(Tensor.detach, rest), unreached
