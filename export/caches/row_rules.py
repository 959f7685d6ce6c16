"""Where operators put the batch and the new tokens: one small function an operator, (rows, node) -> axes of outputs.

They raise MixedError where what they make may not be cut there, or where nothing shows that it may.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from flashonnx.export.caches.row_attention import attention, cached_attention, rotary
from flashonnx.export.caches.row_axes import Axes, Free, MixedError, Rows, size_of
from flashonnx.export.layout.factors import Axis, Factor
from flashonnx.export.rules.contributed import DOMAIN as MICROSOFT
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.operator_shapes import integer
from flashonnx.export.values.shape_rules import axes_of, normal

Rule = Callable[[Rows, ir.Node], Axes | list[Axes | None]]  # of the first output, or of all: None, not known


def _elementwise(rows: Rows, node: ir.Node) -> Axes:
    return rows.broadcast(*node.inputs)


def _same(rows: Rows, node: ir.Node) -> Axes:
    """As the first input; the others are the same for all tokens."""
    rows.free(*node.inputs[1:])
    return rows.axes(node.inputs[0])


def _matmul(rows: Rows, node: ir.Node) -> Axes:
    if any(integer(node, name) for name in ("transA", "transB", "transBatchA", "transBatchB")):
        raise MixedError("its operands are turned")
    rows.free(*node.inputs[2:])
    a, b = map(rows.axes, node.inputs[:2])
    if len(a) < 2 or len(b) < 2:
        raise MixedError("it multiplies a vector")
    rows.whole(a, -1)
    rows.whole(b, -2)
    return (*rows.met([a[:-2], b[:-2]]), a[-2], b[-1])


def _gemm(rows: Rows, node: ir.Node) -> Axes:
    turned = [integer(node, name) for name in ("transA", "transB")]
    given = zip(map(rows.axes, node.inputs[:2]), turned, strict=True)
    a, b = (axes[::-1] if turn else axes for axes, turn in given)
    rows.whole(a, -1)
    rows.whole(b, -2)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        return rows.met([(a[0], b[1]), rows.axes(node.inputs[2])])
    return a[0], b[1]


def _by_width(rows: Rows, node: ir.Node) -> Axes:
    """Weights in blocks: the last axis is multiplied."""
    rows.free(*node.inputs[1:])
    axes = rows.axes(node.inputs[0])
    rows.whole(axes, -1)
    return (*axes[:-1], rows.of_output(node, -1))


def _einsum(rows: Rows, node: ir.Node) -> Axes:
    equation = node.attributes["equation"].as_string().replace(" ", "")
    if "->" not in equation or "." in equation:
        raise MixedError(f"its equation is {equation}")
    left, right = equation.split("->")
    given: dict[str, list[Axes]] = {}
    for labels, value in zip(left.split(","), node.inputs, strict=True):
        if len(set(labels)) < len(labels):
            raise MixedError(f"its equation is {equation}")
        for label, axis in zip(labels, rows.axes(value), strict=True):
            given.setdefault(label, []).append((axis,))
    met = {label: rows.met(axes) for label, axes in given.items()}
    for label in met.keys() - set(right):
        rows.whole(met[label], 0)
    return tuple(met[label][0] for label in right)


def _along(default: int, *, keeps: bool = True) -> Rule:
    """Works along one axis."""

    def rule(rows: Rows, node: ir.Node) -> Axes:
        axes = rows.axes(node.inputs[0])
        rows.free(*node.inputs[1:])
        axis = normal(integer(node, "axis", default), len(axes))
        rows.whole(axes, axis)
        kept = keeps or integer(node, "keepdims", 1)
        made = axes[axis] if keeps else ()
        return (*axes[:axis], *([made] if kept else []), *axes[axis + 1 :])

    return rule


def _softmax(rows: Rows, node: ir.Node) -> Axes:
    """Before opset 13 along all axes from one on."""
    axes, is_old = rows.axes(node.inputs[0]), rows.facts.opset < 13
    first = normal(integer(node, "axis", 1 if is_old else -1), len(axes))
    rows.whole(axes, *range(first, len(axes) if is_old else first + 1))
    return axes


def _normalized(rows: Rows, node: ir.Node) -> Axes:
    """From one axis to the last, with weights."""
    rows.free(*node.inputs[1:])
    axes = rows.axes(node.inputs[0])
    rows.whole(axes, *range(normal(integer(node, "axis", -1), len(axes)), len(axes)))
    return axes


def _skipped(rows: Rows, node: ir.Node) -> list[Axes | None]:
    """A sum, normalised along its last axis, and the sum."""
    rows.free(*node.inputs[2:])
    axes = rows.broadcast(*node.inputs[:2])
    rows.whole(axes, -1)
    return [axes, None, None, axes]


def _reduced(rows: Rows, node: ir.Node) -> Axes:
    axes, given = rows.axes(node.inputs[0]), axes_of(rows.facts, node)
    if given is None:
        raise MixedError("its axes are not known")
    if not given and integer(node, "noop_with_empty_axes"):
        return axes
    gone = {normal(axis, len(axes)) for axis in given} or set(range(len(axes)))
    rows.whole(axes, *gone)
    if integer(node, "keepdims", 1):
        return tuple(() if index in gone else axis for index, axis in enumerate(axes))
    return tuple(axis for index, axis in enumerate(axes) if index not in gone)


def _running_sum(rows: Rows, node: ir.Node) -> Axes:
    """Of tokens from the first on it holds none of those behind."""
    axes, given = rows.axes(node.inputs[0]), rows.facts.constant(node.inputs[1])
    if given is None:
        raise MixedError("its axis is not known")
    axis = axes[int(given.item())]
    if integer(node, "reverse") or axis != (rows.tokens,):
        rows.whole(axes, int(given.item()))
    return axes


def _triangle(rows: Rows, node: ir.Node) -> Axes:
    """Rows and columns are counted from the first, which may be tokens, but not sentences."""
    axes = _same(rows, node)
    if any(rows.batch in axis for axis in axes[-2:]):
        rows.whole(axes, -2, -1)
    return axes


def _transpose(rows: Rows, node: ir.Node) -> Axes:
    axes = rows.axes(node.inputs[0])
    perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(len(axes))[::-1]
    return tuple(axes[index] for index in perm)


def _reshape(rows: Rows, node: ir.Node) -> Axes:
    return rows.reshaped(node.inputs[0], rows.dims(node.outputs[0]))


def _unsqueeze(rows: Rows, node: ir.Node) -> Axes:
    axes, given = rows.axes(node.inputs[0]), axes_of(rows.facts, node)
    if given is None:
        raise MixedError("its axes are not known")
    rank, rest = len(axes) + len(given), iter(axes)
    new = {normal(axis, rank) for axis in given}
    return tuple(() if index in new else next(rest) for index in range(rank))


def _squeeze(rows: Rows, node: ir.Node) -> Axes:
    axes, given = rows.axes(node.inputs[0]), axes_of(rows.facts, node)
    if not given:
        raise MixedError("its axes are not known")
    gone = {normal(axis, len(axes)) for axis in given}
    rows.whole(axes, *gone)
    return tuple(axis for index, axis in enumerate(axes) if index not in gone)


def _expand(rows: Rows, node: ir.Node) -> Axes:
    axes, dims = rows.axes(node.inputs[0]), rows.dims(node.outputs[0])
    axes = ((),) * (len(dims) - len(axes)) + axes
    if any(rows.is_labelled(axis) and size_of(axis) != size for axis, size in zip(axes, dims, strict=True)):
        raise MixedError(f"nothing shows that tokens and sentences stay as many in {[*map(str, dims)]}")
    return tuple(axis or _new(rows, size) for axis, size in zip(axes, dims, strict=True))


def _tile(rows: Rows, node: ir.Node) -> Axes:
    axes, dims, repeats = rows.axes(node.inputs[0]), rows.dims(node.outputs[0]), rows.facts.ints(node.inputs[1])
    if repeats is None or len(repeats) != len(axes):
        raise MixedError("how often is not known")
    rows.whole(axes, *(index for index, count in enumerate(repeats) if count != 1))
    if any(axis and count.value is None for axis, count in zip(axes, repeats, strict=True)):
        raise MixedError("an axis is repeated as often as there are tokens or sentences")
    return tuple(
        axis if count == 1 else _new(rows, size) if not axis else (Factor(count, repeats=True), *axis)
        for axis, size, count in zip(axes, dims, repeats, strict=True)
        if axis or count.value != 0
    )


def _new(rows: Rows, size: Dim, repeats: bool = True) -> Axis:
    """An axis of the output, along which, perhaps, it repeats."""
    axis = rows.named(size, repeats)
    if axis is None:
        raise MixedError(f"'{size}' is neither the number of tokens nor of sentences, but may have to do with them")
    return axis


def _filled(rows: Rows, node: ir.Node) -> Axes:
    return tuple(_new(rows, size) for size in rows.dims(node.outputs[0]))


def _range(rows: Rows, node: ir.Node) -> Axes:
    rows.free(node.inputs[0], node.inputs[2])
    return tuple(_new(rows, size, repeats=False) for size in rows.dims(node.outputs[0]))


def _concat(rows: Rows, node: ir.Node) -> Axes:
    given = [rows.axes(value) for value in node.inputs]
    if len(given) == 1:
        return given[0]
    axis = normal(integer(node, "axis"), len(given[0]))
    for axes in given:
        rows.whole(axes, axis)
    met = rows.met([(*axes[:axis], (), *axes[axis + 1 :]) for axes in given])
    return (*met[:axis], rows.of_output(node, axis), *met[axis + 1 :])


def _split(rows: Rows, node: ir.Node) -> list[Axes | None]:
    rows.free(*node.inputs[1:])
    axes = rows.axes(node.inputs[0])
    axis = normal(integer(node, "axis"), len(axes))
    rows.whole(axes, axis)
    return [(*axes[:axis], rows.of_output(node, axis, i), *axes[axis + 1 :]) for i in range(len(node.outputs))]


def _slice(rows: Rows, node: ir.Node) -> Axes:
    """A part of features; of tokens all; of a table as many rows as there are tokens."""
    starts, ends, given, steps = (*node.inputs[1:], None, None)[:4]
    rows.free(starts, given, steps)
    axes, facts = rows.axes(node.inputs[0]), rows.facts
    before, after = rows.dims(node.inputs[0]), rows.dims(node.outputs[0])
    places = facts.ints(given) if given is not None else None
    first, step = facts.ints(starts), facts.constant(steps) if steps is not None else None
    if first is None or (given is not None and places is None) or (steps is not None and step is None):
        raise MixedError("its axes, starts or steps are not known")
    cut = [normal(place.value or 0, len(axes)) for place in places] if places is not None else range(len(first))
    result = list(axes)
    for index, at in enumerate(cut):
        forwards = step is None or step.flat[index] == 1
        if rows.is_labelled(axes[at]):
            if not forwards or before[at] != after[at]:
                rows.whole(axes, at)
        elif isinstance(rows.state(ends), Free):
            result[at] = rows.of_output(node, at)
        elif forwards and (first[index].value or 0) >= 0:
            result[at] = _new(rows, after[at], repeats=False)
        else:
            raise MixedError("where it ends depends on how many tokens or sentences there are")
    return tuple(result)


def _gather(rows: Rows, node: ir.Node) -> Axes:
    data, index = (rows.axes(value) for value in node.inputs)
    axis = normal(integer(node, "axis"), len(data))
    rows.whole(data, axis)
    return (*data[:axis], *index, *data[axis + 1 :])


def _gathernd(rows: Rows, node: ir.Node) -> Axes:
    data, index = (rows.axes(value) for value in node.inputs)
    width = rows.dims(node.inputs[1])[-1].value
    if width is None or integer(node, "batch_dims"):
        raise MixedError("nothing shows what its indices are")
    rows.whole(data, *range(width))
    rows.whole(index, -1)
    return (*index[:-1], *data[width:])


def _gather_elements(rows: Rows, node: ir.Node) -> Axes:
    data, index = (rows.axes(value) for value in node.inputs)
    axis = normal(integer(node, "axis"), len(data))
    rows.whole(data, axis)
    rows.whole(index, axis)
    for at, (a, b) in enumerate(zip(data, index, strict=True)):
        if at != axis and (rows.is_labelled(a) or rows.is_labelled(b)) and a != b:
            raise MixedError("its indices lie otherwise than what they are for")
    return index


def _top(rows: Rows, node: ir.Node) -> list[Axes | None]:
    rows.free(*node.inputs[1:])
    axes = rows.axes(node.inputs[0])
    axis = normal(integer(node, "axis", -1), len(axes))
    rows.whole(axes, axis)
    return [(*axes[:axis], rows.of_output(node, axis), *axes[axis + 1 :])] * 2


def _conv(rows: Rows, node: ir.Node) -> Axes:
    """Of windows of one token, or along other axes."""
    rows.free(*node.inputs[1:])
    axes, kernel = rows.axes(node.inputs[0]), rows.dims(node.inputs[1])
    rows.whole(axes, 1)
    pads, strides = (node.attributes[x].as_ints() if x in node.attributes else () for x in ("pads", "strides"))
    if any(size != 1 for size in kernel[2:]) or any(pads) or any(stride != 1 for stride in strides):
        rows.whole(axes, *range(2, len(axes)))
        return (axes[0], *(rows.of_output(node, at) for at in range(1, len(axes))))
    return (axes[0], rows.of_output(node, 1), *axes[2:])


_UNARY = (
    "Abs Acos Asin Atan BitwiseNot Cast Ceil Celu Clip Cos Cosh Dropout Elu Erf Exp Floor Gelu HardSigmoid HardSwish "
    "Identity IsInf IsNaN LeakyRelu Log Mish Neg Not QuantizeLinear DequantizeLinear Reciprocal Relu Round Selu "
    "Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu"
)
_BINARY = (
    "Add And BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or "
    "PRelu Pow Sub Sum Where Xor"
)
_REDUCED = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"

RULES: dict[tuple[str, str], Rule] = {
    **{("", name): _same for name in _UNARY.split()},
    **{("", name): _elementwise for name in _BINARY.split()},
    **{("", f"Reduce{name}"): _reduced for name in _REDUCED.split()},
    **{("", name): _softmax for name in ("Softmax", "LogSoftmax", "Hardmax")},
    **{("", name): _normalized for name in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")},
    **{("", name): _along(0, keeps=False) for name in ("ArgMax", "ArgMin")},
    ("", "Attention"): attention,
    ("", "CastLike"): lambda rows, node: rows.axes(node.inputs[0]),
    ("", "Concat"): _concat,
    ("", "ConstantOfShape"): _filled,
    ("", "Conv"): _conv,
    ("", "CumSum"): _running_sum,
    ("", "Einsum"): _einsum,
    ("", "Expand"): _expand,
    ("", "Flatten"): _reshape,
    ("", "Gather"): _gather,
    ("", "GatherElements"): _gather_elements,
    ("", "GatherND"): _gathernd,
    ("", "Gemm"): _gemm,
    ("", "LpNormalization"): _along(-1),
    ("", "MatMul"): _matmul,
    ("", "Range"): _range,
    ("", "Reshape"): _reshape,
    ("", "RotaryEmbedding"): rotary,
    ("", "Slice"): _slice,
    ("", "Split"): _split,
    ("", "Squeeze"): _squeeze,
    ("", "Tile"): _tile,
    ("", "TopK"): _top,
    ("", "Transpose"): _transpose,
    ("", "Trilu"): _triangle,
    ("", "Unsqueeze"): _unsqueeze,
    ("flashonnx", "FlashAttention"): attention,
    ("flashonnx", "FlashAttentionKVCache"): cached_attention,
    (MICROSOFT, "BiasGelu"): _elementwise,
    (MICROSOFT, "FastGelu"): _elementwise,
    (MICROSOFT, "FusedMatMul"): _matmul,
    (MICROSOFT, "Gelu"): _same,
    (MICROSOFT, "MatMulBnb4"): _by_width,
    (MICROSOFT, "MatMulNBits"): _by_width,
    (MICROSOFT, "QuickGelu"): _same,
    (MICROSOFT, "RotaryEmbedding"): rotary,
    (MICROSOFT, "SimplifiedLayerNormalization"): _normalized,
    (MICROSOFT, "SkipLayerNormalization"): _skipped,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _skipped,
}
