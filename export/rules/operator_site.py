"""Operators that are attention as a whole: their tensors in the best form, their masks at their smallest."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import onnx_ir as ir
from flashonnx.export.layout.products import Roles
from flashonnx.export.masks.structure import Window
from flashonnx.export.model.build import Builder
from flashonnx.export.operator import schema
from flashonnx.export.rules import scales
from flashonnx.export.rules.arrange import Arrangement, arrange
from flashonnx.export.rules.base import Fusion, Rewrite
from flashonnx.export.rules.layouts import Heads, Operand, Tensors
from flashonnx.export.rules.mask_inputs import MaskBuilder, ScoreAxes, full_lengths
from flashonnx.export.rules.scores import RefusalError, Term
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_LABELS = ("b", "h", "q", "k")
ROLES = Roles(("b", "h"), "q", "k", "d", True)


@dataclasses.dataclass
class Site:
    """One operator: what FlashAttention gets for it, by name, and what becomes of its outputs.

    Attributes:
        node: the operator.
        inputs: by schema.INPUTS. Q, K and V have three or four dimensions each, not necessarily as
            many, or Q alone is packed.
        attributes: of the fused node, head counts of three dimensions included.
        outputs: the operator's own, in the order of schema.OUTPUTS.
        present: an output that holds present keys and values, one behind the other.
        remark: what the user should know.
    """

    node: ir.Node
    inputs: dict[str, ir.Value | None]
    attributes: dict[str, Any]
    outputs: list[ir.Value]
    present: ir.Value | None = None
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
    gives_keys = site.present is not None or any(is_used(value) for value in site.outputs[1:3])
    keys = site.inputs["past_key"] is None and not gives_keys  # else those are as large as K is now
    scales.fold(fusion.facts, builder, site.inputs, site.attributes, keys=keys)
    arrangement = _arrangement(fusion, site)
    _improve_mask(fusion, site, builder)
    inputs = [site.inputs[name] for name in schema.INPUTS]
    rank = 4 if fusion.facts.rank(site.inputs["Q"]) == 4 else 3
    if arrangement is not None:
        inputs[:3] = arrangement.inputs(builder)
        rank = arrangement.rank
        for name in ("q_num_heads", "kv_num_heads"):
            site.attributes.pop(name, None)
        site.attributes |= arrangement.layout_attributes()
    elif any((fusion.facts.rank(value) == 4) != (rank == 4) for value in inputs[1:3] if value is not None):
        raise RefusalError("Q, K and V have different ranks, and the model's shapes do not show how they fit")
    count = len(site.outputs) if site.present is None else 3
    output = fusion.attention(builder, inputs, site.attributes, rank, outputs=count)
    made = output.producer()
    assert made is not None
    replaced = dict(zip(site.outputs, made.outputs, strict=False))
    if site.present is not None:
        parts = [builder.op("Unsqueeze", value, builder.ints([0])) for value in made.outputs[1:3]]
        replaced[site.present] = builder.op("Concat", *parts, axis=0)
    for old in [old for old in site.outputs[1:] if not is_used(old)]:
        replaced.pop(old).name = ""  # else it would be computed, for nobody
    if arrangement is not None:
        del replaced[site.outputs[0]]
        replaced = arrangement.replaced(fusion.facts, builder, output, ()) | replaced
    asking = (node for old in replaced if (node := old.producer()) is not None)
    return Rewrite(builder, replaced, (site.node, *asking), site.remark, output)


def operand_of(facts: Facts, value: ir.Value, heads: int | None, sequence: str, size: str) -> Operand | None:
    """A tensor of three or four dimensions with its axes named; in three, heads and size are one."""
    rank = facts.rank(value)
    if rank == 4:
        return Operand(value, ("b", "h", sequence, size))
    return Operand(value, ("b", sequence, "h", size), heads) if rank == 3 and heads else None


def _arrangement(fusion: Fusion, site: Site) -> Arrangement | None:
    """Where the tensors really come from; None where they stay as they are."""
    q, k, v = (site.inputs[name] for name in "QKV")
    if q is None or k is None or v is None or site.inputs["past_key"] is not None or site.present is not None:
        return None
    if any(is_used(value) for value in site.outputs[1:3]):
        return None
    q_heads, kv_heads = site.attributes.get("q_num_heads"), site.attributes.get("kv_num_heads")
    facts = fusion.facts
    query, key = operand_of(facts, q, q_heads, "q", "d"), operand_of(facts, k, kv_heads, "k", "d")
    value, output = operand_of(facts, v, kv_heads, "k", "e"), operand_of(facts, site.outputs[0], q_heads, "q", "e")
    if query is None or key is None or value is None or output is None:
        return None
    key_dims = facts.dims(k)
    assert key_dims is not None
    key_heads = key_dims[1] if len(key_dims) == 4 else Dim.of(kv_heads or 0)
    tensors = Tensors(query, key, value, output, ROLES, "e", key_heads)
    try:
        found = arrange(facts, tensors, scales=False)
        found.layout_attributes()
    except RefusalError:
        return None  # one to one, then
    # A bias is Q's, K's and V's, one behind the other, with as many heads.
    moved = found.layout == "h3d" or found.key.heads != key_heads
    return None if site.inputs["bias"] is not None and moved else found


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
    elif result.lengths is not None:
        site.inputs["nonpad_kv_seqlen"] = result.lengths
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
    facts = fusion.facts
    q, k = facts.dims(site.inputs["Q"]), facts.dims(site.inputs["K"])
    if q is None or k is None or not {len(q), len(k)} <= {3, 4}:
        return None
    batch, queries, keys = q[0], q[-2], k[-2]  # in three dimensions as in four
    heads = q[1] if len(q) == 4 else Dim.of(site.attributes["q_num_heads"])
    past = facts.dims(site.inputs["past_key"])
    if site.inputs["past_key"] is not None:
        if past is None or len(past) != 4:
            return None
        keys = keys + past[2]
    return ScoreAxes(_LABELS, (batch, heads, queries, keys), ROLES, Heads(batch, heads), True)
