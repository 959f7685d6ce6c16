"""ONNX's own Attention cases through fuse() and an ONNX Runtime session, as a user would run them."""

from __future__ import annotations

from typing import Any

import flashonnx
import numpy as np
import onnx
import onnx_cases
import pytest
from nodes import DOMAIN, widen

pytest.importorskip("onnxruntime")
SUPPORTED, WITH_SCORES = onnx_cases.names()


def _model(name: str) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(onnx_cases.attention_cases()[name].model)
    return model


def _run(model: onnx.ModelProto, session: Any, inputs: list[Any], expected: list[Any]) -> list[Any]:
    """The outputs, in the dtypes expected."""
    feeds = {}
    for info, x in zip(model.graph.input, inputs, strict=True):
        feeds[info.name] = x.astype(np.float32) if info.name.endswith("_wide") else x
    return [out.astype(right.dtype) for out, right in zip(session.run(None, feeds), expected, strict=True)]


@pytest.mark.parametrize("name", SUPPORTED)
def test_fused(name: str) -> None:
    model = widen(_model(name))
    fused, report = flashonnx.fuse(model)
    assert (report.fused, report.total) == (1, 1), str(report)
    assert [node.op_type for node in fused.graph.node if node.domain == DOMAIN] == ["FlashAttention"]
    assert not [node for node in fused.graph.node if node.op_type == "Attention"]
    del fused.functions[:]  # the portable body: without it, only the library can run this
    session = flashonnx.session(fused, ["CPUExecutionProvider"])
    for inputs, expected in onnx_cases.attention_cases()[name].data_sets:
        onnx_cases.assert_expected(_run(fused, session, inputs, expected), expected)


@pytest.mark.parametrize("name", WITH_SCORES)
def test_left_alone(name: str) -> None:
    """Who asks for the scores gets them from the standard operator, and the reason in the report."""
    model = _model(name)
    fused, report = flashonnx.fuse(model)
    assert (report.fused, report.total) == (0, 1), str(report)
    assert onnx_cases.UNSUPPORTED_OUTPUT in report.sites[0].reason
    assert fused.graph == model.graph
