"""The function bodies of fused nodes against the reference, without the library, at every kind of opset."""

from __future__ import annotations

from dataclasses import replace

import cases
import onnx
import pytest
from cases import Case
from flashonnx.export import fuse, unfuse
from nodes import one_node, run
from onnx import TensorProto, helper
from seam import check_outputs

ort = pytest.importorskip("onnxruntime")

# Plain operators cannot keep a NaN or an infinity in a masked slot of V from 0 * NaN, so poisoned cases are left out.
CASES = [case for case in cases.ALL if case.poison is None and not case.gpu and not case.slow]
# What a standard Attention can say.
SAYABLE = [
    replace(case, lse=False)
    for case in CASES
    if case.dtype == "float32"
    and not case.sinks
    and case.empty_row == "zero"
    and case.layout in ("bhsd", "bshd")
    and case.kv_length  # ONNX Runtime's CPU provider fails without keys
]
OPSETS = (13, 18, 23, 24, 25)
_BY_ID = {case.id: case for case in CASES}


def at_opset(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    del model.opset_import[:]
    model.opset_import.extend([helper.make_opsetid("", version), helper.make_opsetid("flashonnx", 1)])
    return model


def portable(case: Case, opset: int, *, dynamic: bool = False) -> onnx.ModelProto:
    model, report = fuse(at_opset(one_node(case, case.inputs(), dynamic=dynamic), opset))
    assert report.total == report.fused == 1
    assert not report.notes
    assert len(model.functions) == 1
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    return model


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def body(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.functions[0].node]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_plain_operators(case: Case) -> None:
    inputs = case.inputs()
    model = portable(case, 18)
    assert "Attention" not in body(model)
    check_outputs(case, inputs, run(session(model), case, inputs))


@pytest.mark.parametrize("case", SAYABLE, ids=lambda case: case.id)
def test_standard_operator(case: Case) -> None:
    """At the newest opset the body is one Attention, where ONNX Runtime's CPU provider runs it."""
    inputs = case.inputs()
    model = portable(case, 25)
    if not case.mask and not case.present and case.past is None and case.lengths is None:
        assert body(model) == ["Attention"]
    check_outputs(case, inputs, run(session(model), case, inputs))


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset(opset: int) -> None:
    for name in ("everything", "layout-bshd-float32", "mask-b11k-bool"):
        case = _BY_ID[name]
        inputs = case.inputs()
        check_outputs(case, inputs, run(session(portable(case, opset)), case, inputs))


@pytest.mark.parametrize(
    ("attributes", "opset", "standard"),
    [
        ({}, 18, False),
        ({}, 23, True),
        ({"is_causal": 1}, 23, True),
        ({"softcap": 3.0, "scale": 0.3}, 23, True),
        ({"left_window_size": 2}, 24, False),
        ({"left_window_size": 2}, 25, True),
        ({"empty_row": "mean"}, 25, False),
    ],
)
def test_which_body(attributes: dict[str, object], opset: int, standard: bool) -> None:
    case = replace(_BY_ID["layout-bshd-float32"], lse=False)
    model, _ = fuse(at_opset(one_node(case, case.inputs(), **attributes), opset))
    assert (body(model) == ["Attention"]) is standard


def test_dynamic_shapes() -> None:
    """One model, sizes other than the example's."""
    case = replace(_BY_ID["layout-bshd-float32"], mask="b11k", is_causal=1)
    runs = session(portable(case, 18, dynamic=True))
    for batch, length, more in ((2, 9, 0), (3, 1, 4), (1, 30, 3)):
        now = replace(case, id=f"{batch} {length}", batch=batch, q_length=length, kv_length=length + more)
        inputs = now.inputs()
        check_outputs(now, inputs, run(runs, now, inputs))


def test_one_function_for_each_signature() -> None:
    """Two nodes alike share a body, another one has its own; fusing again changes nothing."""
    nodes = [
        helper.make_node("Attention", ["q", "k", "v"], ["a"], scale=0.5),
        helper.make_node("Attention", ["a", "k", "v"], ["b"], scale=0.5),
        helper.make_node("Attention", ["b", "k", "v"], ["y"], is_causal=1),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 2, "s", 8]) for name in "qkvy"]
    graph = helper.make_graph(nodes, "three", values[:3], values[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    fused, report = fuse(model)
    assert report.fused == 3
    overloads = [node.overload for node in fused.graph.node]
    assert overloads[0] == overloads[1] != overloads[2]
    assert sorted(function.overload for function in fused.functions) == sorted(set(overloads))
    again, report = fuse(fused)
    assert report.fused == 3
    assert [node.overload for node in again.graph.node] == overloads
    assert again.functions == fused.functions


def test_without_bodies() -> None:
    case = _BY_ID["layout-bshd-float32"]
    model, _ = fuse(at_opset(one_node(case, case.inputs()), 18), portable=False)
    assert not model.functions
    assert not model.graph.node[0].overload


def test_unfuse_leaves_other_models_alone() -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "none",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )  # fmt: skip
    model = helper.make_model(graph)
    result, report = unfuse(model)
    assert result is model
    assert "no flashonnx node" in str(report)
