"""Attention written out: product, scale, mask, softmax, product with V."""

from __future__ import annotations

import onnx_ir as ir
from flashonnx.export.facts import Facts
from flashonnx.export.products import Product, Roles, relabel, roles_of
from flashonnx.export.rules.base import Fusion, Rewrite, Rule
from flashonnx.export.rules.layouts import Operand, cheapest, exits, groupings, places
from flashonnx.export.rules.mask_inputs import MaskBuilder, ScoreAxes
from flashonnx.export.rules.scores import RefusalError, Scores, Weights, read_scores, read_weights
from flashonnx.export.sites import Candidate

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
        scores, weights = read_scores(facts, softmax), read_weights(facts, softmax)
        _check_single_use(scores, weights)
        roles = _roles(scores, weights)
        first, second = scores.product, weights.product
        named = relabel(second, weights.probabilities, first.labels)
        out_roles = roles_of_values(named, roles)
        assert named is not None
        query, key = _operands(scores, roles)
        value_is_right = second.left is weights.probabilities
        value = Operand(
            named.right if value_is_right else named.left,
            named.right_labels if value_is_right else named.left_labels,
        )
        dtype = _dtype(facts, query.value, key.value, value.value, second.node.outputs[0])
        if not scores.scale > 0:
            raise RefusalError(f"the scale {scores.scale} is not positive")
        dims = facts.dims(first.node.outputs[0])
        assert dims is not None
        reason: RefusalError | None = None
        for heads in groupings(facts, query, roles.batch):
            tensors = [
                places(
                    facts,
                    operand,
                    roles.batch,
                    sequence,
                    size,
                    heads,
                    is_query=operand is query,
                    scales=operand is not value,
                )
                for operand, sequence, size in (
                    (query, roles.query, roles.depth),
                    (key, roles.key, roles.depth),
                    (value, roles.key, out_roles),
                )
            ]
            if not all(tensors):
                continue
            ways_out = exits(
                facts,
                second.node.outputs[0],
                named.labels,
                roles.batch,
                roles.query,
                out_roles,
                heads,
                tensors[0][0].sequence,
                tensors[2][0].size,
            )
            try:
                chosen, way = cheapest(tensors, ways_out)
            except RefusalError as refusal:
                reason = refusal
                continue
            q, k, v = chosen
            if k.heads != v.heads:
                reason = RefusalError(f"K has {k.heads} heads and V has {v.heads}")
                continue
            builder = fusion.builder(softmax)
            axes = ScoreAxes(first.labels, dims, roles, heads)
            mask = MaskBuilder(
                facts, fusion.reducer, builder, axes, key.value, key.labels.index(roles.key), dtype
            ).build(scores.terms, weights.guarded)
            attributes: dict[str, object] = {
                "scale": scores.scale * q.factor * k.factor,
                "softcap": scores.softcap,
                "empty_row": mask.empty_row,
            }
            if not attributes["scale"] > 0:  # type: ignore[operator]
                raise RefusalError(f"the scale {attributes['scale']} is not positive")
            if q.rank == 3:
                attributes |= {"q_num_heads": q.heads.value, "kv_num_heads": k.heads.value}
                if None in attributes.values():
                    raise RefusalError("the number of heads is not a constant of the model")
            inputs = [place.build(builder) for place in chosen]
            output = fusion.attention(builder, [*inputs, mask.value], attributes, q.rank)
            result = way.build(builder, output)
            result.shape = way.replaces.shape
            nodes = (*scores.nodes, softmax, *weights.nodes)
            return Rewrite(builder, {way.replaces: result}, nodes, mask.remark, output)
        raise reason or RefusalError(
            "the shapes of Q, K and V do not show how batch and heads divide, or they differ; "
            "export with known ranks and static head counts, or run onnx.shape_inference first"
        )


def _check_axis(fusion: Fusion, softmax: ir.Node) -> None:
    rank = fusion.facts.rank(softmax.inputs[0])
    attribute = softmax.attributes.get("axis")
    axis = attribute.as_int() if attribute is not None else (-1 if fusion.opset >= 13 else 1)
    if rank is None:
        raise RefusalError("the rank of the scores is not known; run onnx.shape_inference first")
    if axis not in (-1, rank - 1):
        raise RefusalError(f"the softmax runs over axis {axis} of {rank}, not over the keys (the last axis)")


def _check_single_use(scores: Scores, weights: Weights) -> None:
    inner = {*scores.nodes, *weights.nodes}
    for node in scores.nodes:
        for value in node.outputs:
            if value.is_graph_output():
                raise RefusalError(f"the scores '{value.name}' are an output of the model")
            for use in value.uses():
                if use.node not in inner and use.node.op_type != "Softmax":
                    raise RefusalError(f"the scores are used by {use.node.op_type} '{use.node.name}' too")
    del weights


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


def roles_of_values(product: Product | None, roles: Roles) -> str:
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


def _dtype(facts: Facts, *values: ir.Value) -> ir.DataType:
    kinds = {kind for kind in map(facts.dtype, values) if kind is not None}
    if len(kinds) != 1:
        names = ", ".join(sorted(kind.name.lower() for kind in kinds)) or "unknown"
        raise RefusalError(f"Q, K, V and the output have different or unknown types ({names})")
    (kind,) = kinds
    if kind not in _FLOATS:
        raise RefusalError(f"{kind.name.lower()} attention; there are kernels for float32, float16 and bfloat16")
    return kind
