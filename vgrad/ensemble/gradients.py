"""The gradient of every member's loss, from one backward pass or one for each."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vgrad import checks
from vgrad.dtypes import no_autocast
from vgrad.ensemble.choice import Chooser
from vgrad.ensemble.execution import (
    Call,
    InDims,
    Randomness,
    Strategy,
    autocasting,
    check_options,
    looped,
    vmapped,
)
from vgrad.functional.losses import SampleLoss
from vgrad.generators import kept_random_state
from vgrad.persample.engine.guard import UnsupportedOp
from vgrad.torch_private import levels
from vgrad.tree import map_values
from vgrad.typing import BatchLossFn, Buffers, Params, Tree


class EnsembleGrads(NamedTuple):
    """What a gradient of all members returns.

    Attributes:
        grads: the gradients, `[E, ...]`; those of shared parameters, summed over the
            members, without the member axis.
        losses: the losses, `[E]`.
        buffers: the buffers as each member's forward pass left them, `[E, ...]`.
    """

    grads: Params
    losses: Tensor
    buffers: Buffers


class EnsembleGradFn:
    """What `ensemble_grad` returns."""

    def __init__(
        self,
        loss: BatchLossFn,
        in_dims: InDims,
        randomness: Randomness,
        strategy: Strategy,
        shared: Sequence[str],
    ) -> None:
        """Keep the options."""
        self._loss = loss
        # A plain function of one's own may change no buffers.
        self._with_buffers = getattr(loss, "with_buffers", self._unchanged)
        self._options: dict[str, Any] = {"in_dims": in_dims, "shared": tuple(shared)}
        self._randomness: Randomness = randomness
        self.chooser = Chooser("ensemble_grad", strategy)
        self._unreached: set[frozenset[str]] = set()

    def __call__(
        self,
        params: Params,
        buffers: Buffers,
        /,
        *batch: Tree,
        loss_scale: Tensor | float = 1.0,
    ) -> EnsembleGrads:
        """Return gradients, losses and buffers.

        The gradients are those of `loss_scale * loss`, a number or one for each member,
        `[E]`. The losses that are returned are without it.
        """
        call = self._call(params, buffers, batch)
        sizes = ((), (call.members,))
        if isinstance(loss_scale, Tensor) and loss_scale.shape not in sizes:
            raise ValueError(
                f"ensemble_grad(loss_scale of shape {tuple(loss_scale.shape)}): "
                f"expected a number, or one for each of the {call.members} members."
            )
        with torch.enable_grad():  # a loss may differentiate on its own
            strategy, _ = self.chooser.choose(self._loss, call)
        if strategy == "loop" and not levels.inside_transform():
            return self._by_members(call, loss_scale)

        def total(params: Params) -> tuple[Tensor, tuple[Tensor, Buffers]]:
            inner = call.with_params(params)
            if strategy == "loop":
                one = autocasting(self._with_buffers)
                pairs = looped(one, inner, self._randomness)
                losses, new = inner.stacked_with_buffers(pairs)
            else:
                losses, new = vmapped(
                    self._with_buffers,
                    inner,
                    self._randomness,
                    hybrid=strategy == "hybrid",
                    with_buffers=True,
                )
            return (losses * loss_scale).sum(), (losses, new)

        grads, losses, new, unreached = _gradient(total, params)
        if strategy != "loop":
            self._check_unreached(call, frozenset(unreached))
        return EnsembleGrads(grads, losses, new)

    def explain(self, params: Params, buffers: Buffers, /, *batch: Tree) -> Any:
        """Say which strategy is taken, why, and the form of each op."""
        call = self._call(params, buffers, batch)
        return self.chooser.explain(self._loss, call, self._randomness)

    def _call(self, params: Params, buffers: Buffers, batch: tuple) -> Call:
        return Call("ensemble_grad", params, buffers, batch, **self._options)

    def _check_unreached(self, call: Call, names: frozenset[str]) -> None:
        """Refuse to take for zero what is not zero to one member on its own."""
        if not names or names in self._unreached:
            return
        params, *rest = call.of(0)
        one = autocasting(self._with_buffers)

        def of_params(params: Params) -> tuple[Tensor, tuple[Tensor, Buffers]]:
            loss, new = one(params, *rest)
            return loss, (loss, new)

        with kept_random_state(call.tensors()):
            *_, unreached = _gradient(of_params, params)
        if reached := names - unreached:
            raise UnsupportedOp(
                f"ensemble_grad(loss): expected gradients of all members wherever one "
                f"member has some, got none of {checks.listed(reached)}: an op hides "
                f'its graph from vmap. Use strategy="loop".'
            )
        self._unreached.add(names)

    def _unchanged(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> tuple[Tensor, Buffers]:
        return self._loss(params, buffers, *batch), buffers

    def _by_members(self, call: Call, loss_scale: Tensor | float) -> EnsembleGrads:
        """Write each member's gradients into their place: nothing is copied twice."""
        given, dims = call.args[0], call.dims[0]
        if not isinstance(loss_scale, Tensor):
            loss_scale = torch.tensor(loss_scale, dtype=torch.float64)
        scales = loss_scale.expand(call.members).unbind(0)
        grads = {
            name: torch.zeros_like(value)
            if dims[name] is None
            else torch.empty_like(value, memory_format=torch.contiguous_format)
            for name, value in given.items()
        }
        numbers = iter(range(call.members))
        run = autocasting(self._with_buffers)

        def one(params: Params, buffers: Buffers, /, *batch: Tree) -> tuple:
            member = next(numbers)

            def scaled(params: Params) -> tuple[Tensor, tuple[Tensor, Buffers]]:
                loss, new = run(params, buffers, *batch)
                return loss * scales[member].to(loss.device, loss.dtype), (loss, new)

            found, loss, new, _ = _gradient(scaled, params)
            for name, grad in found.items():
                if dims[name] is None:
                    grads[name] += grad
                else:
                    grads[name][member].copy_(grad)
            return loss, new

        pairs = looped(one, call, self._randomness)
        losses, buffers = call.stacked_with_buffers(pairs)
        return EnsembleGrads(grads, losses, buffers)


def ensemble_grad(
    loss: BatchLossFn,
    *,
    in_dims: InDims = None,
    randomness: Randomness = "different",
    strategy: Strategy = "auto",
    shared: Sequence[str] = (),
) -> EnsembleGradFn:
    """Differentiate every member's loss: `(params, buffers, *batch) -> EnsembleGrads`.

    `loss` is the loss of a batch for one member, from `batch_loss` or a function of
    your own (whose buffers then come back as they were given). The result has `.grads`
    `[E, ...]`, `.losses` `[E]` and `.buffers`. The gradient of one member depends on no
    other; gradients of parameters that match `shared` are sums over the members.

    Results are constants, as those of `torch.autograd.grad` are; inside a transform of
    `torch.func` they can be differentiated.

    The options are those of `ensemble_forward`. Except in a loop all members' gradients
    come from one backward pass, and activations of all members are held at once.

    Raises:
        ValueError: sizes do not fit, or an option is none of those allowed.
        UnsupportedOp: an op cannot run for all members at once; `strategy="loop"` can.

    Example:
        >>> import vgrad
        >>> models = [torch.nn.Linear(3, 2) for _ in range(4)]
        >>> fmodel, params, buffers = vgrad.stack(models)
        >>> loss = vgrad.batch_loss(fmodel, torch.nn.functional.mse_loss)
        >>> x, y = torch.ones(5, 3), torch.ones(5, 2)
        >>> result = ensemble_grad(loss)(params, buffers, x, y)
        >>> result.grads["weight"].shape, result.losses.shape
        (torch.Size([4, 2, 3]), torch.Size([4]))
    """
    check_options("ensemble_grad", strategy, randomness, shared)
    check_loss("ensemble_grad", loss)
    return EnsembleGradFn(loss, in_dims, randomness, strategy, shared)


def check_loss(function: str, loss: BatchLossFn) -> None:
    """Refuse what is no function, and losses of one sample."""
    if not callable(loss):
        raise TypeError(
            f"{function}(loss={loss!r}): expected a function loss(params, buffers, "
            f"*batch), for example from batch_loss."
        )
    if isinstance(loss, SampleLoss):
        raise TypeError(
            f"{function}(loss): expected a loss of a whole batch, got one of a sample. "
            f"Make it with batch_loss."
        )


def _gradient(
    function: Callable, params: Params
) -> tuple[Params, Tensor, Buffers, set[str]]:
    """Differentiate `params -> (scalar, (losses, buffers))`; return what is left.

    Last come the names of parameters to which no graph leads, as far as that is known.
    """
    if levels.inside_transform():
        grads, (losses, buffers) = torch.func.grad(function, has_aux=True)(params)
        return grads, losses, buffers, set()
    with torch.enable_grad():
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        value, (losses, buffers) = function(leaves)
    found = dict.fromkeys(leaves)
    if value.requires_grad:
        with no_autocast(value.device):
            each = torch.autograd.grad(value, [*leaves.values()], allow_unused=True)
        found = dict(zip(leaves, each, strict=True))
    unreached = {name for name, grad in found.items() if grad is None}
    grads = {
        name: torch.zeros_like(params[name]) if grad is None else grad
        for name, grad in found.items()
    }
    return grads, losses.detach(), map_values(Tensor.detach, buffers), unreached
