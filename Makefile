# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Needs Python 3.11 or newer with venv; everything is installed into $(VENV) with pip.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint lowest clean

help: ## show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/.app ## FedPCD beside FedAvg on real images, 100 clients: table and picture (installation a few minutes, then about a minute)
	$(BIN)/fedpcd run . --compare-with fedavg

# Federations of real processes mostly wait for each other, so their tests run beside the others and give way to them. In a
# process group of their own (set -m) they can be interrupted; a shell's background processes otherwise ignore Ctrl-C.
FEDERATIONS := tests/docker tests/end_to_end/test_secure_federation.py tests/end_to_end/test_crashes.py tests/end_to_end/test_own_data.py \
  tests/end_to_end/test_hostile_site.py

test: lint ## every check: linters, types, tests, coverage
	@set -m; nice -n 15 $(BIN)/python -m pytest -q -p no:cacheprovider --durations=10 $(FEDERATIONS) > .federations.log 2>&1 & beside=$$!; set +m; \
	trap 'kill -INT $$beside' INT; failed=0; \
	$(BIN)/python -m pytest --cov --cov-report=term --durations=25 $(addprefix --ignore=,$(FEDERATIONS)) || failed=1; \
	wait $$beside || failed=1; cat .federations.log; exit $$failed

lint: $(VENV)/.dev ## style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# pip would take the newest releases; the bounds are turned into pins instead. Needs the package index, unlike `test`.
lowest: $(VENV)-lowest/.installed ## the library's tests with the oldest releases that pyproject.toml admits
	$(VENV)-lowest/bin/python -m pytest -q -m "not slow" -p no:cacheprovider tests/strategies tests/cases

$(VENV)-lowest/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check pytest pytest-timeout hypothesis daqp quadprog \
	  $$($(PYTHON) -c 'import re, tomllib; print(*(re.sub(">=([0-9.]+).*", r"==\1", d) for d in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))')
	@touch $@

clean: ## remove the virtual environment and everything generated, except results/
	rm -rf $(VENV) $(VENV)-lowest build dist *.egg-info .coverage .federations.log .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make a second call quick; a change of pyproject.toml installs again.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"FedPCD needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.app: pyproject.toml | $(BIN)/python
	@echo "installing the app into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[app]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing the app and the development tools into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[app,dev]'
	@touch $@ $(VENV)/.app
