"""Scores multiplied by one number for each of their rows: Q is, with the answers of ONNX Runtime before and after."""

from __future__ import annotations

import numpy as np
import pytest
from models import attributes, fuse_and_check, nodes, op_types, parse

QKV = "float[b,2,s,8] q, float[b,2,t,8] k, float[b,2,t,8] v"
Y = "float[b,2,s,8] y"
SIZES = ({"b": 2, "s": 5, "t": 7}, {"b": 1, "s": 9, "t": 3}, {"b": 3, "s": 1, "t": 4})
START = """
    half = Constant<value_float=0.5>() five = Constant<value_float=5.0>() kt = Transpose<perm=[0,1,3,2]>(k)
    raw = MatMul(q, kt)
"""
END = "p = Softmax<axis=-1>(scores) y = MatMul(p, v)"


@pytest.mark.parametrize("shape", ["2,1,1", "b,2,s,1", "s,1", "b,1,1,1", "1"])
def test_rows(shape: str) -> None:
    """One number for each head, query or sentence, before and behind the mask's place and a softcap."""
    inputs = f"{QKV}, float[{shape}] f, float[b,1,s,t] m"
    for between in (
        "w = Mul(raw, f) scores = Add(w, m)",
        "w = Mul(f, raw) u = Mul(w, half) scores = Add(u, m)",
        "w = Mul(raw, f) d = Div(w, five) t = Tanh(d) u = Mul(t, five) scores = Add(u, m)",
    ):
        after, _ = fuse_and_check(parse(START + between + END, inputs, Y), *SIZES)
        assert not {"Softmax", "MatMul"} & op_types(after)


def test_negative_numbers() -> None:
    """No scale could be below 0; Q may be multiplied by anything."""
    before = parse(f"{START} scores = Mul(raw, f) {END}", f"{QKV}, float[2,1,1] f", Y)
    after, _ = fuse_and_check(before, *SIZES, f=np.array([[[-1.5]], [[2.5]]], np.float32))
    assert attributes(nodes(after)[0])["scale"] == 1.0


def test_windows() -> None:
    """As Swin V2 has it: a factor for each head, positions, and a mask for each of four windows of an image."""
    body = f"""{START} biased = Mul(raw, f) placed = Add(biased, bias) s5 = Constant<value_ints=[-1,4,2,6,6]>()
        s4 = Constant<value_ints=[-1,2,6,6]>() five5 = Reshape(placed, s5) a = Constant<value_ints=[1]>()
        m4 = Unsqueeze(m, a) masked = Add(five5, m4) scores = Reshape(masked, s4) {END}"""
    inputs = ", ".join(f"float[n,2,6,8] {name}" for name in "qkv")
    inputs += ", float[2,1,1] f, float[2,6,6] bias, float[4,6,6] m"
    fuse_and_check(parse(body, inputs, "float[n,2,6,8] y"), {"n": 8}, {"n": 4})


LEFT = {
    "each column": ("scores = Mul(raw, f)", "float[1,t] f"),
    "each score": ("scores = Mul(raw, f)", "float[b,2,s,t] f"),
    "behind a mask": ("w = Add(raw, m) scores = Mul(w, f)", "float[2,1,1] f, float[b,1,s,t] m"),
    "behind a filled mask": (
        "low = Constant<value_float=-99999.0>() w = Where(m, raw, low) scores = Mul(w, f)",
        "float[2,1,1] f, bool[b,1,s,t] m",
    ),
    "behind a softcap": ("u = Tanh(raw) scores = Mul(u, f)", "float[2,1,1] f"),
    "twice": ("w = Mul(raw, f) scores = Mul(w, f)", "float[2,1,1] f"),
    "wider than the scores": ("scores = Mul(raw, f)", "float[1,b,2,s,1] f"),
    "of more heads than Q": ("scores = Mul(one, f)", "float[2,1,1] f, float[b,1,s,8] q1"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    body, more = LEFT[name]
    start, output = START, Y
    if "q1" in more:
        start = START.replace("raw = MatMul(q, kt)", "raw = MatMul(q, kt) k1 = ReduceMean<keepdims=1>(k, ax)")
        start = "ax = Constant<value_ints=[1]>() " + start + "k1t = Transpose<perm=[0,1,3,2]>(k1) one = MatMul(q1, k1t)"
    if name == "wider than the scores":
        body += " "
        start = start.replace("raw =", "raw4 =") + "z = Constant<value_ints=[0]>() raw = Unsqueeze(raw4, z)"
        body = body.replace("scores = Mul(raw, f)", "w = Mul(raw, f) scores = Squeeze(w, z)")
    before = parse(f"{start} {body} {END}", f"{QKV}, {more}", output)
    _, report = fuse_and_check(before, *SIZES, fused=0, total=1)
    assert report.sites[0].reason


SINK = """
    shape = Shape(raw) i0 = Constant<value_ints=[0]>() i3 = Constant<value_ints=[3]>() rest = Slice(shape, i0, i3)
    one = Constant<value_ints=[1]>() wanted = Concat<axis=0>(rest, one) column = Expand(sink, wanted)
"""
KEYS = "last = Constant<value_ints=[-1]>() wide = Softmax<axis=-1>(scores) p = Slice(wide, i0, last, i3)"


@pytest.mark.parametrize(
    ("between", "fused"),
    [
        ("w = Mul(raw, f) scores = Concat<axis=-1>(w, column)", 1),
        ("both = Concat<axis=-1>(raw, column) scores = Mul(both, f)", 0),  # the sink is multiplied, too
    ],
)
def test_sinks(between: str, fused: int) -> None:
    body = f"{START} {SINK} {between} {KEYS} y = MatMul(p, v)"
    before = parse(body, f"{QKV}, float[2,1,1] f, float[1,2,1,1] sink", Y)
    _, report = fuse_and_check(before, *SIZES, fused=fused, total=1)
    assert fused or "after a column was put beside them" in report.sites[0].reason


def test_other_types() -> None:
    """Scores that are cast before they are multiplied: in Q's type the factor might be infinite."""
    body = """kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) wide = Cast<to=1>(raw) scores = Mul(wide, f)
        p32 = Softmax<axis=-1>(scores) p = Cast<to=10>(p32) y = MatMul(p, v)"""
    before = parse(body, f"{QKV.replace('float', 'float16')}, float[2,1,1] f", Y.replace("float", "float16"))
    _, report = fuse_and_check(before, *SIZES, fused=0, total=1)
    assert "'f' is float and multiplies rows of scores whose Q is float16" in report.sites[0].reason
