"""A decoder with a cache in onnxruntime-genai, whose configuration names the library with the kernels.

    python samples/genai/run.py

genai gives each layer its keys and values of earlier steps, and takes them back longer by the new tokens:
past_key_values and present. That is what `attention_outputs` is for. The model is tiny and has random weights; its
tokens mean nothing, but PyTorch must choose the same. Needs `pip install flashonnx[torch,ort] onnxruntime-genai`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import flashonnx
import flashonnx.torch
import numpy as np
import torch
from torch import Tensor, nn

WORDS, WIDTH, HEADS, KV_HEADS, LAYERS, LONGEST = 100, 64, 4, 2, 2, 32
HEAD = WIDTH // HEADS
END = WORDS - 1  # the model never chooses it


class Decoder(nn.Module):
    """Logits and each layer's keys and values, old and new, from new tokens and the old keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.projections = nn.ModuleList([nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD) for _ in range(LAYERS)])
        self.outs = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        x = self.tokens(input_ids) + self.positions(position_ids)
        keys = attention_mask[:, None, None, :] != 0  # of old and new keys; stays this small
        presents: list[Tensor] = []
        for i in range(LAYERS):
            q, k, v = self.projections[i](self.norms[i](x)).split(
                [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], dim=-1
            )
            y, key, value, _ = torch.ops.flashonnx.attention_outputs(
                q,
                k,
                v,
                keys,
                past_key=past[2 * i],
                past_value=past[2 * i + 1],
                is_causal=True,
                q_num_heads=HEADS,
                kv_num_heads=KV_HEADS,
                present=True,
            )
            x = x + self.outs[i](y)
            presents += [key, value]
        return (self.head(x), *presents)


def cache_names(prefix: str) -> list[str]:
    return [f"{prefix}.{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]


def export(model: Decoder, file: Path) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    past = [torch.zeros(2, KV_HEADS, 5, HEAD) for _ in range(2 * LAYERS)]
    new = {0: "batch", 1: "sequence"}
    report = flashonnx.export_onnx(
        model,
        (ids, torch.ones(2, 8, dtype=torch.int64), ids.clone(), past),  # torch.export takes one tensor for one input
        file,
        dynamic_shapes=(new, {0: "batch", 1: "total"}, new, [{0: "batch", 2: "past"}] * len(past)),
        input_names=["input_ids", "attention_mask", "position_ids", *cache_names("past_key_values")],
        output_names=["logits", *cache_names("present")],
    )
    print(report)
    assert report.fused == report.total == LAYERS


def configure(folder: Path) -> None:
    """genai_config.json; the library lies beside it, as genai loads none from just anywhere."""
    shutil.copy(flashonnx.library_path(), folder / "libflashonnx.so")
    decoder = {
        "session_options": {"custom_ops_library": "libflashonnx.so", "provider_options": []},
        "filename": "model.onnx",
        "head_size": HEAD,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "position_ids": "position_ids",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    tokens = {"bos_token_id": 0, "eos_token_id": END, "pad_token_id": END}
    model = {"type": "llama", "vocab_size": WORDS, "context_length": LONGEST, **tokens, "decoder": decoder}
    search = {"max_length": LONGEST, "do_sample": False, "past_present_share_buffer": False}
    (folder / "genai_config.json").write_text(json.dumps({"model": model, "search": search}, indent=2))


def generate(folder: Path, prompt: list[int], length: int) -> list[int]:
    import onnxruntime_genai as genai

    model = genai.Model(str(folder))
    options = genai.GeneratorParams(model)
    options.set_search_options(max_length=length)
    generator = genai.Generator(model, options)
    generator.append_tokens(np.array([prompt], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)]


def expected(model: Decoder, prompt: list[int], length: int) -> list[int]:
    """PyTorch's choice, without a cache."""
    tokens = list(prompt)
    empty = [torch.zeros(1, KV_HEADS, 0, HEAD)] * (2 * LAYERS)
    with torch.inference_mode():
        while len(tokens) < length:
            ids = torch.tensor([tokens])
            logits = model(ids, torch.ones_like(ids), torch.arange(len(tokens))[None], empty)[0]
            tokens.append(int(logits[0, -1].argmax()))
    return tokens


def main() -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    nn.init.constant_(model.head.bias[END : END + 1].detach(), -1e4)
    prompt, length = [5, 17, 42, 8], 24
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export(model, folder / "model.onnx")
        configure(folder)
        tokens = generate(folder, prompt, length)
    print(tokens)
    assert tokens == expected(model, prompt, length)


if __name__ == "__main__":
    main()
