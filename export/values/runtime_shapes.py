"""Shapes that ONNX Runtime's own symbolic inference knows, for operators of its domains that ours does not."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
from flashonnx.export.values.dims import Dim
from onnx import helper

if TYPE_CHECKING:
    from flashonnx.export.values.facts import Dims, Facts

Known = tuple["Dims | None", ir.DataType | None]


def inferred(facts: Facts, node: ir.Node) -> dict[ir.Value, Known]:
    """Dimensions and types of the outputs of `node`; nothing where the inference is not there, or fails.

    It is asked about the one operator, with names of its own for sizes that are not numbers.
    """
    try:
        from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference
    except ImportError:  # onnxruntime or sympy
        return {}
    symbols: dict[str, Dim] = {}
    try:
        model = _alone(facts, node, symbols)
        with _quiet():
            found = _shapes(SymbolicShapeInference(2**31 - 1, True, guess_output_rank=False, verbose=0), model)
    except Exception:  # asserts and errors of all kinds, for what it does not understand
        return {}
    named = [value for value in node.outputs if value.name]
    return {v: _known(info, symbols) for v, info in zip(named, found.graph.output, strict=True)} if found else {}


def _shapes(inference: Any, model: onnx.ModelProto) -> onnx.ModelProto | None:
    """What its infer_shapes() does, which leaves a file in the working directory when it fails."""
    inference._preprocess(model)
    complete = False
    while inference.run_:
        complete = inference._infer_impl()
    inference._update_output_from_vi()
    return inference.out_mp_ if complete else None


def _alone(facts: Facts, node: ir.Node, symbols: dict[str, Dim]) -> onnx.ModelProto:
    """A model of one operator."""
    names, inputs = [], []
    for index, value in enumerate(node.inputs):
        names.append(f"input_{index}" if value is not None else "")
        if value is None:
            continue
        dims, kind = facts.dims(value), facts.dtype(value)
        if dims is None or kind is None:
            raise ValueError(f"nothing is known of '{value.name}'")
        shape = [size.value if size.value is not None else _symbol(size, symbols) for size in dims]
        inputs.append(helper.make_tensor_value_info(names[-1], int(kind), shape))
    outputs = [f"output_{index}" if value.name else "" for index, value in enumerate(node.outputs)]
    proto = helper.make_node(node.op_type, names, outputs, "node", domain=node.domain)
    proto.attribute.extend(ir.to_proto(attribute) for attribute in node.attributes.values())
    graph = helper.make_graph([proto], "alone", inputs, [onnx.ValueInfoProto(name=name) for name in outputs if name])
    opsets = [helper.make_opsetid("", facts.opset), helper.make_opsetid(node.domain, node.version or 1)]
    return helper.make_model(graph, opset_imports=opsets)


def _symbol(size: Dim, symbols: dict[str, Dim]) -> str:
    name = next((name for name, known in symbols.items() if known == size), f"size_{len(symbols)}")
    symbols[name] = size
    return name


def _known(value: onnx.ValueInfoProto, symbols: dict[str, Dim]) -> Known:
    tensor = value.type.tensor_type
    kind = ir.DataType(tensor.elem_type) if tensor.elem_type else None
    if not tensor.HasField("shape"):
        return None, kind
    dims = []
    for dim in tensor.shape.dim:
        size = Dim.of(dim.dim_value) if dim.HasField("dim_value") else Dim.parse(dim.dim_param)
        if not size.atoms <= symbols.keys():
            return None, kind  # a size that it made up
        dims.append(_in_terms_of(size, symbols))
    return tuple(dims), kind


def _in_terms_of(size: Dim, symbols: dict[str, Dim]) -> Dim:
    total = Dim.of(0)
    for monomial, count in size.terms.items():
        part = Dim.of(count)
        for name in monomial:
            part = part * symbols[name]
        total = total + part
    return total


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("onnxruntime.tools.symbolic_shape_infer")
    before, logger.disabled = logger.disabled, True
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.disabled = before
