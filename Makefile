# The only front door. `make run` serves the default model; `make test` runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev

.PHONY: run check format test soak bench build docs clean
run: $(STAMP)
	$(BIN)/superfluid serve

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'

$(STAMP): $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(DEV): $(STAMP) pyproject.toml
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(DEV)
	$(BIN)/pytest

soak: $(DEV)
	$(BIN)/pytest -m soak --timeout=3600

bench: $(DEV)
	PYTHONPATH=tests $(BIN)/python -m bench

build: $(DEV)
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) dist build
