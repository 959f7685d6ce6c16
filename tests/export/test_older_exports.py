"""What older exports of transformers are made of: masks assigned in place, products of triangles, tails of biases."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from flashonnx.export import fuse
from flashonnx.export.values.dims import Dim
from models import assert_same, fuse_and_check, nodes, op_types, random_inputs

SIZES = ({"b": 2, "s": 5, "p": 3}, {"b": 1, "s": 1, "p": 6}, {"b": 3, "s": 4, "p": 0})
INPUTS = "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v, float[b,2,p,8] past_k, float[b,2,p,8] past_v"
NUMBERS = """
    i0 = Constant<value_int=0>() i1 = Constant<value_int=1>() o0 = Constant<value_ints=[0]>()
    o1 = Constant<value_ints=[1]>() o2 = Constant<value_ints=[2]>() o01 = Constant<value_ints=[0,1]>()
    minus = Constant<value_ints=[-1]>() end = Constant<value_ints=[9223372036854775807]>()
    s1 = Shape<start=2,end=3>(q) p1 = Shape<start=2,end=3>(past_k) b1 = Shape<start=0,end=1>(q) t1 = Add(s1, p1)
    S = Squeeze(s1) P = Squeeze(p1) T = Squeeze(t1)
    keys = Concat<axis=2>(past_k, k) values = Concat<axis=2>(past_v, v)
"""
# (queries, keys): finfo.min above the diagonal, times whether the key is behind the query's place.
TRIANGLES = """
    square = Concat<axis=0>(s1, t1) low = ConstantOfShape<value=float[1] {-3.4028234663852886e38}>(square)
    upper = Trilu<upper=1>(low, i1) places = Range(P, T, i1) column = Unsqueeze(places, o1) every = Range(i0, T, i1)
    behind = Greater(every, column) flag = Cast<to=1>(behind) product = Mul(upper, flag)
    m4 = Unsqueeze(product, o01) wide = Concat<axis=0>(b1, o1, s1, t1) mask = Expand(m4, wide)
"""
# The same numbers written over the mask, at each of its indices.
WRITTEN = """
    r_b = Range(i0, B, i1) r_s = Range(i0, S, i1) r_t = Range(i0, T, i1) B = Squeeze(b1)
    a_b = Constant<value_ints=[-1,1,1,1]>() a_s = Constant<value_ints=[-1,1]>() zero = Constant<value_ints=[0]>()
    c_b = Reshape(r_b, a_b) c_s = Reshape(r_s, a_s) e_b = Expand(c_b, wide) e_1 = Expand(zero, wide)
    e_s = Expand(c_s, wide) e_t = Expand(r_t, wide) last = Constant<value_ints=[-1]>()
    u_b = Unsqueeze(e_b, last) u_1 = Unsqueeze(e_1, last) u_s = Unsqueeze(e_s, last) u_t = Unsqueeze(e_t, last)
    where = Concat<axis=-1>({indices}) empty = ConstantOfShape(wide) written = ScatterND(empty, where, mask)
"""
ATTENTION = """
    kt = Transpose<perm=[0,1,3,2]>(keys) scores = MatMul(q, kt) biased = Add(scores, {mask})
    w = Softmax<axis=-1>(biased) y = MatMul(w, values)
"""


def model(body: str, more: str = "") -> onnx.ModelProto:
    lines = body.replace("B = Squeeze(b1)", "")
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18]>
        g ({INPUTS}{more}) => (float[b,2,s,8] y) {{ {NUMBERS} B = Squeeze(b1) {lines} }}"""
    )


@pytest.mark.parametrize("written", [False, True])
def test_masks_become_triangles(written: bool) -> None:
    indices = "u_b, u_1, u_s, u_t"
    body = TRIANGLES + (WRITTEN.format(indices=indices) if written else "")
    fused, report = fuse_and_check(model(body + ATTENTION.format(mask="written" if written else "mask")), *SIZES)
    assert not {"ScatterND", "Trilu", "Greater"} & op_types(fused)
    assert len(nodes(fused)[0].input) <= 7 and not nodes(fused)[0].input[3], "no mask is left"
    assert "is_causal=1" in report.sites[0].became


@pytest.mark.parametrize("indices", ["u_b, u_1, u_s, u_s", "u_1, u_1, u_s, u_t"])
def test_other_assignments_stay(indices: str) -> None:
    """Where an element is written twice, or not at all, the mask is what ScatterND makes of it."""
    before = model(TRIANGLES + WRITTEN.format(indices=indices) + ATTENTION.format(mask="written"))
    fused, report = fuse(before)
    assert report.fused == 1 and "ScatterND" in op_types(fused)
    inputs = random_inputs(before, {"b": 2, "s": 4, "p": 0})
    assert_same(before, fused, inputs)


def test_tail_of_a_bias() -> None:
    """T5's: of positions from the first on, those of the new tokens; nothing says that it is as large as the keys."""
    body = "back = Neg(s1) tail = Slice(bias, back, end, o2, o1)" + ATTENTION.format(mask="tail")
    sizes = [{**named, "t": named["p"] + named["s"]} for named in SIZES]
    fuse_and_check(model(body, ", float[1,2,t,t] bias"), *sizes, fused=0, total=1)


def test_tail_of_a_bias_of_the_keys() -> None:
    body = """square = Concat<axis=0>(o1, o2, t1, t1) ones = ConstantOfShape<value=float[1] {0.5}>(square)
        scaled = Mul(ones, factors) back = Neg(s1) tail = Slice(scaled, back, end, o2, o1)"""
    fuse_and_check(model(body + ATTENTION.format(mask="tail"), ", float[1,2,1,1] factors"), *SIZES)


def test_products_of_sums_divide() -> None:
    """Heads merged with a batch behind a past: b h (p + s) d by (p + s) d."""
    whole, part = Dim.parse("4*b*(p + s)*8"), Dim.parse("8*p + 8*s")
    assert str(whole.divided_by(part)) == "4*b"
    assert whole.divided_by(Dim.parse("p + 2*s")) is None
    assert Dim.parse("p*p + -1*s*s").divided_by(Dim.parse("p - s")) == Dim.parse("p + s")
    random = np.random.default_rng(0)
    for _ in range(200):
        a, b = (Dim({tuple(sorted(random.choice(list("xyz"), n))): int(random.integers(-3, 4)) for n in (0, 1, 2)})
                for _ in range(2))  # fmt: skip
        if b.terms:
            assert (a * b).divided_by(b) == a


def test_nothing_is_changed_where_nothing_is_fused() -> None:
    text = TRIANGLES + WRITTEN.format(indices="u_b, u_1, u_s, u_t") + "y0 = Add(q, written) y = Identity(q)"
    before = model(text.replace("y0 = Add(q, written)", ""))
    after, _ = fuse(before)
    assert after is before and isinstance(ir.from_proto(after), ir.Model)


PADDED = """
    o12 = Constant<value_ints=[1,2]>() counted = Unsqueeze(attention_mask, o12) m = Cast<to=1>(counted)
    sum = Add(mask, m) nothing = Constant<value_float=0.0>() {test}
    lowest = Constant<value_float=-3.4028234663852886e38>()
    padded = Where(hidden, lowest, mask)
"""


@pytest.mark.parametrize("number", ["nothing", "i0"])
def test_padding_told_by_a_sum(number: str) -> None:
    """Becomes a mask of keys beside the triangle; rows that see no key give what they gave."""
    test = f"hidden = Equal(sum, {number})"
    if number == "i0":  # another type of zero
        test = "whole = Cast<to=7>(sum) hidden = Equal(whole, i0)"
    body = TRIANGLES + PADDED.format(test=test) + ATTENTION.format(mask="padded")
    sizes = [{**named, "p + s": named["p"] + named["s"]} for named in SIZES]
    before = model(body, ", int64[b,t] attention_mask")
    before.graph.input[-1].type.tensor_type.shape.dim[1].dim_param = "p + s"
    fused, report = fuse(before)
    assert report.fused == 1
    assert ("attn_mask (b, 1, 1, s + p)" in report.sites[0].became) == (number == "nothing")
    for seed, named in enumerate(sizes):
        inputs = random_inputs(before, named, seed)
        assert_same(before, fused, inputs)
        inputs["attention_mask"][:, : named["p"]] = 0  # and with all past keys hidden
        inputs["attention_mask"][-1] = 1
        assert_same(before, fused, inputs)


def test_another_fill_stays() -> None:
    body = TRIANGLES + PADDED.format(test="hidden = Equal(sum, nothing)").replace("-3.4028234663852886e38", "-5.0")
    before = model(body + ATTENTION.format(mask="padded"), ", int64[b,t] attention_mask")
    fused, _ = fuse(before)
    inputs = random_inputs(before, {"b": 2, "s": 4, "p": 3, "t": 7})
    inputs["attention_mask"][:, 0] = 1
    assert_same(before, fused, inputs)
