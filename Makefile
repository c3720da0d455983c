# One command each: `make test` is what CI runs, `make test-all` checks everything, `make demo` shows what it is for.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= auto

.DEFAULT_GOAL := help
.PHONY: help install lint format types rules unit test test-all fuzz demo docs clean

help: ## list these targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(VENV)/.installed: pyproject.toml src/torchpact_recipes/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,docs]" --editable "./src/torchpact_recipes[hub,plot,train]"
	@touch $@

install: $(VENV)/.installed ## create .venv with the pinned versions

lint: install rules ## ruff: lint and formatting; import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

rules: install ## import contracts; tests/rules has the others
	$(BIN)/lint-imports --no-cache

format: install ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install ## mypy
	$(BIN)/mypy

unit: install ## pytest, docstring and documentation examples included; not what is marked slow
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test: lint types unit ## lint, rules, types and tests: what CI runs, in less than 10 minutes on 2 cores

test-all: lint types ## also the tests marked slow
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m ""

fuzz: install ## 5,600 hostile files, records, caches and commands, and 2,000 random networks deployed
	$(BIN)/python -m tests.hostile.fuzz

demo: install ## a pretrained ResNet becomes adaptive, in minutes on a CPU; writes demo/report.html
	$(BIN)/torchpact demo

docs: install ## the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "$(BIN)/mkdocs serve shows it at http://127.0.0.1:8000 (searching needs a server)"

clean: ## remove what make has made
	rm -rf $(VENV) site demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
