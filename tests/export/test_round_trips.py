"""unfuse(), then fuse() again: the same nodes as before, with the answers of the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import cases_bias
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from cases import Case
from flashonnx.export import fuse, unfuse
from models import attributes, fuse_and_check, parse, random_inputs, run
from nodes import one_node
from nodes import run as run_node
from onnx import helper, numpy_helper
from seam import check_outputs

# A past is a Concat below opset 23, and sizes of 0 tell nothing.
LEFT = ("no-keys", "no-new-keys", "no-tokens", "present-without-past", "empty-rows")
PLAIN = [
    cases.square(f"round-trip-{layout}-{dtype}", 9, layout=layout, dtype=dtype, head_dim=20, lse=False, is_causal=1)
    for layout in cases.LAYOUTS
    for dtype in ("float32", "float16")
]
BIASED = [
    replace(case, lse=False)
    for case in cases_bias.SMALL
    if case.id not in LEFT and case.dtype != "bfloat16" and not (case.past and case.layout == "3hd")
]


def stored_bias(case: Case, opset: int) -> onnx.ModelProto:
    """Its node, with the bias among the weights."""
    inputs = case.inputs()
    model = one_node(case, inputs)
    del model.opset_import[:]
    model.opset_import.extend([helper.make_opsetid("", opset), helper.make_opsetid("flashonnx", 1)])
    if "bias" in inputs:
        (info,) = (value for value in model.graph.input if value.name == "bias")
        model.graph.input.remove(info)
        model.graph.initializer.append(numpy_helper.from_array(inputs["bias"], "bias"))
    return model


def meaning(node: onnx.NodeProto) -> tuple[Any, ...]:
    """Its inputs and attributes; what the shapes tell as well is left out, and of two names for a layout it has one."""
    given = attributes(node)
    for name in ("scale", "q_num_heads", "kv_num_heads"):
        given.pop(name, None)
    layout = given.get("qkv_layout", b"separate").replace(b"gqa", b"3hd")
    return given | {"qkv_layout": layout}, [bool(name) for name in node.input], list(node.output)


@pytest.mark.parametrize(
    ("case", "opset"),
    [(case, opset) for case in (*PLAIN, *BIASED) for opset in (18, 23) if opset >= 23 or not case.past],
    ids=lambda value: value.id if isinstance(value, Case) else str(value),
)
def test_the_same_node(case: Case, opset: int) -> None:
    once, _ = fuse(stored_bias(case, opset))
    apart, report = unfuse(once)
    assert not report.fused
    again, _ = fuse(apart)
    (before,), (after,) = ([node for node in model.graph.node if node.domain] for model in (once, again))
    assert meaning(before) == meaning(after)
    assert {node.op_type for node in again.graph.node if not node.domain} <= {"Constant", "Reshape"}
    inputs = {name: x for name, x in case.inputs().items() if name != "bias"}
    session = ort.InferenceSession(again.SerializeToString(), providers=["CPUExecutionProvider"])
    check_outputs(case, case.inputs(), run_node(session, case, inputs))


@pytest.mark.parametrize("opset", [18, 23])
def test_projections_that_were_joined(opset: int) -> None:
    """One product, its bias in the node: as before."""
    body = """
        q0 = MatMul(x, wq) q1 = Add(q0, bq) k0 = MatMul(x, wk) k1 = Add(k0, bk) v0 = MatMul(x, wv) v1 = Add(v0, bv)
        four = Constant<value_ints=[0, 0, 4, 8]>() two = Constant<value_ints=[0, 0, 2, 8]>()
        q2 = Reshape(q1, four) q = Transpose<perm=[0,2,1,3]>(q2)
        k2 = Reshape(k1, two) kt = Transpose<perm=[0,2,3,1]>(k2)
        v2 = Reshape(v1, two) v = Transpose<perm=[0,2,1,3]>(v2)
        kg = Constant<value_ints=[0, 0, 1, 1]>() one = Constant<value_int=1>()
        kr = Gather<axis=1>(kt, kg) vr = Gather<axis=1>(v, kg)
        s = MatMul(q, kr) p = Softmax<axis=-1>(s) o = MatMul(p, vr)
        t = Transpose<perm=[0,2,1,3]>(o) flat = Constant<value_ints=[0, 0, 32]>() y = Reshape(t, flat)
    """
    model = parse(body, "float[b,s,32] x", "float[b,s,32] y", opset)
    random = np.random.default_rng(0)
    for name, shape in (("wq", (32, 32)), ("wk", (32, 16)), ("wv", (32, 16)), ("bq", 32), ("bk", 16), ("bv", 16)):
        weight = random.standard_normal(shape).astype(np.float32) / 4
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
    once, _ = fuse(model)
    again, report = fuse(unfuse(once)[0])
    assert report.fused == 1 and attributes(again.graph.node[-1])["qkv_layout"] == b"gqa"
    kinds = [[node.op_type for node in made.graph.node if node.op_type != "Constant"] for made in (once, again)]
    assert kinds[0] == kinds[1] == ["Concat", "MatMul", "Concat", "FlashAttention"]
    feeds = random_inputs(model, {"b": 2, "s": 6})
    for library in (False, True):
        np.testing.assert_allclose(run(again, feeds, library=library)[0], run(model, feeds)[0], atol=2e-5)


@pytest.mark.parametrize(("shape", "width"), [("b,2,s,8", 8), ("b,2,s,8", 1), ("b,s,16", 1)])
def test_parts_that_are_spread(shape: str, width: int) -> None:
    """One number for all features, or one row for all heads, is no bias of projections: its vector is too short."""
    heads = "q_num_heads=2, kv_num_heads=2" if shape == "b,s,16" else "is_causal=0"
    body = f"""
        widths = Constant<value_ints=[{width}, {width}, {width}]>() bq, bk, bv = Split<axis=0>(bias, widths)
        q1 = Add(q, bq) k1 = Add(k, bk) v1 = Add(v, bv) y = Attention<{heads}>(q1, k1, v1)
    """
    model = parse(body, ", ".join(f"float[{shape}] {name}" for name in "qkv"), f"float[{shape}] y", 23)
    vector = np.random.default_rng(0).standard_normal(3 * width).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(vector, "bias"))
    fuse_and_check(model, {"b": 2, "s": 6})


@pytest.mark.parametrize("size", [1, 16])
def test_projections_that_are_spread(size: int) -> None:
    """As is one that has more features than the projection."""
    body = """
        widths = Constant<value_ints=[16, 16, 16]>() bq, bk, bv = Split<axis=0>(bias, widths)
        q1 = Add(q, bq) k1 = Add(k, bk) v1 = Add(v, bv) y = Attention<q_num_heads=2, kv_num_heads=2>(q1, k1, v1)
    """
    model = parse(body, ", ".join(f"float[b,s,{size}] {name}" for name in "qkv"), "float[b,s,16] y", 23)
    vector = np.random.default_rng(0).standard_normal(48).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(vector, "bias"))
    fused, _ = fuse_and_check(model, {"b": 2, "s": 6})
    assert ("Add" in {node.op_type for node in fused.graph.node}) == (size == 1)


def between_casts(behind: str = "Cast<to=10>(t)", kind: str = "float16", v: str = "float16") -> onnx.ModelProto:
    body = f"""
        qw = Cast<to=1>(q) kw = Cast<to=1>(k) vw = Cast<to=1>(v) kt = Transpose<perm=[0,1,3,2]>(kw)
        s0 = MatMul(qw, kt) s = Add(s0, mask) p = Softmax<axis=-1>(s) o = MatMul(p, vw)
        t = Transpose<perm=[0,2,1,3]>(o) y = {behind}
    """
    inputs = f"float16[b,2,s,8] q, float16[b,2,s,8] k, {v}[b,2,s,8] v, float[b,1,s,s] mask"
    return parse(body, inputs, f"{kind}[b,s,2,8] y", 18)


def test_float32_between_casts() -> None:
    """What is cast to float32 for the attention alone: the operator has float32 inside by itself."""
    model = between_casts()
    fused, report = fuse(model)
    assert report.fused == 1 and {node.op_type for node in fused.graph.node} == {"FlashAttention", "Transpose"}
    (node,) = (node for node in fused.graph.node if node.domain)
    assert list(node.input) == ["q", "k", "v", "mask"]
    feeds = random_inputs(model, {"b": 2, "s": 6})
    for library in (False, True):
        got, want = run(fused, feeds, library=library)[0], run(model, feeds)[0]
        assert got.dtype == want.dtype == np.float16
        np.testing.assert_allclose(got, want, atol=2e-3)


@pytest.mark.parametrize("change", [{"behind": "Identity(t)", "kind": "float"}, {"v": "bfloat16"}], ids=str)
def test_float32_that_is_wanted(change: dict[str, str]) -> None:
    """An output of float32, or a V that had more range, stays float32."""
    fused, report = fuse(between_casts(**change))
    assert report.fused == 1
    assert "Cast" in {node.op_type for node in fused.graph.node}
