"""Attention written out: product, scale, mask, softmax, product with V."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir
from flashonnx.export.layout.products import Product, Roles, relabel, roles_of
from flashonnx.export.layout.steps import LAYOUT_OPERATORS
from flashonnx.export.model.build import Builder, called
from flashonnx.export.rules import scales
from flashonnx.export.rules.arrange import Arrangement, arrange
from flashonnx.export.rules.base import Fusion, Rewrite, Rule
from flashonnx.export.rules.layouts import Operand, Tensors
from flashonnx.export.rules.mask_inputs import MaskBuilder, ScoreAxes, full_lengths
from flashonnx.export.rules.operator_site import name_of
from flashonnx.export.rules.score_spaces import ScoreSpaces
from flashonnx.export.rules.scores import RefusalError, Scores, Term, Weights, read_scores, read_weights
from flashonnx.export.rules.sinks import sink_input
from flashonnx.export.rules.sizes import shape_users
from flashonnx.export.sites.finder import Candidate
from flashonnx.export.values.facts import Facts

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class DecomposedAttention(Rule):
    """Softmax between two products of activations, walked from the softmax in both directions.

    Accepts: MatMul, FusedMatMul or Einsum of ranks 3 and 4 in float32, float16 or bfloat16; scale
    as Mul or Div by a number, constant or computed from static sizes, on Q, K, K^T or the scores;
    a softcap (Div, Tanh, Mul); masks as Add, Sub or Where; Casts, an inference Dropout and an IsNaN
    guard around the softmax; K and V repeated from fewer heads; any Transpose, Reshape, Squeeze,
    Unsqueeze or Expand whose effect on the layout is proved from the shapes. Emits the
    three-dimensional form where the tensors lie so, else the four-dimensional one.
    """

    kinds = ("Softmax",)

    def rewrite(self, fusion: Fusion, candidate: Candidate) -> Rewrite:
        softmax, facts = candidate.node, fusion.facts
        _check_axis(fusion, softmax)
        scores = read_scores(facts, softmax)
        weights = read_weights(facts, softmax, scores.sink, scores.leads)
        _check_single_use(scores, softmax, weights)
        roles = _roles(scores, weights)
        first, second = scores.product, weights.product
        named = relabel(second, weights.probabilities, first.labels)
        value_size = _value_label(named, roles)
        if second.factor != 1.0:
            raise RefusalError(f"the product with V is multiplied by {second.factor}")
        assert named is not None
        query, key = _operands(scores, roles)
        builder = fusion.builder(softmax)
        query = _with_rows(facts, builder, scores, query)
        value_is_right = second.left is weights.probabilities
        value = Operand(
            named.right if value_is_right else named.left,
            named.right_labels if value_is_right else named.left_labels,
        )
        dtype = _dtype(facts, query, key, value.value, second.node.outputs[0])
        if facts.dtype(query.value) == ir.DataType.FLOAT != dtype:
            query, key = _narrow(facts, query, dtype), _narrow(facts, key, dtype)
        output = Operand(second.node.outputs[0], named.labels)
        tensors = Tensors(query, key, value, output, roles, value_size)
        found = _between_casts(facts, tensors) if dtype == ir.DataType.FLOAT else None
        if found is not None:
            dtype = facts.dtype(found.query.source) or dtype
        else:
            found = arrange(facts, tensors, scales=True)
        scale = scores.scale * found.query.factor * found.key.factor
        if not scales.is_possible(scale):
            why = "not positive" if not scale > 0 else "no number of float32"
            raise RefusalError(f"the scale {scale} is {why}")
        terms, axes = _terms(facts, scores, weights, roles, found, builder)
        layout = found.layout_attributes()
        alike = (softmax.graph, terms, axes, dtype, weights.guarded, scores.even)
        mask = fusion.masks.get(alike)
        if mask is None:
            masks = MaskBuilder(facts, fusion.reducer, builder, axes, key, dtype)
            mask = masks.build(terms, weights.guarded, scores.even)
        attributes = {
            "scale": scale,
            "softcap": scores.softcap,
            "empty_row": mask.empty_row if scores.sink is None else "zero",  # the sink takes it all
            **mask.window.attributes(),
            **layout,
        }
        inputs = [*_cast(facts, builder, found.inputs(builder), dtype), mask.value]
        lengths = mask.lengths
        if mask.from_last:
            assert inputs[0] is not None and inputs[1] is not None
            lengths = fusion.masks.get((alike, found.rank)) or full_lengths(builder, inputs[0], inputs[1], found.rank)
        inputs += [None, None, lengths]
        if scores.sink is not None:
            inputs.append(sink_input(facts, builder, scores.sink, axes.labels, axes.roles, found.heads.heads.value))
        made = fusion.attention(builder, inputs, attributes, found.rank)
        inner = [value for node in (*scores.nodes, softmax, *weights.nodes[:-1]) for value in node.outputs]
        replaced = found.replaced(facts, builder, made, inner)
        asking = (node for old in replaced if (node := old.producer()) is not None)
        nodes = (*scores.nodes, softmax, *weights.nodes, *asking)
        fusion.masks[alike] = mask
        fusion.masks[alike, found.rank] = lengths
        return Rewrite(builder, replaced, nodes, mask.remark, made)


def _terms(
    facts: Facts, scores: Scores, weights: Weights, roles: Roles, found: Arrangement, builder: Builder
) -> tuple[tuple[Term, ...], ScoreAxes]:
    """What changes the scores by position, and the scores' axes there."""
    product = scores.product
    dims = facts.dims(product.node.outputs[0])
    assert dims is not None
    keys_agree = found.key.sequence == found.value.sequence
    if not scores.layouts and not weights.layouts:
        return scores.terms, ScoreAxes(product.labels, dims, roles, found.heads, keys_agree)
    if scores.sink is not None:
        raise RefusalError("the scores are reshaped before a column is put beside them")
    spaces = ScoreSpaces(facts, scores, weights)
    spaces.check_softmax(roles.key)
    named = spaces.named(roles, found.heads)
    if named is None:
        raise RefusalError("the scores are reshaped before the softmax to something else than batch, heads and places")
    view, labels, roles = named
    if labels != product.labels and len(roles.batch) == 2 and view.dims[:2] != (found.heads.batch, found.heads.heads):
        raise RefusalError("the scores are reshaped to other heads than those of Q before the softmax")
    operands = [place.source for place in (found.query, found.key, found.value)]
    terms = tuple(spaces.bring(term, view, builder, operands) for term in scores.terms)
    return terms, ScoreAxes(labels, view.dims, roles, found.heads, keys_agree)


def _check_axis(fusion: Fusion, softmax: ir.Node) -> None:
    rank = fusion.facts.rank(softmax.inputs[0])
    attribute = softmax.attributes.get("axis")
    axis = attribute.as_int() if attribute is not None else (-1 if fusion.opset >= 13 else 1)
    if rank is None:
        raise RefusalError("the rank of the scores is not known; run onnx.shape_inference first")
    if axis not in (-1, rank - 1):
        raise RefusalError(f"the softmax runs over axis {axis} of {rank}, not over the keys (the last axis)")


def _check_single_use(scores: Scores, softmax: ir.Node, weights: Weights) -> None:
    inner = {*scores.nodes, softmax, *weights.nodes}
    for node in scores.nodes:
        for value in node.outputs:
            if value.is_graph_output():
                raise RefusalError(f"the scores '{value.name}' are an output of the model")
            for use in value.uses():
                if use.node not in inner and use.node not in shape_users(value):
                    raise RefusalError(f"the scores are used by {use.node.op_type} '{called(use.node)}' too")


def _roles(scores: Scores, weights: Weights) -> Roles:
    roles = roles_of(scores.product, -1)
    if roles is None:
        raise RefusalError("the first product is not queries times keys, contracted over one dimension")
    return roles


def _operands(scores: Scores, roles: Roles) -> tuple[Operand, Operand]:
    product = scores.product
    left = Operand(product.left, product.left_labels)
    right = Operand(product.right, product.right_labels)
    return (left, right) if roles.query_is_left else (right, left)


def _with_rows(facts: Facts, builder: Builder, scores: Scores, query: Operand) -> Operand:
    """Q multiplied by the numbers that multiply the rows of its scores."""
    rows = scores.rows
    if rows is None:
        return query
    dims, wide, sizes = (facts.dims(value) for value in (query.value, scores.product.node.outputs[0], rows))
    ends_alike = query.labels[:-1] == scores.product.labels[:-1]
    if dims is None or wide is None or sizes is None or not ends_alike or dims[:-1] != wide[:-1]:
        raise RefusalError(f"'{rows.name}' multiplies rows of scores whose axes are not those of Q")
    dtype, theirs = facts.dtype(query.value), facts.dtype(rows)
    if dtype is None or dtype != theirs:
        raise RefusalError(
            f"'{rows.name}' is {name_of(theirs)} and multiplies rows of scores whose Q is {name_of(dtype)}"
        )
    value = builder.op("Mul", query.value, rows, dtype=dtype)
    facts.learn(builder.nodes)
    return dataclasses.replace(query, value=value)


def _value_label(product: Product | None, roles: Roles) -> str:
    """The label of V's own axis in the second product.

    Raises:
        RefusalError: it is not probabilities times V, contracted over the keys.
    """
    if product is not None:
        labels = [*product.left_labels, *product.right_labels]
        own = [label for label in product.labels if labels.count(label) == 1]
        own = [label for label in own if label != roles.query]
        gone = {label for label in labels if label not in product.labels}
        expected = {*roles.batch, roles.query, *own}
        shared = all(labels.count(label) == 2 for label in roles.batch)
        if len(own) == 1 and shared and gone == {roles.key} and set(product.labels) == expected:
            return own[0]
    raise RefusalError("the probabilities are not multiplied with V over the keys")


def _dtype(facts: Facts, query: Operand, key: Operand, *others: ir.Value) -> ir.DataType:
    """The type of the attention, which is that of V and of the output.

    Q and K may have been cast to float32 from it, as the operator adds up in float32 anyhow, or may
    be narrower than float32 and be cast to it.
    """
    kinds = {kind for kind in map(facts.dtype, others) if kind is not None}
    both = {kind for kind in (facts.dtype(query.value), facts.dtype(key.value)) if kind is not None}
    if len(kinds) == len(both) == 1 and ir.DataType.FLOAT in kinds | both and kinds | both <= {*_FLOATS}:
        return kinds.pop()
    kinds |= both
    if len(kinds) != 1:
        names = ", ".join(sorted(kind.name.lower() for kind in kinds)) or "unknown"
        raise RefusalError(f"Q, K, V and the output have different or unknown types ({names})")
    (kind,) = kinds
    if kind not in _FLOATS:
        raise RefusalError(f"{kind.name.lower()} attention; there are kernels for float32, float16 and bfloat16")
    return kind


def _between_casts(facts: Facts, tensors: Tensors) -> Arrangement | None:
    """That of a type of 16 bits, where Q, K and V were all cast to float32 from it, and the output is cast to it.

    An attention of that type has float32 inside, too.
    """
    value, node = tensors.output.value, None
    while node is None or node.op_type != "Cast":
        uses = tuple(value.uses())
        node = uses[0].node if len(uses) == 1 and not value.is_graph_output() else None
        if node is None or node.domain or not (node.op_type == "Cast" or node.op_type in LAYOUT_OPERATORS):
            return None
        value = node.outputs[0]
    kind = facts.dtype(value)
    if kind not in _FLOATS or kind == ir.DataType.FLOAT:
        return None
    names = ("query", "key", "value", "output")
    narrow = {name: dataclasses.replace(getattr(tensors, name), narrow=kind) for name in names}
    try:
        return arrange(facts, dataclasses.replace(tensors, **narrow), scales=True)
    except RefusalError:
        return None


def _narrow(facts: Facts, operand: Operand, dtype: ir.DataType) -> Operand:
    """Q or K of float32 as what was cast to it."""
    result = dataclasses.replace(operand, narrow=dtype)
    if next(result.peel(facts, scales=True), None) is None:
        raise RefusalError(
            f"'{operand.value.name}' is float32 and V {dtype.name.lower()}; "
            "Q, K, V have different types, cast them to one"
        )
    return result


def _cast(
    facts: Facts, builder: Builder, inputs: Sequence[ir.Value | None], dtype: ir.DataType
) -> list[ir.Value | None]:
    """Q, K and V in one type."""
    return [
        builder.op("Cast", value, dtype=dtype, to=dtype)
        if value is not None and (facts.dtype(value) or dtype) != dtype
        else value
        for value in inputs
    ]
