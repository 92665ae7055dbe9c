"""Who computes the clipped sum of per-sample gradients, each in its own best way.

A contender is built from a problem and gives a function of a batch that returns the
result by the names of the model's parameters. It leaves no gradient behind, so that
the memory of one call is the memory that it takes. Peers that are not installed raise
`ModuleNotFoundError` when built.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import vgrad
from bench.models import Positions, Problem

MAX_NORM = 1.0
STRATEGY = "auto"

Grads = dict[str, Tensor]
Run = Callable[[Tensor, Tensor], Grads]
Build = Callable[[Problem], Run]


class Contender(NamedTuple):
    """A contender.

    Attributes:
        build: makes it from a problem.
        epsilon: added to a norm before the division by it.
        clips: whether it computes the clipped sum, or the mean gradient of plain SGD.
        per_shape: whether it is built at its first call, for batches of that size.
    """

    build: Build
    epsilon: float = 0.0
    clips: bool = True
    per_shape: bool = False


def plain(problem: Problem) -> Run:
    """Backward pass of plain SGD, which every other time is divided by."""
    model = copy.deepcopy(problem.model)

    def run(x: Tensor, y: Tensor) -> Grads:
        problem.mean_loss(model(x), y).backward()
        return pop_grads(model, "grad")

    return run


def loop(problem: Problem) -> Run:
    """One sample after another, each added to the sum at once."""
    model = copy.deepcopy(problem.model)
    params = dict(model.named_parameters())

    def run(x: Tensor, y: Tensor) -> Grads:
        sums = {name: torch.zeros_like(value) for name, value in params.items()}
        for row in range(len(x)):
            loss = problem.mean_loss(model(x[row, None]), y[row, None])
            grads = torch.autograd.grad(loss, list(params.values()))
            factor = (MAX_NORM / nn.utils.get_total_norm(grads)).clamp(max=1)
            for total, grad in zip(sums.values(), grads, strict=True):
                total.addcmul_(grad, factor)
        return sums

    return run


def loop_gradients(problem: Problem) -> Run:
    model = copy.deepcopy(problem.model)
    params = dict(model.named_parameters())

    def run(x: Tensor, y: Tensor) -> Grads:
        result = {n: p.new_empty(len(x), *p.shape) for n, p in params.items()}
        for row in range(len(x)):
            loss = problem.mean_loss(model(x[row, None]), y[row, None])
            grads = torch.autograd.grad(loss, list(params.values()))
            for rows, grad in zip(result.values(), grads, strict=True):
                rows[row] = grad
        return result

    return run


def vmap_gradients(problem: Problem) -> Run:
    """Map the gradient of one sample over the batch, as torch.func's tutorial does."""
    params = {name: p.detach() for name, p in problem.model.named_parameters()}

    def loss(params: Grads, x: Tensor, y: Tensor) -> Tensor:
        output = torch.func.functional_call(problem.model, params, (x[None],))
        return problem.mean_loss(output, y[None])

    mapped = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    return lambda x, y: mapped(params, x, y)


def clipped_by_hand(build: Build) -> Build:
    """Clip and sum stored gradients as one would write it with torch alone."""

    def build_clipped(problem: Problem) -> Run:
        gradients = build(problem)
        return lambda x, y: clip_and_sum(gradients(x, y))

    return build_clipped


def clip_and_sum(grads: Grads) -> Grads:
    """Return the sum of clipped gradients; takes the stored ones out of `grads`."""
    norms = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads.values()]
    factors = _factors(torch.linalg.vector_norm(torch.stack(norms), dim=0))
    return {
        name: torch.tensordot(factors, grads.pop(name), dims=1) for name in list(grads)
    }


def vgrad_gradients(problem: Problem) -> Run:
    loss, params, buffers = functional(problem)
    compute = vgrad.per_sample_grad(loss, strategy=STRATEGY, verify=False)
    return lambda x, y: compute(params, buffers, x, y)


def vgrad_clipped(problem: Problem, chunk_size: int | None = None) -> Run:
    loss, params, buffers = functional(problem)
    # `bench/test_verify.py` times comparisons, a few of thousands of calls.
    options = {"strategy": STRATEGY, "chunk_size": chunk_size, "verify": False}
    compute = vgrad.clipped_grad(loss, max_norm=MAX_NORM, **options)
    return lambda x, y: compute(params, buffers, x, y).grads


def opacus_gradients(mode: str) -> Build:
    """Opacus up to `p.grad_sample`; `mode` is "hooks", "functorch" or "ew"."""

    def build(problem: Problem) -> Run:
        model, wrapped = _opacus(problem, mode)

        def run(x: Tensor, y: Tensor) -> Grads:
            problem.losses(wrapped(x), y).sum().backward()
            model.zero_grad()
            return pop_grads(model, "grad_sample")

        return run

    return build


def opacus_clipped(mode: str) -> Build:
    """Opacus up to the sum that its optimizer adds noise to.

    With "ghost" it takes two backward passes: norms, then the sum of weighted losses.
    """

    def build(problem: Problem) -> Run:
        peer = opacus(problem, mode)

        def run(x: Tensor, y: Tensor) -> Grads:
            peer.backward(x, y)
            if mode == "ghost":
                return pop_grads(peer.model, "grad")
            peer.optimizer.clip_and_accumulate()
            result = pop_grads(peer.model, "summed_grad")
            peer.optimizer.zero_grad(set_to_none=True)
            return result

        return run

    return build


class Opacus(NamedTuple):
    """A model that Opacus has wrapped, its backward pass and its optimizer."""

    model: nn.Module
    backward: Callable[[Tensor, Tensor], None]
    optimizer: Any


def opacus(
    problem: Problem, mode: str, *, noise_multiplier: float = 0.0, **sgd: float
) -> Opacus:
    """Wrap a model; its optimizer clips, adds noise to the sum and is SGD."""
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    ghost = mode == "ghost"
    options = dict(max_grad_norm=MAX_NORM) if ghost else {}
    model, wrapped = _opacus(problem, mode, **options)
    kind = DPOptimizerFastGradientClipping if ghost else DPOptimizer
    optimizer = kind(
        torch.optim.SGD(model.parameters(), **{"lr": 1.0, **sgd}),
        noise_multiplier=noise_multiplier,
        max_grad_norm=MAX_NORM,
        expected_batch_size=None,
        loss_reduction="sum",
    )

    def losses(output: Tensor, target: Tensor) -> Tensor:
        return problem.losses(output, target)

    if ghost:
        losses = DPLossFastGradientClipping(wrapped, optimizer, losses, "sum")

    def backward(x: Tensor, y: Tensor) -> None:
        values = losses(wrapped(x), y)
        (values if ghost else values.sum()).backward()

    return Opacus(model, backward, optimizer)


def backpack_gradients(problem: Problem) -> Run:
    """BackPACK's `BatchGrad`."""
    import backpack

    model = backpack.extend(copy.deepcopy(problem.model))

    def run(x: Tensor, y: Tensor) -> Grads:
        with backpack.backpack(backpack.extensions.BatchGrad()):
            problem.losses(model(x), y).sum().backward()
        model.zero_grad()
        return pop_grads(model, "grad_batch")

    return run


def backpack_norms(problem: Problem) -> Run:
    """BackPACK's `BatchL2Grad`, then a backward pass of the weighted losses."""
    import backpack

    model = backpack.extend(copy.deepcopy(problem.model))
    params = dict(model.named_parameters())

    def run(x: Tensor, y: Tensor) -> Grads:
        losses = problem.losses(model(x), y)
        with backpack.backpack(backpack.extensions.BatchL2Grad()):
            losses.sum().backward(retain_graph=True)
        model.zero_grad()
        squares = torch.stack(list(pop_grads(model, "batch_l2").values())).sum(0)
        weighted = _factors(squares.sqrt()) @ losses
        grads = torch.autograd.grad(weighted, list(params.values()))
        return dict(zip(params, grads, strict=True))

    return run


GRADIENTS = {
    "loop": loop_gradients,
    "vmap": vmap_gradients,
    "vgrad": vgrad_gradients,
    "opacus-hooks": opacus_gradients("hooks"),
    "opacus-functorch": opacus_gradients("functorch"),
    "opacus-ew": opacus_gradients("ew"),
    "backpack-grad": backpack_gradients,
}

CLIPPED = {
    "loop": Contender(loop),
    "vmap": Contender(clipped_by_hand(vmap_gradients)),
    "vgrad": Contender(vgrad_clipped),
    "opacus-hooks": Contender(opacus_clipped("hooks"), 1e-6),
    "opacus-functorch": Contender(opacus_clipped("functorch"), 1e-6),
    "opacus-ew": Contender(opacus_clipped("ew"), 1e-6),
    "opacus-ghost": Contender(opacus_clipped("ghost"), 1e-6),
    "backpack-grad": Contender(clipped_by_hand(backpack_gradients)),
    "backpack-l2": Contender(backpack_norms),
}


def functional(problem: Problem) -> tuple[Callable, Grads, Grads]:
    fmodel, params, buffers = vgrad.make_functional_with_buffers(
        problem.model, disable_autograd_tracking=True
    )
    return vgrad.sample_loss(fmodel, problem.mean_loss), params, buffers


def _opacus(problem: Problem, mode: str, **options: Any) -> tuple[nn.Module, Any]:
    """Return the model as Opacus wants it, and the same wrapped by Opacus.

    Positions get a batch dimension, and Opacus's own LSTM stands in for torch's.
    """
    from opacus.grad_sample import wrap_model
    from opacus.layers import DPLSTM

    model = copy.deepcopy(problem.model)
    for module in list(model.modules()):
        if isinstance(module, Positions):
            module.repeat = True
        for name, child in module.named_children():
            if isinstance(child, nn.LSTM):
                lstm = DPLSTM(
                    child.input_size,
                    child.hidden_size,
                    num_layers=child.num_layers,
                    batch_first=child.batch_first,
                    bidirectional=child.bidirectional,
                )
                lstm.load_state_dict(child.state_dict())
                setattr(module, name, lstm.to(child.weight_ih_l0))
    return model, wrap_model(model, mode, loss_reduction="sum", **options)


def _factors(norms: Tensor) -> Tensor:
    return (MAX_NORM / norms).clamp(max=1)


def pop_grads(model: nn.Module, attribute: str) -> Grads:
    """Take what a backward pass left at the parameters away from them."""
    result = {}
    for name, parameter in model.named_parameters():
        result[name] = getattr(parameter, attribute, None)
        if result[name] is None:
            raise LookupError(f"no {attribute} at {name}")
        setattr(parameter, attribute, None)
    return result
