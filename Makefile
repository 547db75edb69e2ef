# `make demo` and `make test` need nothing but Python 3.11 or newer: they make .venv and install into it first.
# PYTHON=... chooses the interpreter, PIP_ARGS=... adds arguments to `pip install` (an index of CPU builds, say).

VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?= --out build/bench-planner.json
NETWORK_ARGS ?= --out build/bench-network.json
LOOKAHEAD_ARGS ?= --out build/bench-lookahead.json
GPU_ARGS ?=
PYTHON_GPU ?= python3
COMPILED_ARGS ?=
SOAK_ARGS ?= --out build/bench-soak.json
CORPUS ?= 2000
# the first of these that runs, is new enough and can make a virtual environment; python3.11 first, because
# constraints.txt pins a release of torch that has builds for it
PYTHON ?= $(shell for name in python3.11 python3 python; do \
	if $$name -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
	then echo $$name; break; fi; done)

.PHONY: demo test check lint bench bench-planner bench-verify bench-network bench-lookahead bench-soak bench-gpu bench-compiled clean

demo: $(VENV)/installed
	$(BIN)/dyncp demo $(DEMO_ARGS)

test: $(VENV)/installed
	$(BIN)/python -m pytest -q

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

bench: bench-planner bench-verify

# one thread: numpy's matrix products would take more
bench-planner: $(VENV)/installed
	@mkdir -p build
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/dyncp bench planner $(BENCH_ARGS)

bench-verify: $(VENV)/installed
	$(BIN)/python benchmarks/verify_corpus.py --corpus $(CORPUS)

# needs root: hosts are network namespaces (see docs/network-benchmark.md)
bench-network: $(VENV)/installed
	PYTHONPATH=src $(BIN)/python -m benchmarks.network.run $(NETWORK_ARGS)

# how much of planning is hidden, and what plans, stores and the loader cost (see docs/lookahead-benchmark.md)
bench-lookahead: $(VENV)/installed
	PYTHONPATH=src OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.lookahead.run $(LOOKAHEAD_ARGS)

# needs a GPU, and PyTorch with CUDA in place of what .venv has: PYTHON_GPU=... says which Python
bench-gpu:
	PYTHONPATH=src $(PYTHON_GPU) -m benchmarks.gpu.run $(GPU_ARGS)

bench-compiled: $(VENV)/installed
	PYTHONPATH=src $(BIN)/python -m benchmarks.gpu.compiled $(COMPILED_ARGS)

# planners and the plan store are killed all the time; torch would write a page about each lost connection
bench-soak: $(VENV)/installed
	PYTHONPATH=src OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(BIN)/python -m benchmarks.lookahead.soak $(SOAK_ARGS)

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# pip is run as a module, so that a path too long for a script's first line does no harm
$(VENV)/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "dyncp needs Python 3.11 or newer with venv; set PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@
