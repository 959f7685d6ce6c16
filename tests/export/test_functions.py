"""Attention in model-local functions and in subgraphs: fused where the call proves it, else listed with the reason."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse, unfuse
from models import assert_same, attributes, fuse_and_check, nodes, random_inputs

QKV = "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v"
Y = "float[b,2,s,8] y"
PLAIN = "kt = Transpose<perm=[0,1,3,2]>(k) scores = MatMul(q, kt) p = Softmax<axis=-1>(scores) y = MatMul(p, v)"
SIZES = ({"b": 2, "s": 5}, {"b": 1, "s": 9})


def with_functions(graph: str, *functions: str, outputs: str = Y, opset: int = 18) -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["" : 18, "mine" : 1]> graph ({QKV}) => ({outputs}) {{ {graph} }}'
    head = f'<domain: "mine", opset_import: ["" : {opset}, "mine" : 1]>'
    model = onnx.parser.parse_model("\n".join([text, *(f"{head} {function}" for function in functions)]))
    for node in model.graph.node:
        node.name = f"call_{node.output[0]}"
    return model


ATTEND = f"attend (q, k, v) => (y) {{ {PLAIN} }}"


def test_written_out_where_it_is_called() -> None:
    model = with_functions("x = mine.attend(q, k, v) y = mine.attend(x, k, v)", ATTEND)
    fused, report = fuse_and_check(model, *SIZES, fused=2)
    assert [site.node for site in report.sites] == [
        "function mine::attend in call_x / p",
        "function mine::attend in call_y / p_2",
    ]
    assert {function.domain for function in fused.functions} == {"flashonnx"}
    assert report.notes == ("functions written out where they were called: mine::attend",)
    assert not [prop for node in fused.graph.node for prop in node.metadata_props]


def test_functions_that_call_functions() -> None:
    """With attributes handed down, and one that has nothing to do with attention, which stays."""
    block = "block <scale> (q, k, v) => (y) { x = mine.attend<f: float = @scale>(q, k, v) y = mine.twice(x) }"
    attend = f"attend <f> (q, k, v) => (y) {{ c = Constant<value_float: float = @f>() {PLAIN} }}".replace(
        "p = Softmax<axis=-1>(scores)", "s = Mul(scores, c) p = Softmax<axis=-1>(s)"
    )
    twice = "twice (x) => (y) { y = Add(x, x) }"
    model = with_functions("y = mine.block<scale=0.25>(q, k, v)", block, attend, twice)
    fused, report = fuse_and_check(model, *SIZES)
    assert report.sites[0].node == "function mine::attend in call_y / p"
    assert attributes(nodes(fused)[0])["scale"] == 0.25
    assert sorted((f.domain, f.name) for f in fused.functions) == [("flashonnx", "FlashAttention"), ("mine", "twice")]
    back, _ = unfuse(fused)
    assert_same(model, back, random_inputs(model, SIZES[0]))


def test_parts_in_functions() -> None:
    """The softmax in the graph, its products in functions."""
    model = with_functions(
        "kt = Transpose<perm=[0,1,3,2]>(k) s = mine.times(q, kt) p = Softmax(s) y = mine.times(p, v)",
        "times (a, b) => (c) { c = MatMul(a, b) }",
    )
    _, report = fuse_and_check(model, *SIZES)
    assert report.sites[0].node == "call_p"


def test_nothing_gained() -> None:
    """A function whose attention cannot be fused stays one, and a fused site beside it is none the worse."""
    returned = f"attend (q, k, v) => (y, p) {{ {PLAIN} }}"
    plain = PLAIN.replace("y = ", "x = ")
    model = with_functions(f"{plain} y, w = mine.attend(x, k, v)", returned, outputs=f"{Y}, float[b,2,s,s] w")
    fused, report = fuse_and_check(model, *SIZES, fused=1, total=2)
    assert [site.fused for site in report.sites] == [True, False]
    assert "output of the model" in report.sites[1].reason
    assert ("mine", "attend") in {(f.domain, f.name) for f in fused.functions}
    assert "mine" in {node.domain for node in fused.graph.node}


def test_functions_that_cannot_be_written_out() -> None:
    model = with_functions("y = mine.attend(q, k, v)", ATTEND, opset=17)
    result, report = fuse(model)
    assert result is model
    (site,) = report.sites
    assert site.node == "function mine::attend / p"
    assert "cannot be written out" in site.reason
    assert "version" in site.reason


def test_functions_in_a_circle() -> None:
    model = with_functions(
        "y = mine.a(q)", "a (x) => (y) { z = Softmax(x) y = mine.b(z) }", "b (x) => (y) { y = mine.a(x) }"
    )
    result, report = fuse(model)
    assert result is model
    assert not report.total


def test_a_function_nobody_calls() -> None:
    model = with_functions(PLAIN, ATTEND)
    fused, report = fuse_and_check(model, *SIZES, fused=1, total=2)
    assert report.sites[1].node == "function mine::attend / p"
    assert ("mine", "attend") in {(f.domain, f.name) for f in fused.functions}


def test_functions_called_in_a_subgraph() -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 18, "mine" : 1]> graph ({QKV}, bool c) => ({Y}) {{
        p = Relu(q)
        y = If (c) <then_branch = t () => (float[b,2,s,8] y1) {{ y1 = mine.attend(p, k, v) }},
                    else_branch = e () => (float[b,2,s,8] y2) {{ y0 = mine.attend(p, p, v) y2 = Neg(y0) }}>
    }}
    <domain: "mine", opset_import: ["" : 18]> {ATTEND}"""
    model = onnx.parser.parse_model(text)
    fused, report = fuse(model)
    assert report.fused == report.total == 2
    assert all("If" in site.node and "branch / function mine::attend" in site.node for site in report.sites)
    onnx.checker.check_model(fused, full_check=True)
    for flag in (True, False):
        assert_same(model, fused, random_inputs(model, SIZES[0]) | {"c": np.array(flag)})


LOOP = """<ir_version: 10, opset_import: ["" : 18]> graph (QKV, int64 n) => (Y) {
    on = Constant<value_int=1>() go = Cast<to=9>(on)
    y = Loop (n, go, q) <body = b (int64 i, bool c, float[b,2,s,8] x) => (bool d, float[b,2,s,8] z) {
        d = Identity(c) kt = Transpose<perm=[0,1,3,2]>(k) scores = MatMul(x, kt) p = Softmax<axis=-1>(scores)
        z = MatMul(p, v)
    }>
}"""


def test_in_a_loop() -> None:
    model = onnx.parser.parse_model(LOOP.replace("QKV", QKV).replace("Y", Y))
    fused, report = fuse(model)
    assert (report.fused, report.total) == (1, 1), str(report)
    assert report.sites[0].node == "Loop  body / p"
    onnx.checker.check_model(fused, full_check=True)
    for count in (1, 3):
        assert_same(model, fused, random_inputs(model, SIZES[0]) | {"n": np.array(count)})


@pytest.mark.parametrize("end", ["scores", "p"])
def test_across_the_edge_of_a_subgraph(end: str) -> None:
    """Products on one side, softmax on the other: a site, which no rule takes."""
    inner, outer = PLAIN.split(f" {end} = ")[0], PLAIN.split(f"{end} = ")[1]
    made = f"{inner} {end}1 = {outer.split(')')[0]})".replace("kt1", "kt")
    rest = PLAIN[PLAIN.index(outer.split(")")[0]) + len(outer.split(")")[0]) + 1 :]
    branch = f"() => (float[b,2,s,s] {end}1) {{ {made} }}"
    text = f"""<ir_version: 10, opset_import: ["" : 18]> graph ({QKV}, bool c) => ({Y}) {{
        {end} = If (c) <then_branch = t {branch}, else_branch = e {
        branch.replace(f"{end}1", f"{end}2")
        .replace("kt", "kt2")
        .replace("scores =", "scores2 =")
        .replace("(scores)", "(scores2)")
    }>
        {rest}
    }}"""
    model = onnx.parser.parse_model(text)
    result, report = fuse(model)
    assert result is model
    assert report.total == (1 if end == "scores" else 2)
    assert all(site.reason for site in report.sites)


def test_operators_in_functions() -> None:
    """A standard Attention in a function of the model's opset."""
    body = "y = Attention(q, k, v)"
    model = with_functions("y = mine.attend(q, k, v)", f"attend (q, k, v) => (y) {{ {body} }}", opset=23)
    model.opset_import[0].version = 23
    _, report = fuse_and_check(model, *SIZES)
    assert report.sites[0].node == "function mine::attend in call_y / y"
