"""The tests and timings of a GPU: `make gpu PART=1`, or `python -m bench.gpu 1`.

1. the tests that are marked `cuda`;
2. the clipped sum of the nets that are timed, and of those of full size: plain SGD,
   `vmap(grad)` with a plain clip, vgrad eager, replayed, as CUDA graphs and, where time
   is left, through Inductor; in float32, with TF32 matmuls and under autocast;
3. whole private steps, noise, optimizers and ensembles.

A part ends after `--seconds`, by default less than four minutes. Every row is written
as it is measured, to `bench/results/DEVICE/`, and the next call goes on with the rows
that are missing. A contender that raises, or differs from the float64 loop, is a row
with the reason. Torch, numpy, safetensors and pytest are all that it needs. With
`--device cpu --quick` the same code runs on small nets, for its test.
"""

import argparse
import copy
import gc
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bench import steps, test_ensemble, test_optim, test_per_sample
from bench.compiling import COMPILED, PLAIN, Compiled
from bench.contenders import CLIPPED, MAX_NORM, Contender, Grads, plain
from bench.measure import DTYPES, sync
from bench.models import FULL_SIZE, SETTINGS, STEP_BY_STEP, TIMED, Problem
from tests import oracle

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
SECONDS = 220.0
"""How long a part runs, so that it ends within four minutes."""

FEWEST, MOST = 3, 50
"""Rounds of a race."""

LONG = 60.0
"""Seconds that a contender may take to build once time is up; it is refused then."""

ALLOWED = {"float32": 1e-4, "tf32": 1e-3, "bfloat16": 1e-2}
"""Relative distance to the float64 loop, if twice the distance of SGD is not more."""

OF_SGD = 0.15
"""The same of plain SGD, by whatever torch rounds: cuDNN float32 to TF32, for one."""

SGD = "plain SGD"
EAGER = {SGD: Contender(plain, clips=False)} | {
    n: CLIPPED[n] for n in ("vmap", "vgrad")
}
REPLAYED = ("vgrad-replay", "vgrad-cudagraph")
BUILT = (PLAIN, "vgrad-inductor")

Row = dict[str, Any]


class OutOfTime(BaseException):
    """Raised where the time of a part ends; no `except Exception` may take it."""


class Results:
    """Rows by their keys, in a JSON file that is whole at any moment."""

    def __init__(self, folder: Path, name: str, about: Row) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.json"
        self.rows: dict[str, Row] = {}
        if self.path.exists():
            self.rows = json.loads(self.path.read_text())["rows"]
        self.about = about

    def add(self, key: str, row: Row) -> None:
        """Keep a row, which has taken seconds to measure."""
        self.rows[key] = {**row, "commit": self.about["commit"]}
        self.write()
        said = (
            row.get("refused") or f"{row['ratio']:.2f}, {1e3 * row['seconds']:.3f} ms"
        )
        print(f"{key}: {said}", flush=True)

    def misses(self, key: str) -> bool:
        """Return whether a row is to be measured; another commit may not refuse it."""
        row = self.rows.get(key)
        if row is None:
            return True
        return "refused" in row and row["commit"] != self.about["commit"]

    def write(self) -> None:
        text = json.dumps({"about": self.about, "rows": self.rows}, indent=1)
        part = self.path.with_suffix(".part")
        part.write_text(text + "\n")
        os.replace(part, self.path)


class Prepared(NamedTuple):
    """A run, and its error against the float64 loop, which may be `allowed`."""

    run: Callable[[], Any]
    error: float
    allowed: float


@dataclass(frozen=True)
class Race:
    """Contenders that do the same thing, timed in turns.

    Attributes:
        section: the table.
        case: the line of the table.
        builds: what makes each contender, by name; times are divided by the first's.
        numbers: how many numbers a run makes, where the time of one is of interest.
    """

    section: str
    case: str
    builds: dict[str, Callable[[], Prepared]]
    numbers: int | None = None

    @property
    def baseline(self) -> str:
        return next(iter(self.builds))


class Options(NamedTuple):
    """Where and on which nets a part runs; `quick` takes small ones."""

    device: str
    quick: bool
    nets: tuple[str, ...]


def main() -> None:
    """Run a part, or go on with it."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("part", type=int, choices=(1, 2, 3))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small nets, few rounds")
    parser.add_argument("--nets", nargs="+", choices=SETTINGS, default=None)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench.gpu: torch sees no CUDA device here")
    about = described(arguments.device)
    folder = arguments.out / re.sub(r"\W+", "_", about["device"]).lower().strip("_")
    names = {1: "tests", 2: "clipped_on_gpu", 3: "steps_on_gpu"}
    results = Results(folder, names[arguments.part], about)
    end = time.monotonic() + arguments.seconds
    try:
        if arguments.part == 1:
            run_tests(results, end)
        else:
            options = Options(
                arguments.device,
                arguments.quick,
                tuple(arguments.nets or (*TIMED, *FULL_SIZE)),
            )
            races = clipped_sums if arguments.part == 2 else others
            warnings.simplefilter("ignore")
            with alarm(arguments.seconds):
                for race in races(options):
                    run_race(race, results, options, end)
            print("complete")
    except OutOfTime:
        print("the time is up: call again for the rest")
    finally:
        results.write()
        text = tests_as_text if arguments.part == 1 else tables
        results.path.with_suffix(".md").write_text(text(results))


def described(device: str) -> Row:
    """Return what a reader of the results has to know of machine and versions."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    cuda = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "cudnn_conv_fp32_precision": torch.backends.cudnn.conv.fp32_precision,
        "python": sys.version.split()[0],
        "commit": done.stdout.strip() or "not known",
        "date": date.today().isoformat(),
    }


class alarm:
    """Raise `OutOfTime` in the main thread after some seconds, whatever runs there."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        def end(*_: Any) -> None:
            raise OutOfTime

        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run_race(race: Race, results: Results, options: Options, end: float) -> None:
    """Build the contenders that have no row yet, time them in turns, keep the rows."""

    def key(name: str) -> str:
        return f"{race.section}, {race.case}, {name}"

    missing = [name for name in race.builds if results.misses(key(name))]
    if not missing:
        return
    ready: dict[str, Prepared] = {}
    rows: dict[str, Row] = {}
    for name in dict.fromkeys((race.baseline, *missing)):
        place = {"section": race.section, "case": race.case, "contender": name}
        before = allocated(options.device)
        start = time.monotonic()
        try:
            prepared = race.builds[name]()
            if not prepared.error <= prepared.allowed:
                raise ArithmeticError(f"wrong: relative error {prepared.error:.2g}")
            prepared.run()
            sync(options.device)
        except OutOfTime:
            took = time.monotonic() - start
            if took > LONG:
                why = f"not built within {took:.0f} s"
                results.add(key(name), {**place, "refused": why})
            raise
        except Exception as raised:
            first = (str(raised).strip().splitlines() or [""])[0]
            why = f"{type(raised).__name__}: {first[:200]}"
            results.add(key(name), {**place, "refused": why})
            if name == race.baseline:
                return
            if "CUDA error" in why or "device-side" in why:
                sys.exit("bench.gpu: the device is lost to this process; call again")
            continue
        ready[name] = prepared
        rows[name] = place | {
            "error": prepared.error,
            "build_seconds": time.monotonic() - start,
        }
        if name != race.baseline:  # that one made the batch
            rows[name]["held_bytes"] = allocated(options.device) - before
    if not set(missing) & set(ready):
        return
    seconds = 0.2 if options.quick else min(0.5, max(0.3, end - time.monotonic()))
    runs = {name: contender.run for name, contender in ready.items()}
    for name, times in timed(runs, options.device, seconds).items():
        row = rows[name] | times
        if options.device == "cuda":
            row["peak_bytes"] = peak(runs[name])
        if race.numbers is not None:
            row["ns_per_number"] = 1e9 * row["seconds"] / race.numbers
        row["baseline"] = race.baseline
        if name in missing:
            results.add(key(name), row)
    ready.clear()
    runs.clear()
    release(options.device)


def timed(
    runs: dict[str, Callable[[], Any]], device: str, seconds: float
) -> dict[str, Row]:
    """Return the median seconds of whole calls, one contender after the other in turn.

    `host_seconds` is how long the host was busy with the call. As many rounds as take
    some seconds for each contender.
    """
    calls = {name: [] for name in runs}
    host = {name: [] for name in runs}

    def one_round() -> None:
        for name, run in runs.items():
            sync(device)
            start = time.perf_counter()
            run()
            host[name].append(time.perf_counter() - start)
            sync(device)
            calls[name].append(time.perf_counter() - start)

    one_round()
    once = sum(spent[-1] for spent in calls.values())
    rounds = max(FEWEST, min(MOST, int(seconds * len(runs) / once)))
    for spent in (*calls.values(), *host.values()):
        spent.clear()
    for _ in range(rounds):
        one_round()
    medians = {name: statistics.median(spent) for name, spent in calls.items()}
    base = next(iter(medians.values()))
    figures = {}
    for name, spent in calls.items():
        low, _, high = statistics.quantiles(spent, n=4)
        figures[name] = {
            "seconds": medians[name],
            "iqr_seconds": high - low,
            "host_seconds": statistics.median(host[name]),
            "baseline_seconds": base,
            "ratio": medians[name] / base,
            "rounds": rounds,
        }
    return figures


def peak(run: Callable[[], Any]) -> int:
    """Return the bytes that a call needs above those that are held before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def release(device: str) -> None:
    """Give memory back, and what Dynamo has compiled."""
    torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


class Net:
    """A setting on a device, with the float64 loop over its batch."""

    def __init__(self, name: str, options: Options) -> None:
        self.setting, self.device = SETTINGS[name], options.device
        self.small = options.quick
        self.samples = 4 if options.quick else self.setting.samples
        self.of_sgd: dict[str, float] = {}  # its distance, by precision

    @cached_property
    def problem(self) -> Problem:
        return self._problem(torch.float32)

    @cached_property
    def exact(self) -> dict[bool, Grads]:
        """Clipped sum (True) and mean gradient (False), in float64."""
        problem = self._problem(torch.float64)
        params = dict(problem.model.named_parameters())
        sums = {
            clips: {name: torch.zeros_like(param) for name, param in params.items()}
            for clips in (True, False)
        }
        x, y = problem.batch
        for row in range(len(x)):
            loss = problem.mean_loss(problem.model(x[row, None]), y[row, None])
            grads = torch.autograd.grad(loss, list(params.values()))
            norm = torch.stack([g.norm() for g in grads]).norm()
            factor = (MAX_NORM / norm).clamp(max=1)
            for name, grad in zip(params, grads, strict=True):
                sums[True][name].add_(grad * factor)
                sums[False][name].add_(grad, alpha=1 / len(x))
        return sums

    def prepare(self, contender: Contender, precision: str) -> Prepared:
        """Build a contender, and compare it with the loop on the whole batch."""
        model = copy.deepcopy(self.problem.model)  # contenders may change it
        run = contender.build(replace(self.problem, model=model))
        inside = in_precision(run, self.device, precision)
        inside(*self.problem.batch)
        refuse_eager(run)
        result = inside(*self.problem.batch)  # what is captured runs the second time
        expected = self.exact[contender.clips]
        error = distance(result, expected)
        if contender.clips:
            allowed = max(ALLOWED[precision], 2 * self.of_sgd[precision])
        else:
            allowed = OF_SGD
            self.of_sgd.setdefault(precision, error)
        return Prepared(partial(inside, *self.problem.batch), error, allowed)

    def _problem(self, dtype: torch.dtype) -> Problem:
        return self.setting.problem(self.device, dtype, self.samples, small=self.small)


def in_precision(
    run: Callable[..., Any], device: str, precision: str
) -> Callable[..., Any]:
    """Run in "float32", in "tf32" (matmuls too), or under torch's autocast."""

    def inside(*args: Any) -> Any:
        before = torch.get_float32_matmul_precision()
        low = DTYPES.get(precision)
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        try:
            with torch.autocast(device, dtype=low, enabled=low is not None):
                return run(*args)
        finally:
            torch.set_float32_matmul_precision(before)

    return inside


def refuse_eager(run: Any) -> None:
    """Raise where a call that should be captured ran in eager mode."""
    if isinstance(run, Compiled):
        reports = run.source.reports()
        eager = [report.why for report in reports if report.backend == "eager"]
        if eager or not reports:
            raise RuntimeError(f"not captured: {' '.join(eager)}")


def distance(result: Grads, expected: Grads) -> float:
    """Return the norm of the difference over the norm of the expected gradients."""

    def norm(values: list[torch.Tensor]) -> float:
        return math.hypot(*(float(value.norm()) for value in values))

    difference = [result[n].detach().double() - value for n, value in expected.items()]
    return norm(difference) / norm(list(expected.values()))


def clipped_sums(options: Options) -> Iterator[Race]:
    """Yield the races of part 2, those that take minutes to build at the end."""
    names = [name for name in TIMED if name in options.nets]
    names.sort(key=lambda name: name in STEP_BY_STEP)
    full = [n for n in FULL_SIZE if n in options.nets and options.device == "cuda"]
    replayed = REPLAYED if options.device == "cuda" else REPLAYED[:1]
    eager = EAGER | {name: COMPILED[name] for name in replayed}
    for name in (*names, *full):
        yield from _of_a_net(name, options, eager, tuple(ALLOWED))
    if options.quick:
        return
    built = {SGD: EAGER[SGD]} | {name: COMPILED[name] for name in BUILT}
    for precision in ("float32", "bfloat16"):
        for name in names:
            if name not in STEP_BY_STEP:
                yield from _of_a_net(name, options, built, (precision,))


def _of_a_net(
    name: str,
    options: Options,
    contenders: dict[str, Contender],
    precisions: tuple[str, ...],
) -> Iterator[Race]:
    net = Net(name, options)
    for precision in precisions:
        builds = {
            key: partial(net.prepare, contender, precision)
            for key, contender in contenders.items()
        }
        yield Race(f"clipped sum, {precision}", name, builds)


def others(options: Options) -> Iterator[Race]:
    """Yield the races of part 3."""
    yield noise(options)
    for name in TIMED:
        if name in options.nets:
            yield private_steps(name, options)
    for shapes in test_optim.SHAPES:
        for optimizer in ("sgd", "adamw"):
            yield optimizer_steps(shapes, optimizer, options)
    nets = test_ensemble.SETTINGS if not options.quick else test_ensemble.SMALL
    for members in (10, 100):
        for net in nets:
            if members == 10 or net in test_ensemble.SMALL:
                yield ensemble_steps(net, 2 if options.quick else members, options)


def noise(options: Options) -> Race:
    """Make the race for normal numbers, as many as a network has parameters."""
    setting = test_per_sample.Setting(options.device, torch.float32, 2)
    numbers = sum(param.numel() for param in setting.params.values())

    def prepare(build: Callable[..., Callable[[], Grads]]) -> Prepared:
        run = build(setting)
        drawn = torch.cat([value.flatten() for value in run().values()]).double()
        return Prepared(run, float(abs(drawn.std() - 1)), 5 / numbers**0.5)

    builds = {
        name: partial(prepare, build) for name, build in test_per_sample.NOISE.items()
    }
    return Race("noise", f"{numbers:,} numbers", builds, numbers)


DRAWS = 6
"""Poisson batches that private steps run on in turn."""


def private_steps(name: str, options: Options) -> Race:
    """Make the race of whole private steps: clipped sum, noise and SGD."""
    setting = SETTINGS[name]
    samples = 4 if options.quick else setting.samples
    make = partial(steps.Task.of, setting, options.device)
    names = ["vgrad", "vgrad-replay"]
    if options.device == "cuda":
        names.append("vgrad-cudagraph")

    def prepare(build: Callable[[steps.Task], steps.Stepper], ours: bool) -> Prepared:
        error = 0.0
        if ours:
            small = make(torch.float64, 4, small=True)
            stepper = build(small)
            for batch in small.draws[:2]:
                stepper.step(*batch)
            refuse_eager(stepper.step)
            result = steps.moved(small, stepper.params())
            error = oracle.error(result, steps.expected(small, 2))
        task = make(torch.float32, samples, small=options.quick)
        stepper = build(task)
        batches = task.draws[:DRAWS] if build is not steps.sgd else [task.fixed]
        for batch in batches:
            stepper.step(*batch)
        refuse_eager(stepper.step)
        turn = itertools.cycle(batches)
        return Prepared(lambda: stepper.step(*next(turn)), error, 1e-8)

    builds = {
        SGD: partial(prepare, steps.sgd, False),
        "vmap": partial(prepare, steps.by_hand, False),
        **{key: partial(prepare, steps.STEPS[key], True) for key in names},
    }
    return Race("private step", name, builds)


def optimizer_steps(shapes: str, optimizer: str, options: Options) -> Race:
    """Make the race of optimizer steps on parameters of some shapes."""
    problem = test_optim.problem(shapes, options.device, options.quick)

    def prepare(name: str) -> Prepared:
        stepper = test_optim.CONTENDERS[name](optimizer, problem, "inductor")
        expected = test_optim.PLAIN(optimizer, problem, "inductor")
        for _ in range(test_optim.CHECKED_STEPS):
            stepper.step()
            expected.step()
        error = test_optim.difference(
            stepper.params(), expected.params(), problem.params
        )
        return Prepared(stepper.step, error, test_optim.CLOSE)

    names = ["torch loop", "torch foreach", "torch fused", "vgrad eager"]
    names += ["vgrad donated"]
    if not options.quick and shapes != test_optim.UNCOMPILED:
        names.append("vgrad compiled")
    builds = {name: partial(prepare, name) for name in names}
    return Race(f"{optimizer} step", shapes, builds)


def ensemble_steps(net: str, members: int, options: Options) -> Race:
    """Make the race of training steps of stacked members."""
    kind = "training step"

    def prepare(name: str) -> Prepared:
        error = 0.0
        if name != "loop":
            error = test_ensemble.checked(kind, name, net, options.device)
        run = test_ensemble.prepared(kind, name, net, members, options.device)
        return Prepared(run, error, 1e-8)

    names = ("loop", "vmap", "vgrad", "vgrad-replay")
    builds = {name: partial(prepare, name) for name in names}
    return Race(f"ensemble, training step, {members} members", net, builds)


class Recorder:
    """A plugin of pytest that keeps the outcome of each test, and ends in time."""

    def __init__(self, results: Results, end: float) -> None:
        self.results, self.end = results, end
        self.session: Any = None

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Leave out what has passed before."""
        rows = self.results.rows
        pending = [
            item
            for item in items
            if rows.get(item.nodeid, {}).get("outcome") != "passed"
        ]
        config.hook.pytest_deselected(
            items=[item for item in items if item not in pending]
        )
        items[:] = pending

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._keep(report, 0.0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._keep(report, report.duration)
        if time.monotonic() > self.end:
            self.session.shouldstop = "the time is up"

    def _keep(self, report: Any, seconds: float) -> None:
        row = {"outcome": report.outcome, "seconds": round(seconds, 3)}
        if report.skipped:
            row["why"] = str(report.longrepr[-1])
        elif report.failed:
            row["why"] = str(report.longrepr)[-2000:]
            missing = re.search(r"ModuleNotFoundError: (.*)", row["why"])
            if missing:
                row |= {"outcome": "skipped", "why": missing[1]}
        self.results.rows[report.nodeid] = row | {
            "commit": self.results.about["commit"]
        }
        self.results.write()


def run_tests(results: Results, end: float) -> None:
    """Run the tests marked `cuda` that have not passed yet."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(r"mark\.cuda|\bDEVICES\b", path.read_text())
    ]
    for file in files:
        results.rows.pop(file, None)  # it may be imported now
    arguments = ["-m", "cuda", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    arguments += ["--continue-on-collection-errors", "--tb=short", *files]
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        pytest.main(arguments, plugins=[Recorder(results, end)])
    finally:
        os.chdir(before)


def tests_as_text(results: Results) -> str:
    """Return how many tests passed, why some were skipped, and those that failed."""
    rows = results.rows
    outcomes = Counter(row["outcome"] for row in rows.values())
    counted = [f"{outcomes[n]} {n}" for n in ("passed", "failed", "skipped")]
    lines = [_heading(results, 1), "", ", ".join(counted) + "."]
    skipped = Counter(r["why"] for r in rows.values() if r["outcome"] == "skipped")
    failed = {n: r["why"] for n, r in rows.items() if r["outcome"] == "failed"}
    lines += ["", *(f"* {number} skipped: {why}" for why, number in skipped.items())]
    for name, why in failed.items():
        said = [line for line in why.splitlines() if line.startswith("E ")]
        lines.append(f"* `{name}`: {' '.join(said[:2] or why.splitlines()[-1:])}")
    return "\n".join(lines) + "\n"


def tables(results: Results) -> str:
    """Return a table for each section, of ratios to its first contender, and refusals.

    The last line has geometric means, and of how many cases they are.
    """
    lines = [_heading(results, 2 if "clipped" in results.path.name else 3)]
    lines[0] += (
        " The second number of a cell is peak memory over the first contender's."
    )
    rows = list(results.rows.values())
    for section in dict.fromkeys(row["section"] for row in rows):
        chosen = [row for row in rows if row["section"] == section]
        measured = {(r["case"], r["contender"]): r for r in chosen if "ratio" in r}
        names = list(dict.fromkeys(row["contender"] for row in chosen))
        base, *others = names
        head = ["case", f"{base}, ms", *others]
        lines += ["", f"**{section}**, time over {base}", "", _line(head)]
        lines += ["|" + " --- |" * len(head)]
        for case in dict.fromkeys(row["case"] for row in chosen):
            first = measured.get((case, base))
            cells = [case, f"{1e3 * first['seconds']:.3g}" if first else "refused"]
            for name in others:
                row = measured.get((case, name))
                cells.append(_cell(row, first) if row else "")
            lines.append(_line(cells))
        means = ["**geometric mean**", ""]
        for name in others:
            ratios = [r["ratio"] for (_, n), r in measured.items() if n == name]
            means.append(f"{_mean(ratios):.2f} ({len(ratios)})" if ratios else "")
        lines.append(_line(means))
    refused = [row for row in rows if "refused" in row]
    if refused:
        lines += ["", "Refused:", ""]
    for row in refused:
        place = f"{row['section']}, {row['case']}, {row['contender']}"
        lines.append(f"* {place}: {row['refused'].replace('|', '/')}")
    return "\n".join(lines) + "\n"


def _heading(results: Results, part: int) -> str:
    about = results.about
    commits = {row["commit"] for row in results.rows.values()} or {about["commit"]}
    return (
        f"Made by `make gpu PART={part}` on {about['date']}, commit "
        f"{', '.join(sorted(commits))}: "
        f"{about['device']}, torch {about['torch']}, CUDA {about['cuda']}, "
        f"Python {about['python']}."
    )


def _cell(row: Row, base: Row | None) -> str:
    text = f"{row['ratio']:.2f}"
    if "ns_per_number" in row:
        return f"{text}; {row['ns_per_number']:.2f} ns a number"
    if base and base.get("peak_bytes") and "peak_bytes" in row:
        text += f"; {row['peak_bytes'] / base['peak_bytes']:.2f}"
    return text


def _mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
