"""The Python of the README and of docs/ runs, in the order in which it stands there."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs" / "index.md").read_text()
PAGES = re.findall(r"\]\((\w+\.md)\)", INDEX)


def run(text, names):
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    for block in blocks:
        exec(block, names)
    return len(blocks)


def start():
    torch.manual_seed(0)
    names = {}
    assert run(README, names) == 2
    return names


def test_the_readme_runs():
    names = start()
    assert names["grads"]["0.weight"].shape == (32, 64, 20)
    assert names["norms"].shape == (32,)
    assert int(names["state"].step) == names["plan"].steps


def test_the_pages_run_one_after_the_other():
    names = start()
    blocks = {page: run((ROOT / "docs" / page).read_text(), names) for page in PAGES}
    assert sum(blocks.values()) >= 5
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
