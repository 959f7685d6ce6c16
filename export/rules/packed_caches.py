"""Attention beside past keys with Q, K and V in one tensor, where they are cut out of one: nothing is cut then."""

from __future__ import annotations

import onnx_ir as ir
from flashonnx.export.operator import schema
from flashonnx.export.operator.cache_schema import KV_CACHE
from flashonnx.export.rules.base import Fusion
from flashonnx.export.values.facts import Facts


def uncut(fusion: Fusion, node: ir.Node) -> list[ir.Node]:
    """Gives a node the tensor whose last dimension is its Q, K and V side by side.

    Without a past, `arrange` does it.

    Returns:
        The nodes that cut it, which this one uses no more.
    """
    tensors = [value for value in node.inputs[:3] if value is not None]
    if node.op_type not in (schema.OP_TYPE, KV_CACHE) or len(tensors) < 3 or "q_num_heads" not in node.attributes:
        return []
    given = dict(zip(schema.inputs_of(node.op_type), node.inputs, strict=False))
    if node.op_type == schema.OP_TYPE and given.get("past_key") is None:
        return []
    facts = fusion.facts
    if facts.rank(tensors[0]) != (2 if given.get("cu_seqlens_q") is not None else 3):
        return []
    source, ends = _source(tensors[0]), [0]
    for value in tensors:
        dims = facts.dims(value)
        width = dims[-1].value if dims is not None else None
        if source is None or _source(value) is not source or width is None or _start(facts, value) != ends[-1]:
            return []
        ends.append(ends[-1] + width)
    whole, layout = facts.dims(source), "gqa"
    if whole is None or whole[-1].value != ends[-1]:
        return []
    if node.op_type == schema.OP_TYPE:  # which has no cache to tell the size of V
        q_heads, kv_heads = (node.attributes[name].as_int() for name in ("q_num_heads", "kv_num_heads"))
        size = ends[1] // q_heads
        if ends[2:] != [(q_heads + kv_heads) * size, (q_heads + 2 * kv_heads) * size]:
            return []
        layout = "3hd" if q_heads == kv_heads else "gqa"
    for index, packed in enumerate((source, None, None)):
        node.replace_input_with(index, packed)
    node.attributes["qkv_layout"] = ir.AttrString("qkv_layout", layout)
    return [made for value in tensors if (made := value.producer()) is not None]


def _source(value: ir.Value) -> ir.Value | None:
    node = value.producer()
    return node.inputs[0] if node is not None and not node.domain and node.op_type in ("Split", "Slice") else None


def _start(facts: Facts, value: ir.Value) -> int | None:
    """Where in its source's last dimension it begins, if that is what is cut."""
    node, rank = value.producer(), facts.rank(value)
    if node is None or rank is None:
        return None
    if node.op_type == "Split":
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        if axis not in (rank - 1, -1):
            return None
        before = [facts.dims(other) for other in node.outputs[: list(node.outputs).index(value)]]
        widths = [dims[-1].value for dims in before if dims is not None]
        known = [width for width in widths if width is not None]
        return sum(known) if len(known) == len(before) else None
    starts, _, axes, steps = ([*node.inputs[1:], None, None, None, None])[:4]
    start, cut, step = (_number(facts, each) for each in (starts, axes, steps))
    is_last = cut in (rank - 1, -1)
    return start if is_last and (steps is None or step == 1) and start is not None and start >= 0 else None


def _number(facts: Facts, value: ir.Value | None) -> int | None:
    """The only one of a vector."""
    numbers = facts.ints(value)
    return numbers[0].value if numbers is not None and len(numbers) == 1 else None
