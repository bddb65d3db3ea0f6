# make demo    watch the bundled model answer faster, with the same bytes
# make test    the tests
# make check   what a change must pass: lint, format, types, tests
# make fix     mend what ruff can mend
# make gpu     the tests that need an accelerator
# make bench   the figures of docs/benchmarks.md (takes a while; leave the machine alone)
#
# Each makes the virtual environment it needs. PYTHON chooses the interpreter, TORCH what pip installs as torch,
# ARGS goes to the command: make test ARGS='-x tests/unit', make demo ARGS='--prompts 8'.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check fix gpu bench clean

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

# torch comes first and by exact version: left to the resolver, it would be the newest build with all of CUDA.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "forerun needs Python 3.11 or newer; say which: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11; say which to use: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/forerun demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest -m 'not gpu'

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest

fix: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

bench: $(STAMP)
	$(BIN)/forerun bench forward --markdown
	$(BIN)/forerun bench generate --markdown

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache dist build
