"""A Max of scores and the type's lowest number, as XGLM has it: without effect, or a reason to leave the attention."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from models import attributes, fuse_and_check, nodes, parse, random_inputs, run

MINIMUM = "-340282346638528859811704183484516925440.0"
QKV = "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v"
PADDING = "bool[b,1,1,s] seen"
Y = "float[b,2,s,8] y"
SIZES = ({"b": 2, "s": 5}, {"b": 1, "s": 9}, {"b": 3, "s": 1})
CONSTANTS = f"""
    zero = Constant<value_float=0.0>() low = Constant<value_float={MINIMUM}>() ninf = Constant<value_float=-99999.0>()
    i0 = Constant<value_int=0>() i1 = Constant<value_int=1>() ten = Constant<value_float=-10000.0>()
    n1 = Shape<start=2,end=3>(q) n = Squeeze(n1) range = Range(i0, n, i1)
    a3 = Constant<value_ints=[0,1,3]>() i = Unsqueeze(range, a3) a4 = Constant<value_ints=[0,1,2]>()
    j = Unsqueeze(range, a4) causal = LessOrEqual(j, i) both = And(causal, seen)
"""
TRIANGLE = "m = Where(both, zero, low) x = Add(raw, m)"


def model(
    making: str, number: str = "low", inputs: str = f"{QKV}, {PADDING}", after: str = "scores = Identity(w)"
) -> onnx.ModelProto:
    body = f"""{CONSTANTS} kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) {making} w = Max(x, {number}) {after}
        p = Softmax<axis=-1>(scores) y = MatMul(p, v)"""
    return parse(body, inputs, Y)


# What makes x of the scores.
WITHOUT_EFFECT = {
    "a triangle and padding": TRIANGLE,
    "the number first": "m = Where(both, zero, low) t = Add(m, raw) x = Identity(t)",
    "no mask": "x = Identity(raw)",
    "a scale behind the mask": "m = Where(both, zero, ten) t = Add(raw, m) x = Mul(t, half)",
    "in the place of scores": "x = Where(both, raw, low)",
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_without_effect(name: str) -> None:
    """Also for a query that may see nothing, of which each key has the same share."""
    making = "half = Constant<value_float=0.5>() " + WITHOUT_EFFECT[name]
    before = model(making)
    seen = random_inputs(before, SIZES[0])["seen"]
    seen[0] = False
    after, _ = fuse_and_check(before, *SIZES)
    inputs = random_inputs(before, SIZES[0]) | {"seen": seen}
    for want, got in zip(run(before, inputs), run(after, inputs), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
    if name == "a triangle and padding":
        assert attributes(nodes(after)[0])["is_causal"] == 1


def test_minus_infinity() -> None:
    """Above -inf is everything, so that any mask may stand before."""
    fuse_and_check(model("x = Add(raw, m)", "ninf", f"{QKV}, float[b,1,s,s] m, {PADDING}"), *SIZES)


# What makes x of the scores, and the number beside it.
WITH_EFFECT = {
    "a mask that may be -inf": ("x = Add(raw, given)", "low"),
    "-inf": ("m = Where(both, zero, ninf) x = Add(raw, m)", "low"),
    "-inf in the place of scores": ("x = Where(both, raw, ninf)", "low"),
    "two masks": ("m = Where(causal, zero, low) u = Where(seen, zero, low) t = Add(raw, m) x = Add(t, u)", "low"),
    "two masks added up before": (
        "m = Where(causal, zero, low) u = Where(seen, zero, low) t = Add(m, u) x = Add(raw, t)", "low",
    ),
    "a higher number": (TRIANGLE, "ten"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_EFFECT)
def test_with_effect(name: str) -> None:
    making, number = WITH_EFFECT[name]
    before = model(making, number, f"{QKV}, float[b,1,s,s] given, {PADDING}")
    _, report = fuse_and_check(before, *SIZES, fused=0, total=1)
    assert "Max '" in report.sites[0].reason


@pytest.mark.parametrize("after", ["scores = Mul(w, tenth)", "t = Tanh(w) scores = Mul(t, tenth)"])
def test_a_factor_behind_it(after: str) -> None:
    making = f"tenth = Constant<value_float=0.1>() {TRIANGLE}"
    _, report = fuse_and_check(model(making, after=after), *SIZES, fused=0, total=1)
    assert "Max '" in report.sites[0].reason


def test_two_tensors() -> None:
    _, report = fuse_and_check(model("x = Identity(raw)", "raw"), *SIZES, fused=0, total=1)
    assert "Max 'w' stands between the product and the softmax" in report.sites[0].reason


def test_float16() -> None:
    """Of it a score of -17 and the lowest number are -inf."""
    body = """low = Constant<value_float=-65504.0>() low16 = Cast<to=10>(low) z = Constant<value_float=0.0>()
        z16 = Cast<to=10>(z) kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) m = Where(seen, z16, low16)
        x = Add(raw, m) scores = Max(x, low16) p = Softmax<axis=-1>(scores) y = MatMul(p, v)"""
    inputs = f"{QKV.replace('float', 'float16')}, {PADDING}"
    _, report = fuse_and_check(parse(body, inputs, Y.replace("float", "float16")), *SIZES, fused=0, total=1)
    assert "export in float32 or bfloat16" in report.sites[0].reason


def test_a_sink() -> None:
    """It may be -inf, and then a query that sees nothing has weights by the Max alone."""
    making = """shape = Shape(raw) j0 = Constant<value_ints=[0]>() j3 = Constant<value_ints=[3]>()
        rest = Slice(shape, j0, j3) one = Constant<value_ints=[1]>() wanted = Concat<axis=0>(rest, one)
        column = Expand(sink, wanted) masked = Where(seen, raw, low) x = Concat<axis=-1>(masked, column)"""
    body = f"""{CONSTANTS} kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) {making} scores = Max(x, low)
        wide = Softmax<axis=-1>(scores) last = Constant<value_ints=[-1]>() p = Slice(wide, j0, last, j3)
        y = MatMul(p, v)"""
    inputs = {"sink": np.full((1, 2, 1, 1), -np.inf, np.float32), "seen": np.zeros((2, 1, 1, 5), bool)}
    before = parse(body, f"{QKV}, {PADDING}, float[1,2,1,1] sink", Y)
    _, report = fuse_and_check(before, SIZES[0], fused=0, total=1, **inputs)
    assert "after a column was put beside them" in report.sites[0].reason
