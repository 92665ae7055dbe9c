"""Count the functions of vgrad that single calls pass through: `make walk`.

A perceptron 8-16-4 and 32 samples; the sixth call is counted, which is compared with
nothing (calls 1, 2, 4, 8, ... are). Lambdas, comprehensions and generators count as
functions.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import vgrad
from vgrad.report import table

SAMPLES, MEMBERS, REPEATS = 32, 4, 200
HERE = str(Path(vgrad.__file__).parent)


def calls() -> dict[str, Callable[[], Any]]:
    """Return the calls that are counted, by name."""
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        for _ in range(MEMBERS)
    ]
    model = models[0]
    fmodel, params, buffers = vgrad.make_functional_with_buffers(
        model, disable_autograd_tracking=True
    )
    stacked, many, no_buffers = vgrad.stack(models)
    many = {name: value.detach() for name, value in many.items()}
    x, y = torch.randn(SAMPLES, 8), torch.randint(4, (SAMPLES,))
    loss = vgrad.sample_loss(fmodel, F.cross_entropy)
    of_batch = vgrad.batch_loss(fmodel, F.cross_entropy)
    of_member = vgrad.batch_loss(stacked, F.cross_entropy)
    tx = vgrad.optim.sgd(0.1)
    plan = vgrad.dp.Plan(
        dataset_size=1000,
        sampling_rate=SAMPLES / 1000,
        steps=10_000,
        noise_multiplier=1.0,
        max_norm=1.0,
        delta=1e-6,
    )
    state = vgrad.training.TrainState.create(tx, params, buffers)
    members = vgrad.training.EnsembleState.create(tx, many, no_buffers)

    def one(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = torch.func.functional_call(model, params, (x[None],))
        return F.cross_entropy(output, y[None])

    mapped = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))
    clipped = vgrad.clipped_grad(loss, max_norm=1.0)
    private = vgrad.training.private_step(loss, tx, plan)
    of_arrays = {
        "clipped_grad": clipped,
        "per_sample_grad": vgrad.per_sample_grad(loss),
        "compile(clipped_grad)": vgrad.compile(clipped),
    }
    of_state = {
        "train_step, loss of a sample": vgrad.training.train_step(loss, tx),
        "train_step, loss of a batch": vgrad.training.train_step(of_batch, tx),
        "private_step": private,
        "compile(private_step)": vgrad.compile(private),
    }
    gradients = vgrad.ensemble_grad(of_member)
    train = vgrad.training.ensemble_train_step(of_member, tx)
    return {
        "vmap(grad)": partial(mapped, params, x, y),
        **{n: partial(run, params, buffers, x, y) for n, run in of_arrays.items()},
        **{name: partial(run, state, x, y) for name, run in of_state.items()},
        "ensemble_grad": partial(gradients, many, no_buffers, x, y),
        "ensemble_train_step": partial(train, members, x, y),
    }


def counted(call: Callable[[], Any]) -> tuple[int, int, int, int]:
    """Count calls and functions of vgrad, their files, and all calls of Python."""
    codes: Counter[Any] = Counter()
    every = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal every
        if event == "call":
            every += 1
            if frame.f_code.co_filename.startswith(HERE):
                codes[frame.f_code] += 1

    for _ in range(5):
        call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    files = {code.co_filename for code in codes}
    return sum(codes.values()), len(codes), len(files), every


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    head = ("call", "calls of vgrad", "functions", "files", "all calls", "ms")
    cases = calls()
    counts = {name: counted(call) for name, call in cases.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(REPEATS):
        for name, call in cases.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    rows = [(name, *counts[name], f"{median(times[name]) * 1e3:.2f}") for name in cases]
    print(table([head, *rows], right={1, 2, 3, 4, 5}))


if __name__ == "__main__":
    main()
