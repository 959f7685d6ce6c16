"""Constants that multiply Q or K before an attention operator: part of its scale, with the answers they had."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import attributes, fuse_and_check, has_library, nodes, op_types, parse, run

SIZES = ({"b": 2, "s": 5, "p": 4}, {"b": 1, "s": 1, "p": 7})
X = "float[b,s,32] x, float[32,32] wq, float[32,32] wk, float[32,32] wv"
CONSTANTS = """
    half = Constant<value_float=0.5>() root = Constant<value_float=1.6817928>() less = Constant<value_float=-0.3>()
    heads = Constant<value_ints=[0,0,4,8]>() flat = Constant<value_ints=[0,0,32]>() zero = Constant<value_float=0.0>()
    vector = Constant<value_floats=[0.37]>() third = Constant<value_float=0.333>()
"""
PROJECTED = "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)"
ATTENTION = "y = Attention<q_num_heads=4, kv_num_heads=4{more}>({q}, {k}, v)"
DEFAULT = 1 / math.sqrt(8)


def model(body: str, q: str = "q", k: str = "k", more: str = "") -> onnx.ModelProto:
    attention = ATTENTION.format(q=q, k=k, more=more)
    return parse(f"{CONSTANTS} {PROJECTED} {body} {attention}", X, "float[b,s,32] y", 23)


HEADS = """
    r = Reshape(w, heads) t = Transpose<perm=[0,2,1,3]>(r) kr = Reshape(k, heads) kt = Transpose<perm=[0,2,1,3]>(kr)
    vr = Reshape(v, heads) vt = Transpose<perm=[0,2,1,3]>(vr)
"""
# What stands before the attention, the names of its Q and K, its scale in the model and that of the fused node.
FOLDED: dict[str, tuple[str, str, str, str, float]] = {
    "Q": ("w = Mul(q, half)", "w", "k", ", scale=1.0", 0.5),
    "the default scale": ("w = Mul(half, q)", "w", "k", "", 0.5 * DEFAULT),
    "Q divided": ("w = Div(q, root)", "w", "k", ", scale=1.0", 1 / 1.6817928),
    "a vector of one": ("w = Mul(q, vector)", "w", "k", ", scale=1.0", 0.37),
    "Q and K": ("w = Div(q, root) u = Div(k, root)", "w", "u", ", scale=1.0", 1 / 1.6817928**2),
    "both negative": ("w = Mul(q, less) u = Mul(k, less)", "w", "u", "", 0.09 * DEFAULT),
    "twice": ("a = Mul(q, half) w = Mul(a, third)", "w", "k", ", scale=2.0", 0.333),
    "before a softcap": ("w = Mul(q, half)", "w", "k", ", scale=3.0, softcap=2.0", 1.5),
    "among layouts": (
        "a = Mul(q, half) r = Reshape(a, heads) b = Mul(r, third) w = Reshape(b, flat)", "w", "k", "", 0.1665 * DEFAULT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDED)
def test_folded(name: str) -> None:
    body, q, k, more, scale = FOLDED[name]
    fused, _ = fuse_and_check(model(body, q, k, more), *SIZES)
    (node,) = nodes(fused)
    assert attributes(node).get("scale", DEFAULT) == pytest.approx(scale, rel=1e-6)
    assert op_types(fused) == {"MatMul", "FlashAttention"}


@pytest.mark.parametrize("first", [True, False])
def test_behind_heads(first: bool) -> None:
    """Before the heads are put first and behind that; the transposes vanish all the same."""
    scaled = "w = Mul(q, half)" + HEADS if first else HEADS.replace("(w, heads)", "(q, heads)") + "tw = Mul(t, half)"
    attention = f"y4 = Attention({'t' if first else 'tw'}, kt, vt) yt = Transpose<perm=[0,2,1,3]>(y4)"
    before = parse(f"{CONSTANTS} {PROJECTED} {scaled} {attention} y = Reshape(yt, flat)", X, "float[b,s,32] y", 23)
    fused, _ = fuse_and_check(before, *SIZES)
    assert attributes(nodes(fused)[0])["scale"] == pytest.approx(0.5 * DEFAULT)
    assert op_types(fused) == {"MatMul", "FlashAttention"}


# What stands before the attention, the names of its Q and K.
KEPT = {
    "zero": ("w = Mul(q, zero)", "w", "k"),
    "a negative one": ("w = Mul(q, less)", "w", "k"),
    "one for each feature": ("m = Range(zero, n, one) w = Mul(q, m)", "w", "k"),
    "another type between": ("a = Cast<to=10>(q) c = Mul(a, h) w = Cast<to=1>(c)", "w", "k"),
}
MORE = """
    one = Constant<value_float=1.0>() n = Constant<value_float=32.0>() h = Cast<to=10>(half)
"""


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    body, q, k = KEPT[name]
    fused, _ = fuse_and_check(model(MORE + body, q, k), *SIZES)
    assert "Mul" in op_types(fused) and "scale" not in attributes(nodes(fused)[0])


def test_keys_that_the_model_gives_away() -> None:
    """Past and present keys are as large as K was; Q has its number inside."""
    body = "w = Mul(q, half) u = Mul(k, third)"
    attention = "y, pk, pv = Attention<q_num_heads=4, kv_num_heads=4>(w, u, v, , past_key, past_value)"
    past = ", float[b,4,p,8] past_key, float[b,4,p,8] past_value"
    outputs = "float[b,s,32] y, float[b,4,t,8] pk, float[b,4,t,8] pv"
    fused, _ = fuse_and_check(parse(f"{CONSTANTS} {PROJECTED} {body} {attention}", X + past, outputs, 23), *SIZES)
    assert attributes(nodes(fused)[0])["scale"] == pytest.approx(0.5 * DEFAULT)
    (left,) = (node for node in fused.graph.node if node.op_type == "Mul")
    assert left.input[1] == "third"


def test_used_elsewhere() -> None:
    """Who else reads the product still has it."""
    body = "w = Mul(q, half) z = Tanh(w)"
    before = parse(
        f"{CONSTANTS} {PROJECTED} {body} {ATTENTION.format(q='w', k='k', more='')}", X,
        "float[b,s,32] y, float[b,s,32] z", 23,
    )  # fmt: skip
    fused, _ = fuse_and_check(before, *SIZES)
    assert attributes(nodes(fused)[0])["scale"] == pytest.approx(0.5 * DEFAULT)
    assert {"Mul", "Tanh"} <= op_types(fused)


@pytest.mark.skipif(not has_library(), reason="the product beside the node needs the library")
def test_of_16_bits() -> None:
    """A power of two changes no bit; others are not rounded to 16 bits any more, so the answer is nearer to exact."""

    def errors(number: float) -> tuple[float, float, bool]:
        body = f"""f = Constant<value_float={number}>() c = Cast<to=10>(f) w = Mul(q, c)
            y = Attention<q_num_heads=2, kv_num_heads=2, scale=1.0>(w, k, v)"""
        kinds = "float16[b,s,16] q, float16[b,s,16] k, float16[b,s,16] v"
        before = parse(body, kinds, "float16[b,s,16] y", 23)
        fused, _ = fuse(before)
        assert op_types(fused) == {"FlashAttention"}
        random = np.random.default_rng(0)
        inputs = {name: random.standard_normal((2, 40, 16)).astype(np.float16) for name in "qkv"}
        q, k, v = (x.astype(np.float64).reshape(2, 40, 2, 8).transpose(0, 2, 1, 3) for x in inputs.values())
        scores = q @ k.transpose(0, 1, 3, 2) * float(np.float16(number))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        exact = (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(2, 40, 16)
        answers = [run(each, inputs, library=True)[0] for each in (_as_fused(before), fused)]
        first, last = (float(np.abs(answer - exact).mean()) for answer in answers)
        return first, last, bool((answers[0] == answers[1]).all())

    assert errors(0.25)[2]
    with_product, without, _ = errors(0.3)
    assert without <= with_product


def _as_fused(before: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its node of the library, the product left outside."""
    result = onnx.ModelProto()
    result.CopyFrom(before)
    result.opset_import.append(onnx.helper.make_opsetid("flashonnx", 1))
    for node in result.graph.node:
        if node.op_type == "Attention":
            node.op_type, node.domain = "FlashAttention", "flashonnx"
    return result


@pytest.mark.parametrize(("number", "power"), [("1e-25", 1e24), ("1e25", 1e-24)])
def test_scales_beyond_float32(number: str, power: float) -> None:
    """Two factors of a product by itself whose product no attribute holds: 0 or infinity there, which cannot run."""
    body = f"""c = Constant<value_float={number}>() a = Mul(q, c) kt = Transpose<perm=[0,1,3,2]>(k) b = Mul(kt, c)
        s = MatMul(a, b) p = Softmax<axis=-1>(s) y = MatMul(p, v)"""
    before = parse(body, "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v", "float[b,2,s,8] y")
    q, k = np.random.default_rng(0).normal(size=(2, 2, 2, 5, 8)).astype(np.float32) * np.float32(power)
    _, report = fuse_and_check(before, SIZES[0], fused=0, total=1, q=q, k=k)
    assert report.sites[0].reason.endswith("is no number of float32")
