"""The tests and timings of a GPU, on a CPU and on small nets."""

import json
import sys

import pytest

from bench import gpu
from bench.contenders import Contender, vgrad_clipped

pytestmark = pytest.mark.more


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
