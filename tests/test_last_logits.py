"""flashonnx._last_logits: the logits of the tokens that are asked for are those of the whole model, for any head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
ort = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

last_logits = pytest.importorskip("flashonnx._last_logits")
from flashonnx.generate import Generator  # noqa: E402

BATCH, SEQUENCE, FEATURES, WORDS = 3, 5, 8, 11
ROWS = np.array([[4], [7], [10]])  # tokens 4, 2 and 0 of the three requests
_WEIGHTS = np.random.default_rng(0).standard_normal((FEATURES, WORDS)).astype(np.float32)
_CONSTANTS = {
    "w": _WEIGHTS,
    "turned": _WEIGHTS.T,
    "w3": _WEIGHTS[None],
    "bias": np.arange(WORDS, dtype=np.float32),
    "two": np.float32(2),
    "many": np.ones((SEQUENCE, 1), np.float32) * np.arange(1, SEQUENCE + 1, dtype=np.float32)[:, None],
}
Node = tuple[str, list[str], str]

# Nodes from features to logits, and whether the product is made of the asked tokens alone.
HEADS: dict[str, tuple[list[Node], bool]] = {
    "plain": ([("MatMul", ["x", "w"], "logits")], True),
    "tied": ([("Transpose", ["turned"], "t"), ("MatMul", ["x", "t"], "logits")], True),
    "constant node": ([("Constant", [], "c"), ("MatMul", ["x", "c"], "logits")], True),
    "biased": ([("MatMul", ["x", "w"], "p"), ("Add", ["bias", "p"], "logits")], True),
    "capped": (
        [
            ("MatMul", ["x", "w"], "p"),
            ("Div", ["p", "two"], "d"),
            ("Tanh", ["d"], "t"),
            ("Mul", ["t", "two"], "logits"),
        ],
        True,
    ),
    "normalized words": ([("MatMul", ["x", "w"], "p"), ("Softmax", ["p"], "logits")], False),
    "varying by token": ([("MatMul", ["x", "w"], "p"), ("Mul", ["p", "many"], "logits")], False),
    "weights of rank 3": ([("MatMul", ["x", "w3"], "logits")], False),
    "no weights": ([("Transpose", ["x"], "y"), ("MatMul", ["x", "y"], "logits")], False),
    "read twice": ([("MatMul", ["x", "w"], "p"), ("Neg", ["p"], "other"), ("Tanh", ["p"], "logits")], False),
    "read again": ([("MatMul", ["x", "w"], "logits"), ("Neg", ["logits"], "other")], False),
}


def decoder(nodes: list[Node], words: int = WORDS) -> Any:
    made = [helper.make_node(op, inputs, [output]) for op, inputs, output in nodes]
    for node in made:
        if node.op_type == "Constant":
            node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(_WEIGHTS)))
        if node.op_type == "Transpose":
            node.attribute.append(helper.make_attribute("perm", [1, 0] if node.input[0] == "turned" else [0, 2, 1]))
    outputs = ["logits", *(["other"] if any(output == "other" for _, _, output in nodes) else [])]
    values = {
        "x": ["batch", "sequence", FEATURES],
        "logits": ["batch", "sequence", words],
        "other": ["batch", "sequence", words],
    }
    info = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in values.items()}
    used = {name for _, inputs, _ in nodes for name in inputs}
    constants = [numpy_helper.from_array(np.asarray(_CONSTANTS[name]), name) for name in _CONSTANTS if name in used]
    graph = helper.make_graph(made, "head", [info["x"]], [info[name] for name in outputs], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(model: Any, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def changed(model: Any, *, more: Callable[[Any], None] = lambda graph: None) -> tuple[Any, Any]:
    copy = ir.from_proto(model)
    last_logits.take_last(copy.graph, next(value for value in copy.graph.outputs if value.name == "logits"))
    more(copy.graph)
    proto = ir.to_proto(copy)
    onnx.checker.check_model(proto, full_check=True)
    return copy, proto


@pytest.mark.parametrize("head", HEADS)
def test_rows_of_all_logits(head: str) -> None:
    nodes, few = HEADS[head]
    words = SEQUENCE if head == "no weights" else WORDS
    x = np.random.default_rng(1).standard_normal((BATCH, SEQUENCE, FEATURES)).astype(np.float32)
    model = decoder(nodes, words)
    right = run(model, x=x)
    copy, proto = changed(model)
    got = run(proto, x=x, **{last_logits.ROWS: ROWS})
    want = right["logits"].reshape(-1, words)[ROWS]
    np.testing.assert_allclose(got[last_logits.LOGITS], want, rtol=1e-6, atol=1e-6)
    if "other" in right:
        np.testing.assert_array_equal(got["other"], right["other"])
    (product,) = (node for node in copy.graph if node.op_type == "MatMul")
    assert (product.inputs[0].name == f"{last_logits.ROWS}.taken") == few


@pytest.mark.parametrize("head", ["plain", "capped", "normalized words"])
def test_logits_in_bfloat16(head: str) -> None:
    """They come as float32 with the values of bfloat16, as NumPy has no such type."""
    nodes, few = HEADS[head]
    model = decoder([(op, inputs, "wide" if output == "logits" else output) for op, inputs, output in nodes])
    cast = helper.make_node("Cast", ["wide"], ["logits"], to=TensorProto.BFLOAT16)
    model.graph.node.append(cast)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.BFLOAT16
    x = np.random.default_rng(1).standard_normal((BATCH, SEQUENCE, FEATURES)).astype(np.float32)
    want = run(decoder(nodes), x=x)["logits"].reshape(-1, WORDS)[ROWS]
    copy, proto = changed(model, more=last_logits.find_greatest)
    got = run(proto, x=x, **{last_logits.ROWS: ROWS})
    logits = got[last_logits.LOGITS]
    assert logits.dtype == np.float32 and not (logits.view(np.uint32) & 0xFFFF).any(), "of bfloat16 they are"
    np.testing.assert_allclose(logits, want, rtol=2**-8, atol=1e-6)
    np.testing.assert_array_equal(got[last_logits.GREATEST], logits.max(-1, keepdims=True))
    (product,) = (node for node in copy.graph if node.op_type == "MatMul")
    assert (product.inputs[0].name == f"{last_logits.ROWS}.taken") == few


def test_first_of_the_greatest() -> None:
    """Of equal logits the first; its value tells of what is not finite."""
    _, model = changed(decoder(HEADS["biased"][0]), more=last_logits.find_greatest)
    x = np.zeros((1, 1, FEATURES), np.float32)
    for bias, token in (
        ([0, 3, 1, 3, 3], 1),
        ([-1] * 5, 0),
        ([-np.inf, -2, -2, -np.inf, -3], 1),
        ([1, np.inf, 2, 3, 4], 1),
    ):
        full = np.full(WORDS, -9, np.float32)
        full[:5] = bias
        (tensor,) = (each for each in model.graph.initializer if each.name == "bias")
        tensor.CopyFrom(numpy_helper.from_array(full, "bias"))
        got = run(model, x=x, **{last_logits.ROWS: np.zeros((1, 1), np.int64)})
        assert got[last_logits.TOKENS].item() == token and got[last_logits.GREATEST].item() == full[token]


def test_an_input_that_is_brought() -> None:
    """Every reader reads the copy, which is made before; the numbers are the same."""
    values = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch"]) for name in ("lengths", "a", "b")]
    nodes = [helper.make_node("Add", ["lengths", "lengths"], ["a"]), helper.make_node("Neg", ["lengths"], ["b"])]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    copy = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    last_logits.bring(copy.graph.inputs[0])
    assert [node.op_type for node in copy.graph.inputs[0].consumers()] == ["Abs"]
    model = ir.to_proto(copy)
    onnx.checker.check_model(model, full_check=True)
    lengths = np.array([0, 5, 2**40])
    got = run(model, lengths=lengths)
    np.testing.assert_array_equal([got["a"], got["b"]], [2 * lengths, -lengths])


def test_logits_of_the_last_tokens_alone() -> None:
    """As an export with logits_to_keep=1 has them: which token they are of depends on the batch mates' lengths."""
    cache = ["batch", 2, "capacity", 8]
    shapes = {"input_ids": ["batch", "sequence"], "cache_lengths": ["batch"], "logits": ["batch", 1, 99]}
    shapes |= {"past_key_values.0.key": cache, "present.0.key": cache}
    kinds = {name: TensorProto.FLOAT if len(shape) > 2 else TensorProto.INT64 for name, shape in shapes.items()}
    values = {name: helper.make_tensor_value_info(name, kinds[name], shape) for name, shape in shapes.items()}
    ids, lengths, logits, past, present = values.values()
    copies = [helper.make_node("Identity", [past.name], [output.name]) for output in (logits, present)]
    graph = helper.make_graph(copies, "kept", [ids, lengths, past], [logits, present])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    with pytest.raises(ValueError, match=r"'logits' is expected .*got \[batch,1,99\]: export without logits_to_keep"):
        Generator(model, device="cpu")
