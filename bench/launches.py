"""What a GPU would have to do: `make launches`, `python -m bench.launches [NET ...]`.

On the pretend accelerator of the tests every launch, wait and copy of a call is
counted, for plain SGD, `vmap(grad)` with a plain clip, and vgrad, eager and replayed;
clipped sums, and whole private steps over steps of SGD. From shapes and dtypes follow
FLOPs and bytes, and from these the time on some GPUs (`modelled.py`). Of compiled calls
the kernels are counted that Inductor would make for a GPU (`kernels.py`).

The counts are exact for the installed torch and do not depend on the machine. They are
kept in `results/launches.json`, with tables and a picture beside it; nets that are not
named keep their rows. `tests/accelerator/test_launches.py` compares later counts.

A private step is the mean of those that one draw of noise serves: a small model's noise
is drawn for several steps. An op is one launch. Attention is the sum of its parts, for
all alike, where a GPU has one kernel.
"""

import argparse
import json
import math
import multiprocessing
import os
import subprocess
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bench import modelled, steps
from bench.compiling import COMPILED, PLAIN
from bench.contenders import CLIPPED, plain
from bench.kernels import kernels
from bench.models import COUNTED, SETTINGS, STEP_BY_STEP
from vgrad.dp import noise

ROOT = Path(__file__).parent.parent
FILE = ROOT / "bench/results/launches.json"
DEVICE = "pretend"

PRECISIONS = ("float32", "float32, TF32", "bfloat16", "bfloat16, TF32")
"""Float32 or autocast; TF32 for matmuls too, or as torch's default on CUDA for
convolutions alone."""

SGD, VMAP, EAGER, REPLAY = "sgd", "vmap", "vgrad", "vgrad replay"
SGD_STEP, STEP, STEP_REPLAY = "sgd step", "private step", "private step replay"
CALLS = {
    SGD: plain,
    VMAP: CLIPPED["vmap"].build,
    EAGER: CLIPPED["vgrad"].build,
    REPLAY: COMPILED["vgrad-replay"].build,
}
STEPS = {
    SGD_STEP: steps.sgd,
    STEP: steps.in_vgrad(None),
    STEP_REPLAY: steps.in_vgrad("replay"),
}

KERNELS = "kernels"
"""The kernels of compiled calls, beside the calls that are counted on the device."""

PLAIN_TORCH = (SGD, VMAP, SGD_STEP)
"""The calls that no change of vgrad can change."""

WITH_TF32 = (SGD, VMAP, EAGER)
"""What is counted with TF32 for matmuls too; the others repeat it."""


@contextmanager
def precision(name: str, device: str) -> Iterator[None]:
    """Compute in a precision, with torch's switches as they are on CUDA.

    The pretend device has those of the CPU.
    """
    matmul = "tf32" if name.endswith("TF32") else "ieee"
    backends: Any = torch.backends
    switches = (backends.mkldnn.conv, "tf32"), (backends.mkldnn.matmul, matmul)
    before = [switch.fp32_precision for switch, _ in switches]
    for switch, value in switches:
        switch.fp32_precision = value
    low = name.startswith("bfloat16")
    try:
        with torch.autocast(device, torch.bfloat16, enabled=low):
            yield
    finally:
        for (switch, _), value in zip(switches, before, strict=True):
            switch.fp32_precision = value


def builds(net: str) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """Yield what is counted of a net, and what makes its run."""
    setting = SETTINGS[net]

    def call(build: Any) -> Callable[[], Any]:
        problem = setting.problem(DEVICE, torch.float32, setting.samples)
        run = build(problem)
        return lambda: run(*problem.batch)

    def step(build: Any) -> Callable[[], Any]:
        task = steps.Task.of(setting, DEVICE, torch.float32, setting.samples)
        stepper, batch = build(task), task.fixed
        return lambda: stepper.step(*batch)

    for name, build in CALLS.items():
        yield name, lambda build=build: call(build)
    for name, build in STEPS.items():
        yield name, lambda build=build: step(build)


def count(
    net: str,
    precisions: Sequence[str] = PRECISIONS,
    names: Collection[str] = (*CALLS, *STEPS),
) -> dict[str, Any]:
    """Count the calls and steps of a net, {precision: {call: row}}.

    The process must have the device, and enough memory of it.
    """
    results: dict[str, Any] = {kind: {} for kind in precisions}
    for name, build in builds(net):
        if name not in names:
            continue
        seen: dict[str, Any] = {}
        for kind in precisions:
            ops, tf32 = kind, kind.endswith("TF32")
            if tf32 and name not in WITH_TF32:
                continue
            if name in PLAIN_TORCH:  # of which the switch changes no op
                ops = kind.removesuffix(", TF32")
            if ops not in seen:
                of = drawn_together(net) if name in (STEP, STEP_REPLAY) else 1
                warm = name not in (SGD, VMAP)
                seen[ops] = _counts(build, ops, warm=warm, steps=min(of, 2))
            counts = seen[ops]
            if isinstance(counts, str):
                results[kind][name] = {"refused": counts}
                continue
            rows = [_row(launched, tf32) for launched in counts]
            results[kind][name] = _mean(rows[0], rows[-1], of)
    return results


def drawn_together(net: str) -> int:
    """Return how many private steps of a net one draw of noise serves."""
    params = SETTINGS[net].problem("meta", torch.float32, 1).model.parameters()
    tiles = sum(math.ceil(param.numel() / noise.TILE) for param in params)
    return max(1, noise.ON_DEVICE // (noise.TILE * tiles))


def _row(counts: Any, tf32: bool) -> dict[str, Any]:
    events = [event for event in counts.events if event.kind == "launch"]
    return {
        "launches": counts.launches,
        "waits": counts.waits,
        "to_host": counts.to_host,
        "to_device": counts.to_device,
        **modelled.modelled(events, tf32=tf32),
    }


def _mean(first: Any, other: Any, of: int) -> Any:
    """Return the mean of one step that draws noise and `of - 1` others."""
    if isinstance(first, dict):
        return {key: _mean(first[key], other.get(key, 0), of) for key in first}
    mean = (first + (of - 1) * other) / of
    return mean if isinstance(first, float) else math.ceil(mean)


def _counts(
    build: Callable[[], Callable[[], Any]], kind: str, *, warm: bool, steps: int
) -> Any:
    """Return the counts of each of some calls, or the reason why one is refused.

    A call before it, where `warm`, captures a graph and fills caches.
    """
    from tests.accelerator import device

    with precision(kind, DEVICE):
        try:
            run = build()
            first = device.count(run, warm=int(warm))
            return [first, *(device.count(run, warm=0) for _ in range(steps - 1))]
        except Exception as raised:
            first = (str(raised).splitlines() or [""])[0]
            return f"{type(raised).__name__}: {first[:160]}"


def count_kernels(net: str) -> dict[str, Any]:
    """Count the kernels of the compiled sums of a net, {precision: {call: row}}."""
    setting = SETTINGS[net]
    problem = setting.problem(DEVICE, torch.float32, setting.samples)
    results: dict[str, Any] = {}
    for kind in PRECISIONS[::2]:
        low = kind.startswith("bfloat16")
        rows = results[kind] = {}
        for name, contender in ((SGD, PLAIN), (EAGER, "vgrad-inductor")):
            run = COMPILED[contender].build(problem)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=low):
                kernel_count = kernels(lambda run=run: run(*problem.batch))
                rows[name] = {"kernels": kernel_count}
    return results


def main() -> None:
    """Count the named nets, or all; rows that are not counted again are kept."""
    parser = argparse.ArgumentParser(prog="python -m bench.launches")
    parser.add_argument("nets", nargs="*", metavar="NET", help="all by default")
    parser.add_argument("--out", type=Path, default=FILE)
    everything = (*CALLS, *STEPS, KERNELS)
    parser.add_argument("--calls", nargs="+", choices=everything, default=everything)
    arguments = parser.parse_args()
    earlier = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    counts, compiled = earlier.get("counts", {}), earlier.get("kernels", {})
    commits = earlier.get("commits", {})
    names = [name for name in arguments.calls if name != KERNELS]
    # The device changes torch for a whole process, which is not this one.
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, _register) as on_the_device:
        for net in arguments.nets or COUNTED:
            results = on_the_device.apply(_with_memory, (count, net, PRECISIONS, names))
            for kind, of_kind in results.items():
                rows = counts.setdefault(net, {})
                merged = rows.get(kind, {}) | of_kind
                rows[kind] = {n: merged[n] for n in (*CALLS, *STEPS) if n in merged}
            if KERNELS in arguments.calls and net not in STEP_BY_STEP:
                compiled[net] = on_the_device.apply(_with_memory, (count_kernels, net))
            commits[net] = commit()
            write(arguments.out, counts, compiled, commits)
            print(net, flush=True)


def commit() -> str:
    """Return the commit that is checked out."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def write(
    path: Path,
    counts: dict[str, Any],
    compiled: dict[str, Any],
    commits: dict[str, str],
) -> None:
    """Write the file, the tables and the picture, whole at any moment."""
    report = {
        "about": {
            "torch": torch.__version__.partition("+")[0],
            "date": date.today().isoformat(),
            "flops_per_second": modelled.GPUS,
            "bytes_per_second": modelled.BYTES,
            "share": modelled.SHARE,
            "formula": "sum over ops of max(FLOPs / rate, bytes / bandwidth) / share",
        },
        "commits": {net: commits[net] for net in COUNTED if net in commits},
        "counts": {net: counts[net] for net in COUNTED if net in counts},
        "kernels": {net: compiled[net] for net in COUNTED if net in compiled},
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(part, path)
    from bench import launch_tables

    path.with_suffix(".md").write_text(launch_tables.markdown(report))
    if path == FILE:
        for page in launch_tables.PAGES:
            page.write_text(launch_tables.filled(page.read_text(), report))
    launch_tables.draw(report).savefig(path.with_suffix(".png"), dpi=120)


def _register() -> None:
    from tests.accelerator import device

    warnings.simplefilter("ignore")  # of vmap's fallbacks
    device.register()


def _with_memory(function: Callable[..., Any], *arguments: Any) -> Any:
    from tests.accelerator import device

    with device.capacity(2**40):
        return function(*arguments)


if __name__ == "__main__":
    main()
