# Two commands do everything on a fresh machine with Python >= 3.11: `make demo` and `make test`.
# While you work: `make quick`, under a minute on two cores.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# every process of a test would compile all of the source again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test test-all lint bench docs constraints bounds clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/coterie run

QUICK := tests/numerics/test_draws.py tests/numerics/test_linear.py tests/numerics/test_simplex.py \
	tests/federation/test_verbs.py tests/federation/test_ledger.py tests/federation/test_shards.py \
	tests/test_settings.py tests/test_layers.py

quick: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest --quiet --numprocesses 2 $(QUICK)

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

test-all: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m ""

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks --json runs/bench.json

constraints: $(VENV)/.installed-dev
	$(BIN)/python tools/constraints.py

bounds: $(VENV)/.installed-dev
	$(BIN)/python tools/bounds.py lowest
	$(BIN)/python tools/bounds.py newest

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("coterie needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[docs]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis runs
