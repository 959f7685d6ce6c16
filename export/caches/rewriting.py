"""fuse(kv_cache=...): past and present keys of a decoder become caches, each sentence with a length of its own.

    prepare     masks and positions among the inputs become what they are without padding
    (fusion)    masks turn out to be triangles and windows
    finish      attention reads caches; positions count from each sentence's length

What is computed for a sentence is what the model computed for that sentence by itself: as many past keys as its length
says, no padding. So caches may hold sentences of different lengths side by side, padded on the right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx_ir as ir
from flashonnx.export.caches import rows
from flashonnx.export.caches.assumed import assume, sizes_of
from flashonnx.export.caches.merged import keep_branch_with_past
from flashonnx.export.caches.operators import Cache, CacheAttention
from flashonnx.export.caches.pairs import pairs, past_length
from flashonnx.export.caches.past_lengths import PastLengths
from flashonnx.export.model import configuration
from flashonnx.export.model.build import Names
from flashonnx.export.rules.contributed import DOMAIN as MICROSOFT
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts

_SAME_NUMBERS = frozenset(["Cast", "Expand", "Identity", "Reshape", "Squeeze", "Tile", "Unsqueeze"])
_NAMED = re.compile(r"past_key_values\.(.+)")


def prepare(model: ir.Model, kind: str) -> list[str]:
    """Before fusion, in place; the inputs that went.

    Raises:
        CacheError: the model has no past keys that could be caches.
    """
    gone = keep_branch_with_past(model)
    facts = Facts(model)
    return gone + assume(model, facts, pairs(model, facts))


def finish(model: ir.Model, kind: str) -> list[str]:
    """After fusion, in place; what is to be said about it.

    Raises:
        CacheError: it is not proved to be the same.
    """
    facts = Facts(model)
    found = pairs(model, facts)
    before = past_length(facts, found[0])
    batch, count, tokens = sizes_of(model, facts, found)
    new = [_input("cache_lengths", ir.DataType.INT64, [_name(batch)])]
    if kind == "paged":
        new.append(_input("block_table", ir.DataType.INT32, [_name(batch), "pages_per_sequence"]))
    sources = [value for pair in found for value in (pair.past, pair.whole, pair.present)]
    attention = CacheAttention(model, facts, found, count, before)
    attention.replace(new[0], new[1] if len(new) > 1 else None)
    places = PastLengths(model, facts, tokens, new[0], before)
    places.replace(sources)
    bound = _most_positions(facts, places.positions)
    if bound is not None:
        model.metadata_props[configuration.POSITIONS] = str(bound)
    at = model.graph.inputs.index(tokens) + 1
    for index, value in enumerate(new):
        model.graph.inputs.insert(at + index, value)
    rows.prove(model, tokens, {cache.present for cache in attention.caches})
    _shapes(model, attention.caches, kind, (batch, count))
    return _rename(model, attention.caches)


def _input(name: str, kind: ir.DataType, shape: list[int | str]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))


def _name(size: Dim) -> int | str:
    return size.value if size.value is not None else str(size)


def _shapes(model: ir.Model, found: list[Cache], kind: str, sizes: tuple[Dim, Dim]) -> None:
    """The caches' shapes, and "batch" and "sequence" as names of axes, as export_onnx has them."""
    names = {str(size): name for size, name in zip(sizes, ("batch", "sequence"), strict=True) if size.value is None}
    values = [*model.graph.inputs, *(value for node in model.graph.all_nodes() for value in node.outputs)]
    used = {str(dim) for value in values for dim in value.shape or () if not isinstance(dim, int)}
    names = {size: name for size, name in names.items() if name not in used - names.keys()}
    pattern = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, names)) + r")(?!\w)") if names else None
    for value in values:
        if value.shape is not None and pattern is not None:
            value.shape = ir.Shape(
                dim if isinstance(dim, int) or dim.value is None else pattern.sub(lambda m: names[m[1]], str(dim.value))
                for dim in value.shape
            )
    for pair in found:
        assert pair.past.shape is not None
        first, heads, _, size = pair.past.shape
        shape = ir.Shape(["pages", "page_size", heads, size] if kind == "paged" else [first, heads, "capacity", size])
        pair.past.shape = shape
        pair.present.shape = shape


def _rename(model: ir.Model, found: list[Cache]) -> list[str]:
    """Gives caches the names that export_onnx gives them, unless theirs are like these; what was renamed."""
    if all(
        (match := _NAMED.fullmatch(pair.past.name or "")) is not None and pair.present.name == f"present.{match[1]}"
        for pair in found
    ):
        return []
    names = Names(model)
    said = []
    for pair in found:
        for value, start in ((pair.past, "past_key_values"), (pair.present, "present")):
            new = f"{start}.{pair.role}"
            if value.name == new:
                continue
            for other in _values(model):
                if other.name == new:
                    other.name = names.fresh(f"{new}_before")
            said.append(f"{value.name} is called {new}")
            value.name = new
    return [f"caches have the names of export_onnx's: {', '.join(said)}"]


def _values(model: ir.Model) -> list[ir.Value]:
    made = (value for node in model.graph.all_nodes() for value in node.outputs)
    return [*model.graph.inputs, *model.graph.initializers.values(), *made]


def _most_positions(facts: Facts, positions: dict[ir.Value, int]) -> int | None:
    """How many positions the model's tables have, None if it looks none up."""
    bounds = []
    for value, more in positions.items():
        for node, index in _users(value):
            tables = {("", "Gather", 1): 0, (MICROSOFT, "RotaryEmbedding", 1): 2}
            at = tables.get((node.domain, node.op_type, index))
            dims = facts.dims(node.inputs[at]) if at is not None else None
            if dims is not None and dims[0].value is not None:
                bounds.append(dims[0].value - more)
    return min(bounds, default=None)


def _users(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """What reads `value`, also in another shape or type."""
    pending = [value]
    for item in pending:
        for use in item.uses():
            yield use.node, use.idx
            if use.idx == 0 and use.node.op_type in _SAME_NUMBERS and not use.node.domain:
                pending.append(use.node.outputs[0])
