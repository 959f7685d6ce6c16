"""Projections and their bias, added as the operator means it, in a function body."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashonnx.export.operator.nodes import NodeWriter

if TYPE_CHECKING:
    from flashonnx.export.operator.portable import Signature


def sums(w: NodeWriter, s: Signature, given: dict[str, str], bias: str = "bias") -> dict[str, str]:
    """Q, K and V, or the packed Q, with their bias added; `given` are those without it, by name."""
    if s.attribute("qkv_layout") != "separate":
        if s.rank == 5:
            sizes = w.op("Shape", given["Q"])
            bias = w.op("Reshape", bias, w.op("Slice", sizes, w.ints(2), w.ints(5)))
        return {"Q": w.op("Add", given["Q"], bias)}
    heads = s.rank == 4  # (batch, heads, sequence, size)
    widths = {}
    for name, value in given.items():
        width = w.size(value, -1)
        widths[name] = w.op("Mul", w.size(value, 1), width) if heads else width
    parts = w.ops("Split", bias, w.op("Concat", *widths.values(), axis=0), to=[None] * 3, axis=0)
    result = {}
    for (name, value), part in zip(given.items(), parts, strict=True):
        if heads:
            part = w.op("Reshape", part, w.op("Concat", w.size(value, 1), w.ints(1), w.size(value, 3), axis=0))
        result[name] = w.op("Add", value, part)
    return result
