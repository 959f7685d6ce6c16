"""Q, K and V that three products make of one tensor, made by one product of the weights side by side.

A product thrice as wide fills a GPU better than three, and two additions and two launches are saved. The weights are
joined by a Concat of constants, which runtimes compute when they load the model. A bias behind the product becomes the
attention's own, whose kernels may spare a pass over the projections.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from flashonnx.export.model.build import Builder, Names
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
        bias = builder.op("Concat", *biases, axis=0)
    if bias is not None and node.op_type == KV_CACHE:  # which has none
        # Of three dimensions, so that ONNX Runtime makes no Gemm of it; see multi_head.py.
        packed, bias = builder.op("Add", packed, builder.op("Unsqueeze", bias, builder.ints([0, 1]))), None
    graph.insert_before(node, builder.nodes)
    facts.learn(builder.nodes)
    before = [made for value in node.inputs[:3] if value is not None and (made := value.producer()) is not None]
    _give(node, given | {"Q": packed, "K": None, "V": None, "bias": bias})
    layout = "3hd" if q_heads == kv_heads and node.op_type == schema.OP_TYPE else "gqa"
    node.attributes["qkv_layout"] = ir.AttrString("qkv_layout", layout)
    return before


def take_bias(fusion: Fusion, node: ir.Node) -> list[ir.Node]:
    """Gives a FlashAttention node the constant bias of its packed projections, that of an Add or of a Gemm.

    Returns:
        What added it, which nothing uses any more.
    """
    graph, given = node.graph, dict(zip(schema.INPUTS, node.inputs, strict=False))
    packed = given.get("Q")
    last = _only(packed)
    if node.op_type != schema.OP_TYPE or graph is None or packed is None or last is None:
        return []
    if given.get("K") is not None or given.get("bias") is not None or fusion.facts.rank(packed) != 3:
        return []
    builder = fusion.builder(node)
    found = _without_add(fusion.facts, builder, last) or _without_gemm(fusion.facts, builder, last)
    if found is None:
        return []
    graph.insert_before(node, builder.nodes)
    fusion.facts.learn(builder.nodes)
    _give(node, given | dict(zip(("Q", "bias"), found, strict=True)))
    return [last]


def _without_add(facts: Facts, builder: Builder, last: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """A projection and its bias, where `last` adds them."""
    for projected, bias in (last.inputs, last.inputs[::-1]) if last.op_type == "Add" else ():
        dims, ones = facts.dims(projected), facts.dims(bias)
        if projected is None or bias is None or dims is None or len(dims) != 3 or not ones or not _is_stored(bias):
            continue
        if ones[-1] == dims[-1] and dims[-1].value is not None and all(dim.value == 1 for dim in ones[:-1]):
            return projected, bias if len(ones) == 1 else builder.op("Reshape", bias, builder.ints([-1]))
    return None


def _without_gemm(facts: Facts, builder: Builder, last: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """As well, where a Gemm of all tokens has the bias and `last` reshapes what it gives."""
    gemm = _only(last.inputs[0]) if last.op_type == "Reshape" else None
    if gemm is None or gemm.op_type != "Gemm" or len(gemm.inputs) < 3 or gemm.inputs[2] is None:
        return None
    bias, width = gemm.inputs[2], (facts.dims(last.outputs[0]) or (None,))[-1]
    beta = gemm.attributes.get("beta")
    if width is None or width.value is None or facts.dims(bias) != (width,) or not _is_stored(bias):
        return None
    if (facts.dims(gemm.outputs[0]) or (None,))[-1] != width or (beta is not None and beta.as_float() != 1):
        return None
    given = {name: attribute.value for name, attribute in gemm.attributes.items() if name != "beta"}
    product = builder.op("Gemm", *gemm.inputs[:2], **given)
    kept = {name: attribute.value for name, attribute in last.attributes.items()}
    return builder.op("Reshape", product, last.inputs[1], **kept), bias


def add_apart(model: ir.Model) -> None:
    """Takes the biases of FlashAttention nodes away again: Q, K and V of three dimensions get them before.

    Operators for caches have none.
    """
    facts, names = Facts(model), Names(model)
    for node in [node for node in model.graph if node.op_identifier()[:2] == (schema.DOMAIN, schema.OP_TYPE)]:
        _add_apart(facts, Builder(names, node.name or schema.OP_TYPE), node)


def _add_apart(facts: Facts, builder: Builder, node: ir.Node) -> None:
    given = dict(zip(schema.INPUTS, node.inputs, strict=False))
    bias, graph = given.get("bias"), node.graph
    names = [name for name in "QKV" if given.get(name) is not None]
    dims = [facts.dims(given[name]) or () for name in names]
    widths = [shape[2].value for shape in dims if len(shape) == 3]
    if bias is None or graph is None or len(widths) < len(names) or None in widths:
        return
    parts = [bias]
    if len(names) == 3:
        sizes = builder.ints([width for width in widths if width is not None])
        made = builder.op("Split", bias, sizes, outputs=3, axis=0).producer()
        assert made is not None
        parts = list(made.outputs)
    for name, part in zip(names, parts, strict=True):
        given[name] = builder.op("Add", given[name], part)
    graph.insert_before(node, builder.nodes)
    _give(node, given | {"bias": None})


def _give(node: ir.Node, inputs: Mapping[str, ir.Value | None]) -> None:
    """The node's inputs by name. What is missing at the end is left out: tools take '' for a name."""
    values = [inputs.get(name) for name in schema.inputs_of(node.op_type)]
    while values[-1] is None:
        values.pop()
    node.resize_inputs(len(values))
    for index, value in enumerate(values):
        node.replace_input_with(index, value)


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
