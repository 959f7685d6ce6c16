"""Proves that outside of attention with a past nothing looks from one new token, or one sentence, at another.

Prompts of an uneven batch are padded on the right, and what stands in the padding is not known. So each operator from
the inputs on is asked where the batch and the new tokens are among the axes of what it makes; one that works along
these, or of which nothing is known here, may not come before an output.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
from flashonnx.export.caches.pairs import CacheError, read_by
from flashonnx.export.caches.row_axes import Apart, Counted, Free, Mixed, MixedError, Rows, State
from flashonnx.export.caches.row_rules import RULES
from flashonnx.export.model.build import called
from flashonnx.export.values.facts import MALFORMED, Facts

_SIZES = frozenset(["Shape", "Size"])


def prove(model: ir.Model, tokens: ir.Value, caches: Collection[ir.Value]) -> None:
    """Proves it of a model whose attentions read caches already.

    Args:
        model: it, in order.
        tokens: an input whose first axes are the batch and the new tokens.
        caches: the outputs that are caches.

    Raises:
        CacheError: an output may depend on what is in the padding, or beside it, and through which operator.
    """
    rows = Rows(Facts(model), tokens)
    rows.add_inputs(value for value in model.graph.inputs if value.name not in model.graph.initializers)
    for node in model.graph:
        for value, state in zip(node.outputs, _states(rows, node), strict=True):
            rows.states[value] = state
    for value in model.graph.outputs:
        state = rows.state(value)
        if isinstance(state, Mixed):
            raise CacheError(_sentence(rows, state))
        if isinstance(state, Counted) and value not in caches:
            raise CacheError(
                f"output '{value.name}' depends on how many new tokens ('{rows.tokens.size}') or sentences there are, "
                "and in a batch of uneven prompts these are those of the longest"
            )


def _sentence(rows: Rows, mixed: Mixed) -> str:
    if mixed.node is None:
        return mixed.reason
    node = mixed.node
    kind = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    return (
        f"{kind} '{called(node)}' looks across the new tokens of a sentence "
        f"('{rows.tokens.size}') or the sentences, outside of attention with a past, or may do: {mixed.reason}. In a "
        "batch of uneven prompts it would see padding"
    )


def _states(rows: Rows, node: ir.Node) -> list[State]:
    """The states of a node's outputs."""
    given = [rows.state(value) for value in (*node.inputs, *read_by(node))]
    mixed = [state for state in given if isinstance(state, Mixed)]
    if mixed:  # the first input's, so that the same is said of the same model
        return [mixed[0] for _ in node.outputs]
    is_apart = any(isinstance(state, Apart) for state in given)
    is_size = not node.domain and node.op_type in _SIZES
    if is_size or not is_apart:
        states = [_number(rows, value) or (Counted() if is_size else None) for value in node.outputs]
        if all(state is not None for state in states):
            return [state for state in states if state is not None]
    try:
        return _by_rule(rows, node)
    except MixedError as error:
        is_counted = any(isinstance(state, Counted) for state in given)
        made = Mixed(node, str(error)) if is_apart else Counted() if is_counted else Free()
        return [made for _ in node.outputs]


def _number(rows: Rows, value: ir.Value) -> State | None:
    """Of sizes, and of what is computed with them; None where the numbers are not known."""
    numbers = rows.facts.ints(value)
    return None if numbers is None else Counted() if rows.is_count(numbers) else Free()


def _by_rule(rows: Rows, node: ir.Node) -> list[State]:
    rule = RULES.get((node.domain, node.op_type))
    if rule is None:
        raise MixedError("it is not among the operators that are known here")
    try:
        made = rule(rows, node)
    except MALFORMED as error:
        raise MixedError("its inputs or attributes are not those that are known here") from error
    if not isinstance(made, list):
        made = [made]
    made += [None] * (len(node.outputs) - len(made))
    return [rows.apart(axes) if axes is not None else Counted() for axes in made[: len(node.outputs)]]
