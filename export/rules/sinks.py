"""A sink: one more score for every row, which takes its share of the softmax and weighs nothing."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from flashonnx.export.layout.products import Labels, Roles
from flashonnx.export.layout.views import peel
from flashonnx.export.model.build import Builder
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.values.facts import Facts


def sink_input(
    facts: Facts, builder: Builder, sink: ir.Value, labels: Labels, roles: Roles, heads: int | None
) -> ir.Value:
    """The operator's input `sinks`, (heads,) in float32, of a column that is put beside the scores.

    Raises:
        RefusalError: it is not one number for each head.
    """
    if heads is None:
        raise RefusalError("the number of heads, and so of sinks, is not a constant of the model")
    number = facts.uniform(sink)
    if number is not None:
        return builder.constant(np.full(heads, number, np.float32))
    head = roles.batch[-1]
    for peeled in peel(facts, sink, scales=False):
        axes = dict(zip(labels[::-1], peeled.view.axes[::-1], strict=False))
        own = axes.get(head, ())
        others = [f for label, axis in axes.items() if label != head for f in axis if not f.repeats]
        lies = [axis for axis in peeled.view.layout if axis]
        if len(roles.batch) == 2 and own and not others and lies == [own]:
            flat = builder.op("Reshape", peeled.view.source, builder.ints([-1]))
            if facts.dtype(peeled.view.source) == ir.DataType.FLOAT:
                return flat
            return builder.op("Cast", flat, dtype=ir.DataType.FLOAT, to=ir.DataType.FLOAT)
    raise RefusalError(f"the column '{sink.name}' beside the scores is not one number for each head")
