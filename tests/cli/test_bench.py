"""The commands `bench` and `experiment`, and the tables of benchmarks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import vgrad
from bench import suites
from tests.cli.runs import error
from vgrad.__main__ import main

ROOT = Path(__file__).parents[2]


def measured(*names):
    """Return the figures of a report in which each contender is twice as fast."""
    timed = {
        "group": "per-sample gradients, cpu",
        "stats": {"median": 0.4, "iqr": 0.001, "rounds": 11},
        "extra_info": {
            **{"plain_seconds": 0.05, "ratio_to_plain": 8.0, "samples_per_second": 160},
            **{"oracle_error": 1e-13, "threads": 2, "torch": "2.13.0"},
        },
    }
    report = {
        "datetime": "2026-01-02T03:04:05",
        "commit_info": {"id": "0123456789abcdef", "dirty": True, "branch": "secret"},
        "machine_info": {"node": "secret-host", "cpu": {"brand_raw": "A processor"}},
        "benchmarks": [{**timed, "params": {"name": name}} for name in names],
    }
    return suites.rows(report)


def test_a_table_says_where_it_was_made_and_nothing_of_the_host(capsys):
    rows = measured("loop", 32)
    assert suites.rows(rows) is rows
    text = suites.markdown(rows)
    made = "2026-01-02, of commit 0123456789ab+: A processor, 2 threads, torch 2.13.0"
    assert made in text
    for name in ("loop", "32"):
        assert f"| {name} | 400.0 ms | 50.0 ms | 8.00 | 160 | 1e-13 |" in text
    assert "secret" not in text + json.dumps(rows)
    suites.show(rows)
    printed = capsys.readouterr().out
    for part in ("per-sample gradients, cpu", " loop ", " 32 ", "400.0 ms"):
        assert part in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench", "clipped", "speed"], "no suite speed; there are checkpointing, cl"),
        (["bench", "--out", "missing/out.json"], "a file in an existing folder"),
        (["bench", "--out", "."], "a file in an existing folder"),
        (["bench", "there is no"], "bench: expected a checkout"),
        (["experiment", "jmp"], "experiment: expected a checkout"),
        (["experiment", "jmp", "--device", "teapot"], "--device teapot: expected"),
        (["experiment", "jmp", "--out", __file__], f"--out {__file__}: expected a f"),
    ],
)
def test_refusals(monkeypatch, tmp_path, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    if "checkout" in message:
        monkeypatch.setattr(vgrad, "__file__", str(tmp_path / "vgrad" / "__init__.py"))
    assert message in error(capsys, *argv)


def test_arguments_reach_the_checkout_from_any_folder(monkeypatch, tmp_path):
    commands, statuses = [], iter([0, 3, 0])

    def record(command, *, cwd):
        assert (command[:2], cwd) == ([sys.executable, "-m"], ROOT)
        commands.append(command[2:])
        return subprocess.CompletedProcess(command, next(statuses))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", record)
    (tmp_path / "own.npz").touch()
    argv = ["experiment", "jmp", "private", "--full", "--data", "own.npz"]
    assert main(argv) == 0
    with pytest.raises(SystemExit) as ended:
        main(["experiment", "jmp", "--data", "digits", "--out", "mine"])
    assert ended.value.code == 3
    assert main(["bench", "clipped", "--out", "figures.json"]) == 0
    place = ["--out", str(tmp_path / "runs" / "experiments"), "--device", "cpu"]
    own = ["--size", "full", "--data", str(tmp_path / "own.npz")]
    mine = ["--out", str(tmp_path / "mine"), "--device", "cpu", "--data", "digits"]
    assert commands == [
        ["bench.experiments", "jmp", "private", *place, *own],
        ["bench.experiments", "jmp", *mine],
        ["bench.suites", "clipped", "--out", str(tmp_path / "figures.json")],
    ]


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize(
    "some", ["mlp and not float16", pytest.param("", marks=pytest.mark.large)]
)
def test_every_contender_is_right(some):
    # The largest problems behave as the others do.
    large = "GroupNorm or 256 or gpt or float16 or cuda"
    command = [sys.executable, "-m", "pytest", "bench", "-q", "--benchmark-disable"]
    command += ["-k", some or f"not ({large})"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
