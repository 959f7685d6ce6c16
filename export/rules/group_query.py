"""com.microsoft's GroupQueryAttention without a past, and what needs a cache or packed sentences."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from flashonnx.export.operator import schema
from flashonnx.export.rules.base import Fusion, Rewrite, Rule
from flashonnx.export.rules.contributed import DOMAIN, Contributed
from flashonnx.export.rules.group_query_cache import is_cached, of_prompt, with_cache
from flashonnx.export.rules.operator_site import Site, is_used
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.sites.finder import Candidate

_CACHE = "its cache is in an order of its own"
_QUANTIZED = "the cache is quantized, which no kernel reads"
_QUANTIZED_TENSORS = "it is quantized; there are kernels for float32, float16 and bfloat16"
_REASONS = {
    "DecoderAttention": _CACHE,
    "DecoderMaskedMultiHeadAttention": _CACHE,
    "DecoderMaskedSelfAttention": _CACHE,
    "LongformerAttention": "its global and local keys have no place in the operator",
    "PackedAttention": "it projects its packed input; write it as MatMul and PackedMultiHeadAttention",
    "QAttention": _QUANTIZED_TENSORS,
    "QOrderedAttention": _QUANTIZED_TENSORS,
    "SparseAttention": "its blocks of keys have no place in the operator",
}


class GroupQueryAttention(Rule):
    """com.microsoft::GroupQueryAttention, with a past as `group_query_cache` says, or of a whole prompt.

    Then lengths are in seqlens_k, and do_rotary becomes a RotaryEmbedding of Q and one of K, or where nothing is padded
    FlashAttentionKVCache with a cache that is new. Keys behind a sentence's length are seen by none of its queries, the
    padding's own included, as there.
    """

    kinds = (f"{DOMAIN}::GroupQueryAttention",)
    inputs = (
        "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache",
        "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight",
        "k_norm_weight", "query_seqlens",
    )  # fmt: skip

    def rewrite(self, fusion: Fusion, candidate: Candidate) -> Rewrite:
        op = Contributed(fusion, candidate.node, self.inputs)
        op.kind("query")
        op.refuse(
            sliding_window_cache="its buffers hold the last window alone, which no cache of the operator does",
            k_scale=_QUANTIZED,
            v_scale=_QUANTIZED,
            q_norm_weight="write the normalisation of Q and K as nodes of their own",
        )
        outputs = op.outputs(3, output_qk="the fused operator never forms the scores, so remove it")
        q_heads, kv_heads = op.attribute("num_heads"), op.attribute("kv_num_heads")
        inputs: dict[str, ir.Value | None] = dict.fromkeys(schema.INPUTS)
        is_causal = int(op.attribute("causal", 1))
        attributes = {"q_num_heads": q_heads, "kv_num_heads": kv_heads, "is_causal": is_causal}
        scale = op.attribute("scale", 0.0)
        if scale < 0:
            raise RefusalError(f"the scale {scale} is not positive")
        attributes |= {"scale": scale or None, "softcap": op.attribute("softcap", 0.0)}
        query, key, value = op.required("query"), op.input("key"), op.input("value")
        if (key is None) != (value is None):
            raise RefusalError("K and V are expected together or not at all")
        if is_cached(op):
            return with_cache(op, attributes, self._sinks(op, q_heads))
        op.refuse(query_seqlens="there is no past beside it")
        if op.attribute("local_window_size", -1) >= 0:
            raise RefusalError(
                "local_window_size: queries of the padding see the last keys of their sentence, which no window says"
            )
        if op.attribute("do_rotary") and is_causal and self._is_whole(op) and op.input("position_ids") is None:
            return of_prompt(op, attributes, self._sinks(op, q_heads))
        if op.attribute("do_rotary"):
            query, key, value = self._rotated(op, query, key, value, (q_heads, kv_heads))
        if key is None:
            attributes["qkv_layout"] = "3hd" if q_heads == kv_heads else "gqa"
        inputs |= {"Q": query, "K": key, "V": value, "sinks": self._sinks(op, q_heads)}
        if attributes["is_causal"]:
            inputs["attn_mask"] = self._mask(op)
        else:
            lengths = op.op("Cast", op.required("seqlens_k"), dtype=ir.DataType.INT64, to=ir.DataType.INT64)
            flat = op.op("Reshape", lengths, op.builder.ints([-1]))
            inputs["nonpad_kv_seqlen"] = op.op("Add", flat, op.builder.ints([1]))
            inputs["attn_mask"] = op.input("attention_bias")
        return op.rewrite(Site(op.node, inputs, attributes, outputs))

    def _is_whole(self, op: Contributed) -> bool:
        """Whether it is known that no sentence is padded."""
        known, count = op.facts.constant(op.required("seqlens_k")), op.dims("query", 3)[1].value
        return known is not None and count is not None and bool((known >= count - 1).all())

    def _mask(self, op: Contributed) -> ir.Value | None:
        """Which keys are no padding, (batch, 1, 1, keys), with the bias if there is one; without padding, the bias."""
        query, lengths = op.required("query"), op.required("seqlens_k")
        if self._is_whole(op):
            return op.input("attention_bias")

        def below() -> ir.Value:
            return op.test("LessOrEqual", op.positions(op.count(query, 1)), op.column(lengths))

        allowed = op.shared((lengths, op.dims("query", 3)[1]), below)
        bias = op.input("attention_bias")
        if bias is None:
            return allowed
        kind = op.facts.dtype(bias)
        assert kind is not None
        return op.op("Where", allowed, bias, op.builder.constant(np.array(-np.inf, kind.numpy())), dtype=kind)

    def _sinks(self, op: Contributed, heads: int) -> ir.Value | None:
        sink = op.input("head_sink")
        if sink is not None:
            return op.op("Cast", sink, dtype=ir.DataType.FLOAT, to=ir.DataType.FLOAT)
        # a smooth softmax has one more score, 0
        return op.builder.constant(np.zeros(heads, np.float32)) if op.attribute("smooth_softmax") == 1 else None

    def _rotated(
        self, op: Contributed, query: ir.Value, key: ir.Value | None, value: ir.Value | None, heads: tuple[int, int]
    ) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        """Q and K turned by their places, cut out of a packed tensor if need be."""
        q_heads, kv_heads = heads
        width = op.dims("query", 3)[2].value
        half = op.dims("cos_cache", 2)[1].value
        if width is None or half is None:
            raise RefusalError("the sizes of Q and of cos_cache are not known")
        if op.input("position_ids") is not None and any(is_used(output) for output in op.node.outputs[1:3]):
            raise RefusalError("'position_ids' of present keys: runtimes read them differently")
        size = width // (q_heads + 2 * kv_heads if key is None else q_heads)
        if key is None:
            query, key, value = op.split(query, 2, [q_heads * size, kv_heads * size, kv_heads * size])
        angles = [op.required("cos_cache"), op.required("sin_cache")]
        start = op.builder.ints([0])  # a shift of all places changes no score
        turned = []
        for tensor, count in ((query, q_heads), (key, kv_heads)):
            partial: dict[str, Any] = (
                {"num_heads": count, "rotary_embedding_dim": 2 * half} if 2 * half != size else {"num_heads": count}
            )
            interleaved = op.attribute("rotary_interleaved")
            turned.append(
                op.op("RotaryEmbedding", tensor, start, *angles, domain=DOMAIN, interleaved=interleaved, **partial)
            )
        return turned[0], turned[1], value


class Unsupported(Rule):
    """Operators that have no rule, with what they lack."""

    kinds = tuple(f"{DOMAIN}::{name}" for name in _REASONS)

    def rewrite(self, fusion: Fusion, candidate: Candidate) -> Rewrite:
        raise RefusalError(_REASONS[candidate.node.op_type])
