"""The tables of benchmarks, and their contenders."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import suites

ROOT = Path(__file__).parents[1]


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
