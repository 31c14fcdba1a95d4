# `make quickstart` and `make test` create .venv and install emailrl into it when needed.

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
HALF := $(VENV)/.half-installed
LOG := $(VENV)/install.log
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS)
# pip is quiet on success; on failure, the end of its log is shown.
TELL := >>$(LOG) 2>&1 || { status=$$?; tail -n 25 $(LOG) >&2; echo "make: pip failed; its full output is in $(LOG)" >&2; exit $$status; }

.PHONY: help install quickstart test test-vllm test-gpu test-clients lint format docs

help:
	@echo "make install      install emailrl and its test dependencies into $(VENV)"
	@echo "make quickstart   run the whole cycle on a demo mailbox, on a CPU"
	@echo "make test         run the tests, in one process per core"
	@echo "make test-vllm    run the tests against a real vLLM, if installed (minutes)"
	@echo "make test-gpu     run the tests that need a CUDA GPU (minutes)"
	@echo "make test-clients run the tests with programs of others, which they install into $(VENV)/clients (minutes)"
	@echo "make lint         run ruff and mypy"
	@echo "make format       fix and format with ruff"
	@echo "make docs         generate the reference pages and build the documentation site into site/"

install: $(INSTALLED)

# An environment that make started but could not finish is rebuilt; its marker stays until it is complete. One created by other
# means is used as is, never cleared.
# torch is installed first and alone, so that the constraints decide its build (CPU or CUDA) before other packages require it.
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
	@$(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --max-worker-restart 0 --dist loadfile

test-vllm: $(INSTALLED)
	@$(BIN)/python -m pytest tests/engines/test_vllm_real.py -m slow -rs

test-gpu: $(INSTALLED)
	@$(BIN)/python -m pytest tests/gpu -m gpu -rsP

test-clients: $(INSTALLED)
	@$(BIN)/python -m pytest tests/integrations -m "clients or not clients" -rs

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(INSTALLED)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(INSTALLED)
	@$(BIN)/python docs/generate.py docs
	@$(BIN)/zensical build --strict
	@$(BIN)/python docs/generate.py site
	@cd docs && find . -name '*.md' -exec cp --parents -t ../site {} +
	@echo "site/index.html opens as a file; its search needs a server: python3 -m http.server -d site"
