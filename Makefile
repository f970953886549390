# Every target does its own set-up in .venv, says what it does, and is cheap when nothing changed.
#
#   make train ARGS="model=dlrm optim.lr=3e-4"     overrides for the trainer
#   make test  ARGS="tests/unit -k units"          arguments for pytest
#   make PYTHON=/path/to/python3.11 install        another interpreter for a new .venv
PYTHON ?= python3.11
ARGS ?=
BENCH_DIR ?= benchmarks/results/local

PY := .venv/bin/python
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help install install-dev train test test-slow lint format bench wheel clean

help:  ## say what each target does
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

install:  ## .venv with the locked CPU set, the package in editable form, kernels compiled
	@bash requirements/install.sh runtime && echo "setup: .venv is ready"

install-dev:  ## the same, and the tools for checking and releasing
	@bash requirements/install.sh dev && echo "setup: .venv is ready, with the tools for development"

train: install  ## train a model on MovieLens-100K (or what ARGS say) and print its test AUC
	@$(PY) -m torchrec_kstep.train $(ARGS)

test: install-dev  ## the tests of every push, under 10 minutes on 2 cores
	@$(PY) -m pytest -m "not slow" $(ARGS)

test-slow: install-dev  ## the other tests, under an hour on 2 cores
	@$(PY) -m pytest -m slow $(ARGS)

lint: install-dev  ## ruff, formatting, types, layers, spelling
	@bash .ci/lint

format: install-dev  ## let ruff format and fix what it can
	@$(PY) -m ruff check --fix --quiet . ; $(PY) -m ruff format .

bench: install-dev  ## every benchmark at its quick size; results as JSON
	@$(PY) -m benchmarks --quick --json-dir "$(BENCH_DIR)"

wheel: install-dev  ## sdist and wheel into dist/
	@$(PY) -m build --no-isolation --outdir dist .

clean:  ## remove build products; .venv, runs and prepared data stay
	rm -rf build dist *.egg-info torchrec_kstep/*.so .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
