"""The rules, in the order in which they are tried."""

from __future__ import annotations

from flashonnx.export.rules.attention_op import StandardAttention
from flashonnx.export.rules.base import Fusion, Rewrite, Rule
from flashonnx.export.rules.cache_inputs import KVCache
from flashonnx.export.rules.group_query import GroupQueryAttention, Unsupported
from flashonnx.export.rules.multi_head import MultiHeadAttention, PackedProjection
from flashonnx.export.rules.packed_sentences import PackedMultiHead, Paged, Varlen
from flashonnx.export.rules.scattered import ScatteredCache
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.rules.sdpa import DecomposedAttention

RULES: tuple[Rule, ...] = (
    ScatteredCache(),
    StandardAttention(),
    DecomposedAttention(),
    MultiHeadAttention(),
    PackedProjection(),
    GroupQueryAttention(),
    PackedMultiHead(),
    Varlen(),
    KVCache(),
    Paged(),
    Unsupported(),
)

__all__ = ["RULES", "Fusion", "RefusalError", "Rewrite", "Rule"]
