"""The matrix of queries by keys that a site forms: its size in symbols, and in bytes for given lengths."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import onnx_ir as ir
from flashonnx.export.operator import schema
from flashonnx.export.sites.finder import Candidate
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Dims, Facts

EXAMPLE_BATCH, EXAMPLE_LENGTH = 1, 1024


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The scores of one attention, or a mask as large.

    Attributes:
        dims: usually (batch, heads, queries, keys); "?" for a size that the model does not tell.
        item_size: bytes of an element.
        value: the name of the value, where several sites may share it.
    """

    dims: tuple[Dim, ...]
    item_size: float
    value: str = ""

    @property
    def names(self) -> tuple[int | str, ...]:
        """The dimensions as numbers and texts."""
        return tuple(dim.value if dim.value is not None else _text(dim) for dim in self.dims)

    def __str__(self) -> str:
        return " × ".join(f"({name})" if " " in str(name) else str(name) for name in self.names)

    def size(self, lengths: Mapping[str, int]) -> int | None:
        """Its bytes where named dimensions are `lengths`; None if a size is not known."""
        sizes = [evaluate(dim, lengths) for dim in self.dims]
        known = [size for size in sizes if size is not None]
        return math.ceil(math.prod(known) * self.item_size) if len(known) == len(sizes) else None


def evaluate(dim: Dim, lengths: Mapping[str, int]) -> int | None:
    """A dimension in numbers; None where a name in it has none."""
    if not dim.atoms <= lengths.keys():
        return None
    return sum(count * math.prod(lengths[name] for name in names) for names, count in dim.terms.items())


def example_lengths(matrices: Iterable[Matrix], given: Mapping[str, int]) -> dict[str, int]:
    """`given`, and for the other named dimensions 1 where they stand first, as a batch does, else 1024."""
    lengths = dict(given)
    for matrix in matrices:
        for index, dim in enumerate(matrix.dims):
            for name in sorted(dim.atoms):
                if name.isidentifier():
                    batch = index < max(len(matrix.dims) - 2, 0)
                    lengths.setdefault(name, EXAMPLE_BATCH if batch else EXAMPLE_LENGTH)
    return lengths


def matrix_of(facts: Facts, candidate: Candidate) -> Matrix | None:
    """The scores of a site; None where not even their rank is known."""
    if candidate.scores is not None:
        dims, kind = facts.dims(candidate.scores), facts.dtype(candidate.scores)
    else:
        dims, kind = _of_operator(facts, candidate.node), facts.dtype(candidate.node.inputs[0])
    if dims is None or kind is None:
        return None
    return Matrix(dims, kind.itemsize)


def mask_of(facts: Facts, node: ir.Node) -> Matrix | None:
    """The mask of a fused node, where it has queries by keys like the scores; None where it is smaller, or unknown."""
    value = dict(zip(schema.inputs_of(node.op_type), node.inputs, strict=False)).get("attn_mask")
    dims, kind = (facts.dims(value), facts.dtype(value)) if value is not None else (None, None)
    if value is None or dims is None or kind is None or len(dims) < 2 or Dim.of(1) in dims[-2:]:
        return None
    return Matrix(dims, kind.itemsize, value.name or "")


def _of_operator(facts: Facts, node: ir.Node) -> Dims | None:
    """(batch, heads, queries, keys) of an Attention or FlashAttention node, from its inputs."""
    if (node.domain, node.op_type) not in (("", "Attention"), (schema.DOMAIN, schema.OP_TYPE)):
        return None
    inputs = dict(zip(schema.INPUTS, node.inputs, strict=False))
    query, key, past = (facts.dims(inputs.get(name)) for name in ("Q", "K", "past_key"))
    layout = node.attributes["qkv_layout"].as_string() if "qkv_layout" in node.attributes else "separate"
    heads = Dim.of(node.attributes["q_num_heads"].as_int()) if "q_num_heads" in node.attributes else None
    if query is None:
        return None
    if layout != "separate":
        batch, length = (1, 0) if layout == "time_major" else (0, 1)
        heads = heads or (query[{"3hd": 3, "h3d": 2}[layout]] if len(query) == 5 else None)
        return (query[batch], heads, query[length], query[length]) if heads is not None else None
    if key is None or len(key) != len(query) or len(query) not in (3, 4):
        return None
    heads = query[1] if len(query) == 4 else heads
    keys = key[-2] + past[2] if past is not None and len(past) == 4 else key[-2]
    return (query[0], heads, query[-2], keys) if heads is not None else None


def _text(dim: Dim) -> str:
    return "?" if any(name.startswith("?") for name in dim.atoms) else str(dim)
