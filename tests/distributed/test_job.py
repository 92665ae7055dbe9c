"""The main job on several ranks."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch

from tests.cli import runs
from vgrad.__main__ import main
from vgrad.distributed import RankError


def job(*argv):
    """Run a command on this rank; its status and what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(["train", *argv])
    return status, said.getvalue()


def given(tmp_path, out, *more, epochs=2):
    data = tmp_path / "data.npz"
    if not data.exists():
        runs.write_data(data)
    return [
        *("--data", str(data), "--model", "mlp", "--lr", "0.3", "--out", str(out)),
        *("--batch-size", str(runs.BATCH), "--epochs", str(epochs), *more),
    ]


def check_same_model(*folders):
    """Demand the same parameters of all runs, up to rounding."""
    first, *others = (
        safetensors.torch.load_file(folder / "model.safetensors") for folder in folders
    )
    for other in others:
        for name, each in first.items():
            assert (other[name] - each).abs().max() / each.abs().max() < 5e-6


def figures(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_run_on_two_ranks_and_on_four_is_that_of_one(tmp_path, ranks):
    fixed = "--reproducible-noise"
    folders = {size: tmp_path / str(size) for size in (1, 2, 4)}
    assert job(*given(tmp_path, folders[1], fixed))[0] == 0
    for size in (2, 4):
        found = ranks(size).run(job, *given(tmp_path, folders[size], fixed))
        assert [status for status, _ in found] == size * [0]
        assert f"on {size} ranks" in found[0][1]
    check_same_model(*folders.values())
    for name in ("metrics.jsonl", "plain.jsonl"):
        first, *rest = [figures(folder, name) for folder in folders.values()]
        for each in rest:
            for line, other in zip(first, each, strict=True):
                assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
                assert line["epsilon"] == other["epsilon"]
                assert line["test_accuracy"] == other["test_accuracy"]


def test_a_run_goes_on_with_fewer_ranks(tmp_path, ranks):
    fixed = "--reproducible-noise"
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert job(*given(tmp_path, whole, fixed))[0] == 0
    arguments = given(tmp_path, broken, fixed)
    failed = ranks(4).run(_interrupted, arguments)
    assert {status for status, _ in failed} == {2}
    assert "the disk is full" in failed[0][1]
    assert all(
        "rank 0 stopped with OSError: the disk" in text for _, text in failed[1:]
    )
    found = ranks(2).run(job, "--resume", str(broken))
    assert [status for status, _ in found] == [0, 0], found
    check_same_model(whole, broken)
    assert len(figures(broken)) == 2


def _interrupted(arguments):
    """Fail on the first rank, when the second epoch's figures are to be written."""
    from vgrad.cli import checkpoint

    save, calls = checkpoint.save, []

    def failing(*given):
        calls.append(given)
        if len(calls) > 2:
            raise OSError("the disk is full")
        return save(*given)

    checkpoint.save = failing
    try:
        return job(*arguments)
    except RankError as error:
        return 2, str(error)
    finally:
        checkpoint.save = save


def test_bad_arguments_are_refused_by_all(tmp_path, ranks):
    taken = tmp_path / "taken"
    (taken / "state").mkdir(parents=True)
    (taken / "state" / "meta.json").write_text("{}")
    for status, said in ranks(2).run(job, *given(tmp_path, taken)):
        assert status == 2
        assert "expected a folder without a run" in said


@pytest.mark.more
@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_and_it_goes_on(tmp_path):
    out = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*launcher, "--standalone", "-m", "vgrad", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = given(tmp_path, out, epochs=40)
    process = subprocess.Popen(
        [*command, *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    deadline = time.monotonic() + 90
    while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and _parent(path) == process.pid
    ]
    os.kill(max(ranks), signal.SIGKILL)
    started = time.monotonic()
    text, _ = process.communicate(timeout=60)
    assert time.monotonic() - started < 60
    assert process.returncode != 0
    assert "SIGKILL" in text or "expected an answer of the other ranks" in text
    before = len(figures(out))
    status, said = job("--resume", str(out))
    assert status == 0, said
    assert len(figures(out)) == 40 > before


def _parent(path):
    try:
        return int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None
