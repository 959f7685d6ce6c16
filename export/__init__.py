"""From any ONNX model to fused attention nodes: fuse(), unfuse() and their report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashonnx.export.fusion import fuse
from flashonnx.export.reports.explanation import explain
from flashonnx.export.reports.report import Report, Site
from flashonnx.export.unfusion import unfuse

if TYPE_CHECKING:
    from flashonnx.export.pytorch.export import export_onnx as export_onnx

__all__ = ["Report", "Site", "explain", "export_onnx", "fuse", "unfuse"]


def __getattr__(name: str) -> Any:
    if name == "export_onnx":  # torch is imported only by those who export
        from flashonnx.export.pytorch.export import export_onnx

        return export_onnx
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
