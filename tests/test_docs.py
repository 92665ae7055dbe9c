"""The Python of README, docs/ and docstrings runs, each page after the first one.

A block `python raises` raises the error of the `text` block after it; after any other
block that is its output. A row of a table with code and an error raises the error.
Three dots stand for anything.
"""

import contextlib
import doctest
import importlib
import io
import json
import pkgutil
import re
import tomllib
from pathlib import Path
from statistics import geometric_mean

import pytest
import torch

import vgrad

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs" / "index.md").read_text()
START = (ROOT / "docs" / "start.md").read_text()
PAGES = re.findall(r"\]\((\w+\.md)\)", INDEX)
BLOCK = re.compile(
    r"^```python( raises)?\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?"
    r"|^\| [^|\n]*( )\| `([^`\n]+)` \| `(\w+: [^`\n]*)` \| [^|\n]*\|$",
    flags=re.S | re.M,
)


def run(text, names):
    blocks = BLOCK.findall(text)
    for raises, code, expected, *row in blocks:
        raises, code, expected = row if row[0] else (raises, code, expected)
        if raises:
            with pytest.raises(Exception, match=".") as caught:
                exec(code, names)
            found = f"{caught.type.__name__}: {caught.value}"
            assert expected, f"says not what it raises, {found}:\n{code}"
        else:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            found = printed.getvalue()
        if expected:
            parts = [" ".join(part.split()) for part in expected.split("...")]
            got = " ".join(found.split())
            wanted = " ?.* ?".join(map(re.escape, parts))
            assert re.fullmatch(wanted, got), f"{code}\n{got}"
    return len(blocks)


@pytest.fixture(scope="module")
def begun():
    """What the first page leaves, with which the others begin."""
    torch.manual_seed(0)
    names = {}
    assert run(START, names)
    return names


def test_the_readme_runs_and_begins_as_the_docs_do():
    torch.manual_seed(0)
    names = {}
    assert run(README, names)
    assert names["grads"]["0.weight"].shape == (32, 64, 20)
    assert names["norms"].shape == (32,)
    assert int(names["state"].step) == names["plan"].steps
    assert BLOCK.search(README)[2] == BLOCK.search(START)[2]


def results(name):
    path = ROOT / "bench" / "results" / "cpu_2_threads" / f"{name}.json"
    return json.loads(path.read_text())


def ratios(table, group, contender="vgrad"):
    return {
        row["ratio_to_plain"]: row
        for row in results(table)
        if row["group"].startswith(group) and row["contender"] == contender
    }


def test_the_costs_in_the_readme_are_those_measured():
    costs, text = "", " ".join(README.split())
    for group in ("compiled clipped sum", "private step"):
        for contender in ("vgrad", "vgrad-auto"):
            one = ratios("compiled", group, contender)
            mean = geometric_mean(one)
            costs += f"| {mean:.2f} ({min(one):.2f} to {max(one):.2f}, {len(one)}) "
        costs += "|\n"
    found = re.findall(
        r"^\| (?:clipped sum|whole private step), .*?( \|.*)$", README, re.M
    )
    assert "".join(f"{each.strip()}\n" for each in found) == costs

    sums, stored = (ratios(*of) for of in (("compiled", ""), ("clipped", "stored")))
    (noise,) = ratios("per_sample", "noise").values()
    seconds, rate = noise["median_seconds"], noise["samples_per_second"]
    *others, largest = sorted(stored)
    mlp = stored[largest]
    values = mlp["batch"] * mlp["parameters"]
    steps = [
        piece["times"]["private_step"]["seconds"]
        / piece["times"]["torch's backward and SGD"]["seconds"]
        for piece in results("experiments/private")["pieces"].values()
        if "times" in piece
    ]
    assert len(others) == 5
    for claim in (
        f"an MLP of {sums[max(sums)]['parameters']:,} parameters",
        f"[{seconds * 1e3:.1f} ms]",
        f"for {rate * seconds / 1e6:.1f} million parameters",
        f"{others[0]:.2f} to {others[-1]:.2f} times a forward and backward pass",
        f"{largest:.2f} times for an MLP whose {mlp['batch']} gradients",
        f"fill {values * 4 / 1e9:.1f} GB",
        f"{min(steps):.2f} to {max(steps):.2f} times torch's backward pass and SGD",
    ):
        assert claim in text


def test_the_first_page_asks_for_the_versions_that_the_project_does():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = project["requires-python"].removeprefix(">=")
    (torch_,) = [each for each in project["dependencies"] if each[:5] == "torch"]
    floor = torch_.removeprefix("torch>=")
    assert f"vgrad needs Python {python} and torch {floor} or later" in START


@pytest.mark.parametrize("page", [page for page in PAGES if page != "start.md"])
def test_a_page_runs(page, begun):
    text, names = (ROOT / "docs" / page).read_text(), dict(begun)
    assert run(text, names) >= text.count("\n```python")
    if page == "ensembles.md":
        assert names["metrics"]["loss"].shape == (10,)
        assert names["found"].mean.shape == (32, 3)


MODULES = pkgutil.walk_packages(vgrad.__path__, "vgrad.")


@pytest.mark.parametrize("name", sorted({m.name for m in MODULES} - {"vgrad.__main__"}))
def test_examples_of_docstrings_run(name):
    torch.manual_seed(0)
    module = importlib.import_module(name)
    globs = {**vars(module), "torch": torch, "vgrad": vgrad}
    assert doctest.testmod(module, globs=globs).failed == 0


def test_the_index_lists_every_page():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages == {*PAGES, "index.md"}


@pytest.mark.parametrize(
    "path",
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md")]
    + sorted((ROOT / "docs").glob("*.md")),
    ids=lambda path: path.name,
)
def test_what_is_linked_or_named_is_there(path):
    text = path.read_text()
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    missing = [name for name in linked if not (path.parent / name).exists()]
    named = re.findall(r"`((?:vgrad|tests|tutorials|bench|docs)/[\w/.]+)`", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_the_readme_names_the_two_commands():
    assert "make demo" in README
    assert "make test" in README
