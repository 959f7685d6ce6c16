"""Symbolic shapes of what works on images, of Tile and Pad, and of attention operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir
from flashonnx.export.values.dims import Dim

if TYPE_CHECKING:
    from flashonnx.export.values.facts import Dims, Facts

Result = Sequence["Dims | None"]
_LONGEST_ROW = 64  # more than a tensor has dimensions


def integer(node: ir.Node, name: str, default: int = 0) -> int:
    """An attribute that is a number."""
    attribute = node.attributes.get(name)
    return attribute.as_int() if attribute is not None else default


def pad(facts: Facts, node: ir.Node) -> Result:
    """Of opset 11 and newer, without axes; of others the rank alone."""
    dims = facts.dims(node.inputs[0])
    if dims is None:
        return [None]
    pads = facts.ints(node.inputs[1]) if len(node.inputs) > 1 else None
    if pads is None or len(pads) != 2 * len(dims) or any(node.inputs[3:]):
        return [tuple(facts.unknown() for _ in dims)]
    return [tuple(size + pads[i] + pads[i + len(dims)] for i, size in enumerate(dims))]


def one_hot(facts: Facts, node: ir.Node) -> Result:
    """One more axis, of the size that the second input says."""
    dims, depth = facts.dims(node.inputs[0]), facts.ints(node.inputs[1])
    if dims is None:
        return [None]
    axis = integer(node, "axis", -1) % (len(dims) + 1)
    size = depth[0] if depth is not None and len(depth) == 1 else facts.unknown()
    return [(*dims[:axis], size, *dims[axis:])]


def one_hot_row(facts: Facts, value: ir.Value | None) -> Dims | None:
    """The elements of a OneHot of one index, in which TorchScript's repeat_interleave puts a count between ones."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "OneHot" or node.domain:
        return None
    (index, depth), pair = (facts.constant(item) for item in node.inputs[:2]), facts.ints(node.inputs[2])
    if index is None or depth is None or index.size != 1 or depth.size != 1 or pair is None or len(pair) != 2:
        return None
    at, count = int(index.reshape(-1)[0]), int(depth.reshape(-1)[0])
    if not -count <= at < count <= _LONGEST_ROW:
        return None
    return tuple(pair[int(i == at % count)] for i in range(count))


def conv(facts: Facts, node: ir.Node) -> Result:
    """Batch and channels always; the rest where kernel and padding are numbers, and the stride is 1 or the input is."""
    dims, kernel = (facts.dims(value) for value in node.inputs[:2])
    if dims is None or kernel is None or len(dims) != len(kernel) or len(dims) < 3:
        return [None]
    return [(dims[0], kernel[0], *conv_sizes(facts, node, dims[2:], kernel[2:]))]


def conv_sizes(facts: Facts, node: ir.Node, dims: Dims, kernel: Dims) -> list[Dim]:
    """What becomes of the axes that a kernel goes along."""
    rank = len(dims)

    def numbers(name: str, default: int, count: int) -> list[int]:
        return list(node.attributes[name].as_ints()) if name in node.attributes else [default] * count

    strides, dilations, pads = numbers("strides", 1, rank), numbers("dilations", 1, rank), numbers("pads", 0, 2 * rank)
    explicit = "auto_pad" not in node.attributes or node.attributes["auto_pad"].as_string() in ("NOTSET", "VALID")
    sizes = []
    for index in range(rank):
        size, width = dims[index], kernel[index].value
        if width is None or not explicit:
            sizes.append(facts.unknown())
            continue
        padded = size + pads[index] + pads[index + rank] - dilations[index] * (width - 1)
        if strides[index] == 1:
            sizes.append(padded)
        else:
            sizes.append(Dim.of((padded.value - 1) // strides[index] + 1) if padded.value else facts.unknown())
    return sizes


def pool(facts: Facts, node: ir.Node) -> Result:
    """Batch and channels; pooling over everything leaves one element a dimension."""
    dims = facts.dims(node.inputs[0])
    if dims is None or len(dims) < 3:
        return [None]
    whole = node.op_type.startswith("Global")
    return [(*dims[:2], *(Dim.of(1) if whole else facts.unknown() for _ in dims[2:]))] * len(node.outputs)


def tile(facts: Facts, node: ir.Node) -> Result:
    dims, repeats = facts.dims(node.inputs[0]), facts.ints(node.inputs[1])
    if dims is None:
        return [None]
    if repeats is None or len(repeats) != len(dims):
        return [tuple(facts.unknown() for _ in dims)]
    return [tuple(size * count for size, count in zip(dims, repeats, strict=True))]


def resized(facts: Facts, node: ir.Node) -> Result:
    """The rank alone, and dimensions that no scale changes."""
    dims = facts.dims(node.inputs[0])
    if dims is None:
        return [None]
    scales = facts.constant(node.inputs[2]) if len(node.inputs) > 2 else None
    sizes = facts.ints(node.inputs[3]) if len(node.inputs) > 3 else None
    if sizes is not None and len(sizes) == len(dims) and "axes" not in node.attributes:
        return [sizes]
    known = scales is not None and scales.size == len(dims)
    return [tuple(d if known and scales[i] == 1 else facts.unknown() for i, d in enumerate(dims))]  # type: ignore[index]


def attention(facts: Facts, node: ir.Node) -> Result:
    """Of the standard operator and of FlashAttention."""
    shapes = [facts.dims(value) for value in node.inputs[:3]]
    if node.domain == "com.microsoft":
        return projecting_attention(facts, node)
    if "qkv_layout" in node.attributes and shapes[0] is not None and shapes[1:] in ([], [None, None]):
        return _packed(facts, node, shapes[0])
    if len(shapes) < 3 or None in shapes:
        return [None]
    q, k, v = (shape for shape in shapes if shape is not None)
    if not len(q) == len(k) == len(v) or len(q) not in (3, 4):
        return [None]
    presents = _presents(facts, node, 4, k[-2])
    if len(q) == 4:
        return [(*q[:3], v[3]), *presents]
    size = v[2].divided_by(integer(node, "kv_num_heads")) if integer(node, "kv_num_heads") else None
    return [(*q[:2], size * integer(node, "q_num_heads") if size is not None else facts.unknown()), *presents]


def _packed(facts: Facts, node: ir.Node, whole: Dims) -> Result:
    """Of FlashAttention with Q, K and V in one tensor: heads side by side, or three dimensions of their own."""
    presents = _presents(facts, node, 4, whole[0 if node.attributes["qkv_layout"].as_string() == "time_major" else 1])
    if len(whole) == 5:  # three, heads and size, or heads, three and size
        width = (whole[2] * whole[3] * whole[4]).divided_by(3)
    else:
        heads = integer(node, "q_num_heads")
        size = whole[2].divided_by(heads + 2 * integer(node, "kv_num_heads")) if heads else None
        width = size * heads if size is not None else None
    return [(*whole[:2], width if width is not None else facts.unknown()), *presents]


def _presents(facts: Facts, node: ir.Node, first: int, new: Dim) -> list[Dims | None]:
    """Present keys and values where there are past ones, inputs `first` and the next: `new` ones more."""
    pasts = [facts.dims(value) for value in node.inputs[first : first + 2]]
    return [(*past[:2], past[2] + new, past[3]) if past is not None and len(past) == 4 else None for past in pasts]


def projecting_attention(facts: Facts, node: ir.Node) -> Result:
    """com.microsoft::Attention, which projects its input."""
    x, weights = (facts.dims(value) for value in node.inputs[:2])
    if x is None or weights is None or len(weights) != 2:
        return [None]
    sizes = list(node.attributes["qkv_hidden_sizes"].as_ints()) if "qkv_hidden_sizes" in node.attributes else []
    width = Dim.of(sizes[2]) if sizes else weights[1].divided_by(3)
    return [(*x[:2], width if width is not None else facts.unknown())]


def multi_head_attention(facts: Facts, node: ir.Node) -> Result:
    """com.microsoft's MultiHeadAttention and GroupQueryAttention: (batch, queries, heads * size of V)."""
    q, k, v = (facts.dims(value) for value in (*node.inputs[:3], None, None)[:3])
    if q is None:
        return [None]
    heads, presents = integer(node, "num_heads"), list["Dims | None"]()
    if node.op_type == "GroupQueryAttention":
        packed = q[2].divided_by(heads + 2 * integer(node, "kv_num_heads"))
        width = packed * heads if packed is not None and k is None else q[2] if k is not None else None
    else:
        source = v or k or q  # of three, four or, packed, five dimensions
        width = source[2] if len(source) == 3 else source[-1] * heads
        new = (k or q)[2 if k is not None and len(k) == 4 else 1]
        presents = _presents(facts, node, 6, new)
    return [(*q[:2], width if width is not None else facts.unknown()), *presents]


def cached_attention(facts: Facts, node: ir.Node) -> Result:
    """FlashAttentionKVCache: as Q, with the size of values, and the caches."""
    q, keys, values = (facts.dims(node.inputs[index]) for index in (0, 3, 4))
    return [_as_queries(facts, node, q, values[3] if values is not None and len(values) == 4 else None), keys, values]


def packed_attention(facts: Facts, node: ir.Node) -> Result:
    """FlashAttentionVarlen: as Q, with the size of V."""
    q, _, v = (facts.dims(value) for value in node.inputs[:3])
    heads = integer(node, "kv_num_heads")
    size = None if v is None else v[-1] if len(v) == 3 else v[-1].divided_by(heads) if heads else None
    return [_as_queries(facts, node, q, size)]


def _as_queries(facts: Facts, node: ir.Node, q: Dims | None, size: Dim | None) -> Dims | None:
    """Q's dimensions with `size` for that of a head; heads are an axis where the ranks are 4, or 3 of packed tokens."""
    if q is None:
        return None
    is_packed = node.op_type == "FlashAttentionVarlen" or (len(node.inputs) > 7 and node.inputs[7] is not None)
    if len(q) == (3 if is_packed else 4):
        return (*q[:-1], size if size is not None else facts.unknown())
    heads = integer(node, "q_num_heads")
    return (*q[:-1], size * heads if size is not None and heads else facts.unknown())
