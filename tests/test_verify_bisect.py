"""verify(bisect=True): the node at which two models part, planted in layers of which the right answer is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashonnx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("onnxruntime")
WIDTH, HEADS, LAYERS = 16, 2, 3


def layers(
    change: Callable[[int, list[onnx.NodeProto]], None] = lambda layer, nodes: None, branch: bool = False
) -> onnx.ModelProto:
    """Layers of x + attention(norm(x)); `change` may spoil the nodes of each. `branch`: the layers side by side."""
    random = np.random.default_rng(1)
    constants: dict[str, Any] = {
        "heads": np.array([0, 0, HEADS, WIDTH // HEADS]),
        "flat": np.array([0, 0, WIDTH]),
        "scale": np.float32((WIDTH // HEADS) ** -0.5),
        "one": np.ones(WIDTH, np.float32),
    }
    nodes, x, sums = [], "x", []
    for i in range(LAYERS):
        part = [helper.make_node("LayerNormalization", [x, "one"], [f"norm{i}"], f"norm{i}")]
        for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            constants[f"w{name}{i}"] = (random.standard_normal((WIDTH, WIDTH)) / 4).astype(np.float32)
            part += [
                helper.make_node("MatMul", [f"norm{i}", f"w{name}{i}"], [f"{name}{i}_flat"], f"project_{name}{i}"),
                helper.make_node("Reshape", [f"{name}{i}_flat", "heads"], [f"{name}{i}_heads"]),
                helper.make_node("Transpose", [f"{name}{i}_heads"], [f"{name}{i}"], perm=order),
            ]
        part += [
            helper.make_node("MatMul", [f"q{i}", f"k{i}"], [f"products{i}"], f"products{i}"),
            helper.make_node("Mul", [f"products{i}", "scale"], [f"scores{i}"], f"scale{i}"),
            helper.make_node("Softmax", [f"scores{i}"], [f"p{i}"], f"softmax{i}", axis=-1),
            helper.make_node("MatMul", [f"p{i}", f"v{i}"], [f"attended{i}"], f"mean{i}"),
            helper.make_node("Transpose", [f"attended{i}"], [f"joined{i}"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [f"joined{i}", "flat"], [f"attention{i}"], f"join{i}"),
            helper.make_node("Add", ["x" if branch else x, f"attention{i}"], [f"sum{i}"], f"add{i}"),
        ]
        change(i, part)
        nodes += part
        sums.append(f"sum{i}")
        x = "x" if branch else f"sum{i}"
    nodes.append(helper.make_node("Sum", sums if branch else sums[-1:], ["y"], "last"))
    shape = ("batch", "sequence", WIDTH)
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def set_attribute(model: onnx.ModelProto, index: int, **attributes: Any) -> str:
    """Changes the fused node of that number in place, in the kernel's attributes alone; its name."""
    node = [node for node in model.graph.node if node.domain == "flashonnx"][index]
    for name, value in attributes.items():
        for old in [a for a in node.attribute if a.name == name]:
            node.attribute.remove(old)
        node.attribute.append(helper.make_attribute(name, value))
    return node.name


@pytest.mark.parametrize("branch", [False, True], ids=["chain", "branches"])
@pytest.mark.parametrize("index", [0, 2])
def test_a_wrong_attention_is_found(index: int, branch: bool) -> None:
    original = layers(branch=branch)
    fused, report = flashonnx.fuse(original)
    assert report.fused == LAYERS
    name = set_attribute(fused, index, is_causal=1)
    verdict = flashonnx.verify(original, fused, bisect=True, dims={"batch": 2, "sequence": [5, 9]})
    assert not verdict.ok and verdict.parted is not None
    assert verdict.parted.node == f"FlashAttention '{name}'"
    assert f"they part at FlashAttention '{name}'" in str(verdict)
    assert len(verdict.nodes) == LAYERS
    wrong = [node.ok for node in verdict.nodes]
    assert wrong == ([i != index for i in range(LAYERS)] if branch else [i < index for i in range(LAYERS)])


@pytest.mark.parametrize("index", [0, 2])
def test_a_wrong_node_between_attentions_is_found(index: int) -> None:
    """What is not fused: an Add that adds twice, behind a right attention."""

    def twice(layer: int, nodes: list[onnx.NodeProto]) -> None:
        if layer == index:
            nodes[-1].input[0] = nodes[-1].input[1]

    original = layers()
    spoilt, _ = flashonnx.fuse(layers(twice))
    verdict = flashonnx.verify(original, spoilt, bisect=True, dims={"batch": 1, "sequence": 6})
    assert verdict.parted is not None
    assert verdict.parted.node == verdict.parted.original_node == f"Add 'add{index}'"
    assert verdict.parted.value == f"sum{index}" and verdict.parted in verdict.nodes


def test_a_wrong_projection_is_found_between_few_probes() -> None:
    """One of three projections of a layer: only its own value differs, not that of its neighbours."""

    def transposed(layer: int, nodes: list[onnx.NodeProto]) -> None:
        if layer == 1:
            node = next(node for node in nodes if node.name == "project_k1")
            node.input[1] = "wv1"

    spoilt, _ = flashonnx.fuse(layers(transposed), join_projections=False)
    verdict = flashonnx.verify(layers(), spoilt, bisect=None)
    assert verdict.parted is not None and verdict.parted.node == "MatMul 'project_k1'"


def sized(wrong: int | None = None) -> onnx.ModelProto:
    """Products, each reshaped to its own shape: sizes agree whatever the numbers do."""
    random, nodes, weights, x = np.random.default_rng(0), [], [], "x"
    for i in range(12):
        weight = random.standard_normal((WIDTH, WIDTH)) / 4 * (1.01 if i == wrong else 1)
        weights.append(numpy_helper.from_array(weight.astype(np.float32), f"w{i}"))
        nodes += [
            helper.make_node("MatMul", [x, f"w{i}"], [f"m{i}"], f"product{i}"),
            helper.make_node("Shape", [f"m{i}"], [f"s{i}"]),
            helper.make_node("Reshape", [f"m{i}", f"s{i}"], [f"r{i}"]),
        ]
        x = f"r{i}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", WIDTH]) for name in ("x", x)]
    graph = helper.make_graph(nodes, "sized", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("wrong", [0, 3, 7])
def test_sizes_that_agree_say_nothing_of_numbers(wrong: int) -> None:
    verdict = flashonnx.verify(sized(), sized(wrong), bisect=True, dims={"rows": 3})
    assert verdict.parted is not None
    assert verdict.parted.node == f"MatMul 'product{wrong}'"


def test_models_that_agree_have_errors_by_node() -> None:
    original = layers()
    fused, _ = flashonnx.fuse(original)
    verdict = flashonnx.verify(original, fused, bisect=True, dims={"batch": 2, "sequence": 9})
    assert verdict.ok and verdict.parted is None and len(verdict.nodes) == LAYERS
    for node in verdict.nodes:
        assert node.ok and node.node.startswith("FlashAttention")
        assert 0 < node.distribution[0] <= node.distribution[1] <= node.distribution[-1] < 1e-5
        assert node.original_distribution[-1] > 0
    quiet = flashonnx.verify(original, fused, dims={"batch": 2, "sequence": 9})
    assert not quiet.nodes
    assert not flashonnx.verify(original, fused, bisect=None, dims={"batch": 2, "sequence": 9}).nodes


def test_errors_are_those_of_a_computation_by_hand() -> None:
    """The distribution behind the first attention of a wrong model, against NumPy in float64."""
    original = layers()
    fused, _ = flashonnx.fuse(original)
    set_attribute(fused, 0, scale=0.5)
    x = np.random.default_rng(3).standard_normal((1, 7, WIDTH)).astype(np.float32)
    verdict = flashonnx.verify(original, fused, {"x": x}, bisect=True)
    weights = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in original.graph.initializer}
    wide = x.astype(np.float64)
    norm = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    q, k, v = ((norm @ weights[f"w{n}0"]).reshape(1, 7, HEADS, -1).swapaxes(1, 2) for n in "qkv")

    def attention(scale: float) -> Any:
        p = np.exp(q @ k.swapaxes(2, 3) * scale)
        return (p / p.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(1, 7, WIDTH)

    distance = np.abs(attention(0.5) - attention((WIDTH // HEADS) ** -0.5))
    node = verdict.nodes[0]
    assert node is verdict.parted
    np.testing.assert_allclose(node.distribution, np.quantile(distance, (0.5, 0.9, 0.99, 1)), rtol=1e-3)
    np.testing.assert_allclose(node.error.error, distance.max(), rtol=1e-3)


def test_padding_before_the_first_token_does_not_count() -> None:
    """Left padding: rows that see no key are 0 in the one and the mean of V in the other, which is a convention."""
    nodes = [
        helper.make_node("Cast", ["attention_mask"], ["attends"], to=TensorProto.BOOL),
        helper.make_node("Unsqueeze", ["attends", "axes"], ["mask"]),
        helper.make_node("FlashAttention", ["q", "k", "v", "mask"], ["a"], "attention", domain="flashonnx"),
        helper.make_node("Identity", ["a"], ["y"], "last"),
    ]
    for node in nodes[2:3]:
        node.attribute.extend([helper.make_attribute("is_causal", 1)])
    shape = ("batch", 2, "sequence", 8)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "qkv"]
    inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ("batch", "sequence")))
    graph = helper.make_graph(
        nodes,
        "padded",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.array([1, 2]), "axes")],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("flashonnx", 1)]
    zero = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    mean = onnx.ModelProto()
    mean.CopyFrom(zero)
    set_attribute(mean, 0, empty_row="mean")
    random = np.random.default_rng(0)
    feeds: dict[str, Any] = {name: random.standard_normal((1, 2, 6, 8)).astype(np.float32) for name in "qkv"}
    feeds["attention_mask"] = np.array([[0, 0, 1, 1, 1, 1]])
    # The output's first two axes are no (batch, sequence), so there the rows count, as they always did.
    verdict = flashonnx.verify(zero, mean, feeds, bisect=True)
    (node,) = verdict.nodes
    assert node.ok and not verdict.ok
    assert verdict.parted is None and any("no node was found" in note for note in verdict.notes)


def test_outputs_are_matched_by_name() -> None:
    """The two models may list them in another order."""
    original = layers()
    original.graph.output.append(helper.make_tensor_value_info("sum1", TensorProto.FLOAT, ("batch", "sequence", WIDTH)))
    turned = onnx.ModelProto()
    turned.CopyFrom(original)
    turned.graph.output.reverse()
    assert flashonnx.verify(original, turned, dims={"batch": 1, "sequence": 5}).ok
