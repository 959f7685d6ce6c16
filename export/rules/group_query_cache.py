"""com.microsoft's GroupQueryAttention with a cache, and its packed and paged relatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from flashonnx.export.operator.cache_schema import KV_CACHE
from flashonnx.export.rules.base import Rewrite
from flashonnx.export.rules.contributed import Contributed
from flashonnx.export.rules.scores import RefusalError

_COPIED = (
    "the caches are copied at each call, as nothing says that past and present are one buffer: give them the same "
    "length, or fuse with shared_cache=True if that is how the model is run"
)
_PADDING = "outputs of the padding behind a shorter first prompt are others than before"


def with_cache(op: Contributed, attributes: dict[str, Any], sinks: ir.Value | None) -> Rewrite:
    """FlashAttentionKVCache for a GroupQueryAttention that has a past.

    Sentence b has seqlens_k[b] + 1 keys after the call, so seqlens_k[b] + 1 - S before it, or none where that is
    negative: a first prompt, padded on the right. Present keys are as many as total_sequence_length, or as past ones if
    these are more (they lie in one buffer then).

    Args:
        op: the operator.
        attributes: head counts, is_causal, scale, softcap.
        sinks: the operator's input of that name.

    Raises:
        RefusalError: it is not proved to be the same.
    """
    op.refuse(
        query_seqlens="padding behind a chunk may reach beyond the cache, from whose end the operator counts then"
    )
    for name in ("past_key", "past_value"):
        if op.facts.dtype(op.required(name)) != op.facts.dtype(op.required("query")):
            raise RefusalError(f"'{name}' is quantized; there are kernels for caches of Q's type")
    query, key, value = _separate(op, attributes)
    inputs: dict[str, ir.Value | None] = {"Q": query, "K": key, "V": value, "sinks": sinks}
    window = op.attribute("local_window_size", -1)
    if window == 0:
        raise RefusalError("a local_window_size of 0, which sees nothing")
    if window > 0:
        attributes["left_window_size"] = window - 1
    if op.attribute("do_rotary"):
        if op.input("position_ids") is not None:
            raise RefusalError(
                "'position_ids' beside a cache: ONNX Runtime counts a first prompt's from its first one, and takes "
                "each token's own later; without them positions follow from the lengths"
            )
        inputs |= {"cos_cache": op.required("cos_cache"), "sin_cache": op.required("sin_cache")}
        attributes["rotary_interleaved"] = op.attribute("rotary_interleaved")
    inputs["cache_lengths"] = _lengths(op)
    inputs["attn_mask"] = _mask(op, bool(attributes["is_causal"]))
    remark = _PADDING
    shared = op.fusion.shared_cache or _is_one_buffer(op)
    if shared:
        inputs |= {"key_cache": op.required("past_key"), "value_cache": op.required("past_value")}
    else:
        remark = f"{_COPIED}; {_PADDING}"
        inputs |= {"key_cache": _grown(op, "past_key"), "value_cache": _grown(op, "past_value")}
    made = op.fusion.cached(op.builder, KV_CACHE, inputs, attributes, 3, outputs=3)
    node = made.producer()
    assert node is not None
    for name, value in zip(("past_key", "past_value"), node.outputs[1:], strict=True):
        dims = op.facts.dims(op.required(name))
        if shared and dims is not None:
            op.facts.set_dims(value, dims)
    return op.replaced(_outputs(op, made), made, remark)


def of_prompt(op: Contributed, attributes: dict[str, Any], sinks: ir.Value | None) -> Rewrite:
    """FlashAttentionKVCache with a cache as long as the prompt for one that turns Q and K, has no past and no padding.

    What appends turns them, too, in a third of the time of two RotaryEmbedding of ONNX Runtime (H200). Each
    operator has caches of its own, so that they can become its present keys and values where they are.
    """
    query, key, value = _separate(op, attributes)
    kind, kv_heads = op.kind("query"), attributes["kv_num_heads"]
    width = op.dims_of(key, "key", 3)[2].value
    if width is None:
        raise RefusalError("the size of K is not known")
    first = op.required("query")

    def shape() -> ir.Value:
        sizes = op.op("Shape", first, dtype=ir.DataType.INT64)
        known = op.op("Concat", sizes, op.builder.ints([kv_heads, width // kv_heads]), axis=0)
        return op.op("Gather", known, op.builder.ints([0, 3, 1, 4]))  # batch, heads, tokens, size

    alike = (op.dims("query", 3)[:2], kv_heads, width)
    sizes = op.shared(("new cache", alike), shape)
    zero, none = (ir.tensor(np.zeros(1, dtype)) for dtype in (kind.numpy(), np.int32))
    caches = [op.op("ConstantOfShape", sizes, dtype=kind, value=zero) for _ in range(2)]

    def nothing() -> ir.Value:
        return op.op("ConstantOfShape", op.count(first, 0), dtype=ir.DataType.INT32, value=none)

    lengths = op.shared(("no keys", alike), nothing)
    inputs: dict[str, ir.Value | None] = {
        "Q": query, "K": key, "V": value, "key_cache": caches[0], "value_cache": caches[1], "cache_lengths": lengths,
        "cos_cache": op.required("cos_cache"), "sin_cache": op.required("sin_cache"), "sinks": sinks,
        "attn_mask": op.input("attention_bias"),
    }  # fmt: skip
    attributes["rotary_interleaved"] = op.attribute("rotary_interleaved")
    made = op.fusion.cached(op.builder, KV_CACHE, inputs, attributes, 3, outputs=3)
    return op.replaced(_outputs(op, made), made, "")


def _separate(op: Contributed, attributes: dict[str, Any]) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Q, K and V, cut out of a packed tensor if need be."""
    query, key, value = op.required("query"), op.input("key"), op.input("value")
    q_heads, kv_heads = attributes["q_num_heads"], attributes["kv_num_heads"]
    if key is None or value is None:
        width = op.dims("query", 3)[2].value
        if width is None or width % (q_heads + 2 * kv_heads):
            raise RefusalError("the size of the packed Q, K and V is not known")
        size = width // (q_heads + 2 * kv_heads)
        query, key, value = op.split(query, 2, [q_heads * size, kv_heads * size, kv_heads * size])
    elif op.dims("key", 3)[1] != op.dims("query", 3)[1]:
        raise RefusalError("nothing shows that there are as many new keys as queries")
    return query, key, value


def _outputs(op: Contributed, made: ir.Value) -> dict[ir.Value, ir.Value]:
    """The operator's outputs that have a name, and those of the node that makes `made`."""
    node = made.producer()
    assert node is not None
    return {old: new for old, new in zip(op.node.outputs[:3], node.outputs, strict=False) if old.name}


def _is_one_buffer(op: Contributed) -> bool:
    """Whether past and present are declared to be equally long."""
    for past, present in (("past_key", op.node.outputs[1]), ("past_value", op.node.outputs[2])):
        shape = present.shape
        own = op.required(past).shape
        if shape is None or own is None or len(shape) != 4 or len(own) != 4:
            return False
        one, other = own[2], shape[2]
        if isinstance(one, int) != isinstance(other, int) or str(one) != str(other) or str(one) == "None":
            return False
    return True


def _lengths(op: Contributed) -> ir.Value:
    """Keys before the call, (batch,) int32; once for all layers."""
    total, query = op.required("seqlens_k"), op.required("query")

    def make() -> ir.Value:
        flat = op.op("Reshape", total, op.builder.ints([-1]), dtype=ir.DataType.INT32)
        new = op.op("Cast", op.count(query, 1), dtype=ir.DataType.INT32, to=ir.DataType.INT32)
        one, zero = (op.builder.constant(np.array([n], np.int32)) for n in (1, 0))
        after = op.op("Add", flat, one, dtype=ir.DataType.INT32)
        before = op.op("Sub", after, new, dtype=ir.DataType.INT32)
        return op.op("Max", before, zero, dtype=ir.DataType.INT32)

    return op.shared(("cache lengths", total, op.dims("query", 3)[1]), make)


def _mask(op: Contributed, is_causal: bool) -> ir.Value | None:
    """The bias; without causality also which keys are no padding, as a first prompt's would be seen."""
    bias = op.input("attention_bias")
    if is_causal:
        return bias
    total = op.required("seqlens_k")

    def below() -> ir.Value:
        count = op.op("Reshape", op.required("total_sequence_length"), op.builder.ints([1]))
        return op.test("LessOrEqual", op.positions(count), op.column(total))

    allowed = op.shared(("keys", total, op.required("total_sequence_length")), below)
    if bias is None:
        return allowed
    kind = op.facts.dtype(bias)
    assert kind is not None
    return op.op("Where", allowed, bias, op.builder.constant(np.array(-np.inf, kind.numpy())), dtype=kind)


def _grown(op: Contributed, name: str) -> ir.Value:
    """A past with as many slots behind it as the present has more."""
    past = op.required(name)
    kind = op.facts.dtype(past)
    assert kind is not None
    sizes = [op.count(past, axis) for axis in range(4)]
    wanted = op.op("Reshape", op.required("total_sequence_length"), op.builder.ints([1]))
    wanted = op.op("Cast", wanted, dtype=ir.DataType.INT64, to=ir.DataType.INT64)
    more = op.op("Sub", wanted, sizes[2], dtype=ir.DataType.INT64)
    more = op.op("Max", more, op.builder.ints([0]), dtype=ir.DataType.INT64)
    shape = op.op("Concat", *sizes[:2], more, sizes[3], axis=0, dtype=ir.DataType.INT64)
    empty = op.op("ConstantOfShape", shape, dtype=kind, value=ir.tensor(np.zeros(1, kind.numpy())))
    grown = op.op("Concat", past, empty, axis=2, dtype=kind)
    dims = op.facts.dims(past)
    if dims is not None:
        op.facts.set_dims(grown, (dims[0], dims[1], op.facts.unknown(), dims[3]))
    return grown


def is_cached(op: Contributed) -> bool:
    """Whether the operator has a past, or hands on a cache that it does not begin with."""
    return any(op.input(name) is not None for name in ("past_key", "past_value"))
