"""Q, K and V of a FlashAttentionKVCache that lie in one tensor: it is given whole, and nothing is cut."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import attributes, has_library, nodes, run
from onnx import TensorProto, helper, numpy_helper

pytestmark = pytest.mark.skipif(not has_library(), reason="needs the library, for the nodes before they are fused")
HEADS, KV_HEADS, SIZE, VALUE_SIZE = 4, 2, 8, 6
WIDTHS = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * VALUE_SIZE}
WHOLE = sum(WIDTHS.values())
Node = tuple[str, list[str], list[str], dict[str, int]]
_ENDS = np.cumsum([0, *WIDTHS.values()]).tolist()
_SLICES: list[Node] = [
    ("Slice", ["x", f"at{start}", f"at{end}", "last"], [letter], {})
    for letter, start, end in zip("qkv", _ENDS, [*_ENDS[1:-1], 2**62], strict=False)
]
_ENDLESS = [("Slice", ["x", f"at{a}", f"at{b}", "last", "one"], ["qkv"[i]], {}) for i, (a, b) in
            enumerate(zip(_ENDS, [*_ENDS[1:-1], 2**62], strict=False))]  # fmt: skip
_SPLIT: list[Node] = [("Split", ["x", "widths"], ["q", "k", "v"], {"axis": -1})]
CUT: dict[str, list[Node]] = {"split": _SPLIT, "axis 2": [(*_SPLIT[0][:3], {"axis": 2})], "slices": _SLICES,
                              "slices with steps": _ENDLESS}  # fmt: skip
LEFT: dict[str, list[Node]] = {
    "another order": [("Split", ["x", "other widths"], ["v", "q", "k"], {"axis": -1})],
    "two tensors": [*_SPLIT[:0], ("Split", ["x", "widths"], ["q", "k", "unused"], {"axis": -1}),
                    ("Split", ["y", "widths"], ["unused q", "unused k", "v"], {"axis": -1})],
    "something before": [("Split", ["wider", "more widths"], ["rest", "q", "k", "v"], {"axis": -1})],
    "something after": [("Split", ["wider", "widths and more"], ["q", "k", "v", "rest"], {"axis": -1})],
    "changed": [("Split", ["x", "widths"], ["q", "half k", "v"], {"axis": -1}),
                ("Mul", ["half k", "two"], ["k"], {})],
    "every other": [("Slice", ["wide", "at0", "end", "last", "steps"], ["q"], {}), *_SLICES[1:]],
}  # fmt: skip
CONSTANTS = {
    "widths": [*WIDTHS.values()], "other widths": [WIDTHS["v"], WIDTHS["q"], WIDTHS["k"]],
    "more widths": [4, *WIDTHS.values()], "widths and more": [*WIDTHS.values(), 4], "last": [2], "one": [1],
    "steps": [2], "end": [2**62], "two": np.float32(2),
    **{f"at{n}": [n] for n in (*_ENDS, 2**62)},
}  # fmt: skip


def cached(made: list[Node], **more: int) -> onnx.ModelProto:
    inputs = {"x": WHOLE, "y": WHOLE, "wider": WHOLE + 4, "wide": 2 * WIDTHS["q"]}
    used = {name for _, names, _, _ in made for name in names}
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "s", width])
        for name, width in inputs.items()
        if name in used
    ]
    for name, size in (("keys", SIZE), ("values", VALUE_SIZE)):
        infos.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", KV_HEADS, 12, size]))
    infos.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, ["b"]))
    node = helper.make_node(
        "FlashAttentionKVCache", ["q", "k", "v", "keys", "values", "lengths"], ["out", "new keys", "new values"],
        domain="flashonnx", q_num_heads=HEADS, kv_num_heads=KV_HEADS, **more,
    )  # fmt: skip
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
    constants = [numpy_helper.from_array(np.asarray(x), name) for name, x in CONSTANTS.items() if name in used]
    body = [*(helper.make_node(op, names, results, **given) for op, names, results, given in made), node]
    graph = helper.make_graph(body, "g", infos, outputs, constants)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("flashonnx", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    random = np.random.default_rng(1)
    for batch, length in ((2, 5), (1, 1)):
        given = {}
        for value in before.graph.input:
            dims = value.type.tensor_type.shape.dim
            shape = [dim.dim_value or {"b": batch, "s": length}[dim.dim_param] for dim in dims]
            given[value.name] = random.standard_normal(shape).astype(np.float32)
        given["lengths"] = np.array([3, 7][:batch])
        right = run(before, given, library=True)
        for library in (False, True):
            for got, want in zip(run(after, given, library=library), right, strict=True):
                np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("way", CUT)
def test_what_is_cut_out_of_one(way: str) -> None:
    before = cached(CUT[way], is_causal=0)
    after, report = fuse(before)
    (node,) = nodes(after)
    assert attributes(node)["qkv_layout"] == b"gqa" and list(node.input[:4]) == ["x", "", "", "keys"]
    assert Counter(n.op_type for n in after.graph.node) == {"FlashAttentionKVCache": 1}
    assert "qkv_layout" in report.sites[0].became
    same(before, after)


@pytest.mark.parametrize("way", LEFT)
def test_what_is_left(way: str) -> None:
    before = cached(LEFT[way])
    after, _ = fuse(before)
    (node,) = nodes(after)
    assert "qkv_layout" not in attributes(node) and "" not in node.input[:3]
    same(before, after)


def test_heads_in_a_dimension_of_their_own() -> None:
    """Each head's features are cut there, which no layout of the operator is."""
    before = cached([("Split", ["x", "widths"], ["q", "k", "v"], {"axis": 3})])
    for value in before.graph.input:
        if value.name == "x":
            shape = ["b", KV_HEADS, "s", 2 * SIZE + VALUE_SIZE]
            value.CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, shape))
    for tensor in before.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(np.array([SIZE, SIZE, VALUE_SIZE]), "widths"))
    for attribute in before.graph.node[-1].attribute:
        attribute.i = KV_HEADS
    after, _ = fuse(before)
    assert all(attribute.name != "qkv_layout" for attribute in nodes(after)[0].attribute)
    same(before, after)


@pytest.mark.parametrize("biases", ["", "qkv", "kv"])
@pytest.mark.parametrize("join", [True, False])
def test_products_by_weights_side_by_side(join: bool, biases: str) -> None:
    """As for FlashAttention; see test_projections.py. Biases are added before."""
    random = np.random.default_rng(0)
    made: list[Node] = []
    for letter in "qkv":
        product = f"{letter} product" if letter in biases else letter
        made.append(("MatMul", ["x", f"w{letter}"], [product], {}))
        if letter in biases:
            made.append(("Add", [product, f"b{letter}"], [letter], {}))
    before = cached(made)
    # The joined product needs heads of one size.
    for value in before.graph.input:
        if value.name == "values":
            value.type.tensor_type.shape.dim[3].dim_value = SIZE
    for letter in "qkv":
        width = WIDTHS["q" if letter == "q" else "k"]
        weight = random.standard_normal((WHOLE, width)).astype(np.float32) / 8
        before.graph.initializer.append(numpy_helper.from_array(weight, f"w{letter}"))
        if letter in biases:
            before.graph.initializer.append(numpy_helper.from_array(weight[0] * 4, f"b{letter}"))
    after, _ = fuse(before, join_projections=join)
    (node,) = nodes(after)
    assert attributes(node).get("qkv_layout") == (b"gqa" if join else None)
    count = Counter(n.op_type for n in after.graph.node)
    assert (count["MatMul"], count["Add"]) == ((1, bool(biases)) if join else (3, len(biases)))
    same(before, after)
