# `make demo` opens the console on a small engine; `make test` is what CI runs.
# TORCH=cpu takes torch's CPU build (see README, "What is downloaded").
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
TORCH ?=
TORCH_FLAGS := $(if $(filter cpu,$(TORCH)),--extra-index-url https://download.pytorch.org/whl/cpu,)

.PHONY: demo test unit end-to-end check reference clients venv clean
demo: $(VENV)/.demo
	@$(BIN)/ppconsole demo

# Engines wait more than they work: unit tests and checks run beside them, and give way to them.
# Each of the three prints its output when it has ended. A test that fails runs once more alone (tests/again.py).
test: $(VENV)/.test
	@echo "Running checks, unit tests and end-to-end tests side by side"
	@$(MAKE) --no-print-directory -j3 --output-sync=target check unit end-to-end

# Of 14,000 modules pip would compile all, one by one; tests import a tenth, and each first import writes its own.
# Its resolver has looked for conflicts; the look at the end is another one at all that is there, some seconds of a core.
test: PIP += --no-compile --no-warn-conflicts

# Some machines have Python write no bytecode: each of hundreds of engine processes would compile all sources.
test unit end-to-end: export PYTHONDONTWRITEBYTECODE :=
unit: $(VENV)/.test
	@nice $(BIN)/python tests/again.py .pytest_cache/unit -n $$(nproc) --ignore tests/end_to_end tests

# Tests that share an engine go to one worker, the long ones first (tests/end_to_end/conftest.py).
end-to-end: $(VENV)/.test
	@$(BIN)/python tests/again.py .pytest_cache/end_to_end -n $$(( $$(nproc) > 4 ? $$(nproc) / 2 : 2 )) --dist loadgroup --no-loadscope-reorder tests/end_to_end

check: $(VENV)/.test
	@nice $(BIN)/ruff check . && nice $(BIN)/ruff format --check . && nice $(BIN)/mypy && nice $(BIN)/lint-imports

# Writes docs/reference/ from the code; a test fails when it is stale.
reference: $(VENV)/.test
	@$(BIN)/python docs/reference/generate.py

# Clients of the HTTP port from PyPI, each in an environment of its own in .clients/. CI runs none: some download GB.
clients: $(VENV)/.test
	@$(BIN)/python tests/clients/run_all.py

venv: $(VENV)/.test

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "ppconsole needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) -V 2>&1). Choose one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "Python's venv module is missing. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Making $(VENV) (once; torch's CPU build is the largest download)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(VENV)/bin/python constraints.txt
	@$(PIP) $(TORCH_FLAGS) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@$(PIP) -e '.[engine]'
	@touch $@

# pip keeps one core busy. So some wheels are unpacked beside torch, which needs none of them; the last call of pip adds
# what they depend on. Then the other core runs tests of kernels, for their machine code and for torch's bytecode.
# hatchling and what it needs build this package without an environment of their own, which takes two further pips.
BESIDE := editables hatchling iniconfig llvmlite mypy numba numpy packaging pathspec pluggy Pygments pytest \
  pytest-asyncio pytest-timeout ray transformers trove-classifiers
$(VENV)/.beside: $(VENV)/bin/python constraints.txt
	@$(PIP) --no-deps $(BESIDE)
	@touch $@

$(VENV)/.test: $(VENV)/bin/python constraints.txt pyproject.toml
	@$(MAKE) --no-print-directory -j2 PIP='$(PIP)' $(VENV)/.torch $(VENV)/.beside
	@PYTHONPATH=kernels:engine $(BIN)/python -m pytest -p no:cacheprovider tests/kernels/test_vectors.py >/dev/null 2>&1 & \
	  $(PIP) --no-build-isolation -e '.[engine,serve,otel,ray,dev]'; code=$$?; wait; exit $$code
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .clients build dist .pytest_cache .mypy_cache .ruff_cache
