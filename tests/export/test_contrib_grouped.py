"""com.microsoft's GroupQueryAttention without a cache, as ONNX Runtime computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from contrib import SIZES, Inputs, Shape, fed, model
from flashonnx.export import fuse
from models import attributes, fuse_and_check, nodes, op_types, run
from onnx import TensorProto

# -- GroupQueryAttention


GROUPED: Inputs = {
    "query": ["b", "s", 64], "key": ["b", "s", 32], "value": ["b", "s", 32], "past_key": None, "past_value": None,
    "lengths": ["b"], "total": [],
}  # fmt: skip
MORE = ("cos", "sin", "position_ids", "attention_bias", "sink")
STATES: dict[str, Shape] = {"present_key": ["b", 2, "s", 16], "present_value": ["b", 2, "s", 16]}


def grouped(inputs: Inputs | None = None, outputs: dict[str, Shape] | None = None, **given: Any) -> onnx.ModelProto:
    every: Inputs = {**GROUPED, **dict.fromkeys(MORE), **(inputs or {})}
    heads = {"num_heads": 4, "kv_num_heads": 2}
    return model("GroupQueryAttention", every, outputs or {"y": ["b", "s", 64]}, **{**heads, **given})


def angles(sizes: dict[str, int], half: int = 8) -> dict[str, np.ndarray]:
    turns = np.arange(sizes["m"])[:, None] * 100.0 ** -np.linspace(0, 1, half)
    return {"cos": np.cos(turns).astype(np.float32), "sin": np.sin(turns).astype(np.float32)}


def check_grouped(before: onnx.ModelProto, *, half: int = 8, rows: bool = True) -> onnx.ModelProto:
    """The same answers for full and for ragged sentences, those of the padding's queries included."""
    fused, _ = fuse_and_check(before)
    for number, sizes in enumerate(SIZES):
        named = sizes | {"m": 32}
        random = np.random.default_rng(number)
        for lengths in (np.full(sizes["b"], sizes["s"]), random.integers(1, sizes["s"] + 1, sizes["b"])):
            inputs = fed(before, named, number, lengths=lengths.astype(np.int32) - 1, total=np.int32(sizes["s"]))
            inputs |= {name: value for name, value in angles(named, half).items() if name in inputs}
            for want, got in zip(run(before, inputs), run(fused, inputs), strict=True):
                np.testing.assert_allclose(got, want, atol=2e-5)
    return fused


GQA: dict[str, tuple[Inputs, dict[str, Any]]] = {
    "plain": ({}, {}),
    "scale": ({}, {"scale": 0.1}),
    "softcap": ({}, {"softcap": 1.5}),
    "not causal": ({}, {"causal": 0}),
    "sink": ({"sink": [4]}, {}),
    "smooth": ({}, {"smooth_softmax": 1}),
    "sink and softcap": ({"sink": [4]}, {"softcap": 1.5}),
    "bias of heads": ({"attention_bias": [1, 4, "s", "s"]}, {}),
    "bias of sentences, softcap": ({"attention_bias": ["b", 1, "s", "s"]}, {"softcap": 1.5}),
    "bias, not causal": ({"attention_bias": ["b", 1, "s", "s"]}, {"causal": 0}),
    "packed": ({"query": ["b", "s", 128], "key": None, "value": None}, {}),
    "packed, as many heads": ({"query": ["b", "s", 192], "key": None, "value": None}, {"kv_num_heads": 4}),
    "rotary": ({"cos": ["m", 8], "sin": ["m", 8]}, {"do_rotary": 1}),
    "rotary, interleaved": ({"cos": ["m", 8], "sin": ["m", 8]}, {"do_rotary": 1, "rotary_interleaved": 1}),
    "rotary, packed": (
        {"query": ["b", "s", 128], "key": None, "value": None, "cos": ["m", 8], "sin": ["m", 8]}, {"do_rotary": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("shortest", [6, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_lengths_that_are_known(shortest: int, biased: bool) -> None:
    """Where they say that nothing is padding there is no mask of it."""
    fixed: Inputs = {"query": [2, 6, 64], "key": [2, 6, 32], "value": [2, 6, 32], "lengths": [2]}
    before = grouped(fixed | ({"attention_bias": [2, 1, 6, 6]} if biased else {}), {"y": [2, 6, 64]})
    lengths = np.array([6, shortest], np.int32) - 1
    (place,) = (i for i, value in enumerate(before.graph.input) if value.name == "lengths")
    del before.graph.input[place]
    before.graph.initializer.append(onnx.numpy_helper.from_array(lengths, "lengths"))
    fused, _ = fuse_and_check(before)
    (node,) = nodes(fused)
    mask = node.input[3] if len(node.input) > 3 else ""
    assert mask == {(6, False): "", (6, True): "attention_bias"}.get((shortest, biased), mask)
    assert mask or shortest == 6
    inputs = fed(before, {}, 0, total=np.int32(6))
    np.testing.assert_allclose(run(fused, inputs)[0], run(before, inputs)[0], atol=2e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("more", [{}, {"rotary_interleaved": 1}, {"softcap": 1.5}, {"num_heads": 2, "kv_num_heads": 1}])
def test_rotation_of_a_prompt_without_padding(packed: bool, more: dict[str, Any]) -> None:
    """The cache's operator turns Q and K: no RotaryEmbedding is left; present keys are the turned ones.

    With two heads half of each is turned.
    """
    tables: Inputs = {"cos": [8, 8], "sin": [8, 8], "lengths": [2], "attention_bias": [2, 1, 6, 6]}
    tensors: Inputs = {"query": [2, 6, 64], "key": [2, 6, 32], "value": [2, 6, 32]}
    if packed:
        tensors = {"query": [2, 6, 128], "key": None, "value": None}
    heads = more.get("kv_num_heads", 2)
    states: dict[str, Shape] = {name: [2, heads, 6, 32 // heads] for name in STATES}
    for outputs in ({"y": [2, 6, 64]}, {"y": [2, 6, 64], **states}):
        before = grouped(tensors | tables, outputs, do_rotary=1, **more)
        (place,) = (i for i, value in enumerate(before.graph.input) if value.name == "lengths")
        del before.graph.input[place]
        before.graph.initializer.append(onnx.numpy_helper.from_array(np.full(2, 5, np.int32), "lengths"))
        fused, _ = fuse_and_check(before)
        assert "FlashAttentionKVCache" in op_types(fused) and op_types(fused).isdisjoint({"RotaryEmbedding", "Split"})
        inputs = fed(before, {}, 0, total=np.int32(6)) | angles({"m": 8})
        for want, got in zip(run(before, inputs), run(fused, inputs), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("name", GQA)
def test_grouped(name: str) -> None:
    inputs, given = GQA[name]
    fused = check_grouped(grouped(inputs, **given))
    (node,) = nodes(fused)
    assert ({"RotaryEmbedding"} <= op_types(fused)) == ("rotary" in name)
    if name in ("packed", "packed, as many heads"):
        assert attributes(node)["qkv_layout"] == (b"gqa" if name == "packed" else b"3hd")
        assert "Split" not in op_types(fused)
    if name == "not causal":
        assert node.input[6] and not node.input[3]  # lengths, and no mask


def test_grouped_part_of_the_head_turns() -> None:
    inputs: Inputs = {"query": ["b", "s", 128], "key": ["b", "s", 64], "value": ["b", "s", 64]}
    before = grouped(
        {**inputs, "cos": ["m", 8], "sin": ["m", 8]}, {"y": ["b", "s", 128]}, do_rotary=1, rotary_interleaved=0
    )
    check_grouped(before)


def test_grouped_present() -> None:
    """The present keys are the new ones, turned."""
    outputs = {"y": ["b", "s", 64], **STATES}
    check_grouped(grouped(None, outputs))
    check_grouped(grouped({"cos": ["m", 8], "sin": ["m", 8]}, outputs, do_rotary=1))


def test_grouped_positions() -> None:
    """All places shifted alike, as a prompt's are, change nothing; present keys would show them."""
    inputs: Inputs = {"cos": ["m", 8], "sin": ["m", 8], "position_ids": ["b", "s"]}
    before = grouped(inputs, do_rotary=1)
    position = next(value for value in before.graph.input if value.name == "position_ids")
    position.type.tensor_type.elem_type = TensorProto.INT64
    fused, _ = fuse_and_check(before)
    sizes = SIZES[0] | {"m": 32}
    places = np.arange(5)[None] + np.array([[4], [4]])
    full = np.full(2, 4, np.int32)
    given = fed(before, sizes, position_ids=places, lengths=full, total=np.int32(5), **angles(sizes))
    np.testing.assert_allclose(run(fused, given)[0], run(before, given)[0], atol=2e-5)
    with_states = grouped(inputs, {"y": ["b", "s", 64], **STATES}, do_rotary=1)
    _, report = fuse(with_states)
    assert "position_ids" in report.sites[0].reason


PAST: Shape = ["b", 2, "p", 16]


@pytest.mark.parametrize(
    ("inputs", "given", "reason"),
    [
        ({"past_key": PAST, "past_value": PAST}, {"sliding_window_cache": 1, "local_window_size": 4}, "last window"),
        ({}, {"local_window_size": 4}, "local_window_size"),
        ({"value": None}, {}, "together"),
        ({}, {"do_rotary": 1}, "cos_cache"),
        ({}, {"scale": -0.5}, "not positive"),
    ],
)
def test_grouped_left(inputs: Inputs, given: dict[str, Any], reason: str) -> None:
    before = grouped(inputs, **given)
    after, report = fuse(before)
    assert after is before
    assert reason in report.sites[0].reason, report.sites[0].reason
