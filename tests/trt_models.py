"""ONNX models for the tests of the TensorRT plugin."""

from __future__ import annotations

from typing import Any

import onnx
from nodes import DOMAIN
from onnx import TensorProto, helper


def two_nodes(elem_type: int = TensorProto.FLOAT16, **attributes: Any) -> onnx.ModelProto:
    """Attention, Add, attention: dynamic batch and sequences, grouped heads, a padding mask of booleans."""
    attributes = {"q_num_heads": 4, "kv_num_heads": 2} | attributes
    shapes = {"q": ("B", "S", 256), "k": ("B", "T", 128), "v": ("B", "T", 128)}
    inputs = [helper.make_tensor_value_info(name, elem_type, shape) for name, shape in shapes.items()]
    inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, ("B", 1, 1, "T")))
    nodes = [
        helper.make_node("FlashAttention", ["q", "k", "v"], ["a"], "first", domain=DOMAIN, **attributes),
        helper.make_node("Add", ["a", "q"], ["b"]),
        helper.make_node(
            "FlashAttention", ["b", "k", "v", "mask"], ["y"], "second", domain=DOMAIN, is_causal=1, **attributes
        ),
    ]
    output = helper.make_tensor_value_info("y", elem_type, ("B", "S", 256))
    graph = helper.make_graph(nodes, "two_nodes", inputs, [output])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {name: v.decode() if isinstance(v, bytes) else v for name, v in values.items()}
