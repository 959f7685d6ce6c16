"""Graphs as exporters emit them: every site found, the expected ones fused, the answers kept.

The files in tests/zoo were made with torch 2.13 and onnxscript 0.7.2: a_ calls to
scaled_dot_product_attention, b_ nn.MultiheadAttention, c_ hand-written attention, e_ TorchScript's
exporter, f_ others; the suffix is the opset.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from flashonnx.reference import FlashAttention
from models import attributes, fuse_and_check, nodes, random_inputs, run, shape_of
from onnx.reference import ReferenceEvaluator

ZOO = Path(__file__).parent.parent / "zoo"
NAMES = sorted(path.stem for path in ZOO.glob("*.onnx"))
SIZES = ({"b": 2, "s": 7, "l": 4, "t": 5}, {"b": 3, "s": 9, "l": 9, "t": 3}, {"b": 1, "s": 2, "l": 1, "t": 2})

# Left as they are, and the words of the reason.
LEFT = {
    "a_dropout_boolmask_23": "bool",  # the exporter adds a bool mask to floats: the file is invalid
    "e_sdpa_bool_20": "size 2 where the scores have b",  # a mask of fixed shape beside dynamic axes
    "e_sdpa_bool_dead_20": "size 2 where the scores have b",
}
# ONNX Runtime's CPU provider does not run the originals.
UNRUNNABLE = {
    "a_maskkeyonly_23": "a mask of one row",
    "a_nomask_bf16_18": "bfloat16",
    "a_nomask_bf16_23": "bfloat16",
    "f5_onnxops_attention_18": "an operator that the opset does not have",
}
# The fused node's attributes without head counts, and the shape of its mask.
EXPECTED: dict[str, tuple[dict[str, object], list[int | str] | None]] = {
    "a_nomask_18": ({"scale": 0.25}, None),
    "a_causal_18": ({"scale": 0.25, "is_causal": 1}, None),
    "a_causal_LneS_18": ({"scale": 0.25, "is_causal": 1}, None),
    "a_causal_23": ({"is_causal": 1}, None),
    "a_scale_18": ({"scale": 0.3}, None),
    "a_gqa_causal_18": ({"scale": 0.25, "is_causal": 1}, None),
    "a_boolmask_18": ({"scale": 0.25}, ["b", 1, "l", "s"]),
    "a_maskkeyonly_18": ({"scale": 0.25}, ["b", 1, 1, "s"]),
    "a_mask2d_18": ({"scale": 0.25}, ["l", "s"]),
    "b_mha_kpm_18": ({"scale": 0.25, "qkv_layout": b"time_major"}, ["b", 1, 1, "s"]),
    "c_einsum_bqhd_18": ({"scale": 0.25, "empty_row": b"mean", "qkv_layout": b"3hd"}, ["b", 1, "s", "s"]),
    "c_nanogpt_18": ({"scale": 0.25, "is_causal": 1, "qkv_layout": b"3hd"}, None),
    "e_sdpa_20": ({"scale": 0.25}, None),
    "e_sdpa_causal_20": ({"scale": 0.25, "is_causal": 1}, None),
    "f3_predecomposed_23": ({"scale": 0.25, "is_causal": 1}, None),
}


def load(name: str) -> onnx.ModelProto:
    return onnx.load(ZOO / f"{name}.onnx")


def test_the_lists_are_of_files_here() -> None:
    assert {*LEFT, *UNRUNNABLE, *EXPECTED} <= set(NAMES)
    assert len(NAMES) >= 50


@pytest.mark.parametrize("name", sorted(LEFT))
def test_left_alone(name: str) -> None:
    model = load(name)
    result, report = fuse(model)
    assert (report.fused, report.total) == (0, 1)
    assert LEFT[name] in report.sites[0].reason
    assert result is model


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LEFT])
def test_fused(name: str) -> None:
    model = load(name)
    fused, _ = fuse_and_check(model, *(() if name in UNRUNNABLE else SIZES))
    assert not {"Softmax", "Attention"} & {node.op_type for node in fused.graph.node}
    if name in EXPECTED:
        (node,) = nodes(fused)
        wanted, mask = EXPECTED[name]
        found = {key: value for key, value in attributes(node).items() if not key.endswith("num_heads")}
        assert {key: round(x, 6) if isinstance(x, float) else x for key, x in found.items()} == wanted
        assert (shape_of(fused, node.input[3]) if any(node.input[3:4]) else None) == mask


@pytest.mark.parametrize("name", ["a_maskkeyonly_23", "f5_onnxops_attention_18"])
def test_fused_runs_where_the_original_does_not(name: str) -> None:
    fused, _ = fuse(load(name))
    assert all(np.isfinite(output).all() for output in run(fused, random_inputs(fused, SIZES[0])))


@pytest.mark.parametrize("name", [n for n in NAMES if n[:2] in ("a_", "e_") and n not in LEFT])
def test_by_the_definition(name: str) -> None:
    """The original in ONNX's reference implementation, the fused node by the operator's definition."""
    model = load(name)
    fused, _ = fuse(model, portable=False)
    for sizes in SIZES[:2]:
        inputs = random_inputs(model, sizes)
        (expected,) = ReferenceEvaluator(model).run(None, inputs)
        (got,) = ReferenceEvaluator(fused, new_ops=[FlashAttention]).run(None, inputs)
        tolerance = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}[expected.dtype.name]
        np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64), atol=tolerance)


@pytest.mark.parametrize("name", ["a_gqa_18", "a_gqa_23"])
def test_key_heads_stay_few(name: str) -> None:
    (node,) = nodes(fuse(load(name))[0])
    assert list(node.input) == ["q", "k", "v"]


@pytest.mark.parametrize("name", ["a_boolmask_deadrow_18", "a_boolmask_deadrow_23", "a_floatmask_deadrow_23"])
def test_rows_without_keys(name: str) -> None:
    """As exported: below opset 23 the exporter's finite mask gives the mean of V, from 23 on 0."""
    model = load(name)
    fused, _ = fuse(model)
    inputs = random_inputs(model, SIZES[0])
    inputs["mask"][0, 0, 1] = False if inputs["mask"].dtype == bool else -np.inf
    expected, got = run(model, inputs)[0], run(fused, inputs)[0]
    np.testing.assert_allclose(got, expected, atol=2e-5)
    mean = np.repeat(inputs["v"][0].mean(axis=1), 4 // inputs["v"].shape[1], axis=0)
    np.testing.assert_allclose(got[0, :, 1], mean if name.endswith("18") else np.zeros_like(mean), atol=2e-5)
