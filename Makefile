# The only front door. `make run` serves the default model; `make test` runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
TEST_HOME := $(CURDIR)/.cache/test-home

.PHONY: run check format test soak bench build docs clean
run: $(STAMP)
	$(BIN)/superfluid serve

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'

$(STAMP): $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(DEV): $(STAMP) pyproject.toml tests/fakes/adapter/pyproject.toml
	$(BIN)/python -m pip install --quiet --group dev
	$(BIN)/python -m pip install --quiet --no-deps --editable tests/fakes/adapter
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

# Fetching is not part of any test's time. A model that is here already is not fetched again.
.PHONY: test-model
test-model: $(DEV)
	test -n "$$SUPERFLUID_TEST_MODEL" || \
	SUPERFLUID_HOME=$(TEST_HOME) $(BIN)/superfluid models pull gemma-3-270m

# The tested environments of mlx-lm, of both generations, by the installer that users run.
.PHONY: test-mlx
test-mlx: $(DEV)
	for version in 0.31.3 0.32.0 0.32.2; do \
	  SUPERFLUID_HOME=$(TEST_HOME) $(BIN)/superfluid runtime install mlx --version $$version || exit 1; \
	done

# Builds of llama.cpp of several contracts, by pinned digests.
.PHONY: test-llamacpp
test-llamacpp: $(DEV)
	$(BIN)/python tests/support/llama_libraries.py

# In order, since it ends with many quick files; by size it would end with a few slow ones.
test: test-model test-mlx test-llamacpp
	$(BIN)/pytest -m "not soak" -n 2 --dist loadfile --no-loadscope-reorder

soak: test-model test-mlx test-llamacpp
	$(BIN)/pytest -m soak --timeout=3600

bench: test-model test-mlx
	PYTHONPATH=tests $(BIN)/python -m bench

build: $(DEV)
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv dist/fresh
	dist/fresh/bin/python -m pip install --quiet dist/superfluid-*.whl
	dist/fresh/bin/superfluid --version
	env -i PATH="$$PATH" SUPERFLUID_HOME=$(CURDIR)/dist/home \
	  dist/fresh/bin/superfluid compat --json > dist/compat.json
	$(BIN)/python docs/generate.py --validate dist/compat.json
	dist/fresh/bin/python -c "from importlib.metadata import entry_points as e; print(*e(group='superfluid.adapters'))"

docs: $(DEV)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .cache dist build
