# SPDX-License-Identifier: Apache-2.0
# Every target makes its own virtual environment first, so that on a bare machine each is one command.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test claims check docs dist matrix format clean

demo: $(READY)          ## train one worker, then four under BMUF, averaging and sync; about 4 minutes
	$(BIN)/python examples/char_lm/demo.py

test: $(READY)          ## the test suite; -m slow runs what is left out here
	$(BIN)/python -m pytest -n 2 -q -m "not slow"

claims: $(READY)        ## the quick form of every benchmark and of every record's command
	$(BIN)/python benchmarks/claims.py

check: $(READY)         ## linter and type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dist: $(READY)          ## the wheel and the source distribution in dist/, built and checked
	rm -rf dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt '.[dist]'
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

matrix: $(READY)        ## the core of the suite on every Python and torch that are served; several gigabytes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check nox uv
	$(BIN)/nox

docs: $(READY)          ## the documentation site, into out/site; a warning is an error
	$(BIN)/python -m sphinx -c docs -W --keep-going -q -b html . out/site

format: $(READY)        ## bring the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:                  ## remove what the other targets made
	rm -rf $(VENV) out dist build .nox .pytest_cache .mypy_cache .ruff_cache

# Debian's python3 comes without venv's ensurepip; virtualenv, where it is there, does without.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m virtualenv $(VENV) || \
		{ echo "cannot make a virtual environment: install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)
