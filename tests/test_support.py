"""Ticks of docs/support.md name tests that are there, crosses errors that are raised.

That the code under a table raises what it says is for `test_docs`.
"""

import re

import pytest

from tests.test_docs import ROOT

PAGE = (ROOT / "docs" / "support.md").read_text()
SECTIONS = PAGE.split("\n## ")[1:]


def table(section):
    """Return the rows of the first table of a section."""
    return re.search(r"(^\|.*\|$\n)+", section, flags=re.M)[0].splitlines()


ROWS = [
    (section, *(cell.strip() for cell in row.strip("|").split("|")))
    for section in SECTIONS
    for row in table(section)[2:]
]


def listed(section):
    """Return the numbered tests, each a file and a name."""
    pattern = r"^(\d+)\. `(test_\w+)` in `([\w/]+\.py)`$"
    return {
        number: (file, name)
        for number, name, file in re.findall(pattern, section, re.M)
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_a_row_is_backed(row):
    section, name, *cells, numbers = row
    for number in numbers.split(", "):
        file, test = listed(section)[number]
        text = (ROOT / file).read_text()
        assert re.search(rf"^def {test}\(", text, flags=re.M), test
    assert cells.count("n/a") < len(cells)
    pattern = rf"^\| {re.escape(name)} \| `[^`]*` \| `(\w+): "
    raised = re.findall(pattern, section, flags=re.M)
    for cell in cells:
        assert re.fullmatch(r"✓|n/a|✗ `\w+`", cell), cell
        if cell.startswith("✗"):
            assert cell.split("`")[1] in raised, cell


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.split("\n")[0])
def test_a_table_has_all_columns_and_uses_all_tests(section):
    head, _, *rows = table(section)
    assert {row.count("|") for row in rows} == {head.count("|")}
    used = {number for row in rows for number in re.findall(r"\d+", row.split("|")[-2])}
    assert used == listed(section).keys()
