"""What tests of compiled functions share: small nets, all transforms, bad samples."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vgrad
from tests import losses, oracle

clipped = partial(vgrad.clipped_grad, max_norm=0.7)
TRANSFORMS: dict[str, Callable] = {
    "grad": vgrad.per_sample_grad,
    "norm": vgrad.per_sample_norm,
    "norm of parameters": partial(vgrad.per_sample_norm, groups="parameter"),
    "gram": vgrad.per_sample_gram,
    "gram, cross": vgrad.per_sample_gram,
    "projection": partial(vgrad.per_sample_projection, dim=5, seed=3),
    "weighted": vgrad.weighted_grad,
    "flat": clipped,
    "per_layer": partial(clipped, clipping="per_layer", normalize_by=3.0),
    "automatic": partial(clipped, clipping="automatic"),
    "moments": vgrad.gradient_moments,
}
CLIPPED = ("flat", "per_layer", "automatic")
HAS_AUX = [name for name in TRANSFORMS if not name.startswith(("gram", "moments"))]


def call(name: str, transform: Any, given: tuple, mask: Tensor | None = None) -> Any:
    """Call a transform with what it takes beside a batch."""
    params, buffers, *batch = given
    options: dict[str, Any] = {} if mask is None else {"mask": mask}
    size = len(losses.pytree.tree_leaves(batch)[0])
    if name == "weighted":
        weights = torch.linspace(-1, 2, size, dtype=torch.float64)
        return transform(weights, params, buffers, *batch, **options)
    if name == "gram, cross":
        options["cross"] = cross(batch)
    return transform(params, buffers, *batch, **options)


def cross(batch: Any) -> tuple:
    """Return the second batch of a matrix of inner products."""
    return tuple(losses.rows(batch, slice(0, 3)))


class Reader(nn.Module):
    """An LSTM over embedded tokens."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(tokens))
        return self.head(self.drop(hidden[:, -1]))


def mlp(p: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 3), nn.Dropout(p)
    )


MODELS: dict[str, tuple] = {
    "mlp": (mlp, losses.vectors(5), F.cross_entropy),
    "cnn": (losses.CASES["cnn"].model, losses.CASES["cnn"].batch, F.cross_entropy),
    "lstm": (Reader, losses.tokens(9, 4), F.cross_entropy),
    "tied": (losses.TiedLanguageModel, losses.CASES["tied"].batch, losses.next_token),
    "transformer": (
        losses.CASES["transformer"].model,
        losses.CASES["transformer"].batch,
        F.cross_entropy,
    ),
    "dropout": (lambda: mlp(0.5), losses.vectors(5), F.cross_entropy),
    "lstm, dropout": (lambda: Reader(0.5), losses.tokens(9, 4), F.cross_entropy),
}


def built(name: str, dtype: torch.dtype = torch.float32) -> tuple:
    """Return the loss of one sample, parameters, buffers and what draws a batch."""
    torch.manual_seed(0)
    if name == "inside":
        shapes = {"a.weight": 5, "b.weight": 1}
        params = {key: losses.randn(n, dtype=dtype) for key, n in shapes.items()}
        return gradient_inside, params, {}, losses.vectors(5)
    make, batch, criterion = MODELS[name]

    def draw(size: int) -> tuple:
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in batch(size))

    return *losses.of_model(make(), criterion, dtype), draw


def sites(params: dict, buffers: dict, x: Tensor, g: Tensor) -> Tensor:
    """A loss whose gradient is the product of its inputs, summed over positions."""
    whole = (F.linear(x, params["a.weight"]) * g).sum()
    return whole + (params["b.weight"] * g[0]).sum()


def sites_params(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        "a.weight": losses.randn(16, 12, dtype=dtype),
        "b.weight": losses.randn(16, dtype=dtype),
    }


def sites_batch(
    size: int, *planted: str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return a batch whose last samples are those of the names given."""
    x = losses.randn(size, 2, 12, seed=seed, dtype=dtype)
    g = losses.randn(size, 2, 16, seed=seed + 1000, dtype=dtype)
    for row, name in zip(range(size - len(planted), size), planted, strict=True):
        PLANTED[name](x[row], g[row])
    return x, g


def _cancels(x: Tensor, g: Tensor) -> None:
    x[1], g[1] = x[0], g[0] * -(1 - 1e-5)


def _spoils(number: float) -> Callable[[Tensor, Tensor], None]:
    def spoil(x: Tensor, g: Tensor) -> None:
        x[0, 0] = number

    return spoil


def _scales(by_x: float, by_g: float) -> Callable[[Tensor, Tensor], None]:
    def scale(x: Tensor, g: Tensor) -> None:
        x.mul_(by_x)
        g.mul_(by_g)

    return scale


PLANTED: dict[str, Callable[[Tensor, Tensor], None]] = {
    "cancelling": _cancels,
    "nan": _spoils(torch.nan),
    "inf": _spoils(torch.inf),
    "huge": _scales(1e20, 1e12),
    "tiny": _scales(1e-20, 1e-8),
}


def gradient_inside(params: dict, buffers: dict, x: Tensor, y: Tensor) -> Tensor:
    """A loss with a transform of torch.func in it, which is not recorded."""

    def inner(weight: Tensor) -> Tensor:
        return (weight * x).sin().sum()

    slope = torch.func.grad(inner)(params["a.weight"])
    return slope.sum() + (params["b.weight"] * y).sum().square()


def plan(**changes: Any) -> vgrad.dp.Plan:
    fields: dict[str, Any] = {
        "dataset_size": 20,
        "sampling_rate": 0.4,
        "noise_multiplier": 0.8,
        "max_norm": 0.5,
        "steps": 6,
        "delta": 1e-5,
    }
    return vgrad.dp.Plan(**{**fields, **changes})


def taken(step: Callable, state: Any, batches: list) -> list[tuple]:
    """Take steps, and return all states and metrics."""
    found = []
    for batch in batches:
        state, metrics = step(state, *batch)
        # A donated state is written into by the next step.
        found.append(losses.pytree.tree_map(torch.clone, (state, metrics)))
    return found


def same_steps(make: Callable, start: Callable, batches: list, **options: Any) -> tuple:
    """Demand the bits of eager steps of all states and metrics; return the latter."""
    compiled = vgrad.compile(make(), fallback="error", **options)
    found, expected = (taken(step, start(), batches) for step in (compiled, make()))
    oracle.assert_exact(found, expected, 0)
    return compiled, [metrics for _, metrics in found]


def same_quantities(
    name: str,
    loss: Callable,
    calls: list[tuple],
    backend: Any = "replay",
    **options: Any,
) -> Any:
    """Return a compiled quantity, after calls that have the bits of eager mode."""
    eager = TRANSFORMS[name](loss, **options)
    compiled = vgrad.compile(eager, backend=backend, fallback="error")
    same_calls(
        lambda *given: call(name, compiled, given),
        lambda *given: call(name, eager, given),
        calls,
    )
    return compiled


def same_calls(
    compiled: Callable, eager: Callable, calls: list[tuple], *, tolerance: float = 0
) -> None:
    """Demand the same bits of all calls, and the same random numbers afterwards."""
    for seed, given in enumerate(calls):
        torch.manual_seed(seed)
        expected = eager(*given)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        found = compiled(*given)
        assert torch.equal(torch.get_rng_state(), after)
        oracle.assert_exact(found, expected, tolerance)


def ran(compiled: Any, calls: int, redos: int = 0) -> None:
    """Demand that one graph ran so often."""
    reports = compiled.reports()
    assert [each.backend for each in reports] == ["replay"] * len(reports)
    assert [each.calls for each in reports] == [calls] * len(reports)
    assert [each.redos for each in reports] == [redos] * len(reports)
