"""Softmax written out: fused where it is one, else named and left to the last bit."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from models import fuse_and_check, op_types, parse

QKV = "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v"
Y = "float[b,2,s,8] y"
SIZES = ({"b": 2, "s": 5}, {"b": 1, "s": 9})
CONSTANTS = "last = Constant<value_ints=[-1]>() eps = Constant<value_float=1e-2>() c = Constant<value_float=0.3>() "
SCORES = "kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) scores = Mul(raw, c) "
FORMS = {
    "plain": "e = Exp(scores) t = ReduceSum(e, last) p = Div(e, t)",
    "maximum": "m = ReduceMax(scores, last) d = Sub(scores, m) e = Exp(d) t = ReduceSum(e, last) p = Div(e, t)",
    "reciprocal": "e = Exp(scores) t = ReduceSum(e, last) r = Reciprocal(t) p = Mul(e, r)",
    "reciprocal first": "e = Exp(scores) t = ReduceSum(e, last) r = Reciprocal(t) p = Mul(r, e)",
    "log softmax": "l = LogSoftmax<axis=3>(scores) p = Exp(l)",
    "axis from the front": "front = Constant<value_ints=[3]>() e = Exp(scores) t = ReduceSum(e, front) p = Div(e, t)",
}


def model(form: str, end: str = "y = MatMul(p, v)", outputs: str = Y) -> onnx.ModelProto:
    return parse(f"{CONSTANTS} {SCORES} {form} {end}", QKV, outputs)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_fused(form: str) -> None:
    fused, report = fuse_and_check(model(form), *SIZES)
    assert op_types(fused) == {"FlashAttention"}
    assert "Exp" in report.sites[0].kind
    assert report.sites[0].node == "p"


LEFT = {
    "an epsilon": ("e = Exp(scores) t = ReduceSum(e, last) n = Add(t, eps) p = Div(e, n)", "Add"),
    "another sum": ("e = Exp(scores) f = Mul(e, c) t = ReduceSum(f, last) p = Div(e, t)", ""),
    "another axis": ("o = Constant<value_ints=[-2]>() e = Exp(scores) t = ReduceSum(e, o) p = Div(e, t)", "axis"),
    "maximum over another axis": (
        "o = Constant<value_ints=[-2]>() m = ReduceMax(scores, o) d = Sub(scores, m) e = Exp(d) "
        "t = ReduceSum(e, last) p = Div(e, t)",
        "maximum",
    ),
    "maximum of something else": (
        "m = ReduceMax(raw, last) d = Sub(scores, m) e = Exp(d) t = ReduceSum(e, last) p = Div(e, t)", "used by",
    ),
    "what is divided is not the exponential": (
        "e = Exp(scores) t = ReduceSum(e, last) f = Mul(e, e) p = Div(f, t)", "divides no exponential",
    ),
    "two axes": ("o = Constant<value_ints=[-1,-2]>() e = Exp(scores) t = ReduceSum(e, o) p = Div(e, t)", "one known"),
    "the axis is not kept": (
        "e = Exp(scores) t0 = ReduceSum<keepdims=0>(e, last) t = Unsqueeze(t0, last) p = Div(e, t)", "Unsqueeze",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("form", "words"), LEFT.values(), ids=list(LEFT))
def test_left(form: str, words: str) -> None:
    """Nothing changes, not a name."""
    found = 0 if words == "" else 1
    _, report = fuse_and_check(model(form), *SIZES, fused=0, total=found)
    assert all(words in site.reason for site in report.sites), str(report)


def test_divided_behind_the_values() -> None:
    form = "e = Exp(scores) t = ReduceSum(e, last) o = MatMul(e, v)"
    _, report = fuse_and_check(model(form, "y = Div(o, t)"), *SIZES, fused=0, total=1)
    assert "divides no exponential" in report.sites[0].reason


@pytest.mark.parametrize(("form", "fused"), [("plain", 0), ("maximum", 1)])
def test_nan_that_is_caught(form: str, fused: int) -> None:
    """Where every score is finfo.min, exp / sum is 0 / 0 if no maximum is taken off, and a softmax is the mean."""
    masked = f"big = Constant<value_float={np.finfo(np.float32).min}>() masked = Where(seen, scores, big) "
    body = FORMS[form].replace("(scores", "(masked")
    guard = "zero = Constant<value_float=0.0>() n = IsNaN(p) w = Where(n, zero, p) y = MatMul(w, v)"
    before = parse(f"{CONSTANTS} {SCORES} {masked} {body} {guard}", f"{QKV}, bool[b,1,s,s] seen", Y)
    sizes = {"b": 2, "s": 5}
    given = np.ones((2, 1, 5, 5), bool)
    given[0, 0, 1] = given[1, 0, :3] = False
    fuse_and_check(before, sizes, fused=fused, total=1, seen=given)


@pytest.mark.parametrize("name", ["e", "t", "p", "scores"])
def test_parts_used_elsewhere(name: str) -> None:
    """The sum, the exponentials or the probabilities are outputs too: answers stay, fused or not."""
    last = 1 if name == "t" else "s"
    before = model(FORMS["plain"], outputs=f"{Y}, float[b,2,s,{last}] {name}")
    fuse_and_check(before, *SIZES, fused=0, total=1)


def test_undone_beside_a_fused_one() -> None:
    """What could not be fused stands as it was in a model that did change."""
    second = "s2 = MatMul(y, kt) e2 = Exp(s2) t2 = ReduceSum(e2, last) p2 = Div(e2, t2) z = MatMul(p2, v)"
    before = model(FORMS["maximum"], f"y = MatMul(p, v) {second}", f"{Y}, float[b,2,s,8] z, float[b,2,s,s] p2")
    fused, report = fuse_and_check(before, *SIZES, fused=1, total=2)
    assert "output of the model" in report.sites[1].reason
    tail = [(node.op_type, list(node.input), list(node.output)) for node in before.graph.node][-5:]
    assert [(node.op_type, list(node.input), list(node.output)) for node in fused.graph.node][-5:] == tail
