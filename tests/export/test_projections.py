"""Q, K and V of one tensor by constant weights: one product makes them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse, unfuse
from flashonnx.reference import attention
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
    assert counted(after)["MatMul"] == 1 and counted(after)["Add"] == 0
    assert (len(node.input) > 1) == bool(biases)
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


def packed(layout: str = "3hd", bias: str = "wide", *, used: bool = False, rank: int = 3) -> onnx.ModelProto:
    """Attention of one projection, and its bias.

    Args:
        layout: qkv_layout.
        bias: "wide" is (width,), "ranked" (1, 1, width); "rows" differs by token, "input" may differ at every run.
        used: the sum is an output, too.
        rank: of the packed tensor.
    """
    random = np.random.default_rng(3)
    heads, kv_heads = (4, 2) if layout == "gqa" else (4, 4)
    width = (heads + 2 * kv_heads) * SIZE
    shape = {"wide": [width], "ranked": [1, 1, width], "rows": [5, width], "input": [width]}[bias]
    made = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "bias"], ["sum"])]
    constants = [numpy_helper.from_array(random.standard_normal((32, width)).astype(np.float32) / 4, "w")]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 5, 32])]
    if bias == "input":
        inputs.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, shape))
    else:
        constants.append(numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), "bias"))
    q = "sum"
    if rank == 5:
        ends = [3, heads, SIZE] if layout == "3hd" else [heads, 3, SIZE]
        constants.append(numpy_helper.from_array(np.array([0, 0, *ends]), "five"))
        made.append(helper.make_node("Reshape", ["sum", "five"], ["five_q"]))
        q = "five_q"
    given = {"q_num_heads": heads, "kv_num_heads": kv_heads, "qkv_layout": layout}
    made.append(helper.make_node("FlashAttention", [q], ["y"], domain="flashonnx", **given))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    if used:
        outputs.append(helper.make_tensor_value_info("sum", TensorProto.FLOAT, None))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("flashonnx", 1)]
    return helper.make_model(
        helper.make_graph(made, "g", inputs, outputs, constants), opset_imports=opsets, ir_version=10
    )


@pytest.mark.parametrize("layout", ["3hd", "h3d", "gqa", "time_major"])
@pytest.mark.parametrize("bias", ["wide", "ranked"])
def test_the_bias_of_a_packed_projection(layout: str, bias: str) -> None:
    before = packed(layout, bias)
    after, report = fuse(before)
    (node,) = nodes(after)
    assert list(node.input[:2]) == ["p", ""] and len(node.input) == 9
    assert counted(after)["Add"] == 0 and "bias" in report.sites[0].became
    same(before, after)
    again, _ = fuse(after)
    assert list(nodes(again)[0].input) == list(node.input)
    plain, left = unfuse(after)
    assert not left.fused and not nodes(plain)
    same(before, plain)


@pytest.mark.parametrize(
    "changed", [{"bias": "rows"}, {"bias": "input"}, {"used": True}, {"rank": 5}], ids=lambda changed: str(changed)
)
def test_additions_that_stay(changed: dict[str, Any]) -> None:
    before = packed(**changed)
    after, _ = fuse(before)
    assert counted(after)["Add"] == 1 and "bias" not in nodes(after)[0].input
    same(before, after)


@pytest.mark.parametrize("form", ["packed", "five", "three", "four"])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_bodies(form: str, kind: type[np.generic]) -> None:
    """A node with a bias, by the kernel and by its body: of every form that Q, K and V have."""
    sizes = {"packed": ["b", "s", 72], "five": ["b", "s", 3, 3, 8], "three": ["b", "s", 24], "four": ["b", 3, "s", 8]}
    names = "qkv" if form in ("three", "four") else "q"
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    inputs = [helper.make_tensor_value_info(name, element, sizes[form]) for name in names]
    bias = np.random.default_rng(4).standard_normal(72).astype(kind)
    given: dict[str, Any] = {"q_num_heads": 3, "kv_num_heads": 3}
    if len(names) == 1:
        given["qkv_layout"] = "3hd"
    filled = [*names, *[""] * (8 - len(names)), "bias"]
    node = helper.make_node("FlashAttention", filled, ["y", "", "", "lse"], domain="flashonnx", **given)
    outputs = [helper.make_tensor_value_info("y", element, None), helper.make_tensor_value_info("lse", 1, None)]
    graph = helper.make_graph([node], "g", inputs, outputs, [numpy_helper.from_array(bias, "bias")])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("flashonnx", 1)]
    after, report = fuse(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    assert report.fused == 1
    random = np.random.default_rng(5)
    feeds = {
        value.name: random.standard_normal(
            [dim.dim_value or {"b": 2, "s": 5}[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        ).astype(kind)
        for value in after.graph.input
    }
    parts = [feeds[name] for name in names]
    wanted = attention(*parts, *[None] * (8 - len(names)), bias, **given)
    for library in (True, False):
        y, lse = run(after, feeds, library=library)
        np.testing.assert_allclose(y.astype(np.float64), wanted[0], atol=1e-5 if kind is np.float32 else 4e-3)
        np.testing.assert_allclose(lse, wanted[3], atol=1e-5 if kind is np.float32 else 1e-2)


@pytest.mark.parametrize(("transposed", "beta"), [(0, 1.0), (1, 1.0), (0, 0.5)])
def test_the_bias_of_a_gemm(transposed: int, beta: float) -> None:
    """As GPT-2 has it: a product of all tokens, and the batch apart again behind it."""
    random = np.random.default_rng(6)
    weight = random.standard_normal((96, 32) if transposed else (32, 96)).astype(np.float32) / 4
    constants = [
        numpy_helper.from_array(weight, "w"),
        numpy_helper.from_array(random.standard_normal(96).astype(np.float32), "bias"),
        numpy_helper.from_array(np.array([-1, 32]), "tokens"),
        numpy_helper.from_array(np.array([-1, 5, 96]), "batch"),
    ]
    given = {"q_num_heads": 4, "kv_num_heads": 4, "qkv_layout": "3hd"}
    made = [
        helper.make_node("Reshape", ["x", "tokens"], ["all"]),
        helper.make_node("Gemm", ["all", "w", "bias"], ["sum"], transB=transposed, beta=beta),
        helper.make_node("Reshape", ["sum", "batch"], ["q"]),
        helper.make_node("FlashAttention", ["q"], ["y"], domain="flashonnx", **given),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 5, 32])]
    graph = helper.make_graph(made, "g", inputs, [helper.make_tensor_value_info("y", 1, None)], constants)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("flashonnx", 1)]
    before = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    after, _ = fuse(before)
    (gemm,) = (node for node in after.graph.node if node.op_type == "Gemm")
    assert (len(gemm.input) == 2) == ("bias" in nodes(after)[0].input) == (beta == 1)
    same(before, after)
