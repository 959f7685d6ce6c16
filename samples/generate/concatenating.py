"""PyTorch's own export of a decoder: past keys and values go in, and come out joined with the new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


class _Joined(torch.nn.Module):
    """What PyTorch's exporter is given: all keys and values so far go in, and come out longer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, past: list[torch.Tensor]) -> Any:
        cache = transformers.DynamicCache()
        for i in range(len(past) // 2):
            cache.update(past[2 * i], past[2 * i + 1], i)
        out = self.model(input_ids, position_ids=position_ids, past_key_values=cache, use_cache=True)
        return out.logits, [x for layer in out.past_key_values.layers for x in (layer.keys, layer.values)]


def export(model: Any, file: Path) -> None:
    """With PyTorch's exporter."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = [f"past.{i}.{part}" for i in range(config.num_hidden_layers) for part in ("key", "value")]
    past = [torch.zeros(2, config.num_key_value_heads, 5, size, dtype=model.dtype) for _ in names]
    ids = torch.zeros(2, 3, dtype=torch.int64)
    tokens = {0: "batch", 1: "sequence"}
    program = torch.onnx.export(
        _Joined(model).eval(), (ids, ids + 5, past), dynamo=True, verbose=False,
        dynamic_shapes=(tokens, tokens, [{0: "batch", 2: "past"}] * len(past)),
        input_names=["input_ids", "position_ids", *names], output_names=["logits", *(f"new.{name}" for name in names)],
    )  # fmt: skip
    program.save(file)
