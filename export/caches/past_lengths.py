"""What a model makes of the number of past keys besides masks: positions, which become those of each sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir
from flashonnx.export.caches.pairs import CacheError, read_by
from flashonnx.export.caches.spreading import spread
from flashonnx.export.masks.forms import Affine
from flashonnx.export.masks.positions import form_of
from flashonnx.export.model.build import Builder, Names, called
from flashonnx.export.operator.cache_schema import KV_CACHE
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.rules.sizes import Sizes
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts, is_unknown


class PastLengths:
    """Replaces the past's length in one model, whose attentions read caches already.

    Args:
        model: it.
        facts: of it as it was.
        tokens: an input whose first axes are batch and tokens.
        lengths: (batch,) int64, keys that each sentence has.
        before: past keys.

    Attributes:
        positions: the positions of tokens that were put in, and what each has more than the number of keys before it.
    """

    def __init__(self, model: ir.Model, facts: Facts, tokens: ir.Value, lengths: ir.Value, before: Dim) -> None:
        self.model, self.facts, self.lengths, self.before = model, facts, lengths, before
        dims = facts.dims(tokens)
        assert dims is not None
        self.batch, self.count = dims[:2]
        self.builder = Builder(Names(model), "cache")
        self.sizes = Sizes(facts, self.builder, [tokens])
        self.positions: dict[ir.Value, int] = {}

    def replace(self, sources: Iterable[ir.Value]) -> None:
        """Works out otherwise all that derives from the sizes of `sources`.

        Raises:
            CacheError: something does that is neither another size nor the position of a token.
        """
        tainted, wide = set(sources), set()
        for node in list(self.model.graph):
            if node.op_type == KV_CACHE or tainted.isdisjoint(read_by(node)):
                continue
            for old in node.outputs:
                start, size = len(self.builder.nodes), self._size(old)
                new = size if size is not None else self._position(old)
                if new is None:
                    tainted.add(old)
                    continue
                if size is None and self.facts.dims(old) != self.facts.dims(new):
                    wide.add(new)
                self.model.graph.insert_after(node, self.builder.nodes[start:])
                ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        self._remove_dead()
        spread(self.model.graph, self.sizes, wide, self.batch)
        self._remove_dead()
        for node in reversed(self.model.graph):  # the last shows best what it is for
            if node.op_type != KV_CACHE and not tainted.isdisjoint(read_by(node)):
                raise CacheError(
                    f"{node.op_type} '{called(node)}' depends on how many past keys there are, "
                    "and beside a cache each sentence has its own number of them"
                )

    def _size(self, old: ir.Value) -> ir.Value | None:
        """`old` from other sizes of the model, if it holds sizes alone that have nothing to do with the past's."""
        numbers, rank = self.facts.ints(old), self.facts.rank(old)
        if numbers is None or rank is None or any(self._is_before(number) for number in numbers):
            return None
        try:
            new = self.sizes.vector(numbers)
        except RefusalError:
            return None
        if rank == 0:
            new = self.sizes.op("Squeeze", new)
        kind = self.facts.dtype(old)
        return new if kind in (None, ir.DataType.INT64) else self.builder.op("Cast", new, dtype=kind, to=kind)

    def _is_before(self, number: Dim) -> bool:
        (name,) = self.before.atoms
        pattern = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
        return is_unknown(number) or any(pattern.search(atom) for atom in number.atoms)

    def _position(self, old: ir.Value) -> ir.Value | None:
        """Each token's place for each sentence, if `old` holds them, (batch or 1, tokens) with axes of one besides."""
        dims, kind, form = self.facts.dims(old), self.facts.dtype(old), form_of(self.facts, old)
        if dims is None or kind is None or len(dims) < 2 or not isinstance(form, Affine):
            return None
        rows = [axis for axis, size in enumerate(dims) if axis and size != 1] or [1]
        expected = [int(axis == rows[0]) for axis in range(len(dims))]
        if dims[0] not in (self.batch, 1) or len(rows) != 1 or dims[rows[0]] != self.count:
            return None
        if list(form.steps) != expected and not (self.count == 1 and not any(form.steps)):
            return None
        more = (form.offset - self.before).value
        if more is None:
            return None
        op, int64 = self.sizes.op, ir.DataType.INT64
        first = op("Unsqueeze", self.lengths, self.builder.ints([1]))
        count = op("Squeeze", self.sizes.vector([self.count]), dtype=int64)
        zero, one = (self.builder.constant(np.array(number, np.int64)) for number in (0, 1))
        new = op("Add", first, op("Range", zero, count, one, dtype=int64))
        new = op("Add", new, self.builder.ints([more])) if more else new
        if len(dims) > 2:
            new = op("Unsqueeze", new, self.builder.ints([a for a in range(1, len(dims)) if a != rows[0]]))
        new = self.builder.op("Cast", new, dtype=kind, to=kind) if kind != int64 else new
        self.facts.set_dims(new, (self.batch, *dims[1:]))
        self.positions[new] = more
        return new

    def _remove_dead(self) -> None:
        for node in reversed(list(self.model.graph)):
            if not any(value.uses() or value.is_graph_output() for value in node.outputs):
                self.model.graph.remove(node, safe=True)
