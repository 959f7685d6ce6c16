"""Encoders and decoders of transformers, with and without a past."""

from __future__ import annotations

from typing import Any

import torch
import transformers_models as known

from model_zoo.entry import Call, Entry, Sizes

_TOKENS = {0: "batch", 1: "sequence"}
_AXES = {"input_ids": _TOKENS, "attention_mask": _TOKENS}
_KNOWN = {family.id: family for family in known.FAMILIES}
_BLOOM = {"vocab_size": 99, "n_layer": 2, "n_head": 4, "use_cache": False}
_FALCON = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False}


def _tokens(sizes: Sizes) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 99, (sizes.batch, sizes.sequence)), "attention_mask": sizes.mask()}


def _family(id: str, model: str, config: str, **arguments: Any) -> known.Family:
    return known.Family(id, model, (config, arguments))


_MORE = (
    _family("albert", "AlbertModel", "AlbertConfig", **known._TEXT, embedding_size=16),
    _family("gpt_neox", "GPTNeoXModel", "GPTNeoXConfig", **known._TEXT, use_cache=False),
    _family("mixtral", "MixtralModel", "MixtralConfig", **known._GROUPED, num_local_experts=2, sliding_window=None,
            experts_implementation="batched_mm"),
    _family("opt", "OPTModel", "OPTConfig", vocab_size=99, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64,
            num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, use_cache=False),
    _family("phi", "PhiModel", "PhiConfig", **known._GROUPED),
    _family("falcon", "FalconModel", "FalconConfig", **_FALCON, multi_query=True),
    _family("falcon_alibi", "FalconModel", "FalconConfig", **_FALCON, alibi=True, new_decoder_architecture=False),
)  # fmt: skip
_EAGER = (
    _family("bloom", "BloomModel", "BloomConfig", **_BLOOM, hidden_size=32),
    _family("mpt", "MptModel", "MptConfig", vocab_size=99, n_layers=2, n_heads=4, d_model=32, max_seq_len=64,
            use_cache=False),
)  # fmt: skip


_CANNOT = {
    "falcon_alibi": {
        "TorchScript": "complex numbers in the graph, which no runtime takes",
        "export_onnx": "ONNX Runtime's CPU provider has no Mul of bfloat16, in which its ALiBi is made",
    }
}


def _entry(family: known.Family, attentions: tuple[str, ...] = ("sdpa", "eager")) -> Entry:
    return Entry(
        family.id, lambda attention: Call(family.make(attention), _AXES), _tokens, _AXES,
        attentions=attentions if family.sdpa else ("eager",), cannot=_CANNOT.get(family.id, {}),
    )  # fmt: skip


class Cached(torch.nn.Module):
    """A decoder with the keys and values of earlier tokens as inputs and those of all as outputs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, input_ids: Any, attention_mask: Any, *past: Any) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        return out.last_hidden_state, *(x for layer in cache.layers for x in (layer.keys, layer.values))


_PAST = 5  # keys before the example's


def _cached(id: str, heads: int, size: int = 8) -> Entry:
    family = _KNOWN[id]

    def inputs(sizes: Sizes) -> dict[str, Any]:
        past = _PAST if sizes == Sizes() else sizes.batch + 4
        cache = {f"past_{i}": torch.randn(sizes.batch, heads, past, size) for i in range(4)}
        ids = torch.randint(3, 99, (sizes.batch, sizes.sequence))
        return {"input_ids": ids, "attention_mask": sizes.mask(past + sizes.sequence), **cache}

    axes = {"input_ids": _TOKENS, "attention_mask": {0: "batch", 1: "keys"}}
    axes |= {f"past_{i}": {0: "batch", 2: "past"} for i in range(4)}
    others = (*Entry.others, Sizes(2, 1), Sizes(2, 1, "left"))
    return Entry(f"{id}_past", lambda attention: Cached(family.make(attention)), inputs, axes, others=others)


_TEXTS = ("bert", "roberta", "distilbert", "modernbert", "gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2",
          "gemma3", "gpt_oss")  # fmt: skip
ENTRIES = (
    *(_entry(_KNOWN[id]) for id in _TEXTS),
    *(_entry(family) for family in _MORE),
    *(_entry(family, ("eager",)) for family in _EAGER),
    _cached("gpt2", 4),
    _cached("llama", 2),
    _cached("mistral", 2),
    _cached("qwen3", 2, 16),
)
