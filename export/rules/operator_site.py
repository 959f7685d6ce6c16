"""Operators that are attention as a whole: their tensors in the best form, their masks at their smallest."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import onnx_ir as ir
from flashonnx.export import schema
from flashonnx.export.build import Builder
from flashonnx.export.dims import Dim
from flashonnx.export.products import Roles
from flashonnx.export.rules.arrange import Arrangement, arrange
from flashonnx.export.rules.base import Fusion, Rewrite
from flashonnx.export.rules.layouts import Heads, Operand, Tensors
from flashonnx.export.rules.mask_inputs import MaskBuilder, ScoreAxes, full_lengths
from flashonnx.export.rules.scores import RefusalError, Term
from flashonnx.export.structure import Window

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_LABELS = ("b", "h", "q", "k")
_ROLES = Roles(("b", "h"), "q", "k", "d", True)


@dataclasses.dataclass
class Site:
    """One operator: what FlashAttention gets for it, by name, and what becomes of its outputs.

    Q, K and V have three or four dimensions each, not necessarily as many.
    """

    node: ir.Node
    inputs: dict[str, ir.Value | None]
    attributes: dict[str, Any]
    outputs: list[ir.Value]
    remark: str = ""


def is_used(value: ir.Value) -> bool:
    return bool(value.name) and (bool(value.uses()) or value.is_graph_output())


def name_of(kind: ir.DataType | None) -> str:
    return kind.name.lower() if kind is not None else "of unknown type"


def rewrite_site(fusion: Fusion, site: Site, builder: Builder) -> Rewrite:
    """The fused node for `site`, behind what `builder` has.

    Raises:
        RefusalError: Q, K and V have different ranks and the shapes do not tell how to make them one.
    """
    arrangement = _arrangement(fusion, site)
    _improve_mask(fusion, site, builder)
    inputs = [site.inputs[name] for name in schema.INPUTS]
    rank = fusion.facts.rank(site.inputs["Q"])
    assert rank is not None
    if arrangement is not None:
        inputs[:3] = arrangement.inputs(builder)
        rank = arrangement.rank
        for name in ("q_num_heads", "kv_num_heads"):
            site.attributes.pop(name, None)
        site.attributes |= arrangement.layout_attributes()
    elif any(fusion.facts.rank(value) != rank for value in inputs[1:3] if value is not None):
        raise RefusalError("Q, K and V have different ranks, and the model's shapes do not show how they fit")
    output = fusion.attention(builder, inputs, site.attributes, rank, outputs=len(site.outputs))
    made = output.producer()
    assert made is not None
    replaced = dict(zip(site.outputs, made.outputs, strict=True))
    for old in [old for old in site.outputs[1:] if not is_used(old)]:
        replaced.pop(old).name = ""  # else it would be computed, for nobody
    if arrangement is not None:
        del replaced[site.outputs[0]]
        replaced = {arrangement.way_out.replaces: arrangement.way_out.build(builder, output), **replaced}
    return Rewrite(builder, replaced, (site.node,), site.remark, output)


def _arrangement(fusion: Fusion, site: Site) -> Arrangement | None:
    """Where the tensors really come from; None where they stay as they are."""
    q, k, v = (site.inputs[name] for name in "QKV")
    rank, key_dims = fusion.facts.rank(q), fusion.facts.dims(k)
    if q is None or k is None or v is None or rank not in (3, 4) or key_dims is None or len(key_dims) != rank:
        return None
    if site.inputs["past_key"] is not None or any(is_used(value) for value in site.outputs[1:3]):
        return None
    q_heads, kv_heads = (site.attributes[name] if rank == 3 else None for name in ("q_num_heads", "kv_num_heads"))
    # In three dimensions heads and size are one axis.
    labels = (lambda s, d: ("b", "h", s, d)) if rank == 4 else (lambda s, d: ("b", s, "h", d))
    tensors = Tensors(
        Operand(q, labels("q", "d"), q_heads),
        Operand(k, labels("k", "d"), kv_heads),
        Operand(v, labels("k", "e"), kv_heads),
        Operand(site.outputs[0], labels("q", "e"), q_heads),
        _ROLES,
        "e",
        Dim.of(kv_heads) if kv_heads is not None else key_dims[1],
    )
    try:
        found = arrange(fusion.facts, tensors, scales=False)
        found.layout_attributes()
        return found
    except RefusalError:
        return None  # one to one, then


def _improve_mask(fusion: Fusion, site: Site, builder: Builder) -> None:
    """Turns the mask into structure, or into its smallest tensor, where that is proved to be the same."""
    facts, mask = fusion.facts, site.inputs["attn_mask"]
    axes = _score_axes(fusion, site)
    dims = facts.dims(mask)
    if mask is None or axes is None or dims is None or not dims:
        return
    key = axes.dims[-1]
    plain = site.attributes.get("empty_row", "zero") == "zero" and site.inputs["nonpad_kv_seqlen"] is None
    if dims[-1] != key or dims[-1] == 1 or not plain:
        return  # a shorter mask is padded with -inf, not broadcast
    is_bool = facts.dtype(mask) == ir.DataType.BOOL
    term = Term(mask, -math.inf, is_bias=False, inverted=True) if is_bool else Term(mask, 1.0, is_bias=True)
    kind = facts.dtype(site.inputs["Q"])
    assert kind is not None
    past = facts.dims(site.inputs["past_key"])
    before = _window(site)
    # Where the queries stand is settled by a past, or by what the node has already.
    offset = past[2] if past is not None else Dim.of(0) if before != Window() else None
    operand = Operand(mask, ("b", "h", "q", "k")[4 - len(dims) :])  # gives the number of keys
    alike = (site.node.graph, term, axes, kind, offset)
    result = fusion.masks.get(alike)
    if result is None:
        try:
            result = MaskBuilder(facts, fusion.reducer, builder, axes, operand, kind, offset).build([term], True)
        except RefusalError:
            return
        fusion.masks[alike] = result
    site.inputs["attn_mask"] = result.value
    if result.from_last:
        q, k, rank = site.inputs["Q"], site.inputs["K"], facts.rank(site.inputs["K"])
        assert q is not None and k is not None and rank is not None
        lengths = fusion.masks.get((alike, "lengths")) or full_lengths(builder, q, k, rank)
        fusion.masks[alike, "lengths"] = site.inputs["nonpad_kv_seqlen"] = lengths
    for name in ("is_causal", "left_window_size", "right_window_size"):
        site.attributes.pop(name, None)
    site.attributes |= (before & result.window).attributes()
    if result.empty_row != "zero":
        site.attributes["empty_row"] = result.empty_row


def _window(site: Site) -> Window:
    """The window of the node as it is."""
    left, right = (site.attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    given = Window(left if left >= 0 else None, right if right >= 0 else None)
    return given & Window(right=0) if site.attributes.get("is_causal") else given


def _score_axes(fusion: Fusion, site: Site) -> ScoreAxes | None:
    """The axes of the scores; None where the shapes do not tell."""
    facts, attributes = fusion.facts, site.attributes
    q, k = facts.dims(site.inputs["Q"]), facts.dims(site.inputs["K"])
    if q is None or k is None or len(q) not in (3, 4) or len(k) != len(q):
        return None
    if len(q) == 4:
        batch, heads, queries, keys = q[0], q[1], q[2], k[2]
    else:
        batch, queries, keys = q[0], q[1], k[1]
        heads = Dim.of(attributes["q_num_heads"])
    past = facts.dims(site.inputs["past_key"])
    if site.inputs["past_key"] is not None:
        if past is None or len(past) != 4:
            return None
        keys = keys + past[2]
    return ScoreAxes(_LABELS, (batch, heads, queries, keys), _ROLES, Heads(batch, heads), True)
