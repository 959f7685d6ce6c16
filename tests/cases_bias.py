"""Attention problems whose projections have a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
from cases import Case


def biased(id: str, length: int = 9, **kwargs: Any) -> Case:
    """Self-attention of biased projections."""
    return cases.square(id, length, **{"bias": 1.0, "head_dim": 20, **kwargs})


SMALL = [
    *cases.typed(*(biased(f"layout-{n}", layout=n) for n in cases.LAYOUTS)),
    *cases.typed(
        *(biased(f"past-{n}", layout=n, past=6, is_causal=1, present=True) for n in ("bhsd", "bshd", "3hd", "gqa"))
    ),
    biased("groups-bshd", layout="bshd", heads=(4, 2)),
    biased("groups-gqa", layout="gqa", heads=(6, 2)),
    biased("values-narrower", layout="bhsd", value_dim=12),
    Case("cross", bias=1.0, q_length=5, kv_length=11, heads=(4, 2), head_dim=20, value_dim=24),
    biased("present-without-past", layout="3hd", present=True),
    biased("empty-rows", layout="3hd", is_causal=1, left=2, lengths=(0, 5), lse=True),
    biased("empty-rows-mean", layout="3hd", mask="b1qk", mask_fill="first row", empty_row="mean"),
    biased("sinks", layout="3hd", sinks=True),
    biased("softcap", layout="3hd", softcap=2.0),
    biased("no-keys", layout="bshd", lse=False, empty_row="mean"),
    replace(biased("no-new-keys", layout="bshd"), kv_length=0),
    biased("no-tokens", 0, layout="3hd_flat"),
]


# Of Hopper's kernels: head sizes of each tiling and between them, over several tiles of queries and keys.
DIMS = ((64, 64), (40, 40), (96, 96), (128, 128), (72, 104), (192, 192), (192, 128), (256, 256), (224, 224))
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": 1},
    "window": {"left": 100, "right": 30},
    "lengths": {"lengths": (0, 210)},
    "lengths-mean": {"lengths": (70, 5), "is_causal": 1, "empty_row": "mean"},
    "empty-rows-mean": {"is_causal": 1, "lengths": (310, 130), "left": 20, "empty_row": "mean"},
    "many-heads": {"heads": (12, 4)},
    "lse": {"lse": True},
    "sinks": {"sinks": True},
    "mask": {"mask": "b11k", "mask_fill": "padding"},
    "biased-scores": {"mask": "b1qk", "mask_dtype": "T"},
}
# Where the bias of K counts, or kernels that see to biases do not: sums are made before.
BEFORE = ("lse", "sinks", "mask", "biased-scores")


def tiled(form: str, dims: tuple[int, int], dtype: str, layout: str, **more: Any) -> Case:
    given = {"heads": (4, 2), **FORMS[form], **more}
    if layout in ("3hd", "h3d"):
        given["heads"] = (given["heads"][0],) * 2
    value_dim = dims[1] if layout in ("bshd", "bhsd") else None
    sizes = {"q_length": 310, "kv_length": 310, "head_dim": dims[0], "value_dim": value_dim}
    id = f"{form}-{dims[0]}x{dims[1]}-{dtype}-{layout}"
    return Case(id, dtype=dtype, layout=layout, **{"bias": 1.0, "lse": False, "gpu": True, **sizes, **given})


TILED = [
    *(tiled(form, dims, "float16", "bshd") for form in FORMS for dims in (DIMS if form not in BEFORE else DIMS[:1])),
    *(tiled(form, (dim, dim), "bfloat16", "3hd") for form in FORMS for dim in (64, 96, 128)),
    *(tiled(form, (64, 64), "float16", layout) for form in FORMS for layout in ("3hd", "h3d", "gqa")),
]
