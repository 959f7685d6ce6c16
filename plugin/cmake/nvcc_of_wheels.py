"""Prints the path of the nvcc that PyPI's wheels brought into this Python. Together they are one toolkit."""

import importlib.util
import sys
from pathlib import Path

WHEELS = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"

spec = importlib.util.find_spec("nvidia")
roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
found = sorted(nvcc for root in roots for nvcc in root.glob("cu*/bin/nvcc"))
if not found:
    sys.exit(f"flashonnx: FLASHONNX_NVCC=wheels, but {sys.executable} has no nvcc: pip install {WHEELS}")
print(found[-1])
