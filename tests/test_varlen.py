"""FlashAttentionVarlen through the seam and in ONNX Runtime, on the CPU and, where there is one, on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import varlen_cases
from flashonnx._capi import Library
from nodes import open_session
from varlen_cases import VarlenCase

_ON_DEVICES: Any = pytest.mark.parametrize(
    ("device", "case"),
    [
        pytest.param(device, case, id=f"{device}-{case.id}", marks=[] if device == "cpu" else pytest.mark.gpu)
        for device in ("cpu", "cuda")
        for case in varlen_cases.ALL
    ],
)


@_ON_DEVICES
def test_seam(library: Library, device: str, case: VarlenCase) -> None:
    inputs = case.inputs()
    case.check(inputs, case.run_seam(library, device, inputs))


@_ON_DEVICES
def test_onnx_runtime(library_path: str, device: str, case: VarlenCase) -> None:
    ort = pytest.importorskip("onnxruntime")
    if device == "cuda" and "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA")
    inputs = case.inputs()
    session = open_session(case.node(inputs), device)
    case.check(inputs, case.run_node(session, inputs))
