# Two commands do all of their own set-up: `make serve` and `make test`.
#   make serve PORT=9000 MODEL=/path/to/model      (MODEL=cloister-5m downloads nothing: it is in the package)
# `make serve` compiles the kernels for this machine's CPU; ISA=all those for every CPU, which tests and wheels for others need.
# Serving on a CPU needs a C++ compiler (Debian: apt install g++) and no torch. Tests need torch, and so does a GPU, and so does a
# machine without a compiler. TORCH_INDEX=URL names a package index with CPU builds of torch, where the default one has none.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
PORT ?= 8000
MODEL ?=
ISA ?= native
TORCH_INDEX ?=
GPU_PYTHON ?= 3.12
TEST_PROCESSES ?= $(shell n=$$(( ($$(nproc) * 3 + 1) / 2 )); echo $$(( n < 8 ? n : 8 )))
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TORCH := torch==2.13.0
TORCH_FLAGS := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
HAS_GPU := $(shell command -v nvidia-smi)
SOURCES := pyproject.toml CMakeLists.txt $(wildcard src/cloister/backends/native/cpp/*)
# Without a GPU a CPU build of torch is enough, and several GB smaller; where no index has one, the default build serves.
TAKE_TORCH := $(if $(HAS_GPU),:,$(PIP) install $(TORCH_FLAGS) "$(TORCH)+cpu" 2>/dev/null \
  || echo "no CPU build of torch was found; taking the default one (TORCH_INDEX=URL names another index)")
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
# Without isolation and in a folder that stays, only what changed is compiled again.
INSTALL = $(BIN)/python deploy/install.py $(TORCH_FLAGS) --no-build-isolation --config-settings=build-dir='build/{wheel_tag}' \
  --config-settings=cmake.define.CLOISTER_ISA=$(ISA) --editable

.PHONY: serve test test-slow check install docs cluster-demo gpu-pack clean

serve: $(VENV)/.installed
	@exec $(BIN)/cloister serve $(if $(MODEL),--model "$(MODEL)") --port $(PORT)

# Three processes for two cores, since tests wait for servers a third of their time, up to eight: each imports torch and takes about a
# gigabyte. Tests of one file share their servers.
# In the order of collection: by number of tests per file, the slowest files, which have few, would start last.
# More threads of OpenMP than cores wait for each other in a loop: small products would take six times the processor time.
# Hundreds of tests start a Python of their own, which would compile every module again if the environment forbade to keep them.
test: $(VENV)/.installed-test
	@$(PYTEST)

# What `make test` leaves out, and all examples of the tests that draw theirs at random.
test-slow: $(VENV)/.installed-test
	@CLOISTER_TEST_EXAMPLES=all $(PYTEST) -m "slow or hypothesis"

check: $(VENV)/.installed-check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/mkdocs build --strict --quiet

install: $(VENV)/.installed

docs: $(VENV)/.installed-check
	@$(BIN)/mkdocs serve

# A Ray of three raylets on this machine, four replicas on them, one raylet killed under load; what the client saw.
cluster-demo: $(VENV)/.installed-ray
	@$(BIN)/python -m benchmarks.cluster_demo

# A folder for a GPU machine without a network; GPU_PYTHON is the version of Python there.
gpu-pack: $(VENV)/.ready
	@$(BIN)/python -m benchmarks.gpu.pack --python "$(GPU_PYTHON)"

clean:
	rm -rf $(VENV) build dist site

$(VENV)/bin/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Cloister needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) \
	  || { echo "could not make $(VENV); on Debian: apt install python3-venv" >&2; exit 1; }

$(VENV)/.ready: pyproject.toml | $(VENV)/bin/python
	@$(PIP) install cmake ninja $$($(BIN)/python -c \
	  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
	@touch $@

$(VENV)/.installed: $(SOURCES) $(VENV)/.ready
	@echo "installing Cloister into $(VENV): packages, then kernels are compiled for this CPU (once; a minute or two)"
	@$(INSTALL) '.$(if $(HAS_GPU),[gpu])'
	@$(BIN)/python -c 'from cloister.backends.native import _native' 2>/dev/null || { \
	  echo "the native kernels were not compiled (\`$(BIN)/cloister doctor\` says why); taking torch instead, which is slower"; \
	  $(TAKE_TORCH); $(INSTALL) '.[torch]'; }
	@touch $@

$(VENV)/.installed-test $(VENV)/.installed-check: ISA := all

$(VENV)/.installed-ray: $(VENV)/.installed
	@$(INSTALL) '.[ray]'
	@touch $@

$(VENV)/.installed-test: $(SOURCES) $(VENV)/.ready
	@$(TAKE_TORCH)
	@$(INSTALL) '.[test]'
	@touch $(VENV)/.installed $@

# `make CHECKED=test,check,chart check`, as CI does, adds Helm, with which tests/deploy render the chart: 244 MB.
CHECKED := test,check

# Nothing that is checked needs kernels: where none are compiled yet, none are for this.
$(VENV)/.installed-check: pyproject.toml $(VENV)/.ready
	@$(TAKE_TORCH)
	@$(INSTALL) '.[$(CHECKED)]' $(if $(wildcard $(VENV)/.installed),,--config-settings=wheel.cmake=false)
	@touch $@
