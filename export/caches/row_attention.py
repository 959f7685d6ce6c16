"""Attention among new tokens, and to caches: which keeps them apart."""

from __future__ import annotations

import onnx_ir as ir
from flashonnx.export.caches.row_axes import Axes, Free, MixedError, Rows, repeats
from flashonnx.export.layout.factors import Factor
from flashonnx.export.operator import schema
from flashonnx.export.operator.cache_schema import CACHE_INPUTS
from flashonnx.export.rules.contributed import DOMAIN as MICROSOFT
from flashonnx.export.values.operator_shapes import integer


def attention(rows: Rows, node: ir.Node) -> Axes:
    """Without a past: causal among the new tokens, or to keys that are not of them."""
    given = dict(zip(schema.INPUTS, node.inputs, strict=False))
    if given.get("past_key") is not None:
        raise MixedError("it has a past that is no cache")
    rows.free(given.get("sinks"))
    rows.free(given.get("bias"))
    query = rows.axes(node.inputs[0])
    layout = node.attributes["qkv_layout"].as_string() if "qkv_layout" in node.attributes else "separate"
    if layout == "time_major":
        raise MixedError("its tokens come before the batch")
    among = _lies(rows, node.inputs[0], layout == "separate")
    for value in node.inputs[1:3]:
        if value is not None and _lies(rows, value) != among:
            among = False
            for axes in map(rows.axes, node.inputs[1:3]):
                if any(rows.tokens in axis for axis in axes):
                    raise MixedError("not all of Q, K and V are of new tokens")
    causal = integer(node, "is_causal") or integer(node, "right_window_size", -1) == 0
    windows = [integer(node, f"{side}_window_size", -1) for side in ("left", "right")]
    if among and not causal:
        raise MixedError("it lets a token see those behind it, and so the padding of a shorter sentence")
    if given.get("nonpad_kv_seqlen") is not None and (causal or windows != [-1, -1]):
        raise MixedError("its triangle or window ends at the last key, which may be padding")
    _of_sentences(rows, given.get("nonpad_kv_seqlen"))
    _masked(rows, given.get("attn_mask"), among)
    heads = [rows.of_output(node, 1)] if len(rows.dims(node.outputs[0])) == 4 else []
    return (query[0], *heads, query[-2 if layout == "separate" else 1], rows.of_output(node, -1))


def _masked(rows: Rows, mask: ir.Value | None, among: bool) -> None:
    """Requires that a mask is (batch, heads, queries, keys)."""
    if mask is None or isinstance(rows.state(mask), Free):
        return
    axes = rows.axes(mask)
    keys = [rows.tokens] if among else []
    _at(rows, mask, ((),) * (4 - len(axes)) + axes, [[rows.batch], [], [rows.tokens], keys])


def _of_sentences(rows: Rows, value: ir.Value | None) -> None:
    """Requires one number for each sentence."""
    if value is not None:
        _at(rows, value, rows.axes(value), [[rows.batch]])


def _lies(rows: Rows, value: ir.Value | None, separate: bool = True) -> bool:
    """Whether Q, K or V, (batch, tokens, ...) or (batch, heads, tokens, size), is of the new tokens.

    Raises:
        MixedError: it has them elsewhere.
    """
    axes = rows.axes(value)
    if len(axes) < 2:
        raise MixedError(f"'{value.name if value is not None else ''}' has fewer than two dimensions")
    expected: list[list[Factor]] = [[] for _ in axes]
    place = 2 if len(axes) == 4 and separate else 1
    expected[0], expected[place] = [rows.batch], [rows.tokens]
    _at(rows, value, axes, expected)
    return axes[place] == (rows.tokens,)


def _at(rows: Rows, value: ir.Value | None, axes: Axes, expected: list[list[Factor]]) -> None:
    for axis, known in zip(axes, expected, strict=True):
        is_other = rows.is_labelled(axis) and (len(axis) > 1 or axis[0] not in known)
        if is_other or (rows.batch in known and axis and not rows.is_labelled(axis) and not repeats(axis)):
            name = value.name if value is not None else ""
            raise MixedError(f"'{name}' has tokens or sentences along other axes than attention")


def cached_attention(rows: Rows, node: ir.Node) -> Axes:
    """New tokens of each sentence behind those in its cache."""
    given = dict(zip(CACHE_INPUTS, node.inputs, strict=False))
    if given.get("cu_seqlens_q") is not None or given.get("attn_mask") is not None:
        raise MixedError("its tokens are packed, or masked")
    rows.free(given.get("sinks"), given.get("cos_cache"), given.get("sin_cache"))
    _of_sentences(rows, given.get("cache_lengths"))
    for name in "QKV":
        if name == "Q" or given.get(name) is not None:  # packed, Q has all three
            _lies(rows, given.get(name))
    if not integer(node, "is_causal", 1) and integer(node, "right_window_size", -1) != 0 and rows.tokens.size != 1:
        raise MixedError("it lets a token see those behind it, and so the padding of a shorter sentence")
    if given.get("position_ids") is not None:
        rows.axes(given["position_ids"])
    return (*rows.axes(given["Q"])[:-1], rows.of_output(node, -1))


def rotary(rows: Rows, node: ir.Node) -> Axes:
    """Each token turned by its position."""
    axes = rows.axes(node.inputs[0])
    _lies(rows, node.inputs[0])
    if integer(node, "is_packed_batching"):
        raise MixedError("its tokens are packed")
    others = [node.inputs[1]] if node.domain == MICROSOFT else [*node.inputs[1:4]]
    rows.free(*node.inputs[2:] if node.domain == MICROSOFT else ())
    for value in others:
        if value is not None and not isinstance(rows.state(value), Free):
            _lies(rows, value)
    return axes
