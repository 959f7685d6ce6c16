"""com.microsoft's GroupQueryAttention with a cache: the same tokens and present keys as ONNX Runtime's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse, unfuse
from models import attributes, has_library, nodes, run
from onnx import TensorProto, helper

Q_HEADS, KV_HEADS, SIZE, CAPACITY = 4, 2, 16, 24
_INTS = {"seqlens_k": TensorProto.INT32, "total": TensorProto.INT32, "position_ids": TensorProto.INT64}


def grouped(
    *, packed: bool = False, rotary: int = 0, present: str = "capacity", kind: int = TensorProto.FLOAT,
    more: dict[str, list[int | str]] | None = None, opset: int = 20, size: int = SIZE, **given: Any,
) -> onnx.ModelProto:  # fmt: skip
    """One operator. `present`: what the length of present keys is called; past ones are "capacity" long."""
    width, kv_width = Q_HEADS * size, KV_HEADS * size
    shapes: dict[str, Any] = {
        "query": ["b", "s", width + 2 * kv_width if packed else width],
        "key": None if packed else ["b", "s", kv_width],
        "value": None if packed else ["b", "s", kv_width],
        "past_key": ["b", KV_HEADS, "capacity", size],
        "past_value": ["b", KV_HEADS, "capacity", size],
        "seqlens_k": ["b"],
        "total": [],
        "cos": ["positions", rotary] if rotary else None,
        "sin": ["positions", rotary] if rotary else None,
        "position_ids": None,
        "attention_bias": None,
        "head_sink": None,
        **(more or {}),
    }
    outputs = {"y": ["b", "s", width]}
    outputs |= {name: ["b", KV_HEADS, present, size] for name in ("present_key", "present_value")}
    names = [name if shape is not None else "" for name, shape in shapes.items()]
    node = helper.make_node(
        "GroupQueryAttention", names, list(outputs), "attention", domain="com.microsoft", num_heads=Q_HEADS,
        kv_num_heads=KV_HEADS, do_rotary=int(bool(rotary)), **given,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, _INTS.get(n, kind), x) for n, x in shapes.items() if x is not None],
        [helper.make_tensor_value_info(n, kind, x) for n, x in outputs.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


# Tokens that each of two sentences has before, new ones, and whether the first prompt is padded behind the shorter.
STEPS = {
    "first prompt": ([0, 0], 7),
    "one token": ([5, 5], 1),
    "one token, uneven": ([3, 11], 1),
    "chunk": ([9], 5),  # ONNX Runtime wants one sentence then
    "first token": ([0, 0], 1),
    "to the end": ([CAPACITY - 1, 6], 1),
}


def fed(model: onnx.ModelProto, before: list[int], new: int, past: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    total = max(before) + new
    sizes = {"b": len(before), "s": new, "capacity": past, "positions": 40, "total": total}
    given = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [dim.dim_value or sizes[dim.dim_param] for dim in tensor.shape.dim]
        kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        given[value.name] = random.standard_normal(shape).astype(kind)
    given |= {"seqlens_k": np.array(before, np.int32) + new - 1, "total": np.array(total, np.int32)}
    return given


def check(
    model: onnx.ModelProto, before: list[int], new: int, past: int = CAPACITY, *, short: int = 0, **options: Any
) -> onnx.ModelProto:
    """The same for every token and every slot that count; `short`: padding behind the last sentence's first prompt."""
    fused, report = fuse(model, **options)
    assert report.fused == 1, str(report)
    onnx.checker.check_model(fused, full_check=True)
    inputs = fed(model, before, new, past)
    inputs["seqlens_k"][-1] -= short
    total = int(inputs["total"])
    inputs["past_key"] *= 1 if past else 0
    expected = run(model, inputs)
    half = inputs["query"].dtype == np.float16
    for library in (False, True) if has_library() else (False,):
        got = run(fused, inputs, library=library)
        assert [x.shape for x in got] == [x.shape for x in expected]
        for b in range(len(before)):
            rows = new - (short if b == len(before) - 1 else 0)
            np.testing.assert_allclose(got[0][b, :rows], expected[0][b, :rows], atol=4e-3 if half else 2e-5)
            slots = inputs["seqlens_k"][b] + 1
            for x, want in zip(got[1:], expected[1:], strict=True):
                np.testing.assert_allclose(x[b, :, :slots], want[b, :, :slots], atol=2e-3 if half else 2e-6)
    assert total <= got[1].shape[2]
    return fused


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("present", ["capacity", "total"])
def test_steps(step: str, present: str) -> None:
    """In one buffer, and in two that may be one: the caches grow to what is asked for."""
    fused = check(grouped(present=present), *STEPS[step])
    (node,) = nodes(fused)
    assert node.op_type == "FlashAttentionKVCache"
    assert (list(node.input[3:5]) == ["past_key", "past_value"]) == (present == "capacity")


@pytest.mark.parametrize(("before", "past"), [([0, 0], 0), ([5, 5], 5), ([3, 5], 5), ([4], 9)])
@pytest.mark.parametrize("new", [1, 4])
def test_two_buffers(before: list[int], past: int, new: int) -> None:
    """Present keys are as many as there are then; a cache that does not begin with any is one of length 0."""
    before = before if new == 1 or not past else before[-1:]
    check(grouped(present="total", rotary=SIZE // 2), before, new, past)


def test_a_promise_of_one_buffer() -> None:
    model = grouped(present="total")
    fused = check(model, [3, 11], 1, shared_cache=True)
    assert list(nodes(fused)[0].input[3:5]) == ["past_key", "past_value"]
    assert "copied" in fuse(model)[1].sites[0].reason
    assert "copied" not in fuse(model, shared_cache=True)[1].sites[0].reason


MORE: dict[str, dict[str, Any]] = {
    "rotary": {"rotary": SIZE // 2},
    "rotary, interleaved": {"rotary": SIZE // 2, "rotary_interleaved": 1},
    "packed": {"packed": True},
    "packed, rotary": {"packed": True, "rotary": SIZE // 2},
    "window": {"local_window_size": 4},
    "window of one": {"local_window_size": 1},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.1},
    "sink": {"more": {"head_sink": [Q_HEADS]}},
    "smooth": {"smooth_softmax": 1},
    "not causal": {"causal": 0},
    "bias": {"more": {"attention_bias": ["b", Q_HEADS, "s", "total"]}},
    "bias for all": {"more": {"attention_bias": [1, 1, "s", "total"]}},
    "bias, not causal": {"causal": 0, "more": {"attention_bias": ["b", 1, "s", "total"]}},
    "packed, all": {"packed": True, "rotary": SIZE // 2, "rotary_interleaved": 1, "local_window_size": 3, "scale": 0.2,
                    "softcap": 1.5, "more": {"head_sink": [Q_HEADS]}},
    "packed, bias, smooth": {"packed": True, "smooth_softmax": 1,
                             "more": {"attention_bias": [1, Q_HEADS, "s", "total"]}},
    "half, packed": {"kind": TensorProto.FLOAT16, "packed": True, "local_window_size": 4},
    "half": {"kind": TensorProto.FLOAT16, "rotary": SIZE // 2},
    "older opset": {"opset": 16, "rotary": SIZE // 2, "local_window_size": 5},
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("step", ["first prompt", "one token, uneven", "chunk"])
def test_options(name: str, step: str) -> None:
    fused = check(grouped(**MORE[name]), *STEPS[step])
    (node,) = (node for node in fused.graph.node if node.op_type == "FlashAttentionKVCache")
    packed = "packed" in MORE[name]
    assert attributes(node).get("qkv_layout") == (b"gqa" if packed else None)
    assert not packed or all(node.op_type != "Split" for node in fused.graph.node)
    check(grouped(**{"present": "total", **MORE[name]}), *STEPS[step])


def test_part_of_the_head_turns() -> None:
    """ONNX Runtime wants rotary_dim in steps of 16."""
    check(grouped(rotary=8, size=32), [11], 4)


@pytest.mark.parametrize("short", [1, 4, 6])
@pytest.mark.parametrize("options", [{}, {"rotary": SIZE // 2}, {"local_window_size": 3}, {"causal": 0}])
def test_first_prompt_with_padding(short: int, options: dict[str, Any]) -> None:
    """What comes next overwrites the padding's keys."""
    model = grouped(**options)
    check(model, [0, 0], 7, short=short)
    fused, _ = fuse(model)
    inputs = fed(model, [0, 0], 7, CAPACITY)
    inputs["seqlens_k"][-1] -= short
    states = [run(m, inputs) for m in (model, fused)]
    after = fed(model, [7, 7 - short], 1, CAPACITY, seed=1)
    got = []
    for m, state in zip((model, fused), states, strict=True):
        got.append(run(m, after | {"past_key": state[1], "past_value": state[2]}))
    np.testing.assert_allclose(got[1][0], got[0][0], atol=2e-5)


def test_lengths_are_made_once() -> None:
    """For two layers alike."""
    model = grouped()
    second = onnx.NodeProto()
    second.CopyFrom(model.graph.node[0])
    second.name, second.output[:] = "second", ["y2", "present_key2", "present_value2"]
    model.graph.node.append(second)
    for output in list(model.graph.output):
        other = model.graph.output.add()
        other.CopyFrom(output)
        other.name += "2"
    fused, report = fuse(model)
    assert report.fused == 2
    assert sum(node.op_type == "Max" for node in fused.graph.node) == 1
    assert len({node.input[5] for node in nodes(fused)}) == 1


def test_back_to_standard_operators() -> None:
    model = grouped(rotary=SIZE // 2, present="total")
    fused, _ = fuse(model)
    back, report = unfuse(fused)
    assert report.fused == 0 and not nodes(back)
    inputs = fed(model, [3, 11], 1, CAPACITY)
    for x, want in zip(run(back, inputs), run(fused, inputs), strict=True):
        np.testing.assert_allclose(x, want, atol=1e-6)


def test_fused_again() -> None:
    fused, _ = fuse(grouped())
    again, report = fuse(fused)
    assert report.fused == report.total == 1
    assert attributes(nodes(again)[0]) == attributes(nodes(fused)[0])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"more": {"query_seqlens": None}}, ""),
        ({"rotary": 8, "more": {"position_ids": ["b", "s"]}}, "position_ids"),
        ({"more": {"key": ["b", "t", KV_HEADS * SIZE], "value": ["b", "t", KV_HEADS * SIZE]}}, "as many new keys"),
        ({"sliding_window_cache": 1, "local_window_size": 4}, "last window"),
        ({"local_window_size": 0}, "sees nothing"),
    ],
)
def test_what_is_left(given: dict[str, Any], words: str) -> None:
    model = grouped(**given)
    after, report = fuse(model)
    assert (report.fused == 0) == bool(words)
    assert words in report.sites[0].reason
    assert (after is model) == bool(words)
