"""Symbolic shapes of com.microsoft's operators, of which ONNX Runtime's optimizer says nothing in the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.operator_shapes import conv_sizes, integer

if TYPE_CHECKING:
    from flashonnx.export.values.facts import Dims, Facts

Result = Sequence["Dims | None"]


def _skip(facts: Facts, node: ir.Node) -> Result:
    """Normalisation of a sum: Y, two of rows that only training reads, and the sum."""
    dims = facts.dims(node.inputs[0])
    return [dims, None, None, dims]


def _twice(facts: Facts, node: ir.Node) -> Result:
    """SkipGroupNorm: Y and the sum."""
    return [facts.dims(node.inputs[0])] * 2


def _halved(facts: Facts, node: ir.Node) -> Result:
    """BiasSplitGelu: one half of the channels gates the other."""
    dims = facts.dims(node.inputs[0])
    half = dims[-1].divided_by(2) if dims is not None else None
    return [(*dims[:-1], half if half is not None else facts.unknown()) if dims is not None else None]


def _embedded(facts: Facts, node: ir.Node) -> Result:
    """EmbedLayerNormalization: (batch, sequence, width), lengths, and the sum of embeddings."""
    ids, words = (facts.dims(node.inputs[index]) for index in (0, 2))
    if ids is None or words is None or len(words) != 2:
        return [None]
    dims = (*ids, words[1])
    return [dims, ids[:1], dims]


def _by_width(facts: Facts, node: ir.Node) -> Result:
    """MatMulNBits and MatMulBnb4: the last axis becomes N, whose weights are packed."""
    dims = facts.dims(node.inputs[0])
    return [(*dims[:-1], Dim.of(integer(node, "N"))) if dims is not None and integer(node, "N") else None]


def _channels_last(facts: Facts, node: ir.Node) -> Result:
    """NhwcConv: (batch, height, width, channels), weights (channels, height, width, channels of a group)."""
    dims, kernel = (facts.dims(value) for value in node.inputs[:2])
    if dims is None or kernel is None or len(dims) != len(kernel) or len(dims) < 3:
        return [None]
    return [(dims[0], *conv_sizes(facts, node, dims[1:-1], kernel[1:-1]), kernel[0])]


def _restored(facts: Facts, node: ir.Node) -> Result:
    """RestorePadding: packed tokens, (tokens, width), as (batch, sequence, width) again."""
    packed, places = (facts.dims(value) for value in node.inputs[:2])
    return [(*places, packed[-1]) if packed is not None and places is not None else None]


# Those with the shape of their first input; see shape_rules for those that are like a standard operator.
SAME = "BiasAdd BiasDropout BiasSoftmax FastGelu BiasGelu QuickGelu"

CONTRIB_RULES: dict[str, Callable[[Facts, ir.Node], Result]] = {
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip),
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4"), _by_width),
    "SkipGroupNorm": _twice,
    "BiasSplitGelu": _halved,
    "EmbedLayerNormalization": _embedded,
    "NhwcConv": _channels_last,
    "RestorePadding": _restored,
}
# Where the type is that of another input than the first.
TYPED_BY = {"EmbedLayerNormalization": 2, "DequantizeLinear": 1, "MatMulIntegerToFloat": 2, "Where": 1, "CastLike": 1}
