# SPDX-License-Identifier: Apache-2.0
# Every target makes its own virtual environment first, so that on a bare machine each is one command.

# Else every process that a test starts would compile the modules anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CORE := $(VENV)/.core-ready
FRAMEWORKS := tests/doors/adapters
PACKAGES := packages/lightrnn packages/dual packages/c
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal -q --durations 25 --durations-min 5

.PHONY: demo test test-all claims check docs dist matrix format clean

demo: $(CORE)           ## train one worker, then four under BMUF, averaging and sync; about 4 minutes
	$(BIN)/python examples/char_lm/demo.py

test: $(CORE)           ## the fast tier of the tests: pure functions, virtual workers, every claim; about 5 minutes
	$(PYTEST) -m "not full and not slow" tests $(addprefix --ignore ,$(FRAMEWORKS))

test-all: $(READY)      ## all tests and the quick form of every claim; `pytest -m slow` runs what is left out here
	$(MAKE) test
	$(PYTEST) -m "full and not slow" tests packages
	$(MAKE) claims

claims: $(READY)        ## the quick form of every benchmark and of every record's command
	$(BIN)/python benchmarks/claims.py

check: $(READY)         ## linter, type checker and the budgets of the source tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python benchmarks/house/house.py --check

dist: $(READY)          ## wheels and source distributions of paceline and its packages in dist/, built and checked
	rm -rf dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt '.[dist]'
	$(BIN)/python -m build
	for package in $(PACKAGES); do $(BIN)/python -m build --outdir dist $$package || exit 1; done
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/paceline-*.whl
	for package in $(PACKAGES); do \
		$(BIN)/check-wheel-contents --toplevel paceline_$${package#packages/} --no-config dist/paceline_$${package#packages/}-*.whl || exit 1; \
	done

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
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m virtualenv $(VENV) || \
		{ echo "cannot make a virtual environment: install python3-venv"; exit 1; }

# The core and what its tests and the demo's report need.
$(CORE): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[test]'
	touch $(CORE)

# The packages, the frameworks and the tools of developers, too.
$(READY): pyproject.toml $(PACKAGES:%=%/pyproject.toml) constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt \
		--editable '.[dev]' $(PACKAGES:%=--editable %)
	touch $(CORE) $(READY)
