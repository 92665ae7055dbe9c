"""The reference: a float64 loop over samples of plain autograd, nothing else.

It shares no code with the package, so that a mistake in one shows against the other.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Grads = dict[str, Tensor]

EXACT = 1e-10
"""What float64 leaves of the difference of two right ways to compute a quantity."""


def in_double(tree):
    """Copy every floating tensor of a tree as float64, without its graph."""

    def widen(leaf):
        return leaf.detach().double() if leaf.is_floating_point() else leaf.detach()

    return pytree.tree_map_only(Tensor, widen, tree)


def rows(batch, size: int):
    """Yield the samples of a batch, each with a batch dimension of one."""
    for row in range(size):
        yield pytree.tree_map_only(Tensor, lambda leaf, i=row: leaf[i : i + 1], batch)


def model_gradients(
    model: nn.Module, run: Callable[..., Tensor], batch, size: int
) -> Grads:
    """Per-sample gradients by running a copy of a module: `run(model, *sample)`."""
    return module_gradients(copy.deepcopy(model).double(), run, batch, size)


def module_gradients(
    model: nn.Module, run: Callable[..., Tensor], batch, size: int
) -> Grads:
    """Per-sample gradients by running the module itself, which may change it."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = {name: [] for name in trained}
    for sample in rows(in_double(batch), size):
        model.zero_grad()
        run(model, *sample).sum().backward()
        for name, each in trained.items():
            grad = torch.zeros_like(each) if each.grad is None else each.grad
            found[name].append(grad.to_dense())
    return {name: torch.stack(each) for name, each in found.items()}


def loss_gradients(loss: Callable, params, buffers, batch, size=None) -> Grads:
    """Per-sample gradients of a loss that was written on dictionaries."""
    size = len(pytree.tree_leaves(batch)[0]) if size is None else size
    leaves = {name: p.requires_grad_() for name, p in in_double(params).items()}
    found = {name: [] for name in leaves}
    for one in rows(in_double(batch), size):
        sample = pytree.tree_map_only(Tensor, lambda leaf: leaf[0], one)
        grads = torch.autograd.grad(
            loss(leaves, in_double(buffers), *sample),
            list(leaves.values()),
            allow_unused=True,
            materialize_grads=True,
        )
        for name, grad in zip(leaves, grads, strict=True):
            found[name].append(grad)
    return {name: torch.stack(each) for name, each in found.items()}


def norms(grads: Grads) -> Tensor:
    """Norm of each sample's gradient over all parameters."""
    return (
        torch.stack(
            [g.reshape(len(g), -1).abs().square().sum(1) for g in grads.values()]
        ).sum(0)
        ** 0.5
    )


def weighted(grads: Grads, weights: Tensor) -> Grads:
    """Sum over samples with weights."""
    return {
        n: torch.einsum("b,b...->...", weights.to(g.dtype), g) for n, g in grads.items()
    }


def clipped(grads: Grads, max_norm: float) -> Grads:
    """Sum over samples, each scaled to a norm of at most `max_norm`."""
    return weighted(grads, (max_norm / norms(grads)).clamp(max=1))


def error(found, expected) -> float:
    """Largest relative error over the tensors, each against its largest entry."""
    worst = 0.0
    for value, exact in _pairs(found, expected):
        kind = torch.complex128 if exact.is_complex() else torch.float64
        value, exact = value.detach().to(kind), exact.detach().to(kind)
        same = (value == exact) | (value.isnan() & exact.isnan())
        largest = exact.abs().nan_to_num(0, posinf=0).max().clamp(min=1e-30)
        gap = torch.where(same, 0, value - exact).abs() / largest
        worst = max(worst, float(gap.nan_to_num(torch.inf, posinf=torch.inf).max()))
    return worst


def distance(found, expected) -> float:
    """Relative error of a whole tree: the norm of what differs over that of all."""
    gap = whole = 0.0
    for value, exact in _pairs(found, expected):
        value, exact = (each.detach().cpu().double() for each in (value, exact))
        gap += float((value - exact).square().sum())
        whole += float(exact.square().sum())
    return (gap / whole) ** 0.5


def assert_exact(found, expected, tolerance: float = EXACT) -> None:
    """Compare trees of tensors, each relative to its largest expected entry.

    A tolerance of 0 asks for the same dtypes and bits: NaN is NaN, and -0.0 is not 0.0.
    """
    if tolerance:
        assert error(found, expected) <= tolerance
        return
    for value, exact in _pairs(found, expected):
        assert value.dtype == exact.dtype
        pair = [each.detach().flatten().contiguous() for each in (value, exact)]
        bits = [each.view(torch.uint8) for each in pair]
        assert torch.equal(*bits), (value, exact)


def _pairs(found, expected):
    """Yield the tensors at the same places that are not empty; all else is equal."""
    left, right = (
        {pytree.keystr(path): leaf for path, leaf in leaves}
        for leaves, _ in map(pytree.tree_flatten_with_path, (found, expected))
    )
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    for place, exact in right.items():
        value = left[place]
        if not isinstance(exact, Tensor):
            assert value == exact, (place, value, exact)
            continue
        assert value.shape == exact.shape, (place, value.shape, exact.shape)
        if exact.numel():
            yield value, exact


def rounding(
    compute: Callable[..., Grads], *inputs, dtype: torch.dtype = torch.float64
) -> float:
    """How far `compute` moves when each number given to it moves in its last place.

    Processors differ in how they add, and in the last place of an `exp` or a `sin`:
    each has the exact result for inputs that differ about so much from those given.
    A small multiple of this is the tolerance of a problem that is badly conditioned,
    on every processor, and a wrong formula stays outside, as it is wrong by more. Where
    the problem need not be badly conditioned, a better one is the better test.
    """
    inputs, generator = in_double(inputs), torch.Generator().manual_seed(0)

    def move(leaf):
        if not leaf.is_floating_point():
            return leaf
        drawn = torch.rand(leaf.shape, dtype=leaf.dtype, generator=generator)
        return leaf * (1 + torch.finfo(dtype).eps * (2 * drawn - 1))

    exact = compute(*inputs)
    moved = [pytree.tree_map_only(Tensor, move, inputs) for _ in range(4)]
    return max(error(compute(*each), exact) for each in moved)
