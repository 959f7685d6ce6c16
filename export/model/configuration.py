"""How many positions a decoder has, by its configuration: transformers' object, or its file beside an ONNX file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir

POSITIONS = "flashonnx:max_positions"  # in the model's metadata


def positions(config: Any) -> int | None:
    """None if the configuration gives no bound.

    With linear or dynamic scaling of rotary embeddings some models name the positions before it: no bound, then.
    """
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = [given for given in rotary.values() if isinstance(given, dict)]
    if {given.get("rope_type", given.get("type")) for given in by_layer or [rotary]} & {"linear", "dynamic"}:
        return None
    count = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return count if isinstance(count, int) and count > 0 else None


def note_positions(model: ir.Model, source: Any) -> None:
    """Notes them in a model from a file, unless it has them: by config.json, which exporters write beside theirs."""
    if POSITIONS in model.metadata_props or not isinstance(source, (str, os.PathLike)):
        return
    try:
        config = json.loads(Path(source).with_name("config.json").read_text(encoding="utf-8"))
        count = positions(SimpleNamespace(**config.get("text_config", config)))
    except (OSError, ValueError, TypeError, AttributeError):  # none, or of something else
        return
    if count is not None:
        model.metadata_props[POSITIONS] = str(count)
