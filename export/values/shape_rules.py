"""Symbolic shape inference, one small function an operator: (facts, node) -> dims per output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir
from flashonnx.export.values.contrib_shapes import CONTRIB_RULES, SAME
from flashonnx.export.values.dims import Dim, is_clipped, is_positive_or_zero, minimum, product
from flashonnx.export.values.operator_shapes import (
    attention,
    cached_attention,
    conv,
    integer,
    multi_head_attention,
    one_hot,
    packed_attention,
    pad,
    pool,
    resized,
    tile,
)

if TYPE_CHECKING:
    from flashonnx.export.values.facts import Dims, Facts

Result = Sequence["Dims | None"]


def broadcast(facts: Facts, *shapes: Dims | None) -> Dims | None:
    """NumPy's broadcast of `shapes`; a dimension that is not certain is unknown."""
    if any(shape is None for shape in shapes):
        return None
    rank = max((len(shape) for shape in shapes if shape is not None), default=0)
    result = []
    for axis in range(-rank, 0):
        sizes = {shape[axis] for shape in shapes if shape is not None and len(shape) >= -axis}
        sizes.discard(Dim.of(1))
        fixed = [size for size in sizes if size.value is not None]
        if not sizes:
            result.append(Dim.of(1))
        elif len(sizes) == 1:
            result.append(sizes.pop())
        elif not fixed and (whole := [size for size in sizes if all(_covers(size, other) for other in sizes)]):
            result.append(whole[0])
        else:  # a symbolic size beside a fixed one is that size or 1
            result.append(fixed[0] if fixed else facts.unknown())
    return tuple(result)


def _covers(whole: Dim, size: Dim) -> bool:
    return size == whole or is_clipped(size, whole) or size == minimum(Dim.of(1), whole)


def normal(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def axes_of(facts: Facts, node: ir.Node, index: int = 1) -> list[int] | None:
    """Axes given as an attribute (opset < 13) or as input `index`; None when not known."""
    if "axes" in node.attributes:
        return list(node.attributes["axes"].as_ints())
    if len(node.inputs) > index and node.inputs[index] is not None:
        array = facts.constant(node.inputs[index])
        return None if array is None else [int(axis) for axis in array.reshape(-1)]
    return []


def reshaped(facts: Facts, dims: Dims | None, target: Dims | None, allow_zero: bool) -> Dims | None:
    """The shape after a Reshape to `target`, in which 0 copies and -1 is inferred."""
    if target is None:
        return None
    result: list[Dim | None] = []
    for index, size in enumerate(target):
        if size == 0 and not allow_zero:
            result.append(dims[index] if dims is not None and index < len(dims) else facts.unknown())
        else:
            result.append(None if size == -1 else size)
    if None in result:
        rest = product(size for size in result if size is not None)
        inferred = product(dims).divided_by(rest) if dims is not None else None
        result = [size if size is not None else inferred or facts.unknown() for size in result]
    return tuple(size for size in result if size is not None)


def _same(facts: Facts, node: ir.Node) -> Result:
    return [facts.dims(node.inputs[0])]


def _elementwise(facts: Facts, node: ir.Node) -> Result:
    return [broadcast(facts, *(facts.dims(value) for value in node.inputs))]


def _matmul(facts: Facts, node: ir.Node) -> Result:
    a, b = (facts.dims(value) for value in node.inputs[:2])
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return [None]
    if node.op_type == "FusedMatMul":
        if any(integer(node, name) for name in ("transBatchA", "transBatchB")):
            return [None]
        a = (*a[:-2], a[-1], a[-2]) if integer(node, "transA") else a
        b = (*b[:-2], b[-1], b[-2]) if integer(node, "transB") else b
    batch = broadcast(facts, a[:-2], b[:-2])
    return [(*batch, a[-2], b[-1]) if batch is not None else None]


def _gemm(facts: Facts, node: ir.Node) -> Result:
    a, b = (facts.dims(value) for value in node.inputs[:2])
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return [None]
    return [(a[1] if integer(node, "transA") else a[0], b[0] if integer(node, "transB") else b[1])]


def _einsum(facts: Facts, node: ir.Node) -> Result:
    equation = node.attributes["equation"].as_string().replace(" ", "")
    if "->" not in equation or "." in equation:
        return [None]
    left, right = equation.split("->")
    sizes: dict[str, Dim] = {}
    for labels, value in zip(left.split(","), node.inputs, strict=True):
        dims = facts.dims(value)
        if dims is None or len(dims) != len(labels):
            return [None]
        for label, size in zip(labels, dims, strict=True):
            if label not in sizes or sizes[label] == 1:
                sizes[label] = size
    return [tuple(sizes[label] for label in right)]


def _transpose(facts: Facts, node: ir.Node) -> Result:
    dims = facts.dims(node.inputs[0])
    if dims is None:
        return [None]
    perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
    return [tuple(dims[i] for i in (perm or range(len(dims))[::-1]))]


def _reshape(facts: Facts, node: ir.Node) -> Result:
    dims = facts.dims(node.inputs[0])
    if facts.ints(node.inputs[1]) is None:
        return [_target(facts, node.inputs[1])]
    return [reshaped(facts, dims, facts.ints(node.inputs[1]), bool(integer(node, "allowzero")))]


def _unsqueeze(facts: Facts, node: ir.Node) -> Result:
    dims, axes = facts.dims(node.inputs[0]), axes_of(facts, node)
    if dims is None or axes is None:
        return [None]
    rank = len(dims) + len(axes)
    new = {normal(axis, rank) for axis in axes}
    rest = iter(dims)
    return [tuple(Dim.of(1) if i in new else next(rest) for i in range(rank))]


def _squeeze(facts: Facts, node: ir.Node) -> Result:
    dims, axes = facts.dims(node.inputs[0]), axes_of(facts, node)
    if dims is None or axes is None:
        return [None]
    if not axes:
        if any(size.value is None for size in dims):
            return [None]
        return [tuple(size for size in dims if size != 1)]
    gone = {normal(axis, len(dims)) for axis in axes}
    return [tuple(size for i, size in enumerate(dims) if i not in gone)]


def _concat(facts: Facts, node: ir.Node) -> Result:
    shapes = [facts.dims(value) for value in node.inputs]
    first = shapes[0]
    if first is None or any(shape is None or len(shape) != len(first) for shape in shapes):
        return [None]
    axis = normal(node.attributes["axis"].as_int(), len(first))
    total = Dim.of(0)
    for shape in shapes:
        total = total + shape[axis] if shape is not None else total
    return [(*first[:axis], total, *first[axis + 1 :])]


def _slice(facts: Facts, node: ir.Node) -> Result:
    dims = facts.dims(node.inputs[0])
    if dims is None or len(node.inputs) < 3:
        return [None]
    starts, ends = (facts.ints(value) for value in node.inputs[1:3])
    count = len(starts) if starts is not None else 0
    axes = facts.ints(node.inputs[3]) if len(node.inputs) > 3 else None
    steps = facts.ints(node.inputs[4]) if len(node.inputs) > 4 else (Dim.of(1),) * count
    if axes is None and (len(node.inputs) < 4 or node.inputs[3] is None):
        axes = tuple(Dim.of(i) for i in range(count))
    if starts is None or axes is None or any(axis.value is None for axis in axes):
        return [tuple(facts.unknown() for _ in dims)]
    result = list(dims)
    for index, axis in enumerate(axes):
        at = normal(axis.value or 0, len(dims))
        known = ends is not None and steps is not None
        size = _slice_size(dims[at], starts[index], ends[index], steps[index]) if known and ends and steps else None
        result[at] = size if size is not None else facts.unknown()
    return [tuple(result)]


def _slice_size(size: Dim, start: Dim, end: Dim, step: Dim) -> Dim | None:
    if None not in (size.value, start.value, end.value, step.value):
        return Dim.of(len(range(*slice(start.value, end.value, step.value).indices(size.value or 0))))
    if step != 1:
        return None
    if start.value is not None and start.value < 0 and end.value is not None and end.value >= 2**31 - 1:
        return minimum(size, Dim.of(-start.value))
    if start.value is None and is_positive_or_zero(-start) and end.value is not None and end.value >= 2**31 - 1:
        return minimum(size, -start)  # the last ones, as many as a size says
    if start != 0:
        end = size if end.value is not None and end.value >= 2**31 - 1 else end
        return end - start if all(map(is_positive_or_zero, (start, end - start, size - end))) else None
    if end.value is not None:
        if end.value >= 2**31 - 1:
            return size
        if end.value < 0:
            return size + end if is_positive_or_zero(size + end) else None
        return minimum(size, end)
    if is_positive_or_zero(-end):
        return size + end if is_positive_or_zero(size + end) else None
    return minimum(size, end)


def _gather(facts: Facts, node: ir.Node) -> Result:
    dims, index = (facts.dims(value) for value in node.inputs[:2])
    if dims is None or index is None:
        return [None]
    axis = normal(integer(node, "axis"), len(dims))
    return [(*dims[:axis], *index, *dims[axis + 1 :])]


def _gathernd(facts: Facts, node: ir.Node) -> Result:
    dims, index = (facts.dims(value) for value in node.inputs[:2])
    if dims is None or not index or index[-1].value is None or integer(node, "batch_dims"):
        return [None]
    return [(*index[:-1], *dims[index[-1].value :])]


def _split(facts: Facts, node: ir.Node) -> Result:
    dims = facts.dims(node.inputs[0])
    if dims is None:
        return [None]
    axis = normal(integer(node, "axis"), len(dims))
    count = len(node.outputs)
    sizes: Dims | None = None
    if "split" in node.attributes:
        sizes = tuple(Dim.of(size) for size in node.attributes["split"].as_ints())
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        sizes = facts.ints(node.inputs[1])
    else:
        share = dims[axis].divided_by(count)
        sizes = (share,) * count if share is not None else None
    parts = sizes if sizes is not None else tuple(facts.unknown() for _ in range(count))
    return [(*dims[:axis], part, *dims[axis + 1 :]) for part in parts]


def _expand(facts: Facts, node: ir.Node) -> Result:
    return [broadcast(facts, facts.dims(node.inputs[0]), _target(facts, node.inputs[1]))]


def _target(facts: Facts, shape: ir.Value | None) -> Dims | None:
    """The elements of a shape tensor; unknown ones if only their number is known."""
    known = facts.ints(shape)
    length = facts.dims(shape)
    if known is not None or length is None or len(length) != 1 or length[0].value is None:
        return known
    return tuple(facts.unknown() for _ in range(length[0].value))


def _shape(facts: Facts, node: ir.Node) -> Result:
    dims = facts.dims(node.inputs[0])
    if dims is None:
        return [(facts.unknown(),)]
    start, end = integer(node, "start"), integer(node, "end", len(dims))
    return [(Dim.of(len(range(*slice(start, end).indices(len(dims))))),)]


def _range(facts: Facts, node: ir.Node) -> Result:
    start, limit, step = (facts.ints(value) for value in node.inputs)
    if start and limit and step and step[0] == 1:
        return [(limit[0] - start[0],)]
    return [(facts.unknown(),)]


def _filled(facts: Facts, node: ir.Node) -> Result:
    return [_target(facts, node.inputs[0])]


def _flatten(facts: Facts, node: ir.Node) -> Result:
    dims = facts.dims(node.inputs[0])
    if dims is None:
        return [None]
    axis = normal(integer(node, "axis", 1), len(dims))
    return [(product(dims[:axis]), product(dims[axis:]))]


def _reduce(facts: Facts, node: ir.Node) -> Result:
    dims, axes = facts.dims(node.inputs[0]), axes_of(facts, node)
    if dims is None or axes is None or (not axes and integer(node, "noop_with_empty_axes")):
        return [dims if axes is not None else None]
    gone = {normal(axis, len(dims)) for axis in axes} or set(range(len(dims)))
    if integer(node, "keepdims", 1):
        return [tuple(Dim.of(1) if i in gone else size for i, size in enumerate(dims))]
    return [tuple(size for i, size in enumerate(dims) if i not in gone)]


def _best(facts: Facts, node: ir.Node) -> Result:
    """ArgMax and ArgMin: along one axis."""
    dims = facts.dims(node.inputs[0])
    if dims is None:
        return [None]
    axis = normal(integer(node, "axis"), len(dims))
    kept = (Dim.of(1),) if integer(node, "keepdims", 1) else ()
    return [(*dims[:axis], *kept, *dims[axis + 1 :])]


def _top(facts: Facts, node: ir.Node) -> Result:
    dims, count = facts.dims(node.inputs[0]), facts.ints(node.inputs[1])
    if dims is None:
        return [None, None]
    axis = normal(integer(node, "axis", -1), len(dims))
    size = count[0] if count is not None else facts.unknown()
    return [(*dims[:axis], size, *dims[axis + 1 :])] * 2


def _gather_elements(facts: Facts, node: ir.Node) -> Result:
    return [facts.dims(node.inputs[1])]


_SAME = (
    "Identity Cast CastLike Softmax LogSoftmax Tanh Sigmoid Relu Gelu Erf Exp Log Sqrt Neg Abs Not "
    "IsNaN IsInf Reciprocal Dropout Trilu CumSum LayerNormalization RMSNormalization Clip Floor "
    "SimplifiedLayerNormalization RotaryEmbedding LeakyRelu Elu HardSigmoid Sin Cos Softplus BitwiseNot "
    "Sign Ceil Round ScatterND "
    "BatchNormalization InstanceNormalization GroupNormalization GroupNorm LpNormalization HardSwish Mish Swish Selu "
    "Celu ThresholdedRelu Softsign Hardmax Tan Sinh Cosh Asin Acos Atan "
    "ScatterElements TensorScatter QuantizeLinear DequantizeLinear"
)
_BINARY = (
    "Add Sub Mul Div Pow Where And Or Xor Equal Less LessOrEqual Greater GreaterOrEqual Max Min "
    "Mod PRelu BitwiseAnd BitwiseOr BitwiseXor Sum Mean"
)
_REDUCED = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"

SHAPE_RULES: dict[str, Callable[[Facts, ir.Node], Result]] = {
    **dict.fromkeys((*_SAME.split(), *SAME.split()), _same),
    **dict.fromkeys(_BINARY.split(), _elementwise),
    **{f"Reduce{name}": _reduce for name in _REDUCED.split()},
    **dict.fromkeys(("ArgMax", "ArgMin"), _best),
    **CONTRIB_RULES,
    **dict.fromkeys(("MatMul", "FusedMatMul", "GemmFastGelu", "MatMulIntegerToFloat"), _matmul),
    **dict.fromkeys(("Gemm", "FusedGemm"), _gemm),
    "Einsum": _einsum,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Concat": _concat,
    "Slice": _slice,
    "Gather": _gather,
    "GatherND": _gathernd,
    "Split": _split,
    "Expand": _expand,
    "Shape": _shape,
    "Size": lambda facts, node: [()],
    "TopK": _top,
    "Range": _range,
    "ConstantOfShape": _filled,
    "Flatten": _flatten,
    "GatherElements": _gather_elements,
    **dict.fromkeys(("Conv", "FusedConv"), conv),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool"), pool),
    "OneHot": one_hot,
    "Tile": tile,
    "Pad": pad,
    "Resize": resized,
    "Attention": attention,
    "FlashAttention": attention,
    "FlashAttentionKVCache": cached_attention,
    "FlashAttentionVarlen": packed_attention,
    "MultiHeadAttention": multi_head_attention,
    "GroupQueryAttention": multi_head_attention,
}
