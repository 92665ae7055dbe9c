"""No sample adds more than its bound, and none is lost, whatever its size.

Inputs and gradients at the outputs have sizes of their own, from the smallest numbers
of float32 to the largest, so that a gradient of ordinary size may be made of numbers at
either end of the range.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import vgrad
from tests import oracle
from vgrad.precision.loss_scale import StaticLossScale

STRATEGIES = ("recorded", "vmap", "loop")
HALF = {torch.float16: 65504.0, torch.bfloat16: 3.3e38}
LARGEST = 3.4e38
"""Of float32."""


def linear(w, x, g):
    return (F.linear(x, w) * g).sum()


def convolved(w, x, g):
    return (F.conv1d(x, w, padding=1) * g).sum()


def looked_up(w, x, g):
    index = torch.arange(g.shape[0], device=w.device) * 3 % len(w)
    return (F.embedding(index, w) * g).sum()


def tied(w, x, g):
    return linear(w, x, g) + looked_up(w, x, g.mT[:3])


def twice(w, x, g):
    return linear(w, x[:1], g[:1]) + linear(w, x[1:].tanh(), g[1:])


def in_parts(w, x, g):
    return linear(w[:2], x, g[:, :2]) + linear(w[2:], x, g[:, 2:])


def transposed(w, x, g):
    return (x @ w.t() * g).sum()


def elementwise(w, x, g):
    return ((w * x) * g).sum()


def normalised(w, x, g):
    # Squares of what is normalised would be infinite in float32.
    return (F.layer_norm(x.sign(), x.shape[-1:], w) * g).sum()


def grouped(w, x, g):
    return (F.conv1d(x, w, groups=2) * g).sum()


OPS = {
    "linear": (linear, (4, 3), (1, 3), (1, 4)),
    "linear, products": (linear, (4, 3), (2, 3), (2, 4)),
    "linear, direct": (linear, (2, 3), (40, 3), (40, 2)),
    "linear, wide": (linear, (3, 12), (1, 12), (1, 3)),
    "conv, products": (convolved, (6, 6, 3), (6, 4), (6, 4)),
    "conv, offsets": (convolved, (2, 2, 3), (2, 9), (2, 9)),
    "conv, groups": (convolved, (2, 1, 3), (1, 300), (2, 300)),
    "conv of groups": (grouped, (4, 2, 1), (4, 2), (4, 2)),
    "embedding": (looked_up, (4, 3), (1,), (3, 3)),
    "tied": (tied, (4, 3), (3, 3), (3, 4)),
    "twice": (twice, (4, 3), (2, 3), (2, 4)),
    "in parts": (in_parts, (4, 3), (1, 3), (1, 4)),
    "transposed": (transposed, (4, 3), (2, 3), (2, 4)),
    "elementwise": (elementwise, (4,), (4,), (4,)),
    "normalised": (normalised, (4,), (2, 4), (2, 4)),
}
CLIPPING = {
    "flat": lambda bound: {"clipping": "flat", "max_norm": bound},
    "per_layer": lambda bound: {"clipping": "per_layer", "max_norm": bound},
    "dictionary": lambda bound: {
        "clipping": "per_layer",
        "max_norm": {"a.*": 0.6 * bound, "b.*": 0.8 * bound},
    },
    "automatic": lambda bound: {"clipping": "automatic", "max_norm": bound},
}


def two_layers(op):
    """Return a loss of the op's parameter and of one in a layer of its own."""

    def loss(params, buffers, x, g, h):
        return op(params["a.w"], x, g) + (params["b.w"] * h).sum()

    return loss


def sized(shape, sizes, dtype, generator):
    """Random numbers of each sample's size, none of them beyond its dtype."""
    numbers = torch.randn(len(sizes), *shape, generator=generator, dtype=torch.float64)
    numbers = numbers.clamp(-3, 3) / 3 + 0.2 * numbers.sign()
    column = torch.tensor(sizes, dtype=torch.float64).view(-1, *(1,) * len(shape))
    most = HALF.get(dtype, LARGEST)
    return (numbers * column).clamp(-most, most).to(dtype)


def made(name, sizes, dtype, seed=0):
    """Return a loss, its parameters, and a batch; sizes are of x, of g and of h."""
    op, weight, x, g = OPS[name]
    generator = torch.Generator().manual_seed(seed)
    columns = list(zip(*sizes, strict=True))
    batch = [
        sized(shape, column, dtype, generator)
        for shape, column in zip((x, g, (2,)), columns, strict=True)
    ]
    params = {"a.w": torch.zeros(weight, dtype=dtype)}
    return two_layers(op), {**params, "b.w": torch.zeros(2, dtype=dtype)}, batch


def factors(exact, name, bound):
    """What the documented formulas multiply gradients {name: [B, ...]} by."""
    lengths = {each: oracle.norms({each: grad}) for each, grad in exact.items()}
    whole = torch.stack(list(lengths.values())).square().sum(0).sqrt()
    if name == "flat":
        return dict.fromkeys(exact, (bound / whole).clamp(max=1))
    if name == "automatic":
        return dict.fromkeys(exact, bound / (whole + 0.01))
    shares = {"per_layer": (0.5**0.5, 0.5**0.5), "dictionary": (0.6, 0.8)}[name]
    return {
        each: (share * bound / lengths[each]).clamp(max=1)
        for each, share in zip(exact, shares, strict=True)
    }


def flat(grads):
    return torch.cat([grad.detach().double().flatten() for grad in grads.values()])


def largest(loss, params, batch):
    """Largest number, or sum of absolute terms, that a backward pass meets, [B]."""
    positive = [each.double().abs() for each in batch]
    grads = oracle.loss_gradients(loss, params, {}, positive, len(batch[0]))
    met = [each.flatten(1).amax(1) for each in (*positive, *grads.values())]
    return torch.stack(met).amax(0).clamp(min=1)


EXPONENTS = st.one_of(
    st.sampled_from([-38.0, -30.0, 0.0, 37.0, 38.4]), st.floats(-38, 38.5)
)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(deadline=None, max_examples=250)
@given(
    name=st.sampled_from(list(OPS)),
    kind=st.sampled_from(list(CLIPPING)),
    dtype=st.sampled_from(
        [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
    ),
    exponents=st.lists(
        st.tuples(EXPONENTS, EXPONENTS, EXPONENTS), min_size=1, max_size=3
    ),
    bound=st.sampled_from([1e-12, 1e-6, 1e-2, 1.0, 1e4]),
    scale=st.sampled_from([None, 2.0**-10, 2.0**16]),
)
def test_a_sample_of_any_size_is_clipped(
    strategy, name, kind, dtype, exponents, bound, scale
):
    sizes = [[10.0**each for each in row] for row in exponents]
    loss, params, batch = made(name, sizes, dtype)
    exact = oracle.loss_gradients(loss, params, {}, batch, len(sizes))
    weights = factors(exact, kind, bound)
    fits = largest(loss, params, batch) * (scale or 1.0) < HALF.get(dtype, LARGEST) / 4
    compute = vgrad.clipped_grad(
        loss,
        strategy=strategy,
        loss_scale=None if scale is None else StaticLossScale(scale),
        **CLIPPING[kind](bound),
    )
    for row in range(len(sizes)):
        one = compute(params, {}, *(each[row : row + 1] for each in batch))
        found = flat(one.grads)
        assert float(found.norm()) <= bound * (1 + 1e-6)
        if int(one.nonfinite):
            assert not bool(found.any())
            assert not bool(fits[row])
        elif dtype not in HALF and scale is None:
            scaled = {n: weights[n][row] * exact[n][row] for n in exact}
            expected = flat(scaled)
            # What a gradient in float32 loses at its end is a few of the smallest.
            edge = sum(float(w[row]) for w in weights.values()) * 1e-43
            assert float((found - expected).norm()) < 3e-6 * bound + edge + 1e-43
            norm = flat({n: exact[n][row] for n in exact}).norm()
            if 1e-37 < float(norm) < LARGEST / 2:
                assert abs(float(one.norms / norm) - 1) < 1e-6
    whole = compute(params, {}, *batch)
    alone = [
        compute(params, {}, *(e[i : i + 1] for e in batch)) for i in range(len(sizes))
    ]
    total = torch.stack([flat(each.grads) for each in alone]).sum(0)
    assert float((flat(whole.grads) - total).norm()) <= 2e-6 * bound * len(sizes)
    assert int(whole.nonfinite) == sum(int(each.nonfinite) for each in alone)
