"""FlashAttentionKVCache in its best form: rotation inside, tensors as projections make them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from flashonnx.export.model.build import Builder
from flashonnx.export.operator.cache_schema import CACHE_INPUTS, KV_CACHE
from flashonnx.export.rules.base import Fusion, Rewrite, Rule
from flashonnx.export.rules.rotary import Rotation, rotation
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.sites.finder import Candidate
from flashonnx.export.values.facts import Facts

_HEADS_FIRST = [0, 2, 1, 3]


class KVCache(Rule):
    """A node with Q, K and V of four dimensions, as exporters have them behind rotary embeddings.

    A rotation of both by the same angles becomes the operator's own, which reads cosines and sines from tables by
    positions: the tables are the model's own cosines and sines, and the positions count their rows. Transposes to heads
    first vanish into the three-dimensional form.
    """

    kinds = (KV_CACHE,)

    def rewrite(self, fusion: Fusion, candidate: Candidate) -> Rewrite:
        node, facts = candidate.node, fusion.facts
        given: dict[str, ir.Value | None] = dict(zip(CACHE_INPUTS, node.inputs, strict=False))
        attributes: dict[str, Any] = {name: attribute.value for name, attribute in node.attributes.items()}
        query, key, value = (given.get(name) for name in "QKV")
        if query is None or key is None or value is None or facts.rank(query) != 4 or given.get("cu_seqlens_q"):
            raise RefusalError("already fused")
        builder = fusion.builder(node)
        turned = _rotation(facts, query, key) if given.get("cos_cache") is None else None
        if turned is not None:
            query, key = turned[0].source, turned[1].source
            given |= _tables(fusion, builder, node, turned[0])
            attributes["rotary_interleaved"] = int(turned[0].interleaved)
            attributes["rotary_dim"] = turned[0].dim if _size(facts, query, 3) != turned[0].dim else 0
        flat = [_flat(facts, builder, x) for x in (query, key, value)]
        heads = [_size(facts, x, 1) for x in (query, key)]
        if None in flat or None in heads:
            if turned is None:
                raise RefusalError("already fused")
            given |= {"Q": query, "K": key, "V": value}
            made = fusion.cached(builder, KV_CACHE, given, attributes, 4, outputs=len(node.outputs))
            return _replacing(builder, node, made, made, node.outputs[0])
        given |= dict(zip("QKV", flat, strict=True))
        attributes |= {"q_num_heads": heads[0], "kv_num_heads": heads[1]}
        made = fusion.cached(builder, KV_CACHE, given, attributes, 3, outputs=len(node.outputs))
        shape = builder.ints([0, 0, heads[0] or 0, _size(facts, value, 3) or -1])
        split = builder.op("Reshape", made, shape)
        after = _only_transpose(node.outputs[0])
        if after is not None:
            return _replacing(builder, node, made, split, after.outputs[0], after)
        return _replacing(builder, node, made, builder.op("Transpose", split, perm=_HEADS_FIRST), node.outputs[0])


def _replacing(builder: Builder, node: ir.Node, made: ir.Value, y: ir.Value, old: ir.Value, *more: ir.Node) -> Rewrite:
    new = made.producer()
    assert new is not None
    replaced = {before: after for before, after in zip(node.outputs[1:], new.outputs[1:], strict=True) if before.name}
    for before, after in zip(node.outputs[1:], new.outputs[1:], strict=True):
        after.name = after.name if before.name else ""
    return Rewrite(builder, {**replaced, old: y}, (*more, node), "", made)


def _rotation(facts: Facts, query: ir.Value, key: ir.Value) -> tuple[Rotation, Rotation] | None:
    """The rotations of both, if they are one."""
    first, second = rotation(facts, query), rotation(facts, key)
    if first is None or second is None:
        return None
    return (first, second) if first.angles == second.angles else None


def _tables(fusion: Fusion, builder: Builder, node: ir.Node, turned: Rotation) -> dict[str, ir.Value | None]:
    """Cosines and sines of every token as rows of tables, and which row each token has; once for all layers."""
    key = ("rotary tables", node.graph, *turned.angles)
    if key in fusion.masks:
        return dict(fusion.masks[key])
    half = turned.dim // 2
    bounds = ([0], [turned.dim], [3], [2]) if turned.interleaved else ([0], [half], [3])  # of each angle once
    found: dict[str, ir.Value | None] = {}
    for name, table in (("cos_cache", turned.cos), ("sin_cache", turned.sin)):
        kind = fusion.facts.dtype(table)
        first = table if turned.is_once else builder.op("Slice", table, *map(builder.ints, bounds), dtype=kind)
        found[name] = builder.op("Reshape", first, builder.ints([-1, half]), dtype=kind)
    kind = ir.DataType.INT64
    shape = builder.op("Shape", turned.cos, dtype=kind)
    rows = builder.op("Gather", shape, builder.ints([0, 2]), dtype=kind)
    total = builder.op("Squeeze", builder.op("Mul", *(
        builder.op("Gather", shape, builder.ints([axis]), dtype=kind) for axis in (0, 2)
    ), dtype=kind), dtype=kind)  # fmt: skip
    zero, one = (builder.constant(np.array(number, np.int64)) for number in (0, 1))
    every = builder.op("Range", zero, total, one, dtype=kind)
    found["position_ids"] = builder.op("Reshape", every, rows, dtype=kind)
    fusion.masks[key] = found
    return dict(found)


def _size(facts: Facts, value: ir.Value, axis: int) -> int | None:
    dims = facts.dims(value)
    return dims[axis].value if dims is not None else None


def _flat(facts: Facts, builder: Builder, value: ir.Value) -> ir.Value | None:
    """(batch, tokens, heads * size), of which `value` is (batch, heads, tokens, size)."""
    node = value.producer()
    if node is None or node.domain or node.op_type != "Transpose" or node.inputs[0] is None:
        return None
    if "perm" not in node.attributes or list(node.attributes["perm"].as_ints()) != _HEADS_FIRST:
        return None
    split = node.inputs[0]
    dims = facts.dims(split)
    if dims is None:
        return None
    before = split.producer()
    if before is not None and before.op_type == "Reshape" and not before.domain and before.inputs[0] is not None:
        source = before.inputs[0]
        known = facts.dims(source)
        if known is not None and known == (dims[0], dims[1], dims[2] * dims[3]):
            return source
    width = (dims[2] * dims[3]).value
    if width is None:
        return None
    return builder.op("Reshape", split, builder.ints([0, 0, width]), dtype=facts.dtype(split))


def _only_transpose(value: ir.Value) -> ir.Node | None:
    """The one node that reads `value`, if it puts tokens before heads."""
    users = [use.node for use in value.uses()]
    if len(users) != 1 or value.is_graph_output() or users[0].op_type != "Transpose" or users[0].domain:
        return None
    perm = users[0].attributes.get("perm")
    return users[0] if perm is not None and list(perm.as_ints()) == _HEADS_FIRST else None
