"""A model in float64: the truth against which both the original and the fused model are measured."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from flashonnx._large import is_large

if TYPE_CHECKING:
    import onnx

    from flashonnx._inputs import Feeds


def widen(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model in which every float16, bfloat16 and float32 is a float64.

    The most negative number of a type, with which exporters mask scores, becomes that of float64: adding a score to it
    leaves it unchanged there as it does in the type it comes from.
    """
    import onnx

    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for kept in [f for f in wide.functions if f.domain == "flashonnx"]:  # bodies are written for the narrow types
        wide.functions.remove(kept)
    for graph in _graphs(wide.graph):
        scales = {name for node in graph.node if node.op_type == "Resize" for name in node.input[1:3]}
        for tensor in graph.initializer:
            if tensor.name not in scales:
                _widen_tensor(tensor)
        del graph.value_info[:]
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type in _narrow():
                value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
        for node in graph.node:
            _widen_node(node)
    for function in wide.functions:
        del function.value_info[:]
        for node in function.node:
            _widen_node(node)
            for inner in (n for subgraph in _subgraphs(node) for graph in _graphs(subgraph) for n in graph.node):
                _widen_node(inner)
    return wide


def run(model: onnx.ModelProto, feeds: list[Feeds]) -> list[list[Any]]:
    """The outputs of a widened model for each of several feeds, by ONNX Runtime if it can, else by onnx's evaluator."""
    import onnx

    wide = [{n: x.astype(np.float64) if x.dtype.kind in "fV" else x for n, x in feed.items()} for feed in feeds]
    # ONNX Runtime's Attention departs from ONNX where a row is masked by finite numbers (it returns zeros).
    if not any(node.op_type == "Attention" for graph in _graphs(model.graph) for node in graph.node):
        with tempfile.TemporaryDirectory(prefix="flashonnx-") as scratch:
            large = is_large(model)
            if large:  # its weights go to a file, and are taken back only if need be
                onnx.save_model(model, f"{scratch}/wide.onnx", save_as_external_data=True, location="wide.data")
            try:
                return _by_onnxruntime(f"{scratch}/wide.onnx" if large else model.SerializeToString(), wide)
            except Exception:  # operators that it has not in float64: the evaluator is next
                if large:
                    onnx.load_external_data_for_model(model, scratch)
    evaluator = evaluate(model)
    return [evaluator.run(None, feed) for feed in wide]


def _by_onnxruntime(source: str | bytes, feeds: list[Feeds]) -> list[list[Any]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return [session.run(None, feed) for feed in feeds]


def evaluate(model: onnx.ModelProto) -> Any:
    """Onnx's reference evaluator, with FlashAttention, and without what its 1.23 does wrong.

    Erf there falls back to float32, and GatherElements takes no more indices than there are values along the other
    axis.
    """
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    from flashonnx.reference import FlashAttention
    from flashonnx.reference_cache import FlashAttentionKVCache, FlashAttentionVarlen

    erf = np.vectorize(math.erf, otypes=[np.float64])

    class Erf(OpRun):
        def _run(self, x: Any) -> tuple[Any]:
            return (erf(x).astype(x.dtype),)

    class Gelu(OpRun):
        def _run(self, x: Any, approximate: str = "none") -> tuple[Any]:
            if approximate == "tanh":
                inner = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
            else:
                inner = erf(x / math.sqrt(2))
            return ((0.5 * x * (1 + inner)).astype(x.dtype),)

    class GatherElements(OpRun):
        def _run(self, data: Any, indices: Any, axis: int = 0) -> tuple[Any]:
            near = tuple(slice(None) if i == axis % data.ndim else slice(n) for i, n in enumerate(indices.shape))
            return (np.take_along_axis(data[near], indices.astype(np.int64), axis=axis),)

    operators: list[Any] = [Erf, Gelu, GatherElements, FlashAttention, FlashAttentionKVCache, FlashAttentionVarlen]
    return ReferenceEvaluator(model, new_ops=operators)


def _narrow() -> dict[int, float]:
    """The element types to widen, with their most negative numbers."""
    from onnx import TensorProto

    return {
        TensorProto.FLOAT: float(np.finfo(np.float32).min),
        TensorProto.FLOAT16: float(np.finfo(np.float16).min),
        TensorProto.BFLOAT16: -float.fromhex("0x1.fep127"),
    }


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    from onnx import numpy_helper

    lowest = _narrow().get(tensor.data_type)
    if lowest is None:
        return
    values = np.array(numpy_helper.to_array(tensor).astype(np.float64))
    values[values == lowest] = np.finfo(np.float64).min
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _widen_node(node: onnx.NodeProto) -> None:
    import onnx

    double = onnx.TensorProto.DOUBLE
    for attribute in list(node.attribute):
        if attribute.HasField("t"):
            _widen_tensor(attribute.t)
        elif attribute.name in ("to", "dtype") and attribute.i in _narrow():
            attribute.i = double
        elif attribute.name == "softmax_precision":
            node.attribute.remove(attribute)
        elif attribute.name in ("value_float", "value_floats") and node.op_type == "Constant":
            values = np.array(attribute.f if attribute.name == "value_float" else attribute.floats, np.float32)
            tensor = onnx.numpy_helper.from_array(values)
            _widen_tensor(tensor)
            attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
    if node.op_type == "ConstantOfShape" and not node.attribute:
        node.attribute.append(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(np.zeros(1))))


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for inner in _subgraphs(node):
            yield from _graphs(inner)


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def without_bfloat16_doors(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with float32 instead of bfloat16 inputs and outputs, which NumPy does not know, and casts beside them."""
    import onnx
    from onnx import TensorProto, helper

    initializers = {tensor.name for tensor in model.graph.initializer}
    doors = [
        v for v in (*model.graph.input, *model.graph.output) if v.type.tensor_type.elem_type == TensorProto.BFLOAT16
    ]
    if not doors:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    before: list[onnx.NodeProto] = []
    after: list[onnx.NodeProto] = []
    for values, casts, to in ((graph.input, before, TensorProto.BFLOAT16), (graph.output, after, TensorProto.FLOAT)):
        for value in values:
            if value.type.tensor_type.elem_type != TensorProto.BFLOAT16 or value.name in initializers:
                continue
            inner = f"{value.name}/bfloat16"
            for node in graph.node:
                for names in (node.input, node.output):
                    names[:] = [inner if name == value.name else name for name in names]
            ends = (value.name, inner) if to == TensorProto.BFLOAT16 else (inner, value.name)
            casts.append(helper.make_node("Cast", [ends[0]], [ends[1]], to=to))
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    return copy
