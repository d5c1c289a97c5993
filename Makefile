# make demo   install, then raw text to generated text in minutes
# make test   install, then the tests
# make lint   install, then lint, format and type checks
#
# PYTHON=python3.12       another interpreter than the first of python3, python3.12, python3.11 that fits
# TORCH_INDEX=URL         take torch from this package index (README, "Installing")

PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null \
	&& echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Each worker of pytest-xdist gets one thread: more would fight over the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup

.PHONY: install demo test lint format clean
install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "python3: got none that is 3.11 or 3.12, expected one;" \
		"fix with: apt-get install python3 python3-venv, or PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet --constraint constraints.txt setuptools
	test -z "$(TORCH_INDEX)" || $(PIP) install --index-url $(TORCH_INDEX) "$$(grep ^torch== constraints.txt)"
	$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

demo: install
	$(BIN)/gla demo

test: install
	$(PYTEST) tests

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist gla.egg-info
