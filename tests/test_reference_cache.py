"""The cache operators' definition against PyTorch, ONNX's RotaryEmbedding and transformers, and in plain words."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from cache_cases import INPUTS, CacheCase
from flashonnx.reference import Array
from flashonnx.reference_cache import (
    FlashAttentionKVCache,
    FlashAttentionVarlen,
    attention_kv_cache,
    attention_varlen,
    ordered,
    rotate,
)
from onnx import TensorProto, helper

torch = pytest.importorskip("torch")


def _sdpa(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """PyTorch's attention of one sequence, (S, H, D) each; causal aligned bottom right."""
    tensors = (torch.from_numpy(np.ascontiguousarray(x.swapaxes(0, 1)))[None] for x in (q, k, v))
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)) if causal else None
    y = torch.nn.functional.scaled_dot_product_attention(*tensors, mask, enable_gqa=True)
    return y[0].swapaxes(0, 1).numpy()


@pytest.mark.parametrize(("causal", "group", "cross"), list(itertools.product((False, True), (1, 3), (False, True))))
def test_varlen(causal: bool, group: int, cross: bool, random: np.random.Generator) -> None:
    q_ends = np.array([0, 3, 3, 8])
    k_ends = np.array([0, 5, 6, 14]) if cross else q_ends
    q = random.standard_normal((8, 2 * group, 16))
    k, v = random.standard_normal((k_ends[-1], 2, 16)), random.standard_normal((k_ends[-1], 2, 12))
    y, lse = attention_varlen(q, k, v, q_ends, k_ends if cross else None, is_causal=causal)
    for b in range(3):
        rows, columns = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
        if rows.start < rows.stop:
            np.testing.assert_allclose(y[rows], _sdpa(q[rows], k[columns], v[columns], causal), rtol=1e-12, atol=1e-12)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize(("paged", "ragged"), list(itertools.product((False, True), (False, True))))
def test_steps_are_attention_over_all_so_far(paged: bool, ragged: bool, random: np.random.Generator) -> None:
    """Chunks and single tokens, appended one after the other, against PyTorch over the whole of each sequence."""
    capacity, size, heads = 24, 4, 2
    shape = (3 * capacity // size + 2, size, heads, 8) if paged else (3, heads, capacity, 8)
    caches = [np.full(shape, np.nan) for _ in range(2)]
    table = random.permutation(3 * capacity // size).reshape(3, -1) if paged else None
    histories: list[list[Array]] = [[np.zeros((0, heads, 8))] * 2 for _ in range(3)]
    for new in ((5, 2, 7), (1, 1, 1), (3, 0, 4), (1, 6, 1)) if ragged else ((5,) * 3, (1,) * 3, (4,) * 3):
        lengths = np.array([len(h[0]) for h in histories])
        q, k, v = (random.standard_normal((sum(new), h, 8)) for h in (6, heads, heads))
        ends = np.concatenate(([0], np.cumsum(new)))
        if ragged:
            y, *caches, _ = attention_kv_cache(q, k, v, *caches, lengths, table, ends)  # type: ignore[misc]
        else:
            forms = (x.reshape(3, new[0], *x.shape[1:]).swapaxes(1, 2) for x in (q, k, v))
            y, *caches, _ = attention_kv_cache(*forms, *caches, lengths, table)  # type: ignore[misc]
            y = y.swapaxes(1, 2).reshape(-1, 6, 8)
        for b, history in enumerate(histories):
            rows = slice(ends[b], ends[b + 1])
            history[:] = [np.concatenate((x, n[rows])) for x, n in zip(history, (k, v), strict=True)]
            if new[b]:
                np.testing.assert_allclose(y[rows], _sdpa(q[rows], *history, True), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [8, 16])
def test_rotary_is_that_of_transformers(dim: int, random: np.random.Generator) -> None:
    """Half-split pairs, all features or the first ones (phi, gpt-neox)."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, angles = random.standard_normal((5, 3, 16)), random.standard_normal((5, dim // 2))
    both = torch.from_numpy(np.concatenate((angles, angles), axis=-1))[None]
    rotated, _ = llama.apply_rotary_pos_emb(
        torch.from_numpy(x[None, ..., :dim]),
        torch.from_numpy(x[None, ..., :dim]),
        both.cos(),
        both.sin(),
        unsqueeze_dim=2,
    )
    right = np.concatenate((rotated[0].numpy(), x[..., dim:]), axis=-1)
    np.testing.assert_allclose(rotate(x, np.cos(angles), np.sin(angles), dim), right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("interleaved", "dim"), list(itertools.product((0, 1), (0, 8))))
def test_rotary_is_that_of_onnx(interleaved: int, dim: int, random: np.random.Generator) -> None:
    """Both kinds of pairs, by ONNX's RotaryEmbedding of opset 23."""
    half = (dim or 16) // 2
    x, angles = random.standard_normal((1, 5, 48)), random.standard_normal((9, half))
    ids = random.integers(0, 9, (1, 5))
    node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin", "ids"], ["y"], num_heads=3, interleaved=interleaved,
                            rotary_embedding_dim=dim)  # fmt: skip
    infos = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, None) for n in ("x", "cos", "sin")]
    graph = helper.make_graph(
        [node], "rotary", [*infos, helper.make_tensor_value_info("ids", TensorProto.INT64, None)],
        [helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)],
    )  # fmt: skip
    evaluator = onnx.reference.ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))
    (right,) = evaluator.run(None, {"x": x, "cos": np.cos(angles), "sin": np.sin(angles), "ids": ids})
    y = rotate(x[0].reshape(5, 3, 16), np.cos(angles)[ids[0]], np.sin(angles)[ids[0]], dim, interleaved)
    np.testing.assert_allclose(y.reshape(1, 5, 48), right, rtol=1e-6, atol=1e-6)  # which is float32 in places


def test_positions_count_from_the_lengths(random: np.random.Generator) -> None:
    """By default a token's position is the number of keys before it."""
    angles = random.standard_normal((32, 8))
    q, k, v = (random.standard_normal((2, 2, 3, 16)) for _ in range(3))
    caches = random.standard_normal((2, 2, 2, 12, 16))
    lengths = np.array([0, 7])
    common = (q, k, v, *caches, lengths, None, None, np.cos(angles), np.sin(angles))
    given = lengths[:, None] + np.arange(3)
    for ours, right in zip(attention_kv_cache(*common), attention_kv_cache(*common, given), strict=True):
        np.testing.assert_array_equal(ours, right)
    # The same as rotating before: keys that are in the cache have been rotated when they came.
    q, k = (
        np.stack([rotate(x[b].swapaxes(0, 1), np.cos(angles)[at], np.sin(angles)[at]).swapaxes(0, 1)
                  for b, at in enumerate(given)])
        for x in (q, k)
    )  # fmt: skip
    right = attention_kv_cache(q, k, v, *caches, lengths)
    np.testing.assert_allclose(attention_kv_cache(*common)[0], right[0], rtol=1e-12, atol=1e-12)


def test_what_does_not_fit_is_dropped(random: np.random.Generator) -> None:
    q, k, v = (random.standard_normal((2, 1, 4, 8)) for _ in range(3))
    keys, values = random.standard_normal((2, 2, 1, 6, 8))
    before = keys.copy()
    y, new_keys, new_values, _ = attention_kv_cache(q, k, v, keys, values, np.array([4, 99]))
    np.testing.assert_array_equal(new_keys[0], np.concatenate((keys[0, :, :4], k[0, :, :2]), axis=1))
    np.testing.assert_array_equal(new_values[0], np.concatenate((values[0, :, :4], v[0, :, :2]), axis=1))
    np.testing.assert_array_equal(new_keys[1], keys[1])
    # The last query sees all that is there.
    last = _sdpa(*(x.swapaxes(0, 1) for x in (q[0, :, 3:], new_keys[0], new_values[0])), False)  # type: ignore[arg-type]
    np.testing.assert_allclose(y[0, :, 3], last[0], rtol=1e-12)
    np.testing.assert_array_equal(keys, before)  # the function's own inputs stay as they are


def test_a_page_that_is_not_there_hides_its_keys(random: np.random.Generator) -> None:
    q = random.standard_normal((1, 1, 1, 8))
    keys, values = random.standard_normal((2, 3, 2, 1, 8))
    lengths = np.array([6])
    whole, *_ = attention_kv_cache(q, None, None, keys, values, lengths, np.array([[2, 0, 1]]))
    holed, *_ = attention_kv_cache(q, None, None, keys, values, lengths, np.array([[2, -1, 1]]))
    gone, *_ = attention_kv_cache(q, None, None, keys, values, lengths, np.array([[3, -1, 99]]))
    mask = np.array([True, True, False, False, True, True])
    masked, *_ = attention_kv_cache(
        q, None, None, keys, values, lengths, np.array([[2, 0, 1]]), None, None, None, None, mask
    )
    np.testing.assert_array_equal(holed, masked)
    assert (holed != whole).all()
    np.testing.assert_array_equal(gone, 0)


def test_sequences_are_brought_into_order_and_range() -> None:
    np.testing.assert_array_equal(ordered(np.array([-3, 2, 1, 99, 4]), 7), [0, 2, 2, 7, 7])


def test_operators_of_the_reference_evaluator() -> None:
    """Each is what its function is, cast to the types of a node."""
    case = CacheCase("evaluator", ragged=(3, 1), page_size=4, rotary="half", dtype="float16")
    inputs = case.inputs()
    kinds = {n: helper.np_dtype_to_tensor_dtype(x.dtype) for n, x in inputs.items()}
    given = [n if n in inputs else "" for n in INPUTS]
    varlen = helper.make_node("FlashAttentionVarlen", ["Q", "K", "V", "cu_seqlens_q"], ["Z"], domain="flashonnx",
                              q_num_heads=4, kv_num_heads=2)  # fmt: skip
    cache = helper.make_node("FlashAttentionKVCache", given, ["Y", "keys", "values", "lse"], domain="flashonnx",
                             q_num_heads=4, kv_num_heads=2)  # fmt: skip
    outputs = {
        "Y": TensorProto.FLOAT16,
        "keys": TensorProto.FLOAT16,
        "lse": TensorProto.FLOAT,
        "Z": TensorProto.FLOAT16,
    }
    graph = helper.make_graph(
        [cache, varlen], "both", [helper.make_tensor_value_info(n, kind, None) for n, kind in kinds.items()],
        [helper.make_tensor_value_info(n, kind, None) for n, kind in outputs.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("flashonnx", 1)])
    evaluator = onnx.reference.ReferenceEvaluator(model, new_ops=[FlashAttentionKVCache, FlashAttentionVarlen])
    y, keys, lse, z = evaluator.run(None, inputs)
    right = case.reference(inputs)
    for out, truth, kind in ((y, "Y", np.float16), (keys, "present_key_cache", np.float16), (lse, "lse", np.float32)):
        assert out.dtype == kind
        np.testing.assert_array_equal(out, right[truth].astype(kind))
    truth, _ = attention_varlen(*(inputs[n] for n in ("Q", "K", "V", "cu_seqlens_q")), q_num_heads=4, kv_num_heads=2)
    np.testing.assert_array_equal(z, truth.astype(np.float16))


def test_packed_projections(random: np.random.Generator) -> None:
    """Each token's query heads, then its key heads, then its value heads."""
    q, k, v = (random.standard_normal((2, 3, heads, size)) for heads, size in ((4, 8), (2, 8), (2, 5)))
    keys, values = (random.standard_normal((2, 2, 9, size)) for size in (8, 5))
    lengths = np.array([2, 5])
    flat = [x.reshape(2, 3, -1) for x in (q, k, v)]
    want = attention_kv_cache(*flat, keys, values, lengths, q_num_heads=4)
    tokens = [[np.concatenate([x[b, s].ravel() for x in (q, k, v)]) for s in range(3)] for b in range(2)]
    got = attention_kv_cache(np.array(tokens), None, None, keys, values, lengths, q_num_heads=4, qkv_layout="gqa")
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match="K and V must be absent"):
        attention_kv_cache(*flat, keys, values, lengths, q_num_heads=4, qkv_layout="gqa")
    with pytest.raises(ValueError, match="'separate' or 'gqa', got 'h3d'"):
        attention_kv_cache(flat[0], None, None, keys, values, lengths, q_num_heads=4, qkv_layout="h3d")


def test_errors_say_what_is_wrong() -> None:
    q, cache = np.zeros((1, 2, 3, 4)), np.zeros((1, 2, 8, 4))
    lengths = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="that of the caches, 2, got 3"):
        attention_kv_cache(q, None, None, cache, cache, lengths, kv_num_heads=3)
    with pytest.raises(ValueError, match="rank 3 and head counts, or 4, got rank 3"):
        attention_kv_cache(q[0], None, None, cache, cache, lengths)
    with pytest.raises(ValueError, match="attn_mask and cu_seqlens_q exclude"):
        attention_kv_cache(
            q[0], None, None, cache, cache, lengths, None, np.zeros(2), None, None, None, np.ones(8, bool)
        )
