"""Cases as ONNX models of one node, and their runs in ONNX Runtime."""

from __future__ import annotations

from typing import Any

import flashonnx
import numpy as np
import onnx
from cases import INPUTS, Case, numpy_dtype
from flashonnx.reference import Array
from onnx import TensorProto, helper

DOMAIN = "flashonnx"
OUTPUTS = ("Y", "present_key", "present_value", "lse")


def trimmed(names: list[str]) -> list[str]:
    """Without absent names at the end."""
    while names and not names[-1]:
        names = names[:-1]
    return names


def asked_for(case: Case) -> list[str]:
    """The outputs that the case asks for, in order, "" where one is left out."""
    present = case.present
    return trimmed(
        ["Y", "present_key" if present else "", "present_value" if present else "", "lse" if case.lse else ""]
    )


def one_node(case: Case, inputs: dict[str, Array], *, dynamic: bool = False, **attributes: Any) -> onnx.ModelProto:
    """The node alone; bfloat16 widened, see `widen`.

    Args:
        case: for the attributes and outputs.
        inputs: by name, for types and shapes.
        dynamic: shapes have ranks only.
        attributes: instead of, or besides, the case's.
    """

    def info(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> onnx.ValueInfoProto:
        names = [f"{name}_{i}" for i in range(len(shape))]
        kind = helper.np_dtype_to_tensor_dtype(dtype)
        return helper.make_tensor_value_info(name, kind, names if dynamic else shape)

    given = trimmed([name if name in inputs else "" for name in INPUTS])
    attributes = {n: v for n, v in (case.attributes | attributes).items() if v is not None}
    node = helper.make_node("FlashAttention", given, asked_for(case), name="attention", domain=DOMAIN, **attributes)
    shapes = case.output_shapes()
    kinds = {"lse": np.dtype(np.float32)}
    graph = helper.make_graph(
        [node],
        "one_node",
        [info(name, x.dtype, x.shape) for name, x in inputs.items()],
        [info(name, kinds.get(name, numpy_dtype(case.dtype)), shapes[name]) for name in asked_for(case) if name],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return widen(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def widen(model: onnx.ModelProto) -> onnx.ModelProto:
    """bfloat16 inputs and outputs, which ONNX Runtime's Python does not take, become float32 between exact Casts.

    Their names get "_wide" appended.
    """
    graph = model.graph
    for infos, narrowing in ((graph.input, True), (graph.output, False)):
        for info in infos:
            if info.type.tensor_type.elem_type != TensorProto.BFLOAT16:
                continue
            name, wide = info.name, f"{info.name}_wide"
            info.name, info.type.tensor_type.elem_type = wide, TensorProto.FLOAT
            if narrowing:
                graph.node.insert(0, helper.make_node("Cast", [wide], [name], to=TensorProto.BFLOAT16))
            else:
                graph.node.append(helper.make_node("Cast", [name], [wide], to=TensorProto.FLOAT))
    return model


def open_session(model: onnx.ModelProto, device: str = "cpu") -> Any:
    """A session with the library, wholly on that device."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # failures are looked at, not printed
    if device == "cpu":
        return flashonnx.session(model, ["CPUExecutionProvider"], options)
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return flashonnx.session(model, ["CUDAExecutionProvider"], options)


def run(session: Any, case: Case, inputs: dict[str, Array]) -> dict[str, Array]:
    """The asked outputs by name, in the case's dtype."""
    feeds = {}
    for name, x in inputs.items():
        narrow = x.dtype.name == "bfloat16"
        feeds[f"{name}_wide" if narrow else name] = x.astype(np.float32) if narrow else x
    names = list(filter(None, asked_for(case)))
    outputs = dict(zip(names, session.run(None, feeds), strict=True))
    if case.dtype == "bfloat16":
        outputs = {name: x if name == "lse" else x.astype(numpy_dtype("bfloat16")) for name, x in outputs.items()}
    return outputs
