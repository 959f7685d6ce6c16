"""Choosing one form for Q, K, V and the output together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir
from flashonnx.export.model.build import Builder
from flashonnx.export.rules.layouts import Exit, Heads, Place, Tensors, exits, groupings, places
from flashonnx.export.rules.packed import packings
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.rules.sizes import Sizes, replaced_shapes, shape_users
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts, is_unknown

_LARGEST_HEAD = 512


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Where Q, K and V are taken, and where the output goes, all in the form of `rank` dimensions.

    With a packed `layout` they are one tensor.
    """

    heads: Heads
    query: Place
    key: Place
    value: Place
    way_out: Exit
    layout: str = "separate"

    @property
    def rank(self) -> int:
        return self.query.rank

    @property
    def cost(self) -> int:
        return sum(place.cost for place in (self.query, self.key, self.value)) + self.way_out.cost

    def inputs(self, builder: Builder) -> list[ir.Value | None]:
        """The operator's first three inputs."""
        if self.layout != "separate":
            return [self.query.build(builder), None, None]
        return [place.build(builder) for place in (self.query, self.key, self.value)]

    def replaced(
        self, facts: Facts, builder: Builder, made: ir.Value, inner: Sequence[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """What takes the places of old values, given the operator's output; `inner` ones go, and keep no shape."""
        sizes = Sizes(facts, builder, [place.source for place in (self.query, self.key, self.value)])
        asking = [node for value in inner for node in shape_users(value)]
        result = {self.way_out.replaces: self.way_out.build(builder, made)}
        return result | replaced_shapes(sizes, [*asking, *self.way_out.shapes])

    def layout_attributes(self) -> dict[str, Any]:
        """q_num_heads and kv_num_heads, which three dimensions need, and qkv_layout.

        Raises:
            RefusalError: they are not constants, or do not divide.
        """
        q_heads, kv_heads = self.query.heads.value, self.key.heads.value
        if q_heads is not None and kv_heads and q_heads % kv_heads:
            raise RefusalError(f"{q_heads} query heads are no multiple of {kv_heads} key heads")
        if self.rank == 4:
            return {}
        if q_heads is None or kv_heads is None:
            raise RefusalError("the number of heads is not a constant of the model")
        return {"q_num_heads": q_heads, "kv_num_heads": kv_heads, "qkv_layout": self.layout}


_UNNAMED = "; axes without a name count as different: give those that are equal one name"


def arrange(facts: Facts, tensors: Tensors, *, scales: bool) -> Arrangement:
    """The cheapest arrangement; of equally cheap ones that which copies fewer keys, as with a past they are many.

    Args:
        facts: what is known about the model.
        tensors: the attention's tensors.
        scales: whether numbers that multiply Q and K may be taken into the scale.

    Raises:
        RefusalError: the shapes do not prove any.
    """
    reason: RefusalError | None = None
    ends = (tensors.query, tensors.key, tensors.value)
    known = [size for end in ends for size in facts.dims(end.value) or ()]
    for heads in groupings(facts, tensors.query, tensors.roles.batch):
        # A packed tensor needs no Split, which nothing else saves.
        options = list(_packed(facts, tensors, heads, scales))
        options = options or list(_options(facts, tensors, heads, scales))
        for option in options:
            for what, place in (("Q and K", option.key), ("V", option.value)):
                if place.size.value is not None and place.size.value > _LARGEST_HEAD:
                    raise RefusalError(f"the head size of {what} is {place.size}, above {_LARGEST_HEAD}")
        if options:
            return min(options, key=lambda option: (option.cost, option.key.cost + option.value.cost))
        reason = reason or RefusalError(
            "the layouts of Q, K, V and the output are not (batch, heads, sequence, size) or "
            "(batch, sequence, heads * size), or their sizes differ, as far as the model's shapes tell"
            + _UNNAMED
            * any(map(is_unknown, known))
        )
    raise reason or RefusalError(
        "the shapes of Q do not show how batch and heads divide; export with known ranks and static "
        "head counts, or run onnx.shape_inference first"
    )


def _options(facts: Facts, tensors: Tensors, heads: Heads, scales: bool) -> Iterator[Arrangement]:
    """One arrangement for each rank and number of key heads, the cheapest of its kind."""
    queries, keys, values = (
        places(facts, tensors, *named, heads, scales=scales and named[0] is not tensors.value)
        for named in tensors.inputs()
    )
    if not (queries and keys and values):
        return
    ways_out = _ways_out(facts, tensors, heads, queries[0].sequence, values[0].size)
    for rank in (3, 4):
        for key_heads in dict.fromkeys(place.heads for place in keys):
            query = _cheapest([place for place in queries if place.rank == rank])
            key = _cheapest([p for p in keys if p.rank == rank and p.heads == key_heads])
            value = _cheapest([p for p in values if p.rank == rank and p.heads == key_heads])
            way = _cheapest_way(ways_out, rank, time_major=False)
            if query and key and value and way:
                yield Arrangement(heads, query, key, value, way)


def _packed(facts: Facts, tensors: Tensors, heads: Heads, scales: bool) -> Iterator[Arrangement]:
    """The arrangements in which Q, K and V are one tensor."""
    for packing in packings(facts, tensors, heads, scales=scales):
        ways_out = _ways_out(facts, tensors, heads, packing.query.sequence, packing.value.size)
        way = _cheapest_way(ways_out, 3, packing.is_time_major)
        if way:
            yield Arrangement(heads, packing.query, packing.key, packing.value, way, packing.layout)


def _ways_out(facts: Facts, tensors: Tensors, heads: Heads, query_size: Dim, value_size: Dim) -> list[Exit]:
    roles = tensors.roles
    return exits(facts, tensors.output, roles.batch, roles.query, tensors.value_size, heads, query_size, value_size)


def _cheapest_way(ways: Sequence[Exit], rank: int, time_major: bool) -> Exit | None:
    fitting = [way for way in ways if way.rank == rank and way.time_major == time_major]
    # the last exit replaces the most
    return min(reversed(fitting), key=lambda way: way.cost) if fitting else None


def _cheapest(options: Sequence[Place]) -> Place | None:
    return min(options, key=lambda place: place.cost) if options else None
