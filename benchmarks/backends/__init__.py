"""Everything that is compared, one file each; `every()` lists them in the order in which they take turns."""

from __future__ import annotations

from benchmarks.backends.base import Backend
from benchmarks.backends.flash_attention4 import FlashAttention4
from benchmarks.backends.onnx_runtime import Session
from benchmarks.backends.ours import Ours
from benchmarks.backends.sdpa import Sdpa
from benchmarks.backends.step import Step


def every() -> list[Backend]:
    """New instances of all backends."""
    return [
        Ours(),
        Ours("ours-unmasked", masked=False),
        Ours("ours-sm80", arch=80),
        Step("ours-step"),
        *(Step(f"ours-pages-{size}", size) for size in (256, 64, 16, 1)),
        Sdpa("FA2", "FLASH_ATTENTION"),
        Sdpa("cuDNN", "CUDNN_ATTENTION"),
        Sdpa("mem-eff", "EFFICIENT_ATTENTION"),
        FlashAttention4(),
        Session("ORT-ours", "flashonnx", ours=True),
        Session("ORT-ours-pages", "flashonnx_pages", ours=True),
        Session("ORT-Attention", "attention"),
        Session("ORT-MHA", "multi_head_attention"),
        Session("ORT-GQA", "group_query_attention"),
        Session("ORT-paged", "paged_attention"),
        Session("ORT-unfused", "unfused"),
    ]


def select(backends: list[Backend], names: str) -> list[Backend]:
    """Those whose names stand in `names`, separated by commas; empty: all.

    Raises:
        ValueError: a name is none of theirs.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {backend.name.lower(): backend for backend in backends}
    for name in wanted:
        if name.lower() not in known:
            raise ValueError(f"--backends: there is no '{name}', only {', '.join(b.name for b in backends)}")
    return [backend for backend in backends if not wanted or backend.name.lower() in [n.lower() for n in wanted]]
