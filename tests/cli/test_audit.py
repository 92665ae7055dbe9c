"""The command `audit`: it needs no data, and says whether a step is broken."""

import re

import pytest

from tests.cli.runs import contents, error, net, private, said, train
from vgrad.__main__ import main
from vgrad.factors import Sums

FEW = "--canaries", "240", "--significance", "1e-6"


def audit(folder, *more):
    """Audit a run, and return the exit status."""
    try:
        return main(["audit", str(folder), *more])
    except SystemExit as leaving:
        return leaving.code


def test_a_right_step_stands(copied, capsys):
    folder = copied("one")
    before = contents(folder)
    assert audit(folder, *FEW) == 0
    out = capsys.readouterr().out
    assert "it stands at significance 1e-06" in out
    mu = 2**0.5 / said(folder)["plan"]["noise_multiplier"]
    assert f"claim: mu {mu:.3f}" in out
    [sides] = re.findall(r"^all +(\d+) +(\d+) ", out, re.MULTILINE)
    assert sum(map(int, sides)) == 240
    after = contents(folder)
    assert after.pop("audit.png") == b"picture"
    assert after == before
    assert "audit.png" in private(folder)


def test_a_broken_step_ends_with_status_one(copied, capsys, monkeypatch):
    monkeypatch.setattr(Sums, "divide", lambda self, number: None)
    folder = copied("one")
    assert audit(folder) == 1
    assert "it is exceeded at significance 0.01" in capsys.readouterr().out
    assert (folder / "audit.png").exists()


@pytest.mark.more
@pytest.mark.parametrize(
    "more", [["--compile", "replay"], ["--precision", "float16"]], ids=" ".join
)
def test_the_step_is_that_of_the_run(more, images, tmp_path, capsys, recwarn):
    assert train(images, tmp_path / "run", *more, epochs=1) == 0
    assert audit(tmp_path / "run", *FEW) == 0
    assert "it stands" in capsys.readouterr().out


def test_other_folders_are_refused(copied, images, tmp_path, module, capsys):
    assert "expected a run with privacy" in error(capsys, "audit", copied("plain"))
    assert "got no file" in error(capsys, "audit", tmp_path / "none")
    assert "from 120 to" in error(capsys, "audit", tmp_path, "--canaries", "5")
    name = module("factory_of_audit", net())
    folder = tmp_path / "own"
    assert train(images, folder, "--model", name, epochs=1) == 0
    assert "a file may not choose the code" in error(capsys, "audit", folder)
    assert audit(folder, "--model", name, *FEW) == 0
