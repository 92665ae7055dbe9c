"""The gradient of every member's loss, from one backward pass or one for each."""

from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from vgrad import checks
from vgrad.checks import Patterns
from vgrad.conditions import checks_collected
from vgrad.ensemble.axes import InDims
from vgrad.ensemble.choice import EnsembleExplanation, OfRunner, Runner
from vgrad.ensemble.execution import (
    Call,
    autocasting,
)
from vgrad.functional.losses import check_loss, gradient, returned
from vgrad.generators import (
    RandomState,
    drawn_since,
    kept_random_state,
    random_state,
)
from vgrad.lowering.draws import Draws
from vgrad.lowering.keyed import check_drawn
from vgrad.persample.engine.guard import UnsupportedOp
from vgrad.torch_private import modes
from vgrad.typing import (
    BatchLossFn,
    Buffers,
    EnsembleStrategy,
    LossFn,
    Params,
    Randomness,
    Result,
    Tree,
)


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


class EnsembleGradFn(OfRunner, Generic[Result]):
    """What `ensemble_grad` returns.

    Attributes:
        loss: that of a batch for one member.
        has_aux: whether it returns aux too.
    """

    name = "ensemble_grad"

    def __init__(
        self, loss: BatchLossFn | LossFn, runner: Runner, has_aux: bool
    ) -> None:
        """Keep the options."""
        self.loss = loss
        self._run = returning_buffers("ensemble_grad", loss, has_aux=has_aux)
        self._runner = runner
        self.has_aux = has_aux
        self._unreached: set[frozenset[str]] = set()

    def __call__(
        self,
        params: Params,
        buffers: Buffers,
        /,
        *batch: Tree,
        loss_scale: Tensor | float = 1.0,
    ) -> Result:
        """Return an `EnsembleGrads`, or with `has_aux` a pair of it and aux.

        The gradients are those of `loss_scale * loss`, a number or one for each member,
        `[E]`. The losses that are returned are without it.
        """
        call = self._runner.call(params, buffers, batch)
        sizes = ((), (call.members,))
        if isinstance(loss_scale, Tensor) and loss_scale.shape not in sizes:
            raise ValueError(
                f"ensemble_grad(loss_scale of shape {tuple(loss_scale.shape)}): "
                f"expected a number, or one for each of the {call.members} members."
            )
        with torch.enable_grad():  # a loss may differentiate on its own
            strategy, _ = self._runner.choose(self.loss, call)
        if strategy == "loop" and not modes.inside_transform():
            grads, values, new = self._by_members(call, loss_scale)
        else:
            grads, values, new = self._at_once(call, strategy, loss_scale)
        losses, aux = self._parted(values)
        result = EnsembleGrads(grads, losses, new)
        found: Any = (result, aux) if self.has_aux else result
        return found

    def explain(
        self, params: Params, buffers: Buffers, /, *batch: Tree
    ) -> EnsembleExplanation:
        """Say which strategy is taken, why, and the form of each op."""
        call = self._runner.call(params, buffers, batch)
        return self._runner.explain(self.loss, call)

    def _parted(self, value: Any) -> tuple[Tensor, Tree]:
        """Return loss and aux of what the loss returned."""
        return value if self.has_aux else (value, ())

    def _at_once(
        self, call: Call, strategy: str, loss_scale: Tensor | float
    ) -> tuple[Params, Any, Buffers]:
        """Differentiate the sum of all losses: no member's depends on another's."""
        draws = self._runner.draws(call, self._keys)
        before = random_state(call.tensors())

        def total(params: Params) -> tuple[Tensor, tuple[Any, Buffers]]:
            inner = call.with_params(params)
            found = self._runner.run(
                self._run, inner, strategy, with_buffers=True, draws=draws
            )
            losses, _ = self._parted(found[0])
            return (losses * loss_scale).sum(), found

        grads, (values, new), unreached = gradient(total, call.args[0])
        if draws.keys is not None:
            check_drawn(before, call.tensors())
        if strategy != "loop":
            try:
                self._check_unreached(call, frozenset(unreached), draws, before)
            except UnsupportedOp as error:
                if not self._runner.may_loop:
                    raise
                why = str(error)
                grads, values, new = self._by_members(call, loss_scale)
                self._runner.loops(call, why)
        return grads, values, new

    def _check_unreached(
        self, call: Call, names: frozenset[str], draws: Draws, before: RandomState
    ) -> None:
        """Refuse a missing gradient where one member on its own has one."""
        asked = (
            draws.asked and not checks_collected()
        )  # else eager mode was here before
        if not names or (names in self._unreached and not asked):
            return
        given = call.tensors()
        if asked and drawn_since(before, given):
            return  # other numbers may lead to other branches
        for member in range(call.members if asked else 1):
            params, *rest = call.of(member)
            own = [draws.of(torch.tensor([member]))]

            def of_params(
                params: Params, rest: Any = rest, own: Any = own
            ) -> tuple[Tensor, tuple]:
                value, _ = autocasting(self._run, own)(params, *rest)
                return self._parted(value)[0], ()

            with kept_random_state(given):
                *_, unreached = gradient(of_params, params)
            if reached := names - unreached:
                raise UnsupportedOp(
                    f"ensemble_grad(loss): expected gradients of all members wherever "
                    f"one member has some, got none of {checks.listed(reached)}: an op "
                    f'hides its graph from vmap. Use strategy="loop".'
                )
        self._unreached.add(names)

    def _by_members(
        self, call: Call, loss_scale: Tensor | float
    ) -> tuple[Params, Any, Buffers]:
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
        draws = self._runner.draws(call, self._keys)
        run = autocasting(self._run, draws.each())
        before = random_state(call.tensors())

        def one(params: Params, buffers: Buffers, /, *batch: Tree) -> tuple:
            member = next(numbers)

            def scaled(params: Params) -> tuple[Tensor, tuple[Any, Buffers]]:
                found = run(params, buffers, *batch)
                loss, _ = self._parted(found[0])
                return loss * scales[member].to(loss.device, loss.dtype), found

            own, found, _ = gradient(scaled, params)
            with modes.without_modes():  # which watch the loss
                for name, grad in own.items():
                    if dims[name] is None:
                        grads[name] += grad
                    else:
                        grads[name][member].copy_(grad)
            return found

        pairs = self._runner.loop(one, call)
        if draws.keys is not None:
            check_drawn(before, call.tensors())
        return grads, *call.stacked_with_buffers(pairs)


class EnsembleOptions(TypedDict, total=False):
    """The options of a function of an ensemble, for type checkers."""

    in_dims: InDims
    randomness: Randomness
    strategy: EnsembleStrategy
    shared: Patterns


@overload
def ensemble_grad(
    loss: BatchLossFn | LossFn,
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[EnsembleOptions],
) -> EnsembleGradFn[EnsembleGrads]: ...
@overload
def ensemble_grad(
    loss: BatchLossFn | LossFn,
    *,
    has_aux: Literal[True],
    **options: Unpack[EnsembleOptions],
) -> EnsembleGradFn[tuple[EnsembleGrads, Tree]]: ...
def ensemble_grad(
    loss: BatchLossFn | LossFn,
    *,
    in_dims: InDims = None,
    randomness: Randomness = "different",
    strategy: EnsembleStrategy = "auto",
    shared: Patterns = (),
    has_aux: bool = False,
) -> EnsembleGradFn[Any]:
    """Differentiate every member's loss: `(params, buffers, *batch) -> EnsembleGrads`.

    `loss` is the loss of a batch for one member, from `batch_loss` or a function of
    your own; without `.with_buffers` it changes no buffers. The result has `.grads`
    `[E, ...]`, `.losses` `[E]` and `.buffers`. The gradient of one member depends on no
    other; gradients of parameters that match `shared` are sums over the members. Aux is
    a tree of tensors `[E, ...]`.

    Results are constants, as those of `torch.autograd.grad` are; inside a transform of
    `torch.func` they can be differentiated.

    Except in a loop all members' gradients
    come from one backward pass, and activations of all members are held at once.

    Args:
        in_dims: 0 where each member has a batch of its own, None where all have one, or
            a sequence with an entry for each item.
        randomness: of random ops: `"error"`, `"different"` for each member, `"same"`.
        strategy: how members run: `"vmap"` at once, `"hybrid"` at once in the best form
            of each op, `"loop"` one by one; `"auto"` takes what suits the device.
        shared: patterns of the entries without a member axis.
        has_aux: the loss returns `(scalar, aux)`, and the result is a pair with aux.

    Raises:
        TypeError: the loss is no function, or one of a single sample.
        ValueError: it returns something else than a scalar, sizes do not fit, or an
            option is none of those allowed.
        UnsupportedOp: an op cannot run for all members at once, as the strategy says.

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
    runner = Runner("ensemble_grad", in_dims, randomness, strategy, shared)
    check_loss("ensemble_grad", loss, of_batch=True)
    return EnsembleGradFn(loss, runner, has_aux)


def returning_buffers(function: str, loss: Any, *, has_aux: bool) -> Callable:
    """Let a loss of a batch return `(scalar or (scalar, aux), new buffers)`.

    A plain function changes no buffers.
    """
    with_buffers = getattr(loss, "with_buffers", None)

    def run(params: Params, buffers: Buffers, /, *batch: Tree) -> tuple[Any, Buffers]:
        if with_buffers is None:
            value = loss(params, buffers, *batch)
        else:
            value, buffers = with_buffers(params, buffers, *batch)
        returned(function, value, has_aux=has_aux)
        return value, buffers

    return run
