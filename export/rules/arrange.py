"""Choosing one form for Q, K, V and the output together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import onnx_ir as ir
from flashonnx.export.build import Builder
from flashonnx.export.facts import Facts
from flashonnx.export.products import Roles
from flashonnx.export.rules.layouts import Exit, Heads, Operand, Place, exits, groupings, places
from flashonnx.export.rules.scores import RefusalError

_LARGEST_HEAD = 512


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of one attention, with their axes named: those of V's own size by `value_size`."""

    query: Operand
    key: Operand
    value: Operand
    output: Operand
    roles: Roles
    value_size: str


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Where Q, K and V are taken, and where the output goes, all in the form of `rank` dimensions."""

    heads: Heads
    query: Place
    key: Place
    value: Place
    way_out: Exit

    @property
    def rank(self) -> int:
        return self.query.rank

    @property
    def cost(self) -> int:
        return sum(place.cost for place in (self.query, self.key, self.value)) + self.way_out.cost

    def inputs(self, builder: Builder) -> list[ir.Value]:
        return [place.build(builder) for place in (self.query, self.key, self.value)]

    def head_attributes(self) -> dict[str, int]:
        """q_num_heads and kv_num_heads, which three dimensions need.

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
        return {"q_num_heads": q_heads, "kv_num_heads": kv_heads}


def arrange(facts: Facts, tensors: Tensors, *, scales: bool) -> Arrangement:
    """The cheapest arrangement.

    Args:
        facts: what is known about the model.
        tensors: the attention's tensors.
        scales: whether numbers that multiply Q and K may be taken into the scale.

    Raises:
        RefusalError: the shapes do not prove any.
    """
    reason: RefusalError | None = None
    for heads in groupings(facts, tensors.query, tensors.roles.batch):
        options = list(_options(facts, tensors, heads, scales))
        for option in options:
            for what, place in (("Q and K", option.key), ("V", option.value)):
                if place.size.value is not None and place.size.value > _LARGEST_HEAD:
                    raise RefusalError(f"the head size of {what} is {place.size}, above {_LARGEST_HEAD}")
        if options:
            return min(options, key=lambda option: option.cost)
        reason = reason or RefusalError(
            "the layouts of Q, K, V and the output are not (batch, heads, sequence, size) or "
            "(batch, sequence, heads * size), or their sizes differ, as far as the model's shapes tell"
        )
    raise reason or RefusalError(
        "the shapes of Q do not show how batch and heads divide; export with known ranks and static "
        "head counts, or run onnx.shape_inference first"
    )


def _options(facts: Facts, tensors: Tensors, heads: Heads, scales: bool) -> Iterator[Arrangement]:
    """One arrangement for each rank and number of key heads, the cheapest of its kind."""
    roles = tensors.roles

    def of(operand: Operand, sequence: str, size: str, scaled: bool) -> list[Place]:
        is_query = operand is tensors.query
        return places(facts, operand, roles.batch, sequence, size, heads, is_query=is_query, scales=scaled)

    queries = of(tensors.query, roles.query, roles.depth, scales)
    keys = of(tensors.key, roles.key, roles.depth, scales)
    values = of(tensors.value, roles.key, tensors.value_size, False)
    if not (queries and keys and values):
        return
    ways_out = exits(
        facts,
        tensors.output.value,
        tensors.output.labels,
        roles.batch,
        roles.query,
        tensors.value_size,
        heads,
        queries[0].sequence,
        values[0].size,
    )
    for rank in (3, 4):
        for key_heads in dict.fromkeys(place.heads for place in keys):
            query = _cheapest([place for place in queries if place.rank == rank])
            key = _cheapest([p for p in keys if p.rank == rank and p.heads == key_heads])
            value = _cheapest([p for p in values if p.rank == rank and p.heads == key_heads])
            ways = [way for way in ways_out if way.rank == rank]
            if query and key and value and ways:
                # the last exit replaces the most
                way = min(reversed(ways), key=lambda way: way.cost)
                yield Arrangement(heads, query, key, value, way)


def _cheapest(options: Sequence[Place]) -> Place | None:
    return min(options, key=lambda place: place.cost) if options else None
