"""The inputs that verify and bench make up: of every shape and kind, and the same each time."""

from __future__ import annotations

import numpy as np
import pytest
from flashonnx._inputs import InputSpec, generate, symbols_of


def test_generated_inputs() -> None:
    specs = [
        InputSpec("input_ids", np.dtype("int64"), ("batch", "sequence"), ids=7),
        InputSpec("attention_mask", np.dtype("int64"), ("batch", "sequence")),
        InputSpec("position_ids", np.dtype("int64"), ("batch", "sequence")),
        InputSpec("token_type_ids", np.dtype("int64"), ("batch", "sequence")),
        InputSpec("bias", np.dtype("float32"), ("batch", 1, "sequence", "past + sequence")),
        InputSpec("past", np.dtype("float32"), ("batch", 2, "past", 8)),
    ]
    first, again = list(generate(specs, None)), list(generate(specs, None))
    assert len({tuple(sizes.items()) for sizes, _ in first}) == 4
    for (sizes, feeds), (_, same) in zip(first, again, strict=True):
        assert all(np.array_equal(feeds[name], same[name]) for name in feeds)
        b, s, p = sizes["batch"], sizes["sequence"], sizes["past"]
        assert feeds["input_ids"].shape == (b, s) and feeds["bias"].shape == (b, 1, s, p + s)
        assert feeds["input_ids"].min() >= 0 and feeds["input_ids"].max() < 7
        assert set(np.unique(feeds["attention_mask"])) <= {0, 1} and (feeds["attention_mask"].sum(axis=1) >= 1).all()
        assert (feeds["position_ids"][0] == p + np.arange(s)).all() and not feeds["token_type_ids"].any()
    assert first[2][1]["attention_mask"][:, 0].all() and not first[2][1]["attention_mask"].all()  # padded on the right
    assert first[3][1]["attention_mask"][:, -1].all() and not first[3][1]["attention_mask"].all()  # and on the left
    odd = [InputSpec("x", np.dtype("float32"), ("floor(a/b)", "a"))]
    with pytest.raises(ValueError, match=r"input 'x' has a dimension 'floor.*pass inputs"):
        list(generate(odd, None))


@pytest.mark.parametrize("kind", ["bool", "int64", "float32", "float16"])
def test_single_numbers_are_arrays(kind: str) -> None:
    """ONNX Runtime takes no NumPy scalars."""
    for _, feeds in generate([InputSpec("flag", np.dtype(kind), ())], None):
        assert isinstance(feeds["flag"], np.ndarray) and feeds["flag"].dtype == kind and feeds["flag"].shape == ()


def test_names_of_dimensions_that_are_no_identifiers() -> None:
    shape = ("batch size", "seq-len", "3D")
    specs = [InputSpec("x", np.dtype("float32"), shape), InputSpec("y", np.dtype("float32"), shape[:2])]
    assert symbols_of(specs) == list(shape)
    ((sizes, feeds),) = generate(specs, {"batch size": [2], "seq-len": [5], "3D": [4]})
    assert feeds["x"].shape == (2, 5, 4) and feeds["y"].shape == (2, 5) and sizes["seq-len"] == 5


@pytest.mark.parametrize(
    ("mask", "past", "implied"),
    [
        ("attention_mask", "past_key_values.0.key", True),
        ("decoder_attention_mask", "past_key_values.0.decoder.key", True),
        ("encoder_attention_mask", "past_key_values.0.decoder.key", False),
        ("attention_mask", "past_key_values.0.encoder.key", False),
    ],
)
def test_generated_masks_of_past_and_new_keys(mask: str, past: str, implied: bool) -> None:
    """An axis of the mask's own is their sum, unless a value is given for it, or it is that of an encoder."""
    specs = [
        InputSpec("input_ids", np.dtype("int64"), ("batch", "new")),
        InputSpec(mask, np.dtype("int64"), ("batch", "total")),
        InputSpec(past, np.dtype("float32"), ("batch", 2, "past", 8)),
    ]
    for sizes, feeds in generate(specs, {"new": [1, 5], "past": [4, 7]}):
        assert (feeds[mask].shape[1] == sizes["past"] + sizes["new"]) == implied
    ((_, feeds),) = generate(specs, {"new": [2], "past": [3], "total": [9]})
    assert feeds[mask].shape[1] == 9


def test_generated_positions_stand_behind_the_past() -> None:
    specs = [
        InputSpec("position_ids", np.dtype("int64"), ("batch", "new")),
        InputSpec("past_key_values.0.key", np.dtype("float32"), ("batch", 2, "past", 8)),
    ]
    ((_, feeds),) = generate(specs, {"new": [3], "past": [5]})
    assert (feeds["position_ids"] == [5, 6, 7]).all()
    lengths = InputSpec("cache_lengths", np.dtype("int64"), ("batch",))  # which say where they stand themselves
    ((_, feeds),) = generate([*specs, lengths], {"new": [3], "past": [5]})
    assert (feeds["position_ids"] == [0, 1, 2]).all()
