"""Decoders of transformers exported as they are usually found: past keys in, past and new keys out."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers

_TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE = {**_TEXT, "intermediate_size": 64, "max_position_embeddings": 64}
_GROUPED = {**_WIDE, "num_key_value_heads": 2}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 8}),
    "phi": ("PhiForCausalLM", "PhiConfig", _GROUPED),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _WIDE),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64}),
    "opt": ("OPTForCausalLM", "OPTConfig",
            {**_TEXT, "word_embed_proj_dim": 32, "ffn_dim": 64, "max_position_embeddings": 64}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig",
                {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}),
    "falcon": ("FalconForCausalLM", "FalconConfig", _TEXT),
    "cohere": ("CohereForCausalLM", "CohereConfig", _GROUPED),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _GROUPED),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", _GROUPED),
    "gptj": ("GPTJForCausalLM", "GPTJConfig",
             {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64, "rotary_dim": 4}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig",
                    {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_GROUPED, "pad_token_id": 0}),
    "bloom": ("BloomForCausalLM", "BloomConfig",
              {"n_layer": 2, "n_head": 4, "vocab_size": 99, "hidden_size": 32}),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Way:
    """How a decoder is exported.

    Attributes:
        exporter: "torch" or "TorchScript".
        attention: "sdpa" or "eager".
        mask: whether attention_mask is an input.
        positions: whether position_ids is one.
    """

    exporter: str
    attention: str = "sdpa"
    mask: bool = True
    positions: bool = True

    def __str__(self) -> str:
        given = [name for name, there in (("mask", self.mask), ("positions", self.positions)) if there]
        return "-".join([self.exporter, self.attention, *given])


class WithPast(torch.nn.Module):
    """A decoder whose past and present keys are tensors."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.eval()

    def forward(self, *inputs: Any) -> Any:
        given = dict(zip(self.names, inputs, strict=False))
        past = inputs[len(self.names) :]
        cache = transformers.DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        out = self.model(**given, past_key_values=cache, use_cache=True)
        return out.logits, *(x for layer in out.past_key_values.layers for x in (layer.keys, layer.values))


def made(name: str, attention: str = "sdpa") -> Any:
    """A model with enough in its weights that tokens differ."""
    model, config, given = CONFIGS[name]
    torch.manual_seed(1)
    result = getattr(transformers, model)(getattr(transformers, config)(**given, attn_implementation=attention)).eval()
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return result


def export(name: str, way: Way, path: Path) -> onnx.ModelProto:
    """The decoder with inputs input_ids, attention_mask?, position_ids?, past_key_values.0.key, ..."""
    model = made(name, way.attention)
    with torch.no_grad():
        layers = model(torch.zeros(1, 2, dtype=torch.int64), use_cache=True).past_key_values.layers
    batch, count, past = 2, 3, 5
    inputs = {"input_ids": torch.randint(3, 99, (batch, count))}
    axes = {"input_ids": {0: "batch", 1: "sequence"}}
    if way.mask:
        inputs["attention_mask"] = torch.ones(batch, past + count, dtype=torch.int64)
        axes["attention_mask"] = {0: "batch", 1: "total"}
    if way.positions:
        inputs["position_ids"] = torch.arange(past, past + count)[None].repeat(batch, 1)
        axes["position_ids"] = {0: "batch", 1: "sequence"}
    wrapped, outputs = WithPast(model, list(inputs)), ["logits"]
    for index, layer in enumerate(layers):
        for role, x in (("key", layer.keys), ("value", layer.values)):
            inputs[f"past_key_values.{index}.{role}"] = torch.randn(batch, x.shape[1], past, x.shape[3])
            axes[f"past_key_values.{index}.{role}"] = {0: "batch", 2: "past"}
            outputs.append(f"present.{index}.{role}")
    names: dict[str, Any] = {"input_names": list(inputs), "output_names": outputs}
    given = tuple(inputs.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way.exporter == "torch":
            torch.onnx.export(
                wrapped, given, path, dynamo=True, opset_version=20, verbose=False,
                dynamic_shapes=(tuple(axes.values()),), **names,
            )  # fmt: skip
        else:
            every = axes | {"logits": axes["input_ids"]}
            every |= {output: {0: "batch", 2: "past + sequence"} for output in outputs[1:]}
            torch.onnx.export(wrapped, given, path, dynamo=False, opset_version=17, dynamic_axes=every, **names)
    return onnx.load(path)


class Original:
    """Runs such a file step by step, past keys growing."""

    def __init__(self, session: Any, batch: int = 1) -> None:
        self.session = session
        self.names = [value.name for value in session.get_inputs()]
        self.pasts = {}
        for value in session.get_inputs():
            if value.name.startswith("past_"):
                heads, size = value.shape[1], value.shape[3]
                self.pasts[value.name] = np.zeros((batch, heads, 0, size), np.float32)
        self.keys = np.zeros((batch, 0), np.int64)

    def step(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Logits of `ids`, where `mask` says which of them count; positions count those, as transformers has it."""
        before = self.keys.shape[1]
        self.keys = np.concatenate([self.keys, np.ones_like(ids) if mask is None else mask], 1)
        positions = np.maximum(self.keys.cumsum(1) - 1, 0)[:, before:]
        given = {"input_ids": ids, "attention_mask": self.keys, "position_ids": positions} | self.pasts
        logits, *presents = self.session.run(None, {name: given[name] for name in self.names})
        self.pasts = dict(zip(self.pasts, presents, strict=True))
        return logits


class SpeechDecoder(torch.nn.Module):
    """Whisper's decoder with a past: keys of its own that grow, and those of the encoder, which do not."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, input_ids: Any, frames: Any, *past: Any) -> Any:
        layers = [past[index : index + 4] for index in range(0, len(past), 4)]
        own, cross = (transformers.DynamicCache([layer[part : part + 2] for layer in layers]) for part in (0, 2))
        cache = transformers.EncoderDecoderCache(own, cross)
        cache.is_updated.update(dict.fromkeys(range(len(layers)), True))
        out = self.model.model.decoder(
            input_ids=input_ids, encoder_hidden_states=frames, past_key_values=cache, use_cache=True
        )
        return self.model.proj_out(out[0]), *(x for layer in own.layers for x in (layer.keys, layer.values))


def export_whisper(exporter: str, path: Path) -> onnx.ModelProto:
    """The decoder with inputs input_ids, past_key_values.0.decoder.key, ..., past_key_values.0.encoder.key, ..."""
    torch.manual_seed(1)
    config = transformers.WhisperConfig(
        vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=12,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    batch, count, past, frames = 2, 3, 5, 12
    given = [torch.randint(3, 99, (batch, count)), torch.randn(batch, frames, 32)]
    names, axes = ["input_ids", "frames"], [{0: "batch", 1: "sequence"}, {0: "batch", 1: "frames"}]
    outputs = ["logits"]
    for name in (
        f"{i}.{part}.{role}" for i in range(2) for part in ("decoder", "encoder") for role in ("key", "value")
    ):
        is_own = "decoder" in name
        given.append(torch.randn(batch, 4, past if is_own else frames, 8))
        names.append(f"past_key_values.{name}")
        axes.append({0: "batch", 2: "past" if is_own else "frames"})
        outputs += [f"present.{name}"] if is_own else []
    module = SpeechDecoder(transformers.WhisperForConditionalGeneration(config).eval())
    more: dict[str, Any] = {"input_names": names, "output_names": outputs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "torch":
            shapes = (axes[0], axes[1], tuple(axes[2:]))
            torch.onnx.export(
                module, tuple(given), path, dynamo=True, dynamic_shapes=shapes, opset_version=20, verbose=False, **more
            )
        else:
            every = dict(zip(names, axes, strict=True)) | {"logits": axes[0]}
            every |= {name: {0: "batch", 2: "past + sequence"} for name in outputs[1:]}
            torch.onnx.export(module, tuple(given), path, dynamo=False, dynamic_axes=every, opset_version=17, **more)
    return onnx.load(path)
