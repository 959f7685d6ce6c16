"""What FlashAttentionKVCache and FlashAttentionVarlen mean: in float64 NumPy, and as `onnx.reference` ops.

Each sequence is looked at by itself: its keys are gathered, and `flashonnx.reference.attention` does the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from flashonnx.reference import Array, additive_mask, attention


def attention_kv_cache(
    q: Array,
    k: Array | None,
    v: Array | None,
    key_cache: Array,
    value_cache: Array,
    cache_lengths: Array,
    block_table: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    position_ids: Array | None = None,
    attn_mask: Array | None = None,
    sinks: Array | None = None,
    *,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool | int = True,
    left_window_size: int = -1,
    right_window_size: int = -1,
    rotary_interleaved: bool | int = False,
    rotary_dim: int = 0,
    max_q_length: int = 0,
    qkv_layout: str = "separate",
) -> tuple[Array, Array, Array, Array]:
    """Appends the new keys and values to the cache, then attends to all that is in it.

    Sequence b had n = cache_lengths[b] keys, clamped to [0, capacity], and has S new tokens. New key i goes to slot
    n + i, and is dropped where there is no such slot. Then there are min(n + S, capacity) keys, or n if k is absent;
    query i stands at (that number) - S + i, from which the causal triangle and the windows count.

    Args:
        q: (B, S, Hq*D) or (B, Hq, S, D); with cu_seqlens_q packed tokens (T, Hq*D) or (T, Hq, D).
        k: the new keys in the same form, with Hkv heads; absent together with v: nothing is appended.
        v: the new values, of size Dv.
        key_cache: (B, Hkv, capacity, D), or with block_table pages (pages, page_size, Hkv, D). Not changed.
        value_cache: (B, Hkv, capacity, Dv) or (pages, page_size, Hkv, Dv).
        cache_lengths: (B,) integers, or (B, 1): keys in the cache before this call.
        block_table: (B, N) integers: slot s of sequence b is slot s % page_size of page block_table[b, s // page_size];
            the capacity is N * page_size. Keys on a page outside [0, pages) are not written, and masked.
        cu_seqlens_q: (B + 1,) integers: sequence b is tokens [cu_seqlens_q[b], cu_seqlens_q[b + 1]). Clamped to [0, T],
            and where they fall, to the largest before.
        cos_cache: (positions, at least rotary_dim / 2); queries and new keys are rotated if it is there.
        sin_cache: likewise.
        position_ids: (B, S), or (T,) if ragged: rows of cos_cache, clamped to what it has. Absent: n + i, or n - S + i
            if k is absent.
        attn_mask: broadcasts to (B, Hq, S, capacity) as in `attention`; its last dimension may be shorter. Not with
            cu_seqlens_q.
        sinks: (Hq,), exp(sink) joins the denominator of the softmax.
        q_num_heads: Hq, required unless q has a dimension of heads.
        kv_num_heads: Hkv; must agree with the caches.
        scale: default 1 / sqrt(D).
        softcap: as in `attention`, like the following.
        is_causal: query i sees no key after its own.
        left_window_size: keys before its own that a query sees; -1: all.
        right_window_size: keys after its own that a query sees; -1: all.
        rotary_interleaved: features (0, 1), (2, 3).. are pairs, instead of (0, rotary_dim / 2)..
        rotary_dim: leading features that are rotated; 0: twice the width of cos_cache.
        max_q_length: ragged: later tokens of a sequence are not asked for and give 0; 0: all are.
        qkv_layout: "gqa": q is (B, S, Hq*D + Hkv*D + Hkv*Dv), or ragged (T, ..), and holds k and v, which are absent.

    Returns:
        Y in float64 in q's form, the caches after the call in their own dtype, and lse in float64: (B, Hq, S), or
        (Hq, T) if ragged. Tokens in no sequence give 0, and lse -inf.

    Raises:
        ValueError: the inputs contradict each other.
    """
    kv_heads = key_cache.shape[1] if block_table is None else key_cache.shape[2]
    if kv_num_heads not in (None, 0, kv_heads):
        raise ValueError(f"kv_num_heads must be that of the caches, {kv_heads}, got {kv_num_heads}")
    if qkv_layout == "gqa":
        q, k, v = _unpacked(q, k, v, q_num_heads, kv_heads, key_cache.shape[-1])
    elif qkv_layout != "separate":
        raise ValueError(f"qkv_layout must be 'separate' or 'gqa', got {qkv_layout!r}")
    ragged = cu_seqlens_q is not None
    queries = _tokens(q, q_num_heads, ragged)
    new_keys = None if k is None else _tokens(k, kv_heads, ragged)
    new_values = None if v is None else _tokens(v, kv_heads, ragged)
    batch = cache_lengths.size
    if cu_seqlens_q is not None:
        if attn_mask is not None:
            raise ValueError("attn_mask and cu_seqlens_q exclude each other")
        ends = ordered(cu_seqlens_q, len(queries))
        ids = None if position_ids is None else position_ids.reshape(-1)
    else:
        length = q.shape[1 if q.ndim == 3 else 2]
        ends = np.arange(batch + 1) * length
        ids = None if position_ids is None else np.broadcast_to(position_ids, (batch, length))
        ids = None if ids is None else ids.reshape(-1)
    keys, values = key_cache.copy(), value_cache.copy()
    capacity = keys.shape[2] if block_table is None else block_table.shape[1] * keys.shape[1]
    y: Array = np.zeros((*queries.shape[:2], values.shape[-1]))
    lse: Array = np.full(queries.shape[:2], -np.inf)
    for b in range(batch):
        rows = slice(ends[b], ends[b + 1])
        tokens = ends[b + 1] - ends[b]
        before = int(np.clip(cache_lengths.reshape(-1)[b], 0, capacity))
        total = before if new_keys is None else min(before + tokens, capacity)
        query, new_key = queries[rows], None if new_keys is None else new_keys[rows]
        if cos_cache is not None and sin_cache is not None:
            first = before - (tokens if new_keys is None else 0)
            at = np.arange(first, first + tokens) if ids is None else ids[rows]
            at = np.clip(at, 0, len(cos_cache) - 1)
            query = rotate(query, cos_cache[at], sin_cache[at], rotary_dim, rotary_interleaved)
            if new_key is not None:
                new_key = rotate(new_key, cos_cache[at], sin_cache[at], rotary_dim, rotary_interleaved)
        places, exists = _slots(b, capacity, keys, block_table)
        if new_key is not None and new_values is not None:
            slots = np.arange(before, before + tokens)
            kept = slots < capacity
            kept[kept] = exists[slots[kept]]
            keys[places(slots[kept])] = new_key[kept].astype(keys.dtype)
            values[places(slots[kept])] = new_values[rows][kept]
        shown = min(tokens, max_q_length) if ragged and max_q_length > 0 else tokens
        seen_keys, seen_values = (_gather(x, places, exists, total) for x in (keys, values))
        y[rows][:shown], lse[rows][:shown] = _attend(
            query, seen_keys, seen_values, _mask(attn_mask, b, batch, capacity), exists[:total], sinks, shown,
            scale=scale, softcap=softcap, is_causal=is_causal, left_window_size=left_window_size,
            right_window_size=right_window_size,
        )  # fmt: skip
    heads, width = y.shape[1:]
    if ragged:
        return y.reshape(len(y), heads * width) if q.ndim == 2 else y, keys, values, lse.T
    lse = lse.reshape(batch, length, heads).swapaxes(1, 2)
    if q.ndim == 4:
        return y.reshape(batch, length, heads, width).swapaxes(1, 2), keys, values, lse
    return y.reshape(batch, length, heads * width), keys, values, lse


def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    sinks: Array | None = None,
    *,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool | int = False,
    left_window_size: int = -1,
    right_window_size: int = -1,
    max_q_length: int = 0,
    max_kv_length: int = 0,
) -> tuple[Array, Array]:
    """Attention of each of several sequences whose tokens are packed without padding.

    Query i of sequence b stands at (keys of b) - (queries of b) + i: the causal triangle ends bottom right.

    Args:
        q: (Tq, Hq*D) or (Tq, Hq, D).
        k: (Tk, Hkv*D) or (Tk, Hkv, D).
        v: (Tk, Hkv*Dv) or (Tk, Hkv, Dv).
        cu_seqlens_q: (B + 1,) integers: sequence b has queries [cu_seqlens_q[b], cu_seqlens_q[b + 1]). Clamped to
            [0, Tq], and where they fall, to the largest before.
        cu_seqlens_k: likewise of the keys; default: cu_seqlens_q.
        sinks: as in `attention_kv_cache`, like most of the rest.
        q_num_heads: Hq, required for q of rank 2.
        kv_num_heads: Hkv, required for k of rank 2.
        scale: default 1 / sqrt(D).
        softcap: 0: none.
        is_causal: query i sees no key after its own.
        left_window_size: keys before its own that a query sees; -1: all.
        right_window_size: keys after its own that a query sees; -1: all.
        max_q_length: later queries of a sequence are not asked for and give 0; 0: all are.
        max_kv_length: later keys of a sequence are as if they were not there; 0: all are.

    Returns:
        Y in float64 in q's form and lse (Hq, Tq) in float64; 0 and -inf for tokens in no sequence.
    """
    queries, keys, values = (
        _tokens(q, q_num_heads, True),
        _tokens(k, kv_num_heads, True),
        _tokens(v, kv_num_heads, True),
    )
    q_ends = ordered(cu_seqlens_q, len(queries))
    k_ends = ordered(cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, len(keys))
    y: Array = np.zeros((*queries.shape[:2], values.shape[-1]))
    lse: Array = np.full(queries.shape[:2], -np.inf)
    for b in range(len(q_ends) - 1):
        rows, count = slice(q_ends[b], q_ends[b + 1]), k_ends[b + 1] - k_ends[b]
        count = min(count, max_kv_length) if max_kv_length > 0 else count
        columns = slice(k_ends[b], k_ends[b] + count)
        tokens = q_ends[b + 1] - q_ends[b]
        shown = min(tokens, max_q_length) if max_q_length > 0 else tokens
        y[rows][:shown], lse[rows][:shown] = _attend(
            queries[rows], keys[columns], values[columns], None, np.ones(count, bool), sinks, shown,
            scale=scale, softcap=softcap, is_causal=is_causal, left_window_size=left_window_size,
            right_window_size=right_window_size,
        )  # fmt: skip
    return y.reshape(len(y), y.shape[1] * y.shape[2]) if q.ndim == 2 else y, lse.T


def rotate(x: Array, cos: Array, sin: Array, rotary_dim: int = 0, interleaved: bool | int = False) -> Array:
    """Rotary position embedding: pairs of features (a, b) become (a cos - b sin, b cos + a sin).

    Args:
        x: (tokens, heads, D).
        cos: (tokens, at least rotary_dim / 2): of each token's position.
        sin: likewise.
        rotary_dim: leading features that are rotated; 0: twice the width of cos.
        interleaved: features (0, 1), (2, 3).. are pairs, instead of (0, rotary_dim / 2)..

    Returns:
        The same in float64.
    """
    half = rotary_dim // 2 or cos.shape[1]
    cos, sin = (t[:, None, :half].astype(np.float64) for t in (cos, sin))
    y = x.astype(np.float64)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    a, b = y[..., first].copy(), y[..., second].copy()
    y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    return y


def ordered(cu_seqlens: Array, tokens: int) -> Array:
    """Cumulated lengths within [0, tokens], none below one before it."""
    return np.maximum.accumulate(np.clip(cu_seqlens.astype(np.int64), 0, tokens))


def _unpacked(
    q: Array, k: Array | None, v: Array | None, q_heads: int | None, kv_heads: int, size: int
) -> tuple[Array, Array, Array]:
    if k is not None or v is not None or not q_heads:
        raise ValueError("with qkv_layout 'gqa' K and V must be absent and q_num_heads given")
    ends = [q_heads * size, (q_heads + kv_heads) * size]
    query, key, value = np.split(q, ends, axis=-1)
    return query, key, value


def _tokens(x: Array, heads: int | None, ragged: bool) -> Array:
    """(tokens, heads, D) of whatever form; batch entries follow one another."""
    if x.ndim == (3 if ragged else 4):
        return x if ragged else x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])
    if x.ndim != (2 if ragged else 3) or not heads:
        wanted = "2 and head counts, or 3," if ragged else "3 and head counts, or 4,"
        raise ValueError(f"Q, K and V must have rank {wanted} got rank {x.ndim}")
    return x.reshape(int(np.prod(x.shape[:-1])), heads, x.shape[-1] // heads)


def _slots(b: int, capacity: int, cache: Array, block_table: Array | None) -> tuple[Any, Array]:
    """From slots of sequence b to an index of (tokens, heads, D) in the cache, and whether each slot has a page."""
    if block_table is None:
        return (lambda slots: (b, slice(None), slots)), np.ones(capacity, bool)
    size = cache.shape[1]
    pages = np.repeat(block_table[b], size)
    return (lambda slots: (pages[slots], slots % size)), (pages >= 0) & (pages < len(cache))


def _gather(cache: Array, places: Any, exists: Array, total: int) -> Array:
    """(total, heads, D), zeros where there is no page."""
    slots = np.flatnonzero(exists[:total])
    found = cache[places(slots)]
    gathered = np.zeros((total, *found.shape[1:]), cache.dtype)
    gathered[slots] = found
    return gathered


def _mask(mask: Array | None, b: int, batch: int, capacity: int) -> Array | None:
    """Of batch entry b: a float64 bias that broadcasts to (Hq, S, capacity)."""
    if mask is None:
        return None
    bias = additive_mask(mask, capacity)
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    return np.broadcast_to(bias, (batch, *bias.shape[1:]))[b]


def _attend(
    q: Array, k: Array, v: Array, bias: Array | None, exists: Array, sinks: Array | None, shown: int, **more: Any
) -> tuple[Array, Array]:
    """One sequence: (tokens, Hq, D) to (shown, Hq, Dv) and (shown, Hq); every key counts that exists."""
    keep = np.where(exists, 0.0, -np.inf)
    mask = keep if bias is None else bias[..., : len(exists)] + keep
    q, k, v = (x.swapaxes(0, 1)[None] for x in (q, k, v))
    y, _, _, lse = attention(q, k, v, mask, None, None, np.array([len(exists)]), sinks, **more)
    return y[0, :, :shown].swapaxes(0, 1), lse[0, :, :shown].T


class FlashAttentionKVCache(OpRun):
    """The operator for `onnx.reference.ReferenceEvaluator(model, new_ops=[FlashAttentionKVCache])`."""

    op_domain = "flashonnx"

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        given = {n: x for n, x in attributes.items() if x is not None and n != "fixed_split"}
        y, keys, values, lse = attention_kv_cache(*inputs, **given)  # type: ignore[arg-type]
        outputs = (y.astype(inputs[0].dtype), keys, values, lse.astype(np.float32))  # type: ignore[union-attr]
        return outputs[: len(self.onnx_node.output)]


class FlashAttentionVarlen(OpRun):
    """The operator for `onnx.reference.ReferenceEvaluator(model, new_ops=[FlashAttentionVarlen])`."""

    op_domain = "flashonnx"

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        given = {n: x for n, x in attributes.items() if x is not None and n != "fixed_split"}
        y, lse = attention_varlen(*inputs, **given)  # type: ignore[arg-type]
        outputs = (y.astype(inputs[0].dtype), lse.astype(np.float32))  # type: ignore[union-attr]
        return outputs[: len(self.onnx_node.output)]
