"""What FlashAttention means: the operator in float64 NumPy, and the same as an `onnx.reference` op.

Kernels, adapters and fusions are tested against this file, so it is written to be read, not to be fast. The semantics
are those of ONNX `Attention` (opset 25, with the errata of onnx 1.23: softcap before the mask, zero rows where no key
is left, causal offsets per batch with nonpad_kv_seqlen), plus sinks, lse, packed layouts and the choice for rows
without a key.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun

Array = NDArray[Any]


def attention(
    q: Array,
    k: Array | None = None,
    v: Array | None = None,
    attn_mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
    *,
    is_causal: bool | int = False,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    empty_row: str = "zero",
    qkv_layout: str = "separate",
) -> tuple[Array, Array, Array, Array]:
    """Y = softmax(softcap(scale Q K^T) + mask, structural masks) V for each batch entry and head.

    Args:
        q: (B, Hq, Sq, D), or (B, Sq, Hq*D), or the packed projections that qkv_layout names.
        k: (B, Hkv, Skv, D) or (B, Skv, Hkv*D); Hkv divides Hq and query head h reads key head h // (Hq / Hkv).
        v: (B, Hkv, Skv, Dv) or (B, Skv, Hkv*Dv).
        attn_mask: broadcasts to (B, Hq, Sq, Sk) over all but its last dimension, which is Sk or shorter; later keys are
            masked. Sk = past + Skv. Boolean or integer: true means attend. Floating: added to the scores, -inf masks.
        past_key: (B, Hkv, P, D), keys before k.
        past_value: (B, Hkv, P, Dv).
        nonpad_kv_seqlen: (B,) integers, keys at or past it are masked; clamped to [0, Sk]. Not together with a past.
        sinks: (Hq,), exp(sink) joins the denominator of the softmax.
        bias: (Hq*D + Hkv*D + Hkv*Dv,), added to each row of q, k and v (not of the past) before anything else, and
            packed as they are.
        is_causal: query i sees key j only if j <= i + offset; offset is P, nonpad_kv_seqlen[b] - Sq, or 0 with neither.
        q_num_heads: Hq, required for inputs of rank 3.
        kv_num_heads: Hkv, likewise.
        scale: default 1 / sqrt(D).
        softcap: if positive, scores become softcap * tanh(scores / softcap) before the mask.
        left_window_size: query i sees key j only if j >= i + offset - left_window_size; -1: no bound.
        right_window_size: query i sees key j only if j <= i + offset + right_window_size; -1: no bound.
        empty_row: a query that sees no key yields "zero", or the "mean" of V over the keys below nonpad_kv_seqlen
            (not together with sinks: there the sink has all the weight).
        qkv_layout: "separate", or how q alone packs all three: "3hd" (B, S, 3, H, D), "h3d" (B, S, H, 3, D), "gqa"
            (B, S, (Hq + 2 Hkv) D), "time_major" (S, B, 3 H D); each also flattened to rank 3.

    Returns:
        Y in float64 with q's layout ((B, S, Hq*D) for packed ones, (S, B, Hq*D) for "time_major"), present_key and
        present_value (B, Hkv, Sk, D) in the dtypes given, and lse (B, Hq, Sq) in float64: the natural logarithm of the
        sum of exp(scores) without the sink, -inf where no key is seen.

    Raises:
        ValueError: the inputs contradict each other.
    """
    if empty_row not in ("zero", "mean") or (empty_row == "mean" and sinks is not None):
        raise ValueError(f'empty_row must be "zero", or "mean" without sinks, got {empty_row!r}')
    rank, dtype = q.ndim, q.dtype
    problem = prepare(
        q, k, v, attn_mask, past_key, past_value, nonpad_kv_seqlen, bias,
        is_causal=is_causal, q_num_heads=q_num_heads, kv_num_heads=kv_num_heads, left_window_size=left_window_size,
        right_window_size=right_window_size, qkv_layout=qkv_layout,
    )  # fmt: skip
    q, k, v, seen, lengths = problem.q, problem.k, problem.v, problem.seen, problem.lengths
    batch, q_heads, q_length, head_dim = q.shape
    # Query heads grouped by the key head that they share: (B, Hkv, group, Sq, ...).
    group = q_heads // k.shape[1]
    shared = (batch, k.shape[1], group, q_length)
    with np.errstate(invalid="ignore", over="ignore"):  # masked slots may hold anything
        keys, values = (x.astype(np.float64)[:, :, None] for x in (k, v))
        scores = q.astype(np.float64).reshape(*shared, head_dim) @ keys.swapaxes(-1, -2)
        scores = scores.reshape(seen.shape) * (1 / math.sqrt(head_dim) if scale is None else scale)
        if softcap > 0:
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(seen, scores + problem.bias, -np.inf)

        sink = np.full((q_heads, 1, 1), -np.inf) if sinks is None else sinks.astype(np.float64)[:, None, None]
        top = _finite(np.maximum(_maximum(scores), sink))
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)
        weights = np.where(seen, weights / np.where(total == 0, 1.0, total), 0.0)
        y = _weighted_sum(weights.reshape(*shared, k.shape[2]), seen.reshape(*shared, k.shape[2]), values)
        y = y.reshape(batch, q_heads, q_length, v.shape[3])
    with np.errstate(invalid="ignore", divide="ignore"):
        top = _finite(_maximum(scores))
        lse = (top + np.log(np.exp(scores - top).sum(axis=-1, keepdims=True)))[..., 0]

    if empty_row == "mean":
        below = (np.arange(k.shape[2]) < lengths[:, None])[:, None, :, None]
        mean = np.where(below, v.astype(np.float64), 0.0).sum(axis=2) / np.maximum(lengths, 1)[:, None, None]
        empty = ~seen.any(axis=-1, keepdims=True)
        y = np.where(empty, np.repeat(mean, group, axis=1)[:, :, None], y)
    if rank != 4:
        y = y.transpose((2, 0, 1, 3) if qkv_layout == "time_major" else (0, 2, 1, 3))
        y = y.reshape(*y.shape[:2], q_heads * y.shape[3])
    return y, k.astype(dtype), v.astype(dtype), lse


class Problem(NamedTuple):
    """Attention with layouts, past and masks resolved; `attention` explains the names."""

    q: Array  # (B, Hq, Sq, D)
    k: Array  # (B, Hkv, Sk, D), past first
    v: Array  # (B, Hkv, Sk, Dv)
    seen: Array  # (B, Hq, Sq, Sk), whether the query may see the key
    bias: Array  # float64, broadcasts to the same, added to the scores
    lengths: Array  # (B,), keys that are not padding


def prepare(
    q: Array,
    k: Array | None,
    v: Array | None,
    attn_mask: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    nonpad_kv_seqlen: Array | None,
    bias: Array | None = None,
    *,
    is_causal: bool | int,
    q_num_heads: int | None,
    kv_num_heads: int | None,
    left_window_size: int,
    right_window_size: int,
    qkv_layout: str,
) -> Problem:
    """Resolves layout, past and masks: everything of `attention` that is not arithmetic."""
    q, k, v = split(q, k, v, q_num_heads, kv_num_heads, qkv_layout)
    if bias is not None:
        parts = split_bias(bias.astype(np.float64), q, k, v, qkv_layout)
        q, k, v = (x + part[:, None] for x, part in zip((q, k, v), parts, strict=True))
    if past_key is not None and past_value is not None:
        if nonpad_kv_seqlen is not None:
            raise ValueError("past_key and nonpad_kv_seqlen exclude each other")
        k, v = np.concatenate((past_key, k), axis=2), np.concatenate((past_value, v), axis=2)
    (batch, q_heads, q_length), (kv_heads, kv_length) = q.shape[:3], k.shape[1:3]
    if q_heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of key heads, got {q_heads} and {kv_heads}")

    lengths = np.full(batch, kv_length)
    offset = np.full(batch, 0 if past_key is None else past_key.shape[2])
    if nonpad_kv_seqlen is not None:
        lengths = np.clip(nonpad_kv_seqlen.reshape(batch), 0, kv_length)
        offset = lengths - q_length
    key = np.arange(kv_length)
    position = np.arange(q_length)[:, None] + offset[:, None, None, None]  # of each query among the keys
    seen = np.broadcast_to(key < lengths[:, None, None, None], (batch, q_heads, q_length, kv_length))
    if is_causal:
        seen = seen & (key <= position)
    if left_window_size >= 0:
        seen = seen & (key >= position - left_window_size)
    if right_window_size >= 0:
        seen = seen & (key <= position + right_window_size)
    added = np.zeros(1)
    if attn_mask is not None:
        added = additive_mask(attn_mask, kv_length)
        seen = seen & ~np.isneginf(added)
    return Problem(q, k, v, seen, added, lengths)


def split(
    q: Array, k: Array | None, v: Array | None, q_heads: int | None, kv_heads: int | None, layout: str
) -> tuple[Array, Array, Array]:
    """Q, K and V as (B, heads, S, D) views of whatever layout they came in."""
    if layout != "separate":
        return _unpack(q, q_heads, kv_heads, layout)
    if k is None or v is None:
        raise ValueError("K and V may be absent only with a packed qkv_layout")
    if q.ndim == 4:
        return q, k, v
    if q.ndim != 3 or not q_heads or not kv_heads:
        raise ValueError(f"Q must have rank 4, or rank 3 and head counts, got rank {q.ndim}")
    return _heads(q, q_heads), _heads(k, kv_heads), _heads(v, kv_heads)


def split_bias(bias: Array, q: Array, k: Array, v: Array, layout: str) -> tuple[Array, Array, Array]:
    """The bias of (B, heads, S, D) views, as (heads, D) each."""
    if layout != "separate":
        parts = _unpack(bias[None, None], q.shape[1], k.shape[1], layout)
        return parts[0][0, :, 0], parts[1][0, :, 0], parts[2][0, :, 0]
    shapes = [(x.shape[1], x.shape[3]) for x in (q, k, v)]
    end_q = math.prod(shapes[0])
    end_k = end_q + math.prod(shapes[1])
    return bias[:end_q].reshape(shapes[0]), bias[end_q:end_k].reshape(shapes[1]), bias[end_k:].reshape(shapes[2])


def _heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2)


def _unpack(packed: Array, q_heads: int | None, kv_heads: int | None, layout: str) -> tuple[Array, Array, Array]:
    if packed.ndim == 5:
        q_heads = kv_heads = packed.shape[3 if layout == "3hd" else 2]
    if not q_heads:
        raise ValueError(f"qkv_layout {layout!r} of rank {packed.ndim} needs head counts")
    kv_heads = kv_heads or q_heads
    flat = packed.reshape(*packed.shape[:2], math.prod(packed.shape[2:]))
    if layout == "time_major":
        flat = flat.swapaxes(0, 1)
    split = _heads(flat, q_heads + 2 * kv_heads)
    if layout == "h3d":
        return split[:, 0::3], split[:, 1::3], split[:, 2::3]
    return split[:, :q_heads], split[:, q_heads : q_heads + kv_heads], split[:, q_heads + kv_heads :]


def additive_mask(mask: Array, kv_length: int) -> Array:
    """The mask as a float64 bias over all keys: false, and keys beyond its end, become -inf."""
    bias = mask.astype(np.float64)
    if mask.dtype.kind in "bui":
        bias = np.where(mask != 0, 0.0, -np.inf)
    padding = [(0, 0)] * (mask.ndim - 1) + [(0, kv_length - mask.shape[-1])]
    return np.pad(bias, padding, constant_values=-np.inf)


def _maximum(scores: Array) -> Array:
    return scores.max(axis=-1, keepdims=True, initial=-np.inf)


def _finite(top: Array) -> Array:
    """0 instead of -inf, so that exp(-inf - top) is 0."""
    return np.where(np.isneginf(top), 0.0, top)


def _weighted_sum(weights: Array, seen: Array, values: Array) -> Array:
    """Weights @ values, where a value that is not seen counts as nothing even if it is NaN or infinite."""
    if np.isfinite(values).all():
        return weights @ values
    y = np.zeros((*weights.shape[:-1], values.shape[-1]))
    for j in range(weights.shape[-1]):
        y += np.where(seen[..., j, None], weights[..., j, None] * values[..., j, :][..., None, :], 0.0)
    return y


class FlashAttention(OpRun):
    """The operator for `onnx.reference.ReferenceEvaluator(model, new_ops=[FlashAttention])`."""

    op_domain = "flashonnx"

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        attributes.pop("softmax_precision", None)  # everything here is float64
        given = {name: value for name, value in attributes.items() if value is not None}
        y, present_key, present_value, lse = attention(*inputs, **given)  # type: ignore[arg-type]
        y = y.astype(inputs[0].dtype)  # type: ignore[union-attr]
        with np.errstate(over="ignore"):  # rows of nothing but the least numbers
            outputs = (y, present_key, present_value, lse.astype(np.float32))
        return outputs[: len(self.onnx_node.output)]
