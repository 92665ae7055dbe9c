PYTHON ?= python3
RUN := .venv/bin

.PHONY: demo test test-random bench clean

demo: .venv/installed
	$(RUN)/python -m vgrad train --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: .venv/installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/pyright
	$(RUN)/python -m pytest tests

test-random: .venv/installed
	$(RUN)/python -m pytest tests -m hypothesis --hypothesis-profile=random

bench: .venv/installed
	$(RUN)/python -m pytest --benchmark-only

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,bench,dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
