"""com.microsoft's PackedMultiHeadAttention and PagedAttention, which run on CUDA alone, against their definitions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import attributes, has_library, nodes, run
from onnx import TensorProto, helper

HEADS, KV_HEADS, SIZE, PAGE, PAGES = 4, 2, 8, 16, 9
SENTENCES = [[3, 1, 4], [5], [1, 1], [0, 6, 2]]
library = pytest.mark.skipif(not has_library(), reason="packed sentences need the library")


def attend(q: Any, k: Any, v: Any, *, causal: bool = False, left: int = -1, softcap: float = 0.0, scale: float = 0.0,
           sinks: Any = None) -> Any:  # fmt: skip
    """One sentence, (tokens, heads, size) each, the last query beside the last key; in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    i, j = np.arange(len(q))[:, None] + len(k) - len(q), np.arange(len(k))[None]
    seen = np.ones_like(i >= j)
    seen = seen & (j <= i) if causal else seen
    seen = seen & (j >= i - left) if left >= 0 else seen
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", weights / total, v)


def turned(x: Any, at: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Rotated by the angles of positions `at`."""
    cos, sin, half = cos[at][:, None], sin[at][:, None], cos.shape[1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def one(
    op_type: str, given: dict[str, Any], outputs: dict[str, tuple[int, ...]], names: tuple[str, ...], **more: Any
) -> Any:
    """A model of one operator with the inputs `given`."""
    ordered = [name if name in given else "" for name in names]
    while not ordered[-1]:
        ordered.pop()
    node = helper.make_node(op_type, ordered, list(outputs), "attention", domain="com.microsoft", **more)

    def info(name: str, dtype: Any, shape: tuple[int, ...]) -> Any:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)

    graph = helper.make_graph(
        [node],
        "g",
        [info(name, x.dtype, x.shape) for name, x in given.items()],
        [info(name, np.float32, shape) for name, shape in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


PACKED = ("query", "key", "value", "bias", "token_offset", "cumulative_sequence_length", "attention_bias")


@library
@pytest.mark.parametrize("lengths", SENTENCES)
@pytest.mark.parametrize("form", ["separate", "in one", "with bias", "with bias, in one"])
@pytest.mark.parametrize("scale", [0.0, 0.2])
def test_packed(lengths: list[int], form: str, scale: float) -> None:
    tokens, width = sum(lengths), HEADS * SIZE
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    parts = [normal(i, tokens, HEADS, SIZE) for i in range(3)]
    given: dict[str, Any] = {"token_offset": np.zeros((len(lengths), max(lengths)), np.int32)}
    if form.endswith("in one"):
        given["query"] = np.stack(parts, axis=2)
    else:
        given |= {n: x.reshape(tokens, width) for n, x in zip(("query", "key", "value"), parts, strict=True)}
    given["cumulative_sequence_length"] = ends
    if form.startswith("with bias"):
        given["bias"] = normal(7, 3 * width)
        parts = [x + given["bias"].reshape(3, HEADS, SIZE)[i] for i, x in enumerate(parts)]
    before = one("PackedMultiHeadAttention", given, {"y": (tokens, width)}, PACKED, num_heads=HEADS, scale=scale)
    fused, report = fuse(before)
    assert report.fused == 1 and "packs sequences" in report.notes[0]
    assert nodes(fused)[0].op_type == "FlashAttentionVarlen"
    onnx.checker.check_model(fused, full_check=True)
    kept = {value.name for value in fused.graph.input}
    (y,) = run(fused, {n: x for n, x in given.items() if n in kept}, library=True)
    for start, end in itertools.pairwise(ends):
        if end > start:
            expected = attend(*(x[start:end] for x in parts), scale=scale)
            np.testing.assert_allclose(y[start:end], expected.reshape(-1, width), atol=2e-5)


PAGED = (
    "query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table",
    "cos_cache", "sin_cache", "slot_mapping", "head_sink",
)  # fmt: skip


def paged(lengths: list[int], *, in_one: bool = False, rotary: int = 0, sink: bool = False, **more: Any) -> Any:
    """The model, what goes in, and Q, K, V of each token."""
    tokens, batch = sum(lengths), len(lengths)
    parts = [normal(i, tokens, heads, SIZE) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    flat = [x.reshape(tokens, -1) for x in parts]
    given = {"query": np.concatenate(flat, 1)} if in_one else dict(zip(("query", "key", "value"), flat, strict=True))
    given |= {name: normal(5 + i, PAGES, PAGE, KV_HEADS, SIZE) for i, name in enumerate(("key_cache", "value_cache"))}
    given["cumulative_sequence_length"] = np.cumsum([0, *lengths]).astype(np.int32)
    given["past_seqlens"] = np.array([5, 14, 20][:batch], np.int32)
    given["block_table"] = np.random.default_rng(3).permutation(PAGES)[: batch * 3].reshape(batch, 3).astype(np.int32)
    if rotary:
        angles = np.arange(64)[:, None] * 10.0 ** -np.arange(rotary)
        given |= {"cos_cache": np.cos(angles).astype(np.float32), "sin_cache": np.sin(angles).astype(np.float32)}
    if sink:
        given["head_sink"] = normal(9, HEADS)
    outputs = {"y": (tokens, HEADS * SIZE), **dict.fromkeys(("keys", "values"), (PAGES, PAGE, KV_HEADS, SIZE))}
    more |= {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": int(bool(rotary))}
    return one("PagedAttention", given, outputs, PAGED, **more), given, parts


@library
@pytest.mark.parametrize("lengths", SENTENCES)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"in_one": True}, {"rotary": 4}, {"rotary": 2, "rotary_interleaved": 1, "in_one": True}, {"sink": True},
        {"local_window_size": 4}, {"softcap": 1.5}, {"scale": 0.3}, {"is_causal": 0},
        {"is_causal": 0, "local_window_size": 3},
    ],
)  # fmt: skip
def test_paged(lengths: list[int], options: dict[str, Any]) -> None:
    model, given, (q, k, v) = paged(lengths, **options)
    fused, report = fuse(model)
    assert report.fused == 1 and "block_table" in report.notes[0], str(report)
    onnx.checker.check_model(fused, full_check=True)
    y, keys, values = run(fused, given, library=True)
    expected_keys, expected_values = given["key_cache"].copy(), given["value_cache"].copy()
    ends = given["cumulative_sequence_length"]
    for b, past in enumerate(given["past_seqlens"]):
        rows = slice(ends[b], ends[b + 1])
        at = past + np.arange(lengths[b])
        query, key = q[rows], k[rows]
        if "cos_cache" in given:
            tables = given["cos_cache"], given["sin_cache"], bool(options.get("rotary_interleaved"))
            query, key = turned(query, at, *tables), turned(key, at, *tables)
        slots = np.arange(past + lengths[b])
        pages = given["block_table"][b][slots // PAGE]
        for cache, new in ((expected_keys, key), (expected_values, v[rows])):
            cache[pages[at], at % PAGE] = new
        if lengths[b]:
            window = options.get("local_window_size", 0)
            expected = attend(
                query, expected_keys[pages, slots % PAGE], expected_values[pages, slots % PAGE],
                causal=bool(options.get("is_causal", 1)), left=window - 1, softcap=options.get("softcap", 0.0),
                scale=options.get("scale", 0.0), sinks=given.get("head_sink"),
            )  # fmt: skip
            np.testing.assert_allclose(y[rows], expected.reshape(lengths[b], -1), atol=3e-5)
    np.testing.assert_allclose(keys, expected_keys, atol=1e-6)
    np.testing.assert_allclose(values, expected_values, atol=0)


def test_window_and_attributes() -> None:
    """A window of com.microsoft counts the token itself."""
    fused, _ = fuse(paged([3, 1], local_window_size=4)[0])
    assert attributes(nodes(fused)[0])["left_window_size"] == 3


def _without_caches(model: onnx.ModelProto) -> None:
    del model.graph.output[1:]
    del model.graph.node[0].output[1:]


def _set(**given: Any) -> Any:
    return lambda model: model.graph.node[0].attribute.extend(helper.make_attribute(n, x) for n, x in given.items())


def _slots(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("slots", TensorProto.INT32, [4]))
    model.graph.node[0].input.extend(["", "", "slots"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_caches, "make them outputs"),
        (_set(kv_cache_layout="LATENT"), "LATENT"),
        (_set(rotary_offset=8), "rotary_offset"),
        (_slots, "slot_mapping"),
    ],
)
def test_paged_left(change: Any, words: str) -> None:
    model = paged([3, 1])[0]
    change(model)
    after, report = fuse(model)
    assert after is model
    assert words in report.sites[0].reason, report.sites[0].reason


def test_packed_left() -> None:
    tokens, width = 5, HEADS * SIZE
    given = {name: normal(0, tokens, width) for name in ("query", "key", "value")}
    given |= {"token_offset": np.zeros((2, 3), np.int32), "cumulative_sequence_length": np.array([0, 3, 5], np.int32)}
    given["attention_bias"] = normal(0, 2, HEADS, 3, 3)
    model = one("PackedMultiHeadAttention", given, {"y": (tokens, width)}, PACKED, num_heads=HEADS)
    assert "attention_bias" in fuse(model)[1].sites[0].reason
