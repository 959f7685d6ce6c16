"""The standard Attention operator through fuse, with ONNX's own inputs and expected outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_cases
import pytest
from flashonnx.export import fuse
from onnx import TensorProto, helper

ort = pytest.importorskip("onnxruntime")
DONE, ASKING_FOR_SCORES = onnx_cases.names()


def run(model: onnx.ModelProto, inputs: list[Any]) -> list[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(widened(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    feeds = [x.astype(np.float32) if x.dtype.name == "bfloat16" else x for x in inputs]
    return session.run(None, dict(zip(names, feeds, strict=True)))


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float32 instead of bfloat16 at its edges: ONNX Runtime's Python does not take bfloat16."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    graph = wide.graph
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type != TensorProto.BFLOAT16:
            continue
        value.type.tensor_type.elem_type = TensorProto.FLOAT
        name, narrow = value.name, f"{value.name}_narrow"
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [narrow if item == name else item for item in names]
        is_input = value in graph.input
        cast = helper.make_node(
            "Cast", [name if is_input else narrow], [narrow if is_input else name],
            to=TensorProto.BFLOAT16 if is_input else TensorProto.FLOAT,
        )  # fmt: skip
        graph.node.insert(0 if is_input else len(graph.node), cast)
    return wide


def test_all_cases_are_here() -> None:
    assert len(DONE) + len(ASKING_FOR_SCORES) >= 93


@pytest.mark.parametrize("name", DONE)
def test_onnx_case(name: str) -> None:
    """Fused, and run by its portable body, the case gives what ONNX expects."""
    case = onnx_cases.attention_cases()[name]
    model, report = fuse(case.model)
    assert str(report).startswith("1 of 1")
    assert [node.op_type for node in model.graph.node if node.op_type.endswith("Attention")] == ["FlashAttention"]
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    for inputs, expected in case.data_sets:
        for got, want in zip(run(model, inputs), expected, strict=True):
            assert got.shape == want.shape
            rtol = 2.0**-6 if want.dtype.name == "bfloat16" else max(case.rtol, 2e-3)
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=case.atol)


@pytest.mark.parametrize("name", ASKING_FOR_SCORES)
def test_scores_asked_for(name: str) -> None:
    case = onnx_cases.attention_cases()[name]
    model, report = fuse(case.model)
    assert report.fused == 0
    assert report.sites[0].reason.count("qk_matmul_output (") == 1  # two rules, one reason
    assert model is case.model


def attention(q: list[Any], kv: list[Any], *, opset: int = 23, kind: int = TensorProto.FLOAT, **attributes: Any) -> Any:
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], name="attention", **attributes)
    inputs = [helper.make_tensor_value_info(n, kind, shape) for n, shape in (("q", q), ("k", kv), ("v", kv))]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", kind, [None] * len(q))])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (attention(["b", 2, "s", 8], ["b", 2, "s", 8], softmax_precision=TensorProto.DOUBLE), "softmax_precision"),
        (attention(["b", 2, "s", 8], ["b", 2, "s", 8], kind=TensorProto.DOUBLE), "Q is double"),
        (attention(["b", "s", 16], ["b", "s", 16]), "q_num_heads"),
        (attention(["b", 2, "s", 8], ["b", 2, "s", 8], scale=-1.0), "not positive"),
    ],
)
def test_left_alone(model: onnx.ModelProto, reason: str) -> None:
    result, report = fuse(model)
    assert result is model
    assert report.total == 1
    assert reason in report.sites[0].reason


def test_attention_of_an_opset_without_it() -> None:
    """torch.onnx.ops.attention writes such files below opset 23; what they mean is clear, and fused they run."""
    model = attention(["b", 4, "s", 8], ["b", 2, "s", 8], opset=18, is_causal=1)
    fused, report = fuse(model)
    assert report.fused == 1
    assert "invalid" in report.sites[0].reason
    onnx.checker.check_model(fused, full_check=True)
    newer = attention(["b", 4, "s", 8], ["b", 2, "s", 8], opset=23, is_causal=1)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, heads, 5, 8), dtype=np.float32) for heads in (4, 2, 2))
    np.testing.assert_allclose(run(fused, [q, k, v])[0], run(newer, [q, k, v])[0], atol=1e-6)
