"""Values seen as views of something upstream: layout operators, repetitions and numbers that multiply peeled off."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir
from flashonnx.export.layout.factors import View
from flashonnx.export.layout.steps import LAYOUT_OPERATORS, after, is_part, is_repetition
from flashonnx.export.values.facts import Facts

_LONGEST_CHAIN = 24


@dataclasses.dataclass(frozen=True)
class Peeled:
    """A view of an operand, the number that multiplies it, and the layout operators before its source."""

    view: View
    factor: float
    before: tuple[ir.Node, ...]


def peel(
    facts: Facts, value: ir.Value, *, scales: bool, parts: bool = False, narrow: ir.DataType | None = None
) -> Iterator[Peeled]:
    """The ways to write `value` as a scaled view of something upstream, deepest first.

    Walks through layout operators and, where `scales`, through products with a constant number
    (which commute with layout), where `parts`, through operators that take a part, and through a
    Cast from `narrow` to float32. The last one is `value` itself.
    """
    chain: list[ir.Value] = []
    while len(chain) < _LONGEST_CHAIN:
        node = value.producer()
        if node is None:
            break
        passes = not node.domain and (node.op_type in LAYOUT_OPERATORS or is_repetition(facts, node))
        passes = passes or (parts and is_part(facts, node))
        passes = passes or (narrow is not None and _widens(facts, node, narrow))
        scaled = scaling(facts, node) if scales else None
        source = node.inputs[0] if passes else scaled[0] if scaled is not None else None
        if source is None:
            break
        chain.append(value)
        value = source
    for depth in range(len(chain), -1, -1):
        view = View.identity(facts, value if depth == len(chain) else chain[depth])
        factor = 1.0
        for made in reversed(chain[:depth]):
            node = made.producer()
            assert node is not None
            scaled = scaling(facts, node)
            if scaled is not None:
                factor *= scaled[1]
            elif view is not None and node.op_type != "Cast":
                view = after(facts, view, made)
        if view is not None:
            before = [made.producer() for made in chain[depth:]]
            yield Peeled(view, factor, tuple(node for node in before if node is not None))


def _widens(facts: Facts, node: ir.Node, narrow: ir.DataType) -> bool:
    if node.op_type != "Cast" or node.domain or facts.dtype(node.inputs[0]) != narrow:
        return False
    return node.attributes["to"].as_int() == int(ir.DataType.FLOAT)


def scaling(facts: Facts, node: ir.Node) -> tuple[ir.Value, float] | None:
    """(x, c) when `node` computes x * c for a number c, without changing x's shape."""
    if node.domain or node.op_type not in ("Mul", "Div"):
        return None
    a, b = node.inputs
    for data, number, swapped in ((a, b, False), (b, a, True)):
        if data is None or number is None or (swapped and node.op_type == "Div"):
            continue
        factor = facts.uniform(number)
        if factor is None or facts.is_fixed(data):
            continue
        rank, other = facts.rank(data), facts.dims(number)
        if other is None or rank is None or len(other) > rank or any(d != 1 for d in other):
            continue
        if node.op_type == "Div":
            return (data, 1.0 / factor) if factor else None
        return data, factor
    return None
