# make install   installs and builds what the others need, into VENV
# make demo   installs what it needs, builds, trains a DeepSeek-V3-style model on two processes (no GPU needed), and writes runs/demo/report.html
# make demo DEVICE=cuda   the same on all GPUs; a PyTorch of PYTHON that sees a GPU is used as it is
# make demo-deepspeed   the same model with DeepSpeed, its own MoE layers and swapped ones
# make demo-overlap   two micro-batches through a stack of MoE layers, by turns, and a picture of who runs what when
# make test   installs, builds, runs the tests of every day, which need no GPU          make test-all   and then the slow ones
# LANES       how many tests run at once, 2 if not given; 1 shows each test's output as it comes
# PIP_ARGS    options for pip, such as the index of PyTorch's CPU builds, which are much smaller than the default ones
# VENV=       run PYTHON itself and install nothing          DEMO_ARGS   more options of examples/megatron/train.py
# make lint   ruff, mypy and clang-format          make format   formats Python and C++
# make docs   builds the documentation into build/site/index.html, which a browser opens without a server
# make wheel   builds dist/: the source distribution, and a wheel without the modules of one PyTorch, which deepep-moe build adds
# make bench   the CPU benchmark          make clean   removes what was built

PYTHON ?= python3
DEVICE ?= cpu
LANES ?= 2
VENV := $(if $(filter cuda,$(DEVICE)),build/venv-cuda,.venv)
NUM_RANKS ?= $(if $(filter cpu,$(DEVICE)),2)
PYTEST_LANES := $(if $(filter-out 1,$(LANES)),-n $(LANES) --dist loadgroup)
SOURCES := setup.py pyproject.toml constraints.txt $(shell find csrc -type f)
NATIVE = $(shell find csrc tests/emulation tests/threads benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# PyTorch and NVSHMEM are installed first: modules are built for those that are there. NVSHMEM is 60 MB, loads without a GPU and serves
# builds with nvcc only. A PyTorch for GPUs brings its own, which stays.
NVSHMEM := $(if $(wildcard $(or $(CUDA_HOME),/usr/local/cuda)/bin/nvcc),nvidia-nvshmem-cu13==3.4.5)
CONSTRAINTS := -c constraints.txt
EXTRAS := megatron,deepspeed,dev,docs
# On GPUs, the packages of a PYTHON whose PyTorch sees one are used from its own folders, whichever environment it is itself.
ifeq ($(DEVICE),cuda)
ifeq ($(shell $(PYTHON) -c 'import torch; print(torch.cuda.is_available())' 2>/dev/null),True)
SHARED := $(shell $(PYTHON) -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")))')
CONSTRAINTS :=
EXTRAS := megatron,deepspeed
endif
endif

.DEFAULT_GOAL := help
.PHONY: help demo demo-deepspeed demo-overlap test test-all lint format docs wheel bench clean install

ifeq ($(strip $(VENV)),)
RUN := $(PYTHON) -m
SCRIPT := $(PYTHON)
CLANG_FORMAT := clang-format
STAMP :=
DEMO_STAMP :=
else
BIN := $(VENV)/bin
RUN := $(BIN)/python -m
SCRIPT := $(BIN)/python
CLANG_FORMAT := $(BIN)/clang-format
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "deepep_moe needs Python 3.11 or newer: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "cannot create $(VENV): install Python's venv (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	for folder in $(SHARED); do echo $$folder >>$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth; done

# $(call install,extras,environment of the build). Without kernels of GPUs nothing needs NVSHMEM.
define install
	@echo "1 of 2: installing PyTorch into $(VENV)"
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) $(CONSTRAINTS) torch
	$(if $(and $(NVSHMEM),$(if $(2),,x)),$(BIN)/python -c 'import nvidia.nvshmem' 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check -q --no-deps $(PIP_ARGS) $(NVSHMEM))
	@echo "2 of 2: building deepep_moe$(if $(2), for CPUs) and installing its extras $(1), which takes some minutes"
	$(2) $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) $(CONSTRAINTS) -e ".[$(1)]"
endef

$(STAMP): $(SOURCES) | $(BIN)/python
	$(call install,$(EXTRAS))
	touch $(DEMO_STAMP) $(STAMP)

# What the demos with Megatron-Core and of the overlap need, and no more: who has only the README waits for it. On CPUs that is no kernel,
# unless `make install` has built them.
$(DEMO_STAMP): $(SOURCES) | $(BIN)/python
	$(call install,megatron,$(if $(filter cuda,$(DEVICE))$(wildcard $(STAMP)),,DEEPEP_MOE_CUDA=0))
	touch $(DEMO_STAMP)
endif

ifneq ($(strip $(VENV)),)
# What lint reads, without a build. After `make install` it is there.
LINT_STAMP := $(if $(wildcard $(STAMP)),,$(VENV)/.lint)
$(VENV)/.lint: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*project["dependencies"], *project["optional-dependencies"]["dev"], sep="\n")' >$(VENV)/lint.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) $(CONSTRAINTS) -r $(VENV)/lint.txt
	touch $@
endif

help:
	@sed -n '/^$$/q; s/^# //p' $(firstword $(MAKEFILE_LIST))

install: $(STAMP)

demo: $(DEMO_STAMP)
	$(SCRIPT) examples/megatron/train.py --device $(DEVICE) $(if $(NUM_RANKS),--num-ranks $(NUM_RANKS)) --dispatcher deepep_moe --compare alltoall --timeline --out runs/demo $(DEMO_ARGS)

demo-deepspeed: $(STAMP)
	$(SCRIPT) examples/deepspeed/train.py --device $(DEVICE) $(if $(NUM_RANKS),--num-ranks $(NUM_RANKS)) --out runs/demo-deepspeed $(DEMO_ARGS)

demo-overlap: $(DEMO_STAMP)
	$(SCRIPT) examples/overlap/decode.py --device $(DEVICE) $(if $(NUM_RANKS),--num-ranks $(NUM_RANKS)) --out runs/demo-overlap $(DEMO_ARGS)

# With one test at a time the second core is idle for most of the run: few tests keep two ranks busy at once.
test: $(STAMP)
	CUDA_VISIBLE_DEVICES= $(RUN) pytest -m "not slow" $(PYTEST_LANES) $(PYTEST_ARGS)

test-all: test
	CUDA_VISIBLE_DEVICES= $(RUN) pytest -m slow $(PYTEST_LANES) $(PYTEST_ARGS)

lint: $(LINT_STAMP)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	rm -rf build/typed && mkdir -p build/typed/deepep_moe
	ln -s $(CURDIR)/deepep_moe/* $(CURDIR)/integrations build/typed/deepep_moe
	$(RUN) mypy
	$(CLANG_FORMAT) --dry-run -Werror $(NATIVE)

format: $(STAMP)
	$(RUN) ruff format .
	$(CLANG_FORMAT) -i $(NATIVE)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict
	@echo "open build/site/index.html"

# The wheel comes from the source distribution, in an isolated environment. auditwheel names it after the oldest glibc that it runs with.
wheel: $(STAMP)
	rm -rf build/wheel *.egg-info
	DEEPEP_MOE_MODULES=_C $(RUN) build --outdir build/wheel .
	PATH=$(abspath $(BIN)):$$PATH $(RUN) auditwheel repair --wheel-dir dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist
	@ls -l dist

bench: $(STAMP)
	$(SCRIPT) benchmarks/run.py exchange --backend shm --num-tokens 4096 --hidden 2048 --num-experts 64
	$(SCRIPT) benchmarks/run.py gate
	$(SCRIPT) benchmarks/run.py deepspeed --device cpu

clean:
	rm -rf $(VENV) build dist runs *.egg-info deepep_moe/*.so
