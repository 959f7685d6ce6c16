"""A fused model as TensorRT's parser takes it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, MutableSequence
from typing import TYPE_CHECKING

from flashonnx.tensorrt._register import PLUGIN

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

_INT32_MAX = 2**31 - 1
_PROVIDER_DOMAIN = "trt.plugins"
_LARGE = 1024  # bytes; larger weights say nothing about types


def prepare_for_tensorrt(
    model: onnx.ModelProto | ir.Model | str | os.PathLike[str], *, onnxruntime: bool = False
) -> onnx.ModelProto:
    """A copy of the model in which TensorRT imports each FlashAttention, FlashAttentionKVCache and Varlen as a plugin.

    The portable function bodies go (TensorRT would take them instead of the plugin). Absent optional inputs and
    outputs, which its parser refuses, are left out, and the attributes `inputs` and `outputs` name those that are
    present. Boolean masks are cast to int32: plugins have no boolean tensors. Other functions of the model that hold an
    attention with a mask are inlined, as a mask's type is known only where they are called. Attributes are written in
    full, which saves a warning of the parser for each. What is prepared already stays as it is. The result is for
    TensorRT only.

    Args:
        model: a model, or the path of one, whose weights in other files are read too.
        onnxruntime: for ONNX Runtime's TensorRT execution provider, which knows plugins as operators of the domain
            trt.plugins (and needs `trt_extra_plugin_lib_paths` set to `autoload_path()`).

    Raises:
        FileNotFoundError: no such file, or one that its weights should be in.
        ValueError: not an ONNX model; an attribute that does not fit into the 32 bits TensorRT has for it, or that the
            operator does not have (a window wider than that bounds nothing and becomes the widest); a function that
            cannot be inlined.
    """
    from flashonnx.export.operator.schema import DOMAIN

    prepared = _load(model)
    kept = [function for function in prepared.functions if function.domain != DOMAIN]
    del prepared.functions[:]
    prepared.functions.extend(kept)
    prepared = _inline(prepared)
    scopes = _boolean_values(prepared)
    taken = {value for nodes in _node_lists(prepared) for node in nodes for value in (*node.input, *node.output)}
    for nodes, booleans in scopes:
        _prepare_nodes(nodes, booleans, taken)
    if onnxruntime:
        _move_to_provider_domain(prepared)
    return prepared


def _load(model: onnx.ModelProto | ir.Model | str | os.PathLike[str]) -> onnx.ModelProto:
    """A copy with every weight in it."""
    import onnx
    import onnx_ir as ir

    from flashonnx.export.model import files

    source = files.load(model)
    if isinstance(source.original, ir.Model):
        return ir.to_proto(ir.external_data.load_to_model(source.model))
    if source.path is not None:
        onnx.load_external_data_for_model(source.original, str(source.path.parent))
        return source.original
    copy = onnx.ModelProto()
    copy.CopyFrom(source.original)
    return copy


def _inline(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without the functions that hold an attention with a mask, themselves or through others."""
    import onnx_ir as ir
    import onnx_ir.passes.common

    from flashonnx.export.operator.schema import DOMAIN

    nodes = {
        (function.domain, function.name, function.overload): [n for part in _lists_in(function.node) for n in part]
        for function in model.functions
    }
    inlined: set[tuple[str, str, str]] = set()
    while found := {
        identifier
        for identifier in nodes.keys() - inlined
        for node in nodes[identifier]
        if (node.domain, node.op_type, node.overload) in inlined
        or (node.domain == DOMAIN and _named_inputs(node).get("attn_mask"))
    }:
        inlined |= found
    if not inlined:
        return model
    try:
        made = onnx_ir.passes.common.InlinePass(lambda function: function.identifier() in inlined)(ir.from_proto(model))
    except ValueError as error:
        raise ValueError(f"a function that holds FlashAttention with a mask cannot be inlined: {error}") from error
    return ir.to_proto(made.model)


def _move_to_provider_domain(model: onnx.ModelProto) -> None:
    import onnx

    from flashonnx.export.operator.schema import DOMAIN, OPERATORS

    _, version, namespace = PLUGIN
    for nodes in _node_lists(model):
        for node in nodes:
            if node.domain == DOMAIN and node.op_type in OPERATORS:
                node.domain = _PROVIDER_DOMAIN
                # The domain is no longer the plugin's namespace, so the parser has to be told.
                for attribute, value in (("plugin_version", version), ("plugin_namespace", namespace)):
                    node.attribute.append(onnx.helper.make_attribute(attribute, value))
    for opsets in (model.opset_import, *(function.opset_import for function in model.functions)):
        for opset in opsets:
            if opset.domain == DOMAIN:
                opset.domain, opset.version = _PROVIDER_DOMAIN, 1


def _node_lists(model: onnx.ModelProto) -> Iterator[MutableSequence[onnx.NodeProto]]:
    """The nodes of the graph, of the functions and of every graph inside a node."""
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        yield from _lists_in(nodes)


def _lists_in(nodes: MutableSequence[onnx.NodeProto]) -> Iterator[MutableSequence[onnx.NodeProto]]:
    yield nodes
    for node in nodes:
        for graph in _inner_graphs(node):
            yield from _lists_in(graph.node)


def _inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _boolean_values(model: onnx.ModelProto) -> list[tuple[MutableSequence[onnx.NodeProto], set[str]]]:
    """Each list of nodes, and the names that are boolean values there, as far as they can be known."""
    import onnx

    from flashonnx.export.operator.schema import register_schema

    register_schema()
    light = _without_weights(model)
    try:
        inferred = onnx.shape_inference.infer_shapes(light)
    except Exception:  # a model at odds with itself, which TensorRT will say better: take what is declared
        inferred = light
    weights = {tensor.name for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.BOOL}
    scopes = list(_scopes(model.graph, inferred.graph, weights))
    for function in model.functions:  # no mask is in them: see _inline
        scopes += [(nodes, set()) for nodes in _lists_in(function.node)]
    return scopes


def _scopes(
    graph: onnx.GraphProto, typed: onnx.GraphProto, outer: set[str]
) -> Iterator[tuple[MutableSequence[onnx.NodeProto], set[str]]]:
    """The graph and every graph inside its nodes; `typed` is the same with types, `outer` are names from around it.

    Graphs beside one another may use a name for different things.
    """
    import onnx

    boolean = onnx.TensorProto.BOOL
    types = {value.name: value.type.tensor_type.elem_type for value in (*typed.input, *typed.value_info, *typed.output)}
    types |= {tensor.name: tensor.data_type for tensor in typed.initializer}
    names = outer - types.keys() | {name for name, type_ in types.items() if type_ == boolean}
    yield graph.node, names
    for node, twin in zip(graph.node, typed.node, strict=True):
        for inner, typed_inner in zip(_inner_graphs(node), _inner_graphs(twin), strict=True):
            yield from _scopes(inner, typed_inner, names)


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model for inference of types alone: large weights are inputs, so nothing of size is copied."""
    import onnx

    graph = model.graph
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    light.graph.name = graph.name
    for field in ("node", "input", "output", "value_info"):
        getattr(light.graph, field).extend(getattr(graph, field))
    known = {value.name for value in graph.input}
    for tensor in graph.initializer:
        if tensor.ByteSize() <= _LARGE:
            light.graph.initializer.append(tensor)
        elif tensor.name not in known:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            light.graph.input.append(info)
    return light


def _prepare_nodes(nodes: MutableSequence[onnx.NodeProto], booleans: set[str], taken: set[str]) -> None:
    """Prepares each node and casts its mask; `taken` are the names of values, which the casts' join."""
    import onnx

    from flashonnx.export.operator.schema import DOMAIN, OPERATORS, outputs_of

    position = 0
    casts: dict[str, str] = {}
    while position < len(nodes):
        node = nodes[position]
        if node.domain == DOMAIN and node.op_type in OPERATORS and not _is_prepared(node):
            inputs = _named_inputs(node)
            outputs = {name: x for name, x in zip(outputs_of(node.op_type), node.output, strict=False) if x}
            mask = inputs.get("attn_mask")
            if mask in booleans:
                if mask not in casts:
                    casts[mask] = _free_name(f"{mask}_int32", taken)
                    cast = onnx.helper.make_node("Cast", [mask], [casts[mask]], to=onnx.TensorProto.INT32)
                    nodes.insert(position, cast)
                    position += 1
                inputs["attn_mask"] = casts[mask]
            _rewrite(node, inputs, outputs)
        position += 1


def _named_inputs(node: onnx.NodeProto) -> dict[str, str]:
    """The values that come to an operator of ours, by the names of its inputs, without absent ones."""
    from flashonnx.export.operator.schema import OPERATORS, inputs_of

    if node.op_type not in OPERATORS:
        return {}
    return {name: value for name, value in zip(inputs_of(node.op_type), node.input, strict=False) if value}


def _free_name(name: str, taken: set[str]) -> str:
    names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
    free = next(n for n in names if n not in taken)
    taken.add(free)
    return free


def _is_prepared(node: onnx.NodeProto) -> bool:
    return any(attribute.name == "inputs" for attribute in node.attribute)


def _rewrite(node: onnx.NodeProto, inputs: dict[str, str], outputs: dict[str, str]) -> None:
    import onnx

    from flashonnx.export.operator.schema import OPERATORS

    known = OPERATORS[node.op_type]
    given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    unknown = sorted(given.keys() - known.keys())
    if unknown:  # TensorRT's parser would drop it without a word
        raise ValueError(f"{node.op_type} {node.name!r} has no attribute {unknown[0]!r}")
    attributes = {name: given.get(name, default) for name, default in known.items()}
    attributes = {name: value for name, value in attributes.items() if value is not None}
    for name, value in attributes.items():
        if isinstance(value, int) and not -_INT32_MAX <= value <= _INT32_MAX:
            if value < 0 or name not in ("left_window_size", "right_window_size"):
                where = f"{node.op_type} {node.name!r}: attribute {name!r}"
                raise ValueError(f"{where} is expected to fit into 32 bits, got {value}")
            attributes[name] = _INT32_MAX  # no sequence is longer
    attributes |= {"inputs": ",".join(inputs), "outputs": ",".join(outputs)}
    del node.input[:], node.output[:], node.attribute[:]
    node.input.extend(inputs.values())
    node.output.extend(outputs.values())
    node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())
    node.ClearField("overload")
