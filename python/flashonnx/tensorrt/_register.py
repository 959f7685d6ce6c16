"""The plugin and the TensorRT modules of this process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from pathlib import Path
from types import ModuleType

from flashonnx._library import LibraryError, library_path

PLUGIN = ("FlashAttention", "1", "flashonnx")  # name, version, namespace
# In the order in which they are tried if none is imported yet.
_MODULES = ("tensorrt", "tensorrt_rtx", "tensorrt_lean")
_RTX_LINK = "libtensorrt_rtx.so"
_AUTOLOAD = "libflashonnx_trt_autoload.so"
_NO_ADAPTER = (
    "built without the TensorRT adapter: build it again with CUDA and FLASHONNX_TENSORRT_INCLUDE_DIR set to the folder "
    "of NvInfer.h"
)


def register(tensorrt: ModuleType | None = None, *, parser: bool = True) -> None:
    """Makes TensorRT know FlashAttention; again is harmless.

    Args:
        tensorrt: the module `tensorrt`, `tensorrt_rtx` or `tensorrt_lean`. Default: each of them that is imported
            already, else the first that can be.
        parser: whether ONNX models will be parsed in this process, rather than engines only run. TensorRT-RTX's parser
            aborts the process at the first plugin if it does not find a file that its wheel lacks, so that is provided.

    Raises:
        ModuleNotFoundError: there is no TensorRT.
        LibraryError: the library is missing, was built without its TensorRT adapter, or TensorRT refuses it. The
            message says what to do.
    """
    for module in [tensorrt] if tensorrt is not None else modules():
        is_new = not _is_registered(module)
        if is_new:
            _check_adapter()
        if parser and module.__name__ == "tensorrt_rtx":
            _provide_rtx_link()
        if is_new:
            _load(module)


def autoload_path() -> str:
    """The library for hosts that can open a plugin library, and no more: opening it registers the plugin.

    Polygraphy's `--plugins`, trtexec's `--staticPlugins` and ONNX Runtime's `trt_extra_plugin_lib_paths` want it.
    TensorRT has to be in the process before it is opened. Never give it to TensorRT's `load_library`, nor to
    `plugins_to_serialize`: those take `flashonnx.library_path()`.

    Raises:
        LibraryError: the library is missing, or was built without its TensorRT adapter.
    """
    path = Path(library_path()).with_name(_AUTOLOAD)
    if not path.is_file():
        raise LibraryError(f"there is no {path}: flashonnx is {_NO_ADAPTER}")
    return str(path)


def modules() -> list[ModuleType]:
    """The TensorRT modules that are imported, else the first that can be; never an empty list."""
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


def last_plugin_error() -> str:
    """The plugin's latest refusal since the last call, whichever logger it went to; empty if there was none."""
    from flashonnx._capi import Status

    function = ctypes.CDLL(library_path()).flashonnx_tensorrt_last_error
    function.restype = Status
    return str(function().message.decode())


def _is_registered(tensorrt: ModuleType) -> bool:
    # Not get_creator: that logs an error if there is none.
    for creator in tensorrt.get_plugin_registry().all_creators:
        if (creator.name, getattr(creator, "plugin_version", None), creator.plugin_namespace) == PLUGIN:
            return True
    return False


def _check_adapter() -> None:
    if not hasattr(ctypes.CDLL(library_path()), "getCreators"):
        raise LibraryError(f"{library_path()} is {_NO_ADAPTER}")


def _load(tensorrt: ModuleType) -> None:
    path = library_path()
    if tensorrt.get_plugin_registry().load_library(path) is None or not _is_registered(tensorrt):
        raise LibraryError(
            f"{tensorrt.__name__} {tensorrt.__version__} refused {path}; its log says why (10.3 and later can work)"
        )


def _provide_rtx_link() -> None:
    """Lets dlopen("libtensorrt_rtx.so") of TensorRT-RTX's parser find the library that Python imported."""
    import tensorrt_rtx_libs  # of the wheel

    folder = Path(tensorrt_rtx_libs.__file__).parent  # also the parser's RPATH
    if (folder / _RTX_LINK).exists():
        return
    with contextlib.suppress(OSError):
        ctypes.CDLL(_RTX_LINK)  # on LD_LIBRARY_PATH, or provided before
        return
    ours = Path(library_path()).parent / "rtx" / _RTX_LINK  # an empty library that depends on libtensorrt_rtx.so.1
    try:
        ctypes.CDLL(str(ours))
    except OSError as error:
        raise LibraryError(
            f"TensorRT-RTX's ONNX parser opens {_RTX_LINK}, which its wheel lacks, and aborts the process if it is not "
            f"there; flashonnx's own could not be loaded ({error}). Make a link once: ln -s libtensorrt_rtx.so.1 "
            f"{folder / _RTX_LINK}. If this process only runs engines: register(parser=False)"
        ) from None
