"""Ensembles: a loop over the members against vmap, tensordict and vgrad.

`forward` gives the outputs of all members without a graph. `training step` goes from
one batch, which all members get, to new parameters: gradients, and SGD with momentum.
The loop keeps one module and one `torch.optim` optimizer a member; times are given as
ratios to it, so a number below one is a gain.

Every contender is checked in float64 before it is timed in float32. `peak_bytes` is
the need of a call above members and batch, in a fresh process (`memory.py`). Steps of
small members are compiled, too.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vgrad
from bench import memory
from bench.measure import DEVICES, interleaved
from bench.models import SETTINGS as MODELS
from bench.models.vision import dense
from vgrad.training import EnsembleState

RATE, MOMENTUM = 0.01, 0.9
STEPS = 3
"""Steps after which parameters are compared."""

SECONDS = 2.5

# Without this an unused fixture, as under --benchmark-disable, would be an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    # What is called compiled has to be.
    pytest.mark.filterwarnings("error::vgrad.CompileWarning"),
]


def rows(width: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def make(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, width, generator=generator)
        return x, torch.randint(10, (samples,), generator=generator)

    return make


SMALL = ("MLP 64-64-10", "SimpleMLP 784-128-128-10")
LARGE = ("simple-cnn", "wrn-16-2", "transformer")

SETTINGS = {
    SMALL[0]: (dense(64, 64, 10), rows(64), 64),
    SMALL[1]: (dense(784, 128, 128, 10), rows(784), 64),
    **{
        MODELS[name].title: (
            MODELS[name].model,
            MODELS[name].batch,
            MODELS[name].samples,
        )
        for name in LARGE
    },
}
SIZES = (1, 10, 100)
LARGEST = {"cpu": {MODELS[name].title: 10 for name in LARGE}, "cuda": {}}
"""Members that are too many to wait for, by device."""


class Problem:
    """The members, and the batch that all of them get, or one for each.

    Attributes:
        in_dims: where the batch has its members, None where all get the same.
    """

    def __init__(
        self,
        name: str,
        members: int,
        device: str,
        dtype: torch.dtype,
        samples: int,
        *,
        per_member: bool = False,
    ) -> None:
        make, batch, _ = SETTINGS[name]
        torch.manual_seed(0)
        self.members = members
        self.models = [make().to(device, dtype) for _ in range(members)]
        self.in_dims = 0 if per_member else None
        rows = samples * members if per_member else samples
        x, y = batch(rows, torch.Generator().manual_seed(0))
        if per_member:
            x, y = (tensor.unflatten(0, (members, samples)) for tensor in (x, y))
        self.x = x.to(device, dtype if x.is_floating_point() else None)
        self.y = y.to(device)

    def batch(self, member: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a member."""
        if self.in_dims is None:
            return self.x, self.y
        return self.x[member], self.y[member]

    def copies(self) -> list[nn.Module]:
        return copy.deepcopy(self.models)


Outcome = dict[str, Tensor]
Contender = tuple[Callable[[], Any], Callable[[], Outcome]]
"""What is timed, and what reads its result as tensors `[E, ...]`."""


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, RATE, MOMENTUM)


def stacked(models: list[nn.Module]) -> Outcome:
    states = [dict(model.named_parameters()) for model in models]
    return {n: torch.stack([s[n].detach() for s in states]) for n in states[0]}


def loop_forward(problem: Problem) -> Contender:
    @torch.no_grad()
    def run() -> list[Tensor]:
        models = enumerate(problem.models)
        return [model(problem.batch(member)[0]) for member, model in models]

    return run, lambda: {"out": torch.stack(run())}


def loop_step(problem: Problem) -> Contender:
    models = problem.copies()
    optimizers = [optimizer(model.parameters()) for model in models]

    def run() -> None:
        for member, (model, stepper) in enumerate(zip(models, optimizers, strict=True)):
            x, y = problem.batch(member)
            stepper.zero_grad()
            F.cross_entropy(model(x), y).backward()
            stepper.step()

    return run, lambda: stacked(models)


def vmap_forward(problem: Problem) -> Contender:
    params, buffers = torch.func.stack_module_state(problem.models)
    base = copy.deepcopy(problem.models[0]).to("meta")

    def one(params: Outcome, buffers: Outcome, x: Tensor) -> Tensor:
        return torch.func.functional_call(base, (params, buffers), (x,))

    mapped = torch.vmap(one, in_dims=(0, 0, problem.in_dims))

    @torch.no_grad()
    def run() -> Tensor:
        return mapped(params, buffers, problem.x)

    return run, lambda: {"out": run()}


def vmap_step(problem: Problem) -> Contender:
    params, buffers = torch.func.stack_module_state(problem.models)
    base = copy.deepcopy(problem.models[0]).to("meta")
    stepper = optimizer(params.values())

    def one(params: Outcome, buffers: Outcome, x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(base, (params, buffers), (x,))
        return F.cross_entropy(out, y)

    in_dims = (0, 0, problem.in_dims, problem.in_dims)
    gradient = torch.vmap(torch.func.grad(one), in_dims)

    def run() -> None:
        grads = gradient(params, buffers, problem.x, problem.y)
        for name, grad in grads.items():
            params[name].grad = grad
        stepper.step()

    return run, lambda: {n: value.detach().clone() for n, value in params.items()}


def tensordict_of(problem: Problem) -> tuple[Any, nn.Module]:
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")
    params = tensordict.from_modules(*problem.models, as_module=True)
    return params, copy.deepcopy(problem.models[0]).to("meta")


def tensordict_forward(problem: Problem) -> Contender:
    params, base = tensordict_of(problem)

    def one(params: Any, x: Tensor) -> Tensor:
        with params.to_module(base):
            return base(x)

    mapped = torch.vmap(one, in_dims=(0, problem.in_dims))

    @torch.no_grad()
    def run() -> Tensor:
        return mapped(params, problem.x)

    return run, lambda: {"out": run()}


def tensordict_step(problem: Problem) -> Contender:
    params, base = tensordict_of(problem)
    stepper = optimizer(params.parameters())

    def one(params: Any, x: Tensor, y: Tensor) -> Tensor:
        with params.to_module(base):
            return F.cross_entropy(base(x), y)

    mapped = torch.vmap(one, in_dims=(0, problem.in_dims, problem.in_dims))

    def run() -> None:
        stepper.zero_grad()
        mapped(params, problem.x, problem.y).sum().backward()
        stepper.step()

    def outcome() -> Outcome:
        flat = params.flatten_keys(".").items()
        return {name: value.detach().clone() for name, value in flat}

    return run, outcome


def vgrad_forward(problem: Problem) -> Contender:
    fmodel, params, buffers = vgrad.stack(problem.models)
    forward = vgrad.ensemble_forward(fmodel, in_dims=problem.in_dims)

    @torch.no_grad()
    def run() -> Tensor:
        return forward(params, buffers, problem.x)

    return run, lambda: {"out": run()}


def vgrad_step(backend: str | None) -> Callable[[Problem], Contender]:
    """Make a step of vgrad; a compiled one that is not donated is one graph."""

    def make(problem: Problem) -> Contender:
        fmodel, params, buffers = vgrad.stack(problem.models)
        loss = vgrad.batch_loss(fmodel, F.cross_entropy)
        tx = vgrad.for_members(vgrad.optim.sgd, lr=RATE, momentum=MOMENTUM)
        step: Any = vgrad.training.ensemble_train_step(
            loss, tx, in_dims=problem.in_dims, donate=backend is None
        )
        if backend is not None:
            step = vgrad.compile(step, backend=backend, fallback="error")
        state = EnsembleState.create(tx, params, buffers, seed=0)

        def run() -> None:
            nonlocal state
            state, _ = step(state, problem.x, problem.y)

        return run, lambda: dict(state.params)

    return make


CONTENDERS: dict[str, dict[str, Callable[[Problem], Contender]]] = {
    "forward": {
        "loop": loop_forward,
        "vmap": vmap_forward,
        "tensordict": tensordict_forward,
        "vgrad": vgrad_forward,
    },
    "training step": {
        "loop": loop_step,
        "vmap": vmap_step,
        "tensordict": tensordict_step,
        "vgrad": vgrad_step(None),
        "vgrad-replay": vgrad_step("replay"),
        "vgrad-inductor": vgrad_step("inductor"),
    },
}
COMPILED = ("vgrad-replay", "vgrad-inductor")
NAMES = ("loop", "vmap", "tensordict", "vgrad", *COMPILED)
GROWTH = {
    SMALL[1]: (1, 2, 4, 8, 16, 32, 64),
    MODELS["simple-cnn"].title: (1, 2, 4, 8, 16),
}
"""Members of a training step, more of them for vgrad's line in the picture
(`growth.py`)."""


def checked(
    kind: str, name: str, setting: str, device: str, *, per_member: bool = False
) -> float:
    """Return the largest relative error against the loop, of few members in float64."""
    outcomes = []
    for contender in (name, "loop"):
        problem = Problem(setting, 2, device, torch.float64, 4, per_member=per_member)
        run, outcome = CONTENDERS[kind][contender](problem)
        for _ in range(STEPS):
            run()
        outcomes.append(outcome())
    result, expected = outcomes
    assert result.keys() == expected.keys()
    return max(
        float((result[n] - value).norm() / value.norm())
        for n, value in expected.items()
    )


def prepared(
    kind: str,
    name: str,
    setting: str,
    members: int,
    device: str,
    *,
    per_member: bool = False,
) -> Callable[[], Any]:
    """Make what is timed, on a whole batch in float32, and run it once."""
    samples = SETTINGS[setting][2]
    problem = Problem(
        setting, members, device, torch.float32, samples, per_member=per_member
    )
    run, _ = CONTENDERS[kind][name](problem)
    run()
    return run


def peak(
    kind: str, name: str, setting: str, members: int, device: str
) -> dict[str, float]:
    """Measure the memory of a contender in this process."""
    return memory.above_base(prepared(kind, name, setting, members, device), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("members", SIZES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", CONTENDERS)
@pytest.mark.parametrize("name", NAMES)
def test_ensemble(
    benchmark: Any, device: str, members: int, setting: str, kind: str, name: str
) -> None:
    benchmark.group = f"ensemble, {kind}, {setting}, {members} members, {device}"
    if members > LARGEST[device].get(setting, max(SIZES)):
        pytest.skip("too slow for this device")
    if name in COMPILED and (kind == "forward" or setting not in SMALL):
        pytest.skip("small steps alone are compiled, whose calls take the longest")
    if benchmark.disabled and name == "vgrad-inductor":
        pytest.skip("takes a minute to compile")
    if benchmark.disabled and members != SIZES[0]:
        pytest.skip("checked with few members")
    error = checked(kind, name, setting, device)
    assert error < 1e-8
    if not benchmark.disabled:
        timed(benchmark, kind, name, setting, members, device, error)


@pytest.mark.parametrize("name", ["vgrad"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("members", SIZES)
@pytest.mark.parametrize("setting", SMALL)
@pytest.mark.parametrize("kind", CONTENDERS)
def test_against_vmap(
    benchmark: Any, device: str, members: int, setting: str, kind: str, name: str
) -> None:
    """Interleaved, where vmap is faster than the loop; the plain step is its."""
    if benchmark.disabled:
        pytest.skip("test_ensemble has checked it")
    benchmark.group = f"{kind} / that of vmap, {setting}, {members} members, {device}"
    error = checked(kind, name, setting, device)
    timed(benchmark, kind, name, setting, members, device, error, baseline="vmap")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("setting", "name"), [(s, size) for s, sizes in GROWTH.items() for size in sizes]
)
def test_members(benchmark: Any, device: str, setting: str, name: int) -> None:
    if benchmark.disabled:
        pytest.skip("test_ensemble has checked it")
    benchmark.group = f"members, training step, {setting}, {device}"
    kind, ours = "training step", "vgrad"
    error = checked(kind, ours, setting, device)
    timed(benchmark, kind, ours, setting, name, device, error)


def timed(
    benchmark: Any,
    kind: str,
    name: str,
    setting: str,
    members: int,
    device: str,
    error: float,
    baseline: str = "loop",
) -> None:
    """Time a contender beside the baseline, and measure its memory."""
    case = (setting, members, device)
    interleaved(
        benchmark,
        prepared(kind, name, *case),
        prepared(kind, baseline, *case),
        device=device,
        samples=members * SETTINGS[setting][2],
        error=error,
        seconds=SECONDS,
    )
    benchmark.extra_info["members"] = members
    if memory.measurable(device):
        needed = memory.in_fresh_process(peak, kind, name, *case)
        benchmark.extra_info["peak_bytes"] = needed["peak_bytes"]
