"""A model of transformers in a folder, with example inputs of its kind and names for what may vary."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SIZES = {"batch": 2, "sequence": 16}


def example(folder: str, class_name: str | None, sizes: Mapping[str, int], dtype: str | None = None) -> dict[str, Any]:
    """Arguments of export_onnx: the model in eval mode, its inputs as `kwargs`, `dynamic_shapes`.

    Args:
        folder: as `save_pretrained` writes it, with config.json and weights.
        class_name: of transformers; default: the first architecture that the configuration names.
        sizes: of the example inputs, "batch" and "sequence".
        dtype: of the weights; default: as the folder has them.

    Raises:
        ValueError: there is no such folder or class, or its inputs are not known here.
        ImportError: transformers is not installed.
    """
    unknown = sorted(set(sizes) - set(_SIZES))
    if unknown:
        raise ValueError(f"export: --size is expected to name {' or '.join(_SIZES)}, got '{unknown[0]}'")
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(
            f"export: hf: is expected to name a folder with a config.json, '{folder}' has none (download it first: "
            f"hf download NAME --local-dir FOLDER)"
        )
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"export: hf: needs transformers: pip install transformers ({error})") from error
    transformers.utils.logging.disable_progress_bar()
    config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    name = class_name or next(iter(config.architectures or ()), "AutoModel")
    kind = getattr(transformers, name, None)
    if kind is None:
        raise ValueError(f"export: transformers {transformers.__version__} has no class {name}; choose one by --class")
    # Not by model.to(), which would also round the inverse frequencies of rotary embeddings.
    model = kind.from_pretrained(folder, local_files_only=True, config=config, dtype=dtype or "auto").eval()
    for module in model.modules():  # torch.export takes no cache as an output
        part = getattr(module, "config", None)
        if part is not None and hasattr(part, "use_cache"):
            part.use_cache = False
    if hasattr(model, "set_experts_implementation"):  # there is no operator of ONNX for the default
        model.set_experts_implementation("batched_mm")
    inputs, axes = _inputs(model, _SIZES | dict(sizes))
    inputs = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    return {"model": model, "kwargs": inputs, "dynamic_shapes": axes}


def _inputs(model: Any, sizes: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    config: Any = model.config
    taken = set(inspect.signature(model.forward).parameters)
    batch, length = sizes["batch"], sizes["sequence"]
    text: Any = getattr(config, "text_config", config)
    vocabulary = getattr(text, "vocab_size", 2)
    generator = torch.Generator().manual_seed(0)

    def tokens(prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
        axis = f"{prefix}sequence"
        ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
        made = {f"{prefix}input_ids": ids, f"{prefix}attention_mask": torch.ones(batch, length, dtype=torch.int64)}
        made = {name: x for name, x in made.items() if name in taken}
        return made, {name: {0: "batch", 1: axis} for name in made}

    inputs: dict[str, Any] = {}
    axes: dict[str, Any] = {}
    if "pixel_values" in taken:
        shape = (batch, *_image(config))
        inputs["pixel_values"], axes["pixel_values"] = torch.randn(shape, generator=generator), {0: "batch"}
    if "input_features" in taken:
        bins, frames = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)
        inputs["input_features"] = torch.randn((batch, bins, frames), generator=generator)
        axes["input_features"] = {0: "batch"}
    elif "input_values" in taken and config.model_type == "audio-spectrogram-transformer":
        spectrogram = (batch, config.max_length, config.num_mel_bins)
        inputs["input_values"], axes["input_values"] = torch.randn(spectrogram, generator=generator), {0: "batch"}
    elif "input_values" in taken and model.main_input_name == "input_values":
        inputs["input_values"] = torch.randn((batch, 16000), generator=generator)
        axes["input_values"] = {0: "batch", 1: "samples"}
    if "input_ids" in taken:
        made, named = tokens("")
        if "token_type_ids" in taken and getattr(config, "type_vocab_size", None):
            made["token_type_ids"] = torch.zeros(batch, length, dtype=torch.int64)
            named["token_type_ids"] = {0: "batch", 1: "sequence"}
        inputs, axes = inputs | made, axes | named
    if "decoder_input_ids" in taken and getattr(config, "is_encoder_decoder", False):
        made, named = tokens("decoder_")
        made.pop("decoder_attention_mask", None), named.pop("decoder_attention_mask", None)
        inputs, axes = inputs | made, axes | named
    if not inputs:
        raise ValueError(
            f"export: no example inputs are known for {type(model).__name__}, which takes {', '.join(sorted(taken))}: "
            "write a function that makes them (module:function)"
        )
    return inputs, axes


def _image(config: Any) -> tuple[int, int, int]:
    """Channels, height and width."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return getattr(vision, "num_channels", 3), height, width
