"""The way back: fused nodes as standard Attention, or as plain operators, against the reference in ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from cases import Case
from flashonnx.export import fuse, unfuse
from models import assert_same, attributes, parse, random_inputs
from nodes import one_node, run
from onnx import TensorProto, helper
from seam import check_outputs

CASES = [case for case in cases.ALL if case.poison is None and not case.gpu and not case.slow]
OPSETS = (13, 18, 23, 24, 25)


def unfused(case: Case, opset: int, **given: Any) -> onnx.ModelProto:
    """Its node as standard operators, checked to be nothing else."""
    model = one_node(case, case.inputs(), **given)
    del model.opset_import[:]
    model.opset_import.extend([helper.make_opsetid("", opset), helper.make_opsetid("flashonnx", 1)])
    result, report = unfuse(model)
    assert (report.total, report.fused) == (1, 0), str(report)
    assert str(report).startswith("1 of 1 fused nodes are standard operators again\n  replaced ")
    assert not result.functions
    used = {name for node in result.graph.node for name in node.input} | {v.name for v in result.graph.output}
    assert all(used & {*node.output} for node in result.graph.node), "a node that nobody needs"
    assert {node.domain for node in result.graph.node} == {""}
    assert [(o.domain, o.version) for o in result.opset_import] == [("", opset)]
    assert [(v.name, v.type) for v in result.graph.output] == [(v.name, v.type) for v in model.graph.output]
    onnx.checker.check_model(result, full_check=True)
    return result


def is_attention(model: onnx.ModelProto) -> bool:
    return "Attention" in {node.op_type for node in model.graph.node}


def check(case: Case, model: onnx.ModelProto) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    inputs = case.inputs()
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    check_outputs(case, inputs, run(session, case, inputs))


def runs(case: Case, model: onnx.ModelProto) -> bool:
    """Whether ONNX Runtime's CPU provider is right about a standard Attention.

    It runs no bfloat16, does not clamp lengths, makes zeros of rows of finfo.min and fails without keys.
    """
    clamps = case.lengths is not None and any(not 0 <= n <= case.kv_length for n in case.lengths)
    sentinel = case.mask and case.mask_dtype != "bool" and case.mask_fill != "random"
    return not is_attention(model) or not (case.dtype == "bfloat16" or clamps or sentinel or not case.keys)


def features(case: Case) -> set[tuple[str, Any]]:
    """What of the operator a case asks for."""
    own = {name: getattr(case, name) for name in ("layout", "mask", "mask_dtype", "is_causal", "empty_row", "dtype")}
    own |= {name: bool(getattr(case, name)) for name in ("sinks", "softcap", "present", "lse", "scale", "mask_keys")}
    own |= {name: getattr(case, name) is not None for name in ("lengths", "past", "value_dim")}
    own |= {"left": case.left >= 0, "right": case.right >= 0, "groups": case.heads[0] != case.heads[1]}
    return set(own.items())


def covering() -> set[str]:
    """The ids of a few cases that have every feature among them, with lse and without."""
    seen: set[tuple[bool, tuple[str, Any]]] = set()
    chosen = set()
    for case in CASES:
        new = {(case.lse, feature) for feature in features(case)} - seen
        if new:
            seen |= new
            chosen.add(case.id)
    return chosen


EVERYDAY = covering()
ALL = [
    pytest.param(case, opset, marks=() if case.id in EVERYDAY and opset == 24 else pytest.mark.slow)
    for case in CASES
    for opset in OPSETS
]


@pytest.mark.parametrize(("case", "opset"), ALL, ids=lambda value: value.id if isinstance(value, Case) else str(value))
def test_every_case(case: Case, opset: int) -> None:
    model = unfused(case, opset)
    if runs(case, model):
        check(case, model)


PLAIN = replace(next(case for case in CASES if case.id == "layout-bshd-float32"), lse=False)


@pytest.mark.parametrize(
    ("changes", "oldest"),
    [
        ({}, 23),
        ({"layout": "bhsd", "is_causal": 1, "softcap": 3.0, "scale": 0.3}, 23),
        ({"heads": (4, 2), "mask": "b1qk", "mask_dtype": "T"}, 23),
        ({"mask": "b11k"}, 23),  # expanded below 25
        ({"mask": "1k", "layout": "bhsd"}, 23),
        ({"past": 3}, 23),  # present outputs that nobody reads
        ({"past": 3, "present": True, "is_causal": 1}, 23),
        ({"layout": "3hd"}, 23),
        ({"layout": "h3d", "is_causal": 1}, 23),
        ({"layout": "gqa", "heads": (4, 2)}, 23),
        ({"layout": "time_major", "mask": "b11k"}, 23),
        ({"layout": "3hd_flat"}, 23),
        ({"lengths": (3, 7)}, 24),
        ({"left": 2}, 25),
        ({"left": 2, "right": 1, "is_causal": 1, "layout": "3hd"}, 25),
        ({"present": True}, None),  # ONNX Runtime has no present without a past
        ({"mask": "b1qk", "mask_keys": 4}, None),  # nor a short mask
        ({"sinks": True}, None),
        ({"lse": True}, None),
        ({"empty_row": "mean", "mask": "b1qk"}, None),
    ],
    ids=str,
)
def test_which_become_attention(changes: dict[str, Any], oldest: int | None) -> None:
    """One Attention at every opset that can say it, with the answers of the reference; else plain operators."""
    case = replace(PLAIN, id=f"unfuse {changes}", q_length=7, kv_length=7, **changes)
    for opset in OPSETS:
        model = unfused(case, opset)
        assert is_attention(model) is (oldest is not None and opset >= oldest), opset
        check(case, model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"mask": "b1qk"}, ""),
        ({"mask": "b1qk", "mask_dtype": "T"}, "gives 0 instead of the mean of V"),
        ({"lengths": (3, 7)}, "does not clamp lengths"),
        ({"mask": "b1qk", "mask_dtype": "T", "sinks": True}, ""),  # plain operators have no caveat
    ],
    ids=str,
)
def test_where_a_runtime_departs_from_the_standard(changes: dict[str, Any], words: str) -> None:
    case = replace(PLAIN, id=f"caveat {changes}", q_length=7, kv_length=7, **changes)
    model = one_node(case, case.inputs())
    del model.opset_import[:]
    model.opset_import.extend([helper.make_opsetid("", 24), helper.make_opsetid("flashonnx", 1)])
    (site,) = unfuse(model)[1].sites
    assert (words in site.reason) if words else not site.reason


QKV = "float[b,s,32] q, float[b,s,16] k, float[b,s,16] v"


@pytest.mark.parametrize(
    "given",
    [
        "<q_num_heads=4, kv_num_heads=2>(q, k, v)",
        "<q_num_heads=4, kv_num_heads=2, is_causal=1, softcap=2.0, scale=0.3>(q, k, v)",
        "<q_num_heads=4, kv_num_heads=2, left_window_size=2, right_window_size=1>(q, k, v)",
        "<q_num_heads=4, kv_num_heads=2>(q, k, v, m)",
    ],
)
def test_there_and_back(given: str) -> None:
    """An Attention that was fused becomes what it was."""
    model = parse(f"y = Attention{given}", f"{QKV}, bool[b,1,s,s] m", "float[b,s,32] y", opset=25)
    fused, report = fuse(model)
    assert report.fused == 1
    back, _ = unfuse(fused)
    assert [node.op_type for node in back.graph.node] == ["Attention"]
    assert attributes(back.graph.node[0]) == attributes(model.graph.node[0])
    assert back.graph.node[0].input == model.graph.node[0].input
    assert_same(model, back, random_inputs(model, {"b": 2, "s": 6}))


@pytest.mark.parametrize("opset", [18, 23])
def test_written_out_and_back(opset: int) -> None:
    """Softmax, fused, and back as one Attention where there is one; twice in the model, and in a branch."""
    body = """
        kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) p = Softmax<axis=-1>(s) x = MatMul(p, v)
        y = If (c) <
            then_branch = t () => (float[b,2,s,8] y1) { r = MatMul(x, kt) w = Softmax<axis=-1>(r) y1 = MatMul(w, v) },
            else_branch = e () => (float[b,2,s,8] y2) { y2 = Identity(x) }
        >
    """
    inputs = "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v, bool c"
    model = parse(body, inputs, "float[b,2,s,8] y", opset)
    fused, report = fuse(model)
    assert report.fused == 2
    back, report = unfuse(fused)
    assert report.total == 2
    assert {site.became for site in report.sites} == {"Attention" if opset == 23 else "plain operators"}
    onnx.checker.check_model(back, full_check=True)
    assert not back.functions
    for flag in (True, False):
        assert_same(model, back, random_inputs(model, {"b": 2, "s": 6}) | {"c": np.array(flag)})


def test_what_cannot_be_replaced_is_left() -> None:
    """A node whose types are not known stays, with its body and the reason; its neighbour is replaced."""
    case = PLAIN
    model = one_node(case, case.inputs())
    first = model.graph.node[0]
    second = onnx.NodeProto()
    second.CopyFrom(first)
    second.input[0], second.output[0], second.name = "unknown", "Z", "second"
    model.graph.node.insert(0, helper.make_node("Somebody", ["Q"], ["unknown"], domain="elsewhere"))
    model.graph.node.append(second)
    model.graph.output.append(helper.make_tensor_value_info("Z", TensorProto.FLOAT, None))
    model.opset_import.append(helper.make_opsetid("elsewhere", 1))
    result, report = unfuse(model)
    assert [site.fused for site in report.sites] == [False, True]
    assert "not known" in report.sites[1].reason
    assert "flashonnx" in {o.domain for o in result.opset_import}
    assert [node.name for node in result.graph.node if node.domain == "flashonnx"] == ["second"]


FORTH = [case for case in CASES if not case.present and (case.id in EVERYDAY or case.empty_row == "mean")]


@pytest.mark.parametrize("case", FORTH, ids=lambda case: case.id)
def test_plain_operators_are_fused_again(case: Case) -> None:
    """Also what becomes of rows without keys; but for lengths beside the mean of V, which no rule reads."""
    case = replace(case, lse=False)
    again, report = fuse(unfused(case, 18))
    if case.lengths is not None and case.empty_row == "mean":
        assert (report.total, report.fused) == (1, 0)
        return
    assert (report.total, report.fused) == (1, 1), str(report)
    (node,) = (node for node in again.graph.node if node.domain == "flashonnx")
    if case.empty_row == "mean" and case.keys and case.mask:
        assert attributes(node)["empty_row"] == b"mean"
    check(case, again)


def test_even_rows_beside_lengths() -> None:
    """A sentence without keys, whose rows become even, has the mean of all keys: a length would say that of none."""
    body = """
        t = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, t)
        none = Constant<value_float=-inf>() zero = Constant<value_float=0.0>()
        n = Shape(k) axis = Constant<value_int=2>() keys = Gather(n, axis) first = Constant<value_int=0>()
        one = Constant<value_int=1>() place = Range(first, keys, one) seen = Less(place, length)
        masked = Where(seen, s, none) last = Constant<value_ints=[-1]>() top = ReduceMax(masked, last)
        empty = Equal(top, none) even = Where(empty, zero, masked) p = Softmax<axis=-1>(even) y = MatMul(p, v)
    """
    inputs = "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v, int64[b,1,1,1] length"
    model = parse(body, inputs, "float[b,2,s,8] y", 18)
    fused, report = fuse(model)
    assert report.fused == 1
    (node,) = (node for node in fused.graph.node if node.domain == "flashonnx")
    assert attributes(node)["empty_row"] == b"mean" and len(node.input) == 4
    assert_same(model, fused, random_inputs(model, {"b": 2, "s": 6}) | {"length": np.array([0, 4]).reshape(2, 1, 1, 1)})
