"""The reference against PyTorch, ONNX's own test data, and what each feature says in plain words."""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx
import onnx_cases
import pytest
from cases import pack
from flashonnx.reference import Array, FlashAttention, attention

SUPPORTED, WITH_SCORES = onnx_cases.names()


def test_onnx_cases_are_all_looked_at() -> None:
    assert len(SUPPORTED) >= 75
    assert len(WITH_SCORES) >= 18


@pytest.mark.parametrize("name", SUPPORTED)
def test_onnx_case(name: str) -> None:
    case = onnx_cases.attention_cases()[name]
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    node = model.graph.node[0]
    node.op_type, node.domain = "FlashAttention", "flashonnx"
    model.opset_import.add(domain="flashonnx", version=1)
    evaluator = onnx.reference.ReferenceEvaluator(model, new_ops=[FlashAttention])
    for inputs, expected in case.data_sets:
        outputs = evaluator.run(None, dict(zip((i.name for i in model.graph.input), inputs, strict=True)))
        onnx_cases.assert_expected(outputs, expected)


_MASKS = (None, "bool", "float", "dead row", "dead row float")


@pytest.mark.parametrize(
    ("mask", "causal", "group", "scale"), list(itertools.product(_MASKS, (False, True), (1, 3), (None, 0.7)))
)
def test_pytorch(mask: str | None, causal: bool, group: int, scale: float | None, random: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    q = random.standard_normal((2, 2 * group, 5, 8))
    k, v = random.standard_normal((2, 2, 2, 9, 8))
    attn_mask = None
    if mask:
        attn_mask = random.random((2, 1, 5, 9)) < 0.6
        attn_mask[..., 0] = True
        if "dead" in mask:
            attn_mask[1, 0, 2] = False
        if "float" in mask:
            attn_mask = np.where(attn_mask, random.standard_normal((2, 1, 5, 9)), -np.inf)
    y, *_ = attention(q, k, v, attn_mask, is_causal=causal, scale=scale)
    both = None if attn_mask is None else torch.from_numpy(attn_mask)
    if causal and both is not None:  # PyTorch takes one of them; the triangle is top left
        triangle = torch.ones(5, 9, dtype=torch.bool).tril()
        both = both & triangle if both.dtype == torch.bool else both.masked_fill(~triangle, -torch.inf)
    right = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.from_numpy, (q, k, v)), both, is_causal=causal and both is None, scale=scale, enable_gqa=True
    ).numpy()
    np.testing.assert_allclose(y, right, rtol=1e-12, atol=1e-12)


def _qkv(
    random: np.random.Generator, q_length: int = 4, kv_length: int = 6, dim: int = 8
) -> tuple[Array, Array, Array]:
    """(2, 2, S, D) each."""
    q = random.standard_normal((2, 2, q_length, dim))
    return q, random.standard_normal((2, 2, kv_length, dim)), random.standard_normal((2, 2, kv_length, dim))


def test_lse_is_the_log_of_the_sum(random: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = _qkv(random)
    *_, lse = attention(q, k, v, is_causal=True)
    scores = torch.from_numpy(q @ k.swapaxes(-1, -2) / math.sqrt(8)).masked_fill(
        ~torch.ones(4, 6, dtype=torch.bool).tril(), -torch.inf
    )
    np.testing.assert_allclose(lse, scores.logsumexp(-1).numpy(), rtol=1e-12)


def test_a_sink_is_one_more_key_without_a_value(random: np.random.Generator) -> None:
    q, k, v = _qkv(random)
    sinks = np.array([0.3, -1.2])
    y, _, _, lse = attention(q, k, v, sinks=sinks)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(8)
    column = np.broadcast_to(sinks[:, None, None], (2, 2, 4, 1))
    weights = np.exp(np.concatenate((scores, column), axis=-1))
    weights /= weights.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(y, weights[..., :-1] @ v, rtol=1e-12)
    np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(-1)), rtol=1e-12)  # without the sink


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_an_extreme_sink_is_finite(sink: float, random: np.random.Generator) -> None:
    q, k, v = _qkv(random)
    y, *_ = attention(q, k, v, sinks=np.full(2, sink))
    np.testing.assert_allclose(y, attention(q, k, v)[0] if sink < 0 else 0, atol=1e-12)


def test_empty_rows(random: np.random.Generator) -> None:
    q, k, v = _qkv(random)
    mask = np.ones((2, 1, 4, 6), bool)
    mask[0, 0, 1] = False
    full, *_ = attention(q, k, v)
    for empty_row, value in (("zero", np.zeros((2, 8))), ("mean", v[0].mean(axis=1))):
        y, _, _, lse = attention(q, k, v, mask, empty_row=empty_row)
        np.testing.assert_allclose(y[0, :, 1], value, rtol=1e-12)
        assert np.isneginf(lse[0, :, 1]).all()
        assert np.isfinite(lse).sum() == lse.size - 2
        others = np.ones((2, 2, 4), bool)
        others[0, :, 1] = False
        np.testing.assert_array_equal(y[others], full[others])


def test_the_mean_leaves_padding_out(random: np.random.Generator) -> None:
    q, k, v = _qkv(random)
    v[0, :, 3:] = np.nan
    mask = np.zeros((4, 6), bool)
    y, *_ = attention(q, k, v, mask, nonpad_kv_seqlen=np.array([3, 0]), empty_row="mean")
    np.testing.assert_allclose(y[0], np.repeat(v[0, :, None, :3].mean(axis=2), 4, axis=1), rtol=1e-12)
    np.testing.assert_array_equal(y[1], 0)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e300])
def test_masked_slots_do_not_matter(poison: float, random: np.random.Generator) -> None:
    q, k, v = _qkv(random)
    clean = attention(q, k[:, :, :3], v[:, :, :3], is_causal=True)
    k[:, :, 3:] = v[:, :, 3:] = poison
    for name, hidden in (
        ("nonpad_kv_seqlen", np.array([3, 3])),
        ("attn_mask", np.arange(6) < 3),
        ("attn_mask", np.ones(3, bool)),
    ):
        window = {"right_window_size": 0} if name == "attn_mask" else {}  # causal by other means, offset 0
        y, _, _, lse = attention(q, k, v, **{name: hidden}, is_causal=name == "attn_mask", **window)
        right = attention(q, k[:, :, :3], v[:, :, :3], is_causal=name == "attn_mask")
        np.testing.assert_allclose(y, right[0], rtol=1e-12)
        np.testing.assert_allclose(lse, right[3], rtol=1e-12)
    # Causal: a query before the poison is clean, one after it is not.
    y, *_ = attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(y[:, :, :3], clean[0][:, :, :3], rtol=1e-12)
    if poison != 1e300:
        assert np.isnan(y[:, :, 3]).all()


@pytest.mark.parametrize("layout", ["3hd", "3hd_flat", "h3d", "h3d_flat", "gqa", "time_major"])
def test_packed_layouts_are_separate_ones(layout: str, random: np.random.Generator) -> None:
    q, k, v = _qkv(random, 5, 5)
    right, *_ = attention(*pack(q, k, v, "bshd"), q_num_heads=2, kv_num_heads=2, is_causal=True)
    heads = {} if layout in ("3hd", "h3d") else {"q_num_heads": 2, "kv_num_heads": 2}
    packed, *_ = pack(q, k, v, layout)
    y, present_key, present_value, _ = attention(
        packed, qkv_layout=layout.removesuffix("_flat"), is_causal=True, **heads
    )
    np.testing.assert_array_equal(y, right.swapaxes(0, 1) if layout == "time_major" else right)
    np.testing.assert_array_equal(present_key, k)
    np.testing.assert_array_equal(present_value, v)


def test_packing_is_what_projections_give(random: np.random.Generator) -> None:
    """nn.Linear(E, 3E) viewed as (B, S, 3, H, D), as in timm; (B, S, H, 3, D), as in GPT-NeoX; chunked, as GQA."""
    x = random.standard_normal((2, 5, 2 * 3 * 8))
    for layout, kept in (("3hd", x.reshape(2, 5, 3, 2, 8)), ("h3d", x.reshape(2, 5, 2, 3, 8).swapaxes(2, 3))):
        q, k, v = (kept[:, :, i].swapaxes(1, 2) for i in range(3))
        right = attention(q, k, v)[0].swapaxes(1, 2).reshape(2, 5, 16)
        np.testing.assert_array_equal(attention(x, q_num_heads=2, kv_num_heads=2, qkv_layout=layout)[0], right)
    q, k, v = x[..., :32], x[..., 32:40], x[..., 40:]
    right = attention(q, k, v, q_num_heads=4, kv_num_heads=1)[0]
    np.testing.assert_array_equal(attention(x, q_num_heads=4, kv_num_heads=1, qkv_layout="gqa")[0], right)


def test_errors_say_what_is_wrong(random: np.random.Generator) -> None:
    q, k, v = _qkv(random)
    with pytest.raises(ValueError, match="multiple of key heads, got 3 and 2"):
        attention(np.zeros((2, 3, 4, 8)), k, v)
    with pytest.raises(ValueError, match="exclude each other"):
        attention(q, k, v, past_key=k, past_value=v, nonpad_kv_seqlen=np.array([1, 2]))
    with pytest.raises(ValueError, match="rank 3 and head counts, got rank 3"):
        attention(*pack(q, k, v, "bshd"))
    with pytest.raises(ValueError, match="empty_row"):
        attention(q, k, v, sinks=np.zeros(2), empty_row="mean")
