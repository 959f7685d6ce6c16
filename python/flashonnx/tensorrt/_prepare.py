"""A fused model as TensorRT's parser takes it."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableSequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

_INT32_MAX = 2**31 - 1


def prepare_for_tensorrt(model: onnx.ModelProto | str | os.PathLike[str]) -> onnx.ModelProto:
    """A copy of the model in which TensorRT imports each FlashAttention as the plugin.

    The portable function bodies go (TensorRT would take them instead of the plugin). Absent optional inputs and
    outputs, which its parser refuses, are left out, and the attributes `inputs` and `outputs` name those that are
    present. Boolean masks are cast to int32: plugins have no boolean tensors. Attributes are written in full, which
    saves a warning of the parser for each. What is prepared already stays as it is. The result is for TensorRT only.

    Args:
        model: a model, or the path of one.

    Raises:
        ValueError: an attribute that does not fit into the 32 bits TensorRT has for it, or that the operator does not
            have. (A window wider than that bounds nothing and becomes the widest.)
    """
    import onnx

    from flashonnx.export.schema import DOMAIN

    if isinstance(model, onnx.ModelProto):
        prepared = onnx.ModelProto()
        prepared.CopyFrom(model)
    else:
        prepared = onnx.load(model)
    kept = [function for function in prepared.functions if function.domain != DOMAIN]
    del prepared.functions[:]
    prepared.functions.extend(kept)
    booleans = _boolean_values(prepared)
    for nodes in _node_lists(prepared):
        _prepare_nodes(nodes, booleans)
    return prepared


def _node_lists(model: onnx.ModelProto) -> Iterator[MutableSequence[onnx.NodeProto]]:
    """The nodes of the graph, of the functions and of every graph inside a node."""
    pending = [model.graph.node, *(function.node for function in model.functions)]
    while pending:
        nodes = pending.pop()
        yield nodes
        for node in nodes:
            for attribute in node.attribute:
                pending.extend(graph.node for graph in [attribute.g, *attribute.graphs] if graph.node)


def _boolean_values(model: onnx.ModelProto) -> set[str]:
    """Names of boolean values, as far as they can be known."""
    import onnx

    from flashonnx.export.schema import register_schema

    register_schema()
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except (
        Exception
    ):  # beyond 2 GB, or a model at odds with itself, which TensorRT will say better: take what is declared
        inferred = model
    graph, boolean = inferred.graph, onnx.TensorProto.BOOL
    values = [*graph.input, *graph.value_info, *graph.output]
    names = {value.name for value in values if value.type.tensor_type.elem_type == boolean}
    return names | {tensor.name for tensor in graph.initializer if tensor.data_type == boolean}


def _prepare_nodes(nodes: MutableSequence[onnx.NodeProto], booleans: set[str]) -> None:
    import onnx

    from flashonnx.export.schema import DOMAIN, INPUTS, OP_TYPE, OUTPUTS

    position = 0
    casts: dict[str, str] = {}
    while position < len(nodes):
        node = nodes[position]
        if (node.domain, node.op_type) == (DOMAIN, OP_TYPE) and not _is_prepared(node):
            inputs = {name: value for name, value in zip(INPUTS, node.input, strict=False) if value}
            outputs = {name: value for name, value in zip(OUTPUTS, node.output, strict=False) if value}
            mask = inputs.get("attn_mask")
            if mask in booleans:
                if mask not in casts:
                    casts[mask] = f"{mask}_int32"
                    cast = onnx.helper.make_node("Cast", [mask], [casts[mask]], to=onnx.TensorProto.INT32)
                    nodes.insert(position, cast)
                    position += 1
                inputs["attn_mask"] = casts[mask]
            _rewrite(node, inputs, outputs)
        position += 1


def _is_prepared(node: onnx.NodeProto) -> bool:
    return any(attribute.name == "inputs" for attribute in node.attribute)


def _rewrite(node: onnx.NodeProto, inputs: dict[str, str], outputs: dict[str, str]) -> None:
    import onnx

    from flashonnx.export.schema import ATTRIBUTES, default

    given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    unknown = sorted(given.keys() - ATTRIBUTES.keys())
    if unknown:  # TensorRT's parser would drop it without a word
        raise ValueError(f"FlashAttention {node.name!r} has no attribute {unknown[0]!r}")
    attributes = {name: given.get(name, default(name)) for name in ATTRIBUTES}
    attributes = {name: value for name, value in attributes.items() if value is not None}
    for name, value in attributes.items():
        if isinstance(value, int) and not -_INT32_MAX <= value <= _INT32_MAX:
            if value < 0 or name not in ("left_window_size", "right_window_size"):
                where = f"FlashAttention {node.name!r}: attribute {name!r}"
                raise ValueError(f"{where} is expected to fit into 32 bits, got {value}")
            attributes[name] = _INT32_MAX  # no sequence is longer
    attributes |= {"inputs": ",".join(inputs), "outputs": ",".join(outputs)}
    del node.input[:], node.output[:], node.attribute[:]
    node.input.extend(inputs.values())
    node.output.extend(outputs.values())
    node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
    node.ClearField("overload")
