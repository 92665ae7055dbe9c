import json
import subprocess
import sys
from pathlib import Path

import pytest

import vgrad
from vgrad.__main__ import main
from vgrad.cli import evaluate

ROOT = Path(__file__).parents[2]
REPORT = {
    "datetime": "2026-01-02T03:04:05",
    "commit_info": {"id": "0123456789abcdef", "dirty": True, "branch": "secret"},
    "machine_info": {"node": "secret-host", "cpu": {"brand_raw": "A processor"}},
    "benchmarks": [
        {
            "group": "per-sample gradients, cpu",
            "params": {"name": name},
            "stats": {"median": seconds, "iqr": 0.001, "rounds": 11},
            "extra_info": {
                "plain_seconds": 0.05,
                "ratio_to_plain": seconds / 0.05,
                "samples_per_second": 64 / seconds,
                "oracle_error": 1e-13,
                "threads": 2,
                "torch": "2.13.0",
            },
        }
        for name, seconds in (("loop", 0.4), ("vgrad", 0.1))
    ],
}


def test_a_table_says_where_it_was_made_and_nothing_of_the_host():
    rows = evaluate.rows(REPORT)
    text = evaluate.markdown(rows)
    made = "2026-01-02, of commit 0123456789ab+: A processor, 2 threads, torch 2.13.0"
    assert made in text
    assert "| loop | 400.0 ms | 50.0 ms | 8.00 | 160 | 1e-13 |" in text
    assert "secret" not in text + json.dumps(rows)


@pytest.mark.parametrize("name", ["loop", 32], ids=["a name", "a size"])
def test_the_table_is_printed_for_each_group(capsys, name):
    named = [{**each, "params": {"name": name}} for each in REPORT["benchmarks"]]
    rows = evaluate.rows({**REPORT, "benchmarks": named})
    assert f"| {name} | 400.0 ms" in evaluate.markdown(rows)
    evaluate._print(rows)
    printed = capsys.readouterr().out
    for text in ("per-sample gradients, cpu", f" {name} ", "400.0 ms"):
        assert text in printed


@pytest.mark.parametrize("command", [["bench"], ["experiment", "jmp"]])
def test_it_needs_a_checkout(monkeypatch, tmp_path, capsys, command):
    monkeypatch.setattr(vgrad, "__file__", str(tmp_path / "vgrad" / "__init__.py"))
    assert main(command) == 2
    assert f"{command[0]}: expected a checkout" in capsys.readouterr().err


def test_experiments_get_their_arguments_wherever_one_stands(monkeypatch, tmp_path):
    ran = []

    def record(command, *, cwd):
        ran.append((command[1:], cwd))
        return subprocess.CompletedProcess(command, 3 * (len(ran) == 2))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", record)
    (tmp_path / "own.npz").touch()
    arguments = ["experiment", "jmp", "private", "--full", "--data", "own.npz"]
    assert main(arguments) == 0
    out, data = str(tmp_path / "runs" / "experiments"), str(tmp_path / "own.npz")
    expected = ["-m", "bench.experiments", "jmp", "private", "--out", out]
    expected += ["--device", "cpu", "--size", "full", "--data", data]
    assert ran == [(expected, ROOT)]
    with pytest.raises(SystemExit) as ended:
        main(["experiment", "jmp", "--data", "digits", "--out", "mine"])
    assert ended.value.code == 3
    expected = ["--out", str(tmp_path / "mine"), "--device", "cpu"]
    assert ran[1][0][2:] == ["jmp", *expected, "--data", "digits"]


@pytest.mark.parametrize("name", ["", "missing/out.json", "."])
def test_it_needs_a_file_to_write_to(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="a file in an existing folder"):
        evaluate.bench(Path(name))


def test_an_unknown_suite_is_named(capsys):
    assert main(["bench", "clipped", "speed"]) == 2
    assert (
        "no suite speed; there are checkpointing, clipped," in capsys.readouterr().err
    )


def test_memory_has_a_column_where_it_was_measured():
    rows = evaluate.rows(REPORT)
    rows[1]["peak_bytes"] = 3 << 20
    text = evaluate.markdown(rows)
    assert "| error | peak memory |" in text
    assert "| 1e-13 |  |\n" in text
    assert "| 1e-13 | 3 MiB |\n" in text


@pytest.mark.slow
def test_every_contender_is_right():
    # The largest problems, which say nothing that the others do not.
    large = "GroupNorm or 256 or gpt or float16 or cuda"
    command = [sys.executable, "-m", "pytest", "bench", "-q", "--benchmark-disable"]
    command += ["-k", f"not ({large})"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
