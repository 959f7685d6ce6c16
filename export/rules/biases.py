"""The bias of Q, K and V: an Add before an attention becomes its own input, and the other way round.

Kernels that take it may spare a pass over the projections.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir
from flashonnx.export.model.build import Builder, Names
from flashonnx.export.operator import schema
from flashonnx.export.rules.base import Fusion
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Dims, Facts


def take(fusion: Fusion, node: ir.Node) -> list[ir.Node]:
    """Gives a FlashAttention node the bias of its projections.

    It is a constant that an Add or a Gemm adds to a tensor that has all three, or a vector whose parts three Adds have.

    Returns:
        What added it, which nothing uses any more.
    """
    graph, given = node.graph, dict(zip(schema.INPUTS, node.inputs, strict=False))
    if node.op_type != schema.OP_TYPE or graph is None or given.get("bias") is not None:
        return []
    builder = fusion.builder(node)
    before = [value for name in "QKV" if (value := given.get(name)) is not None]
    found = _of_three(fusion.facts, given)
    last = only(before[0]) if len(before) == 1 else None
    if last is not None:
        made = _without_add(fusion.facts, builder, last) or _without_gemm(fusion.facts, builder, last)
        found = dict(zip(("Q", "bias"), made, strict=True)) if made is not None else None
    if found is None:
        return []
    graph.insert_before(node, builder.nodes)
    fusion.facts.learn(builder.nodes)
    give(node, given | found)
    return [adding for value in before if (adding := value.producer()) is not None]


def _of_three(facts: Facts, given: Mapping[str, ir.Value | None]) -> dict[str, ir.Value | None] | None:
    """Q, K and V without the parts of one vector that are added to them, and that vector; None if it is not so."""
    found: dict[str, ir.Value | None] = {}
    parts: list[ir.Value] = []
    for name in "QKV":
        last = only(given.get(name))
        for projected, part in (last.inputs, last.inputs[::-1]) if last is not None and last.op_type == "Add" else ():
            vector = _vector(facts, part, facts.dims(projected)) if part is not None else None
            if vector is not None and _is_cut(vector):
                found[name] = projected
                parts.append(vector)
                break
    whole = whole_of(facts, parts)
    return found | {"bias": whole} if len(found) == 3 and whole is not None else None


def whole_of(facts: Facts, parts: Sequence[ir.Value]) -> ir.Value | None:
    """The vector whose parts these are, in their order; None if there is none."""
    node = parts[0].producer() if parts and _is_cut(parts[0]) else None
    if node is None or facts.rank(node.inputs[0]) != 1:
        return None
    return node.inputs[0] if list(node.outputs) == list(parts) else None


def _is_cut(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Split" and not node.domain


def _vector(facts: Facts, value: ir.Value, like: Dims | None) -> ir.Value | None:
    """A vector with a number for every head's features, added to `like`; None where fewer are spread over them.

    It is the value, or what a Reshape makes a row for each head of, as (heads, 1, size) is added to 4 dimensions.
    """
    node, dims = value.producer(), facts.dims(value)
    if dims is None or like is None or len(like) not in (3, 4):
        return None
    if len(like) == 3:
        return value if dims == like[2:] else None
    is_row = node is not None and node.op_type == "Reshape" and not node.domain
    return node.inputs[0] if node is not None and is_row and dims == (like[1], Dim.of(1), like[3]) else None


def _without_add(facts: Facts, builder: Builder, last: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """A projection and its bias, where `last` adds them."""
    for projected, bias in (last.inputs, last.inputs[::-1]) if last.op_type == "Add" else ():
        dims, ones = facts.dims(projected), facts.dims(bias)
        if projected is None or bias is None or dims is None or not ones or not is_stored(bias):
            continue
        own = dims[2:]  # of one token: all together, or each of Q, K, V and of the heads
        before, last_ones = ones[: -len(own)], ones[-len(own) :]
        if last_ones == own and all(dim.value is not None for dim in own) and all(dim == 1 for dim in before):
            return projected, _flat(facts, builder, bias)
    return None


def _flat(facts: Facts, builder: Builder, bias: ir.Value) -> ir.Value:
    node = bias.producer()
    if node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        bias = node.inputs[0]
    return bias if facts.rank(bias) == 1 else builder.op("Reshape", bias, builder.ints([-1]))


def _without_gemm(facts: Facts, builder: Builder, last: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """As well, where a Gemm of all tokens has the bias and `last` reshapes what it gives."""
    gemm = only(last.inputs[0]) if last.op_type == "Reshape" else None
    if gemm is None or gemm.op_type != "Gemm" or len(gemm.inputs) < 3 or gemm.inputs[2] is None:
        return None
    bias, width = gemm.inputs[2], (facts.dims(last.outputs[0]) or (None,))[-1]
    beta = gemm.attributes.get("beta")
    if width is None or width.value is None or facts.dims(bias) != (width,) or not is_stored(bias):
        return None
    if (facts.dims(gemm.outputs[0]) or (None,))[-1] != width or (beta is not None and beta.as_float() != 1):
        return None
    given = {name: attribute.value for name, attribute in gemm.attributes.items() if name != "beta"}
    product = builder.op("Gemm", *gemm.inputs[:2], **given)
    kept = {name: attribute.value for name, attribute in last.attributes.items()}
    return builder.op("Reshape", product, last.inputs[1], **kept), bias


def add_apart(model: ir.Model) -> None:
    """Takes the biases of FlashAttention nodes away again: Q, K and V get them before.

    Operators for caches have none.
    """
    facts, names = Facts(model), Names(model)
    for node in [node for node in model.graph if node.op_identifier()[:2] == (schema.DOMAIN, schema.OP_TYPE)]:
        _add_apart(facts, Builder(names, node.name or schema.OP_TYPE), node)


def _add_apart(facts: Facts, builder: Builder, node: ir.Node) -> None:
    given = dict(zip(schema.INPUTS, node.inputs, strict=False))
    bias, graph = given.get("bias"), node.graph
    names = [name for name in "QKV" if given.get(name) is not None]
    rows = [_row(facts.dims(given[name])) for name in names]
    if bias is None or graph is None or any(row is None for row in rows):
        return
    shapes = [row for row in rows if row is not None]
    parts = [bias]
    if len(names) == 3:
        made = builder.op("Split", bias, builder.ints([math.prod(row) for row in shapes]), outputs=3, axis=0).producer()
        assert made is not None
        parts = list(made.outputs)
    for name, part, row in zip(names, parts, shapes, strict=True):
        given[name] = builder.op(
            "Add", given[name], builder.op("Reshape", part, builder.ints(row)) if row[1:] else part
        )
    graph.insert_before(node, builder.nodes)
    give(node, given | {"bias": None})


def _row(dims: Dims | None) -> list[int] | None:
    """The shape in which a bias is added to Q, K, V or all three of `dims`; None where it is not known."""
    if dims is None:
        return None
    own = (dims[1], Dim.of(1), dims[3]) if len(dims) == 4 else dims[2:]  # heads before tokens, or behind
    row = [dim.value for dim in own]
    return [size for size in row if size is not None] if row and None not in row else None


def give(node: ir.Node, inputs: Mapping[str, ir.Value | None]) -> None:
    """The node's inputs by name. What is missing at the end is left out: tools take '' for a name."""
    values = [inputs.get(name) for name in schema.inputs_of(node.op_type)]
    while values[-1] is None:
        values.pop()
    node.resize_inputs(len(values))
    for index, value in enumerate(values):
        node.replace_input_with(index, value)


def is_stored(value: ir.Value | None) -> bool:
    """Whether the model has the numbers: what is made of them by more than these would be made at every run."""
    node = value.producer() if value is not None else None
    if node is None:
        return value is not None and value.is_initializer() and not value.is_graph_input()
    if node.domain:
        return False
    if node.op_type in ("Identity", "Transpose", "Reshape", "Split"):
        return is_stored(node.inputs[0])
    return node.op_type == "Constant" or (node.op_type == "Concat" and all(map(is_stored, node.inputs)))


def only(value: ir.Value | None) -> ir.Node | None:
    """What makes `value`, if nobody but one node uses it."""
    if value is None or value.is_graph_output() or len(tuple(value.uses())) != 1:
        return None
    node = value.producer()
    return node if node is not None and not node.domain else None
