"""Noise in graphs: the words are inputs, and the grid survives every compiler."""

import warnings

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import vgrad
from vgrad import Sensitivity, tree
from vgrad.dp import noise, secret_key

# The last ones have a rest that is not a whole vector.
SHAPES = {"a": (40, 30), "b": (7,), "c": (), "d": (3, 0), "e": (521,), "f": (1, 1031)}
STEP = 0x5EAF00D5EAF00D


def sums(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).mul(3).to(dtype)
        for name, shape in SHAPES.items()
    }


def noise_of(sensitivity=0.4, key=None):
    key = secret_key(seed=0) if key is None else key
    options = {"noise_multiplier": 1.5, "key": key, "step": STEP}
    return noise.gaussian_noise("f", Sensitivity(sensitivity), **options)


def compiled(function, backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        return torch.compile(function, backend=backend)


def by_tensors(drawn, steps, found):
    """Return the noise for a graph that draws the words too, as on a device."""
    parts = {name: noise._part(total, name) for name, total in found.items()}
    layout = noise._Layout(steps, parts, torch.device("cpu"), 2**35)
    nonce = noise.chacha.nonces(torch.tensor([STEP]))
    return drawn._replace(words=None, stream=(*layout.table(0), nonce))


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("dtype", "sensitivity"),
    [
        (torch.float32, 0.4),
        (torch.float64, 0.4),
        (torch.bfloat16, 0.4),
        (torch.float32, 1e-38),
        (torch.float64, 1e-270),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_the_grid_survives_every_compiler(backend, dtype, sensitivity):
    found, steps = sums(dtype), noise_of(sensitivity)
    drawn, expected = steps.drawn(found), steps.added(found)
    result, _ = compiled(noise.Drawn.advanced, backend)(drawn, found)
    for name, value in expected.items():
        assert result[name].dtype == value.dtype
        # Zeros have no sign.
        bits = torch.int32 if value.dtype == torch.float32 else torch.int64
        assert torch.equal(result[name].view(bits), value.view(bits))


@pytest.mark.compiled
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_number_that_is_rounded_to_zero_has_no_sign(backend):
    """It would tell on which side of zero the number was."""
    values = torch.linspace(-1e-6, 1e-6, 37, dtype=torch.float64)
    found = compiled(noise._rounded, backend)(values, 2.0**-17)
    assert not found.view(torch.int64).any()


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("backend", ["replay", "inductor"])
def test_zeros_of_compiled_private_steps_have_no_sign(backend):
    """Every sum is what the noise takes from it, up to half a step of the grid."""
    kept = lambda grads, state, params: (grads, grads)  # noqa: E731
    tx = vgrad.optim.GradientTransformation(lambda params: params, kept)
    zeros = torch.zeros(37).double()
    plan = vgrad.dp.Plan(1, 1.0, 1e-3, 1.0, 2, 1e-3)
    step = vgrad.training.private_step(lambda p, b, x: p["w"] @ x, tx, plan)
    start = vgrad.training.TrainState.create(tx, {"w": zeros}, {}, seed=0)

    x = -step(start, zeros[None])[0].optimizer["w"][None]
    assert x.any()
    taken = step if backend == "replay" else vgrad.compile(step, backend=backend)
    for _ in range(2):
        found = taken(start, x)[0].optimizer["w"]
        assert not found.view(torch.int64).any()


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("where", ["host", "device"])
def test_no_code_has_a_key_or_a_step(where):
    found, steps = sums(), noise_of()
    drawn = steps.drawn(found)
    if where == "device":
        drawn = by_tensors(drawn, steps, found)
    function = compiled(noise.Drawn.advanced, "inductor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (result, _), code = run_and_get_code(function, drawn, found)
    for name, value in steps.added(found).items():
        assert torch.equal(result[name], value)
    code = "".join(code)
    assert "log" in code
    streams = by_tensors(drawn, steps, found).stream
    numbers = {STEP, STEP >> 32, STEP & 0xFFFFFFFF, *streams[0].flatten().tolist()}
    numbers |= {
        *steps.key.view(torch.int32).tolist(),
        *steps.key.view(torch.int64).tolist(),
    }
    for number in numbers:
        for text in (str(number), f"{number % 2**32:x}", f"{number % 2**64:x}"):
            assert text not in code
    # One kernel for another key and step.
    other = noise_of(key=secret_key(seed=1))
    draws = other.drawn(found)
    if where == "device":
        draws = by_tensors(draws, other, found)
    with torch._dynamo.config.patch(error_on_recompile=True):
        result, _ = function(draws, found)
    for name, value in other.added(found).items():
        assert torch.equal(result[name], value)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("backend", "donate", "captured"),
    [
        ("replay", False, {"optim.step": "replay"}),
        ("replay", True, {}),
        ("inductor", False, {"dp.noisy_step": "inductor"}),
        ("inductor", True, {"dp.add_noise": "inductor"}),
    ],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_compiled_private_steps_add_the_noise_of_eager_ones(
    backend, donate, captured, scaled
):
    loss = lambda params, buffers, x: (params["w"] @ x).square().sum() + params["b"]  # noqa: E731
    params = {"w": torch.ones(30, 40), "b": torch.zeros(())}
    plan = vgrad.dp.Plan(100, 0.05, 4.0, 1.0, 6, 1e-3)
    tx = vgrad.optim.adam(0.1)
    if scaled:  # which has no donated form
        name = "dp.noisy_step" if backend == "inductor" else "optim.step"
        captured = {name: backend}
        tx = vgrad.optim.scale_then_privatize(vgrad.optim.sgd(0.1))
    step = vgrad.training.private_step(loss, tx, plan, donate=donate)
    fast = vgrad.compile(step, backend=backend, batch_sizes=[8], fallback="error")
    start = vgrad.training.TrainState.create(tx, params, {}, seed=0)
    states = {name: tree.copied(start) for name in ("eager", "fast")}
    data = torch.randn(100, 40)
    for rows in plan.sampler(start):
        for name, take in (("eager", step), ("fast", fast)):
            states[name], _ = take(states[name], data[rows])
        for name, value in states["eager"].params.items():
            torch.testing.assert_close(states["fast"].params[name], value)
    names = {each.name: each.backend for each in fast.reports()}
    assert names == {"private_step": backend, **captured}
