"""What torch's exporter gets wrong in a graph, put right in it; what can be translated rightly is in `nodes`."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

# Operators that onnxscript's optimizer takes away beside a number that is near this one, as `Constant` of its patterns
# has these tolerances.
_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
_SAME = ("Cast", "CastLike", "Identity")  # of a number, also in another type


def export(module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> ir.Model:
    """torch.onnx.export, whose optimizer keeps small numbers."""
    import torch
    from onnx_ir.passes.common import InlinePass
    from onnxscript import optimizer

    is_optimized = options.get("optimize", True)
    program = torch.onnx.export(module, args, **(options | {"optimize": False}))
    assert program is not None  # what dynamo=True gives
    if is_optimized:
        # As the optimizer itself begins, so that numbers are there that it would work out first, such as alpha times 1.
        InlinePass()(program.model)
        optimizer.fold_constants(program.model)
        keep_small_numbers(program.model)
        program.optimize()
    return program.model


def keep_small_numbers(model: ir.Model) -> None:
    """Makes a vector of every number that is added and nearly 0, or multiplies and is nearly 1: an epsilon of 1e-8.

    onnxscript's optimizer takes such an operation away, as it compares scalars, and these alone, with tolerances.
    """
    for node in list(model.graph.all_nodes()):
        neutral = _NEUTRAL.get(node.op_type)
        if neutral is None or node.domain:
            continue
        for i, other in ((0, node.inputs[1]), (1, node.inputs[0])):
            number = _scalar(node.inputs[i])
            if number is None or number == neutral or other is None or other.shape is None:
                continue
            if math.isclose(number, neutral, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE):
                node.replace_input_with(i, _as_vector(node, node.inputs[i]))
                if len(other.shape) == 0:
                    _squeeze(node)
                break


def _scalar(value: ir.Value | None) -> float | None:
    """The number that `value` is, also of another type before."""
    while value is not None and (made := value.producer()) is not None and made.op_type in _SAME:
        value = made.inputs[0]
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return float(tensor.numpy()) if tensor is not None and tensor.numpy().ndim == 0 else None


def _as_vector(node: ir.Node, value: ir.Value | None) -> ir.Value:
    one = ir.node("Constant", [], {"value_ints": [1]}, name=f"{node.name}_one")
    vector = ir.node("Reshape", [value, one.outputs[0]], name=f"{node.name}_vector")
    for each in (one, vector):
        each.outputs[0].name = f"{each.name}_out"
    assert value is not None and node.graph is not None
    vector.outputs[0].type = value.type
    node.graph.insert_before(node, (one, vector))
    return vector.outputs[0]


def _squeeze(node: ir.Node) -> None:
    """Makes a scalar of what became a vector, under the name that it had."""
    (vector,) = node.outputs
    squeeze = ir.node("Squeeze", [None], name=f"{node.name}_scalar")
    scalar = squeeze.outputs[0]
    ir.convenience.replace_all_uses_with(vector, scalar, replace_graph_outputs=True)
    squeeze.replace_input_with(0, vector)
    scalar.name, vector.name = vector.name, f"{squeeze.name}_before"
    scalar.type, scalar.shape, vector.shape = vector.type, vector.shape, ir.Shape([1])
    assert node.graph is not None
    node.graph.insert_after(node, (squeeze,))


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
