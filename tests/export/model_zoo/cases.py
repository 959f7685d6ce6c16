"""Which exports the zoo consists of."""

from __future__ import annotations

from collections.abc import Iterator

import transformers_models

from model_zoo import modules, pairs, text, vision
from model_zoo.check import OURS, Case
from model_zoo.entry import Entry

FAMILIES: dict[str, tuple[Entry, ...]] = {
    "text": text.ENTRIES,
    "pairs": pairs.ENTRIES,
    "vision": vision.ENTRIES,
    "modules": modules.ENTRIES,
}
# One of each kind, where all would take too long: at opset 23 scaled_dot_product_attention is ONNX's Attention, eager
# attention looks as in TorchScript's graphs but for its shapes, 16 bits and fixed axes are the same graphs otherwise.
_AT_23 = {"bert", "gpt2", "llama", "mistral", "llama_past", "t5", "clip", "vit", "sam_vision", "nn.TransformerDecoder",
          "sdpa_causal"}  # fmt: skip
_EAGER_TOO = {"bert", "gpt2", "llama", "llama_past", "t5", "clip", "swin", "sam_vision", "timm vit_tiny_patch16_224",
              "diffusers UNet"}  # fmt: skip
_HALF = {"bert", "llama", "gemma2", "vit"}
_BFLOAT16 = {"bert", "llama"}
_FIXED = {"bert", "llama", "llama_past", "timm vit_tiny_patch16_224"}
# Other tests send these through export_onnx, and look closer (test_transformers_route).
_ELSEWHERE = {family.id for family in transformers_models.FAMILIES} - {"bert", "t5"}
# What takes no more than seconds: TorchScript's exporter, or a single layer.
EVERYDAY = frozenset(
    [
        "bert-eager-TorchScript",
        "llama-sdpa-TorchScript",
        "mistral_past-eager-TorchScript",
        "gemma2-eager-TorchScript",
        "t5-eager-TorchScript",
        "bart-sdpa-TorchScript",
        "vit-sdpa-TorchScript",
        "swin-eager-TorchScript",
        "nanoGPT-eager-torch_18",
        "einsum-eager-torch_18",
        "baddbmm-eager-torch_18",
        "softcap-eager-export_onnx",
        "sdpa_causal-sdpa-export_onnx",
    ]
)


def _of(entry: Entry) -> Iterator[Case]:
    first, last = entry.attentions[0], entry.attentions[-1]
    for attention in entry.attentions:
        yield Case(entry, attention, "TorchScript")
        if attention == first or entry.id in _EAGER_TOO:
            yield Case(entry, attention, "torch 18")
    if entry.id in _AT_23:
        yield Case(entry, first, "torch 23")
    if entry.id not in _ELSEWHERE:
        yield Case(entry, first, OURS)
    if entry.id in _HALF:
        for attention in entry.attentions:
            yield Case(entry, attention, "TorchScript", "float16")
    if entry.id in _BFLOAT16:
        yield Case(entry, last, "torch 18", "float16")
        yield Case(entry, first, "torch 18", "bfloat16")
    if entry.id in _FIXED:
        yield Case(entry, first, "torch 18", fixed=True)
        yield Case(entry, last, "TorchScript", fixed=True)


def cases(family: str | None = None) -> list[Case]:
    """Every export, or those of one family, what its exporter cannot do left out."""
    entries = [entry for name, group in FAMILIES.items() if family in (None, name) for entry in group]
    return [case for entry in entries for case in _of(entry) if case.route not in entry.cannot]
