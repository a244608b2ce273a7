.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-compose test-browser lint check parity chaos chaos-batch docs lock clean

PYTHON ?= python3
BIN := .venv/bin

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /make \1\t/'

setup:  ## make .venv with everything (one to three minutes once, then nothing)
	@$(PYTHON) scripts/setup.py

demo: setup  ## start the whole stack on this machine, ask it one question
	@$(BIN)/headrace demo

up: setup  ## start the whole stack and keep it up
	@$(BIN)/headrace up

test: setup  ## every test, real engines included
	@$(BIN)/python -m headrace.cli.demo.model > /dev/null
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=25

test-compose: setup  ## build the images, run compose.yaml for real, take it down (ten minutes; a Docker engine)
	@if docker compose version >/dev/null 2>&1; then docker compose build; else docker-compose build; fi
	@$(BIN)/python -m pytest -s tests/compose/stack.py

test-browser: setup  ## the console in a headless Chromium, which must be installed (apt-get install chromium)
	@HEADRACE_NEEDS_CHROMIUM=1 $(BIN)/python -m pytest tests/browser

lint: setup  ## format, lint, types, import rules, spelling
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

check: lint  ## the same, and the unit tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit

parity: setup  ## ask headrace and vLLM's own server the same questions, write docs/parity.md (ten minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity

chaos: setup  ## 500 random faults under 10,000 requests, then every invariant checked (twenty minutes)
	@$(BIN)/python -m tests.faults $(CHAOS)
	@$(BIN)/python -m tests.faults.cancels
	@$(BIN)/python -m tests.faults.drains

chaos-batch: setup  ## a batch of 20,000 lines under 50 kills of whatever there is, then `headrace batch run` under 10
	@$(BIN)/python -m tests.faults.batch
	@$(BIN)/python -m tests.faults.batch --run --kills 10

docs: setup  ## write the generated parts of docs/ again, after a change of messages or modules
	$(BIN)/python scripts/protocol_tables.py
	$(BIN)/python scripts/module_map.py
	$(BIN)/python scripts/metrics_table.py
	$(BIN)/python scripts/dashboards.py
	$(BIN)/python -m scripts.asyncapi

lock: setup  ## make the locks of requirements/ from the .in files again
	$(BIN)/python scripts/lock.py --upgrade

clean:  ## remove .venv and every cache here
	rm -rf .venv .setup.lock .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist
	find shared services cli scripts tests -name __pycache__ -prune -exec rm -rf {} +
