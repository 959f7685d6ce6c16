"""Cache cases as ONNX models of one node, and their runs in ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from cache_cases import INPUTS, OUTPUTS, CacheCase
from cases import numpy_dtype
from flashonnx.reference import Array
from nodes import DOMAIN, trimmed, widen
from onnx import helper

CACHES = ("key_cache", "value_cache")


def asked_for(case: CacheCase) -> list[str]:
    """The outputs that a node has, in order, "" where one is left out."""
    present = case.append or not case.in_place
    return trimmed([
        name if present or not name.startswith("present") else "" for name in OUTPUTS if case.lse or name != "lse"
    ])  # fmt: skip


def one_node(case: CacheCase, inputs: dict[str, Array], *, dynamic: bool = False, **attributes: Any) -> onnx.ModelProto:
    """The node alone; bfloat16 widened, see `nodes.widen`.

    Args:
        case: for the attributes and outputs.
        inputs: by name, for types and shapes.
        dynamic: shapes have ranks only.
        attributes: instead of, or besides, the case's.
    """

    def info(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> onnx.ValueInfoProto:
        names = [f"{name}_{i}" for i in range(len(shape))]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), names if dynamic else shape)

    attributes = {n: v for n, v in (case.attributes | attributes).items() if v is not None}
    given = trimmed([name if name in inputs else "" for name in INPUTS])
    node = helper.make_node("FlashAttentionKVCache", given, asked_for(case), domain=DOMAIN, **attributes)
    shapes, kinds = case.output_shapes(), {"lse": np.dtype(np.float32)}
    graph = helper.make_graph(
        [node],
        "one_node",
        [info(name, x.dtype, x.shape) for name, x in inputs.items()],
        [info(name, kinds.get(name, numpy_dtype(case.dtype)), shapes[name]) for name in asked_for(case) if name],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return widen(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def run(session: Any, case: CacheCase, inputs: dict[str, Array]) -> dict[str, Array]:
    """The asked outputs by name, in the case's dtype, from inputs that are fed: the caches are copied."""
    feeds = {}
    for name, x in inputs.items():
        narrow = x.dtype.name == "bfloat16"
        feeds[f"{name}_wide" if narrow else name] = x.astype(np.float32) if narrow else x
    names = list(filter(None, asked_for(case)))
    before = {name: x.tobytes() for name, x in feeds.items()}
    outputs = dict(zip(names, session.run(None, feeds), strict=True))
    assert all(x.tobytes() == before[name] for name, x in feeds.items()), "an input was changed"
    if case.dtype == "bfloat16":
        outputs = {name: x if name == "lse" else x.astype(numpy_dtype("bfloat16")) for name, x in outputs.items()}
    return outputs
