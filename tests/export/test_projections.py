"""Q, K and V of one tensor by constant weights: one product makes them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import attributes, has_library, nodes, run
from onnx import TensorProto, helper, numpy_helper

pytestmark = pytest.mark.skipif(not has_library(), reason="needs the library, for the nodes before they are fused")
SIZE = 8


def projected(
    heads: tuple[int, int] = (4, 4), biases: str = "qkv", opset: int = 20, layers: int = 1, **changed: str
) -> onnx.ModelProto:
    """Attention of projections of x, layer by layer.

    Args:
        heads: of Q, and of K and V.
        biases: which of them have one.
        opset: of the model.
        layers: all with the same weights.
        changed: "input" or "other": a weight that is a model's input, or a projection of another tensor; by letter.
    """
    random = np.random.default_rng(0)
    width = heads[0] * SIZE
    weights = {
        letter: random.standard_normal((width, count * SIZE)).astype(np.float32) / 4
        for letter, count in zip("qkv", (heads[0], heads[1], heads[1]), strict=True)
    }
    made, constants = [], []
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "s", width]) for name in ("x", "other")]
    for letter, weight in weights.items():
        if changed.get(letter) == "input":
            inputs.append(helper.make_tensor_value_info(f"w{letter}", TensorProto.FLOAT, weight.shape))
        else:
            constants.append(numpy_helper.from_array(weight, f"w{letter}"))
        constants.append(numpy_helper.from_array(weight[0] * 2, f"b{letter}"))
    x = "x"
    for layer in range(layers):
        given = []
        for letter in "qkv":
            source = "other" if changed.get(letter) == "other" else x
            made.append(helper.make_node("MatMul", [source, f"w{letter}"], [f"{letter}{layer}"]))
            given.append(f"{letter}{layer}")
            if letter in biases:
                made.append(helper.make_node("Add", [f"b{letter}", given[-1]], [f"{letter}{layer}_sum"]))
                given[-1] += "_sum"
        made.append(
            helper.make_node(
                "FlashAttention", given, [f"y{layer}"], domain="flashonnx", q_num_heads=heads[0], kv_num_heads=heads[1]
            )
        )
        x = f"y{layer}"
    output = helper.make_tensor_value_info(x, TensorProto.FLOAT, ["b", "s", width])
    used = {name for node in made for name in node.input}
    graph = helper.make_graph(made, "g", inputs, [output], [c for c in constants if c.name in used])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("flashonnx", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def counted(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    random = np.random.default_rng(1)
    for batch, length in ((2, 5), (1, 1)):
        given = {}
        for value in before.graph.input:
            dims = value.type.tensor_type.shape.dim
            shape = [dim.dim_value or {"b": batch, "s": length}[dim.dim_param] for dim in dims]
            given[value.name] = random.standard_normal(shape).astype(np.float32)
        right = run(before, given, library=True)
        for library in (False, True):
            for got, want in zip(run(after, given, library=library), right, strict=True):
                np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("biases", ["qkv", "", "qv"])
@pytest.mark.parametrize("opset", [13, 20])
def test_one_product(heads: tuple[int, int], biases: str, opset: int) -> None:
    before = projected(heads, biases, opset)
    after, report = fuse(before)
    (node,) = nodes(after)
    assert attributes(node)["qkv_layout"] == (b"3hd" if heads == (4, 4) else b"gqa")
    assert counted(after)["MatMul"] == 1 and counted(after)["Add"] == bool(biases)
    assert "qkv_layout" in report.sites[0].became
    same(before, after)
    stored = {proto.name: proto for proto in after.graph.initializer}  # no weight is written twice
    assert all(stored[proto.name] == proto for proto in before.graph.initializer) and len(stored) == 3 + len(biases)


def test_layers_that_share_weights_share_the_joined_ones() -> None:
    before = projected(layers=3)
    after, _ = fuse(before)
    assert counted(after)["MatMul"] == 3
    assert len({node.input[1] for node in after.graph.node if node.op_type == "MatMul"}) == 1
    same(before, after)


@pytest.mark.parametrize("changed", [{"v": "input"}, {"k": "other"}, {"q": "other"}])
def test_what_is_left(changed: dict[str, str]) -> None:
    """Weights that may differ at every run, and products of two tensors."""
    before = projected(**changed)
    after, _ = fuse(before)
    assert counted(after)["MatMul"] == 3 and "qkv_layout" not in attributes(nodes(after)[0])
    same(before, after)


def test_a_projection_that_is_used_elsewhere_stays() -> None:
    before = projected()
    before.graph.output.append(helper.make_tensor_value_info("k0", TensorProto.FLOAT, ["b", "s", 32]))
    after, _ = fuse(before)
    assert counted(after)["MatMul"] == 3
    same(before, after)


def test_on_request_alone() -> None:
    before = projected()
    after, _ = fuse(before, join_projections=False)
    assert counted(after)["MatMul"] == 3
