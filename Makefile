# make demo | test | test-long | test-floor | test-newest | lint | types | docs | site | audit. One environment serves all, in which `demo` installs what a user would
# and the others what a developer needs; the second call installs nothing.
#   PYTHON=python3.12   interpreter of the environment
#   VENV=.venv          where it lies
#   TORCH=torch         another build of torch, e.g. one that is installed for your GPUs
#   TRITON=triton       for the kernels' tests on a CPU, where torch brings none; a pin of its own, as torch pins it too
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
PYTEST_ARGS ?=

BIN := $(VENV)/bin
USER_STAMP := $(VENV)/.fp8debug-user
STAMP := $(VENV)/.fp8debug
SITE_STAMP := $(VENV)/.fp8debug-docs
# Python compiles a module when it is first imported, and keeps it: all of torch's at once take longer than torch takes to
# arrive. The tests import torch in a hundred processes, so nothing may keep Python from keeping.
export PYTHONDONTWRITEBYTECODE :=
# A worker that dies ends the tests: with another in its place, xdist waits for ever.
PARALLEL := -n auto --dist loadfile --max-worker-restart=0
# A page in Chromium keeps one core at work and waits between: two at a time on two cores take little more than half the time of
# one after the other. More than four browsers each prepare runs and load the scripts for too few tests.
PAGES := -n auto --maxprocesses 4 --dist worksteal --max-worker-restart=0
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile

# make test-floor and test-newest, environments of their own: the oldest versions that pyproject.toml allows, and the newest that
# install. No part of CI; PIP_ARGS is for another index, such as that of builds for a CPU. The tests are those that ask each pinned
# package for something: torch (casts, layers, hooks), numpy, pyarrow, duckdb (rows, queries). Left out are the Triton kernels,
# whose version torch pins, long trainings, and what measures memory and time: FLOOR_TESTS="tests/recording tests/rules".
PIP_ARGS ?=
FLOOR_TESTS ?= tests/test_formats.py tests/test_recipes.py tests/test_linear.py tests/test_registry.py tests/metrics \
	tests/kernels/test_*.py tests/observer tests/store tests/recording/test_check_finite.py tests/recording/test_modes.py \
	tests/recording/test_low_bit_runs.py tests/rules/test_*_rules.py tests/rules/test_rule*.py tests/rules/reading

.PHONY: demo test test-long test-floor test-newest lint types docs site audit clean

demo: $(USER_STAMP)
	$(BIN)/python examples/demo.py

# A file at a time on every core, then pages, which wait, and at last times and what moves in a page, which want the machine for
# themselves. Named files may have none (5).
test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m 'not browser and not alone and not long' $(PYTEST_ARGS)
	$(BIN)/python -m pytest $(PAGES) -m 'browser and not alone and not long' -o testpaths=tests/dashboard $(PYTEST_ARGS) $(if $(PYTEST_ARGS),|| test $$? -eq 5)
	$(BIN)/python -m pytest -m alone -o testpaths='tests/dashboard tests/tools/test_speed.py' $(PYTEST_ARGS) $(if $(PYTEST_ARGS),|| test $$? -eq 5)

# More of the kinds that make test has some of. No part of CI.
test-long: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m 'long and not browser' $(PYTEST_ARGS)
	$(BIN)/python -m pytest $(PAGES) -m 'long and browser' -o testpaths=tests/dashboard $(PYTEST_ARGS)

test-floor: $(STAMP)
	test -x build/floor/bin/fp8debug || { $(PYTHON) -m venv build/floor && build/floor/bin/python -m pip --disable-pip-version-check \
		install --quiet $(PIP_ARGS) $$($(BIN)/python scripts/floors.py) && build/floor/bin/python -m pip install --quiet --no-deps -e .; }
	build/floor/bin/python -m pytest $(PARALLEL) -m 'not browser and not alone' $(PYTEST_ARGS) $(FLOOR_TESTS)

test-newest: $(STAMP)
	test -x build/newest/bin/python || $(PYTHON) -m venv build/newest
	build/newest/bin/python -m pip --disable-pip-version-check install --quiet --upgrade $(PIP_ARGS) -e '.[dumps,torchao]' $$($(BIN)/python scripts/floors.py --tools)
	build/newest/bin/python -m pytest $(PARALLEL) -m 'not browser and not alone' $(PYTEST_ARGS) $(FLOOR_TESTS) tests/adapters

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not see through package-dir, so it gets links under the import names.
types: $(STAMP)
	@mkdir -p build/mypy
	@ln -sfn ../../cli build/mypy/fp8debug_cli
	@ln -sfn ../../dashboard build/mypy/fp8debug_dashboard
	$(BIN)/mypy fp8debug build/mypy/fp8debug_cli build/mypy/fp8debug_dashboard tests examples scripts

# The pages and pictures that come from the code, which the tests hold equal, and the site of all pages.
docs: $(STAMP)
	$(BIN)/python scripts/docs.py
	$(MAKE) site

# build/site of the pages as they are: a dead link, a page outside the navigation or an address elsewhere is an error.
site: $(SITE_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python scripts/check_site.py build/site

# Known vulnerabilities of the pinned development set, in an environment of its own; needs the network, no part of CI.
audit:
	@test -x build/audit/bin/pip-audit || { $(PYTHON) -m venv build/audit && \
		build/audit/bin/python -m pip --disable-pip-version-check install --quiet pip-audit==2.10.1; }
	@build/audit/bin/python scripts/audit.py build/audit/bin/pip-audit

# torch comes first and by name: what the requirement torch>=2.6 alone would fetch can be gigabytes larger.
$(USER_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "fp8debug needs Python 3.10 or newer; choose one with make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --quiet --upgrade -c constraints.txt pip
	$(PIP) $(TORCH)
	$(PIP) -c constraints.txt -e '.[dashboard]'
	@touch $@

$(STAMP): $(USER_STAMP)
	@$(BIN)/python -c 'import triton' 2>/dev/null || test "$$(uname -sm)" != "Linux x86_64" || $(PIP) $(TRITON)
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

$(SITE_STAMP): $(STAMP)
	$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
