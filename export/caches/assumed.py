"""What a sentence by itself gives to the inputs that a cache with lengths makes needless: masks and positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from flashonnx.export.caches.pairs import CacheError, Pair, past_length
from flashonnx.export.model.build import Builder, Names
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.rules.sizes import Sizes
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts

MASKS = ("attention_mask", "decoder_attention_mask")
POSITIONS = ("position_ids", "decoder_position_ids", "cache_position")


def assume(model: ir.Model, facts: Facts, pairs: list[Pair]) -> list[str]:
    """Puts in the place of masks and positions what they are for a sentence without padding; the names of those inputs.

    A mask is all ones over past and new keys; new tokens stand behind the past ones.
    """
    batch, count, tokens = sizes_of(model, facts, pairs)
    before = past_length(facts, pairs[0])
    builder = Builder(Names(model), "caches")
    sizes = Sizes(facts, builder, [tokens, pairs[0].past])
    makers: dict[str, Callable[[ir.Value], ir.Value]] = {
        **dict.fromkeys(MASKS, lambda value: _ones(sizes, value, (batch, before + count), (tokens, pairs[0].past))),
        **dict.fromkeys(POSITIONS, lambda value: _positions(facts, sizes, value, (batch, before, count))),
    }
    gone = [value for value in model.graph.inputs if value.name in makers]
    for value in gone:
        assert value.name is not None
        try:
            made = makers[value.name](value)
        except RefusalError as error:
            raise CacheError(f"'{value.name}': {error}") from error
        ir.convenience.replace_all_uses_with(value, made)
        model.graph.inputs.remove(value)
    first = next(iter(model.graph))
    model.graph.insert_before(first, builder.nodes)
    return [value.name or "" for value in gone]


def sizes_of(model: ir.Model, facts: Facts, pairs: list[Pair]) -> tuple[Dim, Dim, ir.Value]:
    """The batch, the number of new tokens, and an input of the model that has both as its first axes."""
    past, whole = (facts.dims(value) for value in (pairs[0].past, pairs[0].whole))
    pasts = {pair.past for pair in pairs}
    assert past is not None
    for value in model.graph.inputs:
        dims = facts.dims(value)
        if value in pasts or value.name in (*MASKS, *POSITIONS) or dims is None or len(dims) not in (2, 3):
            continue
        if dims[0] == past[0] and (whole is None or len(whole) != 4 or dims[1] == whole[2] - past[2]):
            return dims[0], dims[1], value
    new = whole[2] - past[2] if whole is not None and len(whole) == 4 else "those"
    raise CacheError(
        f"no input has the shape (batch, tokens) or (batch, tokens, width) for a batch of {past[0]} and {new} new "
        "keys, so nothing shows how many tokens there are"
    )


def _ones(sizes: Sizes, value: ir.Value, dims: tuple[Dim, Dim], sources: tuple[ir.Value, ir.Value]) -> ir.Value:
    """A mask of ones, (batch, past and new keys)."""
    kind, own = value.dtype, sizes.facts.dims(value)
    if kind is None or own is None or len(own) != 2:
        raise RefusalError(f"expected (batch, past and new keys), got {'nothing' if own is None else own}")
    tokens, past = sources
    keys = sizes.op("Add", _axis(sizes, tokens, 1), _axis(sizes, past, 2), dtype=ir.DataType.INT64)
    shape = sizes.op("Concat", _axis(sizes, tokens, 0), keys, dtype=ir.DataType.INT64, axis=0)
    one = sizes.builder.constant(np.ones((1, 1), kind.numpy()))
    made = sizes.op("Expand", one, shape)
    sizes.facts.set_dims(made, dims)
    return made


def _positions(facts: Facts, sizes: Sizes, value: ir.Value, counts: tuple[Dim, Dim, Dim]) -> ir.Value:
    """The positions behind the past, (batch, tokens), (1, tokens) or (tokens,)."""
    batch, _, count = counts
    own, kind = facts.dims(value), value.dtype
    if own is None or own not in ((batch, count), (Dim.of(1), count), (count,)) or kind is None:
        raise RefusalError(f"expected shape (batch, tokens), got {'none' if own is None else own}")
    tokens, past = sizes.sources
    numbers = [sizes.op("Squeeze", _axis(sizes, *where), dtype=ir.DataType.INT64) for where in ((past, 2), (tokens, 1))]
    end = sizes.op("Add", *numbers, dtype=ir.DataType.INT64)
    one = sizes.builder.constant(np.array(1, np.int64))
    made = sizes.op("Range", numbers[0], end, one, dtype=ir.DataType.INT64)
    facts.set_dims(made, (count,))
    if len(own) == 2:
        made = sizes.op("Unsqueeze", made, sizes.builder.ints([0]))
        made = sizes.expand(made, own) if own[0] != 1 else made
    if kind != ir.DataType.INT64:
        made = _cast(sizes.builder, made, kind)
    return made


def _axis(sizes: Sizes, value: ir.Value, axis: int) -> ir.Value:
    """The size of one axis, one-dimensional."""
    shape = sizes.op("Shape", value, dtype=ir.DataType.INT64)
    return sizes.op("Gather", shape, sizes.builder.ints([axis]), dtype=ir.DataType.INT64, axis=0)


def _cast(builder: Builder, value: ir.Value, kind: ir.DataType) -> ir.Value:
    return builder.op("Cast", value, dtype=kind, to=kind)
