"""The standard Attention operator, and nodes that are FlashAttention already, in their best form."""

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
from flashonnx.export.rules.base import Fusion, Rewrite, Rule
from flashonnx.export.rules.layouts import Heads, Operand, Tensors
from flashonnx.export.rules.mask_inputs import MaskBuilder, ScoreAxes, combined_bounds
from flashonnx.export.rules.scores import RefusalError, Term
from flashonnx.export.sites import Candidate
from flashonnx.export.structure import Structure

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_LABELS = ("b", "h", "q", "k")
_ROLES = Roles(("b", "h"), "q", "k", "d", True)


@dataclasses.dataclass
class _Site:
    """One operator: its inputs and attributes by name, and what becomes of them."""

    node: ir.Node
    inputs: dict[str, ir.Value | None]
    attributes: dict[str, Any]
    outputs: list[ir.Value]
    remark: str


class StandardAttention(Rule):
    """ONNX Attention of opsets 23 to 25 (and later ones that only add what is not used).

    Accepts every input and attribute, three or four dimensions, in float32, float16 or bfloat16,
    with a bool mask or one of Q's type or float32. Refuses qk_matmul_output (the fused operator
    never forms it), softmax_precision double, and types that have no kernel. The three versions
    mean the same (ONNX corrected the text of 23 and 24 in place), so one rule serves them.

    Four-dimensional inputs that are transposed three-dimensional ones are taken as those, K and V
    repeated from fewer heads without the repetition, masks on their smallest tensor; a mask that is
    true (or zero) everywhere goes, a causal one becomes is_causal. FlashAttention nodes that are
    there already, as exporters make them, go the same way.
    """

    kinds = ("Attention", schema.OP_TYPE)

    def rewrite(self, fusion: Fusion, candidate: Candidate) -> Rewrite:
        site = _read(candidate, fusion.opset)
        _check_types(fusion, site)
        builder = fusion.builder(site.node)
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
        output = fusion.attention(builder, inputs, site.attributes, rank, outputs=len(site.outputs))
        made = output.producer()
        assert made is not None
        replaced = dict(zip(site.outputs, made.outputs, strict=True))
        for old in [old for old in site.outputs[1:] if not _is_used(old)]:
            replaced.pop(old).name = ""  # else it would be computed, for nobody
        if arrangement is not None:
            del replaced[site.outputs[0]]
            replaced = {arrangement.way_out.replaces: arrangement.way_out.build(builder, output), **replaced}
        return Rewrite(builder, replaced, (site.node,), site.remark, output)


def _read(candidate: Candidate, opset: int) -> _Site:
    node = candidate.node
    is_standard = candidate.kind == "Attention"
    names = schema.INPUTS[:-1] if is_standard else schema.INPUTS
    inputs: dict[str, ir.Value | None] = dict.fromkeys(schema.INPUTS)
    inputs.update(zip(names, node.inputs, strict=False))
    attributes = {name: node.attributes[name].value for name in schema.ATTRIBUTES if name in node.attributes}
    outputs = list(node.outputs)
    if is_standard and len(outputs) > 3 and _is_used(outputs[3]):
        raise RefusalError(
            f"qk_matmul_output ('{outputs[3].name}') is used; the fused operator never forms the scores, "
            "so remove that output"
        )
    outputs = outputs[: 3 if is_standard else 4]
    while len(outputs) > 1 and not _is_used(outputs[-1]):
        outputs.pop()
    remark = f"opset {opset} has no Attention: the model was invalid" if is_standard and opset < 23 else ""
    return _Site(node, inputs, attributes, outputs, remark)


def _is_used(value: ir.Value) -> bool:
    return bool(value.name) and (bool(value.uses()) or value.is_graph_output())


def _check_types(fusion: Fusion, site: _Site) -> None:
    facts, attributes = fusion.facts, site.attributes
    kind = facts.dtype(site.inputs["Q"])
    if kind not in _FLOATS:
        raise RefusalError(f"Q is {_name(kind)}; there are kernels for float32, float16 and bfloat16")
    for name in ("K", "V"):
        other = facts.dtype(site.inputs[name])
        if site.inputs[name] is not None and other != kind:
            raise RefusalError(f"{name} is {_name(other)}, Q is {_name(kind)}; cast them to one type")
    if attributes.pop("softmax_precision", None) == int(ir.DataType.DOUBLE):
        raise RefusalError("softmax_precision is double; the operator's softmax is float32")
    scale = attributes.get("scale")
    if scale is not None and not scale > 0:
        raise RefusalError(f"the scale {scale} is not positive")
    mask = site.inputs["attn_mask"]
    mask_kind = facts.dtype(mask)
    if mask is not None and mask_kind not in (kind, ir.DataType.FLOAT, ir.DataType.BOOL):
        raise RefusalError(f"attn_mask is {_name(mask_kind)}; cast it to bool, to Q's type or to float32")
    if site.inputs["past_key"] is not None and site.inputs["nonpad_kv_seqlen"] is not None:
        raise RefusalError("past_key and nonpad_kv_seqlen together have no defined meaning")
    rank = facts.rank(site.inputs["Q"])
    if rank is None:
        raise RefusalError("the rank of Q is not known; run onnx.shape_inference first")
    counted = attributes.get("q_num_heads") and attributes.get("kv_num_heads")
    if rank == 3 and not counted and attributes.get("qkv_layout", "separate") == "separate":
        raise RefusalError("Q has three dimensions, so q_num_heads and kv_num_heads must be given")


def _arrangement(fusion: Fusion, site: _Site) -> Arrangement | None:
    """Where the tensors really come from; None where they stay as they are."""
    q, k, v = (site.inputs[name] for name in "QKV")
    rank, key_dims = fusion.facts.rank(q), fusion.facts.dims(k)
    if q is None or k is None or v is None or rank not in (3, 4) or key_dims is None or len(key_dims) != rank:
        return None
    if site.inputs["past_key"] is not None or any(_is_used(value) for value in site.outputs[1:3]):
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


def _improve_mask(fusion: Fusion, site: _Site, builder: Builder) -> None:
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
    offset = past[2] if past is not None else Dim.of(0)
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
    before = Structure(
        site.attributes["left_window_size"] if site.attributes.get("left_window_size", -1) >= 0 else None,
        0 if site.attributes.get("is_causal") else None,
    )
    right = site.attributes.get("right_window_size", -1)
    if right >= 0:
        before &= Structure(right=right)
    for name in ("is_causal", "left_window_size", "right_window_size"):
        site.attributes.pop(name, None)
    site.attributes |= combined_bounds(before & result.bounds)
    if result.empty_row != "zero":
        site.attributes["empty_row"] = result.empty_row


def _score_axes(fusion: Fusion, site: _Site) -> ScoreAxes | None:
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


def _name(kind: ir.DataType | None) -> str:
    return kind.name.lower() if kind is not None else "of unknown type"
