"""Ticks of docs/support.md name tests that are there, crosses errors that are raised.

That the code under a table raises what it says is for `test_docs`.
"""

import re

import pytest

from tests.test_docs import ROOT

PAGE = (ROOT / "docs" / "support.md").read_text()
ROWS = [
    (section, *(cell.strip() for cell in row.strip("|").split("|")))
    for section in PAGE.split("\n## ")[1:]
    for row in re.findall(r"^\|.*\|$", section, flags=re.M)[2:]
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_a_row_is_backed(row):
    section, name, *cells, shown = row
    tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", shown)
    assert tests
    for file, test in tests:
        text = (ROOT / "tests" / file).read_text()
        assert re.search(rf"^def {test}\(", text, flags=re.M), test
    assert cells.count("n/a") < len(cells)
    below = section.partition(f"\n**{name}**")[2].partition("\n**")[0]
    raised = re.findall(r"^```text\n(\w+): ", below, flags=re.M)
    for cell in cells:
        assert re.fullmatch(r"✓|n/a|✗ `\w+`", cell), cell
        if cell.startswith("✗"):
            assert cell.split("`")[1] in raised, cell


def test_every_row_has_all_columns():
    for section in PAGE.split("\n## ")[1:]:
        head, _, *rows = re.findall(r"^\|.*\|$", section, flags=re.M)
        assert {row.count("|") for row in rows} == {head.count("|")}
