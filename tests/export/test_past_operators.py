"""fuse(kv_cache=...) on small graphs: operators that have a past, names of caches, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import has_library, nodes, run

PAST = "float[b,2,p,8] past_k, float[b,2,p,8] past_v"
PRESENT = "float[b,2,t,8] out_k, float[b,2,t,8] out_v"
INPUTS = "float[b,s,32] q, float[b,s,16] k, float[b,s,16] v"
HEADS = """
    qs = Constant<value_ints=[0,0,4,8]>() ks = Constant<value_ints=[0,0,2,8]>() flat = Constant<value_ints=[0,0,32]>()
    q4 = Reshape(q, qs) k4 = Reshape(k, ks) v4 = Reshape(v, ks) qh = Transpose<perm=[0,2,1,3]>(q4)
    kh = Transpose<perm=[0,2,1,3]>(k4) vh = Transpose<perm=[0,2,1,3]>(v4)
"""
JOIN = "out_k = Concat<axis=2>(past_k, kh) out_v = Concat<axis=2>(past_v, vh)"
# Scores of queries that see keys up to their own; position p + i.
TRIANGLE = """
    a = Constant<value_ints=[2]>() b1 = Constant<value_ints=[1]>()
    i0 = Constant<value_int=0>() i1 = Constant<value_int=1>()
    c0 = Constant<value_ints=[0]>() lowest = Constant<value_float=-3.4028234663852886e38>()
    shape_p = Shape<start=2,end=3>(past_k) shape_s = Shape<start=1,end=2>(q) P = Squeeze(shape_p) S = Squeeze(shape_s)
    T = Add(P, S) keys = Range(i0, T, i1) rows = Range(P, T, i1) column = Unsqueeze(rows, b1)
    seen = LessOrEqual(keys, column)
"""
ATTENTION = """
    kt = Transpose<perm=[0,1,3,2]>(wide_k) products = MatMul(qh, kt) number = Constant<value_float=0.35>()
    scaled = Mul(products, number) scores = Where(seen, scaled, lowest) weights = Softmax<axis=-1>(scores)
    y4 = MatMul(weights, wide_v) yt = Transpose<perm=[0,2,1,3]>(y4) y = Reshape(yt, flat)
"""
REPEAT = """
    {x}5 = Unsqueeze(out_{x}, a) {x}n = Constant<value_ints=[1,1,2,1,1]>() {x}e = Expand({x}5, {x}n)
    {x}f = Constant<value_ints=[0,4,-1,8]>() wide_{x} = Reshape({x}e, {x}f)
"""
WRITTEN_OUT = HEADS + JOIN + TRIANGLE + REPEAT.format(x="k") + REPEAT.format(x="v") + ATTENTION


def model(body: str, *, inputs: str = INPUTS, more: str = "", past: str = PAST, present: str = PRESENT,
          opset: int = 20) -> onnx.ModelProto:  # fmt: skip
    given = ", ".join(x for x in (inputs, more, past) if x)
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>
        g ({given}) => (float[b,s,32] y, {present}) {{ {body} }}"""
    )


def check(before: onnx.ModelProto, *, presents: tuple[str, str] = ("out_k", "out_v"), **fixed: Any) -> onnx.ModelProto:
    """Sentences with 5, 0 and 9 keys side by side give what each gives by itself, and their caches too."""
    fused, report = fuse(before, kv_cache="static")
    assert report.fused == report.total == 1, str(report)
    onnx.checker.check_model(fused, full_check=True)
    (node,) = nodes(fused)
    assert node.op_type == "FlashAttentionKVCache"
    random, capacity = np.random.default_rng(0), 16
    lengths = np.array([5, 0, 9])
    key_name, value_name = (value.name for value in fused.graph.input if "past" in value.name)
    for count in (1, 4):
        given = {
            n: random.standard_normal((3, count, w)).astype(np.float32) for n, w in (("q", 32), ("k", 16), ("v", 16))
        }
        caches = [np.full((3, 2, capacity, 8), np.nan, np.float32) for _ in range(2)]
        pasts = [[random.standard_normal((1, 2, n, 8)).astype(np.float32) for n in lengths] for _ in range(2)]
        for cache, of_sentences in zip(caches, pasts, strict=True):
            for b, past in enumerate(of_sentences):
                cache[b, :, : lengths[b]] = past[0]
        inputs = {**given, "cache_lengths": lengths, key_name: caches[0], value_name: caches[1]}
        for library in (False, True) if has_library() else (False,):
            y, keys, values = run(fused, inputs, library=library)
            for b, n in enumerate(lengths):
                alone = {name: x[b : b + 1] for name, x in given.items()}
                alone |= {"past_k": pasts[0][b], "past_v": pasts[1][b]}
                alone |= {name: make(n, count) for name, make in fixed.items()}
                want = run(before, alone)
                np.testing.assert_allclose(y[b], want[0][0], atol=2e-5)
                for got, x in zip((keys, values), want[1:], strict=True):
                    np.testing.assert_allclose(got[b, :, : n + count], x[0], atol=1e-6)
    return fused


def test_written_out() -> None:
    check(model(WRITTEN_OUT))


def test_mask_of_padding() -> None:
    """attention_mask goes: the lengths say it."""
    body = WRITTEN_OUT.replace("seen = LessOrEqual(keys, column)", """
        below = LessOrEqual(keys, column) counts = Cast<to=9>(attention_mask) c12 = Constant<value_ints=[1,2]>()
        counted = Unsqueeze(counts, c12) seen = And(below, counted)""")  # fmt: skip
    before = model(body, more="int64[b,total] attention_mask")
    fused = check(before, attention_mask=lambda n, count: np.ones((1, n + count), np.int64))
    assert "attention_mask" not in [value.name for value in fused.graph.input]


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("given", ["is_causal=1", "is_causal=1, scale=0.2, softcap=1.5"])
def test_standard_attention(opset: int, given: str) -> None:
    body = f"""y, out_k, out_v = Attention<q_num_heads=4, kv_num_heads=2, {given}>(q, k, v, , past_k, past_v)"""
    check(model(body, opset=opset))


def test_attention_of_heads_first() -> None:
    body = (
        HEADS
        + """
        y4, out_k, out_v = Attention<is_causal=1>(qh, kh, vh, , past_k, past_v)
        yt = Transpose<perm=[0,2,1,3]>(y4) y = Reshape(yt, flat)"""
    )
    check(model(body, opset=23))


def test_multi_head_attention() -> None:
    """com.microsoft's: as many key heads as query heads."""
    inputs = INPUTS.replace("16", "32")
    body = """y, out_k, out_v = com.microsoft.MultiHeadAttention<num_heads=4, unidirectional=1>(
        q, k, v, , , , past_k, past_v)"""
    before = model(body, inputs=inputs, past=PAST.replace("b,2", "b,4"), present=PRESENT.replace("b,2", "b,4"))
    fused, report = fuse(before, kv_cache="static")
    assert report.fused == 1
    (node,) = nodes(fused)
    assert node.op_type == "FlashAttentionKVCache"
    random = np.random.default_rng(0)
    given = {n: random.standard_normal((2, 3, 32)).astype(np.float32) for n in "qkv"}
    pasts = {n: random.standard_normal((2, 4, 5, 8)).astype(np.float32) for n in ("past_k", "past_v")}
    want = run(before, {**given, **pasts})
    caches = {f"past_key_values.0.{n}": np.full((2, 4, 12, 8), np.nan, np.float32) for n in ("key", "value")}
    for cache, past in zip(caches.values(), pasts.values(), strict=True):
        cache[:, :, :5] = past
    got = run(fused, {**given, **caches, "cache_lengths": np.array([5, 5])})
    np.testing.assert_allclose(got[0], want[0], atol=2e-5)
    np.testing.assert_allclose(got[1][:, :, :8], want[1], atol=1e-6)


def test_names_of_caches() -> None:
    """Other names become those that Generator knows, and the report says so."""
    fused, report = fuse(model(WRITTEN_OUT), kv_cache="static")
    assert [value.name for value in fused.graph.input][-2:] == ["past_key_values.0.key", "past_key_values.0.value"]
    assert [value.name for value in fused.graph.output] == ["y", "present.0.key", "present.0.value"]
    assert "past_k is called past_key_values.0.key" in str(report)


def test_pages() -> None:
    fused, report = fuse(model(WRITTEN_OUT), kv_cache="paged")
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in fused.graph.input}
    assert shapes["past_key_values.0.key"] == ["pages", "page_size", 2, 8]
    assert shapes["block_table"] == ["batch", "pages_per_sequence"]
    assert "block_table" in report.notes[-1]


MASK = "float[1,4,s,total] mask"
REFUSED: dict[str, tuple[onnx.ModelProto, str]] = {
    "no past": (
        model("y, out_k, out_v = Attention<q_num_heads=4, kv_num_heads=2, is_causal=1>(q, k, v)", past="", opset=23),
        "no input of shape",
    ),
    "a bias": (
        model(WRITTEN_OUT.replace("Mul(products, number)", "Mul(products, number) biased = Add(scaled, mask)").replace(
            "Where(seen, scaled", "Where(seen, biased"), more=MASK),
        "more than a triangle or a window",
    ),
    "no triangle": (
        model(WRITTEN_OUT.replace("LessOrEqual(keys, column)", "GreaterOrEqual(keys, i0)").replace(
            "Where(seen, scaled, lowest)", "Identity(scaled)")),
        "see those behind it",
    ),
    "a triangle from the first key": (
        model(WRITTEN_OUT.replace("Range(P, T, i1)", "Range(i0, S, i1)")), "counts its triangle"),
    "the present is no output": (
        model(WRITTEN_OUT.replace("out_k", "all_k") + " out_k = Identity(kh)"),
        "is no output of the model",
    ),
    "buffers of its own": (
        model("""y, out_k, out_v = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(
            q, k, v, past_k, past_v, seqlens_k, total)""", more="int32[b] seqlens_k, int32 total"),
        "GroupQueryAttention, which has buffers for past keys",
    ),
    "a fixed past": (
        model(WRITTEN_OUT, past=PAST.replace("p,", "5,")), "fixed length"),
    "lengths that differ": (
        model(WRITTEN_OUT, past="float[b,2,p,8] past_k, float[b,2,n,8] past_v"),
        "different lengths"),
    "the number of past keys in the answer": (
        model(WRITTEN_OUT.replace("y = Reshape(yt, flat)", "y0 = Reshape(yt, flat) f = Cast<to=1>(P) y = Add(y0, f)")),
        "depends on how many past keys",
    ),
    "a mask by another name": (
        model(WRITTEN_OUT.replace("seen = LessOrEqual(keys, column)", """
            below = LessOrEqual(keys, column) counts = Cast<to=9>(padding) c12 = Constant<value_ints=[1,2]>()
            counted = Unsqueeze(counts, c12) seen = And(below, counted)"""), more="int64[b,total] padding"),
        "attention_mask",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Any) -> None:
    before, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        fuse(before, tmp_path / "x.onnx", kv_cache="static")
    assert not list(tmp_path.iterdir())


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="'static', 'paged' or None, got 'circular'"):
        fuse(model(WRITTEN_OUT), kv_cache="circular")


def test_what_was_left_is_told() -> None:
    """Where an attention was not fused at all, that is the reason."""
    before = model(WRITTEN_OUT.replace("Softmax<axis=-1>", "Softmax<axis=-2>"))
    with pytest.raises(ValueError, match=r"no attention reads 'past_k'.*'weights' is left as it was: the softmax runs"):
        fuse(before, kv_cache="static")


@pytest.mark.parametrize("name", ["a bias", "no triangle"])
def test_without_the_option_it_is_fused_as_it_is(name: str) -> None:
    _, report = fuse(REFUSED[name][0])
    assert report.fused == 1


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ("Cos(r1) r1 = Unsqueeze(float_rows, c02)", ""),
        ("Softmax<axis=0>(r1) r1 = Unsqueeze(float_rows, c02)", "positions go through Softmax"),
        ("ReduceSum(float_rows)", "depends on how many past keys"),
    ],
)
def test_what_becomes_of_positions(operations: str, words: str) -> None:
    """Positions may go where each sentence's stay its own."""
    made, _, first = operations.partition(" r1 = ")
    lines = f"r1 = {first} turned = {made}" if first else f"turned = {made}"
    body = (
        f"c02 = Constant<value_ints=[0,2]>() {TRIANGLE} float_rows = Cast<to=1>(rows) {lines} moved = Add(q, turned) "
        + WRITTEN_OUT.replace("Reshape(q, qs)", "Reshape(moved, qs)").replace(TRIANGLE, "")
    )
    before = model(body)
    if words:
        with pytest.raises(ValueError, match=words):
            fuse(before, kv_cache="static")
    else:
        check(before)


def test_positions_in_a_subgraph() -> None:
    """What an If does with them is not looked into."""
    body = """c02 = Constant<value_ints=[0,2]>() f = Cast<to=1>(rows) r1 = Unsqueeze(f, c02) flag = Cast<to=9>(i1)
        z = If<then_branch = a () => (float[1,s,1] t) { t = Identity(r1) },
               else_branch = c () => (float[1,s,1] e) { e = Neg(r1) }>(flag) y = Add(y0, z)"""
    before = model(WRITTEN_OUT.replace("y = Reshape(yt, flat)", "y0 = Reshape(yt, flat)") + body)
    with pytest.raises(ValueError, match="positions go through If"):
        fuse(before, kv_cache="static")
