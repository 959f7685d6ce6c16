"""The rules, in the order in which they are tried."""

from __future__ import annotations

from flashonnx.export.rules.attention_op import StandardAttention
from flashonnx.export.rules.base import Fusion, Rewrite, Rule
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.rules.sdpa import DecomposedAttention

RULES: tuple[Rule, ...] = (StandardAttention(), DecomposedAttention())

__all__ = ["RULES", "Fusion", "RefusalError", "Rewrite", "Rule"]
