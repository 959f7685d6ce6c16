"""FlashAttentionKVCache and FlashAttentionVarlen: names, inputs, outputs, attributes, defaults, shapes.

Their meaning is that of flashonnx.reference_cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

KV_CACHE = "FlashAttentionKVCache"
VARLEN = "FlashAttentionVarlen"

_SHARED: dict[str, Any] = {
    "q_num_heads": None,
    "kv_num_heads": None,
    "scale": None,
    "softcap": 0.0,
    "left_window_size": -1,
    "right_window_size": -1,
    "fixed_split": 0,
    "max_q_length": 0,
}
QKV_LAYOUTS = ("separate", "gqa")
# None: no default, the attribute is absent unless given.
ATTRIBUTES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        KV_CACHE: {**_SHARED, "is_causal": 1, "rotary_interleaved": 0, "rotary_dim": 0, "qkv_layout": "separate"},
        VARLEN: {**_SHARED, "is_causal": 0, "max_kv_length": 0},
    }
)

# Names and types: T as Q; M a mask; L int32 or int64; R of T or float32.
CACHE_INPUTS: Mapping[str, str] = MappingProxyType(
    {
        "Q": "T",
        "K": "T",
        "V": "T",
        "key_cache": "T",
        "value_cache": "T",
        "cache_lengths": "L",
        "block_table": "tensor(int32)",
        "cu_seqlens_q": "tensor(int32)",
        "cos_cache": "R",
        "sin_cache": "R",
        "position_ids": "tensor(int64)",
        "attn_mask": "M",
        "sinks": "tensor(float)",
    }
)
VARLEN_INPUTS: Mapping[str, str] = MappingProxyType(
    {
        "Q": "T",
        "K": "T",
        "V": "T",
        "cu_seqlens_q": "tensor(int32)",
        "cu_seqlens_k": "tensor(int32)",
        "sinks": "tensor(float)",
    }
)
INPUTS: Mapping[str, Mapping[str, str]] = MappingProxyType({KV_CACHE: CACHE_INPUTS, VARLEN: VARLEN_INPUTS})
REQUIRED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        KV_CACHE: frozenset(["Q", "key_cache", "value_cache", "cache_lengths"]),
        VARLEN: frozenset(["Q", "K", "V", "cu_seqlens_q"]),
    }
)
OUTPUTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        KV_CACHE: {"Y": "T", "present_key_cache": "T", "present_value_cache": "T", "lse": "tensor(float)"},
        VARLEN: {"Y": "T", "lse": "tensor(float)"},
    }
)

DOCS: Mapping[str, str] = MappingProxyType(
    {
        KV_CACHE: """
Appends the new keys K and values V to a cache, in place where the runtime gives present and past one buffer, then
attends to all that is in it. Sequence b had n = cache_lengths[b] keys; new key i goes to slot n + i; query i stands at
(keys afterwards) - (queries) + i, from which the causal triangle and the windows count. The cache is (batch, heads,
capacity, size), or with block_table pages (pages, page_size, heads, size). cu_seqlens_q makes Q, K and V packed tokens.
Queries and new keys are rotated first where cos_cache and sin_cache are given. With qkv_layout "gqa" Q alone is
given, each token's query heads, key heads and value heads side by side. The rest is as in FlashAttention.
""",
        VARLEN: """
Attention of each of several sequences whose tokens are packed without padding: sequence b has queries
[cu_seqlens_q[b], cu_seqlens_q[b + 1]) and keys likewise. Triangle and windows end at the last query and the last key.
""",
    }
)


def infer_shapes(context: Any) -> None:
    """Types, the shape of Y where V's head size is Q's, and the shapes of caches; the operator reports odd ones."""
    from onnx import TensorProto

    query = context.get_input_type(0).tensor_type
    outputs = context.get_num_outputs()
    is_cache = outputs > 2
    for index in range(outputs):
        if not context.has_output(index):
            continue
        is_lse = index == (3 if is_cache else 1)
        kind = context.get_output_type(index)
        kind.tensor_type.elem_type = TensorProto.FLOAT if is_lse else query.elem_type
        if index in (1, 2) and not is_lse:
            cache = context.get_input_type(2 + index).tensor_type
            if cache.HasField("shape"):
                kind.tensor_type.shape.CopyFrom(cache.shape)
        context.set_output_type(index, kind)
