"""Small runs of the main job: how they are started, killed and compared."""

import contextlib
import functools
import json
import math
import stat

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests import streams
from vgrad import dp, files
from vgrad.__main__ import main
from vgrad.cli import data, models, report
from vgrad.dp import accounting, noise
from vgrad.training import saved

KEYS = ["step", "loss", "test_accuracy", "epsilon", "samples_per_second"]
SIZE, BATCH = 48, 12
FIXED, PLAIN = "--reproducible-noise", "--without-privacy"
THREE = ["--members", "3"]
SLOW = pytest.mark.slow

WRITE = report.write_picture
ACCOUNTANT = {
    name: functools.cache(getattr(accounting, name))
    for name in ("epsilon", "noise_multiplier_for")
}


@contextlib.contextmanager
def quickly():
    """Compute the same epsilon once only, and draw no pictures."""

    def picture(figure, path):
        files.replace(path, b"picture", private=True)

    with pytest.MonkeyPatch.context() as patch:
        for name, cached in ACCOUNTANT.items():
            patch.setattr(accounting, name, cached)
        patch.setattr(report, "write_picture", picture)
        yield


class Killed(BaseException):
    """Stands for a signal that no handler sees."""


@contextlib.contextmanager
def killed(owner, name, after=0):
    """Kill a run in a function, after so many whole calls of it."""
    whole, calls = getattr(owner, name), []

    def killing(*args, **kwargs):
        if len(calls) == after:
            raise Killed
        calls.append(args)
        return whole(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, killing)
        with pytest.raises(Killed):
            yield


def write_data(path, seed=0, **changed):
    rng = np.random.default_rng(seed)
    y_train, y_test = rng.integers(0, 3, SIZE), rng.integers(0, 3, 30)
    centres = rng.normal(size=(3, 6)).astype(np.float32)
    arrays = {
        "x_train": centres[y_train] + rng.normal(size=(SIZE, 6)),
        "y_train": y_train,
        "x_test": centres[y_test] + rng.normal(size=(30, 6)),
        "y_test": y_test,
        "classes": np.array(3),
        **changed,
    }
    np.savez(path, **arrays)
    return path


def arguments(images, *more, epochs=2):
    sizes = ["--batch-size", str(BATCH), "--epochs", str(epochs)]
    return ["--data", str(images), "--model", "mlp", "--lr", "0.5", *sizes, *more]


def train(images, out, *more, epochs=2):
    return main(["train", "--out", str(out), *arguments(images, *more, epochs=epochs)])


def resume(out, *more):
    return main(["train", "--resume", str(out), *more])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def said(folder):
    """Return the settings in the state of a run."""
    return saved.read_meta(folder / "state").settings


def state_of(folder):
    """Return the tensors of the state of a run, by name."""
    [name] = saved.read_meta(folder / "state").files()  # a kill may leave others
    return files.read_tensors(folder / "state" / name, saved.PIECES)[0]


def spent(out, steps):
    """Return the epsilon of so many steps with the noise of a run."""
    multiplier, rate = said(out)["plan"]["noise_multiplier"], BATCH / SIZE
    options = {"sampling_rate": rate, "noise_multiplier": multiplier, "delta": 1e-5}
    return dp.epsilon(**options, steps=steps)


def private(folder):
    """Return the names of the files that their owner alone can read."""
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()}
    return {name for name, mode in modes.items() if mode in (0o600, 0o700)}


def untimed(records):
    return [{**record, "samples_per_second": 0} for record in records]


def results(folder):
    """Return all that a run leaves, apart from how long it took, as bytes."""
    content = {"files": sorted(path.name for path in folder.iterdir())}
    for path in folder.glob("*.jsonl"):
        content[path.name] = untimed(lines(path))
    settings = said(folder)
    figures = {run: untimed(x) for run, x in settings.pop("figures").items()}
    content["settings"] = settings, figures
    held = {"state": state_of(folder)}
    for path in folder.glob("*.safetensors"):
        held[path.stem], content[f"{path.stem}, text"] = files.read_tensors(
            path, "model"
        )
    for name, tensors in held.items():
        content[name] = {key: value.numpy().tobytes() for key, value in tensors.items()}
    return content


def forge(folder, change):
    """Change the settings in a state, and seal them."""
    path = folder / "state" / saved.META
    content = json.loads(path.read_bytes())
    change(content["checkpoint"]["settings"])
    content["sha256"] = saved._digest(content["checkpoint"])
    path.write_text(json.dumps(content))


def error(capsys, *command):
    """Run a command that has to fail, and return the one line it prints."""
    capsys.readouterr()
    try:
        code = main([str(word) for word in command])
    except SystemExit as leaving:
        code = leaving.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("vgrad: ")
    assert printed.err.count("\n") == 1
    return printed.err


def refuse(capsys, out, message, *more):
    """Go on with a run, which has to fail and to change nothing."""
    before = contents(out)
    assert message in error(capsys, "train", "--resume", out, *more)
    assert contents(out) == before


def held_out(images):
    """Return the held-out images, [30, 1, 1, 6], and their labels."""
    held = np.load(images)
    x = torch.from_numpy(held["x_test"]).float()[:, None, None]
    return x, torch.from_numpy(held["y_test"])


def built(images, seed=0):
    return models.build("mlp", data.load(str(images), seed=0).shape, seed=seed)


def net(layers="torch.nn.Linear(channels * height * width, classes)"):
    """Return the source of a factory of some layers."""
    return (
        "def make(*, channels, height, width, classes):\n"
        f"    return torch.nn.Sequential(torch.nn.Flatten(), {layers})\n"
    )


def watched(monkeypatch, owner, name, see):
    """Show every call of a function to `see`, and let it do its work."""
    whole = getattr(owner, name)

    def function(*args, **kwargs):
        result = whole(*args, **kwargs)
        see(result, *args, **kwargs)
        return result

    monkeypatch.setattr(owner, name, function)


def watch_noise(monkeypatch, killed_at=None):
    """Keep the noise of each step of a run, as bytes, and kill it at one of them."""
    seen, whole = [], noise.Noise.advanced

    def advanced(step, sums):
        zeros = {name: torch.zeros_like(value) for name, value in sums.items()}
        seen.append(whole(step, zeros)[0]["1.weight"].numpy().tobytes())
        if len(seen) == killed_at:
            raise Killed
        return whole(step, sums)

    monkeypatch.setattr(noise.Noise, "advanced", advanced)
    return seen


def reference(
    images, key, plan, private, *, steps=8, dtype=None, seed=0, member=0, members=1
):
    """Train in plain torch, sample by sample, from the key of a state."""
    held, max_norm = np.load(images), 0.8
    x = torch.from_numpy(held["x_train"]).float()[:, None, None]
    y = torch.from_numpy(held["y_train"])
    model = built(images, seed)
    params = list(model.parameters())
    if private:
        own, sizes = streams.of_plan(key, plan), {"sensitivity": max_norm / BATCH}
        sizes["multiplier"] = plan["noise_multiplier"]
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
