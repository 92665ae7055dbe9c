"""Small runs of the main job: how they are started, killed and compared."""

import contextlib
import functools
import json
import math

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.nn import functional as F

from tests import streams
from vgrad import dp, files
from vgrad.__main__ import main
from vgrad.cli import checkpoint, data, models, report
from vgrad.dp import accounting

KEYS = ["step", "loss", "test_accuracy", "epsilon", "samples_per_second"]
SIZE, BATCH = 48, 12
FIXED, PLAIN = "--reproducible-noise", "--without-privacy"
THREE = ["--members", "3"]
PICTURES = (report, "draw")
"""What a run does after its last epoch."""

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}

WRITE = report.write_picture


def picture(figure, path):
    """Write a file in the place of a picture, which takes longer than a run."""
    files.replace(path, b"picture", private=True)
    return b"picture"


ACCOUNTANT = {
    name: functools.cache(getattr(accounting, name))
    for name in ("epsilon", "noise_multiplier_for")
}
"""Asks the same question once only."""


class Killed(BaseException):
    """Stands for a signal that no handler sees."""


def stop(*args, **kwargs):
    raise Killed


def write_data(path, seed=0, **changed):
    rng = np.random.default_rng(seed)
    y_train, y_test = rng.integers(0, 3, SIZE), rng.integers(0, 3, 30)
    centres = rng.normal(size=(3, 6)).astype(np.float32)
    found = {
        "x_train": centres[y_train] + rng.normal(size=(SIZE, 6)),
        "y_train": y_train,
        "x_test": centres[y_test] + rng.normal(size=(30, 6)),
        "y_test": y_test,
        "classes": np.array(3),
        **changed,
    }
    np.savez(path, **found)
    return path


def arguments(images, *more, epochs=2):
    sizes = ["--batch-size", str(BATCH), "--epochs", str(epochs)]
    return ["--data", str(images), "--model", "mlp", "--lr", "0.5", *sizes, *more]


def train(images, out, *more, epochs=2):
    return main(["train", "--out", str(out), *arguments(images, *more, epochs=epochs)])


def resume(out, *more):
    return main(["train", "--resume", str(out), *more])


def interrupted(images, out, *more, where=PICTURES, after=0, **how):
    """Leave a run that was killed in a function, after so many whole calls of it."""
    owner, name = where
    whole, calls = getattr(owner, name), []

    def killing(*args, **kwargs):
        if len(calls) == after:
            raise Killed
        calls.append(args)
        return whole(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, killing)
        with pytest.raises(Killed):
            train(images, out, *more, **how)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def said(folder, name="state.json"):
    return json.loads((folder / name).read_text())


def results(folder):
    """Everything that a run leaves, apart from how long it took, as bytes."""
    found = {"files": sorted(path.name for path in folder.iterdir())}
    for name in ("metrics.jsonl", "plain.jsonl"):
        if (folder / name).exists():
            records = lines(folder / name)
            found[name] = [{**each, "samples_per_second": None} for each in records]
    held = {"state": checkpoint.read_state(folder)}
    if (folder / "model.safetensors").exists():
        path = folder / "model.safetensors"
        held["model"] = files.read_tensors(path, "model")
    else:
        # The format keeps no order of what it says about its tensors.
        tensors = safetensors.torch.load_file(folder / "ensemble.safetensors")
        held["ensemble"] = tensors, (folder / "ensemble.json").read_bytes()
    for name, (tensors, description) in held.items():
        if name == "state":
            description.pop("lengths")
        values = {key: value.numpy().tobytes() for key, value in tensors.items()}
        found[name] = values, description
    return found


def status(capsys, *command):
    """Run a command; return its status and the one line it prints if it fails."""
    capsys.readouterr()
    try:
        found = main([str(each) for each in command])
    except SystemExit as leaving:
        found = leaving.code
    printed = capsys.readouterr()
    if found == 0:
        return 0, ""
    assert (found, printed.out) == (2, "")
    assert printed.err.startswith("vgrad: ")
    assert printed.err.count("\n") == 1
    return 2, printed.err


def error(capsys, *command):
    """Run a command that has to fail, and return the one line it prints."""
    found, line = status(capsys, *command)
    assert found == 2
    return line


def held_out(images):
    """Return the held-out images, [30, 1, 1, 6], and their labels, an array."""
    held = np.load(images)
    return torch.from_numpy(held["x_test"]).float()[:, None, None], held["y_test"]


def built(images, spec="mlp", seed=0):
    return models.build(spec, data.load(str(images), seed=0).shape, seed=seed)


def net(layers="torch.nn.Linear(channels * height * width, classes)"):
    """Return the source of a factory of some layers."""
    return (
        "def make(*, channels, height, width, classes):\n"
        f"    return torch.nn.Sequential(torch.nn.Flatten(), {layers})\n"
    )


def watched(monkeypatch, owner, name, see):
    """Show every call of a function to `see`, and let it do what it does."""
    whole = getattr(owner, name)

    def function(*args, **kwargs):
        result = whole(*args, **kwargs)
        see(result, *args, **kwargs)
        return result

    monkeypatch.setattr(owner, name, function)


def watch_noise(monkeypatch, killed_at=None):
    """Keep the noise of each step of a run, as bytes, and kill it at one of them."""
    seen, whole = [], dp.Plan.add_noise

    def add_noise(plan, sums, sensitivity, **place):
        zeros = {name: torch.zeros_like(value) for name, value in sums.items()}
        noise = whole(plan, zeros, sensitivity, **place)
        seen.append(noise["1.weight"].numpy().tobytes())
        if len(seen) == killed_at:
            raise Killed
        return whole(plan, sums, sensitivity, **place)

    monkeypatch.setattr(dp.Plan, "add_noise", add_noise)
    return seen


def reference(
    images, key, plan, private, *, steps=8, dtype=None, seed=0, member=0, members=1
):
    """Train in plain torch, sample by sample, from the key of a state."""
    held, max_norm = np.load(images), 0.8
    x = torch.from_numpy(held["x_train"]).float()[:, None, None]
    y = torch.from_numpy(held["y_train"])
    model = built(images, seed=seed)
    params = list(model.parameters())
    own = streams.of_plan(key, plan)
    sizes = {"multiplier": plan["noise_multiplier"], "sensitivity": max_norm / BATCH}
    cast = contextlib.nullcontext
    if dtype is not None:
        cast = functools.partial(torch.autocast, "cpu", dtype=dtype)
    for step in range(steps):
        if private:
            index = streams.batch(own, step, SIZE, BATCH / SIZE)
        else:
            source = streams.shuffle(key, step)
            orders = [torch.randperm(SIZE, generator=source) for _ in range(members)]
            index = orders[member][:BATCH].tolist()
        total = [torch.zeros_like(param) for param in params]
        for row in index:
            with cast():
                loss = F.cross_entropy(model(x[row : row + 1]), y[row : row + 1])
            # A scale that float16 needs, and float32 does not notice.
            grads = [grad / 1024 for grad in torch.autograd.grad(1024 * loss, params)]
            norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
            factor = min(1.0, max_norm / norm) if private else 1.0
            for sum_, grad in zip(total, grads, strict=True):
                sum_ += factor * grad
        with torch.no_grad():
            pairs = zip(model.named_parameters(), total, strict=True)
            for (name, param), sum_ in pairs:
                mean = sum_ / BATCH
                if private:
                    mean += streams.noise(own, step, name, param.shape, **sizes)
                param -= 0.5 * mean
    return {name: param.detach() for name, param in model.named_parameters()}
