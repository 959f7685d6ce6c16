"""fuse(kv_cache=...): what is taken gives each sentence what it gets alone; padding may hold anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import run

# What becomes of hidden states {h}, (b, s, 8): the same shape again, in {o}. Other names begin with {o}.
APART = {
    "unary": "{o} = Tanh({h})",
    "features normalised": "{o} = LayerNormalization({h}, w8)",
    "features' softmax": "{o} = Softmax<axis=-1>({h})",
    "mean of features": "{o}m = ReduceMean<keepdims=1>({h}, two) {o} = Sub({h}, {o}m)",
    "linear": "{o} = MatMul({h}, w88)",
    "rows of all": "{o}f = Reshape({h}, flat) {o}g = Gemm({o}f, w88, w8) {o} = Reshape({o}g, shape_x)",
    "heads": "{o}r = Reshape({h}, split) {o}t = Transpose<perm=[0,2,1,3]>({o}r) {o}e = Softmax<axis=-1>({o}t) "
    "{o}b = Transpose<perm=[0,2,1,3]>({o}e) {o} = Reshape({o}b, shape_x)",
    "heads merged with sentences": "{o}r = Reshape({h}, split) {o}t = Transpose<perm=[0,2,1,3]>({o}r) "
    "{o}n = Concat<axis=0>(minus, size_s, two) {o}m = Reshape({o}t, {o}n) {o}e = Softmax<axis=-1>({o}m) "
    "{o}k = Concat<axis=0>(size_b, four, size_s, two) {o}u = Reshape({o}e, {o}k) "
    "{o}b = Transpose<perm=[0,2,1,3]>({o}u) {o} = Reshape({o}b, shape_x)",
    "tokens in pieces": "{o}r = Reshape({h}, pieces) {o}e = Softmax<axis=-1>({o}r) {o} = Reshape({o}e, shape_x)",
    "time first": "{o}t = Transpose<perm=[1,0,2]>({h}) {o}e = Softmax<axis=2>({o}t) {o} = "
    "Transpose<perm=[1,0,2]>({o}e)",
    "positions": "{o} = Add({h}, positions)",
    "a table": "{o}r = Range(n0, n_s, n1) {o}t = Gather(table, {o}r) {o} = Add({h}, {o}t)",
    "a table cut": "{o}t = Slice(table, zero, size_s, zero) {o} = Add({h}, {o}t)",
    "a table by features": "{o}a = ArgMax<axis=2,keepdims=0>({h}) {o}t = Gather(table, {o}a) {o} = Add({h}, {o}t)",
    "features by number": "{o}a = ArgMax<axis=2,keepdims=1>({h}) {o}t = GatherElements<axis=2>({h}, {o}a) {o} = "
    "Add({h}, {o}t)",
    "the best": "{o}v, {o}i = TopK<axis=2>({h}, two) {o}m = ReduceSum<keepdims=1>({o}v, two) {o} = Add({h}, {o}m)",
    "windows of one token": "{o}t = Transpose<perm=[0,2,1]>({h}) {o}c = Conv(  {o}t, w881) {o} = "
    "Transpose<perm=[0,2,1]>({o}c)",
    "expanded": "{o}e = Expand(w8, shape_x) {o} = Mul({h}, {o}e)",
    "ones": "{o}e = ConstantOfShape(shape_x) {o} = Add({h}, {o}e)",
    "a sum of what went before": "{o} = CumSum({h}, n1)",
    "halves": "{o}a, {o}b = Split<axis=2,num_outputs=2>({h}) {o} = Concat<axis=2>({o}b, {o}a)",
    "part of the features": "{o}a = Slice({h}, zero, one, two) {o} = Add({h}, {o}a)",
    "einsum": '{o} = Einsum<equation="bsi,ij->bsj">({h}, w88)',
    "causal attention": "{o}n = Attention<is_causal=1,q_num_heads=4,kv_num_heads=4>({h}, {h}, {h}) {o} = "
    "Add({h}, {o}n)",
    "which are large": "{o}g = Greater({h}, w8) {o} = Where({o}g, {h}, w8)",
}
MIXED = {
    "tokens normalised": "{o} = LayerNormalization<axis=1>({h}, w1)",
    "tokens' softmax": "{o} = Softmax<axis=1>({h})",
    "mean of tokens": "{o}m = ReduceMean<keepdims=1>({h}, one) {o} = Sub({h}, {o}m)",
    "mean of sentences": "{o}m = ReduceMean<keepdims=1>({h}, zero) {o} = Sub({h}, {o}m)",
    "mean of all": "{o}m = ReduceMean<keepdims=1>({h}) {o} = Sub({h}, {o}m)",
    "best token": "{o}m = ReduceMax<keepdims=1>({h}, one) {o} = Sub({h}, {o}m)",
    "mean of flat rows": "{o}f = Reshape({h}, flat) {o}m = ReduceMean<keepdims=1>({o}f, zero) {o} = Sub({h}, {o}m)",
    "scores": "{o}s = Einsum<equation=\"bsi,bti->bst\">({h}, {h}) {o}p = Softmax<axis=-1>({o}s) {o} = "
    "MatMul({o}p, {h})",
    "features of all tokens": "{o}s = Einsum<equation=\"bsi,bsj->bij\">({h}, {h}) {o} = MatMul({h}, {o}s)",
    "attention": "{o}n = Attention<q_num_heads=4,kv_num_heads=4>({h}, {h}, {h}) {o} = Add({h}, {o}n)",
    "the last token": "{o}l = Slice({h}, minus, big, one) {o} = Add({h}, {o}l)",
    "the first token moved": "{o}a = Slice({h}, zero, one, one) {o}b = Slice({h}, one, big, one) {o} = "
    "Concat<axis=1>({o}b, {o}a)",
    "backwards": "{o}l = Slice({h}, minus, small, one, minus) {o} = Add({h}, {o}l)",
    "another sentence": "{o}l = Slice({h}, minus, small, zero, minus) {o} = Add({h}, {o}l)",
    "the last by number": "{o}l = Gather<axis=1>({h}, minus) {o} = Add({h}, {o}l)",
    "a sum of what comes": "{o} = CumSum<reverse=1>({h}, n1)",
    "a sum over sentences": "{o} = CumSum({h}, n0)",
    "windows of three tokens": "{o}t = Transpose<perm=[0,2,1]>({h}) {o}c = Conv<pads=[1,1]>({o}t, w883) {o} = "
    "Transpose<perm=[0,2,1]>({o}c)",
    "range of the whole tensor": "{o}q, {o}s, {o}z = DynamicQuantizeLinear({h}) {o} = DequantizeLinear({o}q, "
    "{o}s, {o}z)",
    "how many tokens": "{o}c = Cast<to=1>(n_s) {o} = Mul({h}, {o}c)",
    "how many sentences": "{o}c = Cast<to=1>(size_b) {o} = Mul({h}, {o}c)",
    "how many in all": "{o}n = Size({h}) {o}c = Cast<to=1>({o}n) {o} = Div({h}, {o}c)",
    "a table from the last": "{o}r = Range(n0, n_s, n1) {o}d = Sub(n_s, {o}r) {o}t = Gather(table, {o}d) {o} = "
    "Add({h}, {o}t)",
    "a table backwards": "{o}t = Slice(table, zero, size_s, zero) {o}l = Slice({o}t, minus, small, zero, minus) "
    "{o} = Add({h}, {o}l)",
    "as often as tokens": "{o}t = Tile(w8, size_s) {o}m = ReduceSum<keepdims=1>({o}t, zero) {o} = Add({h}, {o}m)",
    "a table but for as many": "{o}n = Neg(size_s) {o}t = Slice(table, zero, {o}n, zero) "
    "{o}m = ReduceSum<keepdims=1>({o}t, zero) {o} = Add({h}, {o}m)",
    "as many keys as tokens": "{o}k = Expand(w8, keys_shape) {o}l = Expand(size_s, size_b) "
    "{o}n = Attention<q_num_heads=4,kv_num_heads=4>({h}, {o}k, {o}k, , , , {o}l) {o} = Add({h}, {o}n)",
    "tokens among features": "{o}t = Transpose<perm=[0,2,1]>({h}) {o}r = Reshape({o}t, shape_x) {o} = Add({h}, {o}r)",
    "sentences among tokens": "{o}t = Transpose<perm=[1,0,2]>({h}) {o}r = Reshape({o}t, shape_x) {o} = Add({h}, "
    "{o}r)",
    "a choice": "{o}a = ReduceMax<keepdims=0>({h}) {o}g = Greater({o}a, f1) "
    "{o} = If<then_branch = a () => (float[b,s,8] {o}x) "
    "{{ {o}x = Neg({h}) }}, else_branch = c () => (float[b,s,8] {o}y) {{ {o}y = Identity({h}) }}>({o}g)",
    "a choice by nothing": "{o} = If<then_branch = a () => (float[b,s,8] {o}x) {{ {o}x = Softmax<axis=1>({h}) }}, "
    "else_branch = c () => (float[b,s,8] {o}y) {{ {o}y = Neg({h}) }}>(yes)",
}  # fmt: skip
HEADER = """<ir_version: 10, opset_import: ["" : 24]>
    g (float[b,s,8] x, int64[b,s] position_ids, float[b,4,p,2] pk, float[b,4,p,2] pv)
      => (float[b,s,8] y, float[b,4,t,2] prk, float[b,4,t,2] prv)
    <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] four = {4}, int64[1] minus = {-1},
     int64[1] big = {9223372036854775807}, int64[1] small = {-9223372036854775807}, int64[2] flat = {-1,8},
     int64[4] split = {0,0,4,2}, int64[3] pieces = {0,-1,4}, int64 n0 = {0}, int64 n1 = {1}, float f1 = {1.0},
     int64[4] copies = {4,1,1,1}, float[1] w1 = {1.5}, bool yes = {1}> {
    shape_x = Shape(x) size_b = Shape<start=0,end=1>(x)
    n30 = Constant<value_ints=[30,8]>() keys_shape = Concat<axis=0>(size_b, n30)
    size_s = Shape<start=1,end=2>(x) n_s = Squeeze(size_s)
    pf = Cast<to=1>(position_ids) scaled = Mul(pf, f1) positions = Unsqueeze(scaled, two)
    size_p = Shape<start=2,end=3>(pk) n_p = Squeeze(size_p) n_t = Add(n_p, n_s) ahead = Range(n_p, n_t, n1)
    af = Cast<to=1>(ahead) c013 = Constant<value_ints=[0,1,3]>() place = Unsqueeze(af, c013)
"""
WEIGHTS = {"w88": (8, 8), "w8": (8,), "table": (40, 8), "w881": (8, 8, 1), "w4": (4, 1, 1, 1), "w883": (8, 8, 3)}
BATCH, SLOTS, CAPACITY = 4, 5, 16
COUNTS, LENGTHS = np.array([5, 2, 1, 4]), np.array([3, 0, 7, 2])


def decoder(steps: list[str], fixed: dict[str, int] | None = None) -> onnx.ModelProto:
    """Steps before attention with a past, after which the last one comes again."""
    body, hidden = [], "x"
    for index, step in enumerate(steps):
        body.append(step.format(h=hidden, o=f"h{index}"))
        hidden = f"h{index}"
    body.append(
        f"hs = Sin({hidden}) a, prk, prv = Attention<is_causal=1,q_num_heads=4,kv_num_heads=4>(hs,hs,hs,,pk,pv)"
    )
    body.append(steps[-1].format(h="a", o="end") + " y = Identity(end)")
    text = HEADER + "\n".join(body) + "}"
    for name, size in (fixed or {}).items():
        for a, b in ((f"[{name},", f"[{size},"), (f",{name},", f",{size},"), (f",{name}]", f",{size}]")):
            text = text.replace(a, b)
    model = onnx.parser.parse_model(text)
    draw = np.random.default_rng(7)
    for name, shape in WEIGHTS.items():
        values = draw.standard_normal(shape).astype(np.float32) / 2
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return model


def check(before: onnx.ModelProto, fused: onnx.ModelProto, fixed: dict[str, int] | None = None) -> float:
    """The largest difference between sentences side by side, large numbers in their padding, and each by itself."""
    draw, fixed = np.random.default_rng(3), fixed or {}
    x = 1e3 * draw.standard_normal((BATCH, SLOTS, 8)).astype(np.float32)
    for b, count in enumerate(COUNTS):
        x[b, :count] = draw.standard_normal((count, 8))
    pasts = [[draw.standard_normal((1, 4, n, 2)).astype(np.float32) for n in LENGTHS] for _ in range(2)]
    caches = [np.full((BATCH, 4, CAPACITY, 2), np.nan, np.float32) for _ in range(2)]
    for cache, of_sentences in zip(caches, pasts, strict=True):
        for b, past in enumerate(of_sentences):
            cache[b, :, : LENGTHS[b]] = past[0]
    names = [value.name for value in fused.graph.input if value.name not in ("x", "cache_lengths")]
    got = run(fused, {"x": x, "cache_lengths": LENGTHS, **dict(zip(names, caches, strict=True))})
    worst = 0.0
    for b, (count, n) in enumerate(zip(COUNTS, LENGTHS, strict=True)):
        slots, times = SLOTS if "s" in fixed else count, fixed.get("b", 1)
        alone = np.concatenate([x[b : b + 1, :count], np.zeros((1, slots - count, 8), np.float32)], axis=1)
        given: dict[str, Any] = {"x": alone, "position_ids": n + np.arange(slots)[None]}
        given |= {"pk": pasts[0][b], "pv": pasts[1][b]}
        want = run(before, {name: np.repeat(value, times, axis=0) for name, value in given.items()})
        for mine, other in ((got[0][b, :count], want[0][-1, :count]),
                            (got[1][b, :, : n + count], want[1][-1, :, : n + count]),
                            (got[2][b, :, : n + count], want[2][-1, :, : n + count])):  # fmt: skip
            difference = np.abs(mine - other).max()
            worst = max(worst, float(np.inf if np.isnan(difference) else difference))
    return worst


SIZES: dict[str, dict[str, int]] = {
    "dynamic": {}, "fixed batch": {"b": BATCH}, "fixed tokens": {"s": SLOTS}, "fixed": {"b": BATCH, "s": SLOTS},
}  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", APART)
def test_taken(name: str, sizes: str) -> None:
    before = decoder([POSITIONED, APART[name]], SIZES[sizes])
    fused, _ = fuse(before, kv_cache="static")
    assert check(before, fused, SIZES[sizes]) < 1e-5


HEADS_FIRST = """{{o}}r = Reshape({{h}}, split) {{o}}t = Transpose<perm=[{perm}]>({{o}}r) {{o}}p = {place}
    {{o}}a = Add({{o}}t, {{o}}p) {{o}}b = Transpose<perm=[{back}]>({{o}}a) {{o}} = Reshape({{o}}b, shape_x)"""
PLACES = {
    "as it is": "Identity(place)",
    "expanded": "Expand(place, copies)",
    "tiled": "Tile(place, copies)",
    "times a number of each": "Mul(place, w4)",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sizes", SIZES)
def test_as_many_sentences_as_heads(sizes: str, place: str) -> None:
    """Positions that are the same for all sentences have no batch: they find it, or what only is as large."""
    among_sentences = HEADS_FIRST.format(perm="0,2,1,3", back="0,2,1,3", place=PLACES[place])
    if sizes.startswith("fixed") and "b" in SIZES[sizes] and not place.startswith("times"):
        before = decoder([among_sentences], SIZES[sizes])
        assert check(before, fuse(before, kv_cache="static")[0], SIZES[sizes]) < 1e-5
    among_heads = HEADS_FIRST.format(perm="2,0,1,3", back="1,2,0,3", place=PLACES[place])
    with pytest.raises(ValueError, match=r"axis of 4 meets that of the batch|axes 4 and 4 meet|positions go through"):
        fuse(decoder([among_heads], SIZES[sizes]), kv_cache="static")


POSITIONED = APART["positions"]
# Where these are fixed there are as many for a sentence by itself.
COUNTED = {
    "how many tokens": "s",
    "how many sentences": "b",
    "a table from the last": "s",
    "as often as tokens": "s",
    "as many keys as tokens": "s",
    "a table but for as many": "s",
    "a table backwards": "s",
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", MIXED)
def test_refused(name: str, sizes: str) -> None:
    before = decoder([POSITIONED, MIXED[name]], SIZES[sizes])
    if COUNTED.get(name) in SIZES[sizes]:
        fused, _ = fuse(before, kv_cache="static")
        assert check(before, fused, SIZES[sizes]) < 1e-5
        return
    with pytest.raises(ValueError, match=r"looks across the new tokens|nothing shows how many tokens"):
        fuse(before, kv_cache="static")
