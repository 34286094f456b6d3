# SPDX-License-Identifier: Apache-2.0
# Everything here runs on a bare machine: the first target that needs it makes .venv and installs the pinned set.
# Bytecode is compiled when a module is first imported: compiling all of it at once took half of the set-up.
#   make test PYTHON=python3.12      another interpreter for .venv
#   make test-long ONLY=kill         one piece of the long tests (pytest -k)
#   make test ORDER=random           tests in random order; ORDER=SEED repeats one

PYTHON ?= python3
ONLY ?=
ORDER ?=
VENV := .venv
STAMP := $(VENV)/.installed
PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest
# Three tests at a time with one thread each: many wait for processes of their own, so that two cores suffice.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

# An environment that happens to be active outside must not leak into this one.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE CONDA_PREFIX PIP_USER PIP_TARGET PIP_PREFIX

.DEFAULT_GOAL := help
.PHONY: help setup test test-fast test-long test-gpu lint format demo

help:
	@echo "make setup       .venv with everything that make test needs (pinned in constraints.txt)"
	@echo "make test        set-up, lint, fast and slow tests; ORDER=random shuffles them, ORDER=SEED repeats an order"
	@echo "make test-fast   the fast tests alone (about a minute)"
	@echo "make test-long   learning, soak and many kills; ONLY=name runs one piece"
	@echo "make test-gpu    the tests that need a GPU"
	@echo "make lint        ruff check, ruff format --check, mypy"
	@echo "make format      let ruff mend what it can"
	@echo "make demo        set-up, then teach a small world model a new task, and a policy in another"

setup: $(STAMP)
	-@$(PY) -m scripts.doctor --brief
	@echo "next:  source $(VENV)/bin/activate    then  make demo,  or  python -m scripts.train --list --long"

$(STAMP): setup.py constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: there is no '$(PYTHON)' here. Install Python 3.10 or newer and say which: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1), but 3.10 or newer is needed." \
	       "Install one and say which: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: $(PYTHON) has no venv module. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation --no-compile -e '.[dev]'
	@touch $(STAMP)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# While the linters run, one process compiles what three would each compile when they begin.
test: $(STAMP)
	@$(ONE_THREAD) $(PYTEST) --collect-only -qq >/dev/null 2>&1 & \
	$(MAKE) --no-print-directory lint; failed=$$?; wait; exit $$failed
	$(ONE_THREAD) $(PYTEST) -n 3 --dist worksteal --durations=10 -m "not long and not gpu and not network" $(if $(ORDER),--order $(ORDER))

test-fast: $(STAMP)
	$(PYTEST) $(if $(ORDER),--order $(ORDER))

test-long: $(STAMP)
	@$(ONE_THREAD) $(PYTEST) -n 2 --durations=10 -m long $(if $(ONLY),-k '$(ONLY)'); code=$$?; [ $$code != 5 ] || \
	  echo "make: no long test has '$(ONLY)' in its name. All of them: $(PYTEST) -m long --collect-only -q" >&2; exit $$code

test-gpu: $(STAMP)
	$(PYTEST) -m gpu

demo: $(STAMP)
	$(PY) -m scripts.demo
