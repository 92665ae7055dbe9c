"""Each entry of the zoo does what the table in `docs/models.md` says."""

import re
from pathlib import Path

import pytest

from tests.zoo import libraries, table
from tests.zoo.entries import Entry, Exact, Impossible, Refused
from tests.zoo.running import assert_exact, bound_of, found, reference

pytestmark = pytest.mark.filterwarnings("ignore")  # of old forms in others' files

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

FEW = 10
"""Nets by hand that `make test` runs of each section; `make more` runs the others."""


def marks(library: str, entry: Entry, number: int) -> list[pytest.MarkDecorator]:
    more = [pytest.mark.more] if library or number >= FEW else []
    return more + ([pytest.mark.slow] if entry.slow else [])


ALL = [
    pytest.param(
        library,
        entry,
        id=f"{section}: {entry.name}",
        marks=marks(library, entry, number),
    )
    for section, (library, entries) in table.SECTIONS.items()
    for number, entry in enumerate(entries)
]


def error_of(entry: Entry, **options) -> str:
    """Return what is raised, with its class."""
    with pytest.raises(Exception) as raised:  # noqa: PT011, of which kind is checked
        found(entry, 1.0, **options)
    notes = getattr(raised.value, "__notes__", [])
    return "\n".join([f"{type(raised.value).__name__}: {raised.value}", *notes])


@pytest.mark.parametrize(("library", "entry"), ALL)
def test_it_is_exact_or_what_the_table_says(library: str, entry: Entry):
    if not libraries.installed(library):
        pytest.skip(f"{library} is not installed; `make zoo` runs this")
    match entry.today:
        case Exact(strategy, why, op, loops, splits):
            expected = reference(entry)
            result = found(entry, bound_of(expected))
            assert_exact(entry, result, expected)
            assert (result.strategy, result.loops) == (strategy, loops)
            assert result.splits == splits
            assert why in result.why
            assert f"{op}: " in result.why or not op
        case Refused(why):
            error = error_of(entry)
            assert why in error
            assert "expected" in error
            for strategy in re.findall('"(vmap|loop)"', error):
                expected = reference(entry)
                result = found(entry, bound_of(expected), strategy=strategy)
                assert_exact(entry, result, expected)
        case Impossible(why):
            assert why in error_of(entry)
            with pytest.raises(Exception, match=re.escape(why)):
                reference(entry)


def test_the_table_is_that_of_the_entries():
    assert PAGE.read_text() == table.page(), "run `python -m tests.zoo.table`"


def test_names_differ():
    for section, (_, entries) in table.SECTIONS.items():
        names = [entry.name for entry in entries]
        assert len(names) == len(set(names)), section
