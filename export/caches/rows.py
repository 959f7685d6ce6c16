"""What else looks from one new token at another. Those of an uneven batch are padded on the right."""

from __future__ import annotations

import onnx_ir as ir
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts
from flashonnx.export.values.shape_rules import axes_of, normal

_ALONG_AXIS = {"Softmax": -1, "LogSoftmax": -1, "ArgMax": 0, "ArgMin": 0, "Gather": 0, "Concat": 0, "Split": 0}
_ATTENTION = frozenset(["Attention", "FlashAttention", "MultiHeadAttention"])


def across(model: ir.Model, facts: Facts, count: Dim, joined: set[ir.Value]) -> ir.Node | None:
    """An operator that takes the axis of new tokens as a whole, of the common ones: a mean, the last token's logits.

    `joined` are past and new keys.
    """
    if count.value is not None:
        return None  # all sentences have as many
    for node in model.graph.all_nodes():
        if joined.isdisjoint(node.outputs) and _takes_tokens(facts, node, count):
            return node
    return None


def _takes_tokens(facts: Facts, node: ir.Node, count: Dim) -> bool:
    first, op = node.inputs[0] if node.inputs else None, node.op_type
    dims = facts.dims(first)
    kind = facts.dtype(first) if first is not None else None
    if first is None or dims is None or kind is None:
        return False
    if not kind.is_floating_point() and (op != "Slice" or len(dims) != 2 or dims[0] == 1):
        return False
    if op in _ATTENTION:
        keys = facts.dims(node.inputs[1]) if len(node.inputs) > 1 else None
        causal = "is_causal" in node.attributes and node.attributes["is_causal"].as_int()
        return not causal and keys is not None and len(keys) > 2 and count == keys[-2 if len(keys) == 4 else 1]
    if node.domain:
        return False
    if op == "MatMul":
        return len(dims) > 1 and dims[-1] == count
    if op == "Conv":
        return count in dims[2:]
    if op.startswith("Reduce") or op == "CumSum":
        axes = axes_of(facts, node) if op != "CumSum" else _constants(facts, node.inputs[1])
        return count in (dims if not axes else [dims[normal(int(a), len(dims))] for a in axes])
    if op == "Slice":
        after = facts.dims(node.outputs[0])
        steps = facts.constant(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else None
        backwards = steps is not None and any(int(step) != 1 for step in steps)
        return count in dims and (after is None or backwards or after != dims) and _cuts(facts, node, dims, count)
    if op in _ALONG_AXIS:
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else _ALONG_AXIS[op]
        joined = [facts.dims(value) for value in node.inputs] if op == "Concat" else [dims]
        return any(x is not None and len(x) and x[normal(axis, len(x))] == count for x in joined)
    return False


def _constants(facts: Facts, value: ir.Value | None) -> list[int]:
    """The numbers of a constant; none of what is none."""
    given = facts.constant(value) if value is not None else None
    return [] if given is None else [int(x) for x in given.flat]


def _cuts(facts: Facts, node: ir.Node, dims: tuple[Dim, ...], count: Dim) -> bool:
    """Whether a Slice is along the new tokens."""
    given = facts.constant(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] is not None else None
    axes = range(len(dims)) if given is None else [normal(int(axis), len(dims)) for axis in given]
    return any(dims[axis] == count for axis in axes)
