# make demo   installs, builds, trains a DeepSeek-V3-style model on two processes (no GPU needed)
# make test   installs, builds, runs every test that needs no GPU
# PIP_ARGS    options for pip, such as the index of PyTorch's CPU builds, which are much smaller than the default ones
# make lint   ruff and mypy          make bench   the CPU benchmark          make clean   removes what was built

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NUM_RANKS ?= 2
STAMP := $(VENV)/.installed
SOURCES := setup.py pyproject.toml constraints.txt $(shell find csrc -type f)

.PHONY: demo test lint bench clean install

install: $(STAMP)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "deepep_moe needs Python 3.11 or newer: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "cannot create $(VENV): install Python's venv (Debian, Ubuntu: apt install python3-venv)"; exit 1; }

$(STAMP): $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints.txt -e ".[megatron,dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/megatron/train.py --num-ranks $(NUM_RANKS) --dispatcher deepep_moe --compare alltoall --out runs/demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m deepep_moe.bench
	$(BIN)/python -m deepep_moe.bench gate

clean:
	rm -rf $(VENV) build dist runs *.egg-info deepep_moe/_C*.so
