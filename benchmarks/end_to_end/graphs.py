"""The graphs that are compared: the plain export, and what each optimisation makes of it."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.end_to_end import weights
from benchmarks.end_to_end.models import Subject

if TYPE_CHECKING:
    import onnx
    import torch

OPSET = 20  # the exporter's own choice


class UnfusableError(Exception):
    """An optimisation found less attention than the model has."""


def plain(subject: Subject, module: torch.nn.Module, places: Mapping[str, weights.Matrix]) -> onnx.ModelProto:
    """What torch.onnx.export makes of the module, with the exporter's own optimisation; large weights lie outside."""
    import onnx_ir as ir
    import torch

    inputs = subject.inputs()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, tuple(inputs.values()), input_names=list(inputs), output_names=["y"], dynamo=True,
            opset_version=OPSET, optimize=False, verbose=False,
        )  # fmt: skip
        assert program is not None
        weights.put_outside(program.model, places, subject.weights)  # before it, so that no transpose is computed
        program.optimize()
    return ir.to_proto(program.model)


def ours(model: onnx.ModelProto, attentions: int, *, join: bool = True) -> onnx.ModelProto:
    """The model after `flashonnx.fuse`; without `join`, Q, K and V are made as they were.

    Raises:
        UnfusableError: not all of its attention was fused; with the report.
    """
    import flashonnx
    import onnx

    fused, report = flashonnx.fuse(model, portable=False, join_projections=join)
    if not report.fused == report.total == attentions:
        raise UnfusableError(f"{report.fused} of {report.total} were fused, {attentions} were expected\n{report}")
    assert isinstance(fused, onnx.ModelProto)
    return fused


def typed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the types and shapes of what ONNX Runtime's own operators make, which ONNX does not know."""
    import onnx
    from onnx import helper
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    bare, result = onnx.ModelProto(), onnx.ModelProto()
    bare.CopyFrom(model)
    result.CopyFrom(model)
    del bare.graph.initializer[:]
    for proto in model.graph.initializer:  # what lies outside need not be there yet
        if proto.data_location == onnx.TensorProto.EXTERNAL:
            bare.graph.input.append(helper.make_tensor_value_info(proto.name, proto.data_type, proto.dims))
        else:
            bare.graph.initializer.append(proto)
    with contextlib.redirect_stdout(io.StringIO()):
        known = SymbolicShapeInference.infer_shapes(bare, auto_merge=True).graph.value_info
    del result.graph.value_info[:]
    result.graph.value_info.extend(known)
    return result


def without_attention(model: onnx.ModelProto, width: int) -> onnx.ModelProto:
    """A fused model whose attention gives its queries back: the time that no attention kernel can save.

    Queries that lie packed beside keys and values, the first `width` features, are copied out. Rotations that the
    operator does are gone with it.

    Raises:
        UnfusableError: queries lie elsewhere.
    """
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    result = onnx.ModelProto()
    result.CopyFrom(model)
    for node in result.graph.node:
        if node.domain != "flashonnx":
            continue
        layouts = [helper.get_attribute_value(item) for item in node.attribute if item.name == "qkv_layout"]
        query, output, layout = node.input[0], node.output[0], layouts[0].decode() if layouts else "separate"
        node.Clear()
        if layout == "separate":
            node.CopyFrom(helper.make_node("Identity", [query], [output]))
            continue
        if layout not in ("3hd", "gqa"):
            raise UnfusableError(f"queries packed as {layout}")
        bounds = [f"{output}.{name}" for name in ("start", "end", "axis")]
        for name, number in zip(bounds, (0, width, 2), strict=True):
            result.graph.initializer.append(numpy_helper.from_array(np.array([number], np.int64), name))
        node.CopyFrom(helper.make_node("Slice", [query, *bounds], [output]))
    return result


def multi_head(model: onnx.ModelProto) -> onnx.ModelProto:
    """A fused model with com.microsoft's MultiHeadAttention in place of our nodes, which must have no mask.

    Raises:
        UnfusableError: a node does more than that operator can.
    """
    import onnx
    from onnx import helper

    result = onnx.ModelProto()
    result.CopyFrom(model)
    for node in result.graph.node:
        if node.domain != "flashonnx":
            continue
        attributes: dict[str, Any] = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        heads = attributes.get("q_num_heads")
        known = {"q_num_heads", "kv_num_heads", "scale", "is_causal"}
        if len(node.input) != 3 or len(node.output) != 1 or attributes.keys() - known:
            raise UnfusableError(f"{node.name}: inputs {list(node.input)}, attributes {attributes}")
        if not heads or heads != attributes.get("kv_num_heads"):
            raise UnfusableError(f"{node.name}: {heads} heads of queries, {attributes.get('kv_num_heads')} of keys")
        extra = {"scale": attributes["scale"]} if "scale" in attributes else {}
        causal = attributes.get("is_causal", 0)
        replacement = helper.make_node(
            "MultiHeadAttention", node.input, node.output, node.name, domain="com.microsoft", num_heads=heads,
            unidirectional=causal, **extra,
        )  # fmt: skip
        node.CopyFrom(replacement)
    if "com.microsoft" not in {entry.domain for entry in result.opset_import}:
        result.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return result
