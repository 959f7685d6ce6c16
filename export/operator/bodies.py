"""The two kinds of function bodies: one standard Attention, or plain operators in float32."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from flashonnx.export.operator import schema
from flashonnx.export.operator.bias_bodies import sums
from flashonnx.export.operator.nodes import NodeWriter
from onnx import TensorProto

if TYPE_CHECKING:
    from flashonnx.export.operator.portable import Signature

_STANDARD_INPUTS = schema.INPUTS[:7]
_STANDARD_OUTPUTS = schema.OUTPUTS[:3]
_STANDARD_ATTRIBUTES = (
    "is_causal",
    "q_num_heads",
    "kv_num_heads",
    "scale",
    "softcap",
    "left_window_size",
    "right_window_size",
)


def standard_body(w: NodeWriter, s: Signature) -> None:
    """One node Attention, with Splits before it where Q carries all three; it must be one that Attention can say."""
    names = {name: name if s.has(name) else "" for name in (*_STANDARD_INPUTS, *_STANDARD_OUTPUTS)}
    given = schema.without_defaults(dict(s.attributes))
    attributes = {name: given[name] for name in _STANDARD_ATTRIBUTES if name in given}
    layout = s.attribute("qkv_layout")
    if s.has("bias"):
        names |= sums(w, s, {name: name for name in "QKV" if s.has(name)})
    if layout != "separate":
        names["Q"], names["K"], names["V"] = _split(w, s, names["Q"], layout)
        attributes |= {"q_num_heads": s.q_heads, "kv_num_heads": s.kv_heads or s.q_heads}
    elif s.rank == 4:  # the shapes tell, and Attention refuses the attributes
        attributes.pop("q_num_heads", None)
        attributes.pop("kv_num_heads", None)
    if s.mask and s.opset < 25 and not s.mask_rows:
        names["attn_mask"] = _all_rows(w, s, names["Q"])
    if s.has("past_key"):  # ONNX Runtime wants both, whether anybody reads them or not
        for name in ("present_key", "present_value"):
            names[name] = names[name] or f"unread_{name}"
    if s.dtype != "float":
        attributes["softmax_precision"] = TensorProto.FLOAT
    major = layout == "time_major"
    names["Y"] = "batch_major_y" if major else "Y"
    w.ops("Attention", *_given(names, _STANDARD_INPUTS), to=_given(names, _STANDARD_OUTPUTS), **attributes)
    if major:
        w.op("Transpose", names["Y"], to="Y", perm=[1, 0, 2])


def _given(names: dict[str, str], order: Sequence[str]) -> list[str]:
    found = [names[name] for name in order]
    while not found[-1]:
        found.pop()
    return found


def _split(w: NodeWriter, s: Signature, packed: str, layout: str) -> list[str]:
    """Q, K, V as (B, S, heads * size), out of the one tensor that carries them."""
    assert s.q_heads is not None
    q_heads, kv_heads = s.q_heads, s.kv_heads or s.q_heads
    if layout != "h3d" and s.size is not None:
        widths = [count * s.size for count in (q_heads, kv_heads, kv_heads)]
        flat = packed if s.rank == 3 else w.op("Reshape", packed, w.ints(0, 0, sum(widths)))
        parts = w.ops("Split", flat, w.ints(*widths), to=[None] * 3, axis=2)
        return [w.op("Transpose", part, perm=[1, 0, 2]) for part in parts] if layout == "time_major" else parts
    parts = _heads(w, s, packed, layout, q_heads, kv_heads)
    if layout == "time_major":
        parts = [w.op("Transpose", part, perm=[1, 0, 2, 3]) for part in parts]
    widths = [-1 if s.size is None else count * s.size for count in (q_heads, kv_heads, kv_heads)]
    return [w.op("Reshape", part, w.ints(0, 0, width)) for part, width in zip(parts, widths, strict=True)]


def _heads(w: NodeWriter, s: Signature, packed: str, layout: str, q_heads: int, kv_heads: int) -> list[str]:
    """Q, K, V with a dimension for heads and one for their size behind the packed tensor's first two."""
    if layout == "h3d":
        heads = w.op("Reshape", packed, w.ints(0, 0, q_heads, -1 if s.size is None else 3 * s.size))
        thirds = {"num_outputs": 3} if s.opset >= 18 else {}
        return w.ops("Split", heads, to=[None] * 3, axis=3, **thirds)
    heads = w.op("Reshape", packed, w.ints(0, 0, q_heads + 2 * kv_heads, -1 if s.size is None else s.size))
    return w.ops("Split", heads, w.ints(q_heads, kv_heads, kv_heads), to=[None] * 3, axis=2)


def _all_rows(w: NodeWriter, s: Signature, query: str) -> str:
    """The mask with a row for each query, without which ONNX Runtime's CPU provider refuses it below opset 25."""
    rows = w.size(query, 2 if s.rank == 4 and s.attribute("qkv_layout") == "separate" else 1)
    ones = [w.ints(*[1] * (s.mask_rank - 2))] if s.mask_rank > 2 else []
    return w.op("Expand", "attn_mask", w.op("Concat", *ones, rows, w.ints(1), axis=0))


def plain_body(w: NodeWriter, s: Signature) -> None:
    """MatMul, Softmax and what else the signature asks for, with float32 arithmetic."""
    q, k, v = _four_dimensions(w, s)
    if s.has("past_key"):
        past = [_float(w, s, name) if _adds_in_float(s) else name for name in ("past_key", "past_value")]
        k, v = w.op("Concat", past[0], k, axis=2), w.op("Concat", past[1], v, axis=2)
    for name, value in (("present_key", k), ("present_value", v)):
        if s.has(name) and _adds_in_float(s):
            _from_float(w, s, value, name)
        elif s.has(name):
            w.op("Identity", value, to=name)
    if not _adds_in_float(s):
        q, k, v = (_float(w, s, value) for value in (q, k, v))
    k, v = _repeat_heads(w, s, q, k, v)

    scale = w.number(s.scale) if s.scale is not None else _default_scale(w, q)
    keys = w.op("Transpose", k, perm=[0, 1, 3, 2])
    scores = w.op("MatMul", w.op("Mul", q, scale), keys)
    softcap = s.attribute("softcap")
    if softcap:
        cap = w.number(softcap)
        scores = w.op("Mul", w.op("Tanh", w.op("Div", scores, cap)), cap)
    sizes = _Sizes(w, q, k)
    if s.mask:
        scores = _masked(w, s, scores, sizes)
    scores, below = _structure(w, s, scores, sizes)
    weights = _softmax(w, s, scores, below)
    y = w.op("MatMul", weights, v)
    if s.rank != 4:
        major = s.attribute("qkv_layout") == "time_major"
        y = w.op("Transpose", y, perm=[2, 0, 1, 3] if major else [0, 2, 1, 3])
        known = s.q_heads is not None and s.value_size is not None
        width = s.q_heads * s.value_size if known else -1  # type: ignore[operator]
        y = w.op("Reshape", y, w.ints(0, 0, width))
    _from_float(w, s, y, "Y")


class _Sizes:
    """Sq and Sk, as one-dimensional tensors, written where they are first asked for."""

    def __init__(self, w: NodeWriter, q: str, k: str) -> None:
        self._w, self._q, self._k = w, q, k

    @functools.cached_property
    def queries(self) -> str:
        return self._w.size(self._q, 2)

    @functools.cached_property
    def keys(self) -> str:
        return self._w.size(self._k, 2)


def _float(w: NodeWriter, s: Signature, value: str) -> str:
    return value if s.dtype == "float" else w.op("Cast", value, to_type=TensorProto.FLOAT)


def _from_float(w: NodeWriter, s: Signature, value: str, name: str) -> None:
    if s.dtype == "float":
        w.op("Identity", value, to=name)
    else:
        w.op("Cast", value, to=name, to_type=getattr(TensorProto, s.dtype.upper()))


def _adds_in_float(s: Signature) -> bool:
    """Whether Q, K and V are float32 from the bias on: ONNX Runtime's CPU provider has no sums of bfloat16."""
    return s.has("bias") and s.dtype == "bfloat16"


def _four_dimensions(w: NodeWriter, s: Signature) -> tuple[str, str, str]:
    """Q, K, V as (B, heads, S, size) with the bias."""
    layout = s.attribute("qkv_layout")
    given = {name: name for name in "QKV" if s.has(name)}
    if _adds_in_float(s):
        given = sums(w, s, {name: _float(w, s, name) for name in given}, _float(w, s, "bias"))
    elif s.has("bias"):
        given = sums(w, s, given)
    if layout != "separate":
        return _unpacked(w, s, given["Q"], layout)
    if s.rank == 4:
        return given["Q"], given["K"], given["V"]
    result = []
    for name, heads, size in (
        ("Q", s.q_heads, s.size),
        ("K", s.kv_heads, s.size),
        ("V", s.kv_heads, s.value_size),
    ):
        assert heads is not None
        shape = w.ints(0, 0, heads, size if size is not None else -1)
        split = w.op("Reshape", given[name], shape)
        result.append(w.op("Transpose", split, perm=[0, 2, 1, 3]))
    return result[0], result[1], result[2]


def _unpacked(w: NodeWriter, s: Signature, packed: str, layout: str) -> tuple[str, str, str]:
    assert s.q_heads is not None
    perm = [1, 2, 0, 3] if layout == "time_major" else [0, 2, 1, 3]
    parts = _heads(w, s, packed, layout, s.q_heads, s.kv_heads or s.q_heads)
    q, k, v = (w.op("Transpose", part, perm=perm) for part in parts)
    return q, k, v


def _repeat_heads(w: NodeWriter, s: Signature, q: str, k: str, v: str) -> tuple[str, str]:
    """K and V with one head for each query head: head h is key head h // (Hq / Hkv)."""
    if s.q_heads is not None and s.q_heads == s.kv_heads:
        return k, v
    if s.q_heads is not None and s.kv_heads is not None:
        group = s.q_heads // s.kv_heads
        index = w.ints(*(head // group for head in range(s.q_heads)))
    elif s.attribute("qkv_layout") != "separate":
        return k, v
    else:
        counts = [w.op("Squeeze", w.size(value, 1)) for value in (q, k)]
        zero, one = (w.constant(np.array(number, np.int64)) for number in (0, 1))
        index = w.op("Div", w.op("Range", zero, counts[0], one), w.op("Div", *counts))
    return w.op("Gather", k, index, axis=1), w.op("Gather", v, index, axis=1)


def _default_scale(w: NodeWriter, q: str) -> str:
    size = w.op("Cast", w.size(q, 3), to_type=TensorProto.FLOAT)
    return w.op("Reciprocal", w.op("Sqrt", size))


def _masked(w: NodeWriter, s: Signature, scores: str, sizes: _Sizes) -> str:
    mask = "attn_mask"
    if s.mask != "bool" and s.mask != "float":
        mask = w.op("Cast", mask, to_type=TensorProto.FLOAT)
    if s.mask_is_short:
        if s.mask == "bool":  # not every runtime pads booleans
            mask = w.op("Where", mask, w.number(0.0), w.number(-np.inf))
        missing = w.op("Sub", sizes.keys, w.size(mask, -1))
        before = w.ints(*[0] * (2 * s.mask_rank - 1))
        pads = w.op("Concat", before, missing, axis=0)
        mask = w.op("Pad", mask, pads, w.number(-np.inf))
        return w.op("Add", scores, mask)
    if s.mask == "bool":
        return w.op("Where", mask, scores, w.number(-np.inf))
    return w.op("Add", scores, mask)


def _structure(w: NodeWriter, s: Signature, scores: str, sizes: _Sizes) -> tuple[str, str | None]:
    """Causality, windows and lengths; also which keys are below the lengths, if there are any."""
    zero, one = (w.constant(np.array(number, np.int64)) for number in (0, 1))
    causal, left = s.attribute("is_causal"), s.attribute("left_window_size")
    right = s.attribute("right_window_size")
    lengths = s.has("nonpad_kv_seqlen")
    if not (causal or lengths or left >= 0 or right >= 0):
        return scores, None
    key = w.op("Range", zero, w.op("Squeeze", sizes.keys), one)
    allowed: list[str] = []
    below = offset = None
    if lengths:
        clipped = w.op("Max", w.op("Min", "nonpad_kv_seqlen", sizes.keys), w.ints(0))
        length = w.op("Reshape", clipped, w.ints(-1, 1, 1, 1))
        below = w.op("Less", key, length)
        allowed.append(below)
        offset = w.op("Sub", length, sizes.queries)
    elif s.has("past_key"):
        offset = w.size("past_key", 2)
    if causal or left >= 0 or right >= 0:
        query = w.op("Range", zero, w.op("Squeeze", sizes.queries), one)
        position = w.op("Unsqueeze", query, w.ints(1))
        if offset is not None:
            position = w.op("Add", position, offset)
        bounds = [0] if causal else []
        bounds += [right] if right >= 0 else []
        if bounds:
            last = w.op("Add", position, w.ints(min(bounds))) if min(bounds) else position
            allowed.append(w.op("LessOrEqual", key, last))
        if left >= 0:
            first = w.op("Sub", position, w.ints(left))
            allowed.append(w.op("GreaterOrEqual", key, first))
    both = allowed[0]
    for other in allowed[1:]:
        both = w.op("And", both, other)
    return w.op("Where", both, scores, w.number(-np.inf)), below


def _softmax(w: NodeWriter, s: Signature, scores: str, below: str | None) -> str:
    """The weights; zero (or even, over the keys below the lengths) where no key is seen."""
    may_be_empty = s.mask or s.has("nonpad_kv_seqlen") or s.attribute("left_window_size") >= 0
    zero = w.number(0.0)
    if s.has("lse") or (may_be_empty and not s.has("sinks")):
        top = _reduce(w, s, "ReduceMax", scores)
        empty = w.op("Equal", top, w.number(-np.inf))
    if s.has("lse"):
        finite_top = w.op("Where", empty, zero, top)
        total = _reduce(w, s, "ReduceSum", w.op("Exp", w.op("Sub", scores, finite_top)))
        lse = w.op("Add", finite_top, w.op("Log", total))
        w.op("Squeeze", lse, w.ints(3), to="lse")
    if s.has("sinks"):
        heads = w.op("Reshape", "sinks", w.ints(1, -1, 1, 1))
        rows = w.op("Concat", w.size(scores, 0), w.ints(1), w.size(scores, 2), w.ints(1), axis=0)
        both = w.op("Softmax", w.op("Concat", scores, w.op("Expand", heads, rows), axis=3), axis=3)
        return w.op("Slice", both, w.ints(0), w.ints(-1), w.ints(3))
    if not may_be_empty:
        return w.op("Softmax", scores, axis=3)
    if s.attribute("empty_row") != "mean":
        return w.op("Where", empty, zero, w.op("Softmax", scores, axis=3))
    fill = zero
    if below is not None:
        fill = w.op("Where", below, zero, w.number(-np.inf))
        some = w.op("Greater", _reduce(w, s, "ReduceMax", fill), w.number(-np.inf))
        fill = w.op("Where", some, fill, zero)
    weights = w.op("Softmax", w.op("Where", empty, fill, scores), axis=3)
    if below is not None:  # no key at all below the length: nothing to take the mean of
        return w.op("Where", w.op("And", empty, w.op("Not", some)), zero, weights)
    return weights


def _reduce(w: NodeWriter, s: Signature, op_type: str, value: str) -> str:
    """A reduction over the last axis, kept."""
    if op_type == "ReduceMax" and s.opset < 18:
        return w.op(op_type, value, axes=[-1], keepdims=1)
    return w.op(op_type, value, w.ints(-1), keepdims=1)
