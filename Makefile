# make demo: from raw text to a trained FoX on this machine.   make test: everything that CI checks.
# make quick: lint, and for a minute the tests nearest to what changed.
# make docs: the pages as a site in build/site/.
# make test-gpu: every kernel on this machine's GPU.   With VENV= it takes PYTHON as it is and installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One more than CI has cores: what runs on the cluster, or is killed and resumed, often leaves a core idle.
PROCESSES ?= 3
GPU_PROCESSES ?= 16

.PHONY: demo test quick test-gpu lint docs clean

demo: $(VENV)/.installed
	$(BIN)/palimpsest experiment=demo

test: $(VENV)/.installed-dev
	$(MAKE) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

quick: $(VENV)/.installed-dev
	$(MAKE) lint
	$(BIN)/python -m tests.quick

# In processes that share the GPU, since compiling the kernels takes most of the time; then, alone, what wants it whole.
test-gpu: private RUN := $(if $(VENV),$(BIN)/python,$(PYTHON))
test-gpu: private export OMP_NUM_THREADS := 1
test-gpu: $(if $(VENV),$(VENV)/.installed-dev)
	$(RUN) -c "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 'make test-gpu: there is no CUDA device')"
	$(RUN) -m pytest tests/kernels -m "gpu and not soak" --numprocesses $(GPU_PROCESSES) --dist load --maxschedchunk 1 \
		-o faulthandler_timeout=240; \
	status=$$?; $(RUN) -m pytest tests/kernels -m soak && exit $$status

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	$(BIN)/python docs/build.py
	$(BIN)/zensical build --strict --clean

# The lock decides the versions; what is installed is installed again only when it changes.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev]'
	touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[docs]'
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) .cache build data runs
