"""What attention of PyTorch becomes in ONNX: entries of a torch.onnx translation table.

Every entry ends in `translate_attention`, the translation of `torch.ops.flashonnx.attention`. Called by torch's
exporter with symbolic tensors, of which only types and ranks are certain.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

_FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16")


def table() -> dict[Any, Callable[..., Any]]:
    """The translation table: PyTorch's operators and what makes their nodes; registers ours with PyTorch."""
    import flashonnx.torch  # noqa: F401
    import torch

    packed = getattr(torch.ops.flash_attn, "_flash_attn_varlen_forward", None)  # where that package is imported
    return {
        **({packed.default: translate_flash_attn_varlen} if packed is not None else {}),
        torch.ops.aten.scaled_dot_product_attention.default: translate_sdpa,
        torch.ops.aten.softmax.int: translate_softmax,
        torch.ops.flashonnx.attention.default: translate_attention,
        torch.ops.flashonnx.attention_outputs.default: translate_attention_outputs,
        torch.ops.flashonnx.attention_varlen.default: translate_varlen,
    }


def translate_attention(
    query: Any,
    key: Any = None,
    value: Any = None,
    attn_mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    nonpad_kv_seqlen: Any = None,
    sinks: Any = None,
    bias: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    empty_row: str = "zero",
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    qkv_layout: str = "separate",
) -> Any:
    """`torch.ops.flashonnx.attention` as a FlashAttention node: its first output."""
    return _node(**locals())[0]


def translate_attention_outputs(
    query: Any,
    key: Any = None,
    value: Any = None,
    attn_mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    nonpad_kv_seqlen: Any = None,
    sinks: Any = None,
    bias: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    empty_row: str = "zero",
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    qkv_layout: str = "separate",
    present: bool = False,
    lse: bool = False,
) -> Any:
    """`torch.ops.flashonnx.attention_outputs`: all outputs, without elements where they are not asked for."""
    given = locals()
    del given["present"], given["lse"]
    y, present_key, present_value, sums = _node(**given)
    op = _standard()
    if not present:
        present_key = present_value = op.CastLike(_nothing(op), query)
    return y, present_key, present_value, sums if lse else _nothing(op)


def translate_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    sinks: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    max_q_length: int = 0,
    max_kv_length: int = 0,
) -> Any:
    """`torch.ops.flashonnx.attention_varlen` as a FlashAttentionVarlen node: its first output."""
    import onnxscript
    from flashonnx.export.operator import schema
    from flashonnx.export.operator.cache_schema import VARLEN

    op = _standard()
    if cu_seqlens_k is cu_seqlens_q:
        cu_seqlens_k = None
    starts, ends = (
        x if x is None or x.dtype.name == "INT32" else op.Cast(x, to=6) for x in (cu_seqlens_q, cu_seqlens_k)
    )
    if sinks is not None and sinks.dtype.name != "FLOAT":
        sinks = op.Cast(sinks, to=1)  # TensorProto.FLOAT
    inputs = [query, key, value, starts, ends, sinks]
    while inputs[-1] is None:
        inputs.pop()
    given = {
        "is_causal": int(is_causal), "scale": scale, "softcap": softcap, "left_window_size": left_window_size,
        "right_window_size": right_window_size, "max_q_length": max_q_length, "max_kv_length": max_kv_length,
    }  # fmt: skip
    opset = onnxscript.values.Opset(schema.DOMAIN, schema.VERSION)
    return opset.FlashAttentionVarlen(*inputs, **schema.without_defaults(given, VARLEN))[0]


def translate_flash_attn_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    return_softmax: bool = False,
    block_table: Any = None,
    leftpad_k: Any = None,
    seqused_k: Any = None,
    zero_tensors: bool = False,
) -> Any:
    """flash-attn's flash_attn_varlen_func as a FlashAttentionVarlen node; the bounds of lengths were the example's."""
    given = {"alibi_slopes": alibi_slopes, "block_table": block_table, "leftpad_k": leftpad_k, "seqused_k": seqused_k}
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"flash_attn_varlen_func: '{name}' has no place in FlashAttentionVarlen")
    if dropout_p:
        warn_of_dropout(dropout_p)
    y = translate_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal=causal, scale=softmax_scale, softcap=softcap,
        left_window_size=window_size_left, right_window_size=window_size_right,
    )  # fmt: skip
    nothing = _nothing(_standard())
    return y, nothing, nothing, nothing


def _nothing(op: Any) -> Any:
    import onnx

    return op.Constant(value=onnx.helper.make_tensor("nothing", onnx.TensorProto.FLOAT, [0], []))


def _node(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    past_key: Any,
    past_value: Any,
    nonpad_kv_seqlen: Any,
    sinks: Any,
    bias: Any,
    is_causal: bool,
    **attributes: Any,
) -> Any:
    """The four outputs of a FlashAttention node, without the inputs and attributes that say nothing."""
    import onnxscript
    from flashonnx.export.operator import schema

    op = _standard()
    if nonpad_kv_seqlen is not None and nonpad_kv_seqlen.dtype.name != "INT64":
        nonpad_kv_seqlen = op.Cast(nonpad_kv_seqlen, to=7)  # TensorProto.INT64
    if sinks is not None and sinks.dtype.name != "FLOAT":
        sinks = op.Cast(sinks, to=1)  # TensorProto.FLOAT
    inputs = [query, key, value, attn_mask, past_key, past_value, nonpad_kv_seqlen, sinks, bias]
    while inputs[-1] is None:
        inputs.pop()
    given = schema.without_defaults({"is_causal": int(is_causal), **attributes})
    return onnxscript.values.Opset(schema.DOMAIN, schema.VERSION).FlashAttention(*inputs, **given)


def _standard() -> Any:
    import onnxscript

    return onnxscript.opset18


def warn_of_dropout(probability: float) -> None:
    """Says that dropout, which inference does not have, is left out."""
    warnings.warn(
        f"export_onnx: an attention has dropout_p={probability}; it is left out, as in inference", stacklevel=3
    )


def translate_sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`aten.scaled_dot_product_attention` as a FlashAttention node; an entry of a torch.onnx translation table.

    Called by torch's exporter with symbolic tensors: query (..., Hq, L, E), key (..., Hkv, S, E), value (..., Hkv, S,
    Ev), attn_mask broadcastable to (..., Hq, L, S). The operator's rules for empty rows, causality and grouped heads
    are PyTorch's: https://pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """
    if query.dtype.name not in _FLOATS:
        from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

        return aten_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    op = _standard()
    if dropout_p > 0:
        warn_of_dropout(dropout_p)
    if attn_mask is not None and attn_mask.shape[-1] != key.shape[-2]:
        # A last dimension of 1: PyTorch broadcasts it, ONNX pads it with -inf.
        attn_mask = op.Expand(attn_mask, op.Shape(key, start=-2, end=-1))
    query, key, value, attn_mask, shape = _to_rank_4(op, query, key, value, attn_mask, enable_gqa)
    if scale is not None and not (isinstance(scale, (int, float)) and scale > 0):
        # Zero, negative or computed in the graph: more than the attribute of every runtime can say.
        query, scale = op.Mul(query, op.CastLike(scale, query)), 1.0
    y = translate_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale)
    return y if shape is None else op.Reshape(y, shape)


def translate_softmax(tensor: Any, dim: int, dtype: int = -1) -> Any:
    """`aten.softmax.int`, in the type that it is asked for: torch's own translation casts only what comes out."""
    op = _standard()
    if not tensor.shape:
        from onnxscript.function_libs.torch_lib.ops.core import aten_softmax

        return aten_softmax(tensor, dim, dtype)
    if dtype not in (-1, None, tensor.dtype):
        tensor = op.Cast(tensor, to=dtype)
    return op.Softmax(tensor, axis=dim)


def _to_rank_4(op: Any, query: Any, key: Any, value: Any, mask: Any, grouped: bool) -> tuple[Any, Any, Any, Any, Any]:
    """Q, K, V as (B, H, S, D), the mask to match, and the shape to give the output (None: leave it).

    Leading dimensions broadcast in PyTorch, but with grouped heads not the third last. Fewer than four dimensions
    become heads and a batch of 1, more are merged into the batch.
    """
    kept = 3 if grouped else 2
    leads = [list(tensor.shape[:-kept]) for tensor in (query, key, value)]
    rank = max(len(tensor.shape) for tensor in (query, key, value))
    out_lead = op.Shape(query, end=-1)
    if any(lead != leads[0] for lead in leads):
        ones = op.Constant(value_ints=[1] * kept)
        shapes = [op.Concat(op.Shape(tensor, end=-kept), ones, axis=0) for tensor in (query, key, value)]
        query, key, value = (_expand(op, tensor, shapes) for tensor in (query, key, value))
        out_lead = op.Shape(query, end=-1)
    if rank == 4:
        return query, key, value, mask, None
    out_shape = op.Concat(out_lead, op.Shape(value, start=-1), axis=0)
    if rank < 4:
        axes = op.Constant(value_ints=list(range(4 - rank)))
        query, key, value = (op.Unsqueeze(tensor, axes) for tensor in (query, key, value))
    else:
        if mask is not None and len(mask.shape) > 3:
            lead = op.Shape(query, end=-3)
            mask = _merge_lead(op, op.Expand(mask, op.Concat(lead, op.Constant(value_ints=[1, 1, 1]), axis=0)))
        query, key, value = (_merge_lead(op, tensor) for tensor in (query, key, value))
    return query, key, value, mask, out_shape


def _expand(op: Any, tensor: Any, shapes: list[Any]) -> Any:
    for shape in shapes:  # Expand broadcasts both ways
        tensor = op.Expand(tensor, shape)
    return tensor


def _merge_lead(op: Any, tensor: Any) -> Any:
    """(..., H, S, D) as (product of ..., H, S, D)."""
    batch = op.ReduceProd(op.Shape(tensor, end=-3), keepdims=1)
    return op.Reshape(tensor, op.Concat(batch, op.Shape(tensor, start=-3), axis=0))
