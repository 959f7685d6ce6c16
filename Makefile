# `make demo` and `make test` set up all they need in this clone; see scripts/setup.py.
PYTHON ?= python3
RUN := .venv/bin/python
SETUP ?=  # more options for scripts/setup.py, e.g. --define FLASHONNX_CUDA=OFF

.PHONY: help setup test test-all demo lint format clean

help:
	@echo "make demo      a real model from PyTorch to a fused ONNX model, measured"
	@echo "make test      the everyday tests (CUDA code for one architecture)"
	@echo "make test-all  every test, every architecture"
	@echo "make lint      formatting, style and types"
	@echo "make setup     .venv and build/ alone;  make clean  removes both"

setup:
	$(PYTHON) scripts/setup.py $(SETUP)

test:
	$(PYTHON) scripts/setup.py --tensorrt $(SETUP)
	$(RUN) -m pytest -m "not slow"

test-all:
	$(PYTHON) scripts/setup.py --tensorrt --archs "80;90a;120" $(SETUP)
	$(RUN) -m pytest -m "slow or not slow"

demo: setup
	$(RUN) samples/minilm/demo.py

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	.venv/bin/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

format: setup
	$(RUN) -m ruff format .
	.venv/bin/clang-format -i $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

clean:
	rm -rf .venv build dist
