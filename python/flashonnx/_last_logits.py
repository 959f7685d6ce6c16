"""A decoder's graph as a generator runs it: logits of one token of each request, and on a GPU which is the greatest.

An export makes logits of all tokens of a chunk; a request needs those of its last one. Its features are taken before
the product that makes logits, so that this product, the largest of a model, is as small for prompts as for single
tokens, and no logits but those are ever stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

LOGITS = "flashonnx.logits"  # (batch, 1, words)
ROWS = "flashonnx.rows"  # (batch, 1) int64: which token, counted over all (batch, sequence)
TOKENS, GREATEST = "flashonnx.tokens", "flashonnx.greatest"  # (batch, 1, 1): where the greatest logit is, and itself
_BY_TOKEN = {"Cast", "Identity", "Tanh", "Add", "Sub", "Mul", "Div"}
_PRODUCTS = {"MatMul", "MatMulNBits"}  # ONNX's, and com.microsoft's by few bits


def take_last(graph: ir.Graph, logits: ir.Value) -> None:
    """Makes the output LOGITS of `logits` (batch, sequence, words): those of the tokens that the input ROWS names."""
    import onnx_ir as ir

    assert logits.shape is not None and isinstance(logits.shape[2], int)
    head, words = _head(logits), logits.shape[2]
    features, width = (logits, words) if head is None else (head.inputs[0], _features(head) or 0)
    rows = ir.Value(name=ROWS, shape=ir.Shape(["batch", 1]), type=ir.TensorType(ir.DataType.INT64))
    flat = ir.Value(name=f"{ROWS}.shape", const_value=ir.tensor([-1, width], ir.DataType.INT64, f"{ROWS}.shape"))
    # No Flatten, which ONNX Runtime has no CUDA kernel for from opset 21 on.
    reshape = ir.node("Reshape", [features, flat], name=f"{ROWS}.reshape")
    taken = ir.node("Gather", [reshape.outputs[0], rows], {"axis": 0}, name=f"{ROWS}.gather")
    reshape.outputs[0].name, taken.outputs[0].name = f"{ROWS}.all", f"{ROWS}.taken"
    graph.inputs.append(rows)
    graph.register_initializer(flat)
    shape, last = ir.Shape(["batch", 1, words]), taken.outputs[0]
    if head is None:
        graph.extend([reshape, taken])
    else:
        graph.insert_before(head, [reshape, taken])
        head.replace_input_with(0, last)
        _forget_shapes(head)
        last = logits
    place, kind = list(graph.outputs).index(logits), logits.dtype
    if kind == ir.DataType.BFLOAT16:  # which NumPy does not have
        last.type, last.shape, kind = logits.type, shape, ir.DataType.FLOAT
        last.name = f"{LOGITS}.narrow"
        cast = ir.node("Cast", [last], {"to": kind}, name=f"{LOGITS}.cast")
        graph.extend([cast])
        last = cast.outputs[0]
    assert kind is not None
    last.name, last.type, last.shape = LOGITS, ir.TensorType(kind), shape
    graph.outputs[place] = last


def find_greatest(graph: ir.Graph) -> None:
    """Adds the outputs TOKENS, of equal logits the first, and GREATEST."""
    import onnx_ir as ir

    (logits,) = (value for value in graph.outputs if value.name == LOGITS)
    tokens = ir.node("ArgMax", [logits], {"axis": 2, "keepdims": 1}, name=f"{TOKENS}.argmax")
    greatest = ir.node("GatherElements", [logits, tokens.outputs[0]], {"axis": 2}, name=f"{GREATEST}.gather")
    graph.extend([tokens, greatest])
    for node, name, kind in ((tokens, TOKENS, ir.TensorType(ir.DataType.INT64)), (greatest, GREATEST, logits.type)):
        value = node.outputs[0]
        value.name, value.type, value.shape = name, kind, ir.Shape(["batch", 1, 1])
        graph.outputs.append(value)


def bring(value: ir.Value) -> None:
    """What reads this input of numbers not below 0 reads a copy instead, which a node makes on the device.

    The input may then lie in the host's memory: only one node waits for it, not every layer of a model.
    """
    import onnx_ir as ir

    readers = tuple(value.uses())
    copy = ir.node("Abs", [value], name=f"flashonnx.{value.name}.bring")  # nothing that an optimizer sees through
    copy.outputs[0].name = f"flashonnx.{value.name}"
    copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
    for node, index in readers:
        node.replace_input_with(index, copy.outputs[0])
    assert value.graph is not None
    value.graph.insert_before(value.graph[0], copy)


def _head(logits: ir.Value) -> ir.Node | None:
    """The product by weights that makes logits, where what comes after it treats each token by itself."""
    value, others = logits, 0  # how many read it beside the node that is looked at
    while (node := value.producer()) is not None and len(value.uses()) == others:
        if node.op_type in _PRODUCTS:
            return node if _features(node) is not None else None
        varying = [each for each in node.inputs if each is not None and not _is_one_row(each)]
        if node.op_type not in _BY_TOKEN or len(varying) != 1 or varying[0].is_graph_output():
            return None
        value, others = varying[0], 1
    return None


def _is_one_row(value: ir.Value) -> bool:
    """Whether it is weights that are the same for all tokens."""
    dims = _dims(value)
    return dims is not None and len(dims) < 2


def _features(product: ir.Node) -> int | None:
    """How many features it multiplies by weights of two dimensions."""
    if product.op_type == "MatMul":
        dims = _dims(product.inputs[1])
        return dims[0] if dims is not None and len(dims) == 2 else None
    others = [_dims(value) for value in product.inputs[1:] if value is not None]
    return product.attributes["K"].as_int() if None not in others else None


def _dims(value: ir.Value | None) -> Sequence[int] | None:
    """Of weights, also such that come from a node; None of anything else."""
    if value is None:
        return None
    if value.const_value is not None:
        return value.const_value.shape.numpy()
    node = value.producer()
    if node is None:
        return None
    if node.op_type == "Constant" and "value" in node.attributes:
        return node.attributes["value"].as_tensor().shape.numpy()
    if node.op_type == "Transpose":
        dims = _dims(node.inputs[0])
        return dims[::-1] if dims is not None and len(dims) == 2 and _is_turned(node) else None
    return _dims(node.inputs[0]) if node.op_type in ("Cast", "Identity", "DequantizeLinear") else None


def _is_turned(transpose: ir.Node) -> bool:
    return "perm" not in transpose.attributes or list(transpose.attributes["perm"].as_ints()) == [1, 0]


def _forget_shapes(node: ir.Node) -> None:
    """Those of a chunk, which are one token's now."""
    for value in node.outputs:
        value.shape = None
        for after in value.consumers():
            _forget_shapes(after)
