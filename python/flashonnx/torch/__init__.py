"""The kernels of flashonnx as PyTorch operators: `import flashonnx.torch` registers `torch.ops.flashonnx.attention`.

    import flashonnx.torch

    y = torch.ops.flashonnx.attention(q, k, v, is_causal=True)                  # q (B, Hq, S, D), k, v (B, Hkv, S, D)
    y = torch.ops.flashonnx.attention(q, k, v, q_num_heads=16, kv_num_heads=4)  # q (B, S, Hq * D), ...
    y, present_key, present_value, lse = torch.ops.flashonnx.attention_outputs(q, k, v, present=True, lse=True)

They take what `flashonnx::FlashAttention` takes, mean the same (`flashonnx.reference` defines it) and become one such
node in `flashonnx.export_onnx`. They run on the CPU and on CUDA devices, on the current stream, inside torch.compile
and CUDA graphs; they have no gradient.

Inputs, in this order and by name, of any strides (nothing is copied unless a last dimension is not contiguous):
    query: (B, Hq, Sq, D), or (B, Sq, Hq*D) with head counts; float32, float16 or bfloat16.
    key, value: (B, Hkv, Skv, D) and (B, Hkv, Skv, Dv), or (B, Skv, Hkv*D) and (B, Skv, Hkv*Dv). Hkv divides Hq, query
        head h uses key head h // (Hq / Hkv).
    attn_mask: broadcasts to (B, Hq, Sq, Sk), but in its last dimension, which is Sk or shorter: then the other keys
        are masked (also where it is 1). bool, True attends; or added to the scores, in query's dtype or float32.
    past_key, past_value: (B, Hkv, P, D) and (B, Hkv, P, Dv), keys before `key`; Sk = P + Skv.
    nonpad_kv_seqlen: (B,) int64 or int32, keys at or past it are masked. Not together with a past.
    sinks: (Hq,) float32 or query's dtype, exp(sink) joins the denominator.
    bias: (Hq*D + Hkv*D + Hkv*Dv,) in query's dtype, of the projections: added to query, key and value (not to a past)
        before anything else; packed as query is where that packs all three, else query's part, key's, value's.

Attributes, by name:
    is_causal: query i sees key j only if j <= i + offset, where offset is P, nonpad_kv_seqlen[b] - Sq, or 0.
    scale: positive, default 1 / sqrt(D).
    softcap: if positive, scores become softcap * tanh(scores / softcap) before the mask.
    left_window_size, right_window_size: query i sees i + offset - left <= j <= i + offset + right; -1: no bound.
    empty_row: a query that sees no key gives "zero", or the "mean" of V over all keys below nonpad_kv_seqlen.
    q_num_heads, kv_num_heads: Hq and Hkv, for inputs of three dimensions.
    qkv_layout: "separate", or how query alone packs all three: "3hd", "h3d", "gqa", "time_major", as in the operator.
    present, lse: of attention_outputs, what to give besides Y: present_key and present_value (B, Hkv, Sk, ...), lse
        (B, Hq, Sq) float32. What is not asked for is a tensor without elements.

Sequences of different lengths without padding, one behind the other, go into
`torch.ops.flashonnx.attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k=None, sinks=None, *, is_causal,
scale, softcap, left_window_size, right_window_size, max_q_length, max_kv_length)`, which becomes a
FlashAttentionVarlen: query is (Tq, Hq, D), key (Tk, Hkv, D), value (Tk, Hkv, Dv); sequence b has the queries
[cu_seqlens_q[b], cu_seqlens_q[b + 1]), and keys likewise. Triangle and windows end at the last query and the last key,
as in flash-attn. The bounds of lengths are for a better launch: tokens beyond them give 0; 0 is none.

Raised are ValueError where the inputs contradict each other (the message names the input, what was expected and what
came), NotImplementedError where no kernel of the library solves the problem on that device, or a gradient is asked for,
and LibraryError where libflashonnx.so is missing.
"""

from flashonnx.torch._ops import attention, attention_outputs
from flashonnx.torch._varlen import attention_varlen

__all__ = ["attention", "attention_outputs", "attention_varlen"]
