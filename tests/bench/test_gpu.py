"""The tests and timings of a GPU, on a CPU and on small nets."""

import json
import subprocess
import sys

import pytest
import torch

from bench import gpu
from bench.contenders import CLIPPED, Contender, vgrad_clipped


def run(monkeypatch, folder, part, *arguments):
    argv = ["gpu", str(part), "--device", "cpu", "--quick", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", [*argv, "--nets", "tiny-32", *arguments])
    gpu.main()
    (path,) = (folder / "cpu").glob("*.json")
    return json.loads(path.read_text())["rows"], path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_each_contender_is_checked_and_timed_once(monkeypatch, tmp_path, capsys):
    rows, text = run(monkeypatch, tmp_path, 2)
    names = ("plain SGD", "vmap", "vgrad", "vgrad-replay")
    assert list(rows) == [
        f"clipped sum, {precision}, tiny-32, {name}"
        for precision in ("float32", "tf32", "bfloat16")
        for name in names
    ]
    for row in rows.values():
        assert 0 < row["error"] < gpu.OF_SGD
        ratio = row["seconds"] / row["baseline_seconds"]
        assert row["ratio"] == pytest.approx(ratio)
    assert rows["clipped sum, float32, tiny-32, vgrad"]["error"] < 1e-5
    assert rows["clipped sum, bfloat16, tiny-32, vgrad"]["error"] > 1e-4
    assert "| case | plain SGD, ms | vmap | vgrad | vgrad-replay |" in text
    capsys.readouterr()
    again, _ = run(monkeypatch, tmp_path, 2)
    assert again == rows
    assert capsys.readouterr().out == "complete\n"


def test_who_raises_or_is_wrong_is_refused_and_the_run_goes_on(monkeypatch, tmp_path):
    def broken(problem):
        raise RuntimeError("no | kernel\nhere")

    def wrong(problem):
        compute = vgrad_clipped(problem)
        return lambda x, y: {n: 1.1 * each for n, each in compute(x, y).items()}

    own = gpu.EAGER | {"broken": Contender(broken), "wrong": Contender(wrong)}
    monkeypatch.setattr(gpu, "EAGER", own)
    rows, text = run(monkeypatch, tmp_path, 2)
    place = "clipped sum, float32, tiny-32"
    refused = rows[f"{place}, broken"]["refused"], rows[f"{place}, wrong"]["refused"]
    assert refused[0] == "RuntimeError: no | kernel"
    assert refused[1].startswith("ArithmeticError: wrong: relative error 0.1")
    assert "ratio" in rows[f"{place}, vgrad"]
    assert f"* {place}, broken: RuntimeError: no / kernel" in text
    # Another commit may not refuse them.
    results = gpu.Results(tmp_path / "cpu", "clipped_on_gpu", {"commit": "another"})
    assert results.misses(f"{place}, wrong")
    assert not results.misses(f"{place}, vgrad")


def test_what_is_measured_stays_when_the_time_is_up(monkeypatch, tmp_path, capsys):
    def slow(problem):
        while True:
            try:
                torch.ones(100).sum()
            except Exception:
                continue

    own = {**gpu.EAGER, "vmap": Contender(slow), "vgrad": CLIPPED["vgrad"]}
    monkeypatch.setattr(gpu, "EAGER", own)
    rows, _ = run(monkeypatch, tmp_path, 2, "--seconds", "1")
    assert rows == {}
    assert "call again for the rest" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "LONG", 0.5)
    rows, _ = run(monkeypatch, tmp_path, 2, "--seconds", "1")
    (row,) = rows.values()
    assert row["refused"] == "not built within 1 s"


@pytest.mark.slow
def test_steps_noise_optimizers_and_ensembles_are_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(
        gpu.test_optim, "SHAPES", {"resnet-50": gpu.test_optim.resnet()}
    )
    rows, text = run(monkeypatch, tmp_path, 3)
    assert not [row for row in rows.values() if "refused" in row]
    assert rows["private step, tiny-32, vgrad"]["error"] < 1e-8
    assert rows["noise, 1,199,882 numbers, vgrad"]["ns_per_number"] > 0
    for section in ("private step", "noise", "adamw step", "ensemble, training step"):
        assert f"**{section}" in text


@pytest.mark.slow
def test_tests_that_passed_are_not_run_again(tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_some.py").write_text(
        """import pytest
pytestmark = pytest.mark.cuda
def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip("needs two GPUs")
def test_skipped(): pass
"""
    )
    (tests / "test_other.py").write_text("import not_there  # mark.cuda")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda: needs a GPU")
    script = f"""
import sys, time
from pathlib import Path
from bench import gpu
gpu.ROOT = Path({str(tmp_path)!r})
results = gpu.Results(gpu.ROOT, "tests", dict(device="cpu", commit="c", date="d",
                      torch="t", cuda=None, python="p"))
gpu.run_tests(results, time.monotonic() + 100)
print(gpu.tests_as_text(results))
"""
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, cwd=gpu.ROOT)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    for text in found:
        assert "1 passed, 1 failed, 2 skipped." in text
        assert "* 1 skipped: Skipped: needs two GPUs" in text
        assert "* 1 skipped: No module named 'not_there'" in text
        assert "* `tests/test_some.py::test_bad`: E   assert 1 == 2" in text
    assert "1 failed, 1 passed, 1 skipped, 1 error" in found[0]
    assert "1 failed, 1 skipped, 1 deselected, 1 error" in found[1]
