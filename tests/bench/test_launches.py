"""The tables of counted launches, and the operations that `bench.floor` counts."""

import json
import re
from functools import partial

import torch

from bench import floor, launch_tables
from bench.contenders import CLIPPED, plain
from bench.launches import EAGER, FILE, SGD
from bench.models import COUNTED, SETTINGS


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


def test_the_clipped_sum_has_the_operations_of_plain_sgd():
    problem = SETTINGS["mlp"].problem("cpu", torch.float32, 8)
    base, clipped = (
        floor.cost(partial(build(problem), *problem.batch)).operations
        for build in (plain, CLIPPED["vgrad"].build)
    )
    assert base <= clipped < 1.01 * base
