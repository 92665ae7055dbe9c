"""Prose: the subject comes first, and it is a noun of the field."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

BANNED = [
    r"\bTell whether\b",
    r"\b(those|that) of\b",
    r"\bthose (that|which|who)\b",
    r"\b(whoever|whosoever|anew|all the same)\b",
    r"\b(tensor|function|loss|op|graph|hook|mode|module|model|code|call|factor|it)s? "
    r"(asks?|knows?|tells?|answers?|promises?)\b",
    r"(^|[.:;,] |\b(of|to|from|for|with|by|in|on|as|than|and|or|is|are|returns?) )"
    r"what (is|are|was|a|an|the|it|they|this|one|has|had|does|did|would|its)\b",
]


def texts():
    folders = ("docs/*.md", "vgrad/**/*.py", "tutorials/*.py", "examples/*.py")
    paths = [path for folder in folders for path in ROOT.glob(folder)]
    for path in sorted([ROOT / "README.md", *paths]):
        yield str(path.relative_to(ROOT)), path


@pytest.mark.parametrize("pattern", BANNED)
def test_no_banned_pattern(pattern):
    lines = [
        f"{name}:{number}: {line.strip()}"
        for name, path in texts()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert not lines, "\n".join(lines)


def test_the_patterns_match_what_they_are_for():
    for line in (
        "Tell whether a tensor is batched",
        "the gradients of those of the others",
        "those that follow",
        "made anew",
        "a function knows its arguments",
        "Return what is left",
        "a list of what the caller gave",
    ):
        assert any(re.search(p, line, re.IGNORECASE) for p in BANNED), line
