"""Caches that opset 24's TensorScatter writes: one FlashAttentionKVCache, compared with float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse, unfuse
from models import has_library, nodes, op_types, run
from onnx import TensorProto

NEW = "float[b,4,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v"
CACHES = "float[b,2,m,8] keys, float[b,2,m,8] values, int64[b] at"
WRITE = "keys2 = TensorScatter(keys, k, at) values2 = TensorScatter(values, v, at)"
LENGTHS = "count = Shape<start=2,end=3>(k) lengths = Add(at, count)"


def model(
    given: str = "is_causal=1", *, body: str = WRITE + LENGTHS, mask: str = "", more: str = ""
) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 24]>
        g ({NEW}, {CACHES}{more}) => (float[b,4,s,8] y, float[b,2,m,8] keys2, float[b,2,m,8] values2)
        {{ {body} y = Attention<{given}>(q, keys2, values2, {mask}, , , lengths) }}"""
    )


def expected(inputs: dict[str, Any], *, causal: bool, scale: float = 0.0, softcap: float = 0.0) -> list[Any]:
    """Y and the caches: new key i of sentence b stands at at[b] + i, as its query does."""
    q, k, v, keys, values = (inputs[n].astype(np.float64) for n in ("q", "k", "v", "keys", "values"))
    y, count, group = np.zeros_like(q), q.shape[2], q.shape[1] // k.shape[1]
    for b, start in enumerate(inputs["at"]):
        keys[b, :, start : start + count], values[b, :, start : start + count] = k[b], v[b]
        for h in range(q.shape[1]):
            seen = keys[b, h // group, : start + count]
            scores = q[b, h] @ seen.T * (scale or q.shape[-1] ** -0.5)
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            if "mask" in inputs:
                bias = np.broadcast_to(inputs["mask"], (*q.shape[:3], keys.shape[2]))[b, h, :, : start + count]
                scores = np.where(bias, scores, -np.inf) if bias.dtype == bool else scores + bias
            if causal:
                places = np.arange(start + count)
                scores = np.where(places <= start + np.arange(count)[:, None], scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            y[b, h] = weights / weights.sum(-1, keepdims=True) @ values[b, h // group, : start + count]
    return [y, keys, values]


def fed(before: onnx.ModelProto, count: int, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    sizes = {"b": 3, "s": count, "m": 12}
    given = {}
    for value in before.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
        given[value.name] = random.standard_normal(shape).astype(np.float32)
    if "mask" in given:
        kind = next(v for v in before.graph.input if v.name == "mask").type.tensor_type.elem_type
        if kind == TensorProto.BOOL:
            given["mask"] = random.random(given["mask"].shape) < 0.7
            given["mask"][..., 0] = True
    return given | {"at": np.array([0, 5, 12 - count])}


def check(before: onnx.ModelProto, **given: Any) -> onnx.ModelProto:
    fused, report = fuse(before)
    assert report.fused == report.total == 1, str(report)
    onnx.checker.check_model(fused, full_check=True)
    for count in (1, 4):
        inputs = fed(before, count)
        want = expected(inputs, **given)
        for library in (False, True) if has_library() else (False,):
            for got, x in zip(run(fused, inputs, library=library), want, strict=True):
                np.testing.assert_allclose(got, x, atol=2e-5)
    return fused


@pytest.mark.parametrize(
    ("given", "meaning"),
    [
        ("is_causal=1", {"causal": True}),
        ("is_causal=0", {"causal": False}),
        ("is_causal=1, scale=0.2, softcap=1.5", {"causal": True, "scale": 0.2, "softcap": 1.5}),
    ],
)
def test_one_node_for_all(given: str, meaning: dict[str, Any]) -> None:
    fused = check(model(given), **meaning)
    (node,) = nodes(fused)
    assert node.op_type == "FlashAttentionKVCache"
    assert list(node.input[:6]) == ["q", "k", "v", "keys", "values", "at"]
    assert op_types(fused) == {"FlashAttentionKVCache"}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", ["b,1,s,m", "1,4,s,m", "1,1,1,m"])
def test_masks(kind: str, shape: str) -> None:
    fused = check(model("is_causal=1", mask="mask", more=f", {kind}[{shape}] mask"), causal=True)
    assert nodes(fused)[0].input[11] == "mask"


LEFT = {
    "lengths of their own": (model(body=WRITE, more=", int64[b] lengths"), "nonpad_kv_seqlen is the place"),
    "one key less": (model(body=WRITE + LENGTHS.replace("Add(at", "Sub(at")), "nonpad_kv_seqlen is the place"),
    "two places": (
        model(body=WRITE.replace("v, at)", "v, other)") + LENGTHS, more=", int64[b] other"), "different places"),
    "a ring": (model(body=WRITE.replace("TensorScatter(", "TensorScatter<mode=\"circular\">(") + LENGTHS), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_scatter_stays(name: str) -> None:
    """Then only the Attention is fused, and it gives what it gave."""
    before, reason = LEFT[name]
    fused, report = fuse(before)
    assert report.fused == 1
    assert reason in report.sites[0].reason
    assert nodes(fused)[0].op_type == "FlashAttention"
    assert "TensorScatter" in op_types(fused)


def test_back_to_standard_operators() -> None:
    before = model()
    plain, report = unfuse(fuse(before)[0])
    assert not nodes(plain) and report.fused == 0
    inputs = fed(before, 3)
    for got, want in zip(run(plain, inputs), expected(inputs, causal=True), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
