"""A decoder's graph as a generator runs it: logits of one token of each request, and on a GPU which is the greatest.

An export makes logits of all tokens of a chunk; a request needs those of its last one. Its features are taken before
the product that makes logits, so that this product, the largest of a model, is as small for prompts as for single
tokens, and no logits but those are ever stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

LOGITS = "flashonnx.logits"  # (batch, 1, words)
ROWS = "flashonnx.rows"  # (batch, 1) int64: which token, counted over all (batch, sequence)
TOKENS, GREATEST = "flashonnx.tokens", "flashonnx.greatest"  # (batch, 1, 1): where the greatest logit is, and itself
_BY_TOKEN = {"Cast", "Identity", "Tanh", "Add", "Sub", "Mul", "Div"}
_PRODUCTS = {"MatMul", "MatMulNBits"}


def take_last(graph: ir.Graph, logits: ir.Value) -> None:
    """Makes the output LOGITS of `logits` (batch, sequence, words): those of the tokens that the input ROWS names."""
    import onnx_ir as ir

    head = _head(logits)
    features = logits if head is None else head.inputs[0]
    assert features is not None
    rows = ir.Value(name=ROWS, shape=ir.Shape(["batch", 1]), type=ir.TensorType(ir.DataType.INT64))
    flat = ir.node("Flatten", [features], {"axis": 2}, name=f"{ROWS}.flatten")
    taken = ir.node("Gather", [flat.outputs[0], rows], {"axis": 0}, name=f"{ROWS}.gather")
    flat.outputs[0].name, taken.outputs[0].name = f"{ROWS}.all", f"{ROWS}.taken"
    graph.inputs.append(rows)
    assert logits.shape is not None
    shape, last = ir.Shape(["batch", 1, logits.shape[2]]), taken.outputs[0]
    if head is None:
        graph.extend([flat, taken])
    else:
        graph.insert_before(head, [flat, taken])
        head.replace_input_with(0, last)
        _forget_shapes(head)
        last = logits
    last.name, last.type, last.shape = LOGITS, logits.type, shape
    graph.outputs[list(graph.outputs).index(logits)] = last


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
            more = node.inputs[1:]
            two = node.op_type != "MatMul" or _rank(more[0]) == 2
            return node if two and all(_rank(other) is not None for other in more if other is not None) else None
        varying = [each for each in node.inputs if each is not None and _rank(each) not in (0, 1)]
        if node.op_type not in _BY_TOKEN or len(varying) != 1 or varying[0].is_graph_output():
            return None
        value, others = varying[0], 1
    return None


def _rank(value: ir.Value | None) -> int | None:
    """Of weights, also such that come from a node; None of anything else."""
    while value is not None:
        if value.const_value is not None:
            return len(value.const_value.shape)
        node = value.producer()
        if node is not None and node.op_type == "Constant" and "value" in node.attributes:
            return len(node.attributes["value"].as_tensor().shape)
        if node is None or node.op_type not in ("Transpose", "Cast", "Identity", "DequantizeLinear"):
            return None
        value = node.inputs[0]
    return None


def _forget_shapes(node: ir.Node) -> None:
    """Those of a chunk, which are one token's now."""
    for value in node.outputs:
        value.shape = None
        for after in value.consumers():
            _forget_shapes(after)
