"""Encoder-decoders of transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers_models as known

from model_zoo.entry import Call, Entry, Sizes

_KNOWN = {family.id: family for family in known.FAMILIES}
_DECODED = {0: "batch", 1: "decoder_sequence"}
_TOKENS = {0: "batch", 1: "sequence"}


def _pair(sizes: Sizes) -> dict[str, Any]:
    ids = torch.randint(3, 99, (sizes.batch, sizes.sequence))
    decoded = torch.randint(3, 99, (sizes.batch, sizes.sequence + 3))
    return {"input_ids": ids, "attention_mask": sizes.mask(), "decoder_input_ids": decoded}


def _speech(sizes: Sizes) -> dict[str, Any]:
    decoded = torch.randint(3, 99, (sizes.batch, sizes.sequence))
    return {"input_features": torch.randn(sizes.batch, 8, 24), "decoder_input_ids": decoded}


def _entry(id: str, inputs: Any, axes: dict[str, dict[int, str]], **more: Any) -> Entry:
    family = _KNOWN[id]
    return Entry(id, lambda attention: Call(family.make(attention), axes), inputs, axes, sites=6, **more)


ENTRIES = (
    *(
        _entry(id, _pair, {"input_ids": _TOKENS, "attention_mask": _TOKENS, "decoder_input_ids": _DECODED})
        for id in ("t5", "bart")
    ),
    _entry(
        "whisper",
        _speech,
        {"input_features": {0: "batch"}, "decoder_input_ids": _DECODED},
        others=(Sizes(3, 11),),
        cannot={"TorchScript": "aten::diff has no form there"},
    ),
)
