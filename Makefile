# Two commands do everything on a fresh machine with Python 3.11 and pip:
#   make demo    makes .venv, installs, runs the main job on real pictures
#   make test    makes .venv, installs, runs the tests
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALLED := $(VENV)/installed
SIZE ?= 16384
CHROMIUM := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

.PHONY: all demo test full check bench gpu peer-tests format docs chromium clean

all: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(if $(shell command -v $(PYTHON)),$(PYTHON),python3) -m venv $(VENV)
	$(PIP) -e '.[torch,xarray,examples,test]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/eigenpatches.py --size $(SIZE) --output demo-output

# Expensive tables run as a seeded sample here, whole in `make full`.
test: $(INSTALLED) chromium
	$(BIN)/python -m tests.halves

full: $(INSTALLED) chromium
	$(BIN)/python -m tests.full

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

# Operators, samples and models on the GPU, where there is one.
gpu: $(INSTALLED)
	$(BIN)/python -m tests.gpu

peer-tests: $(INSTALLED)
	$(BIN)/python -m tests.peer

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py

# The page test looks at the monitoring page in a real browser; without one, and without the right to install one,
# it is skipped and says so.
chromium:
ifeq ($(CHROMIUM),)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	else echo "no Chromium found: the test of the monitoring page is skipped (install the package chromium)"; fi
endif

clean:
	rm -rf $(VENV) build dist demo-output .pytest_cache .mypy_cache .ruff_cache
