"""MatMul, FusedMatMul and Einsum as one thing: a product of two tensors with labelled axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir
from flashonnx.export.values.facts import Facts

Labels = tuple[str, ...]

# By domain: others may mean something else by the same name.
_OPERATORS = {("", "MatMul"), ("", "Gemm"), ("", "Einsum"), ("com.microsoft", "FusedMatMul")}


@dataclasses.dataclass(frozen=True)
class Product:
    """factor * sum over the contracted label of `left` times `right`."""

    node: ir.Node
    left: ir.Value
    right: ir.Value
    left_labels: Labels
    right_labels: Labels
    labels: Labels
    factor: float = 1.0


def product_of(facts: Facts, node: ir.Node | None) -> Product | None:
    """`node` as a product of two activations; None when it is not one or its ranks are unknown."""
    if node is None or len(node.inputs) < 2:
        return None
    left, right = node.inputs[:2]
    if left is None or right is None or facts.is_fixed(left) or facts.is_fixed(right):
        return None
    if (node.domain, node.op_type) not in _OPERATORS:
        return None
    if node.op_type == "Einsum":
        return _einsum(node, left, right) if len(node.inputs) == 2 else None
    return _matmul(facts, node, left, right)


def is_product(facts: Facts, node: ir.Node) -> bool:
    """Whether `node` multiplies two activations, of whatever rank."""
    return (
        (node.domain, node.op_type) in _OPERATORS
        and len(node.inputs) >= 2
        and not any(facts.is_fixed(value) for value in node.inputs[:2])
    )


def _matmul(facts: Facts, node: ir.Node, left: ir.Value, right: ir.Value) -> Product | None:
    ranks = facts.rank(left), facts.rank(right)
    if ranks[0] is None or ranks[0] != ranks[1] or ranks[0] < 2:
        return None
    flags = {name: attribute.value for name, attribute in node.attributes.items()}
    if flags.get("transBatchA") or flags.get("transBatchB"):
        return None
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        return None
    batch = tuple(f"b{index}" for index in range(ranks[0] - 2))
    left_labels = ("d", "q") if flags.get("transA") else ("q", "d")
    right_labels = ("k", "d") if flags.get("transB") else ("d", "k")
    factor = float(flags.get("alpha", 1.0))
    return Product(node, left, right, batch + left_labels, batch + right_labels, (*batch, "q", "k"), factor)


def _einsum(node: ir.Node, left: ir.Value, right: ir.Value) -> Product | None:
    equation = node.attributes["equation"].as_string().replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    inputs, output = equation.split("->")
    a, b = inputs.split(",")
    if any(len(set(labels)) != len(labels) for labels in (a, b, output)):
        return None
    return Product(node, left, right, tuple(a), tuple(b), tuple(output))


@dataclasses.dataclass(frozen=True)
class Roles:
    """Which label of a product of queries and keys plays which part."""

    batch: Labels
    query: str
    key: str
    depth: str
    query_is_left: bool


def roles_of(product: Product, key_axis: int) -> Roles | None:
    """The roles in a product whose output is normalised over `key_axis`."""
    key = product.labels[key_axis]
    left, right = set(product.left_labels), set(product.right_labels)
    if (key in left) == (key in right):
        return None
    query_is_left = key in right
    keys, queries = (right, left) if query_is_left else (left, right)
    only_queries = [label for label in product.labels if label in queries - keys]
    contracted = [label for label in queries & keys if label not in product.labels]
    batch = tuple(label for label in product.labels if label in queries & keys)
    stray = (queries | keys) - set(product.labels) - set(contracted)
    if len(only_queries) != 1 or len(contracted) != 1 or stray:
        return None
    if keys - queries != {key}:
        return None
    return Roles(batch, only_queries[0], key, contracted[0], query_is_left)


def relabel(product: Product, tensor: ir.Value, labels: Sequence[str]) -> Product | None:
    """`product` with the axes of its operand `tensor` named `labels`, and the rest to match."""
    for own in (product.left_labels, product.right_labels):
        operand = product.left if own is product.left_labels else product.right
        if operand is tensor and len(own) == len(labels):
            names = dict(zip(own, labels, strict=True))
            taken = set(names.values())
            everything = (*product.left_labels, *product.right_labels)
            for label in everything:
                if label not in names:
                    fresh = label
                    while fresh in taken:
                        fresh += "'"
                    names[label] = fresh
                    taken.add(fresh)
            return dataclasses.replace(
                product,
                left_labels=tuple(names[label] for label in product.left_labels),
                right_labels=tuple(names[label] for label in product.right_labels),
                labels=tuple(names[label] for label in product.labels),
            )
    return None
