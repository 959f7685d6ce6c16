"""The models, as data: transformers' classes with the sizes of well-known models, and weights drawn at random."""

from __future__ import annotations

import dataclasses
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SPREAD = 0.02  # standard deviation of the weights, as their initialisation has it
LIMIT = 1 << 15  # elements; a smaller parameter stays in the graph, with its values

_BERT = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 12}
_VIT = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 24}
_LLAMA = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
_TINY = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model at one input size.

    Attributes:
        name: in files, in results, for --only.
        family: "bert", "vit" or "llama"; subjects of one family and size share their weights.
        batch: sentences or images.
        length: tokens of a sentence; for images the side, in pixels.
        config: arguments of transformers' configuration.
        dtype: of weights and activations, by PyTorch's name.
        spread: standard deviation of the weights.
        padded: whether a mask, where there is one, hides the last half of all sentences but the first.
    """

    name: str
    family: str
    batch: int
    length: int
    config: dict[str, Any]
    dtype: str = "float16"
    spread: float = SPREAD
    padded: bool = False

    @property
    def weights(self) -> str:
        """Subjects with the same parameters share this file."""
        return f"{self.name.split('-')[0]}.{self.config['num_hidden_layers']}.{self.dtype}.data"

    @property
    def heads(self) -> tuple[int, int]:
        """Heads of queries, and of keys and values."""
        count = self.config["num_attention_heads"]
        return count, self.config.get("num_key_value_heads", count)

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.config.get("head_dim", self.config["hidden_size"] // self.heads[0])

    @property
    def tokens(self) -> int:
        """How many each sequence has: a ViT's are patches of 16 pixels, and one more."""
        return (self.length // self.config.get("patch_size", 16)) ** 2 + 1 if self.family == "vit" else self.length

    def small(self) -> Subject:
        """Two layers of the same width in float32 on few tokens, for comparison on a CPU.

        Its weights are large enough for attention to be far from uniform.
        """
        config = {**self.config, "num_hidden_layers": 2, "vocab_size": 1000}
        length = self.length if self.family == "vit" else min(self.length, 48)
        return dataclasses.replace(
            self,
            batch=min(self.batch, 2),
            length=length,
            config=config,
            dtype="float32",
            spread=5 * SPREAD,
            padded=True,
        )

    def inputs(self) -> dict[str, torch.Tensor]:
        """Random inputs by name."""
        import torch

        draw = torch.Generator().manual_seed(1)
        if self.family == "vit":
            shape = (self.batch, 3, self.length, self.length)
            return {"pixel_values": torch.randn(shape, generator=draw).to(getattr(torch, self.dtype))}
        vocabulary = self.config.get("vocab_size", 30522)
        ids = torch.randint(0, vocabulary, (self.batch, self.length), generator=draw)
        if self.family == "llama":
            return {"input_ids": ids}
        mask = torch.ones_like(ids)
        if self.padded:
            mask[1:, self.length // 2 :] = 0
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}

    def module(self, attention: str = "sdpa", *, values: bool = True) -> torch.nn.Module:
        """The model, from the inputs in their order to one tensor: hidden states, or the last token's logits.

        Args:
            attention: transformers' implementation.
            values: whether matrices get their random values; without, their memory is never touched.
        """
        return _wrap(self, _build(self, attention, values))


def _bert(name: str, batch: int, length: int) -> Subject:
    return Subject(f"{name}-b{batch}-s{length}", "bert", batch, length, {**_BERT, "vocab_size": 30522})


def _llama(length: int) -> Subject:
    return Subject(f"llama1b-s{length}", "llama", 1, length, _LLAMA)


SUBJECTS = (
    _bert("bert", 8, 512),
    _bert("bert", 32, 128),
    Subject("vitl16-b16", "vit", 16, 224, {**_VIT, "image_size": 224, "patch_size": 16}),
    _llama(2048),
    _llama(8192),
)
# For tests alone.
TINY = (
    Subject("tinybert-b2-s24", "bert", 2, 24, {**_TINY, "vocab_size": 1000}),
    Subject("tinyvit-b2", "vit", 2, 32, {**_TINY, "image_size": 32, "patch_size": 8}),
    Subject(
        "tinyllama-s24",
        "llama",
        1,
        24,
        {**_LLAMA, **_TINY, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000},
    ),
)


def select(patterns: str) -> list[Subject]:
    """Subjects whose name matches one of the patterns, which commas divide; all real ones for "".

    Raises:
        ValueError: a pattern matches none.
    """
    from fnmatch import fnmatchcase

    if not patterns:
        return list(SUBJECTS)
    chosen: list[Subject] = []
    for pattern in patterns.split(","):
        found = [subject for subject in (*SUBJECTS, *TINY) if fnmatchcase(subject.name, pattern)]
        if not found:
            names = ", ".join(subject.name for subject in SUBJECTS)
            raise ValueError(f"no model is named {pattern!r}; there are {names}")
        chosen += [subject for subject in found if subject not in chosen]
    return chosen


def _build(subject: Subject, attention: str, values: bool) -> torch.nn.Module:
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    kinds = {"bert": ("Bert", "Model"), "vit": ("ViT", "Model"), "llama": ("Llama", "ForCausalLM")}
    prefix, suffix = kinds[subject.family]
    config = getattr(transformers, f"{prefix}Config")(**subject.config)
    config._attn_implementation = attention
    extra = {} if subject.family == "llama" else {"add_pooling_layer": False}
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, subject.dtype))
    try:
        with no_init_weights():
            model = getattr(transformers, prefix + suffix)(config, **extra).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # the same whatever else gets values
            parameter.requires_grad_(False)
            if parameter.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
                parameter.fill_(1)
            elif values or parameter.numel() < LIMIT:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * subject.spread)
    return model


def _wrap(subject: Subject, model: torch.nn.Module) -> torch.nn.Module:
    import torch

    class Bert(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            out = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
            return out.last_hidden_state

    class ViT(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixel_values: Any) -> Any:
            return self.model(pixel_values=pixel_values).last_hidden_state

    class Llama(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any) -> Any:
            return self.model(input_ids=input_ids, logits_to_keep=1).logits

    return {"bert": Bert, "vit": ViT, "llama": Llama}[subject.family]().eval()
