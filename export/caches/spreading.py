"""Following values that were one for all sentences and now are one for each, until they meet the batch."""

from __future__ import annotations

import onnx_ir as ir
from flashonnx.export.caches.pairs import CacheError, read_by
from flashonnx.export.model.build import called
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.rules.sizes import Sizes
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts
from flashonnx.export.values.shape_rules import axes_of, normal

_UNARY = frozenset(
    ["Cast", "Cos", "Sin", "Neg", "Identity", "Exp", "Log", "Sqrt", "Reciprocal", "Abs", "Floor", "Clip", "Not", "Tanh"]
)
_BINARY = frozenset(
    ["Add", "Sub", "Mul", "Div", "Pow", "Where", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "And",
     "Or", "Min", "Max", "Mod"]
)  # fmt: skip
_GATHERED = 1  # Gather's indices


def spread(graph: ir.Graph, sizes: Sizes, wide: set[ir.Value], batch: Dim) -> None:
    """Gives all operators behind `wide` values, whose first axis is the batch now and was 1, the shapes they have then.

    Where the batch is fixed another axis may be as large: rows.prove tells them apart. The facts of `sizes` are
    those of before, and the shapes of what becomes wide are mended.

    Raises:
        CacheError: an operator does not take each sentence's by themselves.
    """
    facts, wide = sizes.facts, set(wide)
    for node in list(graph):
        if wide.isdisjoint(read_by(node)):
            continue
        if (node.domain, node.op_type) == ("", "Shape"):
            _keep(graph, sizes, node)
            continue
        if _repeats_first(facts, node, wide, batch):
            assert node.inputs[0] is not None
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            continue
        follow = _follows(facts, node, wide, batch)
        if follow is None:
            raise CacheError(
                f"positions go through {node.op_type} '{called(node)}', of which nothing shows "
                "that it takes those of each sentence by itself"
            )
        if not follow:
            continue
        for value in node.outputs:
            wide.add(value)
            dims = facts.dims(value)
            if dims is not None:
                facts.set_dims(value, (batch, *dims[1:]))
            if value.shape is not None and len(value.shape):
                value.shape = ir.Shape([str(batch) if batch.value is None else batch.value, *value.shape[1:]])
    if any(value in wide for value in graph.outputs):
        raise CacheError("an output of the model holds positions of all sentences")


def _keep(graph: ir.Graph, sizes: Sizes, node: ir.Node) -> None:
    """Puts the shape that a tensor had in the place of the one that it has."""
    numbers, start = sizes.facts.ints(node.outputs[0]), len(sizes.builder.nodes)
    try:
        if numbers is None:
            raise RefusalError("its elements are not known")
        made = sizes.vector(numbers)
    except RefusalError as error:
        raise CacheError(f"the shape of positions is used by '{called(node)}': {error}") from error
    graph.insert_after(node, sizes.builder.nodes[start:])
    ir.convenience.replace_all_uses_with(node.outputs[0], made, replace_graph_outputs=True)


def _repeats_first(facts: Facts, node: ir.Node, wide: set[ir.Value], batch: Dim) -> bool:
    """Whether a Tile repeated for all sentences what is one for each now."""
    if (node.domain, node.op_type) != ("", "Tile") or node.inputs[0] not in wide or node.inputs[1] in wide:
        return False
    before, after = facts.dims(node.inputs[0]), facts.dims(node.outputs[0])
    return before is not None and after == (batch, *before[1:])


def _follows(facts: Facts, node: ir.Node, wide: set[ir.Value], batch: Dim) -> bool | None:
    """Whether the outputs become wide, too (or have the batch already); None: nothing is proved."""
    if node.domain:
        return False if _absorbs(node, wide) else None
    ranks = [facts.rank(value) for value in node.inputs if value is not None]
    rank = facts.rank(node.outputs[0])
    if rank is None or None in ranks:
        return None
    first, op = node.inputs[0], node.op_type
    if op in _UNARY:
        return True
    if op in _BINARY or op == "MatMul":
        return _broadcast(facts, node, wide, batch, rank)
    if op == "Unsqueeze":
        axes = axes_of(facts, node)
        return True if axes and 0 not in [normal(axis, rank) for axis in axes] else None
    if op == "Squeeze":
        axes = axes_of(facts, node)
        return True if axes and 0 not in [normal(axis, ranks[0] or 0) for axis in axes] else None
    if op == "Expand" and first in wide and ranks[0] == rank:
        dims = facts.dims(node.outputs[0])
        assert dims is not None
        return {Dim.of(1): True, batch: False}.get(dims[0]) if node.inputs[1] not in wide else None
    if op == "Transpose" and "perm" in node.attributes:
        return True if node.attributes["perm"].as_ints()[0] == 0 else None
    if op == "Gather" and first not in wide and node.inputs[_GATHERED] in wide:
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        return True if axis == 0 else None
    if op == "GatherND" and first not in wide:
        return None if "batch_dims" in node.attributes and node.attributes["batch_dims"].as_int() else True
    if op == "Slice":
        given = facts.constant(node.inputs[3]) if len(node.inputs) > 3 else None
        rest = [] if given is None else [normal(int(axis), rank) for axis in given]
        whole = all(_is_number(facts, first, axis) for axis in rest)
        return True if rest and 0 not in rest and whole and wide.isdisjoint(node.inputs[1:]) else None
    if op in ("Concat", "Gather", "Split"):
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        is_whole = all(value in wide for value in node.inputs) if op == "Concat" else wide.isdisjoint(node.inputs[1:])
        is_whole &= all(_is_number(facts, value, axis) for value in (node.inputs if op == "Concat" else (first,)))
        return True if is_whole and normal(axis, ranks[0] or 0) != 0 else None
    return None


def _is_number(facts: Facts, value: ir.Value | None, axis: int) -> bool:
    """Whether that axis has a size that all models have: not one of tokens, which belong to different positions."""
    dims = facts.dims(value)
    return dims is not None and dims[normal(axis, len(dims))].value is not None


def _broadcast(facts: Facts, node: ir.Node, wide: set[ir.Value], batch: Dim, rank: int) -> bool | None:
    """Of operators whose inputs are broadcast: the first axes of wide ones must meet that of the output."""
    others = []
    if node.op_type == "MatMul" and not _is_number(facts, node.inputs[0], -1):
        return None
    for value in node.inputs:
        dims = facts.dims(value)
        assert dims is not None
        if value in wide:
            if len(dims) != rank or (node.op_type == "MatMul" and rank == 2 and value is not node.inputs[0]):
                return None
        elif len(dims) == rank:
            others.append(dims[0])
    if node.op_type == "MatMul" and rank == 2:
        return True
    if any(size not in (1, batch) for size in others):
        return None
    return batch not in others or batch == 1


def _absorbs(node: ir.Node, wide: set[ir.Value]) -> bool:
    """Whether an operator takes positions, (batch, tokens), beside tensors with the batch."""
    places = {("com.microsoft", "RotaryEmbedding"): 1}
    index = places.get((node.domain, node.op_type))
    return index is not None and [i for i, value in enumerate(node.inputs) if value in wide] == [index]
