# `make demo` and `make test` work on a fresh checkout: each sets up .venv first, once. `make check` is what CI runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help setup demo test slow exhaustive check format lint types sizes docs chromium clean

help:
	@echo 'make demo     predict a step, and train a small GPT inside a budget on this machine'
	@echo 'make test     the tests, but for the slow ones'
	@echo 'make slow     the slow tests'
	@echo 'make exhaustive  exceptions at every line of a session, two hours'
	@echo 'make check    format, lint, types, tests and documentation examples, as CI does'
	@echo 'make format   rewrite the sources in the one style'
	@echo 'make docs     fill the tables and draw the chart of README.md and docs/ from benchmarks/results'
	@echo 'make clean    remove .venv and everything built'

setup: $(STAMP)

# torch goes first and alone: the constraints choose its version, and the machine's pip settings choose its build (CPU or
# CUDA), so that resolving the rest never replaces it. Without build isolation nothing is fetched that is not pinned.
$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Lowtide needs Python 3.11 or newer, this is %d.%d; try: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,transformers,lab,optimizers]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps timm
	touch $@

demo: $(STAMP)
	$(BIN)/lowtide demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m 'not slow and not exhaustive'

# Whole lab runs, compiled models, examples of the documentation, tests of processes: what CI runs besides.
slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m 'slow and not exhaustive'

# Each line of a session's code raises once, and what is left is compared with plain torch. `make test` takes a sample.
exhaustive: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m exhaustive tests/runtime/test_interrupts.py

check: $(STAMP) chromium lint types test slow sizes

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	$(BIN)/python -m benchmarks.render

# A look at what grows: files above 300 lines want to be split.
sizes:
	@echo 'largest source files:'
	@find src -name '*.py' -exec wc -l {} + | grep -v ' total$$' | sort -rn | head -10

# The HTML report is tested in a real browser. Elsewhere than in CI those tests skip without one.
chromium:
	@if ! command -v chromium >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; \
		else \
			echo 'chromium is missing and cannot be installed without root: the report tests will skip'; \
		fi; \
	fi

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
