PYTHON ?= python3
RUN := .venv/bin

.PHONY: demo test quick compiled large test-random zoo docs bench experiments clean

# One thread for each of several processes: the ops of tests are too small for two.
PYTEST := OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n auto --dist worksteal

demo: .venv/installed
	$(RUN)/python -m vgrad train --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: .venv/installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/pyright
	$(PYTEST) tests -m "not (slow and compiled) and not large"

quick: .venv/installed
	$(RUN)/ruff check .
	$(PYTEST) tests -q -m "not slow and not compiled and not large"

compiled: .venv/installed
	$(PYTEST) tests -m "slow and compiled"

large: .venv/installed
	$(RUN)/python -m pytest tests -m large

test-random: .venv/installed
	$(PYTEST) tests -m hypothesis --hypothesis-profile=random

zoo: .venv-zoo/installed
	OMP_NUM_THREADS=1 .venv-zoo/bin/python -m pytest -n auto --dist worksteal \
	  tests/zoo tests/persample/test_transformers.py tests/test_examples.py

# The figures of tutorials that did not change are kept; `make clean` removes them.
docs: .venv/installed
	rm -rf build/docs/html
	mkdir -p build/docs/source
	OMP_NUM_THREADS=1 $(RUN)/sphinx-build --fail-on-warning --keep-going --jobs 2 \
	  --conf-dir docs build/docs/source build/docs/html

bench: .venv/installed
	$(RUN)/python -m pytest --benchmark-only

# Those of a CPU; what was measured before is kept.
experiments: .venv/installed
	$(RUN)/python -m vgrad experiment all

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,bench,dev]"
	touch $@

# Torch alone and first, so that no other package chooses its build.
.venv-zoo/installed: pyproject.toml constraints.txt
	rm -rf .venv-zoo
	$(PYTHON) -m venv .venv-zoo
	.venv-zoo/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-zoo/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[test,zoo,examples]"
	touch $@

clean:
	rm -rf .venv .venv-zoo build dist *.egg-info
