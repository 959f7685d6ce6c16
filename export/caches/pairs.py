"""Past keys among a model's inputs, and the outputs that hold them with the new ones behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir
from flashonnx.export.model.build import called
from flashonnx.export.operator.cache_schema import KV_CACHE
from flashonnx.export.operator.schema import DOMAIN
from flashonnx.export.rules.operator_site import FLOATS
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts

# Attention operators with a past: which input is the past key; values follow, presents are outputs 1 and 2.
_OPERATORS = {("", "Attention"): 4, ("flashonnx", "FlashAttention"): 4, ("com.microsoft", "MultiHeadAttention"): 6}
_GROUPED = ("com.microsoft", "GroupQueryAttention")


class CacheError(ValueError):
    """A model whose past keys cannot become caches, in words that say why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"fuse: kv_cache: {reason}")


@dataclasses.dataclass(frozen=True)
class Pair:
    """One past and its present.

    Attributes:
        past: an input of the model, (batch, heads, past keys, size).
        new: what is put behind it, None where an operator does that itself.
        whole: both, one behind the other; attention reads it.
        present: the output of the model that is `whole`.
    """

    past: ir.Value
    new: ir.Value | None
    whole: ir.Value
    present: ir.Value


def pairs(model: ir.Model, facts: Facts) -> list[Pair]:
    """The pairs of `model`, in the order of its inputs.

    Raises:
        CacheError: there is none, or one is not handed on.
    """
    found = []
    for past in model.graph.inputs:
        dims = facts.dims(past)
        if facts.dtype(past) not in FLOATS or dims is None or len(dims) != 4:
            continue
        for new, whole in _joined(facts, past):
            if whole.graph is not model.graph:
                raise CacheError(
                    f"'{past.name}' is used in a subgraph, as in merged decoders: take the file of the decoder with a "
                    "past"
                )
            presents = [value for value in same(whole) if value in model.graph.outputs]
            if len(presents) != 1:
                what = "is no output" if not presents else "is an output twice"
                raise CacheError(f"'{past.name}' with the new keys or values behind it {what} of the model")
            found.append(Pair(past, new, whole, presents[0]))
    if not found:
        _has_caches(model)
        raise CacheError(
            "no input of shape (batch, heads, past, size) is put before new keys by Concat, or read by an attention "
            "operator as its past, so there is nothing that could be a cache"
        )
    if len({pair.past for pair in found}) < len(found):
        raise CacheError("an input is the past of two attentions")
    lengths = {past_length(facts, pair) for pair in found}
    if len(lengths) != 1:
        raise CacheError(f"past inputs have different lengths: {', '.join(sorted(map(str, lengths)))}")
    if len(lengths.pop().atoms) != 1:
        raise CacheError(f"'{found[0].past.name}' has a fixed length; the axis of past keys is expected to be dynamic")
    return found


def _has_caches(model: ir.Model) -> None:
    """Tells apart what needs no caches.

    Raises:
        CacheError: attention has them already.
    """
    for node in model.graph.all_nodes():
        if node.op_identifier()[:2] == (DOMAIN, KV_CACHE):
            raise CacheError(
                f"'{called(node)}' reads and writes a cache already: the file has the inputs and "
                "outputs that kv_cache gives, and is to be used as it is"
            )
        if node.op_identifier()[:2] == _GROUPED and any(node.inputs[3:5]):
            raise CacheError(
                f"'{called(node)}' is com.microsoft's GroupQueryAttention, which has buffers for "
                "past keys and their lengths already: fuse without kv_cache makes FlashAttentionKVCache of it"
            )


def past_length(facts: Facts, pair: Pair) -> Dim:
    """How many keys the past has."""
    dims = facts.dims(pair.past)
    assert dims is not None
    return dims[2]


def same(value: ir.Value) -> Iterator[ir.Value]:
    """`value`, and what is it under another name."""
    pending = [value]
    for item in pending:
        yield item
        users = [use.node for use in item.uses() if not use.node.domain]
        alone = (node for node in users if node.op_type == "Concat" and len(node.inputs) == 1)
        pending += [node.outputs[0] for node in (*alone, *(node for node in users if node.op_type == "Identity"))]


def read_by(node: ir.Node) -> set[ir.Value]:
    """What a node reads, its subgraphs included."""
    read = {value for value in node.inputs if value is not None}
    for attribute in node.attributes.values():
        for graph in (
            [attribute.as_graph()]
            if attribute.type == ir.AttributeType.GRAPH
            else attribute.as_graphs()
            if attribute.type == ir.AttributeType.GRAPHS
            else []
        ):
            read |= set(graph.outputs)
            for inner in graph:
                read |= read_by(inner)
    return read


def _joined(facts: Facts, past: ir.Value) -> Iterator[tuple[ir.Value | None, ir.Value]]:
    """New keys or values, and them behind `past`."""
    for value in same(past):
        for node, index in [(use.node, use.idx) for use in value.uses()]:
            first = _OPERATORS.get((node.domain, node.op_type))
            if (node.domain, node.op_type) == ("", "Concat") and len(node.inputs) == 2 and index == 0:
                if node.attributes["axis"].as_int() in (2, -2) and node.inputs[1] is not None:
                    yield node.inputs[1], node.outputs[0]
            elif first is not None and index - first in (0, 1) and len(node.outputs) > index - first + 1:
                yield None, node.outputs[index - first + 1]
