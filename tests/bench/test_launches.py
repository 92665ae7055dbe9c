"""The tables of counted launches, and the nets that they are of."""

import json
import re

from bench import launch_tables
from bench.launches import EAGER, FILE, SGD
from bench.models import COUNTED, FULL_SIZE, MODELLED, SETTINGS, TIMED


def test_nets_are_named_once():
    assert len(COUNTED) == 15
    assert len(MODELLED) == 10
    assert len(TIMED) == 12
    for names in (COUNTED, MODELLED, TIMED):
        assert len(set(names)) == len(names)
        assert not set(names) - set(SETTINGS)
        assert not set(names) & set(FULL_SIZE)


def test_the_tables_are_of_the_counts():
    whole = json.loads(FILE.read_text())
    assert list(whole["counts"]) == list(whole["commits"])
    assert not set(whole["counts"]) - set(COUNTED)
    text = FILE.with_suffix(".md").read_text()
    assert text == launch_tables.markdown(whole)
    rows = whole["counts"]["tiny-32"]["float32"]
    line = next(each for each in text.splitlines() if "64-64-10, B=32" in each)
    assert f"| {rows[SGD]['launches']} |" in line
    assert f"| {rows[EAGER]['launches']} |" in line


def test_pages_have_the_numbers_of_the_counts():
    whole = json.loads(FILE.read_text())
    for page in launch_tables.PAGES:
        text = page.read_text()
        assert launch_tables.filled(text, whole) == text
    assert text.count("<!-- end -->") == 1


def test_an_aim_that_is_missed_is_said_so():
    whole = json.loads(FILE.read_text())
    rows = whole["counts"]["transformer"]["float32"]
    rows[EAGER]["launches"] = 5 * rows[SGD]["launches"]
    rows[EAGER]["waits"] = 3
    text = launch_tables.markdown(whole)
    assert re.search(r"worst net \| 3.8 \| [\d.]+ \| missed", text)
    assert "private step | 1 | 3 | missed | transformer, float32, vgrad |" in text


def test_the_picture_has_every_net():
    whole = json.loads(FILE.read_text())
    counted, timed = launch_tables.draw(whole).axes
    for axes, names in ((counted, COUNTED), (timed, MODELLED)):
        drawn = [text.get_text() for text in axes.get_xticklabels()]
        assert drawn == [name for name in names if name in whole["counts"]]
