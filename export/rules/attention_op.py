"""The standard Attention operator, and nodes that are FlashAttention already, in their best form."""

from __future__ import annotations

import onnx_ir as ir
from flashonnx.export.operator import schema
from flashonnx.export.rules.base import Fusion, Rewrite, Rule
from flashonnx.export.rules.operator_site import FLOATS, Site, is_used, name_of, rewrite_site
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.sites.finder import Candidate


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
        site = read_operator(candidate, fusion.opset)
        check_types(fusion, site)
        return rewrite_site(fusion, site, fusion.builder(site.node))


def read_operator(candidate: Candidate, opset: int) -> Site:
    node = candidate.node
    is_standard = candidate.kind == "Attention"
    names = schema.INPUTS[: schema.INPUTS.index("sinks")] if is_standard else schema.INPUTS
    inputs: dict[str, ir.Value | None] = dict.fromkeys(schema.INPUTS)
    inputs.update(zip(names, node.inputs, strict=False))
    attributes = {name: node.attributes[name].value for name in schema.ATTRIBUTES if name in node.attributes}
    outputs = list(node.outputs)
    if is_standard and len(outputs) > 3 and is_used(outputs[3]):
        raise RefusalError(
            f"qk_matmul_output ('{outputs[3].name}') is used; the fused operator never forms the scores, "
            "so remove that output"
        )
    outputs = outputs[: 3 if is_standard else 4]
    while len(outputs) > 1 and not is_used(outputs[-1]):
        outputs.pop()
    remark = f"opset {opset} has no Attention: the model was invalid" if is_standard and opset < 23 else ""
    return Site(node, inputs, attributes, outputs, remark=remark)


def check_types(fusion: Fusion, site: Site) -> None:
    facts, attributes = fusion.facts, site.attributes
    kind = facts.dtype(site.inputs["Q"])
    if kind not in FLOATS:
        raise RefusalError(f"Q is {name_of(kind)}; there are kernels for float32, float16 and bfloat16")
    for name in ("K", "V"):
        other = facts.dtype(site.inputs[name])
        if site.inputs[name] is not None and other != kind:
            raise RefusalError(f"{name} is {name_of(other)}, Q is {name_of(kind)}; cast them to one type")
    if attributes.pop("softmax_precision", None) == int(ir.DataType.DOUBLE):
        raise RefusalError("softmax_precision is double; the operator's softmax is float32")
    scale = attributes.get("scale")
    if scale is not None and not scale > 0:
        raise RefusalError(f"the scale {scale} is not positive")
    mask = site.inputs["attn_mask"]
    mask_kind = facts.dtype(mask)
    if mask is not None and mask_kind not in (kind, ir.DataType.FLOAT, ir.DataType.BOOL):
        raise RefusalError(f"attn_mask is {name_of(mask_kind)}; cast it to bool, to Q's type or to float32")
    if site.inputs["past_key"] is not None and site.inputs["nonpad_kv_seqlen"] is not None:
        raise RefusalError("past_key and nonpad_kv_seqlen together have no defined meaning")
    rank = facts.rank(site.inputs["Q"])
    if rank is None:
        raise RefusalError("the rank of Q is not known; run onnx.shape_inference first")
    counted = attributes.get("q_num_heads") and attributes.get("kv_num_heads")
    if rank == 3 and not counted and attributes.get("qkv_layout", "separate") == "separate":
        raise RefusalError("Q has three dimensions, so q_num_heads and kv_num_heads must be given")
