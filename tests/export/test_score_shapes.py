"""Scores that are reshaped on their way to the softmax, asked for their shape, or given a sink."""

from __future__ import annotations

import numpy as np
import pytest
from models import attributes, fuse_and_check, nodes, op_types, parse, random_inputs, run

SIZES = ({"b": 2, "s": 5, "t": 7}, {"b": 1, "s": 9, "t": 3}, {"b": 3, "s": 1, "t": 4})
Y = "float[b,2,s,8] y"

# Batch and heads merged for the products, apart for the mask, as of BLOOM.
MERGED = """
    bs = Shape<start=0,end=1>(q) ss = Shape<start=2,end=3>(q) ts = Shape<start=2,end=3>(k)
    m1 = Constant<value_ints=[-1]>() h = Constant<value_ints=[2]>() e = Constant<value_ints=[8]>()
    bh = Mul(bs, h) qs = Concat<axis=0>(bh, ss, e) ks = Concat<axis=0>(bh, ts, e)
    apart = Concat<axis=0>(bs, h, ss, ts) joined = Concat<axis=0>(bh, ss, ts) ys = Concat<axis=0>(bs, h, ss, e)
    q3 = Reshape(q, qs) k3 = Reshape(k, ks) v3 = Reshape(v, ks) kt = Transpose<perm=[0,2,1]>(k3) raw = MatMul(q3, kt)
"""
ALIBI = "one = Constant<value_ints=[1]>() as = Concat<axis=0>(bh, one, ts) alibi = Reshape(alibi4, as)"
ALIBI_INPUT = "float[b,2,1,t] alibi4"
BACK = "p = Softmax<axis=-1>(scores) p3 = Reshape(p, joined) o = MatMul(p3, v3) y = Reshape(o, ys)"
QKV = "float[b,2,s,8] q, float[b,2,t,8] k, float[b,2,t,8] v"


@pytest.mark.parametrize(
    ("before", "after", "inputs", "mask"),
    [
        ("m = Identity(raw)", "scores = Identity(s4)", "", None),
        ("m = Identity(raw)", "scores = Add(s4, a)", "float[b,1,s,t] a", "(b, 1, s, t)"),
        (f"{ALIBI} m = Add(raw, alibi)", "scores = Identity(s4)", ALIBI_INPUT, "(b, 2, 1, t)"),
        (
            f"{ALIBI} m = Add(raw, alibi)",
            "scores = Add(s4, a)",
            "float[b,2,1,t] alibi4, float[b,1,1,t] a",
            "(b, 2, 1, t)",
        ),
        ("m = Add(raw, alibi)", "scores = Identity(s4)", "float[1,s,t] alibi", "(1, s, t)"),
        ("m = Add(alibi, raw)", "scores = Add(a, s4)", "float[s,t] alibi, float[2,1,t] a", "(2, s, t)"),
    ],
)
def test_heads_come_apart(before: str, after: str, inputs: str, mask: str | None) -> None:
    """Masks of the merged and of the divided shape, in the latter."""
    body = f"{MERGED} {before} s4 = Reshape(m, apart) {after} {BACK}"
    model, report = fuse_and_check(parse(body, f"{QKV}{', ' if inputs else ''}{inputs}", Y), *SIZES)
    assert not {"Softmax", "MatMul"} & op_types(model)
    assert attributes(nodes(model)[0]) == {"scale": 1.0}
    if mask:
        assert f"attn_mask {mask}" in report.sites[0].became
    else:
        assert "attn_mask" not in report.sites[0].became


def test_other_heads() -> None:
    """The scores of two sentences of two heads are taken for one sentence of four: the mask is another."""
    body = f"{MERGED} s4 = Reshape(raw, apart) scores = Add(s4, a) {BACK}"
    body = body.replace("apart = Concat<axis=0>(bs, h, ss, ts)", "apart = Concat<axis=0>(h, bs, ss, ts)")
    model, _ = fuse_and_check(parse(body, f"{QKV}, float[b,s,t] a", Y), *SIZES, fused=0, total=1)
    assert "Softmax" in op_types(model)


def test_queries_and_keys_exchanged() -> None:
    """(keys, queries) are no view of (queries, keys), though as many numbers."""
    square = "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v"
    body = f"{MERGED} turned = Transpose<perm=[0,2,1]>(raw) scores = Reshape(turned, apart) {BACK}"
    _, report = fuse_and_check(parse(body, square, Y), *SIZES, fused=0, total=1)
    assert "reshaped" in report.sites[0].reason or "keys alone" in report.sites[0].reason


def test_softmax_over_queries_and_keys() -> None:
    body = f"""{MERGED} n = Mul(ss, ts) flat = Concat<axis=0>(bh, n) s2 = Reshape(raw, flat) p2 = Softmax<axis=-1>(s2)
        p3 = Reshape(p2, joined) o = MatMul(p3, v3) y = Reshape(o, ys)"""
    _, report = fuse_and_check(parse(body, QKV, Y), *SIZES, fused=0, total=1)
    assert "keys alone" in report.sites[0].reason


# A batch of windows, four of each image, each with its own mask, as of Swin.
WINDOWS = """
    s5 = Constant<value_ints=[-1,4,2,6,6]>() s4 = Constant<value_ints=[-1,2,6,6]>()
    kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) biased = Add(raw, bias)
    five = Reshape(biased, s5) a = Constant<value_ints=[1]>() m4 = Unsqueeze(m, a) masked = Add(five, m4)
    scores = Reshape(masked, s4) p = Softmax<axis=-1>(scores) y = MatMul(p, v)
"""


def test_masks_of_windows() -> None:
    """The mask of each window is repeated for every image; that the windows divide is what the Reshape says."""
    inputs = ", ".join(f"float[n,2,6,8] {name}" for name in "qkv") + ", float[2,6,6] bias, float[4,6,6] m"
    model, _ = fuse_and_check(parse(WINDOWS, inputs, "float[n,2,6,8] y"), {"n": 8}, {"n": 4}, {"n": 12})
    assert not {"Softmax", "MatMul"} & op_types(model)


def test_masks_of_windows_in_another_order() -> None:
    """Each image's windows apart in the batch, or each window's images: the numbers tell."""
    inputs = ", ".join(f"float[n,2,6,8] {name}" for name in "qkv") + ", float[2,6,6] bias, float[4,6,6] m"
    body = WINDOWS.replace("[-1,4,2,6,6]", "[4,-1,2,6,6]").replace("value_ints=[1]>() m4", "value_ints=[1,2]>() m4")
    model = parse(body, inputs, "float[n,2,6,8] y")
    fuse_and_check(model, {"n": 8}, {"n": 4}, {"n": 12})


# Rows and columns of an image of 2 by 3, with a number for each distance in both, as of SAM.
IMAGE = """
    s5 = Constant<value_ints=[-1,2,3,2,3]>() s3 = Constant<value_ints=[-1,6,6]>()
    kt = Transpose<perm=[0,2,1]>(k) raw = MatMul(q, kt) five = Reshape(raw, s5)
    high = Add(five, rows) wide = Add(high, columns) scores = Reshape(wide, {back}) p = Softmax<axis=-1>(scores)
    y = MatMul(p, v)
"""
POSITIONS = "float[n,2,3,2,1] rows, float[n,2,3,1,3] columns"
PIXELS = "float[n,6,8] q, float[n,6,8] k, float[n,6,8] v"


def test_relative_positions_of_an_image() -> None:
    model, _ = fuse_and_check(
        parse(IMAGE.format(back="s3"), f"{PIXELS}, {POSITIONS}", "float[n,6,8] y"), {"n": 4}, {"n": 1}
    )
    assert not {"Softmax", "MatMul"} & op_types(model)


def test_shape_of_the_scores() -> None:
    """TorchScript asks the scores for the shape they go back to; that is known without them."""
    inputs = f"{PIXELS}, {POSITIONS}"
    body = IMAGE.format(back="back").replace("five =", "back = Shape(raw) five =")
    model, _ = fuse_and_check(parse(body, inputs, "float[n,6,8] y"), {"n": 4}, {"n": 1})
    assert not {"Softmax", "MatMul"} & op_types(model)
    shown = IMAGE.format(back="back").replace("five =", "back = Shape(raw) z = Identity(back) five =")
    model, _ = fuse_and_check(parse(shown, inputs, "float[n,6,8] y, int64[3] z"), {"n": 4}, {"n": 1})
    assert not {"Softmax", "MatMul"} & op_types(model)


def test_shape_of_the_output() -> None:
    """The output is asked for its batch before it is reshaped, as of BLOOM."""
    back = BACK.replace(
        "y = Reshape(o, ys)",
        "n = Shape<start=0,end=1>(o) half = Div(n, h) own = Concat<axis=0>(half, h, ss, e) y = Reshape(o, own)",
    )
    model, _ = fuse_and_check(parse(f"{MERGED} scores = Reshape(raw, apart) {back}", QKV, Y), *SIZES)
    assert not {"Softmax", "MatMul"} & op_types(model)
    assert attributes(nodes(model)[0]) == {"scale": 1.0}


def test_baddbmm() -> None:
    """The sum beta * bias + alpha * product, with beta 1."""
    body = f"""{MERGED} one = Constant<value_float=1.0>() c = Constant<value_float=0.3>() scaled = Mul(raw, c)
        wide = Expand(a, apart) a3 = Reshape(wide, joined) beta = Mul(a3, one) scores3 = Add(scaled, beta)
        p3 = Softmax<axis=-1>(scores3) o = MatMul(p3, v3) y = Reshape(o, ys)"""
    _, report = fuse_and_check(parse(body, f"{QKV}, float[b,1,1,t] a", Y), *SIZES)
    assert "attn_mask (b, 1, 1, t)" in report.sites[0].became
    other = body.replace("value_float=1.0", "value_float=0.5")
    fuse_and_check(parse(other, f"{QKV}, float[b,1,1,t] a", Y), *SIZES)


# -- sinks

SINK = """
    kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) c = Constant<value_float=0.35>() scaled = Mul(raw, c)
    z = Constant<value_ints=[0]>() n1 = Constant<value_ints=[-1]>() one = Constant<value_ints=[1]>()
    last = Constant<value_ints=[3]>() far = Constant<value_ints=[9223372036854775807]>()
    bs = Shape<start=0,end=1>(q) ss = Shape<start=2,end=3>(q) h = Constant<value_ints=[2]>()
    col = Concat<axis=0>(bs, h, ss, one) four = Constant<value_ints=[1,-1,1,1]>() s4 = Reshape(sink, four)
    column = Expand(s4, col)
"""
WITH_SINK = f"{SINK} masked = Add(scaled, a) both = Concat<axis=-1>(masked, column)"
END = "p = Softmax<axis=-1>(x) seen = Slice(p, z, n1, last) y = MatMul(seen, v)"
SINK_INPUTS = f"{QKV}, float[2] sink, float[b,1,1,t] a"


@pytest.mark.parametrize(
    "steps",
    [
        f"{WITH_SINK} x = Identity(both) {END}",
        # gpt-oss takes the maximum off
        f"{WITH_SINK} top = ReduceMax(both, n1) x = Sub(both, top) {END}",
        f"{WITH_SINK} x = Identity(both) {END.replace('Slice(p, z, n1, last)', 'Slice(p, z, n1, last, one)')}",
        # in front
        f"""{WITH_SINK.replace("(masked, column)", "(column, masked)")} x = Identity(both)
            {END.replace("Slice(p, z, n1, last)", "Slice(p, one, far, last)")}""",
    ],
)
def test_sink(steps: str) -> None:
    model, report = fuse_and_check(parse(steps, SINK_INPUTS, Y), *SIZES)
    assert "sinks (2)" in report.sites[0].became
    assert not {"Softmax", "MatMul", "ReduceMax"} & op_types(model)


def test_sink_of_zero() -> None:
    """One more score of zero, a softmax that may attend to nothing."""
    body = SINK.replace("s4 = Reshape(sink, four)", "").replace("Expand(s4, col)", "ConstantOfShape(col)")
    steps = f"{body} both = Concat<axis=3>(scaled, column) x = Identity(both) {END}"
    model, _ = fuse_and_check(parse(steps, QKV, Y), *SIZES)
    assert "Softmax" not in op_types(model)


def test_sink_where_every_key_is_hidden() -> None:
    """The sink takes it all: 0."""
    before = parse(f"{WITH_SINK} x = Identity(both) {END}", SINK_INPUTS, Y)
    model, _ = fuse_and_check(before)
    inputs = random_inputs(before, SIZES[0])
    for number in (-np.inf, np.finfo(np.float32).min):
        inputs["a"][0] = number
        for library in (False, True):
            want, got = run(before, inputs)[0], run(model, inputs, library=library)[0]
            np.testing.assert_allclose(got, want, atol=1e-5)
            assert not got[0].any()


NO_SINK = {
    "kept": (END.replace("Slice(p, z, n1, last)", "Identity(p)").replace("v)", "w)"), "x = Identity(both)", "weighed"),
    "the other end is cut": (
        END.replace("Slice(p, z, n1, last)", "Slice(p, one, far, last)"),
        "x = Identity(both)",
        "Slice",
    ),
    "scaled after": (END, "two = Constant<value_float=2.0>() x = Mul(both, two)", "after a column"),
    "two maxima": (END, "top = ReduceMax(masked, n1) x = Sub(both, top)", ""),
}


@pytest.mark.parametrize("name", NO_SINK)
def test_no_sink(name: str) -> None:
    end, steps, reason = NO_SINK[name]
    inputs = SINK_INPUTS.replace("float[2] sink", "float[2] sink, float[b,2,u,8] w") if name == "kept" else SINK_INPUTS
    sizes = [size | {"u": size["t"] + 1} for size in SIZES]
    _, report = fuse_and_check(parse(f"{WITH_SINK} {steps} {end}", inputs, Y), *sizes, fused=0, total=1)
    assert reason in report.sites[0].reason, report.sites[0].reason


def test_a_sink_for_every_query() -> None:
    """A column of its own numbers is no sink."""
    steps = f"{WITH_SINK} x = Identity(both) {END}".replace("column = Expand(s4, col)", "column = Identity(sinks)")
    inputs = f"{SINK_INPUTS}, float[b,2,s,1] sinks"
    _, report = fuse_and_check(parse(steps, inputs, Y), *SIZES, fused=0, total=1)
    assert "each head" in report.sites[0].reason


def test_maximum_before_a_finite_mask() -> None:
    """What is filled in afterwards is compared with scores from which the maximum is gone."""
    body = """
        kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) n1 = Constant<value_ints=[-1]>() top = ReduceMax(raw, n1)
        low = Sub(raw, top) f = Constant<value_float=-3.0>() scores = Where(m, low, f) p = Softmax<axis=-1>(scores)
        y = MatMul(p, v)
    """
    fuse_and_check(parse(body, f"{QKV}, bool[b,1,1,t] m", Y), *SIZES, fused=0, total=1)
    gone = body.replace("scores = Where(m, low, f)", "scores = Add(low, a)").replace(
        "f = Constant<value_float=-3.0>()", ""
    )
    model, _ = fuse_and_check(parse(gone, f"{QKV}, float[b,1,1,t] a", Y), *SIZES)
    assert not {"Softmax", "ReduceMax"} & op_types(model)
