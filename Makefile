# `make quickstart` and `make test` create .venv and install emailrl into it when needed.

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
HALF := $(VENV)/.half-installed
LOG := $(VENV)/install.log
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS)
# pip is quiet where it succeeds; where it fails, the end of what it said is shown.
TELL := >>$(LOG) 2>&1 || { status=$$?; tail -n 25 $(LOG) >&2; echo "make: pip failed; all it said is in $(LOG)" >&2; exit $$status; }

.PHONY: help install quickstart test test-vllm test-gpu lint format docs

help:
	@echo "make install      emailrl and what its tests need, into $(VENV)"
	@echo "make quickstart   the whole cycle on a demo mailbox, on a CPU"
	@echo "make test         the tests"
	@echo "make test-vllm    the tests against a real vLLM, where one is installed (minutes)"
	@echo "make test-gpu     the tests that need a CUDA GPU (minutes)"
	@echo "make lint         ruff and mypy"
	@echo "make format       ruff's formatting"
	@echo "make docs         docs/cli.md and docs/settings.md from the code"

install: $(INSTALLED)

# An environment that make began and could not finish is begun anew, its marker kept until it is whole; one made by other means is
# used as it is, never cleared.
# torch goes first and alone, so that the build the constraints allow (CPU or CUDA) is settled before anything asks for one.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("emailrl needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "installing emailrl into $(VENV) (a few minutes the first time)" >&2
	@if [ -z "$$(ls -A $(VENV) 2>/dev/null)" ]; then mkdir -p $(VENV) && touch $(HALF); fi
	@if [ -e $(HALF) ]; then find $(VENV)/ -mindepth 1 -maxdepth 1 ! -name $(notdir $(HALF)) -exec rm -rf {} + && $(PYTHON) -m venv $(VENV); fi
	@: >$(LOG)
	@$(PIP) torch $(TELL)
	@$(PIP) --editable '.[dev]' $(TELL)
	@rm -f $(HALF) && touch $@

quickstart: $(INSTALLED)
	@$(BIN)/emailrl quickstart

test: $(INSTALLED)
	@$(BIN)/python -m pytest

test-vllm: $(INSTALLED)
	@$(BIN)/python -m pytest tests/engines/test_vllm_real.py -m slow -rs

test-gpu: $(INSTALLED)
	@$(BIN)/python -m pytest tests/gpu -m gpu -rs

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(INSTALLED)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(INSTALLED)
	@$(BIN)/python -m emailrl.cli.reference docs
