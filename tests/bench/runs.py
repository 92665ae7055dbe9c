"""Runs an experiment at its smallest size, as its test does."""

import copy

from bench.experiments import study
from bench.experiments.__main__ import study as named
from vgrad import files


def run_twice(name, folder, monkeypatch):
    """Run an experiment, see that a second run computes nothing; return results."""
    one, place = named(name), study.Place("tiny", "cpu", folder)
    said = study.run(name, one, place)
    assert said
    kept = files.from_json((folder / f"{name}.json").read_bytes())
    assert [*kept["pieces"]] == [piece.name for piece in one.pieces(place)]
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / f"{name}.md").read_text()
    assert all(f"* {line}" in text for line in said)
    monkeypatch.setattr(study.Kept, "add", None)
    assert study.run(name, one, place) == said
    return copy.deepcopy(kept["pieces"])
