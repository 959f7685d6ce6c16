"""Running models before and after fusion, with the portable bodies and with the library where it is built."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from flashonnx._library import LibraryError, library_path
from flashonnx.export import Report, fuse
from onnx import helper

MINUS_INFINITY = -99999.0
# What two ways to add up the same products may differ by; float16 probabilities are rounded in one and not the other.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3}


@functools.cache
def has_library() -> bool:
    """Whether the custom op can be loaded here."""
    try:
        library_path()
    except LibraryError:
        return False
    return True


def random_inputs(model: onnx.ModelProto, sizes: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Numbers for every graph input, its named dimensions taken from `sizes`.

    Integers of an input with "mask" in its name are 0 and 1, others small; 7 in 10 of a bool mask are true.
    """
    random = np.random.default_rng(seed)
    inputs = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [dim.dim_value if dim.HasField("dim_value") else sizes[dim.dim_param] for dim in tensor.shape.dim]
        kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if kind == np.bool_:
            inputs[value.name] = random.random(shape) < 0.7
        elif np.issubdtype(kind, np.integer):
            inputs[value.name] = random.integers(0, 2 if "mask" in value.name else 50, shape).astype(kind)
        else:
            inputs[value.name] = random.standard_normal(shape).astype(kind)
    return inputs


def session(model: onnx.ModelProto, *, library: bool = False) -> ort.InferenceSession:
    """The model on ONNX Runtime's CPU provider, with the fused operator of the library or of its body."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if library:
        import flashonnx

        return flashonnx.session(model, ["CPUExecutionProvider"], options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], *, library: bool = False) -> list[Any]:
    """The model's outputs on ONNX Runtime's CPU provider."""
    return session(model, library=library).run(None, dict(inputs))


def assert_same(original: onnx.ModelProto, fused: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> None:
    """The same answers, by the bodies and by the library; where the original gives NaN, anything goes."""
    expected = run(original, inputs)
    for library in (False, True) if has_library() else (False,):
        for want, got in zip(expected, run(fused, inputs, library=library), strict=True):
            assert got.shape == want.shape
            assert got.dtype == want.dtype
            defined = ~np.isnan(want)
            assert not np.isnan(got[defined]).any(), "a NaN that was not there"
            error = np.abs(np.where(defined, got, 0).astype(np.float64) - np.where(defined, want, 0)).max(initial=0)
            allowed = TOLERANCE.get(want.dtype.name, 0) * max(1.0, np.abs(want[defined]).max(initial=0))
            assert error <= allowed, f"off by {error:.3g}, {'with' if library else 'without'} the library"


def fuse_and_check(
    model: onnx.ModelProto, *sizes: Mapping[str, int], fused: int = 1, total: int | None = None, **inputs: np.ndarray
) -> tuple[onnx.ModelProto, Report]:
    """Fuses, requires that many fused sites and a valid model, and compares answers at every one of `sizes`."""
    before = model.SerializeToString()
    result, report = fuse(model)
    assert model.SerializeToString() == before, "fuse changed its input"
    assert (report.fused, report.total) == (fused, fused if total is None else total), str(report)
    onnx.checker.check_model(result, full_check=True)
    onnx.shape_inference.infer_shapes(result, check_type=True, strict_mode=True, data_prop=True)
    for number, named in enumerate(sizes):
        assert_same(model, result, random_inputs(model, named, number) | inputs)
    return result, report


def parse(body: str, inputs: str, outputs: str, opset: int = 18) -> onnx.ModelProto:
    """A model from ONNX's text form, with what is known of its shapes."""
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> graph ({inputs}) => ({outputs}) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.f == MINUS_INFINITY:  # which the text form cannot say
                attribute.f = -np.inf
    return model


def nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The fused nodes."""
    return [node for node in model.graph.node if node.domain == "flashonnx"]


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def shape_of(model: onnx.ModelProto, name: str) -> list[int | str]:
    """The inferred shape of a value."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    values = [*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output]
    (value,) = [value for value in values if value.name == name]
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def op_types(model: onnx.ModelProto) -> set[str]:
    """What the graph is made of, besides constants."""
    return {node.op_type for node in model.graph.node} - {"Constant"}
