"""The standard Attention operator, one to one."""

from __future__ import annotations

import onnx_ir as ir
from flashonnx.export import schema
from flashonnx.export.rules.base import Fusion, Rewrite, Rule
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.sites import Candidate

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_MASK_INDEX = schema.INPUTS.index("attn_mask")
_LENGTHS_INDEX = schema.INPUTS.index("nonpad_kv_seqlen")
_ATTRIBUTES = (
    "is_causal",
    "q_num_heads",
    "kv_num_heads",
    "scale",
    "softcap",
    "left_window_size",
    "right_window_size",
    "softmax_precision",
)


class StandardAttention(Rule):
    """ONNX Attention of opsets 23 to 25 (and later ones that only add what is not used).

    Accepts every input and attribute, three or four dimensions, in float32, float16 or bfloat16,
    with a bool mask or one of Q's type or float32. Refuses qk_matmul_output (the fused operator
    never forms it), softmax_precision double, and types that have no kernel. The three versions
    mean the same (ONNX corrected the text of 23 and 24 in place), so one rule serves them.
    """

    kinds = ("Attention",)

    def rewrite(self, fusion: Fusion, candidate: Candidate) -> Rewrite:
        node, facts = candidate.node, fusion.facts
        _check_outputs(node)
        kind = facts.dtype(node.inputs[0])
        if kind is None or kind not in _FLOATS:
            name = kind.name.lower() if kind is not None else "unknown"
            raise RefusalError(f"Q is {name}; there are kernels for float32, float16 and bfloat16")
        for index in (1, 2):
            other = facts.dtype(node.inputs[index])
            if other != kind:
                raise RefusalError(f"{'QKV'[index]} is not {kind.name.lower()} as Q is")
        attributes = {name: node.attributes[name].value for name in _ATTRIBUTES if name in node.attributes}
        if attributes.get("softmax_precision") == int(ir.DataType.DOUBLE):
            raise RefusalError("softmax_precision is double; the operator's softmax is float32")
        attributes.pop("softmax_precision", None)  # at most float32, which it always is
        scale = attributes.get("scale")
        if scale is not None and not scale > 0:  # type: ignore[operator]
            raise RefusalError(f"the scale {scale} is not positive")
        inputs = list(node.inputs) + [None] * (len(schema.INPUTS) - 1 - len(node.inputs))
        _check_inputs(fusion, node, inputs)
        mask = inputs[_MASK_INDEX]
        if mask is not None:
            inputs[_MASK_INDEX] = _reduced_mask(fusion, mask)
        builder = fusion.builder(node)
        used = list(node.outputs[:3])
        while len(used) > 1 and not (used[-1].name and (used[-1].uses() or used[-1].is_graph_output())):
            used.pop()
        rank = facts.rank(node.outputs[0]) or facts.rank(node.inputs[0])
        if rank is None:
            raise RefusalError("the rank of Q is not known; run onnx.shape_inference first")
        output = fusion.attention(builder, inputs, attributes, rank, outputs=len(used))
        made = output.producer()
        assert made is not None
        return Rewrite(builder, dict(zip(used, made.outputs, strict=True)), (node,), "", output)


def _check_outputs(node: ir.Node) -> None:
    if len(node.outputs) > 3:
        extra = node.outputs[3]
        if extra.uses() or extra.is_graph_output():
            raise RefusalError(
                f"qk_matmul_output ('{extra.name}') is used; the fused operator never forms the "
                "scores, so remove that output"
            )


def _check_inputs(fusion: Fusion, node: ir.Node, inputs: list[ir.Value | None]) -> None:
    facts = fusion.facts
    mask = inputs[_MASK_INDEX]
    if mask is not None:
        kind = facts.dtype(mask)
        if kind not in (facts.dtype(node.inputs[0]), ir.DataType.FLOAT, ir.DataType.BOOL):
            name = kind.name.lower() if kind is not None else "unknown"
            raise RefusalError(f"attn_mask is {name}; cast it to bool, to Q's type or to float32")
    past = inputs[schema.INPUTS.index("past_key")] is not None
    if past and inputs[_LENGTHS_INDEX] is not None:
        raise RefusalError("past_key and nonpad_kv_seqlen together have no defined meaning")


def _reduced_mask(fusion: Fusion, mask: ir.Value) -> ir.Value | None:
    """The mask on its smallest tensor, with the same last dimension; None if it masks nothing."""
    facts = fusion.facts
    dims = facts.dims(mask)
    if dims is None:
        return mask
    reduced = fusion.reducer.reduce(mask)
    small = facts.dims(reduced)
    if small is None or not small or small[-1] != dims[-1]:
        return mask
    return reduced
