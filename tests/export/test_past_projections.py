"""fuse(kv_cache=...) of attentions whose Q, K and V are one projection, or have its bias: caches take them as one."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import attributes, has_library, nodes, op_types, run
from onnx import numpy_helper

SIZE, HEADS = 8, 4
RANDOM = np.random.default_rng(0)


def decoder(projections: str, attention: str, kv_heads: int) -> onnx.ModelProto:
    """One layer: x is projected to Q, K and V, which attend to past keys and themselves."""
    widths = {"q": HEADS * SIZE, "k": kv_heads * SIZE, "v": kv_heads * SIZE}
    ends = np.cumsum([0, *widths.values()])
    random = np.random.default_rng(kv_heads)
    whole = (random.standard_normal((16, ends[-1])) / 4).astype(np.float32)
    bias = random.standard_normal(ends[-1]).astype(np.float32)
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1, "flashonnx" : 1]>
        g (float[b,s,16] x, float[b,{kv_heads},p,{SIZE}] past_k, float[b,{kv_heads},p,{SIZE}] past_v)
        => (float[b,s,{HEADS * SIZE}] y, float[b,{kv_heads},t,{SIZE}] out_k, float[b,{kv_heads},t,{SIZE}] out_v)
        {{ widths = Constant<value_ints=[{", ".join(map(str, widths.values()))}]>() {projections} {attention} }}"""
    )
    weights = {"w": whole, "bias": bias} | {
        f"w{letter}": whole[:, start:end] for letter, start, end in zip("qkv", ends, ends[1:], strict=False)
    }
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(x, name) for name, x in weights.items() if name in used)
    return model


ONE = "p = MatMul(x, w)"
CUT = f"{ONE} q, k, v = Split<axis=-1>(p, widths)"
THREE = "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)"
FIVE = f"{ONE} five = Constant<value_ints=[0,0,3,{HEADS},{SIZE}]>() p5 = Reshape(p, five)"
TURNED = f"""{FIVE} h3 = Transpose<perm=[0,1,3,2,4]>(p5) flat = Constant<value_ints=[0,0,{HEADS * SIZE * 3}]>()
    turned = Reshape(h3, flat)"""
COUNTS = "q_num_heads=4, kv_num_heads={kv_heads}, is_causal=1"
OWN = "y, out_k, out_v = flashonnx.FlashAttention"
OURS = f"{OWN}<{COUNTS}>(q, k, v, , past_k, past_v, , , bias)"
PACKED = f"{OWN}<{COUNTS}, qkv_layout={{layout}}>(p, , , , past_k, past_v, , , bias)"
WAYS = {
    "cut": (CUT, OURS),
    "three products": (THREE, OURS),
    "packed": (ONE, PACKED),
    "of MultiHeadAttention": (CUT, "y, out_k, out_v = com.microsoft.MultiHeadAttention<num_heads=4, unidirectional=1>"
                                   "(q, k, v, bias, , , past_k, past_v)"),
}  # fmt: skip


def check(way: tuple[str, str], kv_heads: int, biased: bool) -> onnx.ModelProto:
    """Caches made of it, against ONNX Runtime's Attention of the projections with their bias."""
    layout = '"3hd"' if kv_heads == HEADS else '"gqa"'
    projections, attention = (text.format(kv_heads=kv_heads, layout=layout) for text in way)
    if not biased:
        attention = attention.replace(", , , bias", "").replace("v, bias,", "v, ,")
    fused, report = fuse(decoder(projections, attention, kv_heads), kv_cache="static")
    assert report.fused == report.total == 1, str(report)
    (node,) = nodes(fused)
    assert node.op_type == "FlashAttentionKVCache" and attributes(node)["qkv_layout"] == b"gqa"
    added = f"{ONE} sums = {'Add(p, bias)' if biased else 'Identity(p)'} q, k, v = Split<axis=-1>(sums, widths)"
    standard = f"y, out_k, out_v = Attention<{COUNTS}>(q, k, v, , past_k, past_v)".format(kv_heads=kv_heads)
    past = {f"past_{x}": RANDOM.standard_normal((2, kv_heads, 5, SIZE)).astype(np.float32) for x in "kv"}
    x = RANDOM.standard_normal((2, 3, 16)).astype(np.float32)
    right = run(decoder(added, standard, kv_heads), {"x": x, **past})
    caches = {f"past_key_values.0.{n}": np.full((2, kv_heads, 12, SIZE), np.nan, np.float32) for n in ("key", "value")}
    for cache, kept in zip(caches.values(), past.values(), strict=True):
        cache[:, :, :5] = kept
    for library in (False, True) if has_library() else (False,):
        y, keys, values = run(fused, {"x": x, **caches, "cache_lengths": np.array([5, 5])}, library=library)
        for got, want in zip((y, keys[:, :, :8], values[:, :, :8]), right, strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5)
    return fused


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("way", "kv_heads"), [(way, count) for way in WAYS for count in (HEADS, 2) if "Multi" not in way or count == HEADS]
)
def test_one_tensor(way: str, kv_heads: int, biased: bool) -> None:
    """Neither Q, K and V nor the bias are cut: one addition at most."""
    kinds = [node.op_type for node in check(WAYS[way], kv_heads, biased).graph.node if node.op_type != "Constant"]
    assert kinds.count("MatMul") == 1 and kinds.count("Add") == biased and "Split" not in kinds


@pytest.mark.parametrize(
    ("way", "biased"),
    [
        ((FIVE, f'{OWN}<is_causal=1, qkv_layout="3hd">(p5, , , , past_k, past_v, , , bias)'), True),
        ((FIVE, f'{OWN}<is_causal=1, qkv_layout="3hd">(p5, , , , past_k, past_v)'), False),
        ((TURNED, f'{OWN}<{COUNTS}, qkv_layout="h3d">(turned, , , , past_k, past_v)'), False),
    ],
    ids=["3hd of five dimensions, biased", "3hd of five dimensions", "h3d"],
)
def test_other_layouts(way: tuple[str, str], biased: bool) -> None:
    assert "FlashAttentionKVCache" in op_types(check(way, HEADS, biased))
