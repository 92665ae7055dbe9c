PYTHON ?= python3
RUN := .venv/bin

.PHONY: demo test quick compiled test-random bench clean

# One thread for each of several processes: the ops of tests are too small for two.
PYTEST := OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n auto --dist worksteal

demo: .venv/installed
	$(RUN)/python -m vgrad train --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: .venv/installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/pyright
	$(PYTEST) tests -m "not (slow and compiled)"

quick: .venv/installed
	$(RUN)/ruff check .
	$(PYTEST) tests -q -m "not slow and not compiled"

compiled: .venv/installed
	$(PYTEST) tests -m "slow and compiled"

test-random: .venv/installed
	$(PYTEST) tests -m hypothesis --hypothesis-profile=random

bench: .venv/installed
	$(RUN)/python -m pytest --benchmark-only

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,bench,dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
