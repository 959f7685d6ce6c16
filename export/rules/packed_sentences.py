"""com.microsoft's operators for sentences packed one behind the other: PackedMultiHeadAttention and PagedAttention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from flashonnx.export.layout.views import peel
from flashonnx.export.operator.cache_schema import KV_CACHE, VARLEN, VARLEN_INPUTS
from flashonnx.export.rules import scales
from flashonnx.export.rules.base import Fusion, Rewrite, Rule
from flashonnx.export.rules.contributed import DOMAIN, Contributed
from flashonnx.export.rules.operator_site import is_used
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.sites.finder import Candidate
from flashonnx.export.values.facts import Facts

_QUANTIZED = "the cache is quantized, which no kernel reads"


class PackedMultiHead(Rule):
    """com.microsoft::PackedMultiHeadAttention as FlashAttentionVarlen.

    Q, K, V are (tokens, heads * size), or Q alone (tokens, heads, 3, size); sentence b has the tokens from
    cumulative_sequence_length[b] on. Every token sees every one of its sentence.
    """

    kinds = (f"{DOMAIN}::PackedMultiHeadAttention",)
    inputs = ("query", "key", "value", "bias", "token_offset", "cumulative_sequence_length", "attention_bias")

    def rewrite(self, fusion: Fusion, candidate: Candidate) -> Rewrite:
        op = Contributed(fusion, candidate.node, self.inputs)
        op.kind("query")
        op.refuse(attention_bias="FlashAttentionVarlen has no mask, as its sentences have lengths of their own")
        heads, scale = op.attribute("num_heads"), op.attribute("scale", 0.0)
        if scale < 0:
            raise RefusalError(f"the scale {scale} is not positive")
        parts = _parts(op, heads)
        if op.input("bias") is not None:
            widths = [_width(op, part) for part in parts]
            biases = op.split(op.required("bias"), 0, widths)
            parts = [op.op("Add", part, bias) for part, bias in zip(parts, biases, strict=True)]
        attributes = {"q_num_heads": heads, "kv_num_heads": heads, "scale": scale or None}
        inputs = {**dict(zip("QKV", parts, strict=True)), "cu_seqlens_q": op.required("cumulative_sequence_length")}
        made = fusion.cached(op.builder, VARLEN, inputs, attributes, 2, outputs=1)
        return op.replaced({op.node.outputs[0]: made}, made, "")


def _parts(op: Contributed, heads: int) -> list[ir.Value]:
    """Q, K and V, each (tokens, heads * size)."""
    query, key, value = op.required("query"), op.input("key"), op.input("value")
    if key is not None and value is not None:
        op.dims("query", 2)
        return [query, key, value]
    if key is not None or value is not None:
        raise RefusalError("K and V are expected together or not at all")
    _, count, _, size = op.dims("query", 4)
    if count.value != heads or size.value is None:
        raise RefusalError(
            f"the packed Q, K and V have {count} heads of size {size}, {heads} of a known size are expected"
        )
    flat = op.builder.ints([0, heads * size.value])
    return [op.op("Reshape", part, flat) for part in op.split(query, 2, [1, 1, 1])]


def _width(op: Contributed, value: ir.Value) -> int:
    width = op.dims_of(value, value.name or "", 2)[1].value
    if width is None:
        raise RefusalError(f"the width of '{value.name}' is not known")
    return width


class Varlen(Rule):
    """FlashAttentionVarlen itself, its tensors taken where they lie as it wants them: (tokens, heads, size).

    Exporters transpose them for an interface of four dimensions and back again.
    """

    kinds = (VARLEN,)

    def rewrite(self, fusion: Fusion, candidate: Candidate) -> Rewrite:
        node, facts = candidate.node, fusion.facts
        given = dict(zip(VARLEN_INPUTS, node.inputs, strict=False))
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        builder = fusion.builder(node)
        before = {name: given[name] for name in "QKV"}
        scales.fold(facts, builder, given, attributes, keys=True)
        given |= {name: _upstream(facts, value) for name in "QKV" if (value := given[name]) is not None}
        if all(given[name] is value for name, value in before.items()):
            raise RefusalError("already fused")
        made = fusion.cached(builder, VARLEN, given, attributes, 3, outputs=len(node.outputs))
        new = made.producer()
        assert new is not None
        return Rewrite(builder, dict(zip(node.outputs, new.outputs, strict=True)), (node,), "", made)


def _upstream(facts: Facts, value: ir.Value) -> ir.Value:
    """The first tensor of three dimensions that `value` is, through what moves its axes and moves them back."""
    views = (peeled.view for peeled in peel(facts, value, scales=False))
    same = (view.source for view in views if len(view.layout) == 3 and list(view.layout) == list(view.axes))
    return next(same, value)


class Paged(Rule):
    """com.microsoft::PagedAttention as FlashAttentionKVCache with pages.

    Its window counts the token itself, and attention_metadata is a hint for its own launch.
    """

    kinds = (f"{DOMAIN}::PagedAttention",)
    inputs = (
        "query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens",
        "block_table", "cos_cache", "sin_cache", "slot_mapping", "head_sink", "q_norm_weight", "k_norm_weight",
        "k_scale", "v_scale", "attention_metadata",
    )  # fmt: skip

    def rewrite(self, fusion: Fusion, candidate: Candidate) -> Rewrite:
        op = Contributed(fusion, candidate.node, self.inputs)
        kind = op.kind("query")
        op.refuse(
            slot_mapping="new keys go to the slots that the block table says, and nowhere else",
            q_norm_weight="write the normalisation of Q and K as nodes of their own",
            k_scale=_QUANTIZED,
            v_scale=_QUANTIZED,
            rotary_offset="rotation begins at the first element of a head",
        )
        layout, scale = op.attribute("kv_cache_layout", "SEPARATE"), op.attribute("scale", 0.0)
        if layout != "SEPARATE":
            raise RefusalError(f"the cache has the layout {layout}; keys and values of their own are expected")
        if scale < 0:
            raise RefusalError(f"the scale {scale} is not positive")
        for name in ("key_cache", "value_cache"):
            if op.facts.dtype(op.required(name)) != kind:
                raise RefusalError(f"'{name}' is quantized; there are kernels for caches of Q's type")
        outputs = op.node.outputs
        if len(outputs) < 3 or not all(map(is_used, outputs[1:3])):
            raise RefusalError("it writes into its caches and does not hand them on; make them outputs")
        q_heads, kv_heads = op.attribute("num_heads"), op.attribute("kv_num_heads")
        attributes: dict[str, Any] = {
            "q_num_heads": q_heads,
            "kv_num_heads": kv_heads,
            "scale": scale or None,
            "softcap": op.attribute("softcap", 0.0),
            "is_causal": int(op.attribute("is_causal", 1)),
        }
        window = op.attribute("local_window_size", -1)
        if window == 0:
            raise RefusalError("a local_window_size of 0, which sees nothing")
        if window > 0:
            attributes["left_window_size"] = window - 1
        inputs: dict[str, ir.Value | None] = dict(zip("QKV", _separate(op, q_heads, kv_heads), strict=True))
        for name in ("key_cache", "value_cache", "block_table"):
            inputs[name] = op.required(name)
        inputs |= {
            "cache_lengths": op.required("past_seqlens"),
            "cu_seqlens_q": op.required("cumulative_sequence_length"),
        }
        if op.attribute("do_rotary"):
            inputs |= {"cos_cache": op.required("cos_cache"), "sin_cache": op.required("sin_cache")}
            attributes["rotary_interleaved"] = op.attribute("rotary_interleaved")
        sink = op.input("head_sink")
        if sink is not None:
            inputs["sinks"] = op.op("Cast", sink, dtype=ir.DataType.FLOAT, to=ir.DataType.FLOAT)
        made = fusion.cached(op.builder, KV_CACHE, inputs, attributes, 2, outputs=3)
        node = made.producer()
        assert node is not None
        return op.replaced(dict(zip(outputs[:3], node.outputs, strict=True)), made, "")


def _separate(op: Contributed, q_heads: int, kv_heads: int) -> Sequence[ir.Value]:
    """Q, K and V, each (tokens, heads * size)."""
    query, key, value = op.required("query"), op.input("key"), op.input("value")
    if key is not None and value is not None:
        return query, key, value
    width = op.dims("query", 2)[1].value
    if key is not None or value is not None or width is None or width % (q_heads + 2 * kv_heads):
        raise RefusalError("Q, K and V are expected as three, or as one of known size")
    size = width // (q_heads + 2 * kv_heads)
    return op.split(query, 1, [q_heads * size, kv_heads * size, kv_heads * size])
