"""FlashAttentionKVCache in its best form: rotation and scale inside, tensors as projections make them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from flashonnx.export.model.build import Builder
from flashonnx.export.operator.cache_schema import CACHE_INPUTS, KV_CACHE
from flashonnx.export.rules import scales
from flashonnx.export.rules.base import Fusion, Rewrite, Rule
from flashonnx.export.rules.layouts import Exit, Heads, Operand, Place, Tensors, exits, groupings, places
from flashonnx.export.rules.operator_site import ROLES, operand_of
from flashonnx.export.rules.rotary import Rotation, rotation
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.sites.finder import Candidate
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts

_HEADS = ("q_num_heads", "kv_num_heads")


class KVCache(Rule):
    """A node with Q, K and V apart, as exporters have them behind rotary embeddings.

    A rotation of both by the same angles becomes the operator's own, which reads cosines and sines from tables by
    positions: the tables are the model's own cosines and sines, and the positions count their rows. Constants that
    multiply Q go into the scale; those of K do not, as K lies in the cache with them. The tensors are taken where they
    lie as the operator wants them, so that transposes to heads first, or back, vanish.
    """

    kinds = (KV_CACHE,)

    def rewrite(self, fusion: Fusion, candidate: Candidate) -> Rewrite:
        node, facts = candidate.node, fusion.facts
        before: dict[str, ir.Value | None] = dict(zip(CACHE_INPUTS, node.inputs, strict=False))
        attributes: dict[str, Any] = {name: attribute.value for name, attribute in node.attributes.items()}
        if None in (before.get(name) for name in "QKV") or before.get("cu_seqlens_q"):
            raise RefusalError("already fused")
        builder, given = fusion.builder(node), dict(before)
        scales.fold(facts, builder, given, attributes, keys=False)
        turned = _rotation(facts, given) if given.get("cos_cache") is None else None
        if turned is not None:
            given |= {"Q": turned[0].source, "K": turned[1].source, **_tables(fusion, builder, node, turned[0])}
            attributes["rotary_interleaved"] = int(turned[0].interleaved)
            attributes["rotary_dim"] = turned[0].dim if _size(facts, before["Q"], 3) != turned[0].dim else 0
            scales.fold(facts, builder, given, attributes, keys=False)
        found = _arrangement(facts, given, attributes, node.outputs[0])
        if found is not None:
            given |= {name: place.build(builder) for name, place in zip("QKV", found.places, strict=True)}
            attributes |= dict(zip(_HEADS, found.heads, strict=True))
        output = found.way_out.replaces if found is not None else node.outputs[0]
        if output is node.outputs[0] and all(given[name] is before[name] for name in "QKV"):
            raise RefusalError("already fused")
        rank = found.way_out.rank if found is not None else facts.rank(given["Q"]) or 0
        made = fusion.cached(builder, KV_CACHE, given, attributes, rank, outputs=len(node.outputs))
        y = found.way_out.build(builder, made) if found is not None else made
        return _replacing(builder, node, made, {output: y})


def _replacing(builder: Builder, node: ir.Node, made: ir.Value, replaced: dict[ir.Value, ir.Value]) -> Rewrite:
    new = made.producer()
    assert new is not None
    for before, after in zip(node.outputs[1:], new.outputs[1:], strict=True):
        if before.name:
            replaced[before] = after
        else:
            after.name = ""
    asking = (behind for old in replaced if (behind := old.producer()) is not None)
    return Rewrite(builder, replaced, (node, *asking), "", made)


@dataclasses.dataclass(frozen=True)
class _Arrangement:
    """Where Q, K and V are taken and where the output goes, all in one rank, and the heads of Q and of K and V."""

    places: tuple[Place, ...]
    way_out: Exit
    heads: tuple[int, int]

    @property
    def cost(self) -> int:
        return sum(place.cost for place in self.places) + self.way_out.cost


def _arrangement(
    facts: Facts, given: Mapping[str, ir.Value | None], attributes: Mapping[str, Any], output: ir.Value
) -> _Arrangement | None:
    """The cheapest one; None where the shapes do not tell. Heads of K do not repeat: the cache has as many."""
    named = [(given[name], heads) for name, heads in zip("QKV", (*_HEADS, _HEADS[1]), strict=True)]
    counted = [(value, attributes.get(heads) or _size(facts, value, 1)) for value, heads in named if value is not None]
    operands = [operand_of(facts, value, count, "q", "d") for value, count in counted]
    (query, q_heads), (_, kv_heads), _ = counted
    end, dims = operand_of(facts, output, q_heads, "q", "d"), facts.dims(query)
    found = [_places(facts, operand) for operand in operands if operand is not None]
    if len(found) < 3 or end is None or dims is None or q_heads is None or kv_heads is None:
        return None
    options = []
    for rank in sorted((3, 4), key=lambda rank: rank != len(dims)):  # of equally cheap ones as it is
        fitting = [[place for place in options if place.rank == rank] for options in found]
        if not all(fitting):
            continue
        best = tuple(min(options, key=lambda place: place.cost) for options in fitting)
        heads = Heads(dims[0], Dim.of(q_heads))
        ways = exits(facts, end, ROLES.batch, "q", "d", heads, best[0].sequence, best[2].size)
        # The last one replaces the most; what asks for the shape of something before would lose that.
        ways = [way for way in ways[::-1] if way.rank == rank and not way.time_major and not way.shapes]
        options += [_Arrangement(best, min(ways, key=lambda way: way.cost), (q_heads, kv_heads))] if ways else []
    return min(options, key=lambda option: option.cost, default=None)


def _places(facts: Facts, operand: Operand) -> list[Place]:
    """Every way to hand a tensor to the operator, which wants all of its heads."""
    alone = Tensors(operand, operand, operand, operand, ROLES, "d")
    divisions = groupings(facts, operand, ROLES.batch)
    return [place for heads in divisions for place in places(facts, alone, operand, "q", "d", heads, scales=False)]


def _rotation(facts: Facts, given: Mapping[str, ir.Value | None]) -> tuple[Rotation, Rotation] | None:
    """The rotations of Q and K, if they are one."""
    query, key = given["Q"], given["K"]
    if query is None or key is None or facts.rank(query) != 4 or facts.rank(key) != 4:
        return None
    first, second = rotation(facts, query), rotation(facts, key)
    if first is None or second is None:
        return None
    return (first, second) if first.angles == second.angles else None


def _tables(fusion: Fusion, builder: Builder, node: ir.Node, turned: Rotation) -> dict[str, ir.Value | None]:
    """Cosines and sines of every token as rows of tables, and which row each token has; once for all layers."""
    key = ("rotary tables", node.graph, *turned.angles)
    if key in fusion.masks:
        return dict(fusion.masks[key])
    half = turned.dim // 2
    bounds = ([0], [turned.dim], [3], [2]) if turned.interleaved else ([0], [half], [3])  # of each angle once
    found: dict[str, ir.Value | None] = {}
    for name, table in (("cos_cache", turned.cos), ("sin_cache", turned.sin)):
        kind = fusion.facts.dtype(table)
        first = table if turned.is_once else builder.op("Slice", table, *map(builder.ints, bounds), dtype=kind)
        found[name] = builder.op("Reshape", first, builder.ints([-1, half]), dtype=kind)
    kind = ir.DataType.INT64
    shape = builder.op("Shape", turned.cos, dtype=kind)
    rows = builder.op("Gather", shape, builder.ints([0, 2]), dtype=kind)
    total = builder.op("Squeeze", builder.op("Mul", *(
        builder.op("Gather", shape, builder.ints([axis]), dtype=kind) for axis in (0, 2)
    ), dtype=kind), dtype=kind)  # fmt: skip
    zero, one = (builder.constant(np.array(number, np.int64)) for number in (0, 1))
    every = builder.op("Range", zero, total, one, dtype=kind)
    found["position_ids"] = builder.op("Reshape", every, rows, dtype=kind)
    fusion.masks[key] = found
    return dict(found)


def _size(facts: Facts, value: ir.Value | None, axis: int) -> int | None:
    dims = facts.dims(value)
    return dims[axis].value if dims is not None else None
