"""Numbers that multiply Q or K before an attention operator, which belong to its scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from flashonnx.export.layout.steps import LAYOUT_OPERATORS
from flashonnx.export.layout.views import scaling
from flashonnx.export.model.build import Builder
from flashonnx.export.values.facts import Facts

_LONGEST_CHAIN = 24
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def is_possible(scale: float) -> bool:
    """Whether the attribute can hold it, a float32 above 0: 1e-50 would become 0 there, and 1e50 infinity."""
    return _SMALLEST <= scale <= _LARGEST  # nor is NaN


def fold(
    facts: Facts, builder: Builder, inputs: dict[str, ir.Value | None], attributes: dict[str, Any], *, keys: bool
) -> None:
    """Takes the constants that multiply Q, and K if `keys`, out of `inputs` and into the `scale` of `attributes`.

    They stand between a projection with its bias and the operator, among operators that only change the layout. A
    node's own bias would come behind them, so there they stay.
    """
    if inputs.get("bias") is not None or attributes.get("qkv_layout", "separate") != "separate":
        return
    before = {name: value for name in ("QK" if keys else "Q") if (value := inputs.get(name)) is not None}
    found = {name: unscaled(facts, builder, value) for name, value in before.items()}
    scale = _scale(facts, inputs, attributes)
    if scale is None or all(found[name][0] is value for name, value in before.items()):
        return
    scale *= math.prod(factor for _, factor in found.values())
    if is_possible(scale):
        inputs |= {name: value for name, (value, _) in found.items()}
        attributes["scale"] = scale


def unscaled(facts: Facts, builder: Builder, value: ir.Value) -> tuple[ir.Value, float]:
    """`value` without the constants that multiply it, and their product; layout operators behind them are made anew."""
    source, factor = value, 1.0
    passed: list[ir.Node] = []
    behind = 0  # of those, how many stand behind the first of the constants
    place = value
    for _ in range(_LONGEST_CHAIN):
        node = place.producer()
        if node is None or node.domain or node.inputs[0] is None:
            break
        scaled = scaling(facts, node)
        if scaled is not None:
            place = source = scaled[0]
            factor, behind = factor * scaled[1], len(passed)
        elif node.op_type in LAYOUT_OPERATORS:
            passed.append(node)
            place = node.inputs[0]
        else:
            break
    for node in reversed(passed[:behind]):
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        source = builder.op(node.op_type, source, *node.inputs[1:], **attributes)
    facts.learn(builder.nodes)
    return source, factor


def _scale(facts: Facts, inputs: Mapping[str, ir.Value | None], attributes: Mapping[str, Any]) -> float | None:
    """The node's scale, by default 1 / sqrt(size); None where that is not known."""
    given = attributes.get("scale")
    if given is not None:
        return float(given)
    dims = facts.dims(inputs.get("Q"))
    size = dims[-1] if dims else None
    if dims is not None and size is not None and len(dims) == (3 if inputs.get("cu_seqlens_q") is None else 2):
        size = size.divided_by(attributes.get("q_num_heads") or 1)
    return 1 / math.sqrt(size.value) if size is not None and size.value else None
