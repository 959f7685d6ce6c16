"""Where attention is, whatever the rules can do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir
from flashonnx.export import schema
from flashonnx.export.facts import Facts
from flashonnx.export.products import is_product

# Operators that attention puts between its products and the softmax.
_BETWEEN = frozenset(
    [
        "Mul",
        "Div",
        "Add",
        "Sub",
        "Where",
        "Cast",
        "CastLike",
        "Tanh",
        "Reshape",
        "Transpose",
        "Unsqueeze",
        "Squeeze",
        "Expand",
        "Identity",
        "Dropout",
        "Neg",
        "Clip",
        "Max",
        "Min",
        "Pow",
        "Sqrt",
        "Slice",
        "Concat",
        "Pad",
        "ReduceMax",
        "ReduceSum",
        "Exp",
        "Relu",
        "BatchNormalization",
        "LayerNormalization",
        "Conv",
        "IsNaN",
        "Not",
        "Gather",
        "Split",
        "Softplus",
        "Sigmoid",
        "BiasSoftmax",
    ]
)
_DEPTH = 16

# com.microsoft operators that compute attention.
CONTRIBUTED = frozenset(
    [
        "Attention",
        "MultiHeadAttention",
        "GroupQueryAttention",
        "PackedAttention",
        "PackedMultiHeadAttention",
        "DecoderMaskedMultiHeadAttention",
        "DecoderMaskedSelfAttention",
        "DecoderAttention",
        "PagedAttention",
        "SparseAttention",
        "LongformerAttention",
        "QAttention",
        "QOrderedAttention",
        "QOrderedLongformerAttention",
    ]
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A place in the model that computes attention."""

    node: ir.Node
    kind: str
    where: str = ""

    @property
    def name(self) -> str:
        """What the report calls it."""
        outputs = [value.name for value in self.node.outputs if value.name]
        return self.where + (self.node.name or (outputs[0] if outputs else self.node.op_type))


def find(model: ir.Model, facts: Facts) -> list[Candidate]:
    """Every attention of `model`, its subgraphs and its functions, in order."""
    found = list(_in_graph(model.graph, facts, ""))
    for function in model.functions.values():
        if function.domain != schema.DOMAIN:
            found += _in_graph(function, facts, f"function {function.domain}::{function.name} / ")
    return found


def _in_graph(nodes: ir.Graph | ir.Function, facts: Facts, where: str) -> Iterator[Candidate]:
    for node in nodes:
        for attribute in node.attributes.values():
            inside = f"{where}{node.op_type} {node.name} {attribute.name} / "
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _in_graph(attribute.as_graph(), facts, inside)
            elif attribute.type == ir.AttributeType.GRAPHS:
                for graph in attribute.as_graphs():
                    yield from _in_graph(graph, facts, inside)
        kind = kind_of(node, facts)
        if kind is not None:
            yield Candidate(node, kind, where)


def kind_of(node: ir.Node, facts: Facts) -> str | None:
    """What kind of attention `node` is the centre of, if any."""
    if node.domain in ("", "ai.onnx"):
        if node.op_type == "Attention":
            return "Attention"
        if node.op_type == "Softmax" and is_between_products(node, facts):
            return "Softmax"
    elif node.domain == "com.microsoft":
        if node.op_type in CONTRIBUTED:
            return f"com.microsoft::{node.op_type}"
        if node.op_type == "BiasSoftmax" and is_between_products(node, facts):
            return "com.microsoft::BiasSoftmax"
    elif node.domain == schema.DOMAIN and node.op_type == schema.OP_TYPE:
        return schema.OP_TYPE
    return None


def is_between_products(softmax: ir.Node, facts: Facts) -> bool:
    """Whether `softmax` comes from a product of two activations and weighs a third."""
    return _before(softmax, facts) and _after(softmax, facts)


def _before(softmax: ir.Node, facts: Facts) -> bool:
    seen: set[ir.Node] = set()
    level = [value.producer() for value in softmax.inputs if value is not None]
    for _ in range(_DEPTH):
        following: list[ir.Node | None] = []
        for node in level:
            if node is None or node in seen:
                continue
            seen.add(node)
            if is_product(facts, node):
                return True
            if node.op_type in _BETWEEN:
                following += [value.producer() for value in node.inputs if value is not None]
        level = following
    return False


def _after(softmax: ir.Node, facts: Facts) -> bool:
    seen: set[ir.Node] = set()
    level = [softmax]
    for _ in range(_DEPTH):
        following: list[ir.Node] = []
        for node in level:
            for value in node.outputs:
                for use in value.uses():
                    if use.node in seen:
                        continue
                    seen.add(use.node)
                    if is_product(facts, use.node):
                        return True
                    if use.node.op_type in _BETWEEN:
                        following.append(use.node)
        level = following
    return False
