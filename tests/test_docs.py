"""The Python of the README and of docs/ runs, each page after the first one.

A block `python raises` raises what the `text` block after it says; that after any other
block is what it prints. Three dots stand for anything.
"""

import contextlib
import io
import re
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs" / "index.md").read_text()
START = (ROOT / "docs" / "start.md").read_text()
PAGES = re.findall(r"\]\((\w+\.md)\)", INDEX)
BLOCK = re.compile(
    r"^```python( raises)?\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", flags=re.S | re.M
)


def run(text, names):
    blocks = BLOCK.findall(text)
    for raises, code, expected in blocks:
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


def test_the_first_page_asks_for_the_versions_that_the_project_does():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = project["requires-python"].removeprefix(">=")
    (torch_,) = [each for each in project["dependencies"] if each[:5] == "torch"]
    floor = torch_.removeprefix("torch>=")
    assert f"vgrad needs Python {python} and torch {floor} or later" in START


@pytest.mark.parametrize("page", [page for page in PAGES if page != "start.md"])
def test_a_page_runs(page, begun):
    text, names = (ROOT / "docs" / page).read_text(), dict(begun)
    assert run(text, names) == text.count("\n```python")
    if page == "ensembles.md":
        assert names["metrics"]["loss"].shape == (10,)
        assert names["found"].mean.shape == (32, 3)


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
