"""The plugin and the TensorRT modules of this process."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from flashonnx._library import LibraryError, library_path

PLUGIN = ("FlashAttention", "1", "flashonnx")  # name, version, namespace
# In the order in which they are tried if none is imported yet.
_MODULES = ("tensorrt", "tensorrt_rtx", "tensorrt_lean")
_RTX_LINK = "libtensorrt_rtx.so"


def register(tensorrt: ModuleType | None = None, *, parser: bool = True) -> None:
    """Makes TensorRT know FlashAttention; again is harmless.

    Args:
        tensorrt: the module `tensorrt`, `tensorrt_rtx` or `tensorrt_lean`. Default: each of them that is imported
            already, else the first that can be.
        parser: whether ONNX models will be parsed in this process, rather than engines only run. TensorRT-RTX's parser
            aborts the process at the first plugin if it does not find a link that its wheel lacks, so that is checked.

    Raises:
        ModuleNotFoundError: there is no TensorRT.
        LibraryError: the library is missing, was built without its TensorRT adapter, or TensorRT refuses it; or
            TensorRT-RTX's link is missing. The message says what to do.
    """
    for module in [tensorrt] if tensorrt is not None else _modules():
        if parser and module.__name__ == "tensorrt_rtx":
            _check_rtx_link()
        if not _is_registered(module):
            _load(module)


def _modules() -> list[ModuleType]:
    imported = [sys.modules[name] for name in _MODULES if name in sys.modules]
    if imported:
        return imported
    for name in _MODULES:
        try:
            return [importlib.import_module(name)]
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ModuleNotFoundError("TensorRT is not installed: pip install tensorrt (or tensorrt-rtx)", name="tensorrt")


def _is_registered(tensorrt: ModuleType) -> bool:
    # Not get_creator: that logs an error if there is none.
    for creator in tensorrt.get_plugin_registry().all_creators:
        if (creator.name, getattr(creator, "plugin_version", None), creator.plugin_namespace) == PLUGIN:
            return True
    return False


def _load(tensorrt: ModuleType) -> None:
    path = library_path()
    if not hasattr(ctypes.CDLL(path), "getCreators"):
        raise LibraryError(
            f"{path} was built without its TensorRT adapter: build it again with FLASHONNX_TENSORRT_INCLUDE_DIR set to "
            "the folder of NvInfer.h"
        )
    if tensorrt.get_plugin_registry().load_library(path) is None or not _is_registered(tensorrt):
        raise LibraryError(
            f"{tensorrt.__name__} {tensorrt.__version__} refused {path}; its log says why (10.3 and later can work)"
        )


def _check_rtx_link() -> None:
    """Does dlopen("libtensorrt_rtx.so") from TensorRT-RTX's parser find the library that Python imported?"""
    import tensorrt_rtx_libs  # of the wheel

    folder = Path(tensorrt_rtx_libs.__file__).parent  # also the parser's RPATH
    if (folder / _RTX_LINK).exists():
        return
    try:
        ctypes.CDLL(_RTX_LINK, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        raise LibraryError(
            f"TensorRT-RTX's ONNX parser opens {_RTX_LINK}, which its wheel lacks, and aborts the process if it is not "
            f"there. Make the link once: ln -s libtensorrt_rtx.so.1 {folder / _RTX_LINK} (or put one to that same file "
            "on LD_LIBRARY_PATH before Python starts). If this process only runs engines: register(parser=False)"
        ) from None
