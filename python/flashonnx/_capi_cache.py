"""Caches and ragged batches at the C seam: the problems of FlashAttentionKVCache and FlashAttentionVarlen.

As in `flashonnx._capi`, NumPy arrays and torch tensors are passed by address and strides, and the caller keeps them.
"""

from __future__ import annotations

from ctypes import c_int64
from typing import Any

from flashonnx._capi import Device, Library, Params, Tensor, broadcast, tensor


def kv_cache_params(
    library: Library,
    device: Device,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    key_cache: Any,
    value_cache: Any,
    cache_lengths: Any,
    *,
    block_table: Any = None,
    cu_seqlens_q: Any = None,
    max_q_length: int = 0,
    cos: Any = None,
    sin: Any = None,
    position_ids: Any = None,
    rotary_dim: int = 0,
    rotary_interleaved: bool = False,
    present_key: Any = None,
    present_value: Any = None,
    lse: Any = None,
    mask: Any = None,
    sinks: Any = None,
    is_causal: bool = True,
    **more: Any,
) -> Params:
    """Describes attention over a cache to which new keys are appended; see `reference_cache.attention_kv_cache`.

    Args:
        library: for the defaults.
        device: where the arrays are.
        q: (B, Hq, S, D) view, innermost dimension contiguous; with cu_seqlens_q (T, Hq, D).
        k: likewise with Hkv heads, or None: nothing is appended.
        v: likewise, of size Dv.
        o: like q, of size Dv; written.
        key_cache: (B, Hkv, capacity, D), or with block_table (pages, page_size, Hkv, D); written unless present_key is
            given.
        value_cache: likewise, of size Dv.
        cache_lengths: (B,) int32 or int64.
        block_table: (B, pages of a sequence) int32.
        cu_seqlens_q: (B + 1,) int32.
        max_q_length: a bound of the tokens of a sequence; 0: T.
        cos: (positions, at least rotary_dim / 2) float32 or of q's dtype.
        sin: likewise.
        position_ids: (B, S) int64, or (T,) if ragged.
        rotary_dim: 0: twice the width of cos.
        rotary_interleaved: neighbours are pairs.
        present_key: of key_cache's shape, where it is to be after the call.
        present_value: likewise.
        lse: (B, Hq, S) float32, or (Hq, T) if ragged; written.
        mask: rank 1 to 4, broadcast to (B, Hq, S, keys) with keys <= capacity.
        sinks: (Hq,) float32.
        is_causal: query i sees no key after its own.
        more: scale, softcap, window_left, window_right, fixed_split, parallel_for: fields of the struct.
    """
    params = _params(library, device, is_causal, more)
    ragged = cu_seqlens_q is not None
    _rows(params, ("q", q), ("k", k), ("v", v), ("o", o), ragged=ragged)
    if ragged:
        params.batch, params.q_tokens = cu_seqlens_q.shape[0] - 1, q.shape[0]
        params.q_length = max_q_length or q.shape[0]
        params.cu_seqlens_q = tensor(cu_seqlens_q)
    else:
        params.batch, params.q_length = q.shape[0], q.shape[2]
    params.q_heads, params.head_dim, params.value_dim = q.shape[1], q.shape[-1], o.shape[-1]
    params.kv_length = 0 if k is None else params.q_length
    caches = {"cache_k": key_cache, "cache_v": value_cache, "present_k": present_key, "present_v": present_value}
    for name, cache in caches.items():
        if cache is not None:
            setattr(params, name, tensor(cache if block_table is None else cache.swapaxes(1, 2)))
    if block_table is None:
        params.kv_heads, params.cache_capacity = key_cache.shape[1:3]
    else:
        params.num_pages, params.page_size, params.kv_heads = key_cache.shape[:3]
        params.cache_capacity = block_table.shape[1] * params.page_size
        params.block_table = tensor(block_table)
    params.cache_lengths = tensor(cache_lengths)
    if cos is not None:
        params.rotary_cos, params.rotary_sin = tensor(cos), tensor(sin)
        params.rotary_length, params.rotary_dim = cos.shape[0], rotary_dim or 2 * cos.shape[1]
        params.rotary_interleaved = rotary_interleaved
    if position_ids is not None:
        params.rotary_positions = tensor(position_ids[None] if ragged else position_ids)
    if mask is not None:
        params.mask, params.mask_keys = broadcast(mask), mask.shape[-1]
    _outputs(params, lse, sinks, ragged=ragged)
    return params


def varlen_params(
    library: Library,
    device: Device,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_q_length: int = 0,
    max_kv_length: int = 0,
    lse: Any = None,
    sinks: Any = None,
    is_causal: bool = False,
    **more: Any,
) -> Params:
    """Describes attention within packed sequences; see `reference_cache.attention_varlen`.

    Args:
        library: for the defaults.
        device: where the arrays are.
        q: (Tq, Hq, D).
        k: (Tk, Hkv, D).
        v: (Tk, Hkv, Dv).
        o: (Tq, Hq, Dv), written.
        cu_seqlens_q: (B + 1,) int32.
        cu_seqlens_k: (B + 1,) int32.
        max_q_length: a bound of the queries of a sequence; 0: Tq.
        max_kv_length: a bound of the keys of a sequence; 0: Tk.
        lse: (Hq, Tq) float32, written.
        sinks: (Hq,) float32.
        is_causal: query i sees no key after its own, which stands (keys - queries) further.
        more: as in `kv_cache_params`.
    """
    params = _params(library, device, is_causal, more)
    _rows(params, ("q", q), ("k", k), ("v", v), ("o", o), ragged=True)
    params.batch, params.q_tokens, params.kv_tokens = cu_seqlens_q.shape[0] - 1, q.shape[0], k.shape[0]
    params.q_length, params.kv_length = max_q_length or q.shape[0], max_kv_length or k.shape[0]
    params.q_heads, params.kv_heads, params.head_dim, params.value_dim = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
    params.cu_seqlens_q, params.cu_seqlens_k = tensor(cu_seqlens_q), tensor(cu_seqlens_k)
    params.offset_from_lengths = 1
    _outputs(params, lse, sinks, ragged=True)
    return params


def _params(library: Library, device: Device, is_causal: bool, fields: dict[str, Any]) -> Params:
    params = library.params()
    params.device, params.is_causal = device, is_causal
    for name, value in fields.items():
        if value is not None:
            setattr(params, name, value)
    return params


def _rows(params: Params, *named: tuple[str, Any], ragged: bool) -> None:
    """Strides {batch, head, row, 1}; of (T, H, D) arrays {unused, head, row, 1}."""
    for name, array in named:
        if array is not None:
            setattr(params, name, tensor(array.swapaxes(0, 1)[None] if ragged else array))


def _outputs(params: Params, lse: Any, sinks: Any, *, ragged: bool) -> None:
    if lse is not None:
        view = tensor(lse)
        strides = [0, *view.stride[:2], 0] if ragged else list(view.stride)
        params.lse = Tensor(view.data, (c_int64 * 4)(*strides), view.dtype)
    if sinks is not None:
        params.sinks = tensor(sinks)
