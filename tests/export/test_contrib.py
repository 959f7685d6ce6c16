"""com.microsoft's MultiHeadAttention and Attention, as ONNX Runtime computes them, and operators that need more."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from contrib import SIZES, Inputs, Shape, fed, model
from flashonnx.export import fuse
from models import attributes, fuse_and_check, has_library, nodes, op_types, run
from onnx import TensorProto, helper

# -- MultiHeadAttention

QKV: Inputs = {"query": ["b", "s", 16], "key": ["b", "t", 16], "value": ["b", "t", 16]}
Y: dict[str, Shape] = {"y": ["b", "s", 16]}
REST = ("bias", "mask", "attention_bias", "past_key", "past_value")


def multi_head(inputs: Inputs | None = None, outputs: dict[str, Shape] | None = None, **given: Any) -> onnx.ModelProto:
    """MultiHeadAttention with `inputs` beside or instead of plain Q, K and V."""
    every: Inputs = {**QKV, **dict.fromkeys(REST), **(inputs or {})}
    return model("MultiHeadAttention", every, outputs or Y, **{"num_heads": 2, **given})


MHA: dict[str, tuple[Inputs, dict[str, Any]]] = {
    "plain": ({}, {}),
    "scale": ({}, {"scale": 0.1}),
    "scale of 0, which is none": ({}, {"scale": 0.0}),
    "V of another size": ({"value": ["b", "t", 24]}, {}),
    "K and V of four dimensions": ({"key": ["b", 2, "t", 8], "value": ["b", 2, "t", 8]}, {}),
    "bias": ({"bias": [48]}, {}),
    "bias, with K and V of four dimensions": (
        {"key": ["b", 2, "t", 8], "value": ["b", 2, "t", 8], "bias": [48]}, {},
    ),
    "mask of keys": ({"mask": ["b", "t"]}, {}),
    "mask of keys, nearly soft": ({"mask": ["b", "t"]}, {"mask_filter_value": -2.0}),
    "mask of queries and keys": ({"mask": ["b", "s", "t"]}, {}),
    "attention_bias of heads": ({"attention_bias": [1, 2, "s", "t"]}, {}),
    "attention_bias of sentences": ({"attention_bias": ["b", 1, "s", "t"]}, {}),
    "attention_bias and mask": ({"attention_bias": ["b", 2, "s", "t"], "mask": ["b", "t"]}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", MHA)
def test_multi_head(name: str) -> None:
    inputs, given = MHA[name]
    outputs = {"y": ["b", "s", 24]} if "another" in name else Y
    fused, report = fuse_and_check(multi_head(inputs, outputs, **given), *SIZES)
    assert not any(node.domain == "com.microsoft" for node in fused.graph.node)
    assert report.sites[0].kind == "com.microsoft::MultiHeadAttention"
    if name == "plain":
        assert op_types(fused) == {"FlashAttention"}
        assert attributes(nodes(fused)[0]) == {"q_num_heads": 2, "kv_num_heads": 2}


def test_no_mask_grows() -> None:
    """A mask of keys is no matrix of queries and keys."""
    _, report = fuse_and_check(multi_head({"mask": ["b", "t"]}), *SIZES)
    assert "attn_mask (b, 1, 1, t)" in report.sites[0].became


def test_values_of_masks() -> None:
    """Above 0 attends, whatever the number; a sentence may be masked as a whole."""
    before = multi_head({"mask": ["b", "t"]})
    after, _ = fuse_and_check(before)
    inputs = fed(before, SIZES[0], mask=np.array([[5, -2, 1, 0, 3, 0, -1], [0] * 7], np.int32))
    np.testing.assert_allclose(run(after, inputs)[0], run(before, inputs)[0], atol=2e-3)
    np.testing.assert_allclose(run(after, inputs)[0][0], run(before, inputs)[0][0], atol=1e-5)


@pytest.mark.parametrize("lengths", [[3, 7], [7, 1], [0, 4]])
def test_lengths(lengths: list[int]) -> None:
    """(batch,), and (3 * batch + 2,) which has more behind them."""
    for shape, mask in ((["b"], lengths), (["3*b + 2"], [*lengths, 0, 7, 14, 0, 7, 14])):
        before = multi_head({"mask": shape})
        inputs = fed(before, SIZES[0] | {"3*b + 2": 8}, mask=np.array(mask, np.int32))
        after, _ = fuse_and_check(before)
        given = list(nodes(after)[0].input)
        assert given[6] and not given[3]  # lengths, and no mask
        # scores of a sentence without keys lose digits to -10000
        np.testing.assert_allclose(run(after, inputs)[0], run(before, inputs)[0], atol=2e-3 if 0 in lengths else 2e-5)


@pytest.mark.parametrize("bias", [-1e4, float(np.finfo(np.float32).min), -np.inf])
def test_lengths_beside_a_bias(bias: float) -> None:
    """Where it hides all keys of a sentence, those behind the length have their share: they stay filled."""
    before = multi_head({"mask": ["b"], "attention_bias": [1, 1, "s", "t"]})
    inputs = fed(before, SIZES[0], mask=np.array([2, 3], np.int32))
    hidden = inputs["attention_bias"]
    hidden[...] = 0
    hidden[..., :3] = bias
    after, _ = fuse_and_check(before)
    np.testing.assert_allclose(run(after, inputs)[0], run(before, inputs)[0], atol=2e-3)


@pytest.mark.parametrize("mask", [[4], [4, 0, 7, 0, 7]])
def test_lengths_of_one_sentence(mask: list[int]) -> None:
    """A batch of one by number: its length has no axis that could be told from one of size one."""
    one: Inputs = {"query": [1, "s", 16], "key": [1, "t", 16], "value": [1, "t", 16], "mask": [len(mask)]}
    before = multi_head(one, {"y": [1, "s", 16]})
    inputs = fed(before, SIZES[0], mask=np.array(mask, np.int32))
    after, _ = fuse_and_check(before)
    np.testing.assert_allclose(run(after, inputs)[0], run(before, inputs)[0], atol=2e-5)


def test_causal() -> None:
    square: Inputs = {"query": ["b", "s", 16], "key": ["b", "s", 16], "value": ["b", "s", 16]}
    fused, _ = fuse_and_check(multi_head(square, unidirectional=1), *SIZES)
    assert attributes(nodes(fused)[0])["is_causal"] == 1
    fuse_and_check(multi_head({**square, "mask": ["b", "s"]}, unidirectional=1), *SIZES[:2])
    _, report = fuse_and_check(multi_head(unidirectional=1), fused=0, total=1)
    assert "disagree" in report.sites[0].reason


@pytest.mark.parametrize("given", [{}, {"unidirectional": 1}])
@pytest.mark.parametrize("mask", [None, ["b", "total"]])
def test_past(given: dict[str, Any], mask: Shape | None) -> None:
    """Past keys come first; the new ones follow them in present_key."""
    state: Shape = ["b", 2, "p", 8]
    inputs: Inputs = {
        "query": ["b", "s", 16], "key": ["b", "s", 16], "value": ["b", "s", 16], "past_key": state,
        "past_value": state, "mask": ["b", "p + s"] if mask else None,
    }  # fmt: skip
    outputs = {**Y, "present_key": ["b", 2, "p + s", 8], "present_value": ["b", 2, "p + s", 8]}
    for sizes in SIZES:
        before = multi_head(inputs, outputs, **given)
        fused, _ = fuse_and_check(before, sizes | {"p + s": sizes["p"] + sizes["s"]})
        assert nodes(fused)


BUFFERS: dict[str, tuple[Inputs, dict[str, Any]]] = {
    "plain": ({}, {}),
    "bias": ({"bias": [48]}, {}),
    "scale, causal": ({}, {"scale": 0.2, "unidirectional": 1}),
    "attention_bias": ({"attention_bias": ["b", 2, "s", "all"]}, {}),
    "mask of keys": ({"mask": ["b", "all"]}, {}),
}


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize("count", [1, 3])
def test_past_in_a_buffer(name: str, count: int) -> None:
    """past_sequence_length of the keys in the buffer count; new ones are written behind them."""
    more, given = BUFFERS[name]
    buffer: Shape = ["b", 2, "m", 8]
    inputs: Inputs = {
        **{n: ["b", "s", 16] for n in ("query", "key", "value")}, **dict.fromkeys(REST), "past_key": buffer,
        "past_value": buffer, "total": [1], **more,
    }  # fmt: skip
    before = multi_head(inputs, {**Y, "present_key": buffer, "present_value": buffer}, **given)
    fused, report = fuse(before)
    assert report.fused == 1, str(report)
    assert nodes(fused)[0].op_type == "FlashAttentionKVCache"
    onnx.checker.check_model(fused, full_check=True)
    for length in (0, 5):
        sizes = {"b": 2, "s": count, "m": 9, "all": length + count}
        given_inputs = fed(before, sizes, total=np.array([length], np.int32))
        if "mask" in given_inputs:
            given_inputs["mask"][:, 0] = 1
        want = run(before, given_inputs)
        for library in (False, True) if has_library() else (False,):
            got = run(fused, given_inputs, library=library)
            np.testing.assert_allclose(got[0], want[0], atol=2e-5)
            for x, y in zip(got[1:], want[1:], strict=True):
                np.testing.assert_allclose(x[:, :, : length + count], y[:, :, : length + count], atol=1e-6)


def test_behind_a_projection() -> None:
    """Q, K and V cut out of one tensor are one tensor still."""
    before = multi_head({name: ["b", "s", 16] for name in ("query", "key", "value")})
    split = helper.make_node("Split", ["x"], ["query", "key", "value"], axis=2, num_outputs=3)
    before.graph.node.insert(0, split)
    del before.graph.input[:]
    before.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "s", 48]))
    fused, _ = fuse_and_check(before, *SIZES)
    assert op_types(fused) == {"FlashAttention"}
    assert attributes(nodes(fused)[0])["qkv_layout"] == b"3hd"


def naive(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, allowed: np.ndarray | None = None, bias: np.ndarray | float = 0.0
) -> np.ndarray:
    """Attention of (b, s, h, d) tensors in float64; (b, s, h * d)."""
    q, k, v = (x.astype(np.float64).swapaxes(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat(group, 1).swapaxes(2, 3) / np.sqrt(q.shape[3]) + bias
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = weights / weights.sum(-1, keepdims=True) @ v.repeat(group, 1)
    return y.swapaxes(1, 2).reshape(y.shape[0], y.shape[2], -1)


def test_packed() -> None:
    """Packed Q, K, V and packed K, V run on CUDA alone: compared with float64."""
    for mask in (None, ["b", "s"]):
        before = multi_head({"query": ["b", "s", 2, 3, 8], "key": None, "value": None, "mask": mask})
        fused, report = fuse(before)
        assert report.fused == 1
        assert attributes(nodes(fused)[0])["qkv_layout"] == b"h3d"
        for sizes in SIZES:
            inputs = fed(before, sizes)
            if mask:
                inputs["mask"][:, 0] = 1
            q, k, v = (inputs["query"][:, :, :, part] for part in range(3))
            allowed = inputs["mask"][:, None, None] > 0 if mask else None
            np.testing.assert_allclose(run(fused, inputs)[0], naive(q, k, v, allowed=allowed), atol=1e-5)
    before = multi_head({"key": ["b", "t", 2, 2, 8], "value": None})
    fused, report = fuse(before)
    assert report.fused == 1
    for sizes in SIZES:
        inputs = fed(before, sizes)
        q = inputs["query"].reshape(sizes["b"], sizes["s"], 2, 8)
        wanted = naive(q, *(inputs["key"][:, :, :, part] for part in range(2)))
        np.testing.assert_allclose(run(fused, inputs)[0], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "outputs", "given", "reason"),
    [
        (
            {},
            {**Y, "present_key": ["b", 2, "t", 8], "present_value": ["b", 2, "t", 8], "qk": ["b", 2, "s", "t"]},
            {},
            "qk",
        ),
        ({"mask": ["n"]}, Y, {}, "which kind of index"),
        ({"mask": ["b", "n"]}, Y, {}, "covers"),
        ({"query": ["b", "s", 2, 3, 8], "key": None, "value": None, "bias": [48]}, Y, {}, "bias"),
        ({"key": None, "value": None}, Y, {}, "'key' is absent"),
        ({}, Y, {"scale": -1.0}, "not positive"),
        ({"past_sequence_length": [1]}, Y, {}, "'past_key' is absent"),
        ({"cache_indirection": ["b", 1, "t"]}, Y, {}, "beams"),
    ],
)
def test_multi_head_left(inputs: Inputs, outputs: dict[str, Shape], given: dict[str, Any], reason: str) -> None:
    """Left alone, to the last bit, with the reason."""
    every = {"past_sequence_length": None, **inputs} if "cache_indirection" in inputs else inputs
    before = multi_head(every, outputs, **given)
    after, report = fuse(before)
    assert after is before
    assert reason in report.sites[0].reason, report.sites[0].reason


# -- Attention


X: Inputs = {"x": ["b", "s", 12], "w": [12, 48], "bias": [48]}
AFTER = ("mask", "past", "attention_bias")


def projecting(inputs: Inputs | None = None, outputs: dict[str, Shape] | None = None, **given: Any) -> onnx.ModelProto:
    every: Inputs = {**X, **dict.fromkeys(AFTER), **(inputs or {})}
    return model("Attention", every, outputs or Y, **{"num_heads": 2, **given})


ATTENTION: dict[str, tuple[Inputs, dict[str, Any]]] = {
    "plain": ({}, {}),
    "no bias": ({"bias": None}, {}),
    "scale": ({}, {"scale": 0.1}),
    "causal": ({}, {"unidirectional": 1}),
    "mask of keys": ({"mask": ["b", "s"]}, {}),
    "mask of keys, causal": ({"mask": ["b", "s"]}, {"unidirectional": 1, "mask_filter_value": -20.0}),
    "mask of queries and keys": ({"mask": ["b", "s", "s"]}, {}),
    "attention_bias": ({"attention_bias": [1, 2, "s", "s"]}, {}),
    "attention_bias and mask": ({"attention_bias": ["b", 2, "s", "s"], "mask": ["b", "s"]}, {}),
    "equal sizes": ({}, {"qkv_hidden_sizes": [16, 16, 16]}),
    "V of another size": ({"w": [12, 56], "bias": [56]}, {"qkv_hidden_sizes": [16, 16, 24]}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_projecting(name: str) -> None:
    """MatMul, Add and a node that takes the projection as it is."""
    inputs, given = ATTENTION[name]
    different = "another" in name
    fused, _ = fuse_and_check(projecting(inputs, {"y": ["b", "s", 24]} if different else Y, **given), *SIZES)
    assert not any(node.domain == "com.microsoft" for node in fused.graph.node)
    assert ("Split" in op_types(fused)) == different
    if not different:
        assert attributes(nodes(fused)[0])["qkv_layout"] == b"3hd"
    if name == "plain":
        assert op_types(fused) == {"FlashAttention", "MatMul"}  # which adds the bias


@pytest.mark.parametrize(
    ("shape", "mask"),
    [
        (["b"], [3, 5]),
        (["b"], [0, 5]),
        (["2*b"], [4, 5, 1, 2]),
        (["2*b"], [5, 2, 0, 1]),
        (["3*b + 2"], [3, 5, 0, 5, 10, 0, 5, 10]),
    ],
)
@pytest.mark.parametrize("opset", [17, 18])
def test_index_of_masks(shape: Shape, mask: list[int], opset: int) -> None:
    """Lengths; ends, then starts; lengths and the places of sentences."""
    before = projecting({"mask": shape}, opset=opset)
    after, _ = fuse_and_check(before)
    inputs = fed(before, SIZES[0] | {"2*b": 4, "3*b + 2": 8}, mask=np.array(mask, np.int32))
    np.testing.assert_allclose(run(after, inputs)[0], run(before, inputs)[0], atol=2e-3 if 0 in mask[:2] else 2e-5)


@pytest.mark.parametrize("given", [{}, {"unidirectional": 1}])
@pytest.mark.parametrize("mask", [None, ["b", "p + s"]])
@pytest.mark.parametrize("present", [True, False])
def test_past_in_one_tensor(given: dict[str, Any], mask: Shape | None, present: bool) -> None:
    """GPT-2 as ONNX Runtime's optimizer makes it: (2, batch, heads, past, size)."""
    outputs = {**Y, **({"present": [2, "b", 2, "p + s", 8]} if present else {})}
    before = projecting({"past": [2, "b", 2, "p", 8], "mask": mask}, outputs, **given)
    if not present:  # ONNX Runtime wants it to be there
        before.graph.node[0].output.append("present")
    for sizes in SIZES:
        fused, _ = fuse_and_check(before, sizes | {"p + s": sizes["p"] + sizes["s"]})
        assert nodes(fused)


def test_present_without_a_past() -> None:
    fuse_and_check(projecting(None, {**Y, "present": [2, "b", 2, "s", 8]}), *SIZES)


def test_mask_of_four_dimensions() -> None:
    """Runs on CUDA alone: compared with float64."""
    before = projecting({"mask": ["b", 1, "s", "s"]})
    fused, report = fuse(before)
    assert report.fused == 1
    inputs = fed(before, SIZES[0])
    inputs["mask"][..., 0] = 1
    packed = inputs["x"].astype(np.float64) @ inputs["w"] + inputs["bias"]
    q, k, v = (part.reshape(2, 5, 2, 8) for part in np.split(packed, 3, -1))
    np.testing.assert_allclose(run(fused, inputs)[0], naive(q, k, v, allowed=inputs["mask"] > 0), atol=1e-4)


def test_masks_are_shared() -> None:
    """Layers that have one mask have one bias."""
    second = projecting({"mask": ["b", "s"]})
    layer = second.graph.node[0]
    wide = helper.make_node("Slice", ["y0", "zero", "twelve", "axis"], ["x1"])
    first = helper.make_node("Attention", ["x", "w", "bias", "mask"], ["y0"], domain="com.microsoft", num_heads=2)
    layer.input[0] = "x1"
    constants = [
        helper.make_node("Constant", [], [name], value_ints=[number])
        for name, number in (("zero", 0), ("twelve", 12), ("axis", 2))
    ]
    del second.graph.node[:]
    second.graph.node.extend([*constants, first, wide, layer])
    fused, _ = fuse_and_check(second, *SIZES, fused=2)
    masks = {node.input[3] for node in nodes(fused)}
    assert len(masks) == 1
    assert [node.op_type for node in fused.graph.node].count("Where") == 1


@pytest.mark.parametrize(
    ("inputs", "given", "reason"),
    [
        ({"mask": ["b", 1, 64, 64]}, {}, "covers"),
        ({}, {"do_rotary": 1}, "do_rotary"),
        ({"past": [2, "b", 2, "m", 8]}, {"past_present_share_buffer": 1}, "in place"),
        ({"x": None}, {}, "input"),
    ],
)
def test_projecting_left(inputs: Inputs, given: dict[str, Any], reason: str) -> None:
    before = projecting(inputs, **given)
    after, report = fuse(before)
    assert after is before
    assert reason in report.sites[0].reason, report.sites[0].reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("PackedAttention", "PackedMultiHeadAttention"),
        ("DecoderMaskedMultiHeadAttention", "an order of its own"),
        ("QAttention", "quantized"),
        ("SparseAttention", "blocks"),
    ],
)
def test_operators_that_need_more(name: str, reason: str) -> None:
    before = model(name, {"q": ["b", "s", 16], "k": ["b", "s", 16], "v": ["b", "s", 16]}, Y, num_heads=2)
    after, report = fuse(before)
    assert after is before
    assert reason in report.sites[0].reason


@pytest.mark.parametrize("kind", [TensorProto.DOUBLE, TensorProto.INT8])
def test_types_without_kernels(kind: int) -> None:
    before = multi_head()
    for value in before.graph.input:
        value.type.tensor_type.elem_type = kind
    after, report = fuse(before)
    assert after is before
    assert "there are kernels for" in report.sites[0].reason
