# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets up its own .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

export OMP_NUM_THREADS ?= 1
export NO_MKDOCS_2_WARNING := 1

.PHONY: setup demo test test-all lint types unit docs benchmark clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup  ## train a small layer as a DEQ and as its unrolled twin; report in runs/demo/report.html
	OMP_NUM_THREADS=2 $(BIN)/python -m examples.demo --out runs/demo

test: lint types unit docs  ## what a change must pass

test-all: lint types docs  ## the same with the slow tests
	$(BIN)/python -m pytest -n 2 -q

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest -n 2 -q -m "not slow and not gpu"

docs: setup
	$(BIN)/mkdocs build --strict --quiet --site-dir site

benchmark: setup  ## solver overhead beside torchdeq, on one CPU thread; log under benchmarks/results
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps torchdeq==0.1.0
	$(BIN)/python -m benchmarks.rivals.solver_overhead --out benchmarks/results/$$(date +%F)_solver_overhead_cpu

clean:
	rm -rf $(VENV) site runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
