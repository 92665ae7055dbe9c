PYTHON ?= python3
RUN := .venv/bin

# The oldest and the newest Python of `make versions`.
FLOOR ?= python3.11
NEWEST ?= python3.13

.PHONY: demo test more quick compiled large versions test-random zoo docs bench gpu launches walk \
  experiments clean

# One thread for each of several processes: the ops of tests are too small for two.
XDIST := -m pytest -n auto --dist worksteal
PYTEST := OMP_NUM_THREADS=1 $(RUN)/python $(XDIST)
TEST := not more and not (slow and compiled) and not large
QUICK := tests -q -m "not slow and not more and not compiled and not large"
FAST := tests -q -m "not slow and not large"

demo: .venv/installed
	$(RUN)/python -m vgrad train --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: .venv/installed
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/pyright
	$(PYTEST) tests -m "$(TEST)"

# What `make test` leaves out for the sake of its length, and continuous integration runs
# after it.
more: .venv/installed
	$(PYTEST) tests -m "more and not (slow and compiled) and not large"

quick: .venv/installed
	$(RUN)/ruff check .
	$(PYTEST) $(QUICK)

compiled: .venv/installed
	$(PYTEST) tests -m "slow and compiled"

large: .venv/installed
	$(RUN)/python -m pytest tests -m large

# The oldest torch, of pyproject.toml, on the oldest Python, and the newest on the newest,
# with the builds of PyPI.
versions: .venv-floor/installed .venv-newest/installed
	OMP_NUM_THREADS=1 .venv-floor/bin/python $(XDIST) $(FAST)
	OMP_NUM_THREADS=1 .venv-newest/bin/python $(XDIST) $(FAST)

test-random: .venv/installed
	$(PYTEST) tests -m hypothesis --hypothesis-profile=random

zoo: .venv-zoo/installed
	OMP_NUM_THREADS=1 .venv-zoo/bin/python $(XDIST) \
	  tests/zoo tests/persample/test_transformers.py \
	  tests/test_examples.py::test_an_example_runs

# The figures of tutorials that did not change are kept; `make clean` removes them.
docs: .venv/installed
	rm -rf build/docs/html
	mkdir -p build/docs/source
	OMP_NUM_THREADS=1 $(RUN)/sphinx-build --fail-on-warning --keep-going --jobs 2 \
	  --conf-dir docs build/docs/source build/docs/html

bench: .venv/installed
	$(RUN)/python -m pytest --benchmark-only

# Tests and timings of a GPU in three parts, each less than four minutes, to be called
# again until it says that it is complete. Torch, numpy, safetensors and pytest are enough.
PART ?= 1
gpu:
	PYTHONPATH=. $(PYTHON) -m bench.gpu $(PART)

# Launches, waits and copies on the pretend accelerator, which needs a C++ compiler.
launches: .venv/installed
	OMP_NUM_THREADS=2 $(RUN)/python -m bench.launches

# Functions of vgrad that single calls pass through.
walk: .venv/installed
	$(RUN)/python bench/walk.py

# Those of a CPU; what was measured before is kept.
experiments: .venv/installed
	$(RUN)/python -m bench.experiments all

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

.venv-floor/installed: pyproject.toml constraints.txt
	rm -rf .venv-floor
	$(FLOOR) -m venv .venv-floor
	sed -n 's/^dependencies = .*"torch>=\([0-9.]*\)".*/torch==\1/p' pyproject.toml \
	  > .venv-floor/constraints.txt
	grep -v '^torch==' constraints.txt >> .venv-floor/constraints.txt
	.venv-floor/bin/python -m pip install --quiet \
	  --constraint .venv-floor/constraints.txt --editable ".[test]"
	touch $@

.venv-newest/installed: pyproject.toml constraints.txt vgrad/torch_private/__init__.py
	rm -rf .venv-newest
	$(NEWEST) -m venv .venv-newest
	sed -n 's/^NEWEST = "\(.*\)"/torch==\1/p' vgrad/torch_private/__init__.py \
	  > .venv-newest/constraints.txt
	grep -Ev '^torch(vision)?==' constraints.txt >> .venv-newest/constraints.txt
	.venv-newest/bin/python -m pip install --quiet \
	  --constraint .venv-newest/constraints.txt --editable ".[test]"
	touch $@

clean:
	rm -rf .venv .venv-floor .venv-newest .venv-zoo build dist *.egg-info
