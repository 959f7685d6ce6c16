"""What bad nodes and bad inputs get from FlashAttentionKVCache and FlashAttentionVarlen in ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flashonnx.reference import Array
from nodes import DOMAIN, open_session, trimmed
from onnx import TensorProto, helper

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("library_path")
CACHE = ("Q", "K", "V", "key_cache", "value_cache", "cache_lengths", "block_table", "cu_seqlens_q", "cos_cache",
         "sin_cache", "position_ids", "attn_mask", "sinks")  # fmt: skip
VARLEN = ("Q", "K", "V", "cu_seqlens_q", "cu_seqlens_k", "sinks")
KINDS = {"cache_lengths": np.int32, "block_table": np.int32, "cu_seqlens_q": np.int32, "cu_seqlens_k": np.int32,
         "position_ids": np.int64, "attn_mask": np.bool_}  # fmt: skip
_VALID = {
    "Q": (2, 3, 32), "K": (2, 3, 16), "V": (2, 3, 12), "key_cache": (2, 2, 24, 8), "value_cache": (2, 2, 24, 6),
    "cache_lengths": (2,),
}  # fmt: skip
_PACKED_CACHE = {"Q": (2, 3, 60), "K": None, "V": None}
_RAGGED = {"Q": (6, 32), "K": (6, 16), "V": (6, 12), "cu_seqlens_q": (3,)}
_PAGED = {"key_cache": (9, 4, 2, 8), "value_cache": (9, 4, 2, 6), "block_table": (2, 6)}
_ROTARY = {"cos_cache": (30, 4), "sin_cache": (30, 4)}
_PACKED = {"Q": (6, 32), "K": (5, 16), "V": (5, 12), "cu_seqlens_q": (3,), "cu_seqlens_k": (3,)}


def _run(
    op: str, names: tuple[str, ...], shapes: dict[str, Any], attributes: dict[str, Any], outputs: list[str]
) -> None:
    inputs: dict[str, Array] = {}
    for name in names:
        shape = shapes.get(name)
        if isinstance(shape, np.ndarray):
            inputs[name] = shape
        elif shape is not None:
            inputs[name] = np.zeros(shape, KINDS.get(name, np.float32))
    given = {n: v for n, v in ({"q_num_heads": 4, "kv_num_heads": 2} | attributes).items() if v is not None}
    node = helper.make_node(op, trimmed([n if n in inputs else "" for n in names]), outputs, domain=DOMAIN, **given)
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), [f"{n}{i}" for i in range(x.ndim)])
        for n, x in inputs.items()
    ]
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs if n]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph([node], "errors", infos, results)
    open_session(helper.make_model(graph, opset_imports=opsets, ir_version=10)).run(None, inputs)


_OUTPUTS = ["Y", "present_key_cache", "present_value_cache"]


@pytest.mark.parametrize("shapes", [{}, _RAGGED, _PAGED, _ROTARY, _PACKED_CACHE],
                         ids=["dense", "ragged", "paged", "rotary", "packed"])  # fmt: skip
def test_the_others_are_valid(shapes: dict[str, Any]) -> None:
    layout = {"qkv_layout": "gqa"} if shapes is _PACKED_CACHE else {}
    _run("FlashAttentionKVCache", CACHE, _VALID | shapes, layout, _OUTPUTS)


def test_varlen_is_valid() -> None:
    _run("FlashAttentionVarlen", VARLEN, _PACKED, {}, ["Y"])


# What is wrong, what else the node has, and what ONNX Runtime must say.
_BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "Q rank": ({"Q": (2, 3)}, {}, "input 'Q' is expected to have 3 or 4 dimensions, got 2"),
    "Q rank, ragged": (_RAGGED | {"Q": (1, 6, 4, 8)}, {}, "input 'Q' is expected to have 2 or 3 dimensions with"),
    "layout": (
        {"K": None, "V": None}, {"qkv_layout": "h3d"},
        "attribute 'qkv_layout' is expected to be \"separate\" or \"gqa\" with a cache, got \"h3d\"",
    ),
    "packed and K": ({}, {"qkv_layout": "gqa"}, "input 'K' is expected to be absent with qkv_layout \"gqa\""),
    "packed width": (
        _PACKED_CACHE | {"Q": (2, 3, 62)}, {"qkv_layout": "gqa"},
        "input 'Q' is expected to have last dimension 60, got 62",
    ),
    "packed rank": (
        _PACKED_CACHE | {"Q": (2, 4, 3, 8)}, {"qkv_layout": "gqa"},
        "input 'Q' is expected to have 3 dimensions with qkv_layout \"gqa\", got 4",
    ),
    "packed heads": (
        _PACKED_CACHE, {"qkv_layout": "gqa", "q_num_heads": None},
        "attribute 'q_num_heads' is expected with qkv_layout \"gqa\", got none",
    ),
    "K rank": ({"K": (2, 2, 3, 8)}, {}, "input 'K' is expected to have 3 dimensions like 'Q', got 4"),
    "K alone": ({"V": None}, {}, "inputs 'K' and 'V' are expected together, got only 'K'"),
    "K length": ({"K": (2, 4, 16)}, {}, "input 'K' is expected to have sequence length 3, got 4"),
    "K batch": ({"K": (1, 3, 16)}, {}, "input 'K' is expected to have batch size 2, got 1"),
    "K size": ({"K": (2, 3, 18)}, {}, "input 'K' is expected to have head size 8, got 9"),
    "V width": ({"V": (2, 3, 13)}, {}, "'V' is expected to have a last dimension that is a positive multiple of 2"),
    "Q size": ({"Q": (2, 3, 36)}, {}, "input 'Q' is expected to have head size 8, got 9"),
    "Q heads": ({}, {"q_num_heads": 3}, "'Q' is expected to have a last dimension that is a positive multiple of 3"),
    "group": ({"Q": (2, 3, 24)}, {"q_num_heads": 3}, "'q_heads' is expected to be a multiple of 'kv_heads' (2), got 3"),
    "kv heads": ({}, {"kv_num_heads": 4}, "attribute 'kv_num_heads' is expected to be 2 as in the shapes, got 4"),
    "cache rank": ({"key_cache": (2, 24, 16)}, {}, "input 'key_cache' is expected to have 4 dimensions, got 3"),
    "cache batch": (
        {"key_cache": (3, 2, 24, 8), "value_cache": (3, 2, 24, 6)}, {},
        "'key_cache' is expected to have batch size 2, got 3",
    ),
    "caches": ({"value_cache": (2, 2, 25, 6)}, {}, "input 'value_cache' is expected to have capacity 24, got 25"),
    "pages": (_PAGED | {"value_cache": (9, 5, 2, 6)}, {}, "'value_cache' is expected to have page size 4, got 5"),
    "table rank": (_PAGED | {"block_table": (12,)}, {}, "input 'block_table' is expected to have 2 dimensions, got 1"),
    "table batch": (_PAGED | {"block_table": (3, 6)}, {}, "'block_table' is expected to have batch size 2, got 3"),
    "lengths": ({"cache_lengths": (3,)}, {}, "input 'cache_lengths' is expected to have batch size 2, got 3"),
    "lengths rank": ({"cache_lengths": (2, 2)}, {}, "input 'cache_lengths' is expected to have 1 dimension, got 2"),
    "lengths type": (
        {"cache_lengths": np.zeros(2, np.float32)}, {},
        "input 'cache_lengths' is expected to be int32 or int64, got another",
    ),
    "sequences": (_RAGGED | {"cu_seqlens_q": (0,)}, {}, "'cu_seqlens_q' is expected to have at least 1 element, got 0"),
    "ragged mask": (_RAGGED | {"attn_mask": (24,)}, {}, "'attn_mask' is expected to be absent with 'cu_seqlens_q'"),
    "mask": ({"attn_mask": (3, 25)}, {}, "'attn_mask' is expected to have a last dimension of at most 24"),
    "mask type": (
        {"attn_mask": np.zeros(24, np.int64)}, {},
        "'attn_mask' is expected to be bool, float32 or of Q's type",
    ),
    "cos alone": (
        {"cos_cache": (30, 4)}, {},
        "inputs 'cos_cache' and 'sin_cache' are expected together, got only 'cos_cache'",
    ),
    "cos type": (
        _ROTARY | {"cos_cache": np.zeros((30, 4), np.float16)},
        {},
        "input 'cos_cache' is expected to be float32 or of Q's",
    ),
    "sin width": (_ROTARY | {"sin_cache": (30, 3)}, {}, "input 'sin_cache' is expected to have width 4, got 3"),
    "sin rows": (_ROTARY | {"sin_cache": (29, 4)}, {}, "input 'sin_cache' is expected to have positions 30, got 29"),
    "rotary_dim": (_ROTARY, {"rotary_dim": 10}, "'cos_cache' is expected to have a width of at least 5"),
    "wide tables": (
        {"cos_cache": (30, 5), "sin_cache": (30, 5)}, {},
        "'rotary_dim' is expected to be even and between",
    ),
    "rotary_dim alone": ({}, {"rotary_dim": 4}, "'rotary_dim' is expected to be 0 without 'cos_cache', got 4"),
    "odd rotary_dim": (
        _ROTARY, {"rotary_dim": 5},
        "'rotary_dim' is expected to be 0 (by the tables' width)",
    ),
    "interleaved": (_ROTARY, {"rotary_interleaved": 2}, "'rotary_interleaved' is expected to be 0 or 1, got 2"),
    "positions alone": ({"position_ids": (2, 3)}, {}, "'position_ids' is expected to be absent without 'cos_cache'"),
    "positions": (
        _ROTARY | {"position_ids": (2, 4)}, {},
        "'position_ids' is expected to have sequence length 3, got 4",
    ),
    "ragged positions": (
        _ROTARY | _RAGGED | {"position_ids": (5,)}, {}, "'position_ids' is expected to have tokens 6, got 5"
    ),
    "fixed_split": ({}, {"fixed_split": 3}, "'fixed_split' is expected to be 0 or 1, got 3"),
    "max_q_length": ({}, {"max_q_length": -1}, "'max_q_length' is expected to be 0 (unknown) or positive, got -1"),
    "sinks": ({"sinks": (3,)}, {}, "input 'sinks' is expected to have query heads 4, got 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", _BAD)
def test_bad_cache_node(name: str) -> None:
    shapes, attributes, message = _BAD[name]
    with pytest.raises(Exception) as caught:
        _run("FlashAttentionKVCache", CACHE, _VALID | shapes, attributes, _OUTPUTS)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("outputs", "got"),
    [(["Y"], "none"), (["Y", "present_key_cache"], "only 'present_key_cache'"),
     (["Y", "", "present_value_cache"], "only 'present_value_cache'")],
)  # fmt: skip
def test_what_is_appended_goes_somewhere(outputs: list[str], got: str) -> None:
    with pytest.raises(
        Exception, match=f"'present_key_cache' and 'present_value_cache' are expected with 'K', got {got}"
    ):
        _run("FlashAttentionKVCache", CACHE, _VALID, {}, outputs)
    _run("FlashAttentionKVCache", CACHE, _VALID | {"K": None, "V": None}, {}, ["Y"])


_BAD_VARLEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "Q rank": ({"Q": (1, 6, 4, 8)}, {}, "input 'Q' is expected to have 2 or 3 dimensions with 'cu_seqlens_q', got 4"),
    "K rank": ({"K": (5, 2, 8)}, {}, "input 'K' is expected to have 2 dimensions like 'Q', got 3"),
    "K size": ({"K": (5, 18)}, {}, "input 'K' is expected to have head size 8, got 9"),
    "V tokens": ({"V": (6, 12)}, {}, "input 'V' is expected to have tokens 5, got 6"),
    "sequences": (
        {"cu_seqlens_k": (4,)}, {},
        "'cu_seqlens_k' is expected to have length (that of 'cu_seqlens_q') 3, got 4",
    ),
    "no heads": ({}, {"kv_num_heads": 0}, "attribute 'kv_num_heads' is expected to be at least 1, got 0"),
    "max_kv_length": ({}, {"max_kv_length": -2}, "'max_kv_length' is expected to be 0 (unknown) or positive, got -2"),
}  # fmt: skip


@pytest.mark.parametrize("name", _BAD_VARLEN)
def test_bad_varlen_node(name: str) -> None:
    shapes, attributes, message = _BAD_VARLEN[name]
    with pytest.raises(Exception) as caught:
        _run("FlashAttentionVarlen", VARLEN, _PACKED | shapes, attributes, ["Y"])
    assert message in str(caught.value)
