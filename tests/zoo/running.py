"""Runs an entry: by plain autograd on the module as it is, and by this package."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import vgrad
from tests import oracle
from tests.zoo.entries import SIZE, Entry, Use


class Found(NamedTuple):
    """What transforms return, and how they came to it."""

    grads: oracle.Grads
    norms: Tensor
    clipped: oracle.Grads
    strategy: str
    why: str
    loops: tuple[str, ...]
    splits: bool


@contextmanager
def in_double(dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Make float64 the dtype of what a model makes itself, or another one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def built(entry: Entry) -> Use:
    torch.manual_seed(0)
    use = entry.build()
    model = use.model.double()
    with torch.no_grad():
        for each in model.parameters():
            if not each.is_meta:
                each.add_(0.1 * torch.randn_like(each))
    if entry.single:  # to the numbers that the package gets
        model.float().double()
    values = use.values and oracle.in_double(use.values)
    return use._replace(batch=oracle.in_double(use.batch), values=values)


@in_double()
def reference(entry: Entry) -> oracle.Grads:
    """Gradients by plain autograd, each sample on a model that is built for it.

    Where numbers are drawn, all samples draw the same; with `randomness="different"`
    each gets those that it has drawn in a transform.
    """
    drawn = drawn_by(entry) if entry.options.get("randomness") == "different" else ()

    def run(model, *sample):
        torch.manual_seed(0)
        if entry.twice:
            sample = pytree.tree_map_only(Tensor, lambda x: torch.cat([x, x]), sample)
        *inputs, target = sample if use.criterion else (*sample, None)
        args = [each for each in inputs if not isinstance(each, dict)]
        named = [each for each in inputs if isinstance(each, dict)]
        output = model(*args, **{k: v for each in named for k, v in each.items()})
        if use.criterion:
            return use.criterion(output, target)
        return getattr(output, "loss", output)

    found = []
    for row, sample in enumerate(oracle.rows(built(entry).batch, SIZE)):
        use = built(entry)
        if use.values is not None:
            use.model.load_state_dict(use.values, assign=True)
        entry.plainly(use.model)
        with Draws([each[row] for each in drawn]) if drawn else nullcontext():
            found.append(oracle.module_gradients(use.model, run, sample, 1))
    return {name: torch.cat([each[name] for each in found]) for name in found[0]}


class Draws(TorchFunctionMode):
    """Notes what is drawn, numbers and which entries dropout keeps, or gives it out."""

    def __init__(self, given: list[Tensor] | None = None) -> None:
        super().__init__()
        self.noted: list[Tensor] = []
        self.given = None if given is None else iter(given)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        drops = func is F.dropout and kwargs["p"] > 0
        if not drops and func is not torch.rand:
            return func(*args, **kwargs)
        if self.given is not None:
            drawn = next(self.given)
            return args[0] * drawn / (1 - kwargs["p"]) if drops else drawn
        result = func(*args, **kwargs)
        self.noted.append(result != 0 if drops else result)
        return result


@in_double()
def drawn_by(entry: Entry) -> list[Tensor]:
    """Return what all samples draw, [SIZE, ...] each, in a transform of the entry."""
    use = built(entry)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(use.model)
    loss = vgrad.sample_loss(fmodel, use.criterion)

    def noting(*args):
        with Draws() as draws:
            return loss(*args), draws.noted

    torch.manual_seed(0)
    compute = vgrad.per_sample_grad(noting, has_aux=True, **entry.options)
    drawn = compute(params, buffers, *use.batch)[1]
    assert any((each != each[:1]).any() for each in drawn)
    return drawn


ALONE = "one sample costs least"

LOOPS = (
    r"(?<=no batching rule for ).*(?= and loops)|(?<=vmap cannot run )\S+(?=, which)"
)
"""What warnings say of ops that run sample by sample."""


@in_double()
def found(entry: Entry, bound: float, **options: Any) -> Found:
    """Gradients, norms and a clipped sum by the transforms, and which way they took."""
    use = built(entry)
    fmodel, params, buffers = vgrad.make_functional_with_buffers(
        use.model.float() if entry.single else use.model, disable_autograd_tracking=True
    )
    params = {name: (use.values or params)[name] for name in params}
    loss = vgrad.sample_loss(fmodel, use.criterion)
    options = {**entry.options, **options}
    clip = vgrad.clipped_grad(loss, max_norm=bound, **options)
    results, loops, dtype = [], set(), torch.float32 if entry.single else torch.float64
    for transform in (
        entry.through(vgrad.per_sample_grad(loss, **options)),
        entry.through(vgrad.per_sample_norm(loss, **options)),
        entry.through(clip),
        vgrad.explain(clip),
    ):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught, in_double(dtype):
            warnings.simplefilter("always", vgrad.FallbackWarning)
            results.append(transform(params, buffers, *use.batch))
        for each in caught:
            loops.update(re.findall(LOOPS, str(each.message)))
    grads, norms, clipped, told = results
    loops = tuple(sorted(", ".join(loops).split(", ") if loops else ()))
    # A part of one sample runs by plain autograd, which is no loop.
    strategy = "recorded" if ALONE in told.why else told.strategy
    splits = bool(clip.options.fallbacks.splits) and strategy != "loop"
    return Found(grads, norms, clipped.grads, strategy, told.why, loops, splits)


def bound_of(expected: oracle.Grads) -> float:
    return 0.8 * float(oracle.norms(expected).max())


def assert_exact(entry: Entry, result: Found, expected: oracle.Grads) -> None:
    """Compare what a transform returned with the reference."""
    exact = oracle.norms(expected)
    assert exact.isfinite().all()
    assert (exact > 0).all()
    # What softmax adds to all entries has a gradient of zero but for rounding.
    rounding = (1e-6 if entry.single else 1e-15) * max(
        float(each.abs().max()) for each in expected.values()
    )
    clipped = oracle.clipped(expected, bound_of(expected))
    for got, wanted in ((result.grads, expected), (result.clipped, clipped)):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            size = float(value.abs().max()) if value.numel() else 0
            apart = float((got[name] - value).abs().max()) if value.numel() else 0
            assert apart <= entry.tolerance * size + rounding, (name, apart, size)
    norms = result.norms.double()
    torch.testing.assert_close(norms, exact, rtol=entry.tolerance, atol=0)
