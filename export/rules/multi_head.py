"""com.microsoft's MultiHeadAttention and Attention, as ONNX Runtime's optimizer writes them."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from flashonnx.export.operator import schema
from flashonnx.export.operator.cache_schema import KV_CACHE
from flashonnx.export.rules.base import Fusion, Rewrite, Rule
from flashonnx.export.rules.contributed import (
    DOMAIN,
    Contributed,
    Count,
    attended,
    biased,
    is_lengths,
    sentence_lengths,
)
from flashonnx.export.rules.mask_terms import NEGLIGIBLE
from flashonnx.export.rules.operator_site import Site, is_used
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.sites.finder import Candidate
from flashonnx.export.values.dims import Dim

_BUFFER = "a cache in one tensor for keys and values that is written in place has no place in the operator"
_BEAMS = "beams that are picked from a cache have no place in the operator"
_FILL = -10000.0  # what mask_filter_value is by default
_SWALLOWS = -1e30  # of what is added to this in float32 nothing is left


def _attributes(op: Contributed, heads: int) -> dict[str, Any]:
    scale = op.attribute("scale", 0.0)
    if scale < 0:
        raise RefusalError(f"the scale {scale} is not positive")
    return {"q_num_heads": heads, "kv_num_heads": heads, "scale": scale or None}


def _mask(op: Contributed, name: str, sizes: tuple[Dim, Dim, Dim], count: Count) -> ir.Value | None:
    """The mask input and the bias in one; `sizes` are batch, queries and all keys."""
    mask, bias, fill = op.input(name), op.input("attention_bias"), op.attribute("mask_filter_value", _FILL)
    if mask is None:
        return bias
    if not math.isfinite(fill):
        raise RefusalError(f"mask_filter_value is {fill}")
    return op.shared((mask, bias, sizes, fill), lambda: biased(op, attended(op, name, *sizes, count), fill, bias))


def _hide(
    op: Contributed, inputs: dict[str, ir.Value | None], name: str, sizes: tuple[Dim, Dim, Dim], count: Count
) -> None:
    """Enters the mask: as lengths where it says no more than these, which cost nothing, else as a tensor.

    Keys behind a length are filled with mask_filter_value on CPUs, and not read at all by ONNX Runtime's CUDA kernels.
    A sentence of no length attends to all keys on both, on CPUs with what the fill leaves of scores. Beside a bias keys
    behind a length may be all that a query has: they stay filled.
    """
    mask, fill = op.input(name), op.attribute("mask_filter_value", _FILL)
    # Beside a past there are no lengths, and a triangle would count from them.
    others = [op.input(x) for x in ("past_key", "past", "attention_bias")]
    plain = not any(x is not None for x in others) and not op.attribute("unidirectional")
    if mask is None or not plain or not -math.inf < fill <= NEGLIGIBLE or not is_lengths(op, name, sizes[0]):
        inputs["attn_mask"] = _mask(op, name, sizes, count)
        return

    def lengths() -> ir.Value:
        given = sentence_lengths(op, name, sizes[0])
        given = op.op("Cast", given, dtype=ir.DataType.INT64, to=ir.DataType.INT64)
        some = op.test("Greater", given, op.builder.ints([0]))
        return op.op("Where", some, given, count(), dtype=ir.DataType.INT64)

    if fill <= _SWALLOWS:
        op.remark = (
            "a sentence of length 0 attends to all keys, as in ONNX Runtime's CUDA kernels; with a mask_filter_value "
            f"of {fill:.3g} its CPU kernel gives the mean of V"
        )
    made = op.shared(("sentence lengths", mask, sizes), lengths)
    inputs["nonpad_kv_seqlen"] = made


def _causal(op: Contributed, queries: Dim, keys: Dim) -> int:
    """Whether a query sees keys up to its own place only; it has one where there are as many queries as new keys."""
    if not op.attribute("unidirectional"):
        return 0
    if queries != keys:
        raise RefusalError(f"unidirectional with {queries} queries and {keys} keys, where runtimes disagree")
    return 1


def _plus(op: Contributed, tensor: ir.Value, bias: ir.Value) -> ir.Value:
    """The sum of (batch, tokens, width) and (width).

    The bias gets three dimensions: with one, ONNX Runtime makes a Gemm of the product before and this sum, and on a GPU
    it first writes the bias to all of the Gemm's output, which takes longer than the sum (0.04 ms for 4096 x 2304).
    """
    return op.op("Add", tensor, op.op("Unsqueeze", bias, op.builder.ints([0, 1])))


class MultiHeadAttention(Rule):
    """com.microsoft::MultiHeadAttention: projected Q, K, V of three dimensions, K and V of four, or packed ones.

    The bias of the projections is the fused operator's own where all three have three dimensions, else it is added
    before; key_padding_mask and attention_bias become one additive mask, no larger than they are. Past keys are put
    before the new ones, as there; with past_sequence_length they are in a buffer that the new ones go into, which
    FlashAttentionKVCache has for a cache.
    """

    kinds = (f"{DOMAIN}::MultiHeadAttention",)
    inputs = (
        "query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key", "past_value",
        "past_sequence_length", "cache_indirection",
    )  # fmt: skip

    def rewrite(self, fusion: Fusion, candidate: Candidate) -> Rewrite:
        op = Contributed(fusion, candidate.node, self.inputs)
        op.kind("query")
        op.refuse(cache_indirection=_BEAMS)
        attributes = _attributes(op, op.attribute("num_heads"))
        outputs = op.outputs(3, qk="the fused operator never forms the scores, so remove it")
        query = op.required("query")
        q_dims = op.dims("query", 3, 5)
        if len(q_dims) == 5:
            if op.input("bias") is not None:
                raise RefusalError("a bias beside packed Q, K and V; add it before")
            attributes["qkv_layout"] = "h3d"
            key, value, keys, bias = None, None, q_dims[1], None
        else:
            query, key, value, bias = self._separate(op)
            keys = op.dims_of(key, "key", 3, 4)[-2]
        attributes["is_causal"] = _causal(op, q_dims[1], keys)
        past = op.input("past_key")
        if op.input("past_sequence_length") is not None:
            return self._in_place(op, (query, key, value), attributes)
        if past is not None:
            keys = keys + op.dims("past_key", 4)[2]

        def count() -> ir.Value:
            new = op.count(query, 1) if key is None else op.count(key, 1 if op.facts.rank(key) == 3 else 2)
            return new if past is None else op.op("Add", new, op.count(past, 2))

        inputs: dict[str, ir.Value | None] = {
            **dict.fromkeys(schema.INPUTS), "Q": query, "K": key, "V": value, "past_key": past,
            "past_value": op.input("past_value"), "bias": bias,
        }  # fmt: skip
        _hide(op, inputs, "key_padding_mask", (q_dims[0], q_dims[1], keys), count)
        return op.rewrite(Site(op.node, inputs, attributes, outputs))

    def _in_place(self, op: Contributed, tensors: tuple[ir.Value | None, ...], attributes: dict[str, Any]) -> Rewrite:
        """Past keys in a buffer, as many of them as past_sequence_length says, for all sentences alike."""
        query, key, value = tensors
        if query is None or key is None or value is None or any(op.facts.rank(x) != 3 for x in (query, key, value)):
            raise RefusalError("Q, K and V beside a buffer of past keys are expected to have three dimensions")
        q_dims, past = op.dims("query", 3), op.required("past_key")
        if op.dims_of(key, "key", 3)[1] != q_dims[1]:
            raise RefusalError("nothing shows that there are as many new keys as queries")
        length = op.required("past_sequence_length")

        def lengths() -> ir.Value:
            return op.op("Expand", op.op("Reshape", length, op.builder.ints([1])), op.count(query, 0))

        def count() -> ir.Value:
            before = op.op("Cast", length, dtype=ir.DataType.INT64, to=ir.DataType.INT64)
            return op.op("Add", op.op("Reshape", before, op.builder.ints([1])), op.count(query, 1))

        mask = op.input("key_padding_mask")
        keys = (op.facts.dims(mask) or (op.facts.unknown(),))[-1]  # that of another size makes the original fail
        inputs: dict[str, ir.Value | None] = {
            "Q": query, "K": key, "V": value, "key_cache": past, "value_cache": op.required("past_value"),
            "cache_lengths": op.shared(("lengths", length, q_dims[0]), lengths),
            "attn_mask": _mask(op, "key_padding_mask", (q_dims[0], q_dims[1], keys), count),
        }  # fmt: skip
        made = op.fusion.cached(op.builder, KV_CACHE, inputs, attributes, 3, outputs=3)
        node = made.producer()
        assert node is not None
        for name, present in zip(("past_key", "past_value"), node.outputs[1:], strict=True):
            op.facts.set_dims(present, op.dims(name, 4))
        replaced = dict(zip(op.node.outputs[:3], node.outputs, strict=False))
        return op.replaced({old: new for old, new in replaced.items() if old.name}, made, "")

    def _separate(self, op: Contributed) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value | None]:
        """Q, K and V, and the bias that is still to be added."""
        query, key, value, bias = op.required("query"), op.required("key"), op.input("value"), op.input("bias")
        k_dims = op.dims("key", 3, 4, 5)
        if len(k_dims) == 5:  # (batch, keys, heads, 2, size)
            if bias is not None or value is not None:
                raise RefusalError("a bias or V beside packed K and V")
            width = (k_dims[2] * k_dims[4]).value
            if width is None:
                raise RefusalError("the sizes of the packed K and V are not known")
            flat = op.builder.ints([0, 0, width])
            halves = (op.op("Squeeze", half, op.builder.ints([3])) for half in op.split(key, 3, [1, 1]))
            key, value = (op.op("Reshape", half, flat) for half in halves)
        value = op.required("value") if value is None else value
        plain = op.input("past_sequence_length") is None and {op.facts.rank(x) for x in (query, key, value)} == {3}
        if bias is None or plain:
            return query, key, value, bias
        q_width, v_width = op.dims("query", 3)[2].value, op.dims("value", 3, 4)
        size = v_width[2].value if len(v_width) == 3 else (v_width[1] * v_width[3]).value
        if q_width is None or size is None:
            raise RefusalError("the sizes of Q and V, which divide the bias, are not known")
        parts = op.split(bias, 0, [q_width, q_width, size])
        # K and V of four dimensions are projected, with their bias, before.
        sums = [
            _plus(op, tensor, part) if op.facts.rank(tensor) == 3 else tensor
            for tensor, part in zip((query, key, value), parts, strict=True)
        ]
        return sums[0], sums[1], sums[2], None


class PackedProjection(Rule):
    """com.microsoft::Attention: one projection of the input makes Q, K and V, which stay in one tensor."""

    kinds = (f"{DOMAIN}::Attention",)
    inputs = ("input", "weights", "bias", "mask_index", "past", "attention_bias", "past_sequence_length")

    def rewrite(self, fusion: Fusion, candidate: Candidate) -> Rewrite:
        op = Contributed(fusion, candidate.node, self.inputs)
        op.kind("input")
        op.refuse(
            past_sequence_length=_BUFFER,
            past_present_share_buffer=_BUFFER,
            do_rotary="the angles are made inside; write it as RotaryEmbedding and MultiHeadAttention",
        )
        batch, queries, _ = op.dims("input", 3)
        projected = op.op("MatMul", op.required("input"), op.required("weights"))
        inputs: dict[str, ir.Value | None] = dict.fromkeys(schema.INPUTS)
        inputs["bias"] = op.input("bias")
        attributes = _attributes(op, op.attribute("num_heads"))
        attributes["is_causal"] = _causal(op, queries, queries)
        sizes = list(op.attribute("qkv_hidden_sizes", ()))
        if len(set(sizes)) <= 1:
            inputs["Q"] = projected
            attributes["qkv_layout"] = "3hd"
        else:
            inputs |= dict(zip("QKV", op.split(projected, 2, sizes), strict=True))
        keys, past = queries, op.input("past")

        def count() -> ir.Value:
            new = op.count(op.required("input"), 1)
            return new if past is None else op.op("Add", new, op.count(past, 3))

        if past is not None:
            keys = keys + op.dims("past", 5)[3]
            halves = [op.op("Squeeze", half, op.builder.ints([0])) for half in op.split(past, 0, [1, 1])]
            inputs |= {"past_key": halves[0], "past_value": halves[1]}
        _hide(op, inputs, "mask_index", (batch, queries, keys), count)
        present = next((value for value in op.node.outputs[1:2] if is_used(value)), None)
        if len(set(sizes[1:])) > 1 and (past is not None or present is not None):
            raise RefusalError(f"K and V of widths {sizes[1]} and {sizes[2]} cannot lie in one tensor of past keys")
        return op.rewrite(Site(op.node, inputs, attributes, [op.node.outputs[0]], present))
