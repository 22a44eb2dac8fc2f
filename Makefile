# What a newcomer, a developer and CI run.  Each target makes the virtual environment it needs, once.
#
#   PYTHON=python3.12   the interpreter that makes the environment
#   PIP_ARGS="..."      passed on to `pip install` (README: which PyTorch)
#   PYTEST_ARGS="..."   passed on to pytest

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= auto

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)
# Bytecode is kept, also where PYTHONDONTWRITEBYTECODE is set: tests start many processes, and each would compile the
# package again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

# Empty, or the one thing that keeps PYTHON from making the environment.
missing = $(shell \
	version=$$($(PYTHON) -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null); \
	if [ -z "$$version" ]; then \
		echo "Espalier needs Python 3.11 or newer, and '$(PYTHON)' does not run here. Name another: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; \
	elif ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "Espalier needs Python 3.11 or newer, and '$(PYTHON)' is $$version. Name another: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; \
	elif ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "Espalier needs the venv and ensurepip modules, which '$(PYTHON)' $$version lacks. On Debian and Ubuntu: apt install python3-venv"; \
	fi)
require_python = $(if $(missing),$(error $(missing)))

.DEFAULT_GOAL := help
.PHONY: help demo test test-lab test-full test-gpu lint types format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(VENV)/.installed ## complete held-out Python with the bundled model, plain and by tree, and draw a round
	@$(BIN)/espalier demo

test: $(VENV)/.installed-test ## the tests of the package
	@$(PYTEST) --ignore=tests/lab $(PYTEST_ARGS)

test-lab: $(VENV)/.installed-test ## the tests of the laboratory
	@$(PYTEST) tests/lab $(PYTEST_ARGS)

test-full: $(VENV)/.installed-test ## the tests over the whole product of layouts (long)
	@$(PYTEST) -m "" $(PYTEST_ARGS)

# In one process: they share a GPU, and some measure its memory.
test-gpu: $(VENV)/.installed-test ## the tests that need a GPU, and the kernels' once more as on a card with 99 KB of shared memory
	@$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)
	@ESPALIER_SHARED_MEMORY=101376 $(BIN)/python -m pytest -m gpu tests/kernels tests/attention $(PYTEST_ARGS)

lint: $(VENV)/.installed-test ## ruff: rules and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(VENV)/.installed-test ## mypy
	@$(BIN)/mypy

format: $(VENV)/.installed-test ## rewrite the code in the house's format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean: ## remove the virtual environment and every cache
	@rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find espalier lab tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml
	$(require_python)
	@echo "Making $(VENV) with $(PYTHON) and installing Espalier and what it needs; PyTorch is the large part (README: which PyTorch)."
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed
	@echo "Installing what the tests need."
	@$(INSTALL) --quiet --editable '.[test]'
	@touch $@
