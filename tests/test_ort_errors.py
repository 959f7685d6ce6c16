"""What bad nodes and bad inputs get from the custom op: a code, and a sentence that says what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import numpy as np
import pytest
from cases import Case
from flashonnx.reference import Array
from nodes import one_node, open_session, run
from seam import check_outputs

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("library_path")
INVALID = "InvalidArgument"
_BY_ID = {case.id: case for case in cases.ALL}


def _inputs(**shapes: tuple[int, ...] | None) -> dict[str, Array]:
    """Zeros by input name; a valid problem of heads 4 and 2, head size 8, but for what is given."""
    valid: dict[str, tuple[int, ...] | None] = {"Q": (2, 5, 32), "K": (2, 7, 16), "V": (2, 7, 16)}
    kinds = {"nonpad_kv_seqlen": np.int64, "attn_mask": np.bool_}
    return {n: np.zeros(s, kinds.get(n, np.float32)) for n, s in (valid | shapes).items() if s is not None}


_CASE = Case("errors", heads=(4, 2), head_dim=8, lse=False)
# What is wrong, what else the node has, and what ONNX Runtime must say.
_BAD_INPUTS: dict[str, tuple[dict[str, Array], dict[str, Any], str]] = {
    "Q rank": (_inputs(Q=(2, 5)), {}, "input 'Q' is expected to have 3 or 4 dimensions, got 2"),
    "K rank": (_inputs(K=(2, 7, 2, 8)), {}, "input 'K' is expected to have 3 dimensions like 'Q', got 4"),
    "V rank": (_inputs(V=(2, 7)), {}, "input 'V' is expected to have 3 dimensions like 'Q', got 2"),
    "K batch": (_inputs(K=(3, 7, 16)), {}, "input 'K' is expected to have batch size 2, got 3"),
    "V batch": (_inputs(V=(1, 7, 16)), {}, "input 'V' is expected to have batch size 2, got 1"),
    "V length": (_inputs(V=(2, 6, 16)), {}, "input 'V' is expected to have sequence length 7, got 6"),
    "K width": (_inputs(K=(2, 7, 24)), {}, "input 'K' is expected to have last dimension 16, got 24"),
    "Q width": (
        _inputs(Q=(2, 5, 34)),
        {},
        "input 'Q' is expected to have a last dimension that is a positive multiple of 4",
    ),
    "V width": (
        _inputs(V=(2, 7, 17)),
        {},
        "input 'V' is expected to have a last dimension that is a positive multiple of 2",
    ),
    "no K": (_inputs(K=None), {}, "input 'K' is expected with qkv_layout"),
    "no heads": (_inputs(), {"q_num_heads": None}, "attribute 'q_num_heads' is expected with 3-dimensional inputs"),
    "no kv heads": (
        _inputs(),
        {"kv_num_heads": None},
        "attribute 'kv_num_heads' is expected with 3-dimensional inputs",
    ),
    "group": (
        _inputs(K=(2, 7, 24), V=(2, 7, 24)),
        {"kv_num_heads": 3},
        "'q_heads' is expected to be a multiple of 'kv_heads' (3), got 4",
    ),
    "4-D heads": (
        _inputs(Q=(2, 4, 5, 8), K=(2, 2, 7, 8), V=(2, 2, 7, 8)),
        {"q_num_heads": 3},
        "'q_num_heads' is expected to be 4",
    ),
    "4-D K size": (
        _inputs(Q=(2, 4, 5, 8), K=(2, 2, 7, 9), V=(2, 2, 7, 8)),
        {},
        "input 'K' is expected to have head size 8, got 9",
    ),
    "4-D V heads": (
        _inputs(Q=(2, 4, 5, 8), K=(2, 2, 7, 8), V=(2, 1, 7, 8)),
        {},
        "input 'V' is expected to have heads 2, got 1",
    ),
    "mask rank": (
        _inputs(attn_mask=(1, 2, 4, 5, 7)),
        {},
        "input 'attn_mask' is expected to have 1 to 4 dimensions, got 5",
    ),
    "mask keys": (
        _inputs(attn_mask=(5, 8)),
        {},
        "input 'attn_mask' is expected to have a last dimension of at most 7 (the keys), got 8",
    ),
    "mask queries": (
        _inputs(attn_mask=(4, 7)),
        {},
        "input 'attn_mask' is expected to have query length (or 1) 5, got 4",
    ),
    "mask heads": (_inputs(attn_mask=(2, 5, 7)), {}, "input 'attn_mask' is expected to have heads (or 1) 4, got 2"),
    "mask batch": (
        _inputs(attn_mask=(3, 1, 5, 7)),
        {},
        "input 'attn_mask' is expected to have batch size (or 1) 2, got 3",
    ),
    "past rank": (
        _inputs(past_key=(2, 3, 16), past_value=(2, 3, 16)),
        {},
        "input 'past_key' is expected to have 4 dimensions, got 3",
    ),
    "past heads": (
        _inputs(past_key=(2, 4, 3, 8), past_value=(2, 4, 3, 8)),
        {},
        "input 'past_key' is expected to have heads 2, got 4",
    ),
    "past size": (
        _inputs(past_key=(2, 2, 3, 9), past_value=(2, 2, 3, 8)),
        {},
        "input 'past_key' is expected to have head size 8, got 9",
    ),
    "past lengths": (
        _inputs(past_key=(2, 2, 3, 8), past_value=(2, 2, 4, 8)),
        {},
        "'past_value' is expected to have sequence length 3, got 4",
    ),
    "past alone": (
        _inputs(past_key=(2, 2, 3, 8)),
        {},
        "inputs 'past_key' and 'past_value' are expected together, got only 'past_key'",
    ),
    "past and lengths": (
        _inputs(past_key=(2, 2, 3, 8), past_value=(2, 2, 3, 8), nonpad_kv_seqlen=(2,)),
        {},
        "'nonpad_kv_seqlen' cannot be combined",
    ),
    "lengths": (_inputs(nonpad_kv_seqlen=(3,)), {}, "input 'nonpad_kv_seqlen' is expected to have batch size 2, got 3"),
    "lengths rank": (
        _inputs(nonpad_kv_seqlen=(2, 1)),
        {},
        "input 'nonpad_kv_seqlen' is expected to have 1 dimension, got 2",
    ),
    "sinks": (_inputs(sinks=(2,)), {}, "input 'sinks' is expected to have query heads 4, got 2"),
    "bias": (_inputs(bias=(8,)), {}, "input 'bias' is expected to have size 64, got 8"),
    "mean and sinks": (_inputs(sinks=(4,)), {"empty_row": "mean"}, "cannot be combined with 'sinks'"),
    "packed and K": (
        _inputs(Q=(2, 5, 64), V=None),
        {"qkv_layout": "gqa"},
        "input 'K' is expected to be absent with qkv_layout \"gqa\"",
    ),
    "packed rank": (
        _inputs(Q=(2, 5, 3, 4, 8), K=None, V=None),
        {"qkv_layout": "gqa"},
        "input 'Q' is expected to have 3 dimensions, got 5",
    ),
    "packed 3": (
        _inputs(Q=(2, 5, 2, 4, 8), K=None, V=None),
        {"qkv_layout": "3hd", "kv_num_heads": 4},
        "third dimension 3, got 2",
    ),
    "packed width": (_inputs(Q=(2, 5, 65), K=None, V=None), {"qkv_layout": "gqa"}, "multiple of 8 (its heads), got 65"),
    "packed heads": (
        _inputs(Q=(2, 5, 96), K=None, V=None),
        {"qkv_layout": "3hd"},
        "'kv_num_heads' is expected to be 4",
    ),
}


@pytest.mark.parametrize("name", _BAD_INPUTS)
def test_bad_inputs(name: str) -> None:
    """A run ends with INVALID_ARGUMENT and a sentence that names the input, the expectation and what came."""
    inputs, attributes, message = _BAD_INPUTS[name]
    session = open_session(one_node(_CASE, inputs, dynamic=True, **attributes))
    with pytest.raises(Exception, match="FlashAttention") as error:
        session.run(None, inputs)
    assert type(error.value).__name__ == INVALID
    assert message in str(error.value)


def test_errors_do_not_spoil_the_session() -> None:
    case = _BY_ID["mask-b11k-bool"]
    inputs = case.inputs()
    session = open_session(one_node(case, inputs, dynamic=True))
    with pytest.raises(Exception, match="'K' is expected to have batch size"):
        session.run(None, inputs | {"K": inputs["K"][:1]})
    check_outputs(case, inputs, run(session, case, inputs))


_BAD_ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "qkv_layout": (
        "bshd",
        "attribute 'qkv_layout' is expected to be one of separate, 3hd, h3d, gqa, time_major, got \"bshd\"",
    ),
    "empty_row": ("nan", 'attribute \'empty_row\' is expected to be "zero" or "mean", got "nan"'),
    "is_causal": (2, "attribute 'is_causal' is expected to be 0 or 1, got 2"),
    "q_num_heads": (-4, "attribute 'q_num_heads' is expected to be at least 1, got -4"),
    "kv_num_heads": (0, "attribute 'kv_num_heads' is expected to be at least 1, got 0"),
    "left_window_size": (-2, "attribute 'left_window_size' is expected to be -1 (no bound) or at least 0, got -2"),
    "right_window_size": (-7, "attribute 'right_window_size' is expected to be -1 (no bound) or at least 0, got -7"),
    "scale": (-0.5, "attribute 'scale' is expected to be positive and finite, got -0.5"),
    "softcap": (-1.0, "attribute 'softcap' is expected to be 0 (none) or positive and finite, got -1"),
    "softmax_precision": (11, "softmax runs in float32"),
}


@pytest.mark.parametrize("name", _BAD_ATTRIBUTES)
def test_bad_attributes(name: str) -> None:
    """Refused when the session is made. ONNX Runtime drops the code of such a status, not its text."""
    value, message = _BAD_ATTRIBUTES[name]
    with pytest.raises(Exception, match="FlashAttention") as error:
        open_session(one_node(_CASE, _inputs(), **{name: value}))
    assert message in str(error.value)


@pytest.mark.parametrize(("name", "value", "message"), [
    ("scale", 1, "attribute 'scale' is expected to be a float, got an integer"),
    ("is_causal", 1.0, "attribute 'is_causal' is expected to be an integer, got a float"),
    ("qkv_layout", 3, "attribute 'qkv_layout' is expected to be a string, got an integer"),
    ("left_window_size", [1, 2], "attribute 'left_window_size' is expected to be an integer, got a list"),
])  # fmt: skip
def test_attributes_of_another_type(name: str, value: Any, message: str) -> None:
    with pytest.raises(Exception, match="FlashAttention") as error:
        open_session(one_node(_CASE, _inputs(), **{name: value}))
    assert message in str(error.value)


@pytest.mark.parametrize("precision", [0, 1, 10, 16])
def test_softmax_precision_up_to_float32(precision: int) -> None:
    """Whatever less is asked for, softmax runs in float32."""
    case = _BY_ID["causal-d64-float16"]
    inputs = case.inputs()
    check_outputs(case, inputs, run(open_session(one_node(case, inputs, softmax_precision=precision)), case, inputs))


@pytest.mark.parametrize("dtype", ["int32", "int8", "float64", "float16"])
def test_masks_of_other_types(dtype: str) -> None:
    """Bool, float32 or Q's dtype: others are refused, by us or by ONNX Runtime, never misread."""
    inputs = _inputs()
    inputs["attn_mask"] = np.zeros((5, 7), dtype)
    with pytest.raises(Exception, match="attn_mask"):
        open_session(one_node(_CASE, inputs)).run(None, inputs)


def test_unknown_type() -> None:
    inputs = {name: x.astype(np.float64) for name, x in _inputs().items()}
    with pytest.raises(Exception, match=r"(?i)type.*double"):
        open_session(one_node(replace(_CASE, dtype="float64"), inputs))
