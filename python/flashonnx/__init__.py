"""flashonnx: exact fused attention for ONNX Runtime and TensorRT.

    report = flashonnx.export_onnx(model, args, "model.onnx")  # or: model, report = flashonnx.fuse("any.onnx")
    session = flashonnx.session("model.onnx")                  # an onnxruntime.InferenceSession

Importing the package loads nothing heavy: each public name is fetched when it is first used, and only then the packages
it needs (onnx, onnxruntime, torch) are imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashonnx import export as export
    from flashonnx import generate as generate
    from flashonnx import tensorrt as tensorrt
    from flashonnx import torch as torch
    from flashonnx._library import LibraryError as LibraryError
    from flashonnx._library import library_path as library_path
    from flashonnx._runtime import register as register
    from flashonnx._runtime import session as session
    from flashonnx._verify import Verdict as Verdict
    from flashonnx._verify import verify as verify
    from flashonnx.export import Report as Report
    from flashonnx.export import fuse as fuse
    from flashonnx.export import unfuse as unfuse
    from flashonnx.export.pytorch.export import export_onnx as export_onnx

    __version__: str

_PUBLIC = {
    "LibraryError": "flashonnx._library",
    "library_path": "flashonnx._library",
    "register": "flashonnx._runtime",
    "session": "flashonnx._runtime",
    "Verdict": "flashonnx._verify",
    "verify": "flashonnx._verify",
    "Report": "flashonnx.export",
    "fuse": "flashonnx.export",
    "unfuse": "flashonnx.export",
    "export_onnx": "flashonnx.export.pytorch.export",
}

_MODULES = ("export", "generate", "tensorrt", "torch")

__all__ = [*sorted(_PUBLIC), *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _MODULES:
        value = importlib.import_module(f"flashonnx.{name}")
    elif name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
    else:
        raise AttributeError(f"module 'flashonnx' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flashonnx")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0+source"
