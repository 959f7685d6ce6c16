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
            outer = (3, s.q_heads or 0) if s.attribute("qkv_layout") == "3hd" else (s.q_heads or 0, 3)
            known = s.q_heads is not None and s.size is not None
            row = w.ints(*outer, s.size or 0) if known else None
            bias = w.op("Reshape", bias, row or w.op("Slice", w.op("Shape", given["Q"]), w.ints(2), w.ints(5)))
        return {"Q": w.op("Add", given["Q"], bias)}
    heads = dict(zip("QKV", (s.q_heads, s.kv_heads, s.kv_heads), strict=True))
    sizes = dict(zip("QKV", (s.size, s.size, s.value_size), strict=True))
    known = all(number is not None for number in (*heads.values(), *sizes.values()))
    if known:
        widths = w.ints(*(heads[name] * sizes[name] for name in "QKV"))  # type: ignore[operator]
    else:
        widths = w.op("Concat", *(_width(w, s, value) for value in given.values()), axis=0)
    result = {}
    for (name, value), part in zip(given.items(), w.ops("Split", bias, widths, to=[None] * 3, axis=0), strict=True):
        if s.rank == 4:  # (batch, heads, sequence, size)
            row = w.ints(heads[name] or 0, 1, sizes[name] or 0) if known else None
            row = row or w.op("Concat", w.size(value, 1), w.ints(1), w.size(value, 3), axis=0)
            part = w.op("Reshape", part, row)
        result[name] = w.op("Add", value, part)
    return result


def _width(w: NodeWriter, s: Signature, value: str) -> str:
    """Of all heads together."""
    last = w.size(value, -1)
    return w.op("Mul", w.size(value, 1), last) if s.rank == 4 else last
