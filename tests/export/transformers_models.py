"""Tiny random models of transformers as data: what they are made of, what goes in, what their attention must become."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT = {**_SIZES, "vocab_size": 99, "max_position_embeddings": 64}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64, "use_cache": False}
_IMAGE = {**_SIZES, "image_size": 16, "patch_size": 4}
_CAUSAL = {"is_causal": 1}
_TOKENS = {0: "batch", 1: "sequence"}
_PAIR = {"vocab_size": 99, "d_model": 32, "use_cache": False, "pad_token_id": 0}
_LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_WIDTHS = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0}


def text(batch: int, sequence: int, left: bool = False) -> dict[str, Any]:
    """Token ids and a padding mask of several lengths, padded on the right or the left.

    The last token that is no padding has the highest id: there CLIP takes its output from.
    """
    lengths = torch.arange(batch) * 3 % sequence + 1
    mask = torch.arange(sequence) < lengths[:, None]
    ids = torch.randint(3, 98, (batch, sequence))
    ids[range(batch), -1 if left else lengths - 1] = 98
    return {"input_ids": ids, "attention_mask": (mask.flip(1) if left else mask).long()}


def pair(batch: int, sequence: int, left: bool = False) -> dict[str, Any]:
    """An encoder's and a decoder's tokens."""
    return {**text(batch, sequence, left), "decoder_input_ids": torch.randint(3, 99, (batch, sequence + 3))}


def image(batch: int, sequence: int, left: bool = False) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 16, 16)}


def speech(batch: int, sequence: int, left: bool = False) -> dict[str, Any]:
    return {
        "input_features": torch.randn(batch, 8, 24),
        "decoder_input_ids": torch.randint(3, 99, (batch, sequence)),
    }


def image_and_text(batch: int, sequence: int, left: bool = False) -> dict[str, Any]:
    return {**text(batch, sequence, left), **image(batch, sequence)}


_AXES = {
    text: {"input_ids": _TOKENS, "attention_mask": _TOKENS},
    pair: {
        "input_ids": _TOKENS,
        "attention_mask": _TOKENS,
        "decoder_input_ids": {0: "batch", 1: "decoder_sequence"},
    },
    image: {"pixel_values": {0: "batch"}},
    speech: {"input_features": {0: "batch"}, "decoder_input_ids": {0: "batch", 1: "decoder_sequence"}},
    image_and_text: {"input_ids": _TOKENS, "attention_mask": _TOKENS, "pixel_values": {0: "batch"}},
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        id: name of the tests.
        model: class in transformers.
        config: class in transformers, and its arguments.
        inputs: makes keyword inputs from a batch size, a sequence length and the side of the padding.
        attributes: of each attention node, in order, besides head counts and the scale; one for all, or one each.
        masks: for each node the shape of its mask input, None without one.
        nodes: how many there are.
        sdpa: whether transformers has it with PyTorch's scaled_dot_product_attention, too.
    """

    id: str
    model: str
    config: tuple[str, dict[str, Any]]
    inputs: Callable[..., dict[str, Any]] = text
    attributes: tuple[dict[str, Any], ...] = ({},)
    masks: tuple[tuple[Any, ...] | None, ...] = (("batch", 1, 1, "sequence"),)
    nodes: int = 2
    sdpa: bool = True

    def make(self, attention: str | None = None) -> Any:
        """The model with random weights, in eval mode."""
        import transformers

        torch.manual_seed(0)
        name, arguments = self.config
        config = getattr(transformers, name)(**arguments)
        if attention is not None:
            config._attn_implementation = attention
        return getattr(transformers, self.model)(config).eval()

    @property
    def axes(self) -> dict[str, Any]:
        """Dynamic batch and sequence."""
        return {name: dict(axes) for name, axes in _AXES[self.inputs].items()}


def _decoder(
    id: str, prefix: str, *attributes: dict[str, Any], model: str = "", sdpa: bool = True, **config: Any
) -> Family:
    arguments = {**_GROUPED, **config}
    return Family(
        id, model or f"{prefix}Model", (f"{prefix}Config", arguments), attributes=attributes or (_CAUSAL,), sdpa=sdpa
    )


_ENCODER_DECODER = ({}, {}, _CAUSAL, {}, _CAUSAL, {})
_KEYS = ("batch", 1, 1, "sequence")
_BIAS = ("batch", 4, "sequence", "sequence")  # T5's bias of positions, and the padding
_DECODER_BIAS = (1, 4, "decoder_sequence", "decoder_sequence")
_GEMMA = {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES = (
    Family("bert", "BertModel", ("BertConfig", _TEXT)),
    Family("roberta", "RobertaModel", ("RobertaConfig", {**_TEXT, "pad_token_id": 1})),
    Family(
        "distilbert",
        "DistilBertModel",
        ("DistilBertConfig", {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    ),
    Family(
        "modernbert",
        "ModernBertModel",
        ("ModernBertConfig", {**_TEXT, "pad_token_id": 0, "local_attention": 8, "global_attn_every_n_layers": 2}),
        attributes=({}, {"left_window_size": 4, "right_window_size": 4}),
    ),
    Family(
        "gpt2",
        "GPT2Model",
        ("GPT2Config", _GPT),
        attributes=(_CAUSAL,),
    ),
    _decoder("llama", "Llama"),
    _decoder("mistral", "Mistral", {"is_causal": 1, "left_window_size": 3}, sliding_window=4),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3", head_dim=16),
    _decoder("phi3", "Phi3"),
    _decoder(
        "gemma2",
        "Gemma2",
        {"is_causal": 1, "softcap": 50.0, "left_window_size": 3},
        {"is_causal": 1, "softcap": 50.0},
        sdpa=False,
        query_pre_attn_scalar=8,
        **_GEMMA,
    ),
    _decoder(
        "gemma3", "Gemma3Text", {"is_causal": 1, "left_window_size": 3}, _CAUSAL, model="Gemma3TextModel", **_GEMMA
    ),
    _decoder(
        "gpt_oss",
        "GptOss",
        {"is_causal": 1, "left_window_size": 3},
        _CAUSAL,
        sdpa=False,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="batched_mm",
        **_GEMMA,
    ),
    Family(
        "t5",
        "T5Model",
        ("T5Config", {**_PAIR, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}),
        inputs=pair,
        attributes=_ENCODER_DECODER,
        masks=(_BIAS, _BIAS, _DECODER_BIAS, _KEYS, _DECODER_BIAS, _KEYS),
        nodes=6,
    ),
    Family(
        "bart",
        "BartModel",
        ("BartConfig", {**_PAIR, **_LAYERS, **_WIDTHS, "max_position_embeddings": 64}),
        inputs=pair,
        attributes=_ENCODER_DECODER,
        masks=(_KEYS, _KEYS, None, _KEYS, None, _KEYS),
        nodes=6,
    ),
    Family(
        "whisper",
        "WhisperModel",
        (
            "WhisperConfig",
            {**_PAIR, **_LAYERS, **_WIDTHS, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 64},
        ),
        inputs=speech,
        attributes=_ENCODER_DECODER,
        masks=(None,),
        nodes=6,
    ),
    Family("vit", "ViTModel", ("ViTConfig", _IMAGE), inputs=image, masks=(None,)),
    Family("dinov2", "Dinov2Model", ("Dinov2Config", _IMAGE), inputs=image, masks=(None,)),
    Family(
        "clip",
        "CLIPModel",
        ("CLIPConfig", {"text_config": {**_TEXT, "eos_token_id": 2}, "vision_config": _IMAGE, "projection_dim": 16}),
        inputs=image_and_text,
        attributes=({}, {}, _CAUSAL, _CAUSAL),
        masks=(None, None, _KEYS, _KEYS),
        nodes=4,
    ),
)
