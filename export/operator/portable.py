"""Function bodies of fused nodes, so that a fused model also runs without the library.

Each distinct signature (attributes, inputs and outputs present, element type, head counts) gets a
model-local function of the operator's name with its own ``overload``. ONNX Runtime uses the custom
op when the library is registered and the body when it is not. Rules learnt from ONNX Runtime 1.32:
formals and outputs must be exactly those used (holes keep their place), attributes must be baked
into the body, and the body's opset must be the model's.

The body is one standard Attention where the opset can say everything and ONNX Runtime's CPU
provider computes it rightly, else plain operators in float32.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from flashonnx.export.operator import cache_bodies, schema
from flashonnx.export.operator.bodies import plain_body, standard_body
from flashonnx.export.operator.nodes import NodeWriter
from flashonnx.export.values.facts import Facts

MINIMUM_OPSET = 13
MINIMUM_IR_VERSION = 10  # the first with function overloads


@dataclasses.dataclass(frozen=True)
class Signature:
    """All that a body depends on.

    Attributes:
        opset: version of the default domain, the model's own.
        inputs: which of schema.INPUTS are present; the last is present.
        outputs: which of schema.OUTPUTS are present; the last is present.
        attributes: every attribute that is not at its default, sorted.
        dtype: Q's element type.
        rank: Q's rank.
        q_heads, kv_heads: head counts, None where only the shapes tell them at run time.
        size, value_size: head sizes of Q and V, None where not known.
        mask: "", "bool" or the float type's name.
        mask_rank: the mask's rank, 0 without one.
        mask_is_short: whether its last dimension may be shorter than the keys.
        mask_rows: whether its queries dimension is proved to be the queries'.
    """

    opset: int
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    attributes: tuple[tuple[str, Any], ...]
    dtype: str
    rank: int
    q_heads: int | None
    kv_heads: int | None
    size: int | None
    value_size: int | None
    mask: str = ""
    mask_rank: int = 0
    mask_is_short: bool = False
    mask_rows: bool = False

    def has(self, name: str) -> bool:
        """Whether an input or output is present."""
        for names, flags in ((schema.INPUTS, self.inputs), (schema.OUTPUTS, self.outputs)):
            if name in names:
                index = names.index(name)
                return index < len(flags) and flags[index]
        raise KeyError(name)

    def attribute(self, name: str) -> Any:
        return dict(self.attributes).get(name, schema.default(name))

    @property
    def overload(self) -> str:
        """A short name, the same for equal signatures in every model."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    @property
    def scale(self) -> float | None:
        scale = self.attribute("scale")
        if scale is None and self.size is not None:
            return 1.0 / math.sqrt(self.size)
        return scale


def signature_of(facts: Facts, node: ir.Node, opset: int) -> Signature:
    """The signature of a fused node.

    Raises:
        ValueError: Q's type or rank is not known.
    """
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    dims = [facts.dims(value) if value is not None else None for value in node.inputs]
    dims += [None] * (len(schema.INPUTS) - len(dims))
    query, dtype = dims[0], facts.dtype(node.inputs[0])
    if query is None or dtype is None:
        raise ValueError("the type or rank of its Q is not known")
    rank = len(query)
    by_name = dict(zip(schema.INPUTS, [*node.inputs, *[None] * len(schema.INPUTS)], strict=False))

    layout = attributes.get("qkv_layout", "separate")

    def heads(name: str, index: int) -> int | None:
        if attributes.get(name) is not None:
            return int(attributes[name])
        shape = dims[index]
        if rank == 5 and query is not None:
            return query[3 if layout == "3hd" else 2].value
        return shape[1].value if rank == 4 and shape is not None else None

    q_heads, kv_heads = heads("q_num_heads", 0), heads("kv_num_heads", 1)

    def size(index: int, count: int | None) -> int | None:
        if layout != "separate":  # Q carries all heads of Q, K and V
            index, count = 0, (q_heads or 0) + 2 * (kv_heads or q_heads or 0)
        shape = dims[index]
        last = shape[-1].value if shape is not None else None
        if rank != 3 or last is None:
            return last
        return last // count if count else None

    mask = by_name["attn_mask"]
    mask_dims, mask_type = dims[3], facts.dtype(mask)
    short, rows = False, False
    if mask_dims is not None and mask_dims:
        keys = _key_count(dims, rank, layout)
        short = keys is None or mask_dims[-1] != keys
        queries = query[2 if rank == 4 else 0 if layout == "time_major" else 1]
        rows = len(mask_dims) > 1 and mask_dims[-2] == queries
    present = tuple(value is not None for value in node.inputs)
    return Signature(
        opset,
        present,
        tuple(bool(value.name) for value in node.outputs),
        tuple(sorted(attributes.items())),
        dtype.name.lower(),
        rank,
        q_heads,
        kv_heads,
        size(0, q_heads),
        size(2, kv_heads),
        mask_type.name.lower() if mask_type is not None else "",
        len(mask_dims) if mask_dims is not None else 0,
        short,
        rows,
    )


def _key_count(dims: list[Any], rank: int, layout: str) -> Any:
    """Sk as a dimension, past included; None when not known."""
    key = dims[1] if layout == "separate" else dims[0]
    if key is None:
        return None
    count = key[2 if rank == 4 else 0 if layout == "time_major" else 1]
    past = dims[schema.INPUTS.index("past_key")]
    return count + past[2] if past is not None else count


def says_all(signature: Signature) -> bool:
    """Whether one standard Attention of the signature's opset means the same."""
    s = signature
    if s.opset < 23 or s.has("sinks") or s.has("lse") or s.attribute("empty_row") != "zero":
        return False
    if s.has("nonpad_kv_seqlen") and s.opset < 24:
        return False
    windows = s.attribute("left_window_size") != -1 or s.attribute("right_window_size") != -1
    return not (windows and s.opset < 25) and not (s.mask and s.mask_is_short and s.opset < 24)


def runs_on_cpu(signature: Signature) -> bool:
    """Whether ONNX Runtime's CPU provider runs that standard Attention as `standard_body` writes it.

    It refuses masks of rank 1, short masks, present outputs without a past and, at run time, no keys at all. Masks that
    broadcast over queries it refuses below opset 25, where they are expanded.
    """
    s = signature
    if s.mask and (s.mask_is_short or s.mask_rank < 1 or (s.mask_rank < 2 and s.opset >= 25)):
        return False
    return s.has("past_key") or not (s.has("present_key") or s.has("present_value"))


def caveat(signature: Signature) -> str:
    """Where ONNX Runtime's CPU provider departs from a standard Attention of that signature; "" if nowhere."""
    s = signature
    words = []
    if s.mask not in ("", "bool"):
        words.append("gives 0 instead of the mean of V where a row of the mask is the most negative number throughout")
    if s.has("nonpad_kv_seqlen"):
        words.append("does not clamp lengths")
    if s.dtype == "bfloat16":
        words.append("does not run bfloat16")
    return f"ONNX Runtime's CPU provider {', and '.join(words)}" if words else ""


def function_of(signature: Signature, *, prefer_standard: bool = False) -> onnx.FunctionProto:
    """The model-local function of `signature`.

    Args:
        signature: what the node has.
        prefer_standard: take a standard Attention also for a float mask (of which ONNX Runtime's
            CPU provider makes 0, not the mean of V, where a row is finfo.min throughout), for a mask
            that must be expanded for it, for lengths (which it does not clamp) and for bfloat16
            (which it does not run).
    """
    exact = signature.mask in ("", "bool") and signature.dtype != "bfloat16" and not signature.has("nonpad_kv_seqlen")
    exact = exact and not (signature.mask and signature.opset < 25 and not signature.mask_rows)
    is_standard = says_all(signature) and runs_on_cpu(signature) and (exact or prefer_standard)
    writer = NodeWriter()
    inputs = [name if flag else f"no_{name}" for name, flag in zip(schema.INPUTS, signature.inputs, strict=False)]
    outputs = [name if f else f"no_{name}" for name, f in zip(schema.OUTPUTS, signature.outputs, strict=False)]
    if is_standard:
        standard_body(writer, signature)
    else:
        plain_body(writer, signature)
    for name in outputs:
        if name.startswith("no_"):
            writer.op("Constant", value=np.zeros(0, np.float32), to=name)
    return onnx.helper.make_function(
        schema.DOMAIN,
        schema.OP_TYPE,
        inputs,
        outputs,
        writer.nodes,
        [onnx.helper.make_opsetid("", signature.opset)],
        overload=signature.overload,
        doc_string="What flashonnx::FlashAttention computes, in standard operators.",
    )


def function_for(facts: Facts, node: ir.Node, *, prefer_standard: bool = False) -> onnx.FunctionProto:
    """The model-local function of a node of the domain.

    Raises:
        ValueError: there is none for it, or what it depends on is not known.
    """
    if node.op_type != schema.OP_TYPE:
        return cache_bodies.function_of(cache_bodies.signature_of(facts, node, facts.opset))
    return function_of(signature_of(facts, node, facts.opset), prefer_standard=prefer_standard)


def attach(model: ir.Model, facts: Facts, node: ir.Node) -> None:
    """Gives `node` its overload and the model that overload's function, if not there yet.

    Raises:
        ValueError: as function_for.
    """
    signature = (
        signature_of(facts, node, facts.opset)
        if node.op_type == schema.OP_TYPE
        else cache_bodies.signature_of(facts, node, facts.opset)
    )
    node.overload = signature.overload
    identifier = (schema.DOMAIN, node.op_type, signature.overload)
    if identifier not in model.functions:
        model.functions[identifier] = ir.serde.deserialize_function(function_for(facts, node))
    model.ir_version = max(model.ir_version, MINIMUM_IR_VERSION)
