"""Q, K and V that three products make of one tensor, made by one product of the weights side by side.

A product thrice as wide fills a GPU better than three, and two additions and two launches are saved. The weights are
joined by a Concat of constants, which runtimes compute when they load the model.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
from flashonnx.export.operator import schema
from flashonnx.export.operator.cache_schema import KV_CACHE
from flashonnx.export.rules.base import Fusion
from flashonnx.export.values.facts import Facts

_HEADS = ("q_num_heads", "kv_num_heads")


@dataclasses.dataclass(frozen=True)
class _Projection:
    """source @ weight + bias, where the bias may be missing."""

    source: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    width: int


def join(fusion: Fusion, node: ir.Node) -> list[ir.Node]:
    """Gives a node without a past its Q, K and V packed, if constant weights make all three of one tensor.

    Returns:
        The nodes that made them before, which nothing uses any more.
    """
    facts, graph = fusion.facts, node.graph
    if node.op_type not in (schema.OP_TYPE, KV_CACHE) or graph is None:
        return []
    given = dict(zip(schema.inputs_of(node.op_type), node.inputs, strict=False))
    if given.get("past_key") is not None:
        return []
    heads = [node.attributes[name].as_int() for name in _HEADS if name in node.attributes]
    parts = [_projection(facts, given.get(name)) for name in "QKV"]
    found = [part for part in parts if part is not None]
    if len(found) < 3 or len(heads) < 2 or len({part.source for part in found}) > 1:
        return []
    q_heads, kv_heads = heads
    size = found[0].width // q_heads
    if [part.width for part in found] != [q_heads * size, kv_heads * size, kv_heads * size]:
        return []
    builder = fusion.builder(node)
    key = ("side by side", graph, *(part.weight for part in found))
    weight = fusion.masks.get(key)
    if weight is None:
        weight = fusion.masks[key] = builder.op("Concat", *(part.weight for part in found), axis=1)
    packed = builder.op("MatMul", found[0].source, weight)
    if any(part.bias is not None for part in found):
        kind = facts.dtype(found[0].weight)
        assert kind is not None
        biases = [part.bias or builder.constant(np.zeros(part.width, kind.numpy())) for part in found]
        # Of three dimensions, so that ONNX Runtime makes no Gemm of it; see multi_head.py.
        bias = builder.op("Unsqueeze", builder.op("Concat", *biases, axis=0), builder.ints([0, 1]))
        packed = builder.op("Add", packed, bias)
    graph.insert_before(node, builder.nodes)
    facts.learn(builder.nodes)
    before = [made for value in node.inputs[:3] if value is not None and (made := value.producer()) is not None]
    for index, value in enumerate((packed, None, None)):
        node.replace_input_with(index, value)
    if not any(node.inputs[3:]):  # what is missing at the end is left out: tools take '' for a name
        node.resize_inputs(1)
    layout = "3hd" if q_heads == kv_heads and node.op_type == schema.OP_TYPE else "gqa"
    node.attributes["qkv_layout"] = ir.AttrString("qkv_layout", layout)
    return before


def _projection(facts: Facts, value: ir.Value | None) -> _Projection | None:
    node = _only(value)
    bias = None
    if node is not None and node.op_type == "Add":
        for product, other in (node.inputs, node.inputs[::-1]):
            inner = _only(product)
            if inner is not None and inner.op_type == "MatMul" and _is_stored(other):
                node, bias = inner, other
                break
    if node is None or node.op_type != "MatMul" or None in node.inputs:
        return None
    source, weight = node.inputs
    assert source is not None and weight is not None
    dims = facts.dims(weight)
    if facts.rank(source) != 3 or dims is None or len(dims) != 2 or not _is_stored(weight):
        return None
    width = dims[1].value
    if width is None or (bias is not None and facts.dims(bias) != (width,)):
        return None
    return _Projection(source, weight, bias, width)


def _is_stored(value: ir.Value | None) -> bool:
    """Whether the model has the numbers: what is made of them by more than these would be made at every run."""
    node = value.producer() if value is not None else None
    while node is not None and not node.domain and node.op_type in ("Identity", "Transpose"):
        value = node.inputs[0]
        node = value.producer() if value is not None else None
    if node is not None:
        return node.op_type == "Constant" and not node.domain
    return value is not None and value.is_initializer() and not value.is_graph_input()


def _only(value: ir.Value | None) -> ir.Node | None:
    """What makes `value`, if nobody but one node uses it."""
    if value is None or value.is_graph_output() or len(tuple(value.uses())) != 1:
        return None
    node = value.producer()
    return node if node is not None and not node.domain else None
