"""Q, K and V that three products make of one tensor, made by one product of the weights side by side.

A product thrice as wide fills a GPU better than three, and two additions and two launches are saved. The weights are
joined by a Concat of constants, which runtimes compute when they load the model. A bias behind the product becomes the
attention's own, whose kernels may spare a pass over the projections.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from flashonnx.export.operator import schema
from flashonnx.export.operator.cache_schema import KV_CACHE
from flashonnx.export.rules.base import Fusion
from flashonnx.export.rules.biases import give, is_stored, only, whole_of
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
    biased = any(part.bias is not None for part in found)
    if biased and given.get("bias") is not None:
        return []
    builder = fusion.builder(node)
    key = ("side by side", graph, *(part.weight for part in found))
    weight = fusion.masks.get(key)
    if weight is None:
        weight = fusion.masks[key] = builder.op("Concat", *(part.weight for part in found), axis=1)
    packed = builder.op("MatMul", found[0].source, weight)
    bias = given.get("bias")
    if biased:
        kind = facts.dtype(found[0].weight)
        assert kind is not None
        biases = [part.bias or builder.constant(np.zeros(part.width, kind.numpy())) for part in found]
        bias = whole_of(facts, biases) or builder.op("Concat", *biases, axis=0)
    if bias is not None and node.op_type == KV_CACHE:  # which has none
        # Of three dimensions, so that ONNX Runtime makes no Gemm of it; see multi_head.py.
        packed, bias = builder.op("Add", packed, builder.op("Unsqueeze", bias, builder.ints([0, 1]))), None
    graph.insert_before(node, builder.nodes)
    facts.learn(builder.nodes)
    before = [made for value in node.inputs[:3] if value is not None and (made := value.producer()) is not None]
    give(node, given | {"Q": packed, "K": None, "V": None, "bias": bias})
    layout = "3hd" if q_heads == kv_heads and node.op_type == schema.OP_TYPE else "gqa"
    node.attributes["qkv_layout"] = ir.AttrString("qkv_layout", layout)
    return before


def _projection(facts: Facts, value: ir.Value | None) -> _Projection | None:
    node = only(value)
    bias = None
    if node is not None and node.op_type == "Add":
        for product, other in (node.inputs, node.inputs[::-1]):
            inner = only(product)
            if inner is not None and inner.op_type == "MatMul" and is_stored(other):
                node, bias = inner, other
                break
    if node is None or node.op_type != "MatMul" or None in node.inputs:
        return None
    source, weight = node.inputs
    assert source is not None and weight is not None
    dims = facts.dims(weight)
    if facts.rank(source) != 3 or dims is None or len(dims) != 2 or not is_stored(weight):
        return None
    width = dims[1].value
    if width is None or (bias is not None and facts.dims(bias) != (width,)):
        return None
    return _Projection(source, weight, bias, width)


def store_joined(model: ir.Model) -> None:
    """Makes weights of Concats of weights that nobody else uses, as tools that quantize weights look at these alone.

    The numbers are put together when the model is written. That is for models that come from PyTorch: a file keeps its
    external weights where they are.
    """
    for node in [node for node in model.graph if node.op_type == "Concat" and not node.domain]:
        parts = [value for value in node.inputs if value is not None and _is_own_weight(value)]
        tensors = [value.const_value for value in parts if value.const_value is not None]
        joined = node.outputs[0]
        if len(tensors) < len(node.inputs) or joined.is_graph_output() or joined.name is None:
            continue
        axis = node.attributes["axis"].as_int() % len(tensors[0].shape)
        shape = list(tensors[0].shape.numpy())
        shape[axis] = sum(tensor.shape.numpy()[axis] for tensor in tensors)
        made = functools.partial(_side_by_side, tensors, axis)
        tensor = ir.LazyTensor(made, tensors[0].dtype, ir.Shape(shape), name=joined.name)
        kind = ir.TensorType(tensor.dtype)
        value = ir.Value(name=joined.name, type=kind, shape=tensor.shape, const_value=tensor)
        ir.convenience.replace_all_uses_with(joined, value)
        model.graph.remove(node, safe=True)
        model.graph.initializers[joined.name] = value
        for part in parts:
            del model.graph.initializers[part.name or ""]


def _is_own_weight(value: ir.Value) -> bool:
    is_shared = value.is_graph_input() or value.is_graph_output() or len(tuple(value.uses())) > 1
    return value.is_initializer() and not is_shared


def _side_by_side(tensors: Sequence[ir.TensorProtocol], axis: int) -> ir.TensorProtocol:
    return ir.Tensor(np.concatenate([tensor.numpy() for tensor in tensors], axis), dtype=tensors[0].dtype)
