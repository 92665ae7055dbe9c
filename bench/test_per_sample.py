"""Loop against vmap against vgrad on the SimpleCNN of the torch.func tutorial, B = 64.

`gradients`: the gradient of every sample, stored. `private step`: a whole step, from
the batch to new parameters (forward, backward, norms, clipping, sum, noise, SGD). Both
are given as ratios to a plain SGD step of `torch.nn` and `torch.optim`. `noise`: the
cost of private noise over `torch.randn` in float32, for as many parameters.

Every contender is checked in float64 before it is timed in float32: in float32 a tie of
the pooling layer may break the other way, which moves a gradient by far more than
rounding does.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vgrad
from bench.measure import DEVICES, interleaved
from tests import oracle

SAMPLES = 64
MAX_NORM = 1.0
RATE = 0.1


class SimpleCNN(nn.Module):
    """Two convolutions and two linear layers on 28x28 images, 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


class Setting:
    """The model and a batch on one device."""

    def __init__(self, device: str, dtype: torch.dtype, samples: int) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = SimpleCNN().to(device, dtype)
        self.x = torch.randn(samples, 1, 28, 28, device=device, dtype=dtype)
        self.y = torch.randint(10, (samples,), device=device)
        self.fmodel, self.params, self.buffers = vgrad.make_functional_with_buffers(
            self.model, disable_autograd_tracking=True
        )
        self.loss = vgrad.sample_loss(self.fmodel, F.nll_loss)

    def plain_step(self) -> Callable[[], None]:
        """Make a step of plain SGD on a copy of the model."""
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

        def step() -> None:
            F.nll_loss(model(self.x), self.y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


Gradients = Callable[[], dict[str, Tensor]]


def loop_gradients(setting: Setting) -> Gradients:
    parameters = dict(setting.model.named_parameters())

    def run() -> dict[str, Tensor]:
        grads = []
        for x, y in zip(setting.x, setting.y, strict=True):
            loss = F.nll_loss(setting.model(x[None]), y[None])
            grads.append(torch.autograd.grad(loss, list(parameters.values())))
        stacked = (torch.stack(rows) for rows in zip(*grads, strict=True))
        return dict(zip(parameters, stacked, strict=True))

    return run


def vmap_gradients(setting: Setting) -> Gradients:
    def loss(params: dict, x: Tensor, y: Tensor) -> Tensor:
        output = torch.func.functional_call(setting.model, params, (x[None],))
        return F.nll_loss(output, y[None])

    mapped = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    return lambda: mapped(setting.params, setting.x, setting.y)


def vgrad_gradients(setting: Setting) -> Gradients:
    compute = vgrad.per_sample_grad(setting.loss, verify=False)
    return lambda: compute(setting.params, setting.buffers, setting.x, setting.y)


GRADIENTS = {"loop": loop_gradients, "vmap": vmap_gradients, "vgrad": vgrad_gradients}


def clipped_by_hand(gradients: Gradients) -> Gradients:
    """Clip and sum stored gradients as one would write it with torch alone."""

    def run() -> dict[str, Tensor]:
        grads = gradients()
        squares = [grad.flatten(1).square().sum(1) for grad in grads.values()]
        factors = (MAX_NORM / torch.stack(squares).sum(0).sqrt()).clamp(max=1)
        return {n: torch.tensordot(factors, grad, 1) for n, grad in grads.items()}

    return run


def clipped_by_vgrad(setting: Setting) -> Gradients:
    compute = vgrad.clipped_grad(setting.loss, max_norm=MAX_NORM, verify=False)
    batch = (setting.x, setting.y)
    return lambda: compute(setting.params, setting.buffers, *batch).grads


CLIPPED = {
    "loop": lambda setting: clipped_by_hand(loop_gradients(setting)),
    "vmap": lambda setting: clipped_by_hand(vmap_gradients(setting)),
    "vgrad": clipped_by_vgrad,
}


def private_step(setting: Setting, clipped: Gradients) -> Callable[[], None]:
    """Make the rest of a private step around a clipped sum: noise and SGD."""
    plan = vgrad.dp.Plan(
        dataset_size=60_000,
        sampling_rate=SAMPLES / 60_000,
        noise_multiplier=1.0,
        max_norm=MAX_NORM,
        steps=10**6,
        delta=1e-5,
    )
    sensitivity = vgrad.Sensitivity(MAX_NORM / plan.expected_batch_size)
    key, number = vgrad.dp.secret_key(), 0
    tx = vgrad.optim.sgd(RATE)
    params, state = setting.params, tx.init(setting.params)

    def step() -> None:
        nonlocal params, state, number
        sums = {
            name: total / plan.expected_batch_size for name, total in clipped().items()
        }
        noisy = plan.add_noise(sums, sensitivity, key=key, step=number)
        number += 1
        params, state = vgrad.optim.step(tx, noisy, state, params)

    return step


def check(build: Callable[[Setting], Gradients], device: str, clip: bool) -> float:
    """Return a contender's error against the reference, in float64 on 8 samples."""
    small = Setting(device, torch.float64, 8)
    expected = oracle.model_gradients(
        small.model, lambda m, x, y: F.nll_loss(m(x), y), (small.x, small.y), 8
    )
    if clip:
        expected = oracle.clipped(expected, MAX_NORM)
    error = oracle.error(build(small)(), expected)
    assert error < 1e-10
    return error


@pytest.fixture(scope="module", params=DEVICES)
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(request.param, torch.float32, SAMPLES)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(benchmark: Any, setting: Setting, name: str) -> None:
    benchmark.group = f"per-sample gradients, {setting.device}"
    interleaved(
        benchmark,
        GRADIENTS[name](setting),
        setting.plain_step(),
        device=setting.device,
        samples=SAMPLES,
        error=check(GRADIENTS[name], setting.device, clip=False),
    )


@pytest.mark.parametrize("name", CLIPPED)
def test_private_step(benchmark: Any, setting: Setting, name: str) -> None:
    benchmark.group = f"private step, {setting.device}"
    interleaved(
        benchmark,
        private_step(setting, CLIPPED[name](setting)),
        setting.plain_step(),
        device=setting.device,
        samples=SAMPLES,
        error=check(CLIPPED[name], setting.device, clip=True),
    )


def torch_noise(setting: Setting, dtype: torch.dtype) -> Gradients:
    """Add the noise of torch's own generator to zeros of the parameters' shapes."""
    zeros = {name: torch.zeros_like(param) for name, param in setting.params.items()}

    def run() -> dict[str, Tensor]:
        return {
            name: (zero + torch.randn_like(zero, dtype=dtype)).to(zero.dtype)
            for name, zero in zeros.items()
        }

    return run


def vgrad_noise(setting: Setting) -> Gradients:
    zeros = {name: torch.zeros_like(param) for name, param in setting.params.items()}
    key, sensitivity, number = vgrad.dp.secret_key(), vgrad.Sensitivity(1.0), 0

    def run() -> dict[str, Tensor]:
        nonlocal number
        number += 1
        return vgrad.dp.add_gaussian_noise(
            zeros, sensitivity, noise_multiplier=1.0, key=key, step=number
        )

    return run


NOISE = {
    "torch, float32": lambda setting: torch_noise(setting, torch.float32),
    "torch, float64": lambda setting: torch_noise(setting, torch.float64),
    "vgrad": vgrad_noise,
}


@pytest.mark.parametrize("name", NOISE)
def test_noise(benchmark: Any, setting: Setting, name: str) -> None:
    benchmark.group = f"noise, {setting.device}"
    run = NOISE[name](setting)
    drawn = torch.cat([value.flatten() for value in run().values()]).double()
    error = float(abs(drawn.std() - 1))
    assert error < 5 / len(drawn) ** 0.5
    interleaved(
        benchmark,
        run,
        torch_noise(setting, torch.float32),
        device=setting.device,
        samples=len(drawn),
        error=error,
    )
