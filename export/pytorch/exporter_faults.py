"""What torch's exporter gets wrong in a graph, put right in it; what can be translated rightly is in `nodes`."""

from __future__ import annotations

import onnx_ir as ir


def spread_rotary_caches(model: ir.Model) -> None:
    """Gives every RotaryEmbedding caches of its input's batch size.

    At opset 23 the exporter makes RotaryEmbedding of what computes it, and keeps cos and sin of batch 1, which the
    formula broadcasts. The operator wants (batch, sequence, size / 2), and ONNX Runtime refuses others.
    https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html
    """
    for node in [n for n in model.graph.all_nodes() if (n.domain, n.op_type) == ("", "RotaryEmbedding")]:
        x = node.inputs[0]
        if x is None or (len(node.inputs) > 3 and node.inputs[3] is not None):  # positions that pick rows of the caches
            continue
        for i in (1, 2):
            cache = node.inputs[i]
            if cache is not None and not _batch(cache) == _batch(x) != "?":
                node.replace_input_with(i, _expanded(node, cache, x))


def _batch(value: ir.Value) -> str:
    dim = value.shape[0] if value.shape is not None and len(value.shape) else None
    return "?" if dim is None or str(dim) == "None" else str(dim)


def _expanded(node: ir.Node, cache: ir.Value, x: ir.Value) -> ir.Value:
    """`cache` with the first dimension of `x`, made before `node`."""
    base = f"{node.name}_{cache.name}"
    ones = ir.node("Constant", [], {"value_ints": [1, 1]}, name=f"{base}_ones")
    batch = ir.node("Shape", [x], {"start": 0, "end": 1}, name=f"{base}_batch")
    shape = ir.node("Concat", [batch.outputs[0], ones.outputs[0]], {"axis": 0}, name=f"{base}_shape")
    wide = ir.node("Expand", [cache, shape.outputs[0]], name=f"{base}_wide")
    made = (ones, batch, shape, wide)
    for each in made:
        each.outputs[0].name = f"{each.name}_out"
    wide.outputs[0].type = cache.type
    assert node.graph is not None
    node.graph.insert_before(node, made)
    return wide.outputs[0]
