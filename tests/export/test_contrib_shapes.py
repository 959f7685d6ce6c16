"""Shapes behind com.microsoft's operators, of which the file says nothing: as ONNX Runtime has them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from flashonnx.export import fuse
from flashonnx.export.values.facts import Facts
from models import run
from onnx import TensorProto, helper

SIZES = {"b": 2, "s": 5, "h": 6, "w": 7, "t": 9}
FLOAT, INT = TensorProto.FLOAT, TensorProto.INT32
Given = dict[str, tuple[int, list[int | str]]]
X: Given = {"x": (FLOAT, ["b", "s", 32])}
IMAGE: Given = {"x": (FLOAT, ["b", "h", "w", 8])}
ROW: Given = {"gamma": (FLOAT, [32])}

# Operator, inputs, attributes, how many outputs are looked at.
ON_THE_CPU: dict[str, tuple[str, Given, dict[str, Any], int]] = {
    "SkipLayerNormalization": ("SkipLayerNormalization", {**X, "skip": (FLOAT, ["b", "s", 32]), **ROW}, {}, 1),
    "with its sum": ("SkipLayerNormalization", {**X, "skip": (FLOAT, ["b", "s", 32]), **ROW}, {}, 4),
    "SkipSimplifiedLayerNormalization": (
        "SkipSimplifiedLayerNormalization", {**X, "skip": (FLOAT, ["b", "s", 32]), **ROW}, {}, 4),
    "BiasGelu": ("BiasGelu", {**X, "bias": (FLOAT, [32])}, {}, 1),
    "FastGelu": ("FastGelu", X, {}, 1),
    "QuickGelu": ("QuickGelu", X, {}, 1),
    "FusedMatMul": ("FusedMatMul", {**X, "w": (FLOAT, [48, 32])}, {"transB": 1}, 1),
    "FusedGemm": ("FusedGemm", {"x": (FLOAT, ["t", 32]), "w": (FLOAT, [48, 32])},
                  {"transB": 1, "activation": "Relu"}, 1),
    "FusedConv": ("FusedConv", {"x": (FLOAT, ["b", 8, "h", 12]), "w": (FLOAT, [16, 8, 3, 3])},
                  {"activation": "Relu", "pads": [1, 1, 1, 1]}, 1),
    "MatMulNBits": ("MatMulNBits", {**X, "w": (TensorProto.UINT8, [48, 1, 16]), "scales": (FLOAT, [48])},
                    {"K": 32, "N": 48, "bits": 4, "block_size": 32}, 1),
    "EmbedLayerNormalization": (
        "EmbedLayerNormalization",
        {"ids": (INT, ["b", "s"]), "segments": (INT, ["b", "s"]), "words": (FLOAT, [50, 32]),
         "places": (FLOAT, [64, 32]), "segment": (FLOAT, [50, 32]), "gamma": (FLOAT, [32]), "beta": (FLOAT, [32])},
        {}, 2),
}  # fmt: skip
ON_CUDA_ALONE: dict[str, tuple[str, Given, dict[str, Any], int]] = {
    "BiasAdd": ("BiasAdd", {**X, "bias": (FLOAT, [32]), "skip": (FLOAT, ["b", "s", 32])}, {}, 1),
    "BiasSplitGelu": ("BiasSplitGelu", {**X, "bias": (FLOAT, [32])}, {}, 1),
    "GroupNorm": ("GroupNorm", {**IMAGE, "gamma": (FLOAT, [8]), "beta": (FLOAT, [8])},
                  {"groups": 2, "activation": 0}, 1),
    "SkipGroupNorm": ("SkipGroupNorm", {**IMAGE, "gamma": (FLOAT, [8]), "beta": (FLOAT, [8]),
                                        "skip": (FLOAT, ["b", "h", "w", 8])}, {"groups": 2, "activation": 0}, 2),
    "NhwcConv": ("NhwcConv", {**IMAGE, "w": (FLOAT, [16, 3, 3, 8])}, {"pads": [1, 1, 1, 1]}, 1),
    "RestorePadding": ("RestorePadding", {"x": (FLOAT, ["t", 32]), "at": (INT, ["b", "s"])}, {}, 1),
}  # fmt: skip


def model(case: tuple[str, Given, dict[str, Any], int]) -> onnx.ModelProto:
    op_type, inputs, given, count = case
    outputs = [f"y{i}" for i in range(count)]
    node = helper.make_node(op_type, list(inputs), outputs, "node", domain="com.microsoft", **given)
    asked = [name for i, name in enumerate(outputs) if op_type.startswith("Skip") is False or i in (0, 3) or count == 2]
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in asked],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def inferred(before: onnx.ModelProto) -> list[tuple[int, ...] | None]:
    """What the facts say of the model's outputs, at SIZES."""
    read = ir.from_proto(before)
    facts, found = Facts(read), []
    for value in read.graph.outputs:
        dims = facts.dims(value)
        found.append(None if dims is None else tuple(eval(str(dim), {}, dict(SIZES)) for dim in dims))
    return found


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_as_it_comes_out(name: str) -> None:
    before = model(ON_THE_CPU[name])
    random, given = np.random.default_rng(0), {}
    for value in before.graph.input:
        tensor = value.type.tensor_type
        shape = [d.dim_value or SIZES[d.dim_param] for d in tensor.shape.dim]
        kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        given[value.name] = random.integers(0, 9, shape).astype(kind)
    for value in before.graph.output:
        value.type.tensor_type.elem_type = INT if value.name == "y1" and "Embed" in name else FLOAT
    assert inferred(before) == [x.shape for x in run(before, given)]


@pytest.mark.parametrize("name", ON_CUDA_ALONE)
def test_as_onnxruntime_infers(name: str) -> None:
    """Operators that run on CUDA alone: what ONNX Runtime's own inference says."""
    tool = pytest.importorskip("onnxruntime.tools.symbolic_shape_infer")
    pytest.importorskip("sympy")
    before = model(ON_CUDA_ALONE[name])
    want = tool.SymbolicShapeInference.infer_shapes(before, auto_merge=True)
    shapes = [
        tuple(d.dim_value or eval(d.dim_param, {}, dict(SIZES)) for d in value.type.tensor_type.shape.dim)
        for value in want.graph.output
        if value.type.tensor_type.HasField("shape")
    ]
    assert shapes and inferred(before)[: len(shapes)] == shapes


ATTENTION = """
    qs = Constant<value_ints=[0,0,4,8]>() flat = Constant<value_ints=[0,0,32]>() q4 = Reshape(y, qs)
    q = Transpose<perm=[0,2,1,3]>(q4) k = Transpose<perm=[0,2,3,1]>(q4) scores = MatMul(q, k)
    weights = Softmax<axis=-1>(scores) o = MatMul(weights, q) t = Transpose<perm=[0,2,1,3]>(o) z = Reshape(t, flat)
"""


def behind(line: str, more: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (float[b,s,32] x{more}) => (float[b,s,32] z) {{ {line} {ATTENTION} }}"""
    )


@pytest.mark.parametrize(
    ("line", "more"),
    [
        ("y = com.microsoft.SkipSimplifiedLayerNormalization(x, x, gamma)", ", float[32] gamma"),
        ("n, , , y = com.microsoft.SkipLayerNormalization(x, x, gamma)", ", float[32] gamma"),
        ("y = com.microsoft.MatMulNBits<K=32, N=32, bits=4, block_size=32>(x, w, scales)",
         ", uint8[32,1,16] w, float[32] scales"),
        ("shape = Shape(x) p, n, c = Split<axis=0, num_outputs=3>(shape) last = Constant<value_ints=[4, 8]>() "
         "four = Concat<axis=0>(p, n, last) x4 = Reshape(x, four) three = Concat<axis=0>(p, n, c) "
         "y = Reshape(x4, three)", ""),
    ],
)  # fmt: skip
def test_attention_behind_them(line: str, more: str) -> None:
    before = behind(line, more)
    fused, report = fuse(before)
    assert report.fused == report.total == 1, str(report)
    random = np.random.default_rng(0)
    given = {"x": random.standard_normal((2, 5, 32)).astype(np.float32), "gamma": np.ones(32, np.float32),
             "w": random.integers(0, 255, (32, 1, 16), np.uint8), "scales": np.full(32, 0.1, np.float32)}  # fmt: skip
    given = {value.name: given[value.name] for value in before.graph.input}
    np.testing.assert_allclose(run(fused, given)[0], run(before, given)[0], atol=2e-5)


def test_nothing_is_left_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's inference writes a file where it is run when it fails."""
    monkeypatch.chdir(tmp_path)
    fuse(behind("y = com.microsoft.NobodyKnowsThis(x)"))
    fuse(behind(*EXPERTS))
    assert not list(tmp_path.iterdir())


EXPERTS = (
    "y = com.microsoft.MoE<k=1, activation_type=\"relu\">(x, routes, w1, , w2)",
    ", float[t,2] routes, float[2,64,32] w1, float[2,32,64] w2",
)  # fmt: skip


def test_what_onnxruntime_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that is not in our table: asked there, and left where there is none to ask."""
    pytest.importorskip("sympy")
    _, report = fuse(behind(*EXPERTS))
    assert report.fused == 1, str(report)
    monkeypatch.setitem(sys.modules, "onnxruntime.tools.symbolic_shape_infer", None)
    before = behind(*EXPERTS)
    after, report = fuse(before)
    assert report.fused == 0 and after is before
