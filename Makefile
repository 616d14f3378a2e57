# Two commands do all of their own set-up: `make serve` and `make test`.
#   make serve PORT=9000 MODEL=/path/to/model
# TORCH_INDEX=URL names a package index with CPU builds of torch, where the default one has none.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8000
MODEL ?= cloister-5m
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TORCH := torch==2.13.0
TORCH_FLAGS := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: serve test check install docs clean

serve: $(VENV)/.installed
	@$(BIN)/cloister serve --model "$(MODEL)" --port $(PORT)

test: $(VENV)/.installed-test
	@$(BIN)/python -m pytest

check: $(VENV)/.installed-check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/mkdocs build --strict --quiet

install: $(VENV)/.installed

docs: $(VENV)/.installed-check
	@$(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) build dist site

$(VENV)/bin/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Cloister needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) \
	  || { echo "could not make $(VENV); on Debian: apt install python3-venv" >&2; exit 1; }

# Without a GPU a CPU build of torch is enough, and several GB smaller; where no index has one, the default build serves.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing Cloister into $(VENV) (once; a minute or two)"
	@command -v nvidia-smi >/dev/null 2>&1 \
	  || $(PIP) install $(TORCH_FLAGS) "$(TORCH)+cpu" 2>/dev/null \
	  || echo "no CPU build of torch was found; taking the default one (TORCH_INDEX=URL names another index)"
	@$(PIP) install $(TORCH_FLAGS) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@$(PIP) install $(TORCH_FLAGS) -e '.[test]'
	@touch $@

$(VENV)/.installed-check: $(VENV)/.installed
	@$(PIP) install $(TORCH_FLAGS) -e '.[test,check]'
	@touch $@
