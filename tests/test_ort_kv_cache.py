"""FlashAttentionKVCache in ONNX Runtime: the same cases, in place and not, in sessions that go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cache_cases
import numpy as np
import pytest
from cache_cases import CacheCase
from cache_nodes import CACHES, asked_for, one_node, run
from cache_seam import check_cache_outputs
from cases import numpy_dtype
from flashonnx.reference import Array
from nodes import DOMAIN, open_session
from onnx import TensorProto, helper
from seam import Buffer, address
from test_cache_kernels import on_devices

ort = pytest.importorskip("onnxruntime")
flashonnx = pytest.importorskip("flashonnx")
_BY_ID = {case.id: case for case in cache_cases.ALL}


@pytest.fixture(autouse=True)
def _needs_provider(request: pytest.FixtureRequest, library_path: str) -> None:
    if request.node.get_closest_marker("gpu") and "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA")


@on_devices(*cache_cases.ALL)
def test_case(device: str, case: CacheCase) -> None:
    inputs = case.inputs()
    check_cache_outputs(case, inputs, run(open_session(one_node(case, inputs), device), case, inputs))
