"""A token by its logits: the greatest, or one that is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def choose(logits: NDArray[Any], temperature: float, top_k: int, random: np.random.Generator) -> int:
    """A token by its logits, (words,) of float32 or float16."""
    if not temperature:
        token = int(_ordered(logits).argmax())
        finite = np.isfinite(logits[token])
    else:
        scaled = logits.astype(np.float64) / temperature
        kept = np.argpartition(scaled, -top_k)[-top_k:] if 0 < top_k < len(scaled) else np.arange(len(scaled))
        kept.sort()  # what is drawn does not depend on how they were found
        weights = np.exp(scaled[kept] - scaled[kept].max()).cumsum()
        finite = np.isfinite(weights[-1])
        token = int(kept[min(np.searchsorted(weights, random.random() * weights[-1], "right"), len(kept) - 1)])
    if not finite:
        raise FloatingPointError("Generator: the model's logits are expected to be finite, got NaN or infinity")
    return token


def _ordered(logits: NDArray[Any]) -> NDArray[Any]:
    """Numbers in the order of the logits. NumPy compares float16 slowly; their bits are integers almost in order."""
    if logits.dtype != np.float16:
        return logits
    bits = np.ascontiguousarray(logits).view(np.int16)
    return np.asarray(bits ^ ((bits >> 15) & 0x7FFF))
