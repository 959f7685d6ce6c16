"""Guards for the row of a query without keys: zeros behind the softmax, or even weights by what goes into it."""

from __future__ import annotations

import math

import onnx_ir as ir
from flashonnx.export.values.facts import Facts


def find_guard(
    facts: Facts, softmax: ir.Node, value: ir.Value, users: list[ir.Node]
) -> tuple[ir.Node, list[ir.Node]] | None:
    """The guard among the users of the probabilities `value`: its Where, and the nodes of its condition.

    Two kinds: Where(IsNaN(value), 0, value), and Where(no score of the row is above -inf, 0, value).
    """
    wheres = [node for node in users if node.op_type == "Where" and not node.domain]
    others = [node for node in users if node not in wheres]
    if len(wheres) != 1:
        return None
    condition, fill, kept = wheres[0].inputs
    if kept is not value or condition is None or facts.uniform(fill) != 0.0:
        return None
    test = condition.producer()
    if test is None or condition.is_graph_output() or len(condition.uses()) != 1:
        return None
    if test.op_type == "IsNaN" and test.inputs[0] is value and others == [test]:
        return wheres[0], [test]
    if others:
        return None
    nodes = _no_key_test(facts, softmax, condition)
    return (wheres[0], nodes) if nodes is not None else None


def _no_key_test(facts: Facts, softmax: ir.Node, condition: ir.Value) -> list[ir.Node] | None:
    """The nodes of a test that every score of a row is -inf: of aten's safe softmax, decomposed, or of our bodies."""
    nodes: list[ir.Node] = []

    def step(value: ir.Value | None, *op_types: str) -> ir.Node | None:
        """The node of one of these types that makes `value`, past casts."""
        for _ in range(4):
            node = value.producer() if value is not None else None
            if node is None or node.domain:
                return None
            nodes.append(node)
            if node.op_type in op_types:
                return node
            if node.op_type not in ("Cast", "Identity"):
                return None
            value = node.inputs[0]
        return None

    outer = step(condition, "Not", "ReduceMin", "Equal")
    if outer is not None and outer.op_type == "Equal":  # the greatest score == -inf
        return [outer, *top] if (top := _top_test(facts, outer, softmax.inputs[0])) else None
    if outer is not None and outer.op_type == "Not":  # not any(not score == -inf)
        reduction = step(outer.inputs[0], "ReduceMax")
        inner = step(reduction.inputs[0], "Not") if reduction is not None else None
    else:  # all(score == -inf)
        reduction = inner = outer
    equal = step(inner.inputs[0], "Equal") if inner is not None else None
    if reduction is None or equal is None or not over_keys(facts, reduction):
        return None
    scores, number = equal.inputs
    return nodes if scores is softmax.inputs[0] and facts.uniform(number) == -math.inf else None


def find_even(facts: Facts, node: ir.Node) -> list[ir.Node] | None:
    """The nodes of the condition of a Where that puts one number in the place of a row of scores that are all -inf."""
    condition, fill, scores = node.inputs
    test = condition.producer() if condition is not None else None
    number = facts.uniform(fill)
    if test is None or test.domain or test.op_type != "Equal" or len(test.outputs[0].uses()) != 1:
        return None
    if number is None or not math.isfinite(number) or test.outputs[0].is_graph_output():
        return None
    top = _top_test(facts, test, scores)
    return [test, *top] if top else None


def _top_test(facts: Facts, equal: ir.Node, scores: ir.Value | None) -> list[ir.Node]:
    """The reduction, if `equal` compares the greatest of each row of `scores` with -inf; it has no other user."""
    for value, number in (equal.inputs, equal.inputs[::-1]):
        top = value.producer() if value is not None else None
        if top is None or top.domain or top.op_type != "ReduceMax" or top.inputs[0] is not scores:
            continue
        if facts.uniform(number) == -math.inf and over_keys(facts, top) and len(top.outputs[0].uses()) == 1:
            return [top]
    return []


def over_keys(facts: Facts, node: ir.Node) -> bool:
    """Whether a reduction is over the last axis, which it keeps."""
    keeps = node.attributes["keepdims"].as_int() if "keepdims" in node.attributes else 1
    rank = facts.rank(node.inputs[0])
    if "axes" in node.attributes:
        axes = list(node.attributes["axes"].as_ints())
    else:
        array = facts.constant(node.inputs[1]) if len(node.inputs) > 1 else None
        axes = [int(axis) for axis in array.reshape(-1)] if array is not None else []
    return bool(keeps) and len(axes) == 1 and rank is not None and axes[0] in (-1, rank - 1)
